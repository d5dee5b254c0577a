"""How people call FlashAttention: each pattern once, through `import flash_attn`, against attention written out in full."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tilewise import compat

HEADS, DIM = 4, 16


@pytest.fixture(autouse=True)
def installed():
    compat.install()
    yield
    compat.uninstall()


def written_out(q, k, v, allowed=None, bias=None, scale=None, cap=None) -> torch.Tensor:
    """softmax(q k^T) v in float64 for (B, S, H, D) tensors; `allowed` and `bias` broadcast to (B, H, Sq, Sk)."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    s = q @ k.mT * (DIM**-0.5 if scale is None else scale)
    s = s if cap is None else cap * torch.tanh(s / cap)
    s = s if bias is None else s + bias
    s = s if allowed is None else s.masked_fill(~allowed, -math.inf)
    return (s.softmax(-1) @ v).transpose(1, 2)


def lower_right(queries: int, keys: int) -> torch.Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


def close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(ours, expected.to(ours.dtype), atol=3e-6, rtol=1e-5)


def grads_close(ours: torch.Tensor, expected: torch.Tensor, leaves: list[torch.Tensor]) -> None:
    weights = torch.randn_like(ours)
    mine_and_theirs = [torch.autograd.grad((out * weights).sum(), leaves, retain_graph=True) for out in (ours, expected)]
    for mine, theirs in zip(*mine_and_theirs, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


def test_a_gpt_block_with_one_fused_projection() -> None:
    from flash_attn import flash_attn_qkvpacked_func

    x, weight = torch.randn(2, 10, 64), torch.randn(3 * HEADS * DIM, 64, requires_grad=True) / 8
    qkv = F.linear(x, weight).view(2, 10, 3, HEADS, DIM)
    ours = flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=DIM**-0.5, causal=True)
    expected = written_out(*qkv.unbind(2), lower_right(10, 10))
    close(ours, expected)
    grads_close(ours, expected, [weight])


def test_multi_query_attention_with_packed_keys_and_values() -> None:
    from flash_attn import flash_attn_kvpacked_func

    q, kv = torch.randn(2, 7, HEADS, DIM, requires_grad=True), torch.randn(2, 9, 2, 1, DIM, requires_grad=True)
    ours, expected = flash_attn_kvpacked_func(q, kv, causal=True), written_out(q, *kv.unbind(2), lower_right(7, 9))
    close(ours, expected)
    grads_close(ours, expected, [q, kv])


def test_a_mistral_window() -> None:
    """A window of 4 keys, the query's own included, is (3, 0)."""
    from flash_attn import flash_attn_func

    q, k, v = torch.randn(3, 1, 12, HEADS, DIM)
    close(flash_attn_func(q, k, v, causal=True, window_size=(3, 0)), written_out(q, k, v, lower_right(12, 12).triu(-3)))


def test_a_gemma_layer_with_softcap() -> None:
    from flash_attn import flash_attn_func

    q, k, v = (3 * torch.randn(1, 12, HEADS, DIM)).requires_grad_(), *torch.randn(2, 1, 12, 2, DIM)
    ours = flash_attn_func(q, k, v, softmax_scale=0.5, causal=True, softcap=5.0)
    expected = written_out(q, k, v, lower_right(12, 12), scale=0.5, cap=5.0)
    close(ours, expected)
    grads_close(ours, expected, [q])


def test_an_mpt_layer_with_alibi() -> None:
    from flash_attn import flash_attn_func

    slopes = 2.0 ** -torch.arange(1, HEADS + 1).float()
    q, k, v = torch.randn(2, 5, HEADS, DIM), torch.randn(2, 9, HEADS, DIM), torch.randn(2, 9, HEADS, DIM)
    distance = torch.arange(9)[None, :] - (torch.arange(5)[:, None] + 4)
    expected = written_out(q, k, v, lower_right(5, 9), bias=-slopes.double()[:, None, None] * distance.abs())
    close(flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes), expected)


def test_a_bert_batch_without_its_padding() -> None:
    from flash_attn import flash_attn_varlen_qkvpacked_func
    from flash_attn.bert_padding import pad_input, unpad_input

    qkv, mask = torch.randn(3, 8, 3, HEADS, DIM), torch.arange(8) < torch.tensor([[8], [3], [5]])
    packed, indices, cu_seqlens, longest, *_ = unpad_input(qkv, mask)
    out = pad_input(flash_attn_varlen_qkvpacked_func(packed, cu_seqlens, longest, 0.0), indices, 3, 8)
    expected = written_out(*qkv.unbind(2), mask[:, None, None, :])
    close(out, torch.where(mask[..., None, None], expected, 0.0))


def test_documents_packed_into_one_row() -> None:
    from flash_attn import flash_attn_varlen_func

    q, k, v = (torch.randn(12, HEADS, DIM, requires_grad=True) for _ in range(3))
    cu_seqlens = torch.tensor([0, 4, 5, 12], dtype=torch.int32)
    ours = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 7, 7, causal=True)
    document = torch.tensor([0] * 4 + [1] + [2] * 7)
    expected = written_out(q[None], k[None], v[None], lower_right(12, 12) & (document[:, None] == document))[0]
    close(ours, expected)
    grads_close(ours, expected, [q, k, v])


def test_a_decoding_loop_repeats_the_full_computation() -> None:
    from flash_attn import flash_attn_with_kvcache

    q, k, v = torch.randn(2, 10, HEADS, DIM), torch.randn(2, 10, 2, DIM), torch.randn(2, 10, 2, DIM)
    k_cache, v_cache = torch.zeros(2, 2, 16, 2, DIM).unbind()
    seqlens = torch.zeros(2, dtype=torch.int32)
    outs = [flash_attn_with_kvcache(q[:, :6], k_cache, v_cache, k[:, :6], v[:, :6], cache_seqlens=seqlens, causal=True)]  # the prompt
    seqlens += 6
    for step in range(6, 10):
        now = slice(step, step + 1)
        outs.append(flash_attn_with_kvcache(q[:, now], k_cache, v_cache, k[:, now], v[:, now], cache_seqlens=seqlens, causal=True))
        seqlens += 1
    close(torch.cat(outs, 1), written_out(q, k, v, lower_right(10, 10)))


def test_drafted_tokens_are_verified_in_one_call() -> None:
    from flash_attn import flash_attn_with_kvcache

    k, v = torch.randn(2, 1, 14, 2, DIM)
    k_cache, v_cache = torch.zeros(2, 1, 32, 2, DIM).unbind()
    k_cache[:, :10], v_cache[:, :10] = k[:, :10], v[:, :10]
    q = torch.randn(1, 4, HEADS, DIM)
    ours = flash_attn_with_kvcache(q, k_cache, v_cache, k[:, 10:], v[:, 10:], cache_seqlens=10, causal=True)
    close(ours, written_out(q, k, v, lower_right(4, 14)))


def test_requests_share_a_paged_cache() -> None:
    from flash_attn import flash_attn_with_kvcache

    k_pages, v_pages = torch.randn(2, 6, 4, 2, DIM).unbind()
    table = torch.tensor([[0, 3, 1], [0, 5, 0]], dtype=torch.int32)  # page 0 is a common prefix
    lengths = torch.tensor([11, 6], dtype=torch.int32)
    q = torch.randn(2, 1, HEADS, DIM)
    ours = flash_attn_with_kvcache(q, k_pages, v_pages, cache_seqlens=lengths, block_table=table)
    for b, length in enumerate(lengths.tolist()):
        keys, values = (pages[table[b]].flatten(0, 1)[None, :length] for pages in (k_pages, v_pages))
        close(ours[b : b + 1], written_out(q[b : b + 1], keys, values))


def test_a_long_prompt_is_prefilled_in_chunks() -> None:
    from flash_attn import flash_attn_func

    q, k, v = torch.randn(3, 1, 12, HEADS, DIM)
    chunks = [flash_attn_func(q[:, i : i + 4], k[:, : i + 4], v[:, : i + 4], causal=True) for i in range(0, 12, 4)]
    close(torch.cat(chunks, 1), written_out(q, k, v, lower_right(12, 12)))


def test_a_ring_merges_blocks_by_their_log_sum_exp() -> None:
    """Ring attention: each rank's block gives (out, lse), combined by out - sigmoid(lse_new - lse) * (out - out_new)."""
    from flash_attn import flash_attn_func

    q, k, v = torch.randn(3, 1, 8, HEADS, DIM)
    total, total_lse = None, None
    for block in (1, 0):  # the second rank of two: its own block, then its neighbour's
        keys = slice(4 * block, 4 * block + 4)
        out, lse, _ = flash_attn_func(q[:, 4:], k[:, keys], v[:, keys], causal=block == 1, return_attn_probs=True)
        lse = lse.transpose(1, 2)[..., None]
        if total is None:
            total, total_lse = out, lse
        else:
            total = total - torch.sigmoid(lse - total_lse) * (total - out)
            total_lse = total_lse - F.logsigmoid(total_lse - lse)
    close(total, written_out(q, k, v, lower_right(8, 8))[:, 4:])
    close(total_lse[..., 0].transpose(1, 2), flash_attn_func(q, k, v, causal=True, return_attn_probs=True)[1][..., 4:])


def test_a_sink_by_way_of_the_log_sum_exp_is_the_sink_argument() -> None:
    """Before kernels took sinks, outputs were scaled by sigmoid(lse - sink)."""
    from flash_attn import flash_attn_func
    from flash_attn_interface import flash_attn_func as version_3

    q, k, v = torch.randn(3, 2, 9, HEADS, DIM)
    sink = torch.randn(HEADS)
    out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    scaled = out * torch.sigmoid(lse - sink[:, None]).transpose(1, 2)[..., None]
    close(flash_attn_func(q, k, v, causal=True, s_aux=sink), scaled)
    close(version_3(q, k, v, causal=True, s_aux=sink), scaled)


def test_a_chunked_layer_of_version_3() -> None:
    from flash_attn_interface import flash_attn_func

    q, k, v = torch.randn(3, 1, 11, HEADS, DIM)
    chunk = torch.arange(11) // 4
    close(flash_attn_func(q, k, v, causal=True, attention_chunk=4), written_out(q, k, v, lower_right(11, 11) & (chunk[:, None] == chunk)))


def test_version_3_with_used_lengths_instead_of_padding() -> None:
    from flash_attn_interface import flash_attn_varlen_func

    q, k, v = torch.randn(3, 2 * 6, HEADS, DIM)
    cu_seqlens, used = torch.tensor([0, 6, 12], dtype=torch.int32), torch.tensor([6, 4], dtype=torch.int32)
    out = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 6, 6, seqused_q=used, seqused_k=used, causal=True)
    for b, length in enumerate(used.tolist()):
        rows = slice(6 * b, 6 * b + length)
        close(out[rows], written_out(q[None, rows], k[None, rows], v[None, rows], lower_right(length, length))[0])
    assert out[10:].eq(0).all()


def test_a_model_that_asks_what_is_installed() -> None:
    """The usual guard at the top of model files."""
    import importlib.util

    assert importlib.util.find_spec("flash_attn") is not None
    import flash_attn
    from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input  # noqa: F401

    version = tuple(int(part) for part in flash_attn.__version__.partition("+")[0].split("."))
    assert version >= (2, 6, 0)
