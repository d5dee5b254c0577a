"""Time and peak memory of one attention call, forward and backward, as the context grows."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tilewise import cost
from tilewise.demo.model import Attention, eager_attention


@dataclass(frozen=True)
class Shape:
    """One causal attention problem: q, k, v (batch, seqlen, heads, head_dim) of one dtype."""

    seqlen: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    batch: int = 1

    def inputs(self, device: torch.device, dtype: torch.dtype | None = None) -> tuple[list[Tensor], Tensor]:
        """q, k, v that require gradients, and the gradient of the output; the same values for the same shape."""
        generator = torch.Generator().manual_seed(self.seqlen)
        size = (4, self.batch, self.seqlen, self.heads, self.head_dim)
        q, k, v, dout = torch.randn(size, generator=generator).to(self.dtype).to(device, dtype or self.dtype).unbind()
        return [x.clone().requires_grad_() for x in (q, k, v)], dout.clone()

    def unfused_bytes(self) -> int:
        """Predicted peak of `eager_attention`: P, dP and dS in backward, and two N×N boolean masks."""
        problem = cost.Problem(self.batch, self.heads, self.seqlen, self.head_dim, itemsize=self.dtype.itemsize)
        return cost.unfused_bytes(problem, "bwd") + 2 * self.seqlen**2


@dataclass(frozen=True)
class Point:
    """One measurement. `status` is "ok", "limit" (not run: predicted to exceed the memory limit) or "oom" (run, and out of memory);
    seconds and peak_bytes are None unless ok. `predicted_bytes` is None where nothing is predicted."""

    provider: str
    seqlen: int
    status: str
    seconds: float | None = None
    peak_bytes: int | None = None
    predicted_bytes: int | None = None


def measure(
    attention: Attention,
    shapes: list[Shape],
    device: torch.device,
    *,
    memory_limit: int,
    time_budget: float,
) -> Iterator[Point]:
    """Measure `attention` and `eager_attention` on each shape, shortest first.

    The peak is what torch's allocator held beyond the inputs (see `peak_bytes`). Eager attention is not run where its predicted peak is
    above `memory_limit` bytes. Once `time_budget` seconds would be exceeded, longer shapes are left out.

    Raises RuntimeError if the results are wrong on the first shape: no speed is reported for a wrong result.
    """
    check(attention, shapes[0], device)
    deadline = time.perf_counter() + time_budget
    providers = {"eager": eager_attention, "tilewise": attention}
    last_seconds = dict.fromkeys(providers, 0.0)
    for shape in shapes:
        for provider, function in providers.items():
            predicted = shape.unfused_bytes() if provider == "eager" else None
            if predicted is not None and predicted > memory_limit:
                yield Point(provider, shape.seqlen, "limit", predicted_bytes=predicted)
                continue
            # Work grows with N^2, and a point is two calls at least.
            if time.perf_counter() + 2 * 4 * last_seconds[provider] > deadline:
                continue
            inputs, dout = shape.inputs(device)
            call = partial(step, function, inputs, dout)
            try:
                peak = peak_bytes(call, device)
                seconds = last_seconds[provider] = median_seconds(call, device)
            except torch.OutOfMemoryError:
                yield Point(provider, shape.seqlen, "oom", predicted_bytes=predicted)
                continue
            yield Point(provider, shape.seqlen, "ok", seconds, peak, predicted)


def step(attention: Attention, inputs: list[Tensor], dout: Tensor) -> list[Tensor]:
    """One forward and backward pass: the output and the gradients of q, k and v."""
    out = attention(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


def check(attention: Attention, shape: Shape, device: torch.device) -> None:
    """Compare output and gradients with float64: at most 1.5 times eager's error plus one rounding of the result, or RuntimeError.

    Errors are root-mean-square ones: a mistake in one row still stands out by orders of magnitude, and the luck of one element does not.
    """
    exact = step(eager_attention, *shape.inputs(device, torch.float64))
    ours = step(attention, *shape.inputs(device))
    eager = step(eager_attention, *shape.inputs(device))
    for name, truth, mine, theirs in zip(("out", "dq", "dk", "dv"), exact, ours, eager, strict=True):
        error, theirs_error, size = (x.square().mean().sqrt().item() for x in (mine - truth, theirs - truth, truth))
        allowed = 1.5 * theirs_error + torch.finfo(shape.dtype).eps / 2 * size
        if not error <= allowed:
            raise RuntimeError(f"{name} is off by {error:.2e} from float64, more than the {allowed:.2e} that rounding allows")


def median_seconds(call: Callable[[], object], device: torch.device, *, at_most: float = 0.5, rounds: int = 5) -> float:
    """Median time of up to `rounds` calls, fewer once they have taken `at_most` seconds. The first use must lie behind."""
    times: list[float] = []
    while len(times) < rounds and sum(times) < at_most:
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """The most that torch's allocator of `device` held at once during `call`, beyond what it held before.

    On a GPU the allocator counts. On a CPU the profiler records every allocation and release, those inside fused kernels included;
    scratch memory that a mathematics library takes for itself is not seen. Compiles and caches must lie behind on a GPU: the call runs
    once more for that.
    """
    if device.type == "cuda":
        call()
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself on standard output otherwise
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    held = peak = 0
    for event in sorted((event for event in events if event.get("name") == "[memory]"), key=lambda event: event["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak


def synchronize(device: torch.device) -> None:
    """Wait for the device's queue, where it has one."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
