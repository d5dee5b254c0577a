"""Tiny models of many architectures with random weights: tilewise against the library's own eager attention, outputs and gradients."""

from __future__ import annotations

import inspect
import os

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

from tilewise import UnsupportedAttention  # noqa: E402
from tilewise.integrations import transformers as integration  # noqa: E402

DECODER = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    pad_token_id=0, bos_token_id=1, eos_token_id=None,
)  # fmt: skip
DECODERS = {
    "llama": lambda: transformers.LlamaConfig(**DECODER),
    "mistral": lambda: transformers.MistralConfig(**DECODER, sliding_window=4),
    "gemma2": lambda: transformers.Gemma2Config(**DECODER, sliding_window=4, attn_logit_softcapping=0.5, query_pre_attn_scalar=1),
    "gemma3": lambda: transformers.Gemma3TextConfig(**DECODER, sliding_window=4, layer_types=["sliding_attention", "full_attention"]),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **DECODER, sliding_window=4, num_local_experts=2, num_experts_per_tok=1, layer_types=["sliding_attention", "full_attention"]
    ),
}


@pytest.fixture(autouse=True)
def registered() -> None:
    integration.register()


def build(make, implementation: str, dtype: torch.dtype, kind: str) -> torch.nn.Module:
    """The same weights for every call: drawn in float64, wide enough that attention matters, and rounded to the dtype."""
    torch.manual_seed(0)
    config = make()
    config._experts_implementation = "eager"  # torch's grouped product has no float64
    model = getattr(transformers, kind).from_config(config, attn_implementation=implementation).double()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 or "sinks" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.to(torch.float32).to(dtype).eval()


def outputs_and_gradients(make, implementation: str, dtype: torch.dtype, kind: str, field: str, keep, inputs) -> list[torch.Tensor]:
    model = build(make, implementation, dtype, kind)
    result = getattr(model(**{k: x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x for k, x in inputs.items()}), field)
    result = result if keep is None else result[keep]
    result.square().mean().backward()
    return [result.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def agree_with_eager(make, inputs, kind="AutoModelForCausalLM", field="logits", keep=None) -> None:
    """Against eager in float64, tilewise in float32 errs at most 1.5 times as much as eager in float32, plus a rounding of the largest.

    All gradients are one vector: those of key biases are sums that cancel to 0, and their error is that of the terms.
    """
    softmax = torch.nn.functional.softmax
    with pytest.MonkeyPatch.context() as patch:  # eager attention takes its softmax in float32 whatever the model's dtype
        patch.setattr(torch.nn.functional, "softmax", lambda x, dim=-1, dtype=None: softmax(x, dim))
        exact = outputs_and_gradients(make, "eager", torch.float64, kind, field, keep, inputs)
    eager = outputs_and_gradients(make, "eager", torch.float32, kind, field, keep, inputs)
    ours = outputs_and_gradients(make, "tilewise", torch.float32, kind, field, keep, inputs)
    assert [x.shape for x in ours] == [x.shape for x in exact]
    ours, eager, exact = ([x[0], torch.cat([grad.flatten() for grad in x[1:]])] for x in (ours, eager, exact))
    for mine, theirs, want in zip(ours, eager, exact, strict=True):
        size = want.abs().max().item()
        bound = 1.5 * (theirs.double() - want).abs().max().item() + 16 * torch.finfo(torch.float32).eps * size
        assert (mine.double() - want).abs().max().item() <= bound


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(1, 64, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("padding", ["none", "right", "left"])
@pytest.mark.parametrize("name", DECODERS)
def test_decoders(name: str, padding: str) -> None:
    ids = tokens(2, 11)
    mask = torch.ones_like(ids)
    if padding != "none":
        mask[1, -4:] = 0
        mask = mask if padding == "right" else mask.flip(1)
    agree_with_eager(DECODERS[name], dict(input_ids=ids, attention_mask=mask), keep=mask.bool())


@pytest.mark.parametrize("name", [name for name in DECODERS if name != "gpt_oss"])  # its eager path takes such a row for one sequence
def test_packed_sequences_by_restarting_positions(name: str) -> None:
    positions = torch.cat([torch.arange(5), torch.arange(1), torch.arange(6)]).expand(2, -1)
    agree_with_eager(DECODERS[name], dict(input_ids=tokens(2, 12), position_ids=positions, use_cache=False))


def test_packed_sequences_by_their_offsets() -> None:
    """As a flattening collator gives them; eager sees the same sequences through the positions."""
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    offsets = torch.tensor([0, 5, 12], dtype=torch.int32)
    inputs = dict(input_ids=tokens(1, 12), position_ids=positions, use_cache=False)
    model = build(DECODERS["mistral"], "tilewise", torch.float32, "AutoModelForCausalLM")
    lengths = dict(cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=7, max_length_k=7)
    eager = build(DECODERS["mistral"], "eager", torch.float32, "AutoModelForCausalLM")
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs, **lengths).logits, eager(**inputs).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_generation_gives_the_same_tokens(name: str, cache: str) -> None:
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[1, :2] = 0
    written = []
    for implementation in ("eager", "tilewise"):
        model = build(DECODERS[name], implementation, torch.float32, "AutoModelForCausalLM")
        written.append(
            model.generate(
                tokens(2, 6), attention_mask=mask, max_new_tokens=6, do_sample=False, cache_implementation=cache, disable_compile=True
            )
        )
    assert torch.equal(*written)


ENCODER = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)


def test_bert_with_padding() -> None:
    mask = torch.tensor([[1] * 9, [1] * 5 + [0] * 4])
    inputs = dict(input_ids=tokens(2, 9), attention_mask=mask)
    make = lambda: transformers.BertConfig(**ENCODER, vocab_size=64)  # noqa: E731
    agree_with_eager(make, inputs, "AutoModel", "last_hidden_state", mask.bool())


@pytest.mark.parametrize("config", ["SplinterConfig", "MarkupLMConfig", "LayoutLMConfig"])
def test_encoders_whose_layers_do_not_say_that_they_are_not_causal(config: str) -> None:
    """Without padding they get no mask: every token sees every other all the same."""
    make = lambda: getattr(transformers, config)(**ENCODER, vocab_size=64)  # noqa: E731
    agree_with_eager(make, dict(input_ids=tokens(2, 9)), "AutoModel", "last_hidden_state")


def test_vit() -> None:
    make = lambda: transformers.ViTConfig(**ENCODER, image_size=16, patch_size=4)  # noqa: E731
    agree_with_eager(make, dict(pixel_values=torch.randn(2, 3, 16, 16)), "AutoModel", "last_hidden_state")


@pytest.mark.parametrize(
    ("kind", "sizes"), [("MptConfig", dict(d_model=32, n_layers=1, n_heads=4)), ("BloomConfig", dict(hidden_size=32, n_layer=1, n_head=4))]
)
def test_models_that_apply_their_mask_themselves_are_refused(kind: str, sizes: dict[str, int]) -> None:
    """They would take what is visible for numbers to add, or for what is hidden."""
    model = build(lambda: getattr(transformers, kind)(vocab_size=64, **sizes), "tilewise", torch.float32, "AutoModelForCausalLM")
    with pytest.raises(UnsupportedAttention, match="attention interface"):
        model(input_ids=tokens(2, 6), attention_mask=torch.tensor([[1] * 6, [0] * 2 + [1] * 4]))


def test_a_vision_model_that_pools_with_its_mask() -> None:
    """SigLIP 2 repeats the mask over the heads of a module of torch's, and makes numbers of it by `where`."""
    make = lambda: transformers.Siglip2VisionConfig(**ENCODER, patch_size=4, num_patches=16)  # noqa: E731
    patches = torch.tensor([[1] * 16, [1] * 12 + [0] * 4])
    shapes = torch.tensor([[4, 4], [3, 4]])
    inputs = dict(pixel_values=torch.randn(2, 16, 48), pixel_attention_mask=patches, spatial_shapes=shapes)
    agree_with_eager(make, inputs, "AutoModel", "pooler_output")


def t5() -> transformers.T5Config:
    return transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0, pad_token_id=0, eos_token_id=None
    )


def t5_reads() -> dict[str, torch.Tensor]:
    return dict(input_ids=tokens(2, 9), attention_mask=torch.tensor([[1] * 9, [1] * 5 + [0] * 4]))


# older releases compute T5's attention in the model, mask added and all
T5_ASKS = "attention_interface" in inspect.getsource(transformers.models.t5.modeling_t5.T5Attention)


def test_t5_with_its_relative_bias() -> None:
    inputs = t5_reads() | dict(decoder_input_ids=tokens(2, 5))
    if T5_ASKS:
        agree_with_eager(t5, inputs, "AutoModelForSeq2SeqLM")
    else:
        with pytest.raises(UnsupportedAttention, match="attention interface"):
            build(t5, "tilewise", torch.float32, "AutoModelForSeq2SeqLM")(**inputs)


def whisper() -> transformers.WhisperConfig:
    return transformers.WhisperConfig(
        vocab_size=64, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=16, max_target_positions=16, pad_token_id=0,
        bos_token_id=1, eos_token_id=None, decoder_start_token_id=1,
    )  # fmt: skip


def test_whisper() -> None:
    inputs = dict(input_features=torch.randn(2, 8, 32), decoder_input_ids=tokens(2, 6))
    agree_with_eager(whisper, inputs, "AutoModelForSpeechSeq2Seq")


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_generation_of_encoder_and_decoder_gives_the_same_tokens(name: str, cache: str) -> None:
    """The caches of the decoder's own keys and of the encoder's; the logits of every step agree too, since greedy tokens may repeat."""
    if name == "t5" and not T5_ASKS:
        pytest.skip("this release computes T5's attention in the model")
    make, kind, inputs = {
        "t5": (t5, "AutoModelForSeq2SeqLM", t5_reads()),
        "whisper": (whisper, "AutoModelForSpeechSeq2Seq", dict(input_features=torch.randn(2, 8, 32))),
    }[name]
    written = [
        transformers.GenerationMixin.generate(
            build(make, implementation, torch.float32, kind), **inputs, max_new_tokens=7, do_sample=False, cache_implementation=cache,
            disable_compile=True, return_dict_in_generate=True, output_logits=True,
        )
        for implementation in ("eager", "tilewise")
    ]  # fmt: skip
    eager, ours = written
    assert ours.sequences.shape == (2, 8) and torch.equal(ours.sequences, eager.sequences)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(eager.logits), atol=1e-4, rtol=1e-4)


class Texts(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(12) * (index % 3 + 1) + index) % 63 + 1
        real = (torch.arange(12) < 12 - index % 4).long()
        return dict(input_ids=ids, attention_mask=real, labels=torch.where(real.bool(), ids, -100))


def losses_of_a_trainer(implementation: str, folder: str) -> list[float]:
    pytest.importorskip("accelerate")
    model = build(DECODERS["gemma3"], implementation, torch.float32, "AutoModelForCausalLM")
    settings = transformers.TrainingArguments(
        output_dir=folder, max_steps=6, per_device_train_batch_size=4, learning_rate=3e-3, logging_steps=1, report_to=[],
        save_strategy="no", use_cpu=True, disable_tqdm=True, seed=0,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=settings, train_dataset=Texts())
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def losses_of_a_compiled_loop(implementation: str) -> list[float]:
    one_layer = lambda: transformers.MistralConfig(**DECODER | dict(num_hidden_layers=1), sliding_window=4)  # noqa: E731
    model = build(one_layer, implementation, torch.float32, "AutoModelForCausalLM")
    step = torch.compile(model, backend="aot_eager", fullgraph=True) if implementation == "tilewise" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for batch in torch.utils.data.DataLoader(Texts(), batch_size=4):
        loss = step(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_training_runs_follow_eager(tmp_path) -> None:
    """Six steps with the library's Trainer, six in a plain loop of one compiled graph: losses fall, and are those of eager attention."""
    for ours, eager in (
        (losses_of_a_trainer("tilewise", str(tmp_path)), losses_of_a_trainer("eager", str(tmp_path))),
        (losses_of_a_compiled_loop("tilewise"), losses_of_a_compiled_loop("eager")),
    ):
        assert len(ours) == 6 and ours[-1] < ours[0]
        assert ours == pytest.approx(eager, rel=1e-3)
