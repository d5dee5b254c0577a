"""Faults that users of other attention libraries reported in public, as inputs to this one. The id of each test is the report's number.

Each test covers the neighbours of its report too: dtypes, and the output, the LSE and every gradient.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tilewise import attention, reference
from tilewise.kernels import tiled

from .comparing import compare
from .helpers import make_inputs, reference_with_grads, run_with_grads

NEG_INF = float("-inf")
I32 = torch.int32
ALL_DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
LOW_DTYPES = [torch.float16, torch.bfloat16, torch.float32]

both_backends = pytest.mark.parametrize("backend", ["tiled", "auto"])
dtypes = pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16, so that small inputs have many."""
    monkeypatch.setattr(tiled, "CPU_TILES", tiled.TileSizes(block_m=16, block_n=16, scores=2 * 16 * 16))


def report(*numbers: int) -> Any:
    """Puts the numbers of the reports into the test's id."""
    return pytest.mark.parametrize("report", ["-".join(f"B{number:02d}" for number in numbers)])


# ----------------------------------------------------------------- A. empty rows, log-sum-exp, NaN hygiene


@report(1)
@dtypes
@both_backends
def test_rows_that_a_mask_hides_are_zero(report: str, dtype: torch.dtype, backend: str) -> None:
    x = make_inputs(1, 8, heads=1, head_dim=8, dtype=dtype)
    mask = torch.ones(8, 8, dtype=torch.bool)
    mask[4:] = False
    got = compare({**x, "mask": mask}, backend)
    assert (got["out"][:, 4:] == 0).all() and (got["lse"][..., 4:] == NEG_INF).all() and (got["dq"][:, 4:] == 0).all()


@report(2)
@dtypes
@both_backends
def test_a_padded_item_leaves_its_neighbour_alone(report: str, dtype: torch.dtype, backend: str) -> None:
    x = make_inputs(2, 4, heads=1, head_dim=8, dtype=dtype)
    mask = torch.tensor([True, False]).view(2, 1, 1, 1).expand(2, 1, 1, 4)
    leaves = [t.requires_grad_() for t in x.values()]
    attention(*leaves, mask=mask, backend=backend)[0].sum().backward()
    alone = [t.detach()[:1].requires_grad_() for t in leaves]
    attention(*alone, backend=backend).sum().backward()
    for padded, single in zip(leaves, alone, strict=True):
        torch.testing.assert_close(padded.grad[:1], single.grad)
        assert (padded.grad[1] == 0).all()


@report(4)
@both_backends
@dtypes
def test_a_row_of_finfo_min_is_finite(report: str, dtype: torch.dtype, backend: str) -> None:
    x = make_inputs(1, 3, 4, heads=1, head_dim=8, dtype=dtype)
    bias = torch.ones(3, 4, dtype=dtype)
    bias[0] = torch.finfo(dtype).min
    leaves = [t.requires_grad_() for t in (*x.values(), bias)]
    out = attention(*leaves[:3], bias=bias, backend=backend)
    torch.testing.assert_close(out[:, 1:], attention(*leaves[:3], backend=backend)[:, 1:], rtol=2e-2, atol=2e-2)
    assert out.isfinite().all()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), leaves))


@report(5)
@both_backends
@dtypes
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("how", ["mask", "length", "causal"])
def test_a_hidden_key_poisons_nothing(report: str, how: str, poison: float, dtype: torch.dtype, backend: str) -> None:
    x = make_inputs(1, 2, heads=1, head_dim=8, dtype=dtype)
    hidden = 1
    options: dict[str, Any] = {"mask": torch.tensor([True, False])}
    if how == "length":
        options = {"seqused_k": torch.tensor([1], dtype=I32)}
    if how == "causal":  # one more key than any query sees
        options = {"window_size": (-1, -1), "mask": torch.ones(2, 3).tril().bool()}
        x |= {name: functional.pad(x[name], (0, 0, 0, 0, 0, 1)) for name in ("k", "v")}
        hidden = 2
    clean = run_with_grads(lambda **a: (attention(**a, backend=backend), torch.zeros(())), {**x, **options}, torch.ones_like(x["q"]))
    for name in ("k", "v"):
        x[name] = x[name].clone()
        x[name][:, hidden] = poison
    poisoned = run_with_grads(lambda **a: (attention(**a, backend=backend), torch.zeros(())), {**x, **options}, torch.ones_like(x["q"]))
    assert torch.equal(clean.out, poisoned.out)
    for name, grad in clean.grads.items():
        assert torch.equal(grad, poisoned.grads[name]), name


@report(7)
@both_backends
@pytest.mark.parametrize("via", ["bias", "mask", "window"])
@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
def test_leading_key_blocks_hidden_from_later_rows(report: str, dtype: torch.dtype, via: str, backend: str) -> None:
    """A band: for late rows whole blocks of keys come first in which every score is -inf."""
    x = make_inputs(1, 640, heads=1, head_dim=4, dtype=dtype)
    band = torch.ones(640, 640).tril().triu(-9).bool()
    options: dict[str, Any] = {"bias": torch.zeros(640, 640, dtype=dtype).masked_fill(~band, NEG_INF)}
    if via == "mask":
        options = {"mask": band}
    if via == "window":
        options = {"window_size": (9, 0)}
    compare({**x, **options}, backend)


@report(8)
@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
def test_blocks_equal_separate_calls(report: str, dtype: torch.dtype, small_tiles: None) -> None:
    x = make_inputs(1, 75, heads=2, head_dim=20, dtype=dtype)
    blocks = [(0, 16), (16, 32), (32, 48), (68, 75)]
    mask = torch.zeros(75, 75, dtype=torch.bool)
    for a, b in blocks:
        mask[a:b, a:b] = True
    got = compare({**x, "mask": mask}, "tiled")
    for a, b in blocks:
        alone = attention(*(t[:, a:b] for t in x.values()), backend="tiled")
        torch.testing.assert_close(got["out"][:, a:b], alone)
    assert (got["out"][:, 48:68] == 0).all() and (got["dk"][:, 48:68] == 0).all()


@report(10)
@dtypes
def test_document_resets_in_an_additive_bias(report: str, dtype: torch.dtype, small_tiles: None) -> None:
    x = make_inputs(1, 64, heads=1, head_dim=32, dtype=dtype)
    document = torch.arange(64) // 16
    visible = (document[:, None] == document) & torch.ones(64, 64).tril().bool()
    bias = torch.zeros(1, 1, 64, 64, dtype=dtype).masked_fill(~visible, NEG_INF)
    got = compare({**x, "bias": bias}, "tiled")
    assert (got["dbias"][0, 0][~visible] == 0).all()


@report(11, 13)
@both_backends
@dtypes
@pytest.mark.parametrize("why", ["no_keys", "more_queries", "mask", "window", "length"])
def test_attention_over_no_keys_has_one_meaning(report: str, why: str, dtype: torch.dtype, backend: str) -> None:
    x = make_inputs(2, 4, 0 if why == "no_keys" else 3, heads=2, head_dim=8, dtype=dtype)
    options: dict[str, dict[str, Any]] = {
        "no_keys": {},
        "more_queries": {"mask": torch.zeros(4, 1).bool(), "causal": True},
        "mask": {"mask": torch.zeros(2, 1, 1, 3).bool()},
        "window": {"window_size": (0, 0), "seqused_k": torch.zeros(2, dtype=I32)},
        "length": {"seqused_k": torch.zeros(2, dtype=I32)},
    }
    leaves = [t.requires_grad_() for t in x.values()]
    out, aux = attention(*leaves, **options[why], backend=backend, return_aux="lse")
    assert (out == 0).all() and (aux.lse == NEG_INF).all()
    for grad in torch.autograd.grad([out, aux.lse], leaves, [torch.ones_like(out), torch.ones_like(aux.lse)]):
        assert (grad == 0).all()


@report(14)
@both_backends
@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
@pytest.mark.parametrize("size", [16, 300])
def test_very_low_logits_are_no_sentinel(report: str, dtype: torch.dtype, size: int, backend: str) -> None:
    q = torch.full((1, 3, 1, 64), -87.0, dtype=dtype)
    k = torch.full((1, size, 1, 64), 87.0, dtype=dtype)
    v = torch.randn(1, size, 1, 64).to(dtype)
    out, aux = attention(q, k, v, backend=backend, return_aux="lse")
    torch.testing.assert_close(out.float(), v.float().mean(1, keepdim=True).expand_as(out), rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(aux.lse, torch.full_like(aux.lse, -87.0 * 87.0 * 8 + math.log(size)))


@report(16)
@both_backends
def test_deterministic_mode_changes_no_number(report: str, backend: str) -> None:
    """That mode fills new buffers with NaN: nothing may be read before it is written, or left unwritten."""
    x = make_inputs(2, 64, heads=2, head_dim=16)
    lengths = torch.tensor([64, 60], dtype=I32)
    results = []
    for mode in (False, True):
        torch.use_deterministic_algorithms(mode)
        leaves = [t.detach().clone().requires_grad_() for t in x.values()]
        with torch.autocast("cpu", torch.bfloat16):
            out = attention(*leaves, seqused_q=lengths, seqused_k=lengths, backend=backend)
        results.append([out, *torch.autograd.grad(out.sum(), leaves)])
    for plain, deterministic in zip(*results, strict=True):
        torch.testing.assert_close(plain, deterministic)
        assert deterministic.isfinite().all()


# ----------------------------------------------------------------- B. extreme values and precision


@report(17)
@both_backends
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1, 5])
def test_very_large_inputs(report: str, dtype: torch.dtype, size: int, backend: str) -> None:
    x = torch.full((1, 1, size, 64), 133120.0, dtype=dtype, requires_grad=True)
    out = attention(x, x, x, layout="bhsd", backend=backend)
    assert (out == 133120.0).all()
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert grad.isfinite().all()


@report(19)
@both_backends
@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
def test_large_identical_keys_have_no_gradient(report: str, dtype: torch.dtype, backend: str) -> None:
    size = 60.0 if dtype == torch.float16 else 125.0
    x = {"q": torch.full((2, 50, 3, 64), size), "k": torch.full((2, 50, 3, 64), size), "v": torch.randn(2, 50, 3, 64)}
    x = {name: t.to(dtype) for name, t in x.items()}
    leaves = [t.requires_grad_() for t in x.values()]
    out = attention(*leaves, backend=backend)
    torch.testing.assert_close(out.float(), x["v"].float().mean(1, keepdim=True).expand_as(out), rtol=1e-2, atol=2e-3)
    dq, dk, dv = torch.autograd.grad(out.sum(), leaves)
    # dS sums to zero over a row of identical keys: what remains in dq is the rounding of out, times the size of the keys.
    assert dq.abs().max() <= size * 64 * torch.finfo(dtype).eps
    exact = reference_with_grads({name: t.detach() for name, t in x.items()}, torch.ones_like(out)).grads
    for grad, name in ((dk, "k"), (dv, "v")):
        assert (grad - exact[name]).abs().max() <= 0.05 * exact[name].abs().max(), name


# ----------------------------------------------------------------- C. causal alignment, windows, ALiBi


@report(34, 35, 37)
@both_backends
@dtypes
@pytest.mark.parametrize("size", [(2, 5), (1, 8), (5, 2), (3, 7), (70, 33), (33, 70), (2048 // 32, 1024 // 32)], ids=str)
def test_causal_with_unequal_lengths(report: str, size: tuple[int, int], dtype: torch.dtype, backend: str) -> None:
    sq, sk = size
    x = make_inputs(1, sq, sk, heads=2, head_dim=8, dtype=dtype)
    got = compare({**x, "causal": True}, backend)
    empty = max(sq - sk, 0)
    assert (got["out"][:, :empty] == 0).all() and (got["lse"][..., :empty] == NEG_INF).all() and (got["dq"][:, :empty] == 0).all()
    assert got["lse"][..., empty:].isfinite().all()


@report(38)
@both_backends
@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
def test_a_window_as_wide_as_the_keys_is_causal(report: str, dtype: torch.dtype, backend: str) -> None:
    x = make_inputs(1, 256, heads=1, head_dim=32, dtype=dtype)
    compare({**x, "causal": True}, backend)
    for window in ((-1, 0), (256, 0), (255, 0)):
        compare({**x, "window_size": window}, backend)


@report(40)
@both_backends
def test_a_window_counts_keys_inclusively(report: str, backend: str) -> None:
    q = k = torch.zeros(1, 8, 1, 8)
    v = torch.eye(8).view(1, 8, 1, 8)
    seen = attention(q, k, v, causal=True, window_size=(3, -1), backend=backend)[0, :, 0] > 0
    for i in range(8):
        assert seen[i].nonzero().flatten().tolist() == list(range(max(0, i - 3), i + 1))


@report(41)
@pytest.mark.parametrize("window", [(-4, 0), (0, -2), (-2, -1), (-(2**31), 0)], ids=str)
def test_a_negative_window_is_no_unlimited_one(report: str, window: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="window_size"):
        attention(**make_inputs(1, 8, heads=1), window_size=window)


@report(43)
@both_backends
@dtypes
@pytest.mark.parametrize("per_batch", [False, True])
@pytest.mark.parametrize("size", [(5, 9), (9, 5)], ids=str)
def test_alibi_slopes_of_both_shapes(report: str, per_batch: bool, size: tuple[int, int], dtype: torch.dtype, backend: str) -> None:
    x = make_inputs(2, *size, heads=3, head_dim=8, dtype=dtype)
    slopes = (torch.rand(2, 3) if per_batch else torch.rand(3)).to(dtype)
    compare({**x, "alibi_slopes": slopes, "causal": True}, backend)


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


def as_view(x: Tensor, how: str) -> Tensor:
    """The same values behind strides of another kind."""
    if how == "transposed":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "offset":
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    if how == "inner_two":
        return torch.stack([x, torch.full_like(x, math.nan)], -1).flatten(-2)[..., ::2]
    if how == "channels_first":
        return x.mT.contiguous().mT
    if how == "sliced":
        return functional.pad(x, (3, 5, 0, 0, 1, 2), value=math.nan)[:, 1:-2, :, 3:-5]
    return x


VIEWS = ["transposed", "offset", "inner_two", "channels_first", "sliced"]


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


# ----------------------------------------------------------------- G. gradients

OPTIONS: dict[str, Any] = {
    "causal": True,
    "window_size": (20, 3),
    "mask": torch.rand(2, 1, 33, 40, generator=torch.Generator().manual_seed(0)) < 0.8,
    "bias": torch.randn(4, 33, 40, generator=torch.Generator().manual_seed(1)),
    "softcap": 2.0,
    "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625]),
    "learnable_sink": torch.tensor([0.0, 1.0, -1.0, 2.0]),
    "score_mod": lambda s, b, h, i, j: s + 0.125 * (j - i),
    "dropout_p": 0.25,
    "seqused_k": torch.tensor([40, 21], dtype=I32),
    "softmax_scale": 0.5,
}


@report(97)
@pytest.mark.parametrize("name", OPTIONS)
def test_what_forward_takes_is_in_backward(report: str, name: str, small_tiles: None) -> None:
    """Each option alone: it changes every gradient, and to the right value."""
    x = make_inputs(2, 33, 40, heads=4, kv_heads=2, head_dim=16, dtype=torch.float64)
    x = {key: t.double() for key, t in x.items()}
    value = OPTIONS[name]
    option = {name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value}
    if name == "dropout_p":
        option["dropout_seed"] = 11
    dout = torch.randn(2, 33, 4, 16, dtype=torch.float64)
    plain = compare(x, "tiled", dout=dout, with_lse=False)
    changed = compare({**x, **option}, "tiled", dout=dout, with_lse=False)
    for gradient in ("dq", "dk", "dv"):
        assert not torch.allclose(plain[gradient], changed[gradient]), f"{gradient} ignores {name}"


@report(98)
@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
def test_a_mask_equal_to_causal_has_its_gradients(report: str, dtype: torch.dtype, small_tiles: None) -> None:
    x = make_inputs(1, 64, heads=2, head_dim=64, dtype=dtype)
    as_mask = compare({**x, "mask": torch.ones(64, 64).tril().bool()}, "tiled")
    causal = compare({**x, "causal": True}, "tiled")
    for name, value in causal.items():
        torch.testing.assert_close(as_mask[name], value, msg=lambda text, name=name: f"{name}: {text}")


@report(100, 158)
@both_backends
@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
def test_causal_false_is_not_causal(report: str, dtype: torch.dtype, backend: str) -> None:
    x = make_inputs(1, 128, heads=2, head_dim=64, dtype=dtype)
    compare({**x, "causal": False}, backend)
    mask = torch.rand(128, 128) < 0.9
    compare({**x, "causal": False, "mask": mask}, backend)
    both = compare({**x, "causal": True, "mask": mask}, backend)
    torch.testing.assert_close(both["out"], attention(**x, mask=mask & torch.ones(128, 128).tril().bool(), backend=backend))


@report(101)
@both_backends
@pytest.mark.parametrize("subset", range(1, 2**5))
def test_every_subset_of_inputs_that_need_a_gradient(report: str, subset: int, backend: str) -> None:
    x = {name: t.double() for name, t in make_inputs(1, 8, heads=2, head_dim=8).items()}
    x |= {"bias": torch.randn(1, 1, 8, 8).double(), "learnable_sink": torch.randn(2).double()}
    needed = [name for bit, name in enumerate(x) if subset >> bit & 1]
    weight = torch.randn(1, 8, 2, 8).double()

    def run(chosen: str) -> tuple[Tensor, ...]:
        leaves = {name: t.detach().clone().requires_grad_(name in needed) for name, t in x.items()}
        out = attention(**leaves, causal=True, backend=chosen)
        return torch.autograd.grad(out, [leaves[name] for name in needed], weight)

    for name, a, b in zip(needed, run(backend), run("reference"), strict=True):
        torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name} of {needed}: {text}")


@report(103)
@both_backends
@dtypes
@pytest.mark.parametrize("loss", ["lse", "both"])
def test_the_lse_has_its_gradient(report: str, loss: str, dtype: torch.dtype, backend: str) -> None:
    x = make_inputs(1, 9, 11, heads=2, head_dim=8, dtype=dtype)
    dout = torch.zeros(1, 9, 2, 8, dtype=dtype) if loss == "lse" else None
    compare({**x, "learnable_sink": torch.randn(2).to(dtype)}, backend, dout=dout)


@report(103)
@both_backends
def test_the_gradient_of_the_lse_alone(report: str, backend: str) -> None:
    """Nothing reaches out, so its cotangent is absent; v has a gradient of zero or none."""
    leaves = [t.double().requires_grad_() for t in make_inputs(1, 9, 11, heads=2, head_dim=8).values()]
    _, aux = attention(*leaves, backend=backend, return_aux="lse")
    dq, dk, dv = torch.autograd.grad(aux.lse.sum(), leaves, allow_unused=True)
    p = (torch.einsum("bihd,bjhd->bhij", leaves[0], leaves[1]) / math.sqrt(8)).softmax(-1)
    torch.testing.assert_close(dq, torch.einsum("bhij,bjhd->bihd", p, leaves[1]) / math.sqrt(8))
    torch.testing.assert_close(dk, torch.einsum("bhij,bihd->bjhd", p, leaves[0]) / math.sqrt(8))
    assert dv is None or (dv == 0).all()


@report(104)
@both_backends
@dtypes
def test_the_output_times_its_denominator(report: str, dtype: torch.dtype, backend: str) -> None:
    """out * exp(lse) is the unnormalised sum, whose gradient has no softmax in it."""
    q, k, v = (t.mul(0.3).requires_grad_() for t in make_inputs(1, 130, heads=1, head_dim=8, dtype=dtype).values())
    out, aux = attention(q, k, v, causal=True, backend=backend, return_aux="lse")
    grads = torch.autograd.grad((out * aux.lse.exp().transpose(1, 2)[..., None]).sum(), (q, k, v))
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    weights = (torch.einsum("bihd,bjhd->bhij", *wide[:2]) / math.sqrt(8)).exp().tril()
    expected = torch.autograd.grad(torch.einsum("bhij,bjhd->bihd", weights, wide[2]).sum(), wide)
    for a, b in zip(grads, expected, strict=True):
        assert (a - b).abs().max() <= 40 * torch.finfo(dtype).eps * b.abs().max()


@report(106)
@both_backends
@pytest.mark.parametrize("dim", [60, 64])
def test_function_transforms(report: str, dim: int, backend: str) -> None:
    x = {name: t.double() for name, t in make_inputs(3, 5, 7, heads=2, head_dim=dim).items()}

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, causal=True, backend=backend).sin().sum()

    leaves = [t.detach().requires_grad_() for t in x.values()]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    for a, b in zip(torch.func.grad(loss, argnums=(0, 1, 2))(*x.values()), expected, strict=True):
        torch.testing.assert_close(a, b)
    single = torch.func.vmap(torch.func.grad(lambda q, k, v: loss(q[None], k[None], v[None]), argnums=(0, 1, 2)))(*x.values())
    for a, b in zip(single, expected, strict=True):
        torch.testing.assert_close(a, b)


BIAS_SHAPES = [
    (),
    (1,),
    (9,),
    (7, 1),
    (7, 9),
    (2, 1, 1),
    (1, 1, 1, 9),
    (1, 1, 7, 1),
    (3, 1, 7, 9),
    (3, 2, 1, 1),
    (1, 2, 7, 9),
    (3, 2, 7, 9),
]


@report(107)
@both_backends
@dtypes
@pytest.mark.parametrize("shape", BIAS_SHAPES, ids=str)
def test_bias_gradient_of_every_broadcast_shape(report: str, shape: tuple[int, ...], dtype: torch.dtype, backend: str) -> None:
    x = make_inputs(3, 7, 9, heads=2, head_dim=8, dtype=dtype)
    bias = torch.randn(shape).to(dtype).requires_grad_()
    weight, weight_lse = torch.randn(3, 7, 2, 8).to(dtype), torch.randn(3, 2, 7)
    out, aux = attention(**x, bias=bias, causal=True, backend=backend, return_aux="lse")
    (grad,) = torch.autograd.grad([out, aux.lse], bias, [weight, weight_lse.to(aux.lse.dtype)])
    wide = bias.detach().double().requires_grad_()
    out, lse = reference.attention(**{name: t.double() for name, t in x.items()}, bias=wide, causal=True)
    seen = lse.isfinite()
    (expected,) = torch.autograd.grad((out * weight).sum() + (lse * weight_lse)[seen].sum(), wide)
    assert grad.shape == shape and grad.dtype == dtype
    terms = 3 * 2 * 7 * 9 // max(1, math.prod(shape))
    assert (grad - expected).abs().max() <= (4 + math.sqrt(terms)) * torch.finfo(dtype).eps * max(1.0, expected.abs().max().item())


@report(109)
@both_backends
@dtypes
@pytest.mark.parametrize("via", ["mask", "bias"])
def test_keys_that_nobody_sees_have_exactly_no_gradient(report: str, via: str, dtype: torch.dtype, backend: str) -> None:
    x = make_inputs(1, 40, 70, heads=2, head_dim=8, dtype=dtype)
    visible = torch.rand(40, 70) < 0.5
    visible[:, [0, 3, 69]] = False
    visible[:, 16:40] = False
    bias = torch.zeros(40, 70, dtype=dtype).masked_fill(~visible, NEG_INF)
    got = compare({**x, **({"mask": visible} if via == "mask" else {"bias": bias})}, backend)
    unseen = ~visible.any(0)
    assert (got["dk"][:, unseen] == 0).all() and (got["dv"][:, unseen] == 0).all()


@report(110)
@dtypes
@pytest.mark.parametrize("size", [33, 70])
def test_score_function_causal_and_ragged_tiles(report: str, size: int, dtype: torch.dtype, small_tiles: None) -> None:
    """Rows and columns past the end of a tile are hidden before the exponential, however large the score function makes them."""
    x = make_inputs(1, size, heads=2, head_dim=8, dtype=dtype)
    compare({**x, "causal": True, "score_mod": lambda s, b, h, i, j: s + (i - j)}, "tiled")


@report(112)
@both_backends
def test_calls_share_no_state(report: str, backend: str) -> None:
    large = make_inputs(1, 150, heads=2, head_dim=8)
    attention(**large, mask=torch.rand(150, 150) < 0.5, backend=backend)
    small = make_inputs(1, 71, heads=2, head_dim=8)
    compare({**small, "mask": torch.rand(71, 71) < 0.5}, backend)
    first = [t.requires_grad_() for t in large.values()]
    out_first = attention(*first, causal=True, backend=backend)
    attention(**small, backend=backend)
    out_first.sum().backward()
    again = [t.detach().requires_grad_() for t in first]
    attention(*again, causal=True, backend=backend).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(first, again, strict=True))


@report(113)
@both_backends
@dtypes
@pytest.mark.parametrize("causal", [False, True])
def test_the_sink_has_its_gradient(report: str, causal: bool, dtype: torch.dtype, backend: str) -> None:
    x = make_inputs(2, 9, 7, heads=4, kv_heads=2, head_dim=8, dtype=dtype)
    sink = torch.randn(4).to(dtype).requires_grad_()
    weight = torch.randn(2, 9, 4, 8).to(dtype)
    (grad,) = torch.autograd.grad(attention(**x, learnable_sink=sink, causal=causal, backend=backend), sink, weight)
    wide = sink.detach().double().requires_grad_()
    out, _ = reference.attention(**{name: t.double() for name, t in x.items()}, learnable_sink=wide, causal=causal)
    (expected,) = torch.autograd.grad(out, wide, weight.double())
    assert (expected.abs() > 1e-3).all()
    assert (grad - expected).abs().max() <= 8 * torch.finfo(dtype).eps * max(1.0, expected.abs().max().item())


# ----------------------------------------------------------------- J. dropout


@report(131)
@pytest.mark.parametrize("seed", [3, 2**32 + 3, 2**63 - 1])
def test_forward_and_backward_drop_the_same(report: str, seed: int, small_tiles: None) -> None:
    """With V the identity the output is the dropped P; dV from an identity cotangent is its transpose."""
    size = 40
    q, k = (torch.randn(2, size, 2, 8, dtype=torch.float64) for _ in range(2))
    v = torch.eye(size, dtype=torch.float64).view(1, size, 1, size).repeat(2, 1, 2, 1).requires_grad_()
    out = attention(q, k, v, dropout_p=0.5, dropout_seed=seed, backend="tiled")
    (dv,) = torch.autograd.grad(out, v, v.detach())
    torch.testing.assert_close(dv, out.permute(0, 3, 2, 1))
    assert 0.4 < (out == 0).double().mean() < 0.6


@report(133)
@both_backends
def test_dropout_has_an_unbiased_mean(report: str, backend: str) -> None:
    x = make_inputs(1, 4, 16, heads=2, head_dim=4)
    plain = attention(**x, backend=backend)
    assert torch.equal(attention(**x, dropout_p=0.0, backend=backend), plain)
    runs = torch.stack([attention(**x, dropout_p=0.2, dropout_seed=seed, backend=backend) for seed in range(200)])
    standard_error = runs.std(0) / math.sqrt(200)
    assert ((runs.mean(0) - plain).abs() <= 5 * standard_error).all()
    for p in (-0.1, 1.0, 1.5):
        with pytest.raises(ValueError, match="dropout_p"):
            attention(**x, dropout_p=p)


# ----------------------------------------------------------------- K. compilation and transforms


@report(137, 71)
@both_backends
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("transposed", range(8))
def test_fakes_have_the_real_strides(report: str, transposed: int, layout: str, backend: str) -> None:
    """Each combination of layouts of q, k and v; the output, the LSE and each gradient."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = make_inputs(2, 5, 7, heads=4, kv_heads=2, head_dim=8, head_dim_v=6, layout=layout, dtype=torch.bfloat16)
    x = {name: as_view(t, "transposed") if transposed >> n & 1 else t for n, (name, t) in enumerate(x.items())}

    def run(given: dict[str, Tensor]) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in given.values()]
        out, aux = attention(*leaves, causal=True, layout=layout, backend=backend, return_aux=("lse", "max_logits", "key_mass", "entropy"))
        return [out, *aux, *torch.autograd.grad([out, aux.lse], leaves, [torch.ones_like(out), torch.ones_like(aux.lse)])]

    real = run(x)
    with FakeTensorMode() as mode:
        fake = run({name: mode.from_tensor(t) for name, t in x.items()})
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)


@report(139)
@pytest.mark.parametrize("size", [7, 9])
def test_a_mask_for_another_length_raises(report: str, size: int) -> None:
    with pytest.raises(ValueError, match="mask"):
        attention(**make_inputs(1, 8, heads=1), mask=torch.ones(size, size, dtype=torch.bool))


# ----------------------------------------------------------------- L. memory, messages, dtypes


@report(145, 148)
@both_backends
@pytest.mark.parametrize("what", ["plain", "padding_mask", "causal_bias"])
def test_no_matrix_of_scores_exists(report: str, what: str, backend: str) -> None:
    """No single tensor of the size of the score matrix is made, and no broadcast mask or bias is expanded, forward or backward."""
    size, heads = 1501, 2

    x = make_inputs(1, size, heads=heads, head_dim=8)
    options: dict[str, Any] = {}
    if what == "padding_mask":
        options = {"mask": (torch.arange(size) < size - 100).view(1, 1, 1, size)}
    if what == "causal_bias":
        options = {"bias": torch.randn(size), "causal": True}
    leaves = [t.requires_grad_() for t in x.values()]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        attention(*leaves, **options, backend=backend).sum().backward()
    largest = max((event.cpu_memory_usage for event in profile.events()), default=0)
    assert 0 < largest < heads * size * size * 4 / 2, f"one operator allocated {largest / 2**20:.1f} MiB"


@report(154)
@both_backends
def test_float32_inputs_are_served_and_autocast_casts_all_three(report: str, backend: str) -> None:
    x = make_inputs(1, 9, heads=2, head_dim=8)
    assert attention(**x, backend=backend).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(**x, backend=backend)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, attention(**{name: t.bfloat16() for name, t in x.items()}, backend=backend))


@report(155)
@both_backends
def test_mixed_dtypes_under_autocast(report: str, backend: str) -> None:
    x = make_inputs(1, 9, heads=2, head_dim=8)
    x["v"] = x["v"].bfloat16()
    leaves = {name: t.requires_grad_() for name, t in x.items()}
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(**leaves, backend=backend)
    out.sum().backward()
    assert out.dtype == torch.bfloat16 and [t.grad.dtype for t in leaves.values()] == [torch.float32, torch.float32, torch.bfloat16]
    with pytest.raises(TypeError, match=r"float32.*float32.*bfloat16"):
        attention(**x, backend=backend)


@report(157)
@both_backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_bias_of_another_dtype(report: str, dtype: torch.dtype, backend: str) -> None:
    x = make_inputs(1, 9, heads=2, head_dim=8)
    bias = torch.randn(9, 9).to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(**x, bias=bias, backend=backend)
    expected, _ = reference.attention(**x, bias=bias)
    torch.testing.assert_close(out.double(), expected, rtol=3e-2, atol=3e-2)
    (grad,) = torch.autograd.grad(out.float().square().sum(), bias)
    assert grad.dtype == dtype and grad.isfinite().all() and (grad != 0).any()


@report(160)
@both_backends
@dtypes
def test_the_lse_is_a_natural_logarithm(report: str, dtype: torch.dtype, backend: str) -> None:
    x = make_inputs(2, 9, 11, heads=2, head_dim=8, dtype=dtype)
    _, aux = attention(**x, backend=backend, return_aux="lse")
    scores = torch.einsum("bihd,bjhd->bhij", x["q"].double(), x["k"].double()) / math.sqrt(8)
    assert aux.lse.shape == (2, 2, 9) and aux.lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(aux.lse.double(), torch.logsumexp(scores, -1), rtol=1e-5, atol=1e-5)


@report(121)
def test_deterministic_backward_repeats_bit_for_bit(report: str) -> None:
    packed = torch.randn(2, 70, 3, 4, 16)
    options = dict(causal=True, deterministic=True, backend="tiled")

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        return torch.autograd.grad(attention(*leaves, **options).square().sum(), leaves)

    first = run(*packed.unbind(2))
    for _ in range(10):
        assert all(torch.equal(a, b) for a, b in zip(first, run(*packed.unbind(2)), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first, run(*(t.contiguous() for t in packed.unbind(2))), strict=True))


@report(128)
def test_devices_that_differ_are_named(report: str) -> None:
    x = make_inputs(1, 8, heads=1)
    with pytest.raises(ValueError, match=r"mask.*meta.*cpu"):
        attention(**x, mask=torch.ones(8, 8, dtype=torch.bool, device="meta"))
