"""Public reports of faults in other attention libraries, as inputs to this one: shapes, strides, large tensors.

The number of the report is in the test's id. Each test covers neighbours too: dtypes, the output, the LSE and every gradient.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewise import attention

from .comparing import compare
from .helpers import make_inputs
from .reports import I32, LOW_DTYPES, NEG_INF, VIEWS, as_view, both_backends, dtypes, report

# ----------------------------------------------------------------- D. shapes, heads, head dims


@report(44)
@both_backends
@dtypes
def test_a_single_token_has_no_score_gradient(report: str, dtype: torch.dtype, backend: str) -> None:
    q, k, v = ((3 * torch.randn(1, 1, 1, 16)).to(dtype).requires_grad_() for _ in range(3))
    dq, dk, dv = torch.autograd.grad(attention(q, k, v, backend=backend), (q, k, v), torch.ones(1, 1, 1, 16, dtype=dtype))
    assert dq.abs().max() <= 32 * torch.finfo(dtype).eps and dk.abs().max() <= 32 * torch.finfo(dtype).eps
    assert (dv == 1).all()


@report(49)
@both_backends
@dtypes
def test_an_item_without_queries_gives_its_keys_no_gradient(report: str, dtype: torch.dtype, backend: str) -> None:
    x = make_inputs(3, 15, 10, heads=2, head_dim=8, dtype=dtype)
    got = compare({**x, "seqused_q": torch.tensor([15, 0, 15], dtype=I32)}, backend)
    assert (got["dk"][1] == 0).all() and (got["dv"][1] == 0).all() and (got["out"][1] == 0).all()


# (B, Sq, Sk, H, D, Dv)
ZERO_SIZES = [(2, 4, 0, 1, 64, 64), (0, 3, 5, 2, 8, 8), (0, 0, 13, 0, 0, 0), (2, 0, 5, 2, 8, 8), (2, 3, 5, 0, 8, 8)]


@report(50, 52, 56)
@both_backends
@dtypes
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "shape", [(2, 4, 0, 1, 64, 64), (0, 3, 5, 2, 8, 8), (0, 0, 13, 0, 0, 0), (2, 0, 5, 2, 8, 8), (2, 3, 5, 0, 8, 8)], ids=str
)
def test_zero_sizes(report: str, shape: tuple[int, ...], causal: bool, dtype: torch.dtype, backend: str) -> None:
    b, sq, sk, h, d, dv = shape
    leaves = [torch.randn(s).to(dtype).requires_grad_() for s in ((b, sq, h, d), (b, sk, h, d), (b, sk, h, dv))]
    out, aux = attention(*leaves, causal=causal, backend=backend, return_aux="lse")
    assert out.shape == (b, sq, h, dv) and (out == 0).all() and (aux.lse == NEG_INF).all()
    for x, grad in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
        assert grad.shape == x.shape and (grad == 0).all()


@report(53)
@both_backends
@dtypes
def test_head_dim_zero_averages_the_values(report: str, dtype: torch.dtype, backend: str) -> None:
    q, k, v = torch.zeros(1, 4, 1, 0, dtype=dtype), torch.zeros(1, 4, 1, 0, dtype=dtype), torch.randn(1, 4, 1, 8).to(dtype)
    v.requires_grad_()
    out = attention(q, k, v, backend=backend)
    torch.testing.assert_close(out, v.mean(1, keepdim=True).expand_as(out), rtol=1e-2, atol=1e-2)
    (grad,) = torch.autograd.grad(out.sum(), v)
    torch.testing.assert_close(grad, torch.ones_like(grad), rtol=1e-2, atol=1e-2)


@report(53)
@both_backends
def test_value_dim_zero_still_has_an_lse(report: str, backend: str) -> None:
    q, k, v = torch.randn(1, 4, 1, 8), torch.randn(1, 4, 1, 8), torch.zeros(1, 4, 1, 0)
    q.requires_grad_()
    out, aux = attention(q, k, v, backend=backend, return_aux="lse")
    assert out.shape == (1, 4, 1, 0)
    expected = (torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(8)).logsumexp(-1)
    torch.testing.assert_close(aux.lse, expected)
    for a, b in zip(torch.autograd.grad(aux.lse.sum(), q), torch.autograd.grad(expected.sum(), q), strict=True):
        torch.testing.assert_close(a, b)


@report(58)
@both_backends
@dtypes
@pytest.mark.parametrize("dim", [1, 2, 3, 17, 60, 65, 80, 96, 100, 192, 256, 320])
def test_any_head_dim(report: str, dim: int, dtype: torch.dtype, backend: str) -> None:
    x = make_inputs(1, 9, 11, heads=2, head_dim=dim, dtype=dtype)
    compare({**x, "causal": True}, backend)
    torch.testing.assert_close(attention(**x, backend=backend), attention(**x, softmax_scale=dim**-0.5, backend=backend))


@report(59)
@both_backends
@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
@pytest.mark.parametrize("dim", [128, 256])
def test_every_channel_counts(report: str, dim: int, dtype: torch.dtype, backend: str) -> None:
    x = make_inputs(1, 16, heads=1, head_dim=dim, dtype=dtype)
    for name in ("q", "k"):
        x[name][..., : dim // 2] = 0
    compare(x, backend)


@report(61)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_one_query_and_every_length_around_a_tile(report: str, layout: str, small_tiles: None) -> None:
    for size in range(28, 53):
        x = make_inputs(1, 1, size, heads=2, head_dim=8, layout=layout)
        x = {name: t.transpose(1, 2).contiguous().transpose(1, 2) for name, t in x.items()}
        compare({**x, "layout": layout}, "tiled")


@report(62)
@both_backends
@dtypes
@pytest.mark.parametrize("heads", [(3, 1), (5, 1), (24, 4), (28, 4), (64, 1), (71, 1), (6, 6)], ids=str)
def test_any_group_size(report: str, heads: tuple[int, int], dtype: torch.dtype, backend: str) -> None:
    x = make_inputs(1, 7, 9, heads=heads[0], kv_heads=heads[1], head_dim=8, dtype=dtype)
    compare({**x, "causal": True}, backend)


@report(64, 65)
@both_backends
@dtypes
@pytest.mark.parametrize("dims", [(16, 16), (64, 128), (192, 128), (8, 5)], ids=str)
@pytest.mark.parametrize("sizes", [(9, 9), (5, 20), (20, 5)], ids=str)
def test_grouped_heads_and_unequal_head_dims(report: str, dims: Any, sizes: Any, dtype: torch.dtype, backend: str) -> None:
    compare(make_inputs(1, *sizes, heads=8, kv_heads=2, head_dim=dims[0], head_dim_v=dims[1], dtype=dtype), backend)
    x = make_inputs(1, *sizes, heads=4, kv_heads=2, head_dim=dims[0], head_dim_v=dims[1], dtype=dtype)
    grouped = attention(**x, backend=backend)
    repeated = attention(x["q"], x["k"].repeat_interleave(2, 2), x["v"].repeat_interleave(2, 2), backend=backend)
    torch.testing.assert_close(grouped, repeated)


# ----------------------------------------------------------------- E. strides, views, alignment, broadcast


@report(67, 70, 73, 74, 77)
@both_backends
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("how", VIEWS)
@pytest.mark.parametrize("which", ["q", "k", "v", "all"])
def test_strides_change_nothing(report: str, which: str, how: str, layout: str, backend: str) -> None:
    """Bit for bit the result of contiguous inputs, gradients included, with a mask that is expanded and sliced."""
    plain = make_inputs(2, 13, 21, heads=4, kv_heads=2, head_dim=8, layout=layout)
    mask = (torch.rand(2, 1, 15, 23) < 0.8)[:, :, 1:14, 2:].expand(2, 4, 13, 21)
    viewed = {name: as_view(x, how) if which in (name, "all") else x for name, x in plain.items()}
    results = []
    for x in (plain, viewed):
        leaves = [t.detach().requires_grad_() for t in x.values()]
        out = attention(*leaves, mask=mask, causal=True, layout=layout, backend=backend)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
        assert b.is_contiguous()


@report(67, 76)
@both_backends
@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
@pytest.mark.parametrize("sk", [7, 13, 77])
@pytest.mark.parametrize("how", ["contiguous", *VIEWS, "expanded"])
def test_bias_of_any_length_and_strides(report: str, how: str, sk: int, dtype: torch.dtype, backend: str) -> None:
    x = make_inputs(2, 11, sk, heads=2, head_dim=8, dtype=dtype)
    bias = torch.randn(2, 2, 11, sk).to(dtype)
    bias = bias[:1, :1].expand(2, 2, 11, sk) if how == "expanded" else as_view(bias, how)
    got = compare({**x, "bias": bias}, backend)
    assert got["dbias"].shape == bias.shape


@report(68, 79)
@both_backends
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("how", [*VIEWS, "expanded_scalar", "expanded_rows"])
def test_strides_of_the_output_gradient_change_nothing(report: str, how: str, layout: str, backend: str) -> None:
    x = make_inputs(2, 13, heads=4, kv_heads=1, head_dim=16, layout=layout)
    leaves = [t.requires_grad_() for t in x.values()]
    out = attention(*leaves, causal=True, layout=layout, backend=backend)
    if how == "expanded_scalar":
        dout = torch.tensor(1.0).expand(out.shape)
    elif how == "expanded_rows":
        dout = torch.randn(1, 1, 1, 16).expand(out.shape)
    else:
        dout = as_view(torch.randn(out.shape), how)
    got = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    for a, b in zip(got, torch.autograd.grad(out, leaves, dout.contiguous()), strict=True):
        assert torch.equal(a, b)


@report(77)
@both_backends
def test_slices_of_one_packed_buffer(report: str, backend: str) -> None:
    packed = torch.randn(2, 13, 3 * 4, 8, requires_grad=True)
    q, k, v = packed.split(4, 2)
    out = attention(q, k, v, backend=backend)
    (grad,) = torch.autograd.grad(out.sin().sum(), packed)
    apart = [t.detach().contiguous().requires_grad_() for t in (q, k, v)]
    expected = attention(*apart, backend=backend)
    assert torch.equal(out, expected)
    torch.testing.assert_close(grad, torch.cat(torch.autograd.grad(expected.sin().sum(), apart), 2))


# ----------------------------------------------------------------- F. large tensors


@report(82, 83, 85, 86)
@both_backends
@pytest.mark.parametrize("which", ["q", "k", "v", "dout", "bias"])
def test_strides_beyond_32_bits(report: str, which: str, backend: str) -> None:
    """A batch stride of 2**31 elements and more, without the memory: pages that nobody touches do not exist."""
    x = make_inputs(3, 5, 7, heads=2, head_dim=8, dtype=torch.bfloat16)
    x["bias"] = torch.randn(3, 2, 5, 7).to(torch.bfloat16)
    tensors = {**x, "dout": torch.randn(3, 5, 2, 8).to(torch.bfloat16)}

    def run(given: dict[str, Tensor]) -> list[Tensor]:
        leaves = [given[name].detach().requires_grad_() for name in ("q", "k", "v", "bias")]
        out = attention(*leaves[:3], bias=leaves[3], backend=backend)
        return [out, *torch.autograd.grad(out, leaves, given["dout"])]

    small = tensors[which]
    fill, torch.utils.deterministic.fill_uninitialized_memory = torch.utils.deterministic.fill_uninitialized_memory, False
    stride = 2**30 + 8
    huge = torch.empty(2 * stride + small[0].numel(), dtype=torch.bfloat16)
    torch.utils.deterministic.fill_uninitialized_memory = fill
    view = huge.as_strided(small.shape, (stride, *small.stride()[1:]))
    view.copy_(small)
    for a, b in zip(run(tensors), run({**tensors, which: view}), strict=True):
        assert torch.equal(a, b)


@report(94, 95)
@both_backends
def test_more_than_65535_heads_in_all(report: str, backend: str) -> None:
    x = make_inputs(10923, 2, 2, heads=6, head_dim=4, dtype=torch.bfloat16)
    leaves = [t.requires_grad_() for t in x.values()]
    out = attention(*leaves, causal=True, backend=backend)
    out.sum().backward()
    last = [t.detach()[-1:].requires_grad_() for t in leaves]
    expected = attention(*last, causal=True, backend=backend)
    expected.sum().backward()
    torch.testing.assert_close(out[-1:], expected)
    for whole, single in zip(leaves, last, strict=True):
        torch.testing.assert_close(whole.grad[-1:], single.grad)


@report(92)
@both_backends
@pytest.mark.parametrize("size", [32767, 32769, 65537])
def test_lengths_around_sixteen_bits(report: str, size: int, backend: str) -> None:
    q = torch.zeros(1, 2, 1, 8)
    k, v = torch.zeros(1, size, 1, 8), torch.zeros(1, size, 1, 8)
    v[:, -1] = size
    out, aux = attention(q, k, v, backend=backend, return_aux="lse")
    torch.testing.assert_close(out, torch.ones_like(out), rtol=1e-4, atol=0)
    torch.testing.assert_close(aux.lse, torch.full_like(aux.lse, math.log(size)))
    long = attention(k[:, :, :, :1], q[:, :, :, :1], torch.ones(1, 2, 1, 8), backend=backend)
    assert (long == 1).all()
