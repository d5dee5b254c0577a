"""Random expressions of rules at random sizes: every path against the reference, forward and backward, with NaN in all that is hidden."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tilewise import BlockMask, attention, masks, reference

from .test_masks import leaves

pytestmark = pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")
BATCH, HEADS = 2, 2


@st.composite
def calls(draw: Any) -> tuple[masks.Mask, int, int, Any, bool, dict[str, Any]]:
    seqlen_q, seqlen_k = draw(st.integers(1, 40)), draw(st.integers(1, 50))
    rule = draw(
        st.recursive(
            leaves(BATCH, HEADS, seqlen_q, seqlen_k),
            lambda inner: st.one_of(
                st.builds(lambda a, b: a & b, inner, inner), st.builds(lambda a, b: a | b, inner, inner), st.builds(lambda a: ~a, inner)
            ),
            max_leaves=4,
        )
    )
    block_size = draw(st.sampled_from([16, 32, (16, 32), (64, 16)]))
    options = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "causal": st.just(True),
                "window_size": st.tuples(st.integers(-1, 30), st.integers(-1, 10)),
                "softcap": st.just(2.0),
                "learnable_sink": st.just(torch.tensor([0.5, -0.5], dtype=torch.float64)),
            },
        )
    )
    return rule, seqlen_q, seqlen_k, block_size, draw(st.booleans()), options


def poisoned(x: Tensor, seen: Tensor) -> Tensor:
    """x (B, S, H, D) with NaN in the rows that nobody sees, (B, H, S)."""
    return torch.where(seen.transpose(1, 2)[..., None], x, torch.nan)


@settings(max_examples=50, deadline=None)
@given(calls())
def test_every_path_equals_the_reference_and_hidden_values_go_nowhere(call: Any) -> None:
    rule, seqlen_q, seqlen_k, block_size, grouped, options = call
    kv_heads = 1 if grouped else HEADS
    generator = torch.Generator().manual_seed(seqlen_q * 64 + seqlen_k)
    q, k, v, dout = (
        torch.randn(BATCH, size, heads, 4, generator=generator, dtype=torch.float64)
        for size, heads in ((seqlen_q, HEADS), (seqlen_k, kv_heads), (seqlen_k, kv_heads), (seqlen_q, HEADS))
    )
    exact_leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = reference.attention(*exact_leaves, mask=rule, **options)
    exact = [out, lse, *torch.autograd.grad((out, lse), exact_leaves, (dout, torch.ones_like(lse)))]

    visible = rule.dense(BATCH, HEADS, seqlen_q, seqlen_k).expand(BATCH, HEADS, -1, -1)
    p = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    j = torch.arange(seqlen_k)
    left, right = options.get("window_size", (-1, -1))
    for applies, condition in ((options.get("causal"), j <= p), (left >= 0, j >= p - left), (right >= 0, j <= p + right)):
        visible = visible & condition if applies else visible
    seen = visible.any(2)
    seen = seen.any(1, keepdim=True) if grouped else seen
    hidden = [q, poisoned(k, seen), poisoned(v, seen)]

    block_mask = BlockMask(rule, seqlen_q, seqlen_k, batch=BATCH, heads=HEADS, block_size=block_size)
    block_mask.verify()
    for mask in (rule, block_mask, rule.dense(BATCH, HEADS, seqlen_q, seqlen_k)):
        leaves_ = [x.clone().requires_grad_() for x in hidden]
        out, aux = attention(*leaves_, mask=mask, return_aux="lse", **options)
        found = [out, aux.lse, *torch.autograd.grad((out, aux.lse), leaves_, (dout, torch.ones_like(lse)))]
        for ours, right_ in zip(found, exact, strict=True):
            torch.testing.assert_close(ours, right_, rtol=1e-9, atol=1e-9, msg=lambda text, mask=mask: f"{mask!r}: {text}")


@pytest.mark.parametrize("backend", ["auto", "tiled", "reference"])
@pytest.mark.parametrize("rule", [~masks.Full(), masks.FirstKeys(0), masks.Blocks(torch.zeros(1, 1, 3, 3, dtype=torch.bool), 16)], ids=repr)
def test_a_mask_that_hides_everything(rule: masks.Mask, backend: str) -> None:
    for mask in (rule, BlockMask(rule, 40, block_size=16)):
        q, k, v = (torch.full((2, 40, 2, 8), torch.nan, requires_grad=True) for _ in range(3))
        out, aux = attention(q, k, v, mask=mask, backend=backend, return_aux=("lse", "key_mass", "entropy"))
        assert not out.any() and (aux.lse == -torch.inf).all() and not aux.key_mass.any() and not aux.entropy.any()
        for grad in torch.autograd.grad((out, aux.lse), (q, k, v), (torch.ones_like(out), torch.ones_like(aux.lse))):
            assert not grad.any()
