"""The lab's kernels on a CUDA device: the memory hierarchy, then speed, accuracy and extra memory of every point.

`python -m tilewise.lab.gpu --out FILE --budget SECONDS`. Bytes are not seen from here; `lab.profile` counts them, and
`lab.measured` runs both.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from ..cost import Device, device_named
from . import results
from .algorithms import Inputs, Results
from .results import Row
from .run import difference, exact
from .sweeps import Point, gpu_points, memory_points

DTYPE = torch.bfloat16
CHECKED_HEADS = 2
# Blocks that share a multiprocessor, an assumption of the predictions: the lab's tiles take about half of one.
RESIDENT = {"softmax": 16, "attention": 2}


def hierarchy() -> Row:
    """Sizes of this device's memories, and the bandwidth of the two that a kernel can be timed on."""
    import triton

    from .triton.probes import read_again_kernel

    about = torch.cuda.get_device_properties()
    large = torch.empty(2 << 30, dtype=torch.int8, device="cuda")
    copy_ms = timed(lambda: large[: 1 << 30].copy_(large[1 << 30 :]))
    numbers = torch.ones(about.L2_cache_size // 16, device="cuda")  # a quarter of L2
    programs, times = 4 * about.multi_processor_count, 4
    sums = torch.empty(programs, device="cuda")
    n = numbers.numel() // 1024 * 1024
    read_ms = timed(lambda: read_again_kernel[(programs,)](numbers, sums, n, times, BLOCK=1024, num_warps=8))
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=DTYPE) for _ in range(2))
    product_ms = timed(lambda: a @ b)
    limits = triton.runtime.driver.active.utils.get_device_properties(torch.cuda.current_device())
    return {
        "experiment": "hierarchy",
        "multiprocessors": about.multi_processor_count,
        "register_bytes_per_sm": 4 * limits.get("max_num_regs", 65536),
        "shared_bytes_per_block": limits["max_shared_mem"],
        "l2_bytes": about.L2_cache_size,
        "device_bytes": about.total_memory,
        "copy_bytes_per_s": 2 * (1 << 30) / copy_ms * 1e3,
        "l2_read_bytes_per_s": 4 * n * times * programs / read_ms * 1e3,
        "matmul_flops_per_s": 2 * 8192**3 / product_ms * 1e3,
        "sm_clock_khz": limits.get("sm_clock_rate"),
        "status": "ok",
    }


def timed(call: Any) -> float:
    """Median milliseconds of a call, the L2 cache overwritten before each."""
    import triton.testing

    return triton.testing.do_bench(call, warmup=20, rep=80, return_mode="median")


def measure(point: Point, device: Device, l2_bytes: int, multiprocessors: int) -> Row:
    """Speed and accuracy of one point; what the device cannot launch or hold is a row as well."""
    step = point.found()
    row: Row = {**point.row(), "dtype": str(DTYPE).removeprefix("torch."), "ms": None, "error": None, "status": "ok"}
    inputs = point.inputs(DTYPE, "cuda")
    resident = RESIDENT["softmax" if point.experiment == "softmax" else "attention"] * multiprocessors
    prediction = step.predict(inputs.case(), min(resident, point.heads * (point.n if point.experiment == "softmax" else 1)))
    row |= results.predicted(prediction, l2_bytes)
    row["roofline_ms"] = prediction.seconds(device, row["dtype"], l2_bytes) * 1e3
    try:
        call = step.launch(inputs)
        row["error"], row["allowed_error"] = checked(call(), inputs, point)
        if not row["error"] <= row["allowed_error"]:  # a NaN is never allowed
            return row | {"status": "wrong"}
        row["ms"] = timed(call)
    except Exception as refusal:  # out of shared memory or registers: a finding of the sweep, not a failure of it
        return row | refused(refusal)
    row["tflops"] = prediction.flops / row["ms"] / 1e9
    return row


def refused(refusal: Exception) -> Row:
    """What kept a point from being measured, as keys of its row."""
    status = "oom" if isinstance(refusal, torch.OutOfMemoryError) else "unsupported"
    return {"status": status, "reason": f"{type(refusal).__name__}: {refusal}".splitlines()[0][:300]}


def checked(got: Results, inputs: Inputs, point: Point) -> tuple[float, float]:
    """The largest error of the first heads against float64, and what is allowed: 1.5 times that of the unfused computation in the same
    dtype, plus a rounding of the result."""
    if point.experiment == "softmax":
        few = Inputs(*(inputs.q[:, :64],) * 4, inputs.tiles)
        want, unfused = exact(few, point.algorithm), {"y": torch.softmax(few.q, -1)}
        got = {"y": got["y"][:, :64]}
    else:
        want = exact(inputs, point.algorithm, CHECKED_HEADS)
        unfused = plain(inputs, point, CHECKED_HEADS)
    names = [name for name in got if name in want]
    error = max(difference(got[name], want[name]) for name in names)
    rounding = max(torch.finfo(DTYPE).eps * want[name].nan_to_num(0, 0, 0).abs().max().item() for name in names)
    return error, 1.5 * max(difference(unfused[name], want[name]) for name in names) + rounding


def plain(inputs: Inputs, point: Point, heads: int) -> Results:
    """Unfused attention in the inputs' dtype with its gradients: the yardstick of accuracy."""
    q, k, v = (x[:heads].detach().clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    s = (q @ k.transpose(1, 2)) * inputs.scale
    if point.algorithm == "block_sparse":
        n, tiles = q.shape[1], inputs.tiles
        mask = inputs.tile_mask().repeat_interleave(tiles.block_m, 0).repeat_interleave(tiles.block_n, 1)[:n, :n]
        s = s.masked_fill(~mask.to(s.device), float("-inf"))
    o = torch.softmax(s, -1) @ v
    grads = torch.autograd.grad(o, (q, k, v), inputs.do[:heads])
    return {"o": o.detach(), "lse": torch.logsumexp(s.float(), -1).detach()} | dict(zip(("dq", "dk", "dv"), grads, strict=True))


def extra_memory(point: Point) -> Row:
    """What a forward pass takes beyond its inputs and its output, by torch's allocator."""
    step, inputs = point.found(), point.inputs(DTYPE, "cuda")
    call = step.launch(inputs)
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    got = call()
    torch.cuda.synchronize()
    kept = sum(x.numel() * x.element_size() for name, x in got.items() if name in ("o", "dq", "dk", "dv"))
    peak = torch.cuda.max_memory_allocated() - before - kept
    prediction = step.predict(inputs.case(), 1)
    return point.row() | {"predicted_extra_bytes": prediction.extra_bytes, "measured_extra_bytes": peak, "status": "ok"}


def main(arguments: list[str] | None = None) -> int:
    """Runs everything within the budget and appends a row each to the file."""
    parser = argparse.ArgumentParser(prog="python -m tilewise.lab.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=240.0)
    given = parser.parse_args(arguments)
    begin, shared = time.monotonic(), results.common("cuda")
    device = device_named(shared["device"])
    memories = hierarchy()
    device = device or Device(shared["device"], {"bfloat16": memories["matmul_flops_per_s"]}, memories["copy_bytes_per_s"])
    results.write([shared | memories], given.out)
    print(shared, memories, flush=True)
    points = [*gpu_points(), *memory_points()]
    for done, point in enumerate(points):
        if time.monotonic() - begin > given.budget:
            print(f"budget of {given.budget:.0f} s spent: {len(points) - done} of {len(points)} points not run")
            break
        try:
            if point.experiment == "memory":
                row = extra_memory(point)
            else:
                row = measure(point, device, memories["l2_bytes"], memories["multiprocessors"])
        except Exception as refusal:
            row = point.row() | refused(refusal)
        results.write([shared | row], given.out)
        print(line(row), flush=True)
        torch.cuda.synchronize()  # raises where a bad access has broken the device for this process: no later number would count
        torch.cuda.empty_cache()
    return 0


def line(row: Row) -> str:
    """One row in one line of text."""
    where = f"{row['experiment']:10s} {row['algorithm']:12s} {row['pass']} heads={row['heads']} N={row['seqlen']} d={row['head_dim']}"
    where += f" {row['block_m']}x{row['block_n']} density={row['density']:g}"
    if row["status"] != "ok":
        return f"{where} {row['status']} {row.get('reason', row.get('error'))}"
    if row["experiment"] == "memory":
        return f"{where} extra {row['measured_extra_bytes']:,} predicted {row['predicted_extra_bytes']:,}"
    return f"{where} {row['ms']:.3f} ms (roofline {row['roofline_ms']:.3f}) {row['tflops']:.0f} TFLOP/s error {row['error']:.1e}"


if __name__ == "__main__":
    raise SystemExit(main())
