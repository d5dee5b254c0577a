"""The same bits on every run, of each kind of kernel, and what would show a race."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilewise import attention, masks

from ..reports import report
from .common import qkv, randn, watched

# q, k, v and what is given beside them: one call of each kind of kernel. Bits of bias gradients are in the first two.
CALLS: dict[str, Any] = {
    "64, bias": lambda: {**qkv(2, 777, 1000, 8, 8), "bias": randn(1, 8, 777, 1000), "causal": True},
    "128, bias": lambda: {**qkv(2, 777, 1000, 8, 8, 128), "bias": randn(1, 8, 777, 1000), "causal": True},
    "64, float16": lambda: {**qkv(2, 777, 1000, 8, 2, dtype=torch.float16), "causal": True},
    "three consumers": lambda: qkv(2, 3100, 3100, 4, 2),
    "three consumers, causal": lambda: {**qkv(2, 3100, 3100, 4, 2), "causal": True},
    "192 and 128": lambda: {**qkv(2, 777, 1000, 8, 2, 192, 128), "causal": True},
    "256": lambda: {**qkv(2, 777, 1000, 8, 2, 256), "causal": True},
    "dropout": lambda: {**qkv(2, 777, 1000, 8, 2), "causal": True, "dropout_p": 0.1, "dropout_seed": -7},
    "window": lambda: {**qkv(2, 777, 1000, 8, 2), "window_size": (100, 30)},
    "lists": lambda: {**qkv(2, 777, 1000, 8, 2, 128), "mask": masks.Blocks(torch.rand(2, 8, 7, 8, device="cuda") < 0.5, 128)},
}


@pytest.mark.parametrize("name", CALLS)
def test_100_runs_give_the_same_bits(backend: str, name: str) -> None:
    """Of lists the Hopper kernels add parts of dq in any order, and refuse to be deterministic: there it may differ by its rounding."""
    arguments = CALLS[name]()
    unordered = (name, backend) == ("lists", "hopper")
    leaves = [arguments[key].requires_grad_() for key in ("q", "k", "v", "bias") if key in arguments]
    dout = randn(*arguments["q"].shape[:3], arguments["v"].shape[3], dtype=arguments["q"].dtype)

    def run() -> tuple[torch.Tensor, ...]:
        out = attention(**arguments, deterministic=not unordered, backend=backend)
        return out.detach(), *torch.autograd.grad(out, leaves, dout)

    with watched() as passes:
        first = run()
    assert passes == [f"{backend} forward", f"{backend} backward"]
    for _ in range(99):
        for index, (got, expected) in enumerate(zip(run(), first, strict=True)):
            if unordered and index == 1:
                torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)
            else:
                assert torch.equal(got, expected)


@report(122)
@pytest.mark.unpoisoned
@pytest.mark.parametrize("seqlen_k, heads, dim", [(128, 1, 128), (384, 2, 128), (384, 2, 64)], ids=str)
def test_a_hidden_race_would_move_the_error(report: str, backend: str, seqlen_k: int, heads: int, dim: int) -> None:
    """Many short rows of keys under long queries, wide inputs, fifty backward passes: no run strays from the first. Where two heads share
    three tiles of keys, those add to dq at the same time and in any order."""
    leaves = [(3 * x).requires_grad_() for x in qkv(64 // heads, 2048, seqlen_k, heads, 1, dim, dtype=torch.float16).values()]
    dout = randn(64 // heads, 2048, heads, dim, dtype=torch.float16)
    with watched() as passes:
        out = attention(*leaves, backend=backend, deterministic=False)
        first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    assert passes == [f"{backend} forward", f"{backend} backward"]
    for _ in range(49):
        for got, expected in zip(torch.autograd.grad(out, leaves, dout, retain_graph=True), first, strict=True):
            assert (got - expected).abs().max() <= 4e-3 * expected.abs().max()
