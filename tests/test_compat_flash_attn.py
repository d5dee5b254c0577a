"""`compat.flash_attn`, `flash_attn_interface` and `bert_padding`: FlashAttention's arguments, against the reference."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import types

import pytest
import torch

from tests.helpers import assert_close_to_reference, make_inputs, reference_with_grads, run_with_grads, unfused_with_grads
from tilewise import UnsupportedAttention, compat, masks, reference
from tilewise.compat import bert_padding, flash_attn, flash_attn_interface

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
SINKS = torch.tensor([0.0, 1.0, -1.0, 2.0])

# Arguments of the function, and what the reference calls them.
DENSE = {
    "plain": ({}, {}),
    "causal": ({"causal": True}, {"causal": True}),
    "scale and softcap": ({"softmax_scale": 0.5, "softcap": 2.0}, {"softmax_scale": 0.5, "softcap": 2.0}),
    "window": ({"window_size": (5, 2)}, {"window_size": (5, 2)}),
    "causal window": ({"causal": True, "window_size": (7, -1)}, {"causal": True, "window_size": (7, -1)}),
    "sinks": ({"s_aux": SINKS}, {"learnable_sink": SINKS}),
    "sinks by their other name": ({"learnable_sink": SINKS}, {"learnable_sink": SINKS}),
}
VERSION_2 = {
    "alibi": ({"alibi_slopes": SLOPES, "causal": True}, {"alibi_slopes": SLOPES, "causal": True}),
    "alibi per item": ({"alibi_slopes": SLOPES.expand(2, 4)}, {"alibi_slopes": SLOPES.expand(2, 4)}),
    "lengths": (
        {"seqused_q": torch.tensor([9, 3], dtype=torch.int32), "seqused_k": torch.tensor([20, 4], dtype=torch.int32), "causal": True},
        {"seqused_q": torch.tensor([9, 3], dtype=torch.int32), "seqused_k": torch.tensor([20, 4], dtype=torch.int32), "causal": True},
    ),
    "hints": ({"num_splits": 4, "pack_gqa": True, "deterministic": True}, {}),
}
VERSION_3 = {
    "chunks": ({"attention_chunk": 8, "causal": True}, {"mask": masks.Chunked(8), "causal": True}),
    "hints": ({"num_splits": 4, "pack_gqa": True, "deterministic": True}, {}),
}
CASES = [(flash_attn, name, case) for name, case in (DENSE | VERSION_2).items()]
CASES += [(flash_attn_interface, name, case) for name, case in (DENSE | VERSION_3).items()]


@pytest.mark.parametrize(("module", "name", "case"), CASES, ids=lambda x: x if isinstance(x, str) else "")
def test_dense_arguments_mean_what_the_reference_means(module, name: str, case) -> None:
    given, meaning = case
    inputs = make_inputs(seqlen_q=11, seqlen_k=27, heads=4, kv_heads=2)
    dout = torch.randn(2, 11, 4, 16)

    def ours(q, k, v, **_):
        out, lse, *rest = module.flash_attn_func(q, k, v, **given, return_attn_probs=True)
        assert rest == ([None] if module is flash_attn else [])
        assert torch.equal(module.flash_attn_func(q, k, v, **given), out)
        return out, lse

    answer = run_with_grads(ours, inputs, dout)
    arguments = inputs | meaning
    names = {"q", "k", "v"}
    exact, unfused = reference_with_grads(arguments, dout), unfused_with_grads(arguments, dout)
    for each in (exact, unfused):
        each.grads = {key: grad for key, grad in each.grads.items() if key in names}
    assert_close_to_reference(answer, exact, unfused)


def test_positional_arguments_come_in_each_version_s_order() -> None:
    q, k, v = make_inputs(seqlen_q=6, heads=4).values()
    expected = reference.attention(q, k, v, softmax_scale=0.3, causal=True, window_size=(3, 0), softcap=1.5, alibi_slopes=SLOPES)[0]
    ours = flash_attn.flash_attn_func(q, k, v, 0.0, 0.3, True, (3, 0), 1.5, SLOPES, False, False)
    torch.testing.assert_close(ours, expected.float())
    expected = reference.attention(q, k, v, softmax_scale=0.3, causal=True, window_size=(3, 0), softcap=1.5)[0]
    ours = flash_attn_interface.flash_attn_func(q, k, v, 0.3, True, None, None, None, None, (3, 0), 0, 1.5)
    torch.testing.assert_close(ours, expected.float())


def test_packed_tensors_are_read_in_place_and_get_one_gradient() -> None:
    qkv = torch.randn(2, 9, 3, 4, 16, requires_grad=True)
    expected = reference.attention(*qkv.unbind(2), causal=True)[0].float()
    grad = torch.autograd.grad(expected.sum(), qkv)[0]
    for ours in (flash_attn.flash_attn_qkvpacked_func(qkv, causal=True), flash_attn_interface.flash_attn_qkvpacked_func(qkv, causal=True)):
        torch.testing.assert_close(ours, expected)
        torch.testing.assert_close(torch.autograd.grad(ours.sum(), qkv)[0], grad, atol=1e-5, rtol=1e-5)

    q, kv = torch.randn(2, 9, 4, 16), torch.randn(2, 12, 2, 2, 16)
    ours = flash_attn.flash_attn_kvpacked_func(q, kv, window_size=(4, 4), s_aux=SINKS)
    torch.testing.assert_close(ours, reference.attention(q, *kv.unbind(2), window_size=(4, 4), learnable_sink=SINKS)[0].float())

    grouped = torch.randn(2, 9, 4 + 2 + 2, 16)
    ours, lse = flash_attn_interface.flash_attn_qkvpacked_func(grouped, num_heads_q=4, return_attn_probs=True)
    for a, b in zip(flash_attn_interface.flash_attn_qkvpacked_func(grouped, num_heads_q=4, return_softmax=True), (ours, lse), strict=True):
        assert torch.equal(a, b)
    expected, expected_lse = reference.attention(*grouped.split([4, 2, 2], 2))
    torch.testing.assert_close(ours, expected.float())
    torch.testing.assert_close(lse, expected_lse.float())

    for call in (lambda: flash_attn.flash_attn_qkvpacked_func(q), lambda: flash_attn.flash_attn_kvpacked_func(q, q)):
        with pytest.raises(ValueError, match="kv has shape"):
            call()
    with pytest.raises(ValueError, match="num_heads_q"):
        flash_attn_interface.flash_attn_qkvpacked_func(grouped)


def test_dropout_keeps_the_expected_share() -> None:
    q, k = torch.randn(2, 64, 4, 16), torch.randn(2, 64, 4, 16)
    v = torch.eye(64).view(1, 64, 1, 64).expand(2, 64, 4, 64)
    share = flash_attn.flash_attn_func(q, k, v, 0.25).eq(0).double().mean().item()  # v is the identity: the output is P
    assert abs(share - 0.25) < 4 * (0.25 * 0.75 / (2 * 4 * 64 * 64)) ** 0.5


@pytest.mark.parametrize(
    ("module", "arguments", "words"),
    [
        (flash_attn, {"return_attn_probs": True, "dropout_p": 0.1}, "return_attn_probs"),
        (flash_attn, {"sm_margin": 8}, "sm_margin=8"),
        (flash_attn_interface, {"qv": torch.zeros(1)}, "qv"),
        (flash_attn_interface, {"q_descale": torch.ones(1)}, "q_descale"),
        (flash_attn_interface, {"sm_margin": 8}, "sm_margin=8"),
    ],
)
def test_what_cannot_be_honoured_is_refused(module, arguments, words: str) -> None:
    with pytest.raises(UnsupportedAttention, match=words):
        module.flash_attn_func(*make_inputs(seqlen_q=4).values(), **arguments)
    with pytest.raises(ValueError, match="two names"):
        module.flash_attn_func(*make_inputs(seqlen_q=4).values(), s_aux=SINKS, learnable_sink=SINKS + 1)


# The parameters of the public functions of flash-attn 2.8.3 and of its FlashAttention-3, in order, with their defaults.
TRAINING = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, "
    "return_attn_probs=False"
)
DESCALES = "q_descale=None, k_descale=None, v_descale=None"
HOPPER = (
    f"softmax_scale=None, causal=False, qv=None, {DESCALES}, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, "
    "pack_gqa=None, deterministic=False, sm_margin=0"
)
LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
UPSTREAM = {
    flash_attn: {
        "flash_attn_func": f"q, k, v, {TRAINING}",
        "flash_attn_qkvpacked_func": f"qkv, {TRAINING}",
        "flash_attn_kvpacked_func": f"q, kv, {TRAINING}",
        "flash_attn_varlen_func": f"q, k, v, {LENGTHS}, {TRAINING}, block_table=None",
        "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {TRAINING}",
        "flash_attn_varlen_kvpacked_func": f"q, kv, {LENGTHS}, {TRAINING}",
        "flash_attn_with_kvcache": (
            "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, "
            "cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
            "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False"
        ),
    },
    flash_attn_interface: {
        "flash_attn_func": f"q, k, v, {HOPPER}",
        "flash_attn_qkvpacked_func": (
            f"qkv, softmax_scale=None, causal=False, {DESCALES}, window_size=(-1, -1), attention_chunk=0, softcap=0.0, "
            "deterministic=False, num_heads_q=None, sm_margin=0"
        ),
        "flash_attn_varlen_func": f"q, k, v, {LENGTHS}, seqused_q=None, seqused_k=None, {HOPPER}",
        "flash_attn_with_kvcache": (
            "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, "
            "cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, "
            f"{DESCALES}, softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, "
            "rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False"
        ),
        "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None",
        "get_scheduler_metadata": (
            "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, qkv_dtype=torch.bfloat16, "
            "headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None, page_size=None, max_seqlen_k_new=0, "
            "causal=False, window_size=(-1, -1), attention_chunk=0, has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0"
        ),
    },
    bert_padding: {
        "unpad_input": "hidden_states, attention_mask, unused_mask=None",
        "unpad_input_for_concatenated_sequences": "hidden_states, attention_mask_in_length",
        "pad_input": "hidden_states, indices, batch, seqlen",
    },
}
MAY_BE_LEFT_OUT = {"max_seqlen", "max_seqlen_q", "max_seqlen_k"}  # upstream needs them, tilewise does not
NEWER = {"return_attn_probs"}  # the one that later releases of FlashAttention-3 have at the end


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, functions in UPSTREAM.items() for name in functions])
def test_signatures_are_those_upstream(module, name: str) -> None:
    """Names, order and defaults; what is added comes by keyword alone and by name, since libraries ask `inspect.signature` for it."""
    theirs = inspect.signature(eval(f"lambda {UPSTREAM[module][name]}: None")).parameters
    ours = inspect.signature(getattr(module, name)).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for parameter in theirs.values():
        mine = ours[parameter.name]
        assert mine.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        left_out = parameter.name in MAY_BE_LEFT_OUT and mine.default is None
        assert left_out or mine.default == parameter.default, parameter.name
    added = [parameter for parameter in ours.values() if parameter.name not in theirs]
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY or parameter.name in NEWER for parameter in added)
    if name.startswith("flash_attn_") and name != "flash_attn_combine":
        assert {"s_aux", "learnable_sink"} <= {parameter.name for parameter in added}


def test_every_function_upstream_is_compared() -> None:
    for module in (flash_attn, flash_attn_interface):
        assert {name for name in module.__all__ if name != "bert_padding"} == set(UPSTREAM[module])


def test_signatures_show_what_libraries_look_for() -> None:
    """Libraries decide by `inspect.signature` which arguments they may pass, some of them newer than version 2's functions."""
    for module in (flash_attn, flash_attn_interface):
        varlen = inspect.signature(module.flash_attn_varlen_func).parameters
        assert {"softcap", "window_size", "deterministic", "s_aux", "seqused_k", "page_table", "max_seqlen_q", "num_splits"} <= set(varlen)
        cache = inspect.signature(module.flash_attn_with_kvcache).parameters
        assert {"cache_seqlens", "page_table", "softcap", "window_size", "s_aux", "return_softmax_lse", "num_splits"} <= set(cache)


def test_combine_of_parts_equals_the_whole() -> None:
    q, k, v = make_inputs(seqlen_q=5, seqlen_k=12, heads=4).values()
    parts = [flash_attn_interface.flash_attn_func(q, k[:, s], v[:, s], return_attn_probs=True) for s in (slice(0, 4), slice(4, 12))]
    out, lse = flash_attn_interface.flash_attn_combine(
        torch.stack([out for out, _ in parts]), torch.stack([lse.transpose(1, 2) for _, lse in parts]), out_dtype=torch.float64
    )
    expected, expected_lse = reference.attention(q, k, v)
    assert out.dtype == torch.float64
    torch.testing.assert_close(out.float(), expected.float())
    torch.testing.assert_close(lse.transpose(1, 2), expected_lse.float())
    assert flash_attn_interface.get_scheduler_metadata(1, 1, 16, 4, 4, 64, torch.tensor([12])) is None


# ----------------------------------------------------------------------------------------------------------------- the cache


@pytest.mark.parametrize("module", [flash_attn, flash_attn_interface])
@pytest.mark.parametrize("paged", [False, True])
def test_decoding_appends_and_attends(module, paged: bool) -> None:
    lengths = torch.tensor([5, 11], dtype=torch.int32)
    k_cache, v_cache = torch.randn(2, 2, 16, 2, 16).unbind()
    q, k, v = torch.randn(2, 2, 4, 16), torch.randn(2, 2, 2, 16), torch.randn(2, 2, 2, 16)
    table = torch.tensor([[3, 0, 1, 2], [4, 7, 5, 6]], dtype=torch.int32)
    pages = [x.reshape(8, 4, 2, 16)[table.flatten().argsort()].clone() for x in (k_cache, v_cache)]

    filled_k, filled_v = k_cache.clone(), v_cache.clone()
    for b, length in enumerate(lengths.tolist()):
        filled_k[b, length : length + 2], filled_v[b, length : length + 2] = k[b], v[b]
    arguments = dict(causal=True, window_size=(6, 0), softcap=3.0)
    expected, expected_lse = reference.attention(q, filled_k, filled_v, seqused_k=lengths + 2, learnable_sink=SINKS, **arguments)

    caches = pages if paged else [k_cache, v_cache]
    name = "block_table" if module is flash_attn else "page_table"
    tables = {name: table} if paged else {}
    out, lse = module.flash_attn_with_kvcache(
        q, *caches, k, v, cache_seqlens=lengths, **tables, **arguments, s_aux=SINKS, return_softmax_lse=True
    )
    torch.testing.assert_close(out, expected.float(), atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse.float(), atol=2e-6, rtol=1e-5)
    written = caches[0][table].flatten(1, 2) if paged else caches[0]
    assert torch.equal(written, filled_k)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotary_embeddings_turn_new_keys_and_queries(interleaved: bool) -> None:
    angles = torch.arange(16)[:, None] * 0.3 ** torch.arange(4)
    q, k, v = torch.randn(1, 1, 2, 16), torch.randn(1, 1, 2, 16), torch.randn(1, 1, 2, 16)
    k_cache, v_cache = torch.randn(2, 1, 16, 2, 16).unbind()

    def turn(x: torch.Tensor, position: int) -> torch.Tensor:
        x = x.clone()
        first, second = (slice(0, 8, 2), slice(1, 8, 2)) if interleaved else (slice(0, 4), slice(4, 8))
        a, b = x[..., first].clone(), x[..., second].clone()
        cos, sin = angles[position].cos(), angles[position].sin()
        x[..., first], x[..., second] = a * cos - b * sin, a * sin + b * cos
        return x

    keys, values = k_cache[:, :8].clone(), v_cache[:, :8].clone()
    keys[:, 7], values[:, 7] = turn(k[:, 0], 7), v[:, 0]
    expected = reference.attention(turn(q, 7), keys, values, causal=True)[0].float()
    out = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, angles.cos(), angles.sin(), 7, causal=True, rotary_interleaved=interleaved
    )
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(k_cache[:, 7], keys[:, 7])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"k": None, "v": None}, "without k and v"),
        ({"q": torch.zeros(1, 3, 2, 16)}, "3 queries and 2 new keys"),
        ({"causal": False}, "neither causal order nor a window"),
        ({"cache_leftpad": torch.zeros(1, dtype=torch.int32)}, "cache_leftpad"),
    ],
)
def test_rotary_positions_that_would_differ_are_refused(changes, words: str) -> None:
    cos = torch.ones(16, 4)
    arguments = dict(
        q=torch.zeros(1, 2, 2, 16), k_cache=torch.zeros(1, 16, 2, 16), v_cache=torch.zeros(1, 16, 2, 16), k=torch.zeros(1, 2, 2, 16),
        v=torch.zeros(1, 2, 2, 16), rotary_cos=cos, rotary_sin=cos, cache_seqlens=3, causal=True,
    )  # fmt: skip
    with pytest.raises(UnsupportedAttention, match=words):
        flash_attn.flash_attn_with_kvcache(**(arguments | changes))


@pytest.mark.parametrize("names", ["rotary_seqlens", "q_descale", "cu_seqlens_k_new k v", "k v cu_seqlens_q", "rotary_cos cu_seqlens_q",
                                   "cache_leftpad cu_seqlens_q", "cache_batch_idx page_table cu_seqlens_q"])  # fmt: skip
def test_cache_arguments_that_are_refused(names: str) -> None:
    q, cache = torch.zeros(1, 1, 2, 16), torch.zeros(1, 16, 2, 16)
    with pytest.raises(UnsupportedAttention, match=names.partition(" ")[0]):
        flash_attn_interface.flash_attn_with_kvcache(q, cache, cache, **dict.fromkeys(names.split(), torch.zeros(2)))


@pytest.mark.parametrize("paged", [False, True])
def test_packed_queries_over_a_cache(paged: bool) -> None:
    """A prompt, a chunk of one and a decoding token in one call of version 3; the lengths count keys that are in the cache."""
    starts, used = torch.tensor([0, 6, 9, 10], dtype=torch.int32), torch.tensor([6, 11, 14], dtype=torch.int32)
    q, (k_cache, v_cache) = torch.randn(10, 4, 16), torch.randn(2, 3, 16, 2, 16).unbind()
    arguments = dict(causal=True, window_size=(8, 0), softcap=3.0, softmax_scale=0.3)
    rows = torch.tensor([1, 2, 0], dtype=torch.int32)
    if paged:
        caches = [x.reshape(12, 4, 2, 16) for x in (k_cache, v_cache)]
        where = dict(page_table=rows[:, None] * 4 + torch.arange(4, dtype=torch.int32))
    else:
        caches, where = [k_cache, v_cache], dict(cache_batch_idx=rows)
    ours = flash_attn_interface.flash_attn_with_kvcache(
        q, *caches, cache_seqlens=used, cu_seqlens_q=starts, cu_seqlens_k_new=starts, max_seqlen_q=6, s_aux=SINKS, return_softmax_lse=True,
        **where, **arguments,
    )  # fmt: skip
    for b in range(3):
        mine, keys = slice(*starts[b : b + 2].tolist()), (rows[b : b + 1], slice(int(used[b])))
        expected = reference.attention(q[None, mine], k_cache[keys], v_cache[keys], learnable_sink=SINKS, **arguments)
        torch.testing.assert_close(ours[0][mine], expected[0][0].float(), atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(ours[1][:, mine], expected[1][0].float(), atol=2e-6, rtol=1e-5)
    if not paged:  # every row in its own place, all with one length
        ours = flash_attn_interface.flash_attn_with_kvcache(q, *caches, cache_seqlens=7, cu_seqlens_q=starts, causal=True)
        expected = reference.attention(q[None, 6:9], k_cache[1:2, :7], v_cache[1:2, :7], causal=True)[0]
        torch.testing.assert_close(ours[6:9], expected[0].float(), atol=2e-6, rtol=1e-5)


# --------------------------------------------------------------------------------------------------------------- bert_padding


def test_unpadding_and_padding_are_inverse_and_differentiable() -> None:
    mask = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]])
    x = torch.randn(3, 4, 2, 5, requires_grad=True)
    tokens, indices, cu_seqlens, longest, used = bert_padding.unpad_input(x, mask)
    assert torch.equal(tokens, x[mask.bool()]) and longest == 4
    assert cu_seqlens.tolist() == [0, 3, 3, 7] and cu_seqlens.dtype == torch.int32 and used.tolist() == [3, 0, 4]
    padded = bert_padding.pad_input(tokens, indices, 3, 4)
    assert torch.equal(padded, torch.where(mask.bool()[..., None, None], x, 0.0))
    weights = torch.randn_like(x)
    assert torch.equal(torch.autograd.grad((padded * weights).sum(), x)[0], torch.where(mask.bool()[..., None, None], weights, 0.0))

    unused = torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    tokens, _, cu_seqlens, longest, used = bert_padding.unpad_input(x, mask, unused)
    assert tokens.shape[0] == 8 and cu_seqlens.tolist() == [0, 4, 4, 8] and longest == 4 and used.tolist() == [3, 0, 4]


def test_rows_of_several_sequences_are_unpadded_sequence_by_sequence() -> None:
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    x = torch.randn(3, 6, 2)
    tokens, indices, cu_seqlens, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert cu_seqlens.tolist() == [0, 2, 5, 8, 10, 16] and longest == 6
    assert torch.equal(tokens, torch.cat([x[0, :5], x[1, :5], x[2]]))
    assert torch.equal(bert_padding.index_first_axis(x.flatten(0, 1), indices), tokens)


# ------------------------------------------------------------------------------------------------------------------ install


@pytest.fixture
def installed():
    compat.install()
    yield
    compat.uninstall()


def test_code_written_for_flash_attn_runs_unchanged(installed) -> None:
    import flash_attn as package
    from flash_attn import flash_attn_func
    from flash_attn.bert_padding import pad_input, unpad_input
    from flash_attn.flash_attn_interface import flash_attn_func as from_interface
    from flash_attn_interface import flash_attn_func as version_3

    assert flash_attn_func is from_interface is flash_attn.flash_attn_func
    assert version_3 is flash_attn_interface.flash_attn_func
    assert (pad_input, unpad_input) == (bert_padding.pad_input, bert_padding.unpad_input)
    public, _, local = package.__version__.partition("+")
    assert tuple(map(int, public.split("."))) >= (2, 8, 3) and local.startswith("tilewise.")
    assert importlib.util.find_spec("flash_attn") is not None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("flash_attn.layers")
    q, k, v = make_inputs(seqlen_q=5).values()
    torch.testing.assert_close(flash_attn_func(q, k, v, causal=True), reference.attention(q, k, v, causal=True)[0].float())


def test_installing_is_reversible_and_may_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    real, submodule = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.layers")
    monkeypatch.setitem(sys.modules, "flash_attn", real)
    monkeypatch.setitem(sys.modules, "flash_attn.layers", submodule)
    compat.install()
    compat.install()
    assert sys.modules["flash_attn"] is not real and "flash_attn.layers" not in sys.modules
    compat.uninstall()
    compat.uninstall()
    assert sys.modules["flash_attn"] is real and sys.modules["flash_attn.layers"] is submodule
    assert "flash_attn_interface" not in sys.modules and "flash_attn.bert_padding" not in sys.modules
