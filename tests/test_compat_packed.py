"""`compat.flash_attn`'s functions for packed sequences, against the reference applied to each sequence on its own."""

from __future__ import annotations

import pytest
import torch

from tests.test_compat_flash_attn import DENSE
from tilewise import reference
from tilewise.compat import bert_padding, flash_attn, flash_attn_interface

LENGTHS_Q, LENGTHS_K = [5, 0, 3, 1], [7, 2, 3, 6]
OFFSETS_Q, OFFSETS_K = (torch.tensor([0, *lengths]).cumsum(0).to(torch.int32) for lengths in (LENGTHS_Q, LENGTHS_K))


def each_sequence(q, k, v, **arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition: every sequence on its own."""
    parts = []
    for b in range(len(LENGTHS_Q)):
        rows, keys = slice(*OFFSETS_Q[b : b + 2].tolist()), slice(*OFFSETS_K[b : b + 2].tolist())
        parts.append(reference.attention(q[None, rows], k[None, keys], v[None, keys], **arguments))
    return torch.cat([out[0] for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], 1)


@pytest.mark.parametrize("module", [flash_attn, flash_attn_interface])
@pytest.mark.parametrize("name", DENSE)
def test_packed_sequences_are_attended_one_by_one(module, name: str) -> None:
    given, meaning = DENSE[name]
    q, k, v = (torch.randn(n, h, 16, requires_grad=True) for n, h in ((9, 4), (18, 2), (18, 2)))
    expected, expected_lse = each_sequence(q, k, v, **meaning)
    out, lse, *_ = module.flash_attn_varlen_func(q, k, v, OFFSETS_Q, OFFSETS_K, 5, 7, **given, return_attn_probs=True)
    torch.testing.assert_close(out, expected.float(), atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse.float(), atol=2e-6, rtol=1e-5)
    weights = torch.randn_like(out)
    for ours, exact in zip(
        torch.autograd.grad((out * weights).sum(), (q, k, v)), torch.autograd.grad((expected * weights).sum(), (q, k, v)), strict=True
    ):
        torch.testing.assert_close(ours, exact, atol=5e-6, rtol=1e-5)


def test_packed_forms_of_packed_sequences() -> None:
    qkv = torch.randn(9, 3, 4, 16)
    offsets = OFFSETS_Q
    expected = flash_attn.flash_attn_varlen_func(*qkv.unbind(1), offsets, offsets, 5, 5, 0.0, None, True)
    assert torch.equal(flash_attn.flash_attn_varlen_qkvpacked_func(qkv, offsets, 5, 0.0, None, True), expected)
    ours = flash_attn.flash_attn_varlen_kvpacked_func(qkv[:, 0], qkv[:, 1:], offsets, offsets, 5, 5, causal=True)
    assert torch.equal(ours, expected)
    used = torch.tensor([2, 0, 3, 1], dtype=torch.int32)
    by_length = flash_attn_interface.flash_attn_varlen_func(*qkv.unbind(1), offsets, offsets, 5, 5, seqused_k=used)
    torch.testing.assert_close(by_length, flash_attn.flash_attn_varlen_func(*qkv.unbind(1), offsets, offsets, seqused_k=used))


def test_a_padded_batch_by_way_of_packed_tokens() -> None:
    """unpad, attend, pad: the padding-free training loop of many libraries."""
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    q, k, v = torch.randn(3, 2, 6, 4, 16)
    packed, indices, cu_seqlens, longest, _ = bert_padding.unpad_input(torch.stack((q, k, v), 2), mask)
    out = flash_attn.flash_attn_varlen_qkvpacked_func(packed, cu_seqlens, longest, causal=True)
    padded = bert_padding.pad_input(out, indices, 2, 6)
    lengths = mask.sum(1).to(torch.int32)
    expected = reference.attention(q, k, v, causal=True, seqused_q=lengths, seqused_k=lengths)[0]
    torch.testing.assert_close(padded, expected.float())


@pytest.mark.parametrize("module", [flash_attn, flash_attn_interface])
def test_bounds_may_be_tensors(module) -> None:
    """They change no result, so nothing reads them."""
    q = torch.randn(7, 2, 8)
    offsets, most = torch.tensor([0, 3, 7], dtype=torch.int32), torch.tensor(4)
    got = module.flash_attn_varlen_func(q, q, q, offsets, offsets, most, most, causal=True)
    torch.testing.assert_close(got, module.flash_attn_varlen_func(q, q, q, offsets, offsets, 4, 4, causal=True))


@pytest.mark.parametrize("name", ["block_table", "page_table"])
def test_keys_in_pages(name: str) -> None:
    """Chunks of prompts over their earlier keys, as serving loops call version 2 (and its relatives by the other name)."""
    q, pages = torch.randn(9, 4, 16), torch.randn(2, 6, 4, 2, 16)
    table = torch.tensor([[3, 0], [1, 1], [5, 2], [4, 3]], dtype=torch.int32)
    out = flash_attn.flash_attn_varlen_func(
        q, *pages, OFFSETS_Q, OFFSETS_K, 5, 7, softmax_scale=0.3, causal=True, window_size=(3, 0), **{name: table}
    )
    k, v = (torch.cat([x[table[b]].flatten(0, 1)[:length] for b, length in enumerate(LENGTHS_K)]) for x in pages)
    expected, _ = each_sequence(q, k, v, softmax_scale=0.3, causal=True, window_size=(3, 0))
    torch.testing.assert_close(out, expected.float(), atol=2e-6, rtol=1e-5)
