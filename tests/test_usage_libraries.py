"""Whole calls as well-known libraries make them, each through the function that the library imports, against attention written out.

Serving engines (packed prompts and tokens over pages, drafts), trainers (packed rows, sequence first, context parallel), memory-efficient
attention's biases, vision and protein models. Most compare outputs; where the library trains, gradients too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tilewise
from tests.test_usage_flash_attn import close, grads_close, installed, lower_right, written_out  # noqa: F401
from tilewise import masks
from tilewise.compat.sdpa import scaled_dot_product_attention

os.environ["HF_HUB_OFFLINE"] = "1"
I32 = torch.int32
HEADS, KV_HEADS, DIM = 4, 2, 16

# ------------------------------------------------------------------------------------------ transformers' own FlashAttention route

DECODER = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    pad_token_id=0, bos_token_id=1, eos_token_id=None,
)  # fmt: skip
MODELS = {
    "llama": ("LlamaConfig", {}),
    "window": ("MistralConfig", dict(sliding_window=4)),
    "softcap": ("Gemma2Config", dict(sliding_window=4, attn_logit_softcapping=0.5, query_pre_attn_scalar=1)),
    "sinks": (
        "GptOssConfig",
        dict(sliding_window=4, num_local_experts=2, num_experts_per_tok=1, layer_types=["sliding_attention", "full_attention"]),
    ),
}


@pytest.fixture
def route(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """transformers told that flash-attn is there (it asks for the package's metadata); yields the calls that reach the functions."""
    pytest.importorskip("transformers")
    utils = pytest.importorskip("transformers.modeling_flash_attention_utils")
    import flash_attn
    import flash_attn_interface

    calls: list[str] = []

    def counted(module, name):
        function = getattr(module, name)
        spy = lambda *args, **kwargs: calls.append(name) or function(*args, **kwargs)  # noqa: E731
        spy.__wrapped__ = function  # so that its signature is the function's
        monkeypatch.setattr(module, name, spy)

    for module in (flash_attn, flash_attn_interface):
        for name in ("flash_attn_func", "flash_attn_varlen_func"):
            counted(module, name)
    monkeypatch.setattr(utils, "is_flash_attn_2_available", lambda *args, **kwargs: True)
    monkeypatch.setattr(utils, "_loaded_implementation", None)
    yield calls


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_s_own_flash_attention_route(name: str, version: int, route: list[str]) -> None:
    """It asks the functions' signatures what it may pass: windows, softcap, sinks. Whole rows, padding, packed rows."""
    import transformers

    config, changes = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config)(**DECODER, **changes)
    config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    ids, padding = torch.randint(1, 64, (2, 11)), torch.tensor([[1] * 11, [0] * 4 + [1] * 7])
    restarting = torch.cat([torch.arange(4), torch.arange(7)])[None]

    def run(implementation: str, *calls: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Logits of real tokens in one row, and the gradient of every parameter."""
        model.config._attn_implementation = implementation
        model.zero_grad()
        logits = [model(**inputs, use_cache=False).logits[inputs.get("attention_mask", inputs["input_ids"]) > 0] for inputs in calls]
        torch.cat(logits).square().mean().backward()
        return torch.cat(logits), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    padded, packed = dict(input_ids=ids, attention_mask=padding), dict(input_ids=ids[:1], position_ids=restarting)
    alone = [dict(input_ids=ids[:1, :4]), dict(input_ids=ids[:1, 4:])]  # not every model's eager route sees where positions restart
    for ours, eager, called in (
        (dict(input_ids=ids), [dict(input_ids=ids)], "flash_attn_func"),
        (padded, [padded], "flash_attn_varlen_func"),
        (packed, alone, "flash_attn_varlen_func"),
    ):
        expected = run("eager", *eager)
        assert not route
        for mine, theirs in zip(run(f"flash_attention_{version}", ours), expected, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4 * theirs.abs().max().item(), rtol=1e-4)
        assert route == [called] * config.num_hidden_layers
        route.clear()


def test_libraries_import_while_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each looks for flash_attn when it is imported, and finds a module without a distribution."""
    import importlib.metadata
    import importlib.util

    utils = pytest.importorskip("transformers.utils")
    assert importlib.util.find_spec("flash_attn").name == "flash_attn"
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash_attn")
    assert not utils.is_flash_attn_2_available() and not utils.is_flash_attn_3_available()
    diffusers = pytest.importorskip("diffusers.utils.import_utils")
    assert diffusers.is_flash_attn_available() in (True, False)


# -------------------------------------------------------------------------------------------------------------- serving engines


def pages_of(x: Tensor, lengths: list[int], size: int) -> tuple[Tensor, Tensor]:
    """Pages (n, size, H, D) in a shuffled order with the sequences of x (B, S, H, D), and the table; what nobody filled is NaN."""
    width = -(-max(lengths) // size)
    table = torch.randperm(len(lengths) * width).view(len(lengths), width).to(I32)
    pages = torch.full((table.numel(), size, *x.shape[2:]), float("nan"))
    for b, length in enumerate(lengths):
        for place in range(length):
            pages[table[b, place // size], place % size] = x[b, place]
    return pages, table


@pytest.fixture
def served() -> tuple[Tensor, Tensor, Tensor, list[int], list[int]]:
    """Three requests: a whole prompt, a chunk of a long one, a token being decoded."""
    return torch.randn(3, 6, HEADS, DIM), torch.randn(3, 20, KV_HEADS, DIM), torch.randn(3, 20, KV_HEADS, DIM), [6, 5, 1], [6, 17, 20]


def test_an_engine_s_step_over_pages_by_version_2(served) -> None:
    """Prompts, chunks and tokens in one call: offsets of queries, lengths of keys, a window given as a list."""
    from flash_attn import flash_attn_varlen_func

    q, k, v, new, lengths = served
    (k_pages, table), v_pages = pages_of(k, lengths, 4), None
    v_pages = torch.full_like(k_pages, float("nan"))
    for b, length in enumerate(lengths):
        for place in range(length):
            v_pages[table[b, place // 4], place % 4] = v[b, place]
    starts = F.pad(torch.tensor(new).cumsum(0), (1, 0)).to(I32)
    packed = torch.cat([q[b, :n] for b, n in enumerate(new)])
    out = flash_attn_varlen_func(
        packed, k_pages, v_pages, cu_seqlens_q=starts, cu_seqlens_k=F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(I32), max_seqlen_q=6,
        max_seqlen_k=20, softmax_scale=DIM**-0.5, causal=True, window_size=[9, 0], block_table=table,
    )  # fmt: skip
    for b, (n, length) in enumerate(zip(new, lengths, strict=True)):
        visible = lower_right(n, length).triu(length - n - 9)
        close(out[starts[b] : starts[b + 1]], written_out(q[b : b + 1, :n], k[b : b + 1, :length], v[b : b + 1, :length], visible)[0])


def test_drafted_branches_attend_to_a_shared_prefix_and_to_themselves(served) -> None:
    """Two calls of version 3 over pages, one for the committed tokens and one for the branch, merged by their LSE."""
    from flash_attn_interface import flash_attn_with_kvcache

    q, k, v, _, lengths = served
    both, table = pages_of(torch.cat([k, v], -1), lengths, 1)  # pages of one token: any set of places is a table
    k_pages, v_pages = both.split(DIM, -1)
    starts = torch.arange(0, 4, dtype=I32) * 2
    queries = q[:, :2].flatten(0, 1)
    shared = dict(cu_seqlens_q=starts, max_seqlen_q=2, softmax_scale=0.3, causal=False, return_softmax_lse=True)
    branch = [length - 3 for length in lengths]  # three drafted places each: the queries see the first and their own
    prefix, prefix_lse = flash_attn_with_kvcache(
        queries, k_pages, v_pages, page_table=table, cache_seqlens=torch.tensor(branch, dtype=I32), **shared
    )
    own = torch.stack(
        [torch.stack([table[b, n : n + 1], table[b, n + 1 + i : n + 2 + i]]).flatten() for b, n in enumerate(branch) for i in (0, 1)]
    )
    each = dict(shared, cu_seqlens_q=torch.arange(7, dtype=I32), max_seqlen_q=1)
    drafted, drafted_lse = flash_attn_with_kvcache(
        queries, k_pages, v_pages, page_table=own, cache_seqlens=torch.full((6,), 2, dtype=I32), **each
    )
    merged, _ = tilewise.merge([prefix, drafted], [prefix_lse, drafted_lse])
    for b, n in enumerate(branch):
        visible = torch.tensor([[True] * n + [True, True, False], [True] * n + [True, False, True]])
        close(merged[2 * b : 2 * b + 2], written_out(q[b : b + 1, :2], k[b : b + 1, : n + 3], v[b : b + 1, : n + 3], visible, scale=0.3)[0])


def test_decoding_with_latent_keys_that_are_also_the_values() -> None:
    """Multi-head latent attention, absorbed: one key head of 32 + 8 numbers for all queries, whose first 32 are the value."""
    from flash_attn_interface import flash_attn_with_kvcache

    cache, q = torch.randn(2, 12, 1, 40), torch.randn(2, 1, HEADS, 40)
    lengths = torch.tensor([12, 7], dtype=I32)
    out = flash_attn_with_kvcache(q, cache, cache[..., :32], cache_seqlens=lengths, softmax_scale=0.2, causal=True)
    for b, length in enumerate(lengths.tolist()):
        keys = cache[b : b + 1, :length]
        close(out[b : b + 1], written_out(q[b : b + 1], keys, keys[..., :32], scale=0.2))
    leaf = cache.requires_grad_()
    ours, expected = tilewise.attention(q, leaf, leaf[..., :32], softmax_scale=0.2), written_out(q, leaf, leaf[..., :32], scale=0.2)
    close(ours, expected)
    grads_close(ours, expected, [leaf])


# ---------------------------------------------------------------------------------------------------------------------- trainers


def test_sequence_first_activations_with_packed_documents() -> None:
    """(S, B, H, D) as pipeline trainers keep it, made into packed rows without a copy; offsets separate the documents."""
    from flash_attn import flash_attn_varlen_func

    x = torch.randn(10, 2, HEADS + 2 * KV_HEADS, DIM, requires_grad=True)  # one projection: query groups, then keys, then values
    q, k, v = (t.transpose(0, 1).flatten(0, 1) for t in x.split([HEADS, KV_HEADS, KV_HEADS], 2))
    starts = torch.tensor([0, 7, 10, 14, 20], dtype=I32)
    out = flash_attn_varlen_func(q, k, v, starts, starts, 7, 7, dropout_p=0.0, softmax_scale=None, causal=True)
    ours = out.view(2, 10, -1).transpose(0, 1)
    document = torch.repeat_interleave(torch.arange(4), starts.diff())
    visible = lower_right(20, 20) & (document[:, None] == document)
    expected = written_out(q[None], k[None], v[None], visible)[0].reshape(2, 10, -1).transpose(0, 1)
    close(ours, expected)
    grads_close(ours, expected, [x])


def test_a_zigzag_of_context_parallel_ranks() -> None:
    """Of four chunks a rank holds one early and one late; three kinds of calls (whole, early keys alone, late queries alone), merged."""
    from flash_attn import flash_attn_func

    q, k, v = torch.randn(3, 1, 16, HEADS, DIM)
    chunk = lambda x, *ids: torch.cat([x[:, 4 * i : 4 * i + 4] for i in ids], 1)  # noqa: E731
    expected = written_out(q, k, v, lower_right(16, 16))
    for mine, other in (((0, 3), (1, 2)), ((1, 2), (0, 3))):
        parts = [flash_attn_func(chunk(q, *mine), chunk(k, *mine), chunk(v, *mine), causal=True, return_attn_probs=True)[:2]]
        if mine[0] < other[0]:  # the early queries come before all of the other's keys, the late ones after them
            out, lse, _ = flash_attn_func(chunk(q, mine[1]), chunk(k, *other), chunk(v, *other), return_attn_probs=True)
            out, lse = F.pad(out, (0, 0, 0, 0, 4, 0)), F.pad(lse, (4, 0), value=float("-inf"))
        else:  # all queries come after the other's early keys, none after its late ones
            out, lse, _ = flash_attn_func(chunk(q, *mine), chunk(k, other[0]), chunk(v, other[0]), return_attn_probs=True)
        parts.append((out, lse))
        close(tilewise.merge(*zip(*parts, strict=True))[0], chunk(expected, *mine))


def test_a_static_cache_of_a_training_repository() -> None:
    """Rows of one lower-triangular mask, taken by position; keys are expanded to all heads; unfilled slots hold zeros."""
    size, tokens = 16, torch.randn(12, 2, HEADS + 2 * KV_HEADS, DIM)
    rows = torch.ones(size, size, dtype=torch.bool).tril()[None, None]
    cache_k, cache_v = torch.zeros(2, 2, KV_HEADS, size, DIM)
    outs = []
    for place in (torch.arange(5), *torch.arange(5, 12)[:, None]):
        q, k, v = tokens[place].permute(1, 2, 0, 3).split([HEADS, KV_HEADS, KV_HEADS], 1)
        cache_k, cache_v = cache_k.index_copy(2, place, k), cache_v.index_copy(2, place, v)
        keys, values = (x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(2, HEADS, size, DIM) for x in (cache_k, cache_v))
        outs.append(scaled_dot_product_attention(q, keys, values, rows.index_select(2, place), 0.0, is_causal=False, scale=DIM**-0.5))
    q, k, v = tokens.transpose(0, 1).split([HEADS, KV_HEADS, KV_HEADS], 2)
    close(torch.cat(outs, 2).transpose(1, 2), written_out(q, k, v, lower_right(12, 12)))


def test_a_large_finite_number_instead_of_minus_infinity() -> None:
    """Many models add finfo.min or -10000 where padding is; a row that is all padding then gives the mean, as the formula says."""
    q, k, v = torch.randn(3, 2, HEADS, 9, DIM, requires_grad=True)
    real = torch.arange(9) < torch.tensor([[9], [0]])
    for lowest in (-1e4, torch.finfo(torch.float32).min):
        mask = torch.zeros(2, 1, 1, 9).masked_fill(~real[:, None, None, :], lowest)
        ours = scaled_dot_product_attention(q, k, v, attn_mask=mask.expand(2, HEADS, 9, 9))
        close(ours[0], written_out(*(x[:1].transpose(1, 2) for x in (q, k, v)))[0].transpose(0, 1))
        torch.testing.assert_close(
            ours, F.scaled_dot_product_attention(q, k, v, attn_mask=mask), atol=2e-3 if lowest == -1e4 else 2e-6, rtol=1e-5
        )


# ----------------------------------------------------------------------------- memory-efficient attention: the migration page's table


def packed_positions(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """For each row of packed sequences its sequence and its place in it."""
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)), torch.cat([torch.arange(n) for n in lengths])


def test_every_row_of_the_xformers_table() -> None:
    """What each bias class is documented to hide, as 0/1 matrices, beside the call that the table gives for it."""
    q, k, v = torch.randn(2, 6, HEADS, DIM), torch.randn(2, 9, HEADS, DIM), torch.randn(2, 9, HEADS, DIM)
    i, j = torch.arange(6)[:, None], torch.arange(9)
    bias = torch.randn(2, HEADS, 6, 9)
    rows = {
        "LowerTriangularMask": (dict(mask=masks.Causal(align="top_left")), j <= i, None),
        "LowerTriangularFromBottomRightMask": (dict(causal=True), j <= i + 3, None),
        "LowerTriangularMaskWithTensorBias": (dict(bias=bias, mask=masks.Causal(align="top_left")), j <= i, bias.double()),
        "LocalAttentionFromBottomRightMask": (dict(window_size=(2, 1)), (j >= i + 3 - 2) & (j <= i + 3 + 1), None),
        "tensor": (dict(bias=bias), None, bias.double()),
    }
    for arguments, visible, added in rows.values():
        close(tilewise.attention(q, k, v, **arguments), written_out(q, k, v, visible, added))

    used = torch.tensor([9, 4], dtype=I32)  # BlockDiagonalPaddedKeysMask: each item has its own count of keys
    close(tilewise.attention(q, k, v, seqused_k=used), written_out(q, k, v, (j < used[:, None])[:, None, None]))

    lengths_q, lengths_k = [2, 4], [5, 4]  # BlockDiagonalMask and its causal forms, of packed rows
    (seq_q, at_q), (seq_k, at_k) = packed_positions(lengths_q), packed_positions(lengths_k)
    same = seq_q[:, None] == seq_k
    starts = [F.pad(torch.tensor(n).cumsum(0), (1, 0)).to(I32) for n in (lengths_q, lengths_k)]
    ahead = torch.tensor(lengths_k)[seq_q] - torch.tensor(lengths_q)[seq_q]
    for arguments, visible in (
        ({}, same),
        (dict(causal=True), same & (at_k <= (at_q + ahead)[:, None])),
        (dict(mask=masks.Causal(align="top_left")), same & (at_k <= at_q[:, None])),
    ):
        close(tilewise.attention_varlen(q[0], k[0], v[0], *starts, **arguments), written_out(q[:1], k[:1], v[:1], visible)[0])

    few_k, few_v = k[:, :, :KV_HEADS], v[:, :, :KV_HEADS]
    fifth = [x[:, :, :, None].expand(-1, -1, -1, 2, -1).flatten(2, 3) for x in (few_k, few_v)]  # heads of a group as a fifth dimension
    close(tilewise.attention(q, few_k, few_v), written_out(q, *fifth))


# --------------------------------------------------------------------------------------------------- vision, proteins, diffusion


def test_a_protein_model_scales_its_queries_itself() -> None:
    """Queries are scaled before rotation, so the call's scale is 1; the mask is the padding, inverted."""
    q, k, v = torch.randn(3, 2, HEADS, 9, DIM)
    padding = torch.arange(9) >= torch.tensor([[9], [5]])
    out = scaled_dot_product_attention(q * DIM**-0.5, k, v, attn_mask=~padding[:, None, None, :].expand(-1, HEADS, 9, -1), scale=1.0)
    close(out.transpose(1, 2), written_out(*(x.transpose(1, 2) for x in (q, k, v)), ~padding[:, None, None, :]))


def test_cross_attention_of_a_denoiser_with_a_mask_repeated_for_every_head() -> None:
    """The text's padding as an additive row (B, 1, T), repeated to (B H, 1, T) and viewed as (B, H, 1, T)."""
    hidden, text = torch.randn(2, 25, HEADS * DIM, requires_grad=True), torch.randn(2, 7, HEADS * DIM, requires_grad=True)
    keep = torch.tensor([[1] * 7, [1] * 3 + [0] * 4])
    row = (1 - keep[:, None].float()) * -10000.0
    mask = row.repeat_interleave(HEADS, 0).view(2, HEADS, -1, 7)
    q, k, v = (x.view(2, -1, HEADS, DIM).transpose(1, 2) for x in (hidden, text, text.sin()))
    ours = scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.0, is_causal=False).transpose(1, 2)
    expected = written_out(*(x.transpose(1, 2) for x in (q, k, v)), keep.bool()[:, None, None, :])
    close(ours, expected)
    grads_close(ours, expected, [hidden, text])


def test_joint_attention_of_image_and_text_tokens() -> None:
    """Two streams are concatenated, attend as one, and are split again."""
    image, text = torch.randn(2, 12, 3, HEADS, DIM, requires_grad=True), torch.randn(2, 5, 3, HEADS, DIM, requires_grad=True)
    q, k, v = torch.cat([image, text], 1).unbind(2)
    ours = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    for mine, theirs in zip(ours.split([12, 5], 1), written_out(q, k, v).split([12, 5], 1), strict=True):
        close(mine, theirs)
    grads_close(ours, written_out(q, k, v), [image, text])


def test_a_vision_tower_over_images_of_many_sizes() -> None:
    """Patches of all images lie in one row; windows of neighbouring patches and whole images are two sets of offsets."""
    from flash_attn import flash_attn_varlen_func

    q, k, v = torch.randn(3, 26, HEADS, DIM)
    for starts in (torch.tensor([0, 16, 26], dtype=I32), torch.tensor([0, 4, 8, 12, 16, 20, 24, 26], dtype=I32)):
        longest = starts.diff().max()  # a tensor, as it is computed in the model
        out = flash_attn_varlen_func(q, k, v, starts, starts, longest, longest)
        window = torch.repeat_interleave(torch.arange(len(starts) - 1), starts.diff())
        close(out, written_out(q[None], k[None], v[None], window[:, None] == window)[0])
