"""Forward mode and double backward on a GPU, against the specification in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewise import attention, reference

from .common import qkv, randn

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (100, 20)},
    "softcap": {"softcap": 5.0, "causal": True},
}
DIRECTIONS = ("q", "k", "v")


def absolute_sums(x: dict[str, Tensor], u: dict[str, Tensor], options: dict[str, Any]) -> Tensor:
    """(B, Sq, Hq, Dv): sum over keys of |dP| |V| + P |dV|, whose signed counterpart is the tangent of the output, in float64."""
    q, k, v, uq, uk, uv = (t.double() for t in (*x.values(), *u.values()))
    each_key = torch.eye(k.shape[1], dtype=q.dtype, device=q.device)[None, :, None].expand(k.shape[0], -1, k.shape[2], -1)
    weights, tangents = torch.func.jvp(lambda q, k: reference.attention(q, k, each_key, **options)[0], (q, k), (uq, uk))
    v, uv = (t.abs().repeat_interleave(q.shape[2] // t.shape[2], dim=2) for t in (v, uv))
    return torch.einsum("bqhs,bshd->bqhd", tangents.abs(), v) + torch.einsum("bqhs,bshd->bqhd", weights, uv)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", FEATURES)
def test_tangents_are_as_exact_as_unfused_ones(name, head_dim, dtype):
    """Error against float64: at most 1.5 times that of the unfused computation of the same dtype, and one rounding of the largest element.

    In float32, four units in the last place of the largest sum of absolute values: sums over keys run in another order, and a weight comes
    from an exponential that is good for two such units. That sum is many times its result, as a weight's tangents cancel along a row.
    """
    options = FEATURES[name]
    x, u = (qkv(head_dim=head_dim, dtype=dtype) for _ in range(2))

    def tangent(to: torch.dtype, backend: str | None) -> tuple[Tensor, Tensor]:
        def f(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            if backend is None:
                return reference.attention(q, k, v, **options, compute_dtype=to)
            out, aux = attention(q, k, v, **options, backend=backend, return_aux="lse")
            return out, aux.lse

        return torch.func.jvp(f, tuple(t.to(to) for t in x.values()), tuple(t.to(to) for t in u.values()))[1]

    unfused, exact = tangent(dtype, None), tangent(torch.float64, None)
    sums = [absolute_sums(x, u, options).max().item(), exact[1].abs().max().item()]
    for backend in ("auto",) if dtype == torch.float32 and head_dim > 64 else ("auto", "triton"):
        for got, other, right, summed in zip(tangent(dtype, backend), unfused, exact, sums, strict=True):
            error, allowed = ((y.double() - right).abs().max().item() for y in (got, other))
            last_units = torch.finfo(got.dtype).eps / 2 * right.abs().max().item()
            assert error <= 1.5 * allowed + max(last_units, 4 * torch.finfo(torch.float32).eps * summed)


@pytest.mark.parametrize("options", [{"causal": True}, {"window_size": (100, 20), "softcap": 5.0}], ids=str)
def test_gradients_of_gradients(options):
    """The gradient of the squared gradients, in float32, against the specification's in float64: within what unfused float32 leaves."""
    x = qkv(seqlen_q=150, seqlen_k=200, dtype=torch.float32)
    weight = randn(2, 150, 4, 64, dtype=torch.float32)

    def second(to: torch.dtype, ours: bool) -> list[Tensor]:
        leaves = [t.detach().to(to).requires_grad_() for t in x.values()]
        out = attention(*leaves, **options) if ours else reference.attention(*leaves, **options, compute_dtype=to)[0]
        first = torch.autograd.grad((out * weight.to(to)).sum(), leaves, create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))

    got, unfused, exact = second(torch.float32, True), second(torch.float32, False), second(torch.float64, False)
    for mine, other, right in zip(got, unfused, exact, strict=True):
        error, allowed = ((y.double() - right).abs().max().item() for y in (mine, other))
        assert error <= 1.5 * allowed + 16 * torch.finfo(torch.float32).eps * right.abs().max().item()


SECOND: dict[str, Callable[[], dict[str, Any]]] = {
    **{name: lambda options=options: options for name, options in FEATURES.items()},
    "lengths": lambda: {"seqused_q": lengths(150, 90), "seqused_k": lengths(200, 0), "causal": True},
    "sink, alibi": lambda: {"learnable_sink": randn(4, dtype=torch.float32), "alibi_slopes": torch.rand(4, device="cuda"), "causal": True},
    "bias": lambda: {"bias": randn(2, 4, 150, 200, dtype=torch.float32), "softcap": 5.0},
    "mask": lambda: {"mask": torch.rand(1, 4, 150, 200, device="cuda") < 0.5, "window_size": (60, 30)},
    "dropout": lambda: {"dropout_p": 0.2, "dropout_seed": 3},
}


def lengths(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize(
    ("name", "head_dim", "dtype"),
    [
        *((name, 64, torch.float32) for name in SECOND),
        *(
            (name, head_dim, (torch.float16, torch.bfloat16)[(i + j) % 2])  # each compiles kernels of its own
            for i, name in enumerate(SECOND)
            for j, head_dim in enumerate((64, 80, 128, 256))
        ),
    ],
    ids=str,
)
def test_second_gradients_are_as_exact_as_unfused_ones(name, head_dim, dtype):
    """Of <u, gradients> in q, k, v and dout, by the kernels themselves: error against float64 at most 1.5 times that of the unfused
    computation of the same dtype and one rounding of the largest element; in float32 sixteen, as sums run in another order and weights come
    from a rounded LSE."""
    options = {key: x.to(dtype) if key == "bias" else x for key, x in SECOND[name]().items()}
    x = qkv(seqlen_q=150, seqlen_k=200, head_dim=head_dim, dtype=dtype)
    u = list(qkv(seqlen_q=150, seqlen_k=200, head_dim=head_dim, dtype=dtype).values())
    dout = randn(2, 150, 4, head_dim, dtype=dtype)

    def second(to: torch.dtype, backend: str | None) -> list[Tensor]:
        leaves = [t.detach().to(to).requires_grad_() for t in (*x.values(), dout)]
        if backend is None:
            out = reference.attention(*leaves[:3], **options, compute_dtype=to)[0]
        else:
            out = attention(*leaves[:3], **options, backend=backend)
        first = torch.autograd.grad(out, leaves[:3], leaves[3], create_graph=True)
        return list(torch.autograd.grad(first, leaves, [t.to(to) for t in u]))

    unfused, exact = second(dtype, None), second(torch.float64, None)
    units = 16 * torch.finfo(dtype).eps if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    for backend in ("auto", "triton"):
        for got, other, right in zip(second(dtype, backend), unfused, exact, strict=True):
            error, allowed = ((y.double() - right).abs().max().item() for y in (got, other))
            assert error <= 1.5 * allowed + units * right.abs().max().item()


def test_second_gradients_are_the_same_bits_on_every_run():
    x = [t.requires_grad_() for t in qkv(head_dim=128).values()]

    def second() -> tuple[Tensor, ...]:
        out = attention(*x, causal=True, backend="triton")
        first = torch.autograd.grad(out.float().square().sum(), x, create_graph=True)
        return torch.autograd.grad(sum(g.float().square().sum() for g in first), x)

    assert all(torch.equal(a, b) for a, b in zip(second(), second(), strict=True))


def test_second_gradients_take_linear_memory():
    """32,768 keys, as below."""
    x = [t.requires_grad_() for t in qkv(1, 32_768, 32_768, heads=2, kv_heads=2).values()]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    first = torch.autograd.grad(attention(*x, causal=True).sum(), x, create_graph=True)
    torch.autograd.grad(first[0].sum(), x)
    assert torch.cuda.max_memory_allocated() - before < 32 * x[0].numel() * x[0].element_size()


def test_tangents_take_linear_memory():
    """32,768 keys: one head's score matrix alone would be 4 GiB."""
    x = qkv(1, 32_768, 32_768, heads=2, kv_heads=2)
    u = qkv(1, 32_768, 32_768, heads=2, kv_heads=2)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.func.jvp(lambda *t: attention(*t, causal=True), tuple(x.values()), tuple(u.values()))
    size = x["q"].numel() * x["q"].element_size()
    assert torch.cuda.max_memory_allocated() - before < 16 * size
