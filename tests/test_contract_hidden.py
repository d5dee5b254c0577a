"""The sharp points of the contract: empty rows and hidden values (rules 5 and 6)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewise import attention

from .small import EVERY_AUX, I32, NEG_INF, every_backend, every_dtype, leaves_of, qkv

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
    "bias": lambda: (
        dict(bias=torch.where(torch.arange(37) % 5 == 2, NEG_INF, 0.25)),
        torch.zeros(2, 21).bool(),
        (torch.arange(37) % 5 == 2).expand(2, 37),
    ),
    "score_mod": lambda: (
        dict(score_mod=lambda s, b, h, i, j: torch.where(j % 5 != 2, s + torch.tanh(s), NEG_INF)),
        torch.zeros(2, 21).bool(),
        (torch.arange(37) % 5 == 2).expand(2, 37),
    ),
    "mask_under_score_mod": lambda: (
        dict(score_mod=lambda s, b, h, i, j: s * torch.abs(s) + 0.125 * (i - j), mask=torch.arange(37) % 5 != 2, softcap=2.0),
        torch.zeros(2, 21).bool(),
        (torch.arange(37) % 5 == 2).expand(2, 37),
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
@pytest.mark.parametrize("size", [7, 64])
def test_a_visible_nan_shows(backend: str, where: str, size: int) -> None:
    q, k, v = (x.detach() for x in qkv(dtype=torch.float32, sq=size, sk=size))
    bad = {"q": q, "k": k, "v": v}
    bad[where][0, 1, 0] = math.nan
    out, aux = attention(**bad, backend=backend, return_aux="lse")
    assert out[0, 1, 0].isnan().any()
    assert where == "v" or aux.lse[0, 0, 1].isnan()
    assert out[1].isfinite().all()
