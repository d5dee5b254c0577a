"""How people call `F.scaled_dot_product_attention`: each pattern once, with torch's function and with ours put in its place.

Outputs and the gradients of every parameter are compared in float64, where both compute the same real numbers.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tilewise.compat.sdpa import scaled_dot_product_attention as ours

PATTERNS = {}
BATCH, LENGTH, HEADS, DIM = 2, 12, 4, 8


def pattern(function):
    """Registers ``f(sdpa, *leaves) -> output``; its defaults are functions that make the leaves."""
    PATTERNS[function.__name__] = function
    return function


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def heads_first(*shape: int) -> list[torch.Tensor]:
    return [leaf(*shape) for _ in range(3)]


@pattern
def causal_self_attention_of_a_fused_projection(sdpa):
    """One Linear makes q, k and v, which are split, viewed as heads and transposed."""
    x, weight = leaf(BATCH, LENGTH, 32), leaf(96, 32)
    q, k, v = F.linear(x, weight).split(32, dim=2)
    q, k, v = (t.view(BATCH, LENGTH, HEADS, DIM).transpose(1, 2) for t in (q, k, v))
    out = sdpa(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=True)
    return out.transpose(1, 2).contiguous().view(BATCH, LENGTH, 32), [x, weight]


@pattern
def padded_batch_with_a_key_mask(sdpa):
    leaves = heads_first(BATCH, HEADS, LENGTH, DIM)
    real = torch.arange(LENGTH) < torch.tensor([[LENGTH], [7]])
    return sdpa(*leaves, attn_mask=real[:, None, None, :]), leaves


@pattern
def padded_batch_with_causal_order_in_one_mask(sdpa):
    leaves = heads_first(BATCH, HEADS, LENGTH, DIM)
    real = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [7]]))[:, None, None, :]
    return sdpa(*leaves, attn_mask=real & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()), leaves


@pattern
def additive_mask_of_minus_infinity(sdpa):
    leaves = heads_first(BATCH, HEADS, LENGTH, DIM)
    mask = torch.zeros(LENGTH, LENGTH, dtype=torch.float64).masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -math.inf)
    return sdpa(*leaves, attn_mask=mask), leaves


@pattern
def cross_attention_to_an_encoder(sdpa):
    q, k, v = leaf(BATCH, HEADS, 5, DIM), leaf(BATCH, HEADS, LENGTH, DIM), leaf(BATCH, HEADS, LENGTH, DIM)
    return sdpa(q, k, v), [q, k, v]


@pattern
def one_new_token_over_a_cache(sdpa):
    q, cache_k, cache_v = leaf(BATCH, HEADS, 1, DIM), *heads_first(BATCH, HEADS, LENGTH, DIM)[:2]
    new_k, new_v = leaf(BATCH, HEADS, 1, DIM), leaf(BATCH, HEADS, 1, DIM)
    out = sdpa(q, torch.cat((cache_k, new_k), 2), torch.cat((cache_v, new_v), 2), is_causal=False)
    return out, [q, cache_k, cache_v, new_k, new_v]


@pattern
def several_new_tokens_with_a_lower_right_mask(sdpa):
    """What `is_causal` cannot say when there are more keys than queries."""
    q, k, v = leaf(BATCH, HEADS, 3, DIM), leaf(BATCH, HEADS, LENGTH, DIM), leaf(BATCH, HEADS, LENGTH, DIM)
    return sdpa(q, k, v, attn_mask=torch.ones(3, LENGTH, dtype=torch.bool).tril(LENGTH - 3)), [q, k, v]


@pattern
def grouped_heads(sdpa):
    q, k, v = leaf(BATCH, 8, LENGTH, DIM), leaf(BATCH, 2, LENGTH, DIM), leaf(BATCH, 2, LENGTH, DIM)
    return sdpa(q, k, v, is_causal=True, enable_gqa=True), [q, k, v]


@pattern
def alibi_as_a_mask(sdpa):
    leaves = heads_first(BATCH, HEADS, LENGTH, DIM)
    slopes = 2.0 ** -torch.arange(1, HEADS + 1, dtype=torch.float64)
    distance = torch.arange(LENGTH)[None, :] - torch.arange(LENGTH)[:, None]
    bias = (slopes[:, None, None] * distance).masked_fill(distance > 0, -math.inf)
    return sdpa(*leaves, attn_mask=bias), leaves


@pattern
def learned_relative_positions(sdpa):
    """T5 and Swin: a table looked up by distance, shared by the batch, with a gradient."""
    leaves, table = heads_first(BATCH, HEADS, LENGTH, DIM), leaf(2 * LENGTH - 1, HEADS)
    index = torch.arange(LENGTH)[None, :] - torch.arange(LENGTH)[:, None] + LENGTH - 1
    return sdpa(*leaves, attn_mask=table[index].permute(2, 0, 1)), [*leaves, table]


@pattern
def another_scale(sdpa):
    leaves = heads_first(BATCH, HEADS, LENGTH, DIM)
    return sdpa(*leaves, scale=1.0 / DIM), leaves


@pattern
def band_mask_of_a_sliding_window(sdpa):
    leaves = heads_first(BATCH, HEADS, LENGTH, DIM)
    band = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().triu(-3)
    return sdpa(*leaves, attn_mask=band), leaves


@pattern
def windows_of_an_image(sdpa):
    """Windows and batch are two leading dimensions; each window has its own mask, shared by the batch and the heads."""
    leaves = heads_first(BATCH, 3, HEADS, 4, DIM)
    mask = torch.rand(3, 1, 4, 4) > 0.3
    mask[..., 0] = True
    return sdpa(*leaves, attn_mask=mask.expand(BATCH, 3, 1, 4, 4)), leaves


@pattern
def values_wider_than_keys(sdpa):
    q, k, v = leaf(BATCH, HEADS, LENGTH, DIM), leaf(BATCH, HEADS, LENGTH, DIM), leaf(BATCH, HEADS, LENGTH, 2 * DIM)
    return sdpa(q, k, v, is_causal=True), [q, k, v]


@pytest.mark.parametrize("name", PATTERNS)
def test_pattern(name: str) -> None:
    results = []
    for function in (F.scaled_dot_product_attention, ours):
        torch.manual_seed(0)
        out, leaves = PATTERNS[name](function)
        results.append((out, *torch.autograd.grad((out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum(), leaves)))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=1e-10)


def test_modules_of_torch_with_our_function_in_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """`nn.MultiheadAttention` and the transformer layers call `F.scaled_dot_product_attention` when no weights are asked for."""
    calls = []
    layer = nn.TransformerDecoderLayer(32, HEADS, 48, dropout=0.0, batch_first=True, dtype=torch.float64)
    target, memory = leaf(BATCH, 6, 32), leaf(BATCH, LENGTH, 32)
    arguments = dict(tgt_mask=nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64), tgt_is_causal=True)
    arguments["memory_key_padding_mask"] = torch.arange(LENGTH) >= torch.tensor([[LENGTH], [7]])
    expected = layer(target, memory, **arguments)
    torchs = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **kw: calls.append(a) or ours(*a, **kw))
    torch.testing.assert_close(layer(target, memory, **arguments), expected, atol=1e-12, rtol=1e-10)
    assert len(calls) == 2 and torchs is not F.scaled_dot_product_attention
