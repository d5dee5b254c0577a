"""Offline tuning of the portable Triton kernels: measures candidate tiles on this device and shows the change to their table.

Compilation dominates, so worker processes first compile the candidates into Triton's cache; then one process times them, each beside
the table's present choice. A candidate counts only if its results pass the benchmark's float64 check.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import itertools
import json
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .. import plan
from ..kernels.triton import configs
from ..kernels.triton.configs import DKDV, DQ, FORWARD, Config
from .cases import Case
from .check import Oracle
from .peers import find
from .provider import Inputs, Prepared
from .report import rate
from .timing import CudaClock, Samples, Sensors

PURPOSES = (FORWARD, DKDV, DQ)
Key = tuple[str, int, str]  # architecture, bits of the dtype, purpose


@dataclass(frozen=True, slots=True)
class Trial:
    """One entry of the table and what to put in its place."""

    key: Key
    dim: int
    config: Config

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """The table with this entry replaced, for as long as the context lasts."""
        row = configs.TABLE[self.key]
        before = row[self.dim]
        row[self.dim] = self.config
        configs.choose.cache_clear()
        try:
            yield
        finally:
            row[self.dim] = before
            configs.choose.cache_clear()


@dataclass(slots=True)
class Measured:
    """A trial's outcome: milliseconds by mask, or why there are none."""

    trial: Trial
    ms: dict[str, float]
    reason: str = ""

    @property
    def score(self) -> float:
        """Geometric mean over the masks; infinite where it failed."""
        return statistics.geometric_mean(self.ms.values()) if self.ms and not self.reason else float("inf")


def candidates(key: Key, dim: int, shared_limit: int) -> list[Config]:
    """Tiles worth trying, those that differ least from the table's first; all fit the shared memory and, roughly, the registers."""
    _, bits, purpose = key
    present = configs.TABLE[key][dim]
    blocks_m, blocks_n = [m for m in (32, 64, 128, 256) if m <= configs.ROW_BLOCK], (32, 64, 128)
    descriptors = (True, False) if present.descriptors else (False,)
    every = itertools.product(blocks_m, blocks_n, (4, 8), (1, 2, 3, 4), descriptors)

    def fits(config: Config) -> bool:
        rows = config.block_n if purpose == DKDV else config.block_m
        accumulators = (2 if purpose == DKDV else 1) * rows * dim + config.block_m * config.block_n
        registers = accumulators / (config.num_warps * 32)
        return registers <= 224 and configs.shared_bytes(config, bits, purpose, dim, dim) <= shared_limit

    def distance(config: Config) -> int:
        steps = sum(abs(a.bit_length() - b.bit_length()) for a, b in zip(astuple(config)[:3], astuple(present)[:3], strict=True))
        return steps + abs(config.num_stages - present.num_stages) + (config.descriptors != present.descriptors)

    chosen = {Config(*values) for values in every} - {present}
    return [present, *sorted(filter(fits, chosen), key=lambda c: (distance(c), astuple(c)))]


def _case(key: Key, dim: int, causal: bool, seqlen: int = 0) -> Case:
    """The problem that stands for an entry: 16,384 tokens and heads x dim = 2048, as in the paper's grid; fp32 at a quarter."""
    long = seqlen or (16384 if key[1] == 16 else 4096)
    mask = "causal" if causal else "full"
    pass_ = "fwd" if key[2] == FORWARD else "bwd"
    dtype = "bf16" if key[1] == 16 else "fp32"
    return Case("tune", mask, long, 2048 // dim, dim, causal=causal, dtype=dtype, passes=(pass_,))


def _prepare(case: Case, inputs: Inputs) -> Prepared:
    (provider,), _ = find("tilewise:triton", "cuda")
    return provider.prepare(case, inputs)


def _results(case: Case, inputs: Inputs) -> tuple[Any, dict[str, torch.Tensor]]:
    """The call to time and its results by name."""
    call = _prepare(case, inputs).call
    if case.passes == ("fwd",):

        def forward() -> torch.Tensor:
            with torch.no_grad():
                return call(inputs.q, inputs.k, inputs.v)

        return forward, {"out": forward()}
    leaves = inputs.leaves()
    out = call(*leaves)

    def backward() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True)

    return backward, dict(zip(("dq", "dk", "dv"), backward(), strict=True))


def compile_trial(trial: Trial) -> str:
    """Compiles a trial's kernels on a short problem (lengths are no part of a kernel) and returns why not, or nothing."""
    try:
        with trial.in_force():
            for causal in (False, True):
                case = _case(trial.key, trial.dim, causal, seqlen=512)
                _results(replace(case, heads=1, kv_heads=1), Inputs.make(replace(case, heads=1, kv_heads=1)))
            torch.cuda.synchronize()
    except Exception as error:  # out of resources, a compiler's failure: a candidate less
        return f"{type(error).__name__}: {error}".splitlines()[0][:160]
    return ""


def measure(trials: list[Trial], reasons: dict[Trial, str], deadline: float) -> list[Measured]:
    """Times the trials of one entry in rounds, every one beside the others, and checks each."""
    clock = CudaClock(Sensors(), 20)
    found = [Measured(trial, {}, reasons.get(trial, "not compiled in time")) for trial in trials]
    for causal in (False, True):
        case = _case(trials[0].key, trials[0].dim, causal)
        inputs = Inputs.make(case)
        oracle = Oracle(case, inputs, gradients=case.passes != ("fwd",))
        calls: list[tuple[Measured, Any, Samples]] = []
        for one in found:
            if one.reason or time.monotonic() > deadline:
                continue
            with one.trial.in_force():
                call, results = _results(case, inputs)
            error, right = oracle.judge(results)
            if right:
                calls.append((one, call, Samples()))
            else:
                one.reason = f"wrong: relative error {error:.1e}"
        for _ in range(3):
            for one, call, samples in calls:
                with one.trial.in_force():
                    clock.round(call, samples)
        for one, _, samples in calls:
            one.ms[case.label] = samples.quartiles()[0]
        clock.forget()
    for one in found:
        if not one.reason and len(one.ms) < 2:
            one.reason = "budget spent"
    return found


def tune(keys: list[tuple[Key, int]], most: int, workers: int, budget: float) -> dict[tuple[Key, int], list[Measured]]:
    """Measures at most `most` candidates for each entry of the table, best first; the present choice is always among them."""
    begin = time.monotonic()
    limit = configs.shared_limit(plan.target_of(torch.device("cuda", torch.cuda.current_device())))
    plans = {entry: [Trial(*entry, config) for config in candidates(*entry, limit)[:most]] for entry in keys}
    every = [trial for trials in itertools.zip_longest(*plans.values()) for trial in trials if trial is not None]
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    futures = {trial: pool.submit(compile_trial, trial) for trial in every}
    done, late = wait(futures.values(), timeout=0.5 * budget)
    reasons = {trial: future.result() for trial, future in futures.items() if future in done and future.exception() is None}
    for future in late:
        future.cancel()
    pool.shutdown(wait=False, cancel_futures=True)
    print(f"{len(done)} of {len(every)} candidates compiled in {time.monotonic() - begin:.0f} s", flush=True)
    outcome: dict[tuple[Key, int], list[Measured]] = {}
    for index, (entry, trials) in enumerate(plans.items()):
        left = begin + budget - time.monotonic()
        share = time.monotonic() + left / (len(plans) - index)
        outcome[entry] = sorted(measure(trials, reasons, share), key=lambda one: one.score)
        print(table(entry, outcome[entry]), flush=True)
    return outcome


def table(entry: tuple[Key, int], found: list[Measured], most: int = 8) -> str:
    """The best trials of an entry, the present choice marked."""
    (arch, bits, purpose), dim = entry
    present = configs.TABLE[entry[0]][dim]
    lines = [f"\n{arch} {bits} bits {purpose} d{dim}: TFLOP/s full, causal"]
    shown = found[:most] + [one for one in found[most:] if one.trial.config == present]
    for one in shown:
        mark = "*" if one.trial.config == present else " "
        speeds = [
            rate(_case(one.trial.key, dim, m == "causal").flops("fwd" if purpose == FORWARD else "bwd") / ms / 1e9)
            for m, ms in one.ms.items()
        ]
        lines.append(f" {mark} {_text(one.trial.config):40} {'  '.join(speeds):20} {one.reason}")
    failed = sum(bool(one.reason) for one in found)
    return "\n".join([*lines, f"   {len(found)} tried, {failed} without a result"])


def _text(config: Config) -> str:
    fields = [str(value) for value in astuple(config)[:4]] + (["True"] if config.descriptors else [])
    return f"Config({', '.join(fields)})"


def rewritten(source: str, changes: dict[tuple[Key, int], Config]) -> str:
    """The text of `configs.py` with these entries of its table replaced and nothing else touched."""
    lines = source.splitlines(keepends=True)
    offsets = [0, *itertools.accumulate(len(line.encode()) for line in lines)]
    text = source.encode()
    edits: list[tuple[int, int, bytes]] = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "TABLE"):
            continue
        assert isinstance(node.value, ast.Dict)
        for key, row in zip(node.value.keys, node.value.values, strict=True):
            assert isinstance(key, ast.Tuple) and isinstance(row, ast.Dict)
            arch, bits, purpose = key.elts
            assert isinstance(arch, ast.Constant) and isinstance(bits, ast.Constant) and isinstance(purpose, ast.Name)
            for dim, config in zip(row.keys, row.values, strict=True):
                assert isinstance(dim, ast.Constant) and config.end_lineno is not None and config.end_col_offset is not None
                change = changes.get(((str(arch.value), int(str(bits.value)), getattr(configs, purpose.id)), int(str(dim.value))))
                if change is not None:
                    start = offsets[config.lineno - 1] + config.col_offset
                    edits.append((start, offsets[config.end_lineno - 1] + config.end_col_offset, _text(change).encode()))
    assert len(edits) == len(changes), "an entry that was tuned stands in no literal of the table"
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    return text.decode()


def main(arguments: list[str] | None = None) -> int:
    """Entry point of `python -m tilewise.bench tune`; returns the exit status."""
    p = argparse.ArgumentParser("tilewise tune", description="Measure tiles for the portable Triton kernels on this device.")
    p.add_argument("--dims", default="64,128,256", help="padded head dims: entries of the table")
    p.add_argument("--purposes", default=",".join(PURPOSES), help=f"of {', '.join(PURPOSES)}")
    p.add_argument("--bits", type=int, default=16, choices=[16, 32])
    p.add_argument("--most", type=int, default=24, help="candidates for each entry")
    p.add_argument("--workers", type=int, default=12, help="processes that compile")
    p.add_argument("--budget", type=float, default=240, help="seconds")
    p.add_argument("--gain", type=float, default=0.01, help="a change must be faster by this share")
    p.add_argument("--out", type=Path, default=None, help="file for every measurement, JSON lines")
    p.add_argument("--write", action="store_true", help="rewrite the table in place; else only show the change")
    p.add_argument("--json", action="store_true", help="print the measurements as JSON lines after the tables")
    args = p.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("tuning needs a GPU that torch sees")
    arch = configs.architecture(plan.target_of(torch.device("cuda", torch.cuda.current_device())))
    keys = [((arch, args.bits, purpose), int(dim)) for purpose in args.purposes.split(",") for dim in args.dims.split(",")]
    absent = [f"{purpose} d{dim}" for (_, _, purpose), dim in keys if dim not in configs.TABLE.get((arch, args.bits, purpose), {})]
    if absent:
        raise SystemExit(f"the table of {arch} has no entry for {', '.join(absent)}")
    outcome = tune(keys, args.most, args.workers, args.budget)
    changes: dict[tuple[Key, int], Config] = {}
    for entry, found in outcome.items():
        present = next(one for one in found if one.trial.config == configs.TABLE[entry[0]][entry[1]])
        if found[0].score < (1 - args.gain) * present.score:
            changes[entry] = found[0].trial.config
    measured = [
        json.dumps(dict(arch=arch, bits=bits, purpose=purpose, dim=dim, config=astuple(one.trial.config), ms=one.ms, reason=one.reason))
        for ((arch, bits, purpose), dim), found in outcome.items()
        for one in found
    ]
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text("".join(line + "\n" for line in measured))
    if args.json:
        print("\n".join(measured))
    path = Path(configs.__file__)
    old = path.read_text()
    new = rewritten(old, changes)
    print("".join(difflib.unified_diff(old.splitlines(True), new.splitlines(True), "configs.py", "configs.py, tuned", n=0)) or "no change")
    if args.write:
        path.write_text(new)
    return 0
