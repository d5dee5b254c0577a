"""How people call FlexAttention: each mask and score function once, in float64.

Outputs are compared with torch's function, which has no gradient on a CPU; gradients with those of the reference.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn.attention import flex_attention as torchs

from tilewise import reference
from tilewise.compat import flex as ours

BATCH, HEADS, LENGTH, DIM = 2, 4, 64, 8
PATTERNS = {}


def pattern(function):
    """Registers ``f(library) -> (score_mod, mask_mod, captured tensors that need a gradient)``."""
    PATTERNS[function.__name__] = function
    return function


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


@pattern
def causal_order(library):
    return None, causal, []


@pattern
def a_causal_window(library):
    def window(b, h, q_idx, kv_idx):
        return q_idx - kv_idx <= 9

    return None, library.and_masks(causal, window), []


@pattern
def a_prefix_that_all_see(library):
    lengths = torch.tensor([5, 20])

    def prefix(b, h, q_idx, kv_idx):
        return kv_idx < lengths[b]

    return None, library.or_masks(prefix, causal), []


@pattern
def packed_documents(library):
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor([10, 30, 4, 20]))

    def same_document(b, h, q_idx, kv_idx):
        return documents[q_idx] == documents[kv_idx]

    return None, library.and_masks(same_document, causal), []


@pattern
def a_neighbourhood_in_an_image(library):
    def near(b, h, q_idx, kv_idx):
        return ((q_idx // 8 - kv_idx // 8).abs() <= 1) & ((q_idx % 8 - kv_idx % 8).abs() <= 2)

    return None, near, []


@pattern
def alibi(library):
    slopes = torch.exp2(-torch.arange(1, HEADS + 1, dtype=torch.float64))

    def bias(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * (kv_idx - q_idx)

    return bias, causal, []


@pattern
def softcapping(library):
    def cap(score, b, h, q_idx, kv_idx):
        return 4 * torch.tanh(score / 4)

    return cap, causal, []


@pattern
def a_learned_table_of_distances(library):
    table = torch.randn(HEADS, 2 * LENGTH, dtype=torch.float64, requires_grad=True)

    def bias(score, b, h, q_idx, kv_idx):
        return score + table[h, q_idx - kv_idx + LENGTH]

    return bias, None, [table]


@pattern
def a_mask_for_each_head(library):
    def strided(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx) % (h + 1) == 0

    return None, library.and_masks(strided, causal), []


def blocks(library, mask_mod):
    return None if mask_mod is None else library.create_block_mask(mask_mod, BATCH, HEADS, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)


@pytest.mark.parametrize("name", PATTERNS)
def test_masks_that_torch_built_and_combined(name: str) -> None:
    """Half of a program may keep torch's import: its block masks and its `and_masks` and `or_masks` are served as they are."""
    q, k, v = (torch.randn(BATCH, HEADS, LENGTH, DIM, dtype=torch.float64) for _ in range(3))
    torch.manual_seed(0)
    score_mod, mask_mod, _ = PATTERNS[name](torchs)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = blocks(torchs, torchs.noop_mask if mask_mod is None else mask_mod)
        expected = torchs.flex_attention(q, k, v, score_mod=score_mod, block_mask=given)
        for block_mask in (given, blocks(ours, torchs.noop_mask if mask_mod is None else mask_mod)):
            out = ours.flex_attention(q, k, v, score_mod=score_mod, block_mask=block_mask)
            torch.testing.assert_close(out, expected, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("name", PATTERNS)
def test_pattern(name: str) -> None:
    q, k, v = (torch.randn(BATCH, HEADS, LENGTH, DIM, dtype=torch.float64) for _ in range(3))
    mask_mod = PATTERNS[name](torchs)[1]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch advises compiling its function
        torch.manual_seed(0)
        expected = torchs.flex_attention(q, k, v, score_mod=PATTERNS[name](torchs)[0], block_mask=blocks(torchs, mask_mod), scale=0.5)

    torch.manual_seed(0)
    score_mod, mask_mod, captured = PATTERNS[name](ours)
    leaves = [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), *captured]
    out = ours.flex_attention(q, k, v, score_mod=score_mod, block_mask=blocks(ours, mask_mod), scale=0.5)
    torch.testing.assert_close(out, expected, atol=1e-10, rtol=1e-8)

    visible = None if mask_mod is None else torchs.create_mask(mask_mod, BATCH, HEADS, LENGTH, LENGTH, device="cpu")
    exact = reference.attention(q, k, v, score_mod=score_mod, mask=visible, softmax_scale=0.5, layout="bhsd")[0]
    weights = torch.randn_like(out)
    for mine, theirs in zip(*(torch.autograd.grad((x * weights).sum(), leaves) for x in (out, exact)), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("library", [ours, torchs], ids=["our masks", "torch's masks"])
def test_a_decoding_loop_takes_rows_of_one_mask(library) -> None:
    """A static cache, one mask for all of it: each step takes the row of blocks of its token and moves the function to its place."""
    q, k, v = (torch.randn(1, HEADS, LENGTH, DIM, dtype=torch.float64) for _ in range(3))
    whole = library.create_block_mask(causal, 1, 1, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)

    def moved(mask_mod, offset):
        return lambda b, h, q_idx, kv_idx: mask_mod(b, h, q_idx + offset, kv_idx)

    steps = []
    for place in torch.arange(20, 40)[:, None]:
        mask = whole[:, :, place // whole.BLOCK_SIZE[0]]
        mask.mask_mod, mask.seq_lengths = moved(whole.mask_mod, place[0]), (1, LENGTH)
        steps.append(ours.flex_attention(q[:, :, place], k, v, block_mask=mask))
    torch.testing.assert_close(torch.cat(steps, 2), reference.attention(q, k, v, causal=True, layout="bhsd")[0][:, :, 20:40])
