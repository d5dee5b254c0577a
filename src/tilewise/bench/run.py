"""Runs cases: every provider on the same inputs in one process, checked, then timed in interleaved rounds."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..cost import extra_bytes, output_bytes, unfused_bytes
from . import child
from .cases import Case, select
from .check import Oracle
from .peers import find
from .provider import Inputs, Prepared, Provider, Unsupported
from .report import Reporter, closing_tables
from .source_hash import kernel_source_hash
from .step import StepOracle, Training
from .timing import CudaClock, HostClock, Samples, Sensors, WallClock, ceilings

Row = dict[str, Any]
QUADRATIC = ("eager", "sdpa_math")  # providers that hold N x N matrices
CPU_BUDGET = 100.0  # seconds: everything there takes many minutes on a small machine


@dataclass(slots=True)
class Options:
    """How a benchmark runs. `budget` is in seconds for everything, imports excluded; None has no end."""

    cases: str = ""
    providers: str = ""
    passes: str = ""
    device: str = ""
    rounds: int = 5
    round_ms: float = 30.0
    budget: float | None = None
    out: Path | None = None
    seed: int = 0


def balanced_orders(size: int) -> list[list[int]]:
    """Orders of the numbers below `size`, one for each round, in which every number stands behind every other one equally often.

    A GPU at its power limit remembers: what runs behind a kernel that draws little starts at a higher clock than what runs behind one that
    draws much. Were the order of the contestants the same in every round, or shifted round by round, each would always stand behind the
    same one. (E. J. Williams, Experimental designs balanced for the estimation of residual effects of treatments, 1949.)

    >>> balanced_orders(4)
    [[0, 1, 3, 2], [1, 2, 0, 3], [2, 3, 1, 0], [3, 0, 2, 1]]
    """
    if size == 0:
        return [[]]
    steps = [(place + 1) // 2 if place % 2 else (size - place // 2) % size for place in range(size)]
    orders = [[(start + step) % size for step in steps] for start in range(size)]
    if size % 2 == 0:
        return orders
    # An odd number needs each order backwards too: that of another start, so that none stands behind itself where rounds meet.
    return [order for start in range(size) for order in (orders[start], orders[(start + 2) % size][::-1])]


@dataclass(slots=True)
class Contestant:
    """One provider in one case and pass: what is timed and what was found."""

    provider: Provider
    row: Row
    prepared: Prepared | None = None
    call: Callable[[], Any] | None = None
    samples: Samples = field(default_factory=Samples)


class Benchmark:
    """One run: writes a line a measurement as soon as its case is done, and ends at its budget with what it has."""

    def __init__(self, options: Options, report: Reporter | None = None) -> None:
        self.options = options
        self.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.cases = select(options.cases, self.device)
        self.providers, self.missing = find(options.providers, self.device)
        self.report = report or Reporter()
        self.begin = time.monotonic()
        self.rows: list[Row] = []
        self._lock = threading.Lock()
        self._file = None
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            self._file = options.out.open("a")
        self.common: Row = {}

    # ------------------------------------------------------------------------------------------------------------- budget

    def left(self) -> float:
        """Seconds in which new calls may start: the budget less a reserve, in which a call under way and the tables can end."""
        if self.options.budget is None:
            return float("inf")
        return self.options.budget - min(10.0, 0.1 * self.options.budget) - (time.monotonic() - self.begin)

    def _watch(self) -> threading.Timer | None:
        """Ends the process at the budget if a call or a compilation is still busy then: lines already written stay."""
        if self.options.budget is None:
            return None

        def stop() -> None:
            with self._lock:
                self.report.say(f"budget of {self.options.budget:.0f} s spent inside a call: ending with {len(self.rows)} rows")
                self.report.close()
                print(closing_tables(self.rows), flush=True)
                os._exit(0)

        timer = threading.Timer(self.options.budget, stop)
        timer.daemon = True
        timer.start()
        return timer

    # ---------------------------------------------------------------------------------------------------------------- run

    def run(self) -> list[Row]:
        """Measures all cases, longest promises first, and returns the rows."""
        timer = self._watch()
        try:
            self.common = self._describe()
            self.report.open(self.common, [p.label for p in self.providers], self.missing, len(self.cases), self.options.budget)
            for case in self.cases:
                if self.left() <= 0:
                    break
                self.report.start(case.id, self.left())
                for row in self._case(case):
                    self._write(row)
                self.report.advance()
            if self.left() <= 0:
                self.report.say("budget spent")
        finally:
            if timer is not None:
                timer.cancel()
            self.report.close()
            if self._file is not None:
                self._file.close()
        return self.rows

    def _describe(self) -> Row:
        product, copy = ceilings(self.device)
        try:
            import triton

            triton_version = triton.__version__
        except ImportError:
            triton_version = None
        return {
            "run_id": uuid.uuid4().hex[:12],
            "date": time.strftime("%Y-%m-%d"),
            "device": torch.cuda.get_device_name() if self.device == "cuda" else _processor(),
            "torch": torch.__version__,
            "triton": triton_version,
            "cudnn": torch.backends.cudnn.version() if self.device == "cuda" else None,
            "threads": torch.get_num_threads() if self.device == "cpu" else None,
            "source_hash": kernel_source_hash(self.device),
            "ceiling_tflops": round(product / 1e12, 4),
            "ceiling_tbps": round(copy / 1e12, 4),
        }

    def _write(self, row: Row) -> None:
        with self._lock:
            self.rows.append(row)
            if self._file is not None:
                self._file.write(json.dumps(row) + "\n")
                self._file.flush()
            self.report.row(row)

    def _row(self, case: Case, pass_: str, provider: Provider) -> Row:
        problem = case.problem()
        whole = "fwd" if pass_ == "fwd" else "bwd"
        matrices = unfused_bytes(problem, whole) if provider.name in QUADRATIC else extra_bytes(problem, whole)
        predicted = matrices + output_bytes(problem, "fwd") + (output_bytes(problem, "bwd") if whole == "bwd" else 0)
        return {
            "run_id": self.common["run_id"],
            "case": case.group,
            "label": case.label,
            "kind": case.kind,
            "head_dim": case.head_dim,
            "head_dim_v": case.head_dim_v,
            "seqlen": case.seqlen_q,
            "seqlen_k": case.seqlen_k,
            "batch": case.batch,
            "heads": case.heads,
            "kv_heads": case.kv_heads,
            "causal": case.causal,
            "window": list(case.window),
            "mask": case.mask,
            "density": case.density,
            "softcap": case.softcap,
            "dtype": case.dtype,
            "pass": pass_,
            "provider": provider.name,
            "backend": provider.backend or None,
            "ms": None,
            "ms_q1": None,
            "ms_q3": None,
            "rounds": 0,
            "ms_rounds": [],
            "tflops": None,
            "tbps": None,
            "peak_bytes": None,
            "predicted_bytes": None if case.kind == "step" else predicted,
            "error": None,
            "status": "ok",
            "reason": None,
            "l2": None,
            "clocks_mhz": None,
            "power_w": None,
            **{key: value for key, value in self.common.items() if key != "run_id"},
        }

    # --------------------------------------------------------------------------------------------------------------- cases

    def _passes(self, case: Case) -> list[str]:
        wanted = self.options.passes.split(",") if self.options.passes and case.kind == "speed" else case.passes
        return [pass_ for pass_ in case.passes if pass_ in wanted]

    def _case(self, case: Case) -> Iterator[Row]:
        if case.kind == "first_call" or (case.kind == "memory" and case.device == "cpu"):
            yield from self._in_children(case)
            return
        passes = self._passes(case)
        if not passes:
            return
        inputs = Inputs.make(case, self.options.seed)
        oracle: Oracle | StepOracle
        if case.kind == "step":
            oracle = StepOracle(case, self.options.seed)
        else:
            oracle = Oracle(
                case, inputs, gradients=any(p != "fwd" for p in passes), sampled=case.kind == "memory" or case.group == "serving"
            )
        clock = self._clock(case)
        for pass_ in passes:
            contestants = []
            for provider in self._providers(case):
                if self.left() <= 0:
                    break
                self.report.start(f"{case.id} {pass_} {provider.label}", self.left())
                contestants.append(self._enter(case, pass_, provider, inputs, oracle))
            racing = [c for c in contestants if c.row["status"] == "ok" and case.kind != "memory"]
            self._race(racing, clock)
            for contestant in contestants:
                if contestant in racing:
                    if not contestant.samples.ms:
                        continue
                    self._fill(case, pass_, contestant, clock.l2)
                contestant.call = contestant.prepared = None
                yield contestant.row
            clock.forget()
            contestants.clear()
            racing.clear()
            self._collect()

    def _providers(self, case: Case) -> list[Provider]:
        return [provider for provider in self.providers if not case.providers or provider.name in case.providers]

    def _clock(self, case: Case) -> CudaClock | HostClock | WallClock:
        if case.kind == "host":
            return HostClock()
        if self.device == "cuda":
            return CudaClock(Sensors.open(self.device), self.options.round_ms)
        return WallClock(self.options.round_ms)

    def _enter(self, case: Case, pass_: str, provider: Provider, inputs: Inputs, oracle: Oracle | StepOracle) -> Contestant:
        """Prepares a provider, runs it once and judges the result. What fails becomes a status, never an exception."""
        contestant = Contestant(provider, self._row(case, pass_, provider))
        row = contestant.row
        try:
            if pass_ != "fwd" and not provider.backward:
                raise Unsupported("forward only")
            contestant.prepared = provider.prepare(case, inputs)
            row["backend"] = contestant.prepared.serving(pass_) or row["backend"]
            with contestant.prepared.context(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what a peer has to say about a case belongs into its row
                results, contestant.call, row["peak_bytes"] = self._first(case, contestant.prepared, pass_, inputs)
            if oracle.rows is not None:
                results = {"out": results["out"]} if "out" in results else {}
            if results:
                row["error"], right = oracle.judge(results)
                if not right:
                    limits = {name: f"{oracle.limit(name):.1e}" for name in results}
                    row["status"], row["reason"] = "wrong", f"relative error {row['error']:.1e}, limits {limits}"
        except Unsupported as reason:
            row["status"], row["reason"] = "unsupported", str(reason)
        except torch.OutOfMemoryError as error:
            row["status"], row["reason"] = "oom", str(error).splitlines()[0]
        except Exception as error:  # peers refuse in every way there is: RuntimeError, AssertionError, compiler errors
            row["status"], row["reason"] = "unsupported", f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
            self._collect()
            if self.device == "cuda":
                torch.cuda.synchronize()  # raises where a bad access has broken the device for this process: nothing else can run
        if row["status"] != "ok":
            contestant.call = contestant.prepared = None
            self._collect()
        return contestant

    def _first(
        self, case: Case, prepared: Prepared, pass_: str, inputs: Inputs
    ) -> tuple[dict[str, torch.Tensor], Callable[[], Any], int | None]:
        """One run of a pass: its results by name, the call to time, and the peak of memory above what was there before."""
        if case.kind == "step":  # the peak of its second run, which finds the optimiser's state
            step = Training(case, prepared, self.options.seed)
            gradients = step.checked()
            before = self._memory_before()
            step()
            return gradients, step, self._memory_peak(before)
        names = ["dq", "dk", "dv", "dbias"]
        before = self._memory_before()
        if pass_ == "fwd":
            tensors = [inputs.q, inputs.k, inputs.v, inputs.bias]

            def forward() -> torch.Tensor:
                with torch.no_grad():
                    return prepared.call(*tensors)

            result = forward()
            return {"out": result}, forward, self._memory_peak(before)
        leaves = inputs.leaves()
        if pass_ == "bwd":
            out = prepared.call(*leaves)

            def backward() -> Any:
                return torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True)

            grads = backward()
            peak = self._memory_peak(before)
            return dict(zip(names, grads, strict=False)), backward, peak

        def both() -> Any:
            return torch.autograd.grad(prepared.call(*leaves), leaves, inputs.dout)

        grads = both()
        return dict(zip(names, grads, strict=False)), both, self._memory_peak(before)

    def _race(self, racing: list[Contestant], clock: CudaClock | HostClock | WallClock) -> None:
        """Rounds over all contestants in balanced orders. On a GPU, which is faster when rested, one more before them does not count."""
        orders = balanced_orders(len(racing))
        heating = 1 if isinstance(clock, CudaClock) else 0
        for index in range(-heating, self.options.rounds):
            for place in orders[index % len(orders)]:
                if self.left() <= 0:
                    return
                contestant = racing[place]
                assert contestant.prepared is not None and contestant.call is not None
                with contestant.prepared.context():
                    clock.round(contestant.call, Samples() if index < 0 else contestant.samples)

    def _fill(self, case: Case, pass_: str, contestant: Contestant, l2: str) -> None:
        row, samples = contestant.row, contestant.samples
        row["ms"], row["ms_q1"], row["ms_q3"] = (round(ms, 6) for ms in samples.quartiles())
        row["rounds"], row["ms_rounds"], row["l2"] = len(samples.ms), [round(ms, 6) for ms in samples.ms], l2
        if case.kind == "speed":
            row["tflops"] = round(case.flops(pass_) / row["ms"] / 1e9, 3)
            row["tbps"] = round(case.bytes(pass_) / row["ms"] / 1e9, 4)
        for key, values in (("clocks_mhz", samples.clocks_mhz), ("power_w", samples.power_w)):
            row[key] = round(sorted(values)[len(values) // 2], 1) if values else None

    def _in_children(self, case: Case) -> Iterator[Row]:
        """Cases that need a process of their own: first calls, and peak memory where no allocator counts it."""
        for pass_ in self._passes(case):
            for provider in self._providers(case):
                if case.kind == "memory" and provider.name in QUADRATIC:
                    row = self._row(case, pass_, provider)
                    row["status"], row["reason"] = "unsupported", "not run: its N x N matrices would not fit"
                    yield row
                    continue
                for answer in child.measure(case, pass_, provider.label, self.left):
                    yield {**self._row(case, pass_, provider), **answer}

    # -------------------------------------------------------------------------------------------------------------- memory

    def _memory_before(self) -> int:
        if self.device != "cuda":
            return 0
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def _memory_peak(self, before: int) -> int | None:
        if self.device != "cuda":
            return None
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def _collect(self) -> None:
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()


def _processor() -> str:
    """The name of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def parser() -> argparse.ArgumentParser:
    """The command line of the benchmark."""
    p = argparse.ArgumentParser("tilewise bench", description="Time attention beside its peers, every result checked first.")
    p.add_argument("--cases", default="", help="groups or id patterns, comma-separated, in the order to measure; default all")
    p.add_argument("--providers", default="", help="names, comma-separated, ours also as tilewise:BACKEND or tilewise:deterministic")
    p.add_argument("--passes", default="", help="of fwd,bwd,fwd+bwd, for cases of speed; default what each has")
    p.add_argument("--device", default="", choices=["", "cuda", "cpu"], help="default cuda where there is one")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--round-ms", type=float, default=30.0, help="length of one provider's turn")
    p.add_argument(
        "--budget",
        type=float,
        default=None,
        help=f"seconds after which the run ends with what it has; 0: no end; default {CPU_BUDGET:.0f} on a CPU, no end on a GPU",
    )
    p.add_argument("--out", type=Path, default=None, help="results file, one JSON object a line, appended to")
    p.add_argument("--list", action="store_true", help="print the ids of the chosen cases and stop")
    p.add_argument("--json", action="store_true", help="print the rows as JSON lines in place of tables")
    return p


def main(arguments: list[str] | None = None) -> int:
    """Entry point of `python -m tilewise.bench`; returns the exit status."""
    args = parser().parse_args(arguments)
    budget = args.budget
    if budget is None and (args.device or ("cuda" if torch.cuda.is_available() else "cpu")) == "cpu":
        budget = CPU_BUDGET
    options = Options(args.cases, args.providers, args.passes, args.device, args.rounds, args.round_ms, budget or None, args.out)
    try:
        benchmark = Benchmark(options, Reporter(quiet=args.json))
    except ValueError as error:
        raise SystemExit(str(error)) from error
    if args.list:
        print("\n".join(case.id for case in benchmark.cases))
        return 0
    rows = benchmark.run()
    print("\n".join(json.dumps(row) for row in rows) if args.json else closing_tables(rows), flush=True)
    return 0
