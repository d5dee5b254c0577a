"""The sharp points of the contract, one group of tests for each rule: position, order, indices, LSE. The rest is in the files beside."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import tilewise
from tilewise import attention

from .small import EVERY_AUX, I32, NEG_INF, every_backend, every_dtype, qkv, seen_keys

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
