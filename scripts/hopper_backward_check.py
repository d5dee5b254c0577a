"""Checks the Hopper backward kernel against float64 on the GPU at hand, then times it beside cuDNN.

    python scripts/hopper_backward_check.py --budget 140
    python scripts/hopper_backward_check.py --groups tile,lengths --no-times

Every group of checks runs in a process of its own, several at a time, and is killed when it is late: a hang or a crash loses that group
alone. Exit code 0: all checks passed.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, replace

import torch

from hopper_check import BF16, FP16, FP32, Case, expand, make, run
from tilewise.kernels import hopper, triton
from tilewise.kernels.hopper import backward_launch
from tilewise.kernels.hopper.backward_configs import TILES
from tilewise.plan import Cotangents, Gradients, Operands, Outputs, Request, Rules, Saved, target_of

RAGGED = ((1, 1), (7, 300), (63, 65), (129, 127), (300, 77), (1, 4097), (640, 1313), (1000, 1000), (512, 512))


@dataclass(frozen=True)
class BackwardCase(Case):
    """A call and what reaches its backward pass."""

    dlse: bool = False
    deterministic: bool = False
    wide_dout: bool = False  # dout is an expanded tensor, which TMA cannot address
    needs: str = "qkv"


def groups() -> dict[str, list[BackwardCase]]:
    found: dict[str, list[BackwardCase]] = {}
    for dim in (64, 128, 256):
        base = BackwardCase(dim=dim)
        found[f"tile d{dim} full"] = expand(base, sizes=RAGGED, deterministic=(False, True))
        found[f"tile d{dim} causal"] = expand(replace(base, right=0), sizes=RAGGED, deterministic=(False, True))
        found[f"tile d{dim} other"] = [
            replace(base, sizes=(1024, 1024), heads=20, spread=6.0),
            replace(base, sizes=(1024, 1024), heads=20, spread=6.0, right=0, deterministic=True),
            replace(base, sizes=(512, 700), layout="bshd", right=0, dlse=True),
            replace(base, sizes=(512, 700), layout="bshd", wide_dout=True),
            replace(base, sizes=(512, 512), heads=8, heads_k=2, right=0, layout="bshd"),
            replace(base, sizes=(512, 500), heads=8, heads_k=1, layout="bshd", deterministic=True),
            replace(base, sizes=(777, 777), dtype=FP16, right=0),
            replace(base, sizes=(300, 300), needs="qv"),
            replace(base, sizes=(300, 300), needs="qk"),
            replace(base, sizes=(700, 200), right=0, poison=True),
            replace(base, sizes=(700, 200), right=3, poison=True, deterministic=True),
        ]
        found[f"windows d{dim}"] = [
            *expand(base, sizes=((333, 333), (200, 900), (900, 200)), left=(0, 100), right=(-1, 0, 70)),
            replace(base, left=5, right=5, sizes=(64, 2000), poison=True),
            replace(base, left=64, right=0, sizes=(100, 3000), poison=True, deterministic=True),
            replace(base, left=700, right=0, sizes=(2048, 2048), heads=8, heads_k=2, deterministic=True),
            replace(base, left=100, right=30, sizes=(1000, 1300), heads=8, heads_k=2, deterministic=True),
        ]
        lengths = replace(base, lengths_q=(333, 100), lengths_k=(333, 77), sizes=(333, 333), poison=True)
        found[f"lengths d{dim}"] = expand(lengths, right=(-1, 0), left=(-1, 50), deterministic=(False, True))
        found[f"transforms d{dim}"] = expand(
            replace(base, sizes=(333, 333)), softcap=(0.0, 15.0), alibi=(False, True), right=(-1, 0), sink=(True,)
        )
    small = BackwardCase(sizes=(333, 333))
    dims = ((8, 8), (24, 24), (40, 40), (64, 128), (128, 64), (72, 72), (80, 96), (120, 16))
    found["dims"] = [replace(small, dim=d, dim_v=dv, right=0, layout="bshd") for d, dv in dims]
    wide = ((192, 128), (256, 64), (64, 256), (128, 200), (160, 160), (136, 8))
    found["dims wide"] = [replace(small, dim=d, dim_v=dv, right=0, layout="bshd") for d, dv in wide]
    found["lengths of all kinds"] = expand(
        replace(small, batch=4, sizes=(200, 500), poison=True),
        lengths_k=((0, 1, 500, 499), (128, 129, 64, 0)),
        lengths_q=((), (0, 200, 1, 128)),
        right=(-1, 0),
    )
    everything = replace(small, sink=True, softcap=20.0, alibi=True, left=90, right=0, lengths_k=(333, 200), poison=True, dlse=True)
    found["everything and scales"] = [
        *expand(everything, dim=(64, 128, 256), deterministic=(False, True)),
        *expand(small, scale=(-0.1, 1e-3), right=(-1, 0)),
        replace(small, explicit_zero_scale=True, right=0),
        replace(small, out_dtype=FP32),
    ]
    return found


# ------------------------------------------------------------------------------------------------------------------ checks


def inputs_of_backward(case: BackwardCase, call, out: torch.Tensor) -> Cotangents:
    if case.wide_dout:
        dout = torch.randn(1, 1, 1, out.shape[3], device="cuda").to(out.dtype).expand(out.shape)
    else:
        dout = torch.randn(out.shape, device="cuda").to(out.dtype)
        if case.layout == "bshd":
            dout = dout.transpose(1, 2).contiguous().transpose(1, 2)
    if case.poison:
        dout = dout.masked_fill(~call.visible.any(3)[..., None], float("nan"))
    dlse = torch.randn(out.shape[:3], device="cuda") if case.dlse else None
    return Cotangents(dout, dlse)


def expected(case: BackwardCase, call, cot: Cotangents, low: bool) -> dict[str, torch.Tensor]:
    """Every gradient by autograd, in float64 or (`low`) with products in the inputs' dtype."""
    t = call.operands
    group = t.q.shape[1] // t.k.shape[1]
    seen_q, seen_k = call.visible.any(3)[..., None], call.visible.any(2)[..., None]
    state = FP32 if low else torch.float64
    given = {"q": torch.where(seen_q, t.q, 0), "k": torch.where(seen_k, t.k, 0), "v": torch.where(seen_k, t.v, 0)}
    leaves = {name: (x if low else x.double()).detach().requires_grad_() for name, x in given.items()}
    if t.sink is not None:
        leaves["sink"] = t.sink.to(state).detach().requires_grad_()
    if t.alibi_slopes is not None:
        leaves["alibi_slopes"] = t.alibi_slopes.to(state).detach().requires_grad_()
    k, v = (leaves[x].repeat_interleave(group, 1) for x in "kv")
    s = (leaves["q"] @ k.mT).to(state) * call.rules.softmax_scale
    if case.softcap:
        s = case.softcap * torch.tanh(s / case.softcap)
    if t.alibi_slopes is not None:
        s = s - leaves["alibi_slopes"][:, :, None, None] * call.extra["distance"].to(state)
    hidden = ~call.visible.expand(s.shape)
    s = s.masked_fill(hidden, float("-inf"))
    top = s
    if t.sink is not None:
        top = torch.cat([s, leaves["sink"].view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    else:
        top = torch.where(seen_q, s, 0.0)
    lse = torch.logsumexp(top, -1)
    p = torch.exp(s - lse[..., None]).masked_fill(hidden, 0.0)
    out = (p.to(v.dtype) @ v).to(state)
    loss = (out * torch.where(seen_q, cot.dout, 0).to(state)).sum()
    in_use = ~call.hidden_q[:, None] if t.sink is not None else seen_q[..., 0]
    if cot.dlse is not None:
        loss = loss + (torch.where(in_use, lse, 0.0) * cot.dlse.to(state)).sum()
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def run_backward(case: BackwardCase, call, results: Outputs, cot: Cotangents) -> dict[str, torch.Tensor]:
    t = call.operands
    got = {name: torch.full_like(x, float("nan")) for name, x in (("q", t.q), ("k", t.k), ("v", t.v)) if name in case.needs}
    if t.sink is not None:
        got["sink"] = torch.full_like(t.sink, float("nan"))
    if t.alibi_slopes is not None and not case.deterministic:
        got["alibi_slopes"] = torch.full_like(t.alibi_slopes, float("nan"))
    needs = frozenset(got)
    rules = replace(call.rules, deterministic=case.deterministic)
    refusal = hopper.why_not(t, rules, Request(backward=True, needs=needs, dlse=case.dlse), target_of(t.q.device))
    if refusal is not None:
        raise RuntimeError(f"refused: {refusal}")
    grads = Gradients(got.get("q"), got.get("k"), got.get("v"), dsink=got.get("sink"), dalibi_slopes=got.get("alibi_slopes"))
    hopper.backward(t, rules, Saved(results.out, results.lse), cot, grads)
    return got


def judge(case: BackwardCase) -> str | None:
    """None, or what is wrong."""
    call = make(case)
    if case.poison:
        call.operands.q.masked_fill_(~call.visible.any(3)[..., None], float("nan"))
    results = run(call, case.out_dtype)
    cot = inputs_of_backward(case, call, results.out)
    got = run_backward(case, call, results, cot)
    again = run_backward(case, call, results, cot)
    torch.cuda.synchronize()
    exact, low = expected(case, call, cot, False), expected(case, call, cot, True)
    size = max(exact[name].norm().item() / math.sqrt(exact[name].numel()) for name in "qkv")
    for name, x in got.items():
        want = exact[name]
        norm = max(want.norm().item(), 1e-3 * size * math.sqrt(want.numel()), 1e-20)
        error, allowed = (x - want).norm().item() / norm, 1.5 * (low[name] - want).norm().item() / norm + (2e-3 if name in "qkv" else 1e-2)
        if not error <= allowed:
            bad = ((x.double() - want).abs().nan_to_num(1e9) > 0.1 * want.abs().max()).nonzero()
            where = bad[0].tolist() if len(bad) else "nowhere"
            return f"d{name} error {error:.1e} > {allowed:.1e}, {len(bad)} of {x.numel()} bad, first {where}, NaN {int(x.isnan().sum())}"
        if case.deterministic and not torch.equal(x, again[name]):
            return f"d{name}: two runs differ"
    return None


def system_checks() -> list[str]:
    wrong = []
    for dim in (64, 128, 256):
        case = BackwardCase(sizes=(1500, 1500), dim=dim, right=0, heads=16, heads_k=4, deterministic=True)
        call = make(case)
        results = run(call)
        cot = inputs_of_backward(case, call, results.out)
        first = {name: x.clone() for name, x in run_backward(case, call, results, cot).items()}
        for _ in range(200):
            if any(not torch.equal(x, first[name]) for name, x in run_backward(case, call, results, cot).items()):
                wrong.append(f"d{dim}: a repeated run differs")
                break
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run_backward(case, call, results, cot)
        graph.replay()
        torch.cuda.synchronize()
        if any(not torch.equal(x, first[name]) for name, x in captured.items()):
            wrong.append(f"d{dim}: a replayed graph differs")
    return wrong


def compile_ahead(name: str) -> None:
    """Fill the disk cache with the kernels that `time_grid` runs for a tile."""
    dim, tile = tried_tiles()[name.removeprefix("compile ")]
    t = Operands(*(torch.empty(1, 1, 128, dim, device="cuda", dtype=BF16) for _ in range(3)))
    for right in (-1, 0):
        for ordered in (False, True) if name.removeprefix("compile ") in TILES else (False,):
            variant = backward_launch.variant_of(t, Rules(1.0, window_right=right))
            backward_launch.build(replace(variant, tile=tile, ordered=ordered), "fp32")


def run_group(name: str) -> int:
    torch.manual_seed(0)
    if name.startswith("compile "):
        start = time.time()
        compile_ahead(name)
        print(f"{name}: ok, {time.time() - start:.0f} s", flush=True)
        return 0
    if name == "system":
        wrong = system_checks()
        print(f"system: {'ok' if not wrong else '; '.join(wrong)}", flush=True)
        return 3 if wrong else 0
    cases = groups()[name]
    failures, start, first = 0, time.time(), 0.0
    for case in cases:
        try:
            problem = judge(case)
        except Exception as error:
            problem = f"{type(error).__name__}: {str(error)[-300:]}"
        first = first or time.time() - start
        if problem:
            failures += 1
            print(f"  WRONG {name} | {case.describe()} | {problem}", flush=True)
            if "CUDA error" in problem or "illegal" in problem:
                break
    print(f"{name}: {len(cases) - failures} of {len(cases)} ok, first call {first:.1f} s, {time.time() - start:.0f} s", flush=True)
    return 3 if failures else 0


def run_checks(names: list[str], limit: float, jobs: int) -> list[str]:
    """Each group in its own process, `jobs` at a time, at most `limit` seconds each; returns the names that passed."""
    begin, waiting, running, passed = time.time(), list(names), {}, []
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            command = [sys.executable, os.path.abspath(__file__), "--group", name]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            running[name] = (process, time.time())
        for name, (process, start) in list(running.items()):
            late = time.time() - start > limit
            if process.poll() is None and not late:
                continue
            if late:
                process.kill()
            text = process.communicate()[0].strip()
            lines = [line for line in text.splitlines() if "ok" in line or "WRONG" in line or "Error" in line]
            print("\n".join(lines[-12:]) or f"{name}: rc {process.returncode} {text[-800:]}", flush=True)
            if late:
                print(f"{name}: too slow or hung, killed", flush=True)
            elif process.returncode == 0:
                passed.append(name)
            del running[name]
        time.sleep(0.2)
    print(f"-- {len(passed)} of {len(names)} groups passed in {time.time() - begin:.0f} s", flush=True)
    return passed


# ------------------------------------------------------------------------------------------------------------------- times


def tried_tiles() -> dict[str, tuple[int, object]]:
    """Tiles to time: name -> (head dim, tile); the shipped ones first."""
    return {"128": (128, TILES["128"]), "64": (64, TILES["64"]), "256": (256, TILES["256"])}


def time_grid(a: argparse.Namespace) -> int:
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from triton.testing import do_bench

    start = time.time()
    find = backward_launch.program_for
    built: dict[tuple, backward_launch.BackwardProgram] = {}
    ratios = []
    for dim in (int(x) for x in a.dims.split(",")):
        chosen = a.tiles.split(",") if a.tiles else list(tried_tiles())
        tiles = {name: tile for name, (d, tile) in tried_tiles().items() if d == dim and name in chosen}
        for seqlen in (int(x) for x in a.seqs.split(",")):
            for causal in (False, True):
                if a.budget - (time.time() - start) < 5:
                    print("budget spent")
                    return 0
                batch, heads = max(1, a.tokens // seqlen), a.width // dim
                q, k, v, dout = (torch.randn(batch, seqlen, heads, dim, device="cuda", dtype=BF16).transpose(1, 2) for _ in range(4))
                work = 10 * batch * heads * seqlen * seqlen * dim * (0.5 if causal else 1.0)
                leaves = [x.detach().requires_grad_() for x in (q, k, v)]
                with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
                    out = F.scaled_dot_product_attention(*leaves, is_causal=causal)
                t, r = Operands(q, k, v), Rules(1 / math.sqrt(dim), window_right=0 if causal else -1)
                results = Outputs(torch.empty_like(q), torch.empty(batch, heads, seqlen, device="cuda"))
                hopper.forward(t, r, results)
                saved, cot = Saved(results.out, results.lse), Cotangents(dout)
                grads = Gradients(torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))

                def cudnn(out=out, leaves=leaves, dout=dout):
                    return torch.autograd.grad(out, leaves, dout, retain_graph=True)

                def ours(tile, ordered, t=t, r=r, saved=saved, cot=cot, grads=grads):
                    def program(t, r, slope_gradient):
                        if tile is None:
                            nothing = defaultdict(lambda: lambda *_: None)
                            return backward_launch.BackwardProgram(backward_launch.variant_of(t, r), 0, nothing)
                        variant = replace(backward_launch.variant_of(t, r), tile=tile, ordered=ordered)
                        if variant not in built:
                            kernel, address = backward_launch.build(variant, "fp32")
                            built[variant] = backward_launch.BackwardProgram(variant, address, kernel)
                        return built[variant]

                    backward_launch.program_for = program
                    hopper.backward(t, replace(r, deterministic=ordered), saved, cot, grads)
                    backward_launch.program_for = find

                candidates = {"cudnn": cudnn}
                for name, tile in tiles.items():
                    candidates[name] = lambda tile=tile: ours(tile, False)
                first = next(iter(tiles.values()))
                candidates["ordered"] = lambda first=first: ours(first, True)
                # What the two small kernels take: all of it but the large one.
                candidates["rows only"] = lambda: ours(None, False)
                if a.portable:
                    candidates["triton"] = lambda t=t, r=r, s=saved, c=cot, g=grads: triton.backward(t, r, s, c, g)
                wanted = cudnn()
                for name, candidate in list(candidates.items()):
                    for x in (grads.dq, grads.dk, grads.dv):
                        x.fill_(float("nan"))
                    candidate()
                    pairs = zip((grads.dq, grads.dk, grads.dv), wanted, strict=True)
                    if name not in ("cudnn", "rows only") and not all(
                        (x.float() - y.float()).norm() < 0.02 * y.float().norm() for x, y in pairs
                    ):
                        print(f"d{dim} {seqlen} causal={causal} {name}: WRONG")
                        del candidates[name]
                times: dict[str, list[float]] = {name: [] for name in candidates}
                for _ in range(a.rounds):
                    for name, candidate in candidates.items():
                        times[name].append(do_bench(candidate, warmup=3, rep=a.rep, return_mode="median"))
                speed = {name: work / statistics.median(ms) / 1e9 for name, ms in times.items()}
                text = " ".join(f"{name.replace(' ', '_')}={x:.0f}" for name, x in speed.items() if name != "rows only")
                text += f" | rows only {statistics.median(times['rows only']) / statistics.median(times['cudnn']):.3f} of cudnn's time"
                ratio = speed.get(next(iter(tiles)), 0.0) / speed["cudnn"]
                ratios.append(ratio)
                print(f"d{dim} {'causal' if causal else 'full'} {seqlen} | {text} | shipped/cudnn {ratio:.3f}", flush=True)
    if ratios and min(ratios) > 0:
        print(f"-- {len(ratios)} cells: lowest {min(ratios):.3f}, geometric mean {statistics.geometric_mean(ratios):.3f} of cuDNN")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=140, help="seconds for everything")
    parser.add_argument("--check-limit", type=float, default=60, help="seconds for one group of checks")
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--groups", default="", help="comma-separated beginnings of group names; empty: all")
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--no-times", action="store_true")
    parser.add_argument("--portable", action="store_true", help="time the portable Triton kernels too")
    parser.add_argument("--dims", default="256,128,64")
    parser.add_argument("--seqs", default="4096,1024,16384")
    parser.add_argument("--tiles", default="", help="of those that can be timed; empty: all")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rep", type=int, default=12)
    parser.add_argument("--group", default="", help=argparse.SUPPRESS)
    parser.add_argument("--only-times", action="store_true", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.group:
        return run_group(a.group)
    if a.only_times:
        return time_grid(a)
    start = time.time()
    ahead = [] if a.no_times else [f"compile {x}" for x in tried_tiles() if not a.tiles or x in a.tiles.split(",")]
    names = [x for x in [*groups(), "system"] if not a.groups or any(x.startswith(y) for y in a.groups.split(","))]
    names = ahead + ([] if a.no_checks else names)
    passed = run_checks(names, a.check_limit, a.jobs)
    left = a.budget - (time.time() - start)
    if not a.no_times and left > 10:
        command = [sys.executable, os.path.abspath(__file__), "--only-times", *sys.argv[1:], "--budget", str(left - 5)]
        try:
            subprocess.run(command, timeout=left)
        except subprocess.TimeoutExpired:
            print("the times took too long or a kernel hangs")
    return 0 if len(passed) == len(names) else 1


if __name__ == "__main__":
    sys.exit(main())
