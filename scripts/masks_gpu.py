"""Measures masks on a CUDA GPU: every entry of the gallery against dense attention, building block masks, and memory at 262,144 tokens.

python scripts/masks_gpu.py OUT.json

Each entry is first compared with the specification at a small size, forward and backward, in processes side by side, which also compile
the kernels; then, where it is timed, with float64. docs/masks.md is made from the file by scripts/mask_gallery.py.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mask_gallery import ENTRIES, Entry, rule_of
from tilewise import BlockMask, attention, explain, masks, tile_cache
from tilewise.bench.check import TIMES_UNFUSED, relative_error
from tilewise.bench.source_hash import kernel_source_hash
from tilewise.bench.timing import CudaClock, Samples, Sensors
from tilewise.mask_base import indices

SMALL, TIMED, LONG, BUILT = 384, 16_384, 262_144, 98_304  # tokens: checked, timed, shown free of N x N memory, built
HEADS, HEAD_DIM, ROUNDS = 16, 128, 5


def inputs(queries: int, keys: int, heads: int, head_dim: int = HEAD_DIM) -> list[Tensor]:
    """q, k, v and the output's gradient."""
    return [torch.randn(1, length, heads, head_dim, device="cuda", dtype=torch.bfloat16) for length in (queries, keys, keys, queries)]


def leaves(tensors: list[Tensor]) -> list[Tensor]:
    return [x.detach().requires_grad_() for x in tensors[:3]]


# ---------------------------------------------------------------------------------------------------------------- the gallery


def check_small(entry: Entry) -> str:
    """Output, LSE and all gradients against the specification, within the tests' tolerance; "ok" or what is wrong."""
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from tests.gpu.common import compare

    torch.manual_seed(0)
    try:
        queries, rule = round(entry.queries * SMALL), rule_of(entry, SMALL).to("cuda")
        mask = BlockMask(rule, queries, SMALL, device="cuda")
        mask.verify()
        q, k, v, _ = inputs(queries, SMALL, 2)
        compare({"q": q, "k": k, "v": v, "mask": mask}, "auto")
        attention(*leaves([q, k, v])).sum().backward()  # compiles the dense call too
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "ok"


def exact(rule: masks.Mask, tensors: list[Tensor], head: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Output and gradients of one head from the definition, a block of queries at a time, with every operation in `dtype`."""
    q, k, v, dout = (x[0, :, head].to(dtype) for x in tensors)
    found = {"out": torch.empty_like(q), "dq": torch.empty_like(q)}
    found |= {name: torch.zeros(x.shape, dtype=torch.float64, device=x.device) for name, x in (("dk", k), ("dv", v))}
    scale = q.shape[1] ** -0.5
    for start in range(0, len(q), 4096):
        rows = slice(start, min(start + 4096, len(q)))
        at = indices(q.device, range(1), range(head, head + 1), range(rows.start, rows.stop), len(k), len(q), None, None)
        visible = rule.predicate(at).expand(1, 1, rows.stop - rows.start, len(k))[0, 0]
        p = torch.where(visible, scale * (q[rows] @ k.T), float("-inf")).softmax(-1)
        p = torch.where(visible.any(1, keepdim=True), p, 0.0)
        found["out"][rows] = p @ v
        found["dv"] += (p.T @ dout[rows]).double()
        ds = p * (dout[rows] @ v.T - (dout[rows] * found["out"][rows]).sum(1, keepdim=True))
        found["dq"][rows] = scale * (ds @ k)
        found["dk"] += (scale * (ds.T @ q[rows])).double()
    return found


def judge(rule: masks.Mask, tensors: list[Tensor], results: dict[str, Tensor]) -> tuple[float, bool]:
    """The largest relative error of the last head, and whether every result is within the benchmark's limit."""
    wanted, unfused = (exact(rule, tensors, HEADS - 1, dtype) for dtype in (torch.float64, torch.bfloat16))
    errors = {name: relative_error(x[0, :, HEADS - 1], wanted[name]) for name, x in results.items()}
    rounding = torch.finfo(torch.bfloat16).eps / 4
    right = all(errors[name] <= TIMES_UNFUSED * relative_error(unfused[name], wanted[name]) + rounding for name in errors)
    return max(errors.values()), right


def passes(tensors: list[Tensor], **options: Any) -> tuple[dict[str, Callable[[], Any]], dict[str, Tensor]]:
    """A call's passes, to be timed, and what they return."""
    given, dout = leaves(tensors), tensors[3]
    out = attention(*given, **options)

    def forward() -> None:
        with torch.no_grad():
            attention(*given, **options)

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, given, dout, retain_graph=True)

    return {"fwd": forward, "bwd": backward}, {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), backward(), strict=True))}


def measure_entry(entry: Entry, clock: CudaClock, small: str) -> dict[str, Any]:
    """Shares, error, and the time of both passes beside those of attention without a mask, in turns."""
    torch.manual_seed(0)
    queries, rule = round(entry.queries * TIMED), rule_of(entry, TIMED).to("cuda")
    mask = BlockMask(rule, queries, TIMED, device="cuda")
    tensors = inputs(queries, TIMED, HEADS)
    calls, results = passes(tensors, mask=mask)
    error, right = judge(rule, tensors, results)
    row: dict[str, Any] = {"name": entry.name, "line": entry.line, "queries": queries, "keys": TIMED, "heads": HEADS, "head_dim": HEAD_DIM}
    row |= {"small": small, "error": error, "status": "ok" if right and small == "ok" else "wrong"}
    row |= {"pairs": rule.density(queries, TIMED, device="cuda"), "tiles": mask.density()}
    row |= {f"backend_{name}": explain(*tensors[:3], mask=mask, pass_=name).backend for name in calls}
    if row["status"] != "ok":
        return row
    dense, _ = passes(tensors)
    samples = {(who, name): Samples() for who in ("", "dense_") for name in calls}
    for turn in range(ROUNDS):
        for who, by in (("", calls), ("dense_", dense))[:: 1 if turn % 2 else -1]:
            for name, call in by.items():
                clock.round(call, samples[who, name])
    clock.forget()
    return row | {f"{who}{name}_ms": one.quartiles()[0] for (who, name), one in samples.items()}


def portable_dense(clock: CudaClock) -> dict[str, Any]:
    """Attention without a mask by the kernels that take block masks."""
    torch.manual_seed(0)
    calls, _ = passes(inputs(TIMED, TIMED, HEADS), backend="triton")
    row = {}
    for name, call in calls.items():
        samples = Samples()
        for _ in range(ROUNDS):
            clock.round(call, samples)
        row[f"{name}_ms"] = samples.quartiles()[0]
    clock.forget()
    return row


# ---------------------------------------------------------------------------------------------------------- building and memory


def far(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q >= k) & ((q - k < 1024) | (k % 4096 < 64))


def window(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q >= k) & (q - k < 1024)


def floating(b: Any, h: Any, q: Any, k: Any) -> Any:
    return ((q - k).float() < 1024.5) & (q >= k)


def rules(n: int) -> dict[str, Callable[[], masks.Mask]]:
    bounds, ids = torch.arange(0, n + 1, 8192, device="cuda"), torch.arange(n, device="cuda") // 777
    return {
        "window": lambda: masks.SlidingWindow(1023, 0),
        "causal": masks.Causal,
        "chunked causal": lambda: masks.Causal() & masks.Chunked(8192),
        "packed causal": lambda: masks.Document.from_cu_seqlens(bounds, n) & masks.Causal(),
        "sinks and window": lambda: (masks.FirstKeys(4) | masks.SlidingWindow(1023, 0)) & masks.Causal(),
        "function": lambda: masks.Custom(far),
        "window as a function": lambda: masks.Custom(window),
        "documents as a function": lambda: masks.Custom(lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k)),
        "floating-point function": lambda: masks.Custom(floating),
        "function of a table": lambda: masks.Custom(lambda b, h, q, k: ids[q] == ids[k + 0]),
    }


def time_building(make: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds until the lists are there and until the call returns, and the bytes at the peak, lists included."""
    make()
    tile_cache.clear()
    torch.cuda.synchronize()
    ready, returned = [], []
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(11):
        tile_cache.clear()
        torch.cuda.synchronize()
        start = time.perf_counter()
        make()
        returned.append(1e3 * (time.perf_counter() - start))
        torch.cuda.synchronize()
        ready.append(1e3 * (time.perf_counter() - start))
    peak = torch.cuda.max_memory_allocated() - before
    return {"ms": statistics.median(ready), "host_ms": statistics.median(returned), "peak_bytes": peak}


def measure_building() -> list[dict[str, Any]]:
    rows = []
    for name, rule in rules(BUILT).items():
        rows.append({"name": name, "provider": "tilewise"} | time_building(lambda rule=rule: BlockMask(rule(), BUILT, device="cuda")))
    for name, function in (("function", far), ("window as a function", window)):
        rows.append({"name": name, "provider": "flex"} | measure_flex(function))
    return [{"process": 1, "tokens": BUILT, "block": 128} | row for row in rows]


def flex_builder(function: Callable[..., Any]) -> Callable[[], Any]:
    """FlexAttention's compiled `create_block_mask`."""
    from torch.nn.attention.flex_attention import create_block_mask

    torch.compiler.reset()
    build = torch.compile(create_block_mask)
    return lambda: build(function, None, None, BUILT, BUILT, device="cuda")


def measure_flex(function: Callable[..., Any]) -> dict[str, Any]:
    make = flex_builder(function)
    theirs, ours = BlockMask.from_flex(make()).status(), BlockMask(masks.Custom(function), BUILT, device="cuda").status()
    return {"same_lists": torch.equal(theirs, ours)} | time_building(make)


def measure_memory() -> list[dict[str, Any]]:
    """What building and keeping a mask takes, and what forward and backward take beside inputs, output and gradients."""
    rows = []
    for name, rule in rules(LONG).items():
        made = rule()
        tile_cache.clear()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        mask = BlockMask(made, LONG, device="cuda")
        torch.cuda.synchronize()
        row = {"name": name, "tokens": LONG, "heads": 1, "head_dim": 64, "bit_matrix_bytes": LONG**2 // 8}
        row |= {"build_peak_bytes": torch.cuda.max_memory_allocated() - before, "kept_bytes": torch.cuda.memory_allocated() - before}
        tensors = inputs(LONG, LONG, 1, 64)
        given = leaves(tensors)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = attention(*given, mask=mask)
        torch.autograd.grad(out, given, tensors[3])
        torch.cuda.synchronize()
        rows.append(row | {"use_peak_bytes": torch.cuda.max_memory_allocated() - before, "tensor_bytes": given[0].nbytes})
    return rows


# ---------------------------------------------------------------------------------------------------------------------- all of it


def prepare(task: Entry | str) -> str:
    """What a process of its own does before anything is timed: an entry's check, or the first call of what is measured later."""
    if isinstance(task, Entry):
        return check_small(task)
    if task == "flex":
        for function in (far, window):
            flex_builder(function)()
    elif task == "portable":
        attention(*leaves(inputs(SMALL, SMALL, 1)), backend="triton").sum().backward()
    else:
        measured = rules(SMALL)[task]()
        attention(*leaves(inputs(SMALL, SMALL, 1, 64)), mask=BlockMask(measured, SMALL, device="cuda")).sum().backward()
    return "ok"


def main() -> int:
    import triton

    started = time.perf_counter()
    tasks = ["flex", *ENTRIES, *rules(0), "portable"]
    with ProcessPoolExecutor(len(tasks), multiprocessing.get_context("spawn")) as pool:
        outcomes = dict(zip(tasks, pool.map(prepare, tasks), strict=True))
    print(f"{time.perf_counter() - started:.1f} s: prepared", {str(task): how for task, how in outcomes.items() if how != "ok"}, flush=True)

    clock = CudaClock(Sensors.open("cuda"), 12)
    result: dict[str, Any] = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "source_hash": kernel_source_hash(),
        "block": 128,
        "dtype": "bfloat16",
        "rounds": ROUNDS,
    }
    for name, part in (
        ("building", measure_building),
        ("portable_dense", lambda: portable_dense(clock)),
        ("gallery", lambda: [measure_entry(entry, clock, outcomes[entry]) for entry in ENTRIES]),
        ("memory", measure_memory),
    ):
        result[name] = part()
        Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n")
        print(f"{time.perf_counter() - started:.1f} s: {name}", json.dumps(result[name]), flush=True)
    wrong = [row["name"] for row in result["gallery"] if row["status"] != "ok"]
    print("wrong:", wrong or "nothing")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
