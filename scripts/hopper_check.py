"""Checks the Hopper forward kernel against float64 on the GPU at hand, then times it beside cuDNN on the 18-cell grid.

    python scripts/hopper_check.py --budget 240            # everything
    python scripts/hopper_check.py --groups tiles,rules --no-times
    python scripts/hopper_check.py --no-checks --dims 64

Every group of checks runs in a process of its own, several at a time, and is killed when it is late: a hang or a crash loses that group
alone. No tile is timed in a group that failed. Exit code 0: all checks passed.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from tilewise.kernels import hopper
from tilewise.kernels.hopper import configs, launch
from tilewise.plan import Operands, Outputs, Request, Rules, target_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SQUARE = ((512, 512), (1000, 1000), (2048, 2048))
RAGGED = ((1, 1), (7, 300), (63, 65), (129, 127), (300, 77), (1, 4097), (640, 1313))


@dataclass(frozen=True)
class Case:
    """One call: sizes, rules and what is laid into memory that nobody may read."""

    sizes: tuple[int, int] = (300, 300)  # Sq, Sk
    dim: int = 128
    dim_v: int = 0  # 0: as dim
    batch: int = 2
    heads: int = 4
    heads_k: int = 0  # 0: as heads
    dtype: torch.dtype = BF16
    layout: str = "bhsd"
    left: int = -1
    right: int = -1
    softcap: float = 0.0
    scale: float = 0.0  # 0: 1/sqrt(D)
    spread: float = 1.0  # of the scores
    lengths_q: tuple[int, ...] = ()
    lengths_k: tuple[int, ...] = ()
    alibi: bool = False
    sink: bool = False
    out_dtype: torch.dtype | None = None
    poison: bool = False  # NaN in K and V rows that no query sees, and in Q rows beyond the length
    tile: str = ""  # forced
    explicit_zero_scale: bool = False

    def describe(self) -> str:
        plain = type(self)()
        parts = [f"{self.sizes[0]}x{self.sizes[1]}", f"d{self.dim}"]
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if name not in ("sizes", "dim", "tile") and value != getattr(plain, name):
                parts.append(f"{name}={value}".replace("torch.", ""))
        return " ".join(parts)


def expand(*cases: Case, **changes: tuple) -> list[Case]:
    """Every combination of the given values, on every case."""
    found = list(cases)
    for name, values in changes.items():
        found = [replace(case, **{name: value}) for case in found for value in values]
    return found


def groups() -> dict[str, list[Case]]:
    found: dict[str, list[Case]] = {}
    dims = {"64": (64, 64), "64 long": (64, 64), "64 long causal": (64, 64), "128": (128, 128), "192": (192, 128), "256": (256, 256)}
    for name, (dim, dim_v) in dims.items():
        base = Case(dim=dim, dim_v=dim_v, tile=name)
        found[f"tile {name}"] = (
            expand(base, sizes=SQUARE, right=(-1, 0))
            + expand(base, sizes=RAGGED, right=(-1, 0))
            + [
                replace(base, sizes=(1024, 1024), heads=40, right=0),
                replace(base, sizes=(1024, 1024), heads=40, spread=6.0),
                replace(base, sizes=(1024, 1024), spread=6.0, right=0),
                replace(base, sizes=(512, 700), layout="bshd", right=0),
                replace(base, sizes=(512, 512), heads=8, heads_k=2, right=0, layout="bshd"),
                replace(base, sizes=(777, 777), dtype=FP16, right=0),
                replace(base, sizes=(777, 777), dtype=FP16, spread=6.0),
            ]
        )
    # Each group compiles its variants one after the other, so that groups are small and run side by side.
    small = Case(sizes=(333, 333))
    narrow = ((16, 16), (24, 24), (40, 40), (64, 128), (72, 72), (80, 80), (96, 96))
    wide = ((128, 64), (160, 160), (192, 192), (200, 200), (128, 256), (256, 64))
    found["dims narrow"] = [replace(small, dim=d, dim_v=dv, right=0, layout="bshd") for d, dv in narrow]
    found["dims wide"] = [replace(small, dim=d, dim_v=dv) for d, dv in wide]
    for dim in (64, 128, 256):
        base = replace(small, dim=dim)
        found[f"windows d{dim}"] = [
            *expand(base, sizes=((333, 333), (200, 900), (900, 200)), left=(0, 100), right=(-1, 0, 70)),
            replace(base, left=5, right=5, sizes=(64, 2000), poison=True),
            replace(base, left=64, right=0, sizes=(100, 3000), poison=True),
            replace(base, left=700, right=0, sizes=(2048, 2048), heads=8, heads_k=2),
        ]
        found[f"lengths d{dim}"] = expand(
            replace(base, lengths_q=(333, 100), lengths_k=(333, 77), poison=True), right=(-1, 0), left=(-1, 50)
        )
        found[f"transforms d{dim}"] = expand(base, softcap=(0.0, 15.0), alibi=(False, True), right=(-1, 0))
        found[f"outputs d{dim}"] = expand(base, out_dtype=(FP32,), right=(-1, 0))
    found["lengths of all kinds"] = expand(
        replace(small, batch=4, sizes=(200, 500), poison=True),
        lengths_k=((0, 1, 500, 499), (128, 129, 64, 0)),
        lengths_q=((), (0, 200, 1, 128)),
        right=(-1, 0),
    )
    found["sinks and scales"] = (
        expand(small, sink=(True,), right=(-1, 0), sizes=((333, 333), (300, 77)))
        + expand(small, scale=(-0.1, 1e-3), right=(-1, 0))
        + [replace(small, explicit_zero_scale=True, right=0)]
    )
    everything = replace(small, sink=True, softcap=20.0, alibi=True, left=90, right=0, lengths_k=(333, 200), poison=True)
    found["everything"] = expand(everything, dim=(64, 128, 256))
    return found


# ------------------------------------------------------------------------------------------------------------------ checks


@dataclass
class Call:
    operands: Operands
    rules: Rules
    hidden_q: torch.Tensor  # (B, Sq) rows beyond the length
    visible: torch.Tensor  # (B, 1, Sq, Sk)
    extra: dict = field(default_factory=dict)


def make(case: Case) -> Call:
    (sq, sk), dim, dim_v = case.sizes, case.dim, case.dim_v or case.dim
    heads_k = case.heads_k or case.heads

    def tensor(heads: int, seqlen: int, width: int) -> torch.Tensor:
        x = torch.randn(case.batch, heads, seqlen, width, device="cuda", dtype=FP32)
        if case.layout == "bshd":
            return x.to(case.dtype).transpose(1, 2).contiguous().transpose(1, 2)
        return x.to(case.dtype)

    q = tensor(case.heads, sq, dim) * case.spread
    k, v = tensor(heads_k, sk, dim), tensor(heads_k, sk, dim_v)
    device = q.device
    length_q = torch.tensor(case.lengths_q or (sq,) * case.batch, device=device, dtype=torch.int32)
    length_k = torch.tensor(case.lengths_k or (sk,) * case.batch, device=device, dtype=torch.int32)
    rows, cols = torch.arange(sq, device=device), torch.arange(sk, device=device)
    position = rows + (length_k - length_q).long()[:, None]  # (B, Sq)
    visible = (rows < length_q[:, None])[:, :, None] & (cols < length_k[:, None])[:, None, :]
    if case.left >= 0:
        visible &= cols >= position[:, :, None] - case.left
    if case.right >= 0:
        visible &= cols <= position[:, :, None] + case.right
    if case.poison:
        hidden_k = ~visible.any(1)  # (B, Sk)
        k.masked_fill_(hidden_k[:, None, :, None], float("nan"))
        v.masked_fill_(hidden_k[:, None, :, None], float("nan"))
        q.masked_fill_((rows >= length_q[:, None])[:, None, :, None], float("nan"))
    scale = 0.0 if case.explicit_zero_scale else case.scale or 1 / math.sqrt(dim)
    slopes = torch.rand(case.heads, device=device) * 0.1 if case.alibi else None
    sink = torch.randn(case.heads, device=device) * 3 if case.sink else None
    operands = Operands(
        q,
        k,
        v,
        alibi_slopes=None if slopes is None else slopes[None],
        sink=sink,
        seqused_q=length_q if case.lengths_q else None,
        seqused_k=length_k if case.lengths_k else None,
    )
    rules = Rules(scale, softcap=case.softcap, window_left=case.left, window_right=case.right)
    distance = (position[:, :, None] - cols).abs()[:, None].double()
    return Call(operands, rules, rows >= length_q[:, None], visible[:, None], {"distance": distance})


def expected(case: Case, call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, lse) in float64, and the output of the same computation in the inputs' dtype."""
    t = call.operands
    group = t.q.shape[1] // t.k.shape[1]
    seen_q = ~call.hidden_q[:, None, :, None]
    seen_k = call.visible.any(2)[..., None]
    results = []
    for low in (False, True):
        q, k, v = (torch.where(seen, x, 0) for x, seen in ((t.q, seen_q), (t.k, seen_k), (t.v, seen_k)))
        if not low:
            q, k, v = q.double(), k.double(), v.double()
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        s = (q @ k.mT).to(FP32 if low else torch.float64) * call.rules.softmax_scale
        if case.softcap:
            s = case.softcap * torch.tanh(s / case.softcap)
        if t.alibi_slopes is not None:
            s = s - t.alibi_slopes[:, :, None, None].to(s.dtype) * call.extra["distance"].to(s.dtype)
        s = s.masked_fill(~call.visible, float("-inf"))
        top = s
        if t.sink is not None:
            top = torch.cat([s, t.sink.to(s.dtype).view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
        lse = torch.logsumexp(top, -1)
        p = torch.where(torch.isfinite(lse)[..., None], torch.exp(s - lse[..., None]), 0)
        results.append((p.to(v.dtype) @ v, lse))
    (out, lse), (low_out, _) = results
    lse = torch.where(call.hidden_q[:, None], float("-inf"), lse)
    return torch.where(seen_q, out, 0), lse, torch.where(seen_q, low_out, 0)


def run(call: Call, out_dtype: torch.dtype | None = None) -> Outputs:
    t = call.operands
    shape = (*t.q.shape[:3], t.v.shape[3])
    if t.q.transpose(1, 2).is_contiguous() and not t.q.is_contiguous():
        out = torch.empty(shape[0], shape[2], shape[1], shape[3], device="cuda", dtype=out_dtype or t.q.dtype).transpose(1, 2)
    else:
        out = torch.empty(shape, device="cuda", dtype=out_dtype or t.q.dtype)
    lse = torch.empty(shape[:3], device="cuda", dtype=FP32)
    results = Outputs(out.fill_(float("nan")), lse.fill_(float("nan")))
    request = Request(out_dtype=out_dtype)
    refusal = hopper.why_not(t, call.rules, request, target_of(t.q.device))
    if refusal is not None:
        raise RuntimeError(f"refused: {refusal}")
    hopper.forward(t, call.rules, results)
    return results


def judge(case: Case) -> str | None:
    """None, or what is wrong."""
    call = make(case)
    first = run(call, case.out_dtype)
    second = run(call, case.out_dtype)
    torch.cuda.synchronize()
    out, lse, low = expected(case, call)
    if not torch.equal(first.out, second.out) or not torch.equal(first.lse, second.lse):
        both = torch.isnan(first.out) & torch.isnan(second.out)
        if not torch.equal(first.out.masked_fill(both, 0), second.out.masked_fill(both, 0)):
            return "two runs differ"
    norm = out.norm().clamp_min(1e-20)
    error, allowed = ((first.out - out).norm() / norm).item(), 1.5 * ((low - out).norm() / norm).item() + 2e-4
    finite = torch.isfinite(lse)
    if not torch.equal(finite, torch.isfinite(first.lse)):
        return f"lse finite in {int(torch.isfinite(first.lse).sum())} rows, expected {int(finite.sum())} of {finite.numel()}"
    worst = (first.lse.double() - lse)[finite].abs().max().item() if finite.any() else 0.0
    limit = 2e-4 * max(1.0, lse[finite].abs().max().item() if finite.any() else 0.0) + 1e-3
    if not error <= allowed:
        bad = (first.out.double() - out).abs().nan_to_num(1e9).flatten(0, 1).amax((0, 2))
        return (
            f"error {error:.1e} > {allowed:.1e}, first bad row {int((bad > 0.05).nonzero()[:1].sum())}, NaN {int(first.out.isnan().sum())}"
        )
    if not worst <= limit:
        return f"lse off by {worst:.1e} > {limit:.1e}"
    return None


def system_checks() -> list[str]:
    """Streams, graphs, repeated launches: returns what went wrong."""
    wrong = []
    case = Case(sizes=(700, 700), right=0, heads=16)
    call = make(case)
    want = run(call).out.clone()
    for _ in range(100):
        if not torch.equal(run(call).out, want):
            wrong.append("a repeated run differs")
            break
    side = [torch.cuda.Stream() for _ in range(3)]
    got = []
    torch.cuda.synchronize()
    for _ in range(10):
        for stream in side:
            with torch.cuda.stream(stream):
                got.append(run(call).out)
    torch.cuda.synchronize()
    if not all(torch.equal(x, want) for x in got):
        wrong.append("concurrent streams disturb each other")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(call)
    for _ in range(3):
        captured.out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        if not torch.equal(captured.out, want):
            wrong.append("a replayed graph differs")
            break
    before = len(launch._programs)
    for seqlen in (701, 64, 1, 3000):
        run(make(replace(case, sizes=(seqlen, seqlen))))
    if len(launch._programs) != before:
        wrong.append("a new length compiled again")
    return wrong


def run_group(name: str) -> int:
    torch.manual_seed(0)
    if name == "system":
        wrong = system_checks()
        print(f"system: {'ok' if not wrong else '; '.join(wrong)}", flush=True)
        return 3 if wrong else 0
    cases = groups()[name]
    choose = launch.tile_name
    failures, start, first = 0, time.time(), 0.0
    for case in cases:
        if case.tile:
            launch.tile_name = lambda *_, tile=case.tile: tile
        try:
            problem = judge(case)
        except Exception as error:
            problem = f"{type(error).__name__}: {str(error)[-300:]}"
        launch.tile_name = choose
        first = first or time.time() - start
        if problem:
            failures += 1
            print(f"  WRONG {name} | {case.describe()} | {problem}", flush=True)
            if "CUDA error" in problem or "illegal" in problem:
                break
    print(f"{name}: {len(cases) - failures} of {len(cases)} ok, first call {first:.1f} s, {time.time() - start:.0f} s", flush=True)
    return 3 if failures else 0


def run_checks(names: list[str], limit: float, jobs: int) -> list[str]:
    """Each group in its own process, `jobs` at a time; returns the names that passed."""
    start, waiting, running, passed = time.time(), list(names), {}, []
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            command = [sys.executable, os.path.abspath(__file__), "--group", name]
            running[name] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for name, process in list(running.items()):
            late = time.time() - start > limit
            if process.poll() is None and not late:
                continue
            if late:
                process.kill()
            text = process.communicate()[0].strip()
            lines = [line for line in text.splitlines() if "ok" in line or "WRONG" in line or "Error" in line]
            print("\n".join(lines[-30:]) or f"{name}: rc {process.returncode} {text[-800:]}", flush=True)
            if late:
                print(f"{name}: too slow or hung, killed", flush=True)
            elif process.returncode == 0:
                passed.append(name)
            del running[name]
        time.sleep(0.2)
    print(f"-- {len(passed)} of {len(names)} groups passed in {time.time() - start:.0f} s", flush=True)
    return passed


# ------------------------------------------------------------------------------------------------------------------- times


def time_grid(a: argparse.Namespace, allowed: list[str], left) -> None:
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from triton.testing import do_bench

    choose = launch.tile_name
    ratios = []
    for dim in (int(x) for x in a.dims.split(",")):
        tiles = [name for name in allowed if int(name.split()[0]) == dim]
        for causal in (False, True):
            for seqlen in (int(x) for x in a.seqs.split(",")):
                if left() < 6:
                    print("budget spent")
                    return
                batch, heads = max(1, a.tokens // seqlen), a.width // dim
                q, k, v = (torch.randn(batch, heads, seqlen, dim, device="cuda", dtype=BF16) for _ in range(3))
                results = Outputs(torch.empty_like(q), torch.empty(batch, heads, seqlen, device="cuda"))
                t, r = Operands(q, k, v), Rules(1 / math.sqrt(dim), window_right=0 if causal else -1)
                work = 4 * batch * heads * seqlen * seqlen * dim * (0.5 if causal else 1.0)

                def cudnn(q=q, k=k, v=v, causal=causal):
                    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
                        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

                def ours(name, t=t, r=r, results=results):
                    launch.tile_name = lambda *_: name
                    hopper.forward(t, r, results)

                chosen = choose(dim, dim, seqlen, seqlen, causal, True)
                candidates = {"cudnn": cudnn, **{name: (lambda name=name: ours(name)) for name in tiles}}
                for candidate in candidates.values():
                    candidate()
                times = {name: [] for name in candidates}
                for _ in range(a.rounds):
                    for name, candidate in candidates.items():
                        times[name].append(do_bench(candidate, warmup=4, rep=a.rep, return_mode="median"))
                launch.tile_name = choose
                speed = {name: work / statistics.median(ms) / 1e9 for name, ms in times.items()}
                text = " ".join(f"{'*' if name == chosen else ''}{name.replace(' ', '_')}={x:.0f}" for name, x in speed.items())
                ratio = speed.get(chosen, 0.0) / speed["cudnn"]
                ratios.append(ratio)
                print(f"d{dim} {'causal' if causal else 'full'} {seqlen} | {text} | chosen/cudnn {ratio:.3f}", flush=True)
    if ratios and min(ratios) > 0:
        print(f"-- {len(ratios)} cells: lowest {min(ratios):.3f}, geometric mean {statistics.geometric_mean(ratios):.3f} of cuDNN")


def host_time() -> None:
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (torch.randn(1, 2, 64, 64, device="cuda", dtype=BF16) for _ in range(3))
    results = Outputs(torch.empty_like(q), torch.empty(1, 2, 64, device="cuda"))
    t, r = Operands(q, k, v), Rules(0.125)

    def flash():
        F.scaled_dot_product_attention(q, k, v)

    def ours():
        hopper.forward(t, r, results)

    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        for name, call in (("sdpa flash", flash), ("tilewise hopper.forward", ours)):
            best = math.inf
            for _ in range(5):
                call()
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(200):
                    call()
                best = min(best, (time.perf_counter() - start) / 200)
                torch.cuda.synchronize()
            print(f"host time of a tiny call, {name}: {best * 1e6:.1f} us", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=240, help="seconds for everything")
    parser.add_argument("--check-limit", type=float, default=150, help="seconds for the checks")
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--groups", default="", help="comma-separated beginnings of group names; empty: all")
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--no-times", action="store_true")
    parser.add_argument("--dims", default="128,64,256")
    parser.add_argument("--seqs", default="1024,4096,16384")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rep", type=int, default=12)
    parser.add_argument("--group", default="", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.group:
        return run_group(a.group)
    start = time.time()
    names = [*groups(), "system"]
    names = [n for n in names if not a.groups or any(n.startswith(x) for x in a.groups.split(","))]
    passed = names if a.no_checks else run_checks(names, min(a.check_limit, a.budget), a.jobs)
    if not a.no_times:
        import triton

        print(f"torch {torch.__version__}, triton {triton.__version__}, {torch.cuda.get_device_name()}", flush=True)
        host_time()
        tiles = [name for name in configs.TILES if a.no_checks or f"tile {name}" in passed]
        time_grid(a, tiles, lambda: a.budget - (time.time() - start))
    return 0 if len(passed) == len(names) else 1


if __name__ == "__main__":
    sys.exit(main())
