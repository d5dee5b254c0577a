"""The sharp points of the contract, one group of tests for each rule."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

import tilewise
from tilewise import attention

from . import oracle

BACKENDS = ["tiled", "auto", "reference"]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
NEG_INF = float("-inf")
I32 = torch.int32
EVERY_AUX = ("lse", "max_logits", "key_mass", "entropy")

every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def qkv(
    b: int = 2, sq: int = 5, sk: int = 7, hq: int = 2, hk: int = 2, d: int = 8, dv: int | None = None, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (b, sq, hq, d), (b, sk, hk, d), (b, sk, hk, dv or d)
    q, k, v = (torch.randn(shape).to(dtype).requires_grad_() for shape in shapes)
    return q, k, v


def seen_keys(sq: int, sk: int, backend: str = "tiled", batch: int = 1, dtype: torch.dtype = torch.float32, **options: Any) -> Tensor:
    """Which keys each query sees, (B, Sq, Sk): with equal scores and V the identity the output is the matrix of probabilities."""
    q, k = torch.zeros(batch, sq, 1, 8, dtype=dtype), torch.zeros(batch, sk, 1, 8, dtype=dtype)
    v = torch.eye(sk, dtype=dtype).view(1, sk, 1, sk).expand(batch, sk, 1, sk)
    out = attention(q, k, v, backend=backend, **options)
    return (out[:, :, 0] > 0).int()


def leaves_of(*tensors: Tensor | None) -> list[Tensor]:
    return [x for x in tensors if x is not None and x.requires_grad]


# ------------------------------------------------------------------------------------------------------------- 1. position


@every_backend
def test_causal_is_bottom_right(backend: str) -> None:
    assert seen_keys(2, 5, backend, causal=True)[0].tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert seen_keys(4, 2, backend, causal=True)[0].tolist() == [[0, 0], [0, 0], [1, 0], [1, 1]]
    assert seen_keys(1, 6, backend, causal=True)[0].tolist() == [[1] * 6]


@every_backend
def test_windows_are_inclusive(backend: str) -> None:
    assert seen_keys(4, 4, backend, window_size=(1, 1))[0].tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]
    assert seen_keys(3, 3, backend, window_size=(0, 0))[0].tolist() == torch.eye(3).int().tolist()
    assert seen_keys(3, 3, backend, window_size=(-1, 0))[0].tolist() == torch.ones(3, 3).tril().int().tolist()
    assert seen_keys(3, 3, backend, window_size=(0, -1))[0].tolist() == torch.ones(3, 3).triu().int().tolist()
    # Bottom-right, too: the last query stands at the last key.
    assert seen_keys(2, 5, backend, window_size=(1, 0))[0].tolist() == [[0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]
    # A window that ends before the first key.
    assert seen_keys(4, 2, backend, window_size=(0, 0))[0].tolist() == [[0, 0], [0, 0], [1, 0], [0, 1]]


@every_backend
def test_lengths_move_the_position(backend: str) -> None:
    """p = i + len_k - len_q with the lengths of each batch item, not the sizes of the tensors."""
    lengths = dict(seqused_q=torch.tensor([2, 3, 1], dtype=I32), seqused_k=torch.tensor([4, 2, 0], dtype=I32))
    seen = seen_keys(3, 5, backend, batch=3, causal=True, **lengths)
    assert seen[0].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [0] * 5]
    assert seen[1].tolist() == [[0] * 5, [1, 0, 0, 0, 0], [1, 1, 0, 0, 0]]
    assert seen[2].tolist() == [[0] * 5] * 3
    only_keys = seen_keys(2, 5, backend, batch=2, window_size=(1, 0), seqused_k=torch.tensor([3, 1], dtype=I32))
    assert only_keys[0].tolist() == [[1, 1, 0, 0, 0], [0, 1, 1, 0, 0]]
    assert only_keys[1].tolist() == [[0] * 5, [1, 0, 0, 0, 0]]


@every_backend
def test_alibi_measures_from_the_position(backend: str) -> None:
    q, k = torch.zeros(2, 2, 1, 4), torch.zeros(2, 5, 1, 4)
    v = torch.eye(5).view(1, 5, 1, 5).expand(2, 5, 1, 5)
    lengths = torch.tensor([5, 3], dtype=I32)
    out = attention(q, k, v, alibi_slopes=torch.tensor([0.5]), seqused_k=lengths, backend=backend)
    for b, length in enumerate(lengths.tolist()):
        for i in range(2):
            weights = torch.tensor([math.exp(-0.5 * abs(i + length - 2 - j)) if j < length else 0.0 for j in range(5)])
            torch.testing.assert_close(out[b, i, 0], weights / weights.sum())


@every_backend
def test_lengths_are_clamped(backend: str) -> None:
    """A length outside [0, S] that nobody checks means the nearest one inside: no read beyond the tensor."""
    q, k, v = qkv(b=3)
    given = dict(seqused_q=torch.tensor([-3, 5, 100], dtype=I32), seqused_k=torch.tensor([7, -1, 2**31 - 1], dtype=I32))
    meant = dict(seqused_q=torch.tensor([0, 5, 5], dtype=I32), seqused_k=torch.tensor([7, 0, 7], dtype=I32))
    out, aux = attention(q, k, v, causal=True, backend=backend, return_aux="lse", **given)
    expected, aux_expected = attention(q, k, v, causal=True, backend="reference", return_aux="lse", **meant)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(aux.lse, aux_expected.lse)
    grads = torch.autograd.grad(out.cos().sum(), (q, k, v))
    for got, want in zip(grads, torch.autograd.grad(expected.cos().sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(got, want)


@every_backend
def test_all_masks_are_anded(backend: str) -> None:
    mask = torch.tensor([[True, True, False, True]]).expand(4, 4)
    seen = seen_keys(4, 4, backend, causal=True, window_size=(2, 1), mask=mask, seqused_k=torch.tensor([4], dtype=I32))
    expected = torch.ones(4, 4).tril().bool() & (torch.ones(4, 4).triu(-2).bool()) & mask
    assert seen[0].tolist() == expected.int().tolist()


@every_backend
@pytest.mark.parametrize("sizes", [(5, 7), (7, 5), (6, 6), (1, 7), (33, 70), (70, 33)])
def test_windows_that_equal_causal(backend: str, sizes: tuple[int, int]) -> None:
    sq, sk = sizes
    q, k, v = qkv(sq=sq, sk=sk)
    expected = attention(q, k, v, causal=True, backend=backend)
    for window in ((-1, 0), (sk, 0), (sk - 1, 0), (2**31 - 1, 0)):
        torch.testing.assert_close(attention(q, k, v, window_size=window, backend=backend), expected)


@every_backend
@pytest.mark.parametrize("groups", [(4, 2), (6, 2), (3, 1), (5, 5)])
def test_query_head_reads_kv_head_by_division(backend: str, groups: tuple[int, int]) -> None:
    """Each kv head returns its own number: query head h reads kv head h // (Hq // Hk)."""
    hq, hk = groups
    q, k = torch.randn(1, 3, hq, 4), torch.randn(1, 4, hk, 4)
    v = torch.arange(hk, dtype=torch.float32).view(1, 1, hk, 1).expand(1, 4, hk, 2)
    out = attention(q, k, v, backend=backend)
    expected = torch.tensor([h // (hq // hk) for h in range(hq)], dtype=torch.float32)
    torch.testing.assert_close(out, expected.view(1, 1, hq, 1).expand_as(out))


# ---------------------------------------------------------------------------------------------------------------- 2. order


@every_backend
def test_order_of_the_terms(backend: str) -> None:
    """One query, one key besides a reference key of score 0: every term has its place."""
    q = torch.tensor([3.0]).view(1, 1, 1, 1)
    k = torch.tensor([2.0, 0.0]).view(1, 2, 1, 1)
    v = torch.tensor([1.0, 0.0]).view(1, 2, 1, 1)
    bias = torch.tensor([0.7, 0.0])

    def last(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * 0.5

    options = dict(softmax_scale=-0.4, softcap=2.0, bias=bias, alibi_slopes=torch.tensor([0.3]), score_mod=last)
    out, aux = attention(q, k, v, backend=backend, return_aux=EVERY_AUX, learnable_sink=torch.tensor([0.2]), **options)
    capped = 2.0 * math.tanh(-0.4 * 6.0 / 2.0)
    first, second = 0.5 * (capped + 0.7 - 0.3 * 1), 0.0
    denominator = math.exp(first) + math.exp(second) + math.exp(0.2)
    assert out.item() == pytest.approx(math.exp(first) / denominator, rel=1e-5)
    assert aux.lse.item() == pytest.approx(math.log(denominator), rel=1e-5)
    assert aux.max_logits.item() == pytest.approx(max(first, second), rel=1e-5, abs=1e-6)


@every_backend
@pytest.mark.parametrize("scale", [0.0, -0.5, -1.0])
def test_mask_comes_after_the_scale(backend: str, scale: float) -> None:
    """A mask written as -inf before a scale of 0 or below would give NaN or +inf."""
    q, k, v = qkv(sq=16, sk=16)
    out, aux = attention(q, k, v, causal=True, softmax_scale=scale, backend=backend, return_aux="lse")
    scores = scale * torch.einsum("bihd,bjhd->bhij", q, k).masked_fill(torch.ones(16, 16).triu(1).bool(), NEG_INF if scale > 0 else 0)
    scores = scores.masked_fill(torch.ones(16, 16).triu(1).bool(), NEG_INF)
    torch.testing.assert_close(out, torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v))
    torch.testing.assert_close(aux.lse, scores.logsumexp(-1))


@every_backend
def test_default_scale_uses_the_true_head_dim(backend: str) -> None:
    q, k, v = qkv(d=60)
    torch.testing.assert_close(attention(q, k, v, backend=backend), attention(q, k, v, softmax_scale=60**-0.5, backend=backend))


# ------------------------------------------------------------------------------------------------------ 3. function indices


@every_backend
def test_score_mod_indices_count_from_the_tensors(backend: str) -> None:
    """q_idx = i and kv_idx = j whatever the lengths, h the query head, b the batch item."""
    q, k = torch.zeros(2, 3, 4, 4), torch.zeros(2, 5, 2, 4)
    v = torch.eye(5).view(1, 5, 1, 5).expand(2, 5, 2, 5)

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + 0.25 * q_idx * kv_idx + 0.5 * b * kv_idx - 0.125 * h * kv_idx

    lengths = torch.tensor([5, 4], dtype=I32)
    out = attention(q, k, v, score_mod=mod, seqused_k=lengths, backend=backend)
    for b in range(2):
        for h in range(4):
            for i in range(3):
                scores = torch.tensor([(0.25 * i + 0.5 * b - 0.125 * h) * j for j in range(int(lengths[b]))])
                torch.testing.assert_close(out[b, i, h, : len(scores)], scores.softmax(0))


# ------------------------------------------------------------------------------------------------------------------ 4. LSE


@every_backend
@every_dtype
def test_lse_is_natural_and_includes_the_sink(backend: str, dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype=dtype)
    sink = torch.tensor([0.5, -1.0], dtype=dtype, requires_grad=True)
    out, aux = attention(q, k, v, learnable_sink=sink, backend=backend, return_aux="lse")
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) * 8**-0.5
    with_sink = torch.cat([scores, sink.double().view(1, 2, 1, 1).expand(2, 2, 5, 1)], -1)
    expected = with_sink.logsumexp(-1)
    assert aux.lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(aux.lse.double(), expected, rtol=2e-6, atol=2e-6)
    # out = sum over keys of exp(s - LSE) v, the sink's share missing.
    rebuilt = torch.einsum("bhij,bjhd->bihd", (scores - expected[..., None]).exp(), v.double())
    torch.testing.assert_close(out.double(), rebuilt, rtol=4 * torch.finfo(dtype).eps + 1e-12, atol=4 * torch.finfo(dtype).eps)


@every_backend
def test_sink_of_minus_infinity_is_no_sink(backend: str) -> None:
    q, k, v = qkv()
    sink = torch.full((2,), NEG_INF, dtype=torch.float64, requires_grad=True)
    out, aux = attention(q, k, v, causal=True, learnable_sink=sink, backend=backend, return_aux="lse")
    expected, aux_expected = attention(q, k, v, causal=True, backend=backend, return_aux="lse")
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(aux.lse, aux_expected.lse)
    (grad,) = torch.autograd.grad(out.sum(), sink)
    assert (grad == 0).all()


@every_backend
def test_a_large_sink_takes_everything(backend: str) -> None:
    q, k, v = qkv(dtype=torch.float32)
    sink = torch.full((2,), 200.0, requires_grad=True)
    out, aux = attention(q, k, v, learnable_sink=sink, backend=backend, return_aux="lse")
    assert out.abs().max() < 1e-30
    torch.testing.assert_close(aux.lse, torch.full((2, 2, 5), 200.0))
    for grad in torch.autograd.grad(out.sum() + aux.lse.sum(), (q, k, v, sink)):
        assert grad.isfinite().all()


def test_sink_given_to_one_part_merges_exactly() -> None:
    q, k, v = qkv(sk=12)
    sink = torch.randn(2, dtype=torch.float64)
    whole, aux = attention(q, k, v, learnable_sink=sink, backend="tiled", return_aux="lse")
    first, aux_first = attention(q, k[:, :5], v[:, :5], learnable_sink=sink, backend="tiled", return_aux="lse")
    second, aux_second = attention(q, k[:, 5:], v[:, 5:], backend="tiled", return_aux="lse")
    out, lse = tilewise.merge([first, second], [aux_first.lse, aux_second.lse])
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(lse, aux.lse)


# ----------------------------------------------------------------------------------------------------------- 5. empty rows

EMPTY: dict[str, Callable[[], dict[str, Any]]] = {
    "causal_more_queries": lambda: dict(causal=True),
    "mask": lambda: dict(mask=torch.zeros(9, 5, dtype=torch.bool)),
    "mask_rows": lambda: dict(mask=(torch.arange(9) < 4).view(9, 1)),
    "mask_head": lambda: dict(mask=torch.tensor([False, True]).view(2, 1, 1)),
    "window": lambda: dict(window_size=(0, 0)),
    "bias_full": lambda: dict(bias=torch.full((9, 5), NEG_INF)),
    "bias_rows": lambda: dict(bias=torch.where(torch.arange(9) < 4, 0.0, NEG_INF).view(9, 1)),
    "score_mod": lambda: dict(score_mod=lambda s, b, h, i, j: torch.where(i < 4, NEG_INF, s)),
    "no_keys_in_use": lambda: dict(seqused_k=torch.tensor([0, 5], dtype=I32)),
    "no_queries_in_use": lambda: dict(seqused_q=torch.tensor([0, 9], dtype=I32)),
    "both_lengths": lambda: dict(seqused_q=torch.tensor([3, 9], dtype=I32), seqused_k=torch.tensor([2, 3], dtype=I32), causal=True),
    "causal_and_mask": lambda: dict(causal=True, mask=torch.ones(9, 5, dtype=torch.bool).triu(-4)),
}


@every_backend
@every_dtype
@pytest.mark.parametrize("with_sink", [False, True], ids=["no_sink", "sink"])
@pytest.mark.parametrize("why", EMPTY)
def test_empty_rows(why: str, with_sink: bool, dtype: torch.dtype, backend: str) -> None:
    q, k, v = qkv(sq=9, sk=5, dtype=dtype)
    sink = torch.tensor([0.25, -0.5], dtype=dtype, requires_grad=True) if with_sink else None
    options = EMPTY[why]()
    if options.get("bias") is not None:
        options["bias"] = options["bias"].to(dtype).requires_grad_()
    out, aux = attention(q, k, v, learnable_sink=sink, backend=backend, return_aux=EVERY_AUX, **options)
    _, expected = attention(
        q.detach().double(),
        k.detach().double(),
        v.detach().double(),
        backend="reference",
        return_aux="lse",
        **{**options, "bias": options["bias"].detach().double() if "bias" in options else None},
    )
    empty = expected.lse == NEG_INF  # (B, Hq, Sq)
    assert empty.any()
    length_q = options.get("seqused_q", torch.tensor([9, 9], dtype=I32))
    in_use = (torch.arange(9) < length_q[:, None])[:, None].expand(2, 2, 9)
    assert (out.transpose(1, 2)[empty] == 0).all()
    assert (aux.entropy[empty] == 0).all()
    if sink is None:
        assert (aux.lse[empty] == NEG_INF).all()
    else:
        sink_rows = sink.detach().to(aux.lse.dtype).view(1, 2, 1).expand(2, 2, 9)
        torch.testing.assert_close(aux.lse[empty & in_use], sink_rows[empty & in_use])
        assert (aux.lse[~in_use] == NEG_INF).all()
    # Gradients: finite, and zero for the rows that see nothing, whatever reaches their outputs.
    leaves = leaves_of(q, k, v, sink, options.get("bias"))
    outputs = [out, aux.lse, aux.entropy, aux.key_mass]
    cotangents = [torch.randn(x.shape).to(x.dtype) for x in outputs]
    grads = torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True, retain_graph=True)
    assert all(grad is not None and grad.isfinite().all() for grad in grads)
    assert (grads[0].transpose(1, 2)[empty] == 0).all()
    if "bias" in options:
        full = torch.broadcast_to(grads[-1], (9, 5)) if why == "bias_full" else grads[-1]
        assert (full[empty.all(1).all(0)] == 0).all()
    if sink is not None:
        # An empty row's LSE is the sink itself, so its cotangent goes to the sink alone.
        only_empty = torch.where(empty & in_use, cotangents[1], 0.0)
        got = torch.autograd.grad(aux.lse, leaves, only_empty, allow_unused=True)
        torch.testing.assert_close(got[3].to(only_empty.dtype), only_empty.sum((0, 2)), rtol=1e-2, atol=1e-2)
        assert all((grad == 0).all() for grad in got[:3] if grad is not None)


@every_backend
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("with_sink", [False, True])
def test_no_keys_at_all(backend: str, causal: bool, with_sink: bool) -> None:
    q, k, v = qkv(sk=0)
    sink = torch.randn(2, dtype=torch.float64, requires_grad=True) if with_sink else None
    out, aux = attention(q, k, v, causal=causal, learnable_sink=sink, backend=backend, return_aux=EVERY_AUX)
    assert out.shape == q.shape and (out == 0).all()
    assert (aux.entropy == 0).all() and (aux.max_logits == NEG_INF).all() and aux.key_mass.shape == (2, 2, 0)
    if sink is None:
        assert (aux.lse == NEG_INF).all()
        grads = torch.autograd.grad(out.sum(), (q, k, v), allow_unused=True)
    else:
        assert (aux.lse == sink.view(1, 2, 1)).all()
        *grads, dsink = torch.autograd.grad(out.sum() + 2 * aux.lse.sum(), (q, k, v, sink), allow_unused=True)
        torch.testing.assert_close(dsink, torch.full((2,), 2.0 * 2 * 5, dtype=torch.float64))
    assert all(grad is None or (grad == 0).all() for grad in grads)


@every_backend
@every_dtype
def test_a_finite_bias_never_masks_and_minus_infinity_always_does(backend: str, dtype: torch.dtype) -> None:
    """A row of equal finite minima is a uniform average; one -inf among them is hidden."""
    low = torch.finfo(dtype).min
    q, k = torch.zeros(1, 2, 1, 8, dtype=dtype), torch.zeros(1, 4, 1, 8, dtype=dtype)
    v = torch.eye(4, dtype=dtype).view(1, 4, 1, 4)
    bias = torch.tensor([[low, low, low, low], [low, NEG_INF, low, NEG_INF]], dtype=dtype)
    out, aux = attention(q, k, v, bias=bias, backend=backend, return_aux=("lse", "max_logits"))
    assert out[0, :, 0].tolist() == [[0.25] * 4, [0.5, 0.0, 0.5, 0.0]]
    expected = low + torch.tensor([math.log(4), math.log(2)], dtype=torch.float64)
    torch.testing.assert_close(aux.lse[0, 0].double(), expected, rtol=1e-6, atol=0)
    assert aux.max_logits.tolist() == [low]


@every_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_finite_minimum_beside_ordinary_scores_vanishes_without_nan(backend: str, dtype: torch.dtype) -> None:
    """finfo.min plus a score may round or overflow: it must lose against ordinary scores, forward and backward."""
    q, k, v = qkv(dtype=dtype, sk=70, sq=40)
    bias = torch.zeros(40, 70, dtype=dtype)
    bias[:, 30:] = torch.finfo(dtype).min
    bias[3] = torch.finfo(dtype).min
    bias.requires_grad_()
    out, aux = attention(q, k, v, bias=bias, backend=backend, return_aux="lse")
    short = attention(q, k[:, :30], v[:, :30], backend=backend)
    rows = torch.arange(40) != 3
    torch.testing.assert_close(out[:, rows], short[:, rows])
    torch.testing.assert_close(out[:, 3].float(), v.float().mean(1), rtol=2e-2, atol=2e-2)
    assert aux.lse.isfinite().all()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), (q, k, v, bias)))


@every_backend
def test_low_logits_are_not_masked(backend: str) -> None:
    """Shift invariance: every score near -6e4 still gives an average, not zero."""
    q = torch.full((1, 3, 1, 64), -87.0)
    k = -q[:, :1].expand(1, 16, 1, 64)
    v = torch.randn(1, 16, 1, 64)
    out, aux = attention(q, k, v, backend=backend, return_aux="lse")
    logit = -87.0 * 87.0 * 8
    torch.testing.assert_close(out, v.mean(1, keepdim=True).expand_as(out))
    torch.testing.assert_close(aux.lse, torch.full_like(aux.lse, logit + math.log(16)))


@every_backend
@pytest.mark.parametrize("via", ["bias", "score_mod", "bias_then_score_mod"])
def test_minus_infinity_has_no_gradient(backend: str, via: str) -> None:
    """Hidden by a -inf score: the same gradients as hidden by a mask, and none to the bias there; never NaN."""
    q, k, v = qkv(sq=6, sk=6)
    hidden = torch.ones(6, 6).triu(1).bool()
    zero = torch.zeros(6, 6, dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(6, 6, dtype=torch.float64).masked_fill(hidden, NEG_INF).requires_grad_()

    def causal(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return torch.where(j <= i, score, NEG_INF)

    def bend(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score * (0.5 + 0.125 * torch.abs(score))

    if via == "bias":
        options: dict[str, Any] = dict(bias=bias)
        wanted: dict[str, Any] = dict(bias=zero, causal=True)
    elif via == "score_mod":
        options, wanted = dict(bias=zero, score_mod=causal), dict(bias=zero, causal=True)
    else:
        options, wanted = dict(bias=bias, score_mod=bend), dict(bias=zero, causal=True, score_mod=bend)
    got = attention(q, k, v, backend=backend, **options)
    expected = attention(q, k, v, backend="reference", **wanted)
    torch.testing.assert_close(got, expected)
    weight = torch.randn_like(expected)
    grads = torch.autograd.grad(got, (q, k, v, options["bias"]), weight)
    for a, b in zip(grads, torch.autograd.grad(expected, (q, k, v, zero), weight), strict=True):
        torch.testing.assert_close(a, b)
    assert (grads[3][hidden] == 0).all()


# -------------------------------------------------------------------------------------------------------- 6. hidden values

POISON = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
HIDERS: dict[str, Callable[[], tuple[dict[str, Any], Tensor, Tensor]]] = {
    # options, hidden queries (B, Sq), hidden keys (B, Sk)
    "mask": lambda: (
        dict(mask=(torch.arange(37) % 5 != 2).view(1, 1, 1, 37)),
        torch.zeros(2, 21).bool(),
        (torch.arange(37) % 5 == 2).expand(2, 37),
    ),
    "mask_tail_and_head": lambda: (
        dict(mask=((torch.arange(37) > 8) & (torch.arange(37) < 30)).view(1, 1, 1, 37)),
        torch.zeros(2, 21).bool(),
        ((torch.arange(37) <= 8) | (torch.arange(37) >= 30)).expand(2, 37),
    ),
    "seqused_k": lambda: (
        dict(seqused_k=torch.tensor([30, 3], dtype=I32)),
        torch.zeros(2, 21).bool(),
        torch.arange(37) >= torch.tensor([[30], [3]]),
    ),
    "seqused_q": lambda: (
        dict(seqused_q=torch.tensor([20, 3], dtype=I32)),
        torch.arange(21) >= torch.tensor([[20], [3]]),
        torch.zeros(2, 37).bool(),
    ),
    "both_lengths_causal": lambda: (
        dict(seqused_q=torch.tensor([20, 5], dtype=I32), seqused_k=torch.tensor([30, 9], dtype=I32), causal=True),
        torch.arange(21) >= torch.tensor([[20], [5]]),
        torch.arange(37) >= torch.tensor([[30], [9]]),
    ),
    "window": lambda: (dict(window_size=(3, 2)), torch.zeros(2, 21).bool(), (torch.arange(37) < 13).expand(2, 37)),
    "empty_item": lambda: (
        dict(seqused_k=torch.tensor([37, 0], dtype=I32)),
        torch.zeros(2, 21).bool(),
        torch.tensor([[False], [True]]).expand(2, 37),
    ),
}


@every_backend
@every_dtype
@pytest.mark.parametrize("value", POISON)
@pytest.mark.parametrize("hider", HIDERS)
def test_hidden_values_reach_nothing(hider: str, value: str, dtype: torch.dtype, backend: str) -> None:
    """Output, LSE and every gradient are the same numbers whatever the hidden keys, values, queries and their cotangents hold."""
    options, hidden_q, hidden_k = HIDERS[hider]()
    hidden_q, hidden_k = hidden_q.expand(2, 21), hidden_k.expand(2, 37)
    clean = [x.detach() for x in qkv(sq=21, sk=37, hq=4, dtype=dtype, dv=10)]
    weight = torch.randn(2, 21, 4, 10).to(dtype)
    weight_lse = torch.randn(2, 4, 21)

    def run(fill: float) -> list[Tensor]:
        leaves = []
        for x, hidden in zip(clean, (hidden_q, hidden_k, hidden_k), strict=True):
            leaves.append(x.clone().masked_fill(hidden[..., None, None], fill).requires_grad_())
        out, aux = attention(*leaves, backend=backend, return_aux=("lse", "entropy", "key_mass"), **options)
        dout = weight.masked_fill(hidden_q[..., None, None], fill)
        dlse = weight_lse.to(aux.lse.dtype).masked_fill(hidden_q[:, None], fill)
        grads = torch.autograd.grad([out, aux.lse], leaves, [dout, dlse])
        return [out.detach(), aux.lse.detach(), aux.entropy.detach(), aux.key_mass.detach(), *grads]

    names = ["out", "lse", "entropy", "key_mass", "dq", "dk", "dv"]
    for name, poisoned, plain in zip(names, run(POISON[value]), run(0.0), strict=True):
        assert torch.equal(poisoned, plain), f"{name} changed"
        assert not poisoned.isnan().any(), name


@every_backend
def test_hidden_bias_values_reach_nothing(backend: str) -> None:
    """NaN in a bias under the mask is selected away, and its gradient is 0."""
    q, k, v = qkv(sq=21, sk=37)
    mask = torch.rand(21, 37) < 0.6
    mask[4] = False
    bias = torch.randn(21, 37, dtype=torch.float64)
    expected = attention(q, k, v, mask=mask, bias=bias, backend=backend)
    poisoned = bias.masked_fill(~mask, math.nan).requires_grad_()
    out = attention(q, k, v, mask=mask, bias=poisoned, backend=backend)
    assert torch.equal(out, expected)
    for name, grad in zip(("dq", "dk", "dv", "dbias"), torch.autograd.grad(out.sum(), (q, k, v, poisoned)), strict=True):
        assert grad.isfinite().all(), name
    (grad,) = torch.autograd.grad(attention(q, k, v, mask=mask, bias=poisoned, backend=backend).cos().sum(), poisoned)
    assert (grad[~mask] == 0).all()


@every_backend
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_a_visible_nan_shows(backend: str, where: str) -> None:
    q, k, v = (x.detach() for x in qkv(dtype=torch.float32))
    bad = {"q": q, "k": k, "v": v}
    bad[where][0, 1, 0] = math.nan
    out = attention(**bad, backend=backend)
    assert out[0, 1, 0].isnan().any()
    assert out[1].isfinite().all()


# ----------------------------------------------------------------------------------------------------------- 7. precision


@pytest.fixture
def float32_switches() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision = "none"
    torch.backends.fp32_precision = "none"


def _new(value: str) -> Callable[[], None]:
    return lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", value)


def _legacy(value: bool) -> Callable[[], None]:
    return lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", value)


def _both(first: Callable[[], Any], second: Callable[[], Any]) -> Callable[[], None]:
    def run() -> None:
        first()
        second()

    return run


SWITCHES: dict[str, tuple[Callable[[], Any], bool]] = {
    "untouched": (lambda: None, False),
    "new_ieee": (_new("ieee"), False),
    "new_tf32": (_new("tf32"), True),
    "legacy_false": (_legacy(False), False),
    "legacy_true": (_legacy(True), True),
    "precision_highest": (lambda: torch.set_float32_matmul_precision("highest"), False),
    "precision_high": (lambda: torch.set_float32_matmul_precision("high"), True),
    "precision_medium": (lambda: torch.set_float32_matmul_precision("medium"), True),
    "legacy_then_new": (_both(_legacy(True), _new("ieee")), False),
    "precision_then_new": (_both(lambda: torch.set_float32_matmul_precision("highest"), _new("tf32")), True),
    "new_then_legacy": (_both(_new("ieee"), _legacy(True)), True),
}


def tf32_seen(call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What `Rules.allow_tf32` the kernels received, forward and backward in turn."""
    from tilewise.kernels import tiled

    seen: list[bool] = []
    forward, backward = tiled.forward, tiled.backward
    monkeypatch.setattr(tiled, "forward", lambda t, r, out: (seen.append(r.allow_tf32), forward(t, r, out))[1])
    monkeypatch.setattr(
        tiled, "backward", lambda t, r, saved, cot, grads: (seen.append(r.allow_tf32), backward(t, r, saved, cot, grads))[1]
    )
    call()
    return seen


@pytest.mark.parametrize("switch", SWITCHES)
def test_float32_setting_is_read_without_raising(switch: str, monkeypatch: pytest.MonkeyPatch, float32_switches: None) -> None:
    change, allowed = SWITCHES[switch]
    change()
    q, k, v = qkv(dtype=torch.float32)
    assert tf32_seen(lambda: attention(q, k, v, backend="tiled").sum().backward(), monkeypatch) == [allowed, allowed]


@pytest.mark.parametrize("switch", SWITCHES)
def test_float32_setting_inside_a_fullgraph_trace(switch: str, monkeypatch: pytest.MonkeyPatch, float32_switches: None) -> None:
    change, allowed = SWITCHES[switch]
    change()
    torch._dynamo.reset()
    q, k, v = qkv(dtype=torch.float32)
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, backend="tiled"), fullgraph=True, backend="aot_eager")
    assert tf32_seen(lambda: compiled(q, k, v).sum().backward(), monkeypatch) == [allowed, allowed]


def test_float32_setting_of_the_forward_is_kept_for_backward(monkeypatch: pytest.MonkeyPatch, float32_switches: None) -> None:
    q, k, v = qkv(dtype=torch.float32)

    def call() -> None:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        out = attention(q, k, v, backend="tiled")
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        out.sum().backward()

    assert tf32_seen(call, monkeypatch) == [True, True]


def test_float32_setting_is_read_at_run_time_of_a_compiled_call(monkeypatch: pytest.MonkeyPatch, float32_switches: None) -> None:
    """The op reads the setting, not the trace: one compiled function follows a later change, backward included."""
    torch._dynamo.reset()
    q, k, v = qkv(dtype=torch.float32)
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, backend="tiled"), fullgraph=True, backend="aot_eager")

    def call() -> None:
        for value in ("ieee", "tf32"):
            torch.backends.cuda.matmul.fp32_precision = value
            compiled(q, k, v).sum().backward()

    assert tf32_seen(call, monkeypatch) == [False, False, True, True]


@every_dtype
@every_backend
def test_state_and_aux_are_wide(dtype: torch.dtype, backend: str) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    q, k, v = qkv(dtype=dtype)
    out, aux = attention(q, k, v, backend=backend, return_aux=EVERY_AUX)
    assert out.dtype == dtype
    assert {x.dtype for x in aux} == {wide}
    for grad, x in zip(torch.autograd.grad(out.sum(), (q, k, v)), (q, k, v), strict=True):
        assert grad.dtype == x.dtype
    assert attention(q, k, v, backend=backend, out_dtype=wide).dtype == wide


@every_backend
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_float32_output_is_not_rounded_to_the_inputs_dtype(backend: str, dtype: torch.dtype) -> None:
    q, k, v = (x.detach() for x in qkv(dtype=dtype))
    out = attention(q, k, v, backend=backend, out_dtype=torch.float32)
    assert not torch.equal(out, out.to(dtype).float())
    assert torch.equal(out.to(dtype), attention(q, k, v, backend=backend))


def test_float32_output_has_gradients() -> None:
    q, k, v = qkv(dtype=torch.bfloat16)
    out = attention(q, k, v, backend="tiled", out_dtype=torch.float32)
    weight = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v), weight)
    expected = torch.autograd.grad(attention(q.double(), k.double(), v.double(), backend="reference"), (q, k, v), weight.double())
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == torch.bfloat16
        torch.testing.assert_close(a.double(), b.double(), rtol=2e-2, atol=2e-2)


# ---------------------------------------------------------------------------------------------------------- 8. derivatives


@every_backend
@pytest.mark.parametrize("name", ["lse", "key_mass", "entropy"])
@pytest.mark.parametrize("extra", ["plain", "everything"])
def test_auxiliary_outputs_have_their_true_gradient(backend: str, name: str, extra: str) -> None:
    """Against autograd through probabilities spelt out here."""
    q, k, v = qkv(sq=6, sk=9, hq=4)
    sink = torch.randn(4, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(4, 6, 9, dtype=torch.float64, requires_grad=True)
    options: dict[str, Any] = {}
    if extra == "everything":
        options = dict(learnable_sink=sink, bias=bias, softcap=1.5, causal=True, dropout_p=0.4, dropout_seed=3)
    out, aux = attention(q, k, v, backend=backend, return_aux=EVERY_AUX, **options)

    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) * 8**-0.5
    if extra == "everything":
        scores = (1.5 * torch.tanh(scores / 1.5) + bias).masked_fill(torch.ones(6, 9).triu(4).bool(), NEG_INF)
        lse = torch.cat([scores, sink.view(1, 4, 1, 1).expand(2, 4, 6, 1)], -1).logsumexp(-1)
    else:
        lse = scores.logsumexp(-1)
    p = (scores - lse[..., None]).exp()
    entropy = -torch.where(p > 0, p * torch.where(p > 0, p, 1.0).log(), 0.0).sum(-1)
    expected = {"lse": lse, "key_mass": p.sum(2), "entropy": entropy}[name]
    got = getattr(aux, name)
    torch.testing.assert_close(got, expected)
    weight = torch.randn_like(expected)
    leaves = [q, k] + ([sink, bias] if extra == "everything" else [])
    grads = torch.autograd.grad((got * weight).sum(), leaves, retain_graph=True)
    wants = torch.autograd.grad((expected * weight).sum(), leaves, retain_graph=True)
    for grad, want in zip(grads, wants, strict=True):
        torch.testing.assert_close(grad, want)
    # Together with the output's own gradient, nothing is dropped or counted twice.
    both = torch.autograd.grad((got * weight).sum() + out.sum(), leaves, retain_graph=True)
    alone = torch.autograd.grad(out.sum(), leaves)
    for total, a, b in zip(both, grads, alone, strict=True):
        torch.testing.assert_close(total, a + b)


@pytest.mark.parametrize("backend", ["tiled", "auto"])
def test_max_logits_raises_in_backward(backend: str) -> None:
    q, k, v = qkv()
    out, aux = attention(q, k, v, backend=backend, return_aux=("max_logits", "lse"))
    assert aux.max_logits.requires_grad and aux.max_logits.grad_fn is not None
    with pytest.raises(NotImplementedError, match="max_logits"):
        aux.max_logits.sum().backward()
    out, aux = attention(q, k, v, backend=backend, return_aux=("max_logits", "lse"))
    with pytest.raises(NotImplementedError, match="max_logits"):
        (out.sum() + aux.max_logits.sum()).backward()
    # Not used in the loss, it is in nobody's way.
    out, aux = attention(q, k, v, backend=backend, return_aux=("max_logits", "lse"))
    (out.sum() + aux.lse.sum()).backward()


ARGUMENTS = ("q", "k", "v", "bias", "alibi_slopes", "learnable_sink")


def dual_arguments() -> dict[str, Tensor]:
    q, k, v = (x.detach() for x in qkv())
    bias, slopes, sink = torch.randn(5, 7).double(), torch.rand(2).double(), torch.randn(2).double()
    return dict(q=q, k=k, v=v, bias=bias, alibi_slopes=slopes, learnable_sink=sink)


@pytest.mark.parametrize("backend", ["tiled", "auto"])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_forward_mode_dual_raises(backend: str, name: str) -> None:
    arguments = dual_arguments()
    with forward_ad.dual_level():
        arguments[name] = forward_ad.make_dual(arguments[name], torch.ones_like(arguments[name]))
        with pytest.raises(NotImplementedError, match=r"forward-mode|jvp"):
            attention(**arguments, backend=backend)
    arguments = dual_arguments()
    with forward_ad.dual_level():
        attention(**arguments, backend=backend)


@pytest.mark.parametrize("backend", ["tiled", "auto"])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_func_jvp_raises(backend: str, name: str) -> None:
    arguments = dual_arguments()
    primal = arguments.pop(name)
    with pytest.raises(NotImplementedError, match=r"forward-mode|jvp"):
        torch.func.jvp(lambda x: attention(**{name: x}, **arguments, backend=backend), (primal,), (torch.ones_like(primal),))
    with pytest.raises((NotImplementedError, RuntimeError), match=r"forward-mode|jvp|forward AD"):
        torch.func.jacfwd(lambda x: attention(**{name: x}, **arguments, backend=backend))(primal)


def test_forward_mode_over_the_ops_themselves_is_no_silent_zero() -> None:
    """torch.autograd.forward_ad over a captured tensor of a score function raises too."""
    q, k, v = (x.detach() for x in qkv())
    gate = torch.rand(2).double()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(gate, torch.ones_like(gate))
        with pytest.raises(NotImplementedError, match=r"forward-mode|jvp"):
            attention(q, k, v, score_mod=lambda s, b, h, i, j: s * dual[h], backend="tiled")


def test_reference_backend_is_differentiable_forwards_and_twice() -> None:
    """What the refusals recommend has to work."""
    q, k, v = qkv(b=1, sq=2, sk=3, hq=1, hk=1, d=2)

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, causal=True, backend="reference")

    assert torch.autograd.gradcheck(f, (q, k, v), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(f, (q, k, v))


@pytest.mark.parametrize("backend", ["tiled", "auto"])
def test_double_backward_raises(backend: str) -> None:
    q, k, v = qkv()
    out, aux = attention(q, k, v, backend=backend, return_aux="lse")
    (grad,) = torch.autograd.grad(out.square().sum() + aux.lse.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"second derivative|double backward|twice"):
        grad.square().sum().backward()
    # A gradient penalty that involves only v's gradient must not be a silent zero either.
    (grad,) = torch.autograd.grad(attention(q, k, v, backend=backend).sum(), v, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"second derivative|double backward|twice"):
        torch.autograd.grad(grad.square().sum(), q)


# ------------------------------------------------------------------------------------------------------------------ 9. aux


@every_backend
def test_aux_is_a_named_tuple_with_none_for_the_rest(backend: str) -> None:
    q, k, v = qkv()
    out, aux = attention(q, k, v, backend=backend, return_aux="entropy")
    assert isinstance(aux, tilewise.Aux) and aux._fields == EVERY_AUX
    assert aux.lse is None and aux.max_logits is None and aux.key_mass is None
    assert aux.entropy.shape == (2, 2, 5)
    leaves, _ = torch.utils._pytree.tree_flatten(aux)
    assert len([x for x in leaves if x is not None]) == 1
    assert isinstance(attention(q, k, v, backend=backend), Tensor)
    out, aux = attention(q, k, v, backend=backend, return_aux=("key_mass", "max_logits"))
    assert aux.key_mass.shape == (2, 2, 7) and aux.max_logits.shape == (2,) and aux.lse is None
    assert torch.equal(out, attention(q, k, v, backend=backend))


@every_backend
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_probabilities_in_aux_are_those_before_dropout(backend: str, layout: str) -> None:
    q, k, v = qkv(sq=21, sk=37, hq=4)
    if layout == "bhsd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    _, plain = attention(q, k, v, backend=backend, layout=layout, return_aux=EVERY_AUX)
    _, dropped = attention(q, k, v, backend=backend, layout=layout, return_aux=EVERY_AUX, dropout_p=0.5, dropout_seed=1)
    for a, b in zip(plain, dropped, strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(plain.key_mass.sum(-1), torch.full((2, 4), 21.0, dtype=torch.float64))
    assert (plain.entropy > 0).all() and (plain.entropy <= math.log(37) + 1e-9).all()


@every_backend
def test_max_logits_is_per_head_without_the_sink(backend: str) -> None:
    q, k, v = qkv(sq=21, sk=37)
    bias = torch.randn(21, 37, dtype=torch.float64)
    lengths = torch.tensor([20, 37], dtype=I32)
    options = dict(causal=True, softcap=2.0, bias=bias, seqused_k=lengths, learnable_sink=torch.full((2,), 1e3).double())
    _, aux = attention(q, k, v, backend=backend, return_aux="max_logits", **options)
    scores = 2.0 * torch.tanh(torch.einsum("bihd,bjhd->bhij", q, k) * 8**-0.5 / 2.0) + bias
    p = torch.arange(21).view(1, 1, 21, 1) + lengths.view(2, 1, 1, 1) - 21
    scores = scores.masked_fill((torch.arange(37) > p) | (torch.arange(37) >= lengths.view(2, 1, 1, 1)), NEG_INF)
    torch.testing.assert_close(aux.max_logits, scores.amax((0, 2, 3)))


# ------------------------------------------------------------------------------------------------------------- 10. dropout


@every_backend
@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1, 2**32, 2**40 + 11, -1, 2**63 - 1, -(2**63)])
def test_dropout_mask_is_philox_of_the_position(backend: str, seed: int) -> None:
    """With V the identity and equal scores, the output is the kept pattern; sizes that no tile divides, and every counter word used."""
    size_q, size_k, heads = 5, 11, 3
    q, k = torch.zeros(2, size_q, heads, 8), torch.zeros(2, size_k, 1, 8)
    v = torch.eye(size_k).view(1, size_k, 1, size_k).expand(2, size_k, 1, size_k)
    for given in (seed, torch.tensor(seed, dtype=torch.int64)):
        out = attention(q, k, v, dropout_p=0.35, dropout_seed=given, backend=backend)
        for b in range(2):
            for h in range(heads):
                for i in range(size_q):
                    kept = [oracle.is_kept(seed, 0.35, b, h, i, j) for j in range(size_k)]
                    assert (out[b, i, h] > 0).tolist() == kept
    torch.testing.assert_close(out[out > 0], torch.full_like(out[out > 0], 1 / (0.65 * size_k)))


@every_backend
def test_dropout_threshold_is_the_floor(backend: str) -> None:
    """A probability just below, at and above a word of the stream flips exactly that one."""
    word = oracle.philox_4x32_10((0, 0, 0, 0), (5, 0))[2]
    q = k = torch.zeros(1, 4, 1, 8)
    v = torch.eye(4).view(1, 4, 1, 4)
    assert attention(q[:, :1], k, v, dropout_p=word / 2**32, dropout_seed=5, backend=backend)[0, 0, 0, 2] > 0
    assert attention(q[:, :1], k, v, dropout_p=(word + 1) / 2**32, dropout_seed=5, backend=backend)[0, 0, 0, 2] == 0


def test_dropout_is_the_same_beyond_one_tile_and_in_backward() -> None:
    """The reference's pattern over many tiles, forward and through dV, and the split into batch items does not matter."""
    q, k, v = qkv(sq=70, sk=133, hq=2)
    options = dict(dropout_p=0.25, dropout_seed=2**45 + 3, causal=True)
    out = attention(q, k, v, backend="tiled", **options)
    expected = attention(q, k, v, backend="reference", **options)
    torch.testing.assert_close(out, expected)
    weight = torch.randn_like(out)
    for a, b in zip(torch.autograd.grad(out, (q, k, v), weight), torch.autograd.grad(expected, (q, k, v), weight), strict=True):
        torch.testing.assert_close(a, b)


@every_backend
def test_dropout_seed_follows_torchs_generator(backend: str) -> None:
    q, k, v = qkv(sq=20, sk=20)
    torch.manual_seed(5)
    first, second = (attention(q, k, v, dropout_p=0.5, backend=backend) for _ in range(2))
    torch.manual_seed(5)
    again = attention(q, k, v, dropout_p=0.5, backend=backend)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    before = torch.get_rng_state()
    attention(q, k, v, dropout_p=0.5, dropout_seed=3, backend=backend)
    attention(q, k, v, backend=backend)
    assert torch.equal(before, torch.get_rng_state())


@every_backend
def test_dropout_is_unbiased_and_off_at_zero(backend: str) -> None:
    q, k, v = (x.detach() for x in qkv(b=1, sq=8, sk=16, dtype=torch.float32))
    plain = attention(q, k, v, backend=backend)
    assert torch.equal(attention(q, k, v, dropout_p=0.0, dropout_seed=1, backend=backend), plain)
    mean = torch.stack([attention(q, k, v, dropout_p=0.2, dropout_seed=seed, backend=backend) for seed in range(300)]).mean(0)
    assert (mean - plain).abs().max() < 0.25


# --------------------------------------------------------------------------------------------------------- 11. determinism


def test_deterministic_calls_repeat_bit_for_bit() -> None:
    q, k, v = qkv(sq=70, sk=133, hq=4, dtype=torch.float32)
    bias = torch.randn(70, 133, requires_grad=True)
    sink = torch.randn(4, requires_grad=True)

    def run() -> list[Tensor]:
        out, aux = attention(q, k, v, bias=bias, learnable_sink=sink, causal=True, deterministic=True, backend="tiled", return_aux="lse")
        return [out, aux.lse, *torch.autograd.grad(out.sum() + aux.lse.sum(), (q, k, v, bias, sink))]

    first = run()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


def rules_seen(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    from tilewise.kernels import tiled

    seen: list[bool] = []
    forward, backward = tiled.forward, tiled.backward
    monkeypatch.setattr(tiled, "forward", lambda t, r, out: (seen.append(r.deterministic), forward(t, r, out))[1])
    monkeypatch.setattr(
        tiled, "backward", lambda t, r, saved, cot, grads: (seen.append(r.deterministic), backward(t, r, saved, cot, grads))[1]
    )
    return seen


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("given", [None, False, True])
def test_deterministic_follows_torch_and_is_kept(flag: bool, given: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """None reads the global flag once, in forward; True and False win over it."""
    seen = rules_seen(monkeypatch)
    q, k, v = qkv()
    before = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(flag)
        out = attention(q, k, v, deterministic=given, backend="tiled")
        torch.use_deterministic_algorithms(not flag)
        out.sum().backward()
    finally:
        torch.use_deterministic_algorithms(before)
    expected = flag if given is None else given
    assert seen == [expected, expected]


# ------------------------------------------------------------------------------------------------------ 12. and 13. ground


def test_auto_on_cpu_does_not_warn() -> None:
    q, k, v = qkv(dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(q, k, v, causal=True).sum().backward()
        attention(q, k, v, bias=torch.randn(5, 7), softcap=2.0)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@every_backend
def test_output_and_gradients_are_contiguous_in_their_own_order(layout: str, backend: str) -> None:
    q, k, v = qkv(hq=4, dv=6, dtype=torch.float32)
    leaves = [x.detach().transpose(1, 2) if layout == "bhsd" else x.detach() for x in (q, k, v)]
    leaves = [leaves[0].contiguous(), leaves[1].transpose(1, 2).contiguous().transpose(1, 2), leaves[2].transpose(2, 3).contiguous().mT]
    leaves = [x.requires_grad_() for x in leaves]
    out = attention(*leaves, layout=layout, backend=backend)
    assert out.is_contiguous()
    for x, grad in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
        assert grad.shape == x.shape
        if backend != "reference":
            assert grad.is_contiguous()


def test_inputs_are_never_written() -> None:
    q, k, v = qkv(sq=21, sk=37, dtype=torch.float32)
    bias, mask = torch.randn(21, 37), torch.rand(21, 37) < 0.8
    lengths = torch.tensor([30, 50], dtype=I32)
    before = [x.clone() for x in (q, k, v, bias, mask, lengths)]
    attention(q, k, v, bias=bias, mask=mask, seqused_k=lengths, causal=True, backend="tiled").sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(before, (q, k, v, bias, mask, lengths), strict=True))


def test_meta_tensors_give_shapes_only() -> None:
    q, k, v = (x.detach().to("meta") for x in qkv(dtype=torch.bfloat16))
    out, aux = attention(q, k, v, return_aux=EVERY_AUX)
    assert out.device.type == "meta" and out.shape == q.shape and out.dtype == torch.bfloat16
    assert aux.lse.dtype == torch.float32 and aux.key_mass.shape == (2, 2, 7)
