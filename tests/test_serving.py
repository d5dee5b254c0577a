"""Real use of a cache: models write exactly the tokens that they write without one, and the page of documentation runs."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tilewise import attention_with_kvcache
from tilewise.demo.model import ByteGPT, eager_attention, rotary_angles

I32 = torch.int32
PAGE = (Path(__file__).parents[1] / "docs" / "kvcache.md").read_text()


def test_the_serving_loop_of_the_documentation(capsys):
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block, "docs/kvcache.md", "exec"), names)
    assert "24" in capsys.readouterr().out  # all pages are free again


class Caches:
    """The keys and values of some layers, contiguous or in pages that are handed out in a shuffled order as sequences grow."""

    def __init__(self, layers: int, batch: int, capacity: int, kv_heads: int, dim: int, page_size: int = 0) -> None:
        self.page_size, self.table = page_size, None
        shape = (batch, capacity)
        if page_size:
            width = -(-capacity // page_size)
            shape = (batch * width, page_size)
            self.free = torch.randperm(batch * width).tolist()
            self.table = torch.full((batch, width), -1, dtype=I32)
        self.k, self.v = (torch.full((layers, *shape, kv_heads, dim), float("nan")) for _ in range(2))
        self.used = torch.zeros(batch, dtype=I32)

    def grow(self, size: int) -> None:
        """Pages for `size` more tokens of every item."""
        if self.table is not None:
            for b, used in enumerate(self.used.tolist()):
                for page in range(-(-used // self.page_size), -(-(used + size) // self.page_size)):
                    self.table[b, page] = self.free.pop()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
        return attention_with_kvcache(
            q, self.k[layer], self.v[layer], k, v, cache_seqlens=self.used, page_table=self.table, causal=True, check_values=True, **options
        )


CACHES = pytest.mark.parametrize("page_size", [0, 1, 16], ids=["contiguous", "pages of 1", "pages of 16"])


def greedy(step: Callable[[Tensor], Tensor], prompt: Tensor, count: int) -> Tensor:
    """The prompt and `count` more tokens; `step` gives the logits that follow the tokens it is given."""
    tokens, new = prompt, prompt
    for _ in range(count):
        new = step(new).argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, new], 1)
    return tokens


@CACHES
@torch.no_grad()
def test_a_byte_level_gpt(page_size):
    torch.manual_seed(3)
    model = ByteGPT(eager_attention, width=32, heads=2, layers=2).eval()
    prompt = torch.randint(256, (2, 9))
    seen = prompt

    def uncached(new: Tensor) -> Tensor:
        nonlocal seen
        seen = new if new is prompt else torch.cat([seen, new], 1)
        return model(seen)[:, -1]

    caches = Caches(2, 2, 40, 2, 16, page_size)
    cos, sin = (x.squeeze(1) for x in rotary_angles(48, 16, prompt.device))

    def cached(new: Tensor) -> Tensor:
        caches.grow(new.shape[1])
        x = model.embed(new)
        for layer, block in enumerate(model.blocks):
            q, k, v = block.qkv(block.attention_norm(x)).unflatten(-1, (3, 2, -1)).unbind(2)
            out = caches.attend(layer, q, k, v, rotary_cos=cos, rotary_sin=sin, rotary_interleaved=False)
            x = x + block.project(out.flatten(2))
            x = x + block.mlp(block.mlp_norm(x))
        caches.used += new.shape[1]
        return model.head(model.norm(x[:, -1]))

    assert torch.equal(greedy(cached, prompt, 20), greedy(uncached, prompt, 20))


def language_model(name: str, implementation: str):
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    if name == "llama":
        config = transformers.LlamaConfig(**sizes)
    else:  # a window in every other layer and a softcap
        config = transformers.Gemma2Config(
            **sizes, head_dim=8, sliding_window=6, attn_logit_softcapping=0.5, query_pre_attn_scalar=2, tie_word_embeddings=False
        )
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    for parameter in model.parameters():  # random weights far enough from zero that logits differ
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@CACHES
@pytest.mark.parametrize("name", ["llama", "gemma2"])
@torch.no_grad()
def test_models_of_transformers(name, page_size):
    """The library computes everything but attention: keys and values arrive turned, and its own cache stays off."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers = pytest.importorskip("transformers")
    model = language_model(name, "eager")
    prompt = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(6))
    seen = prompt

    def uncached(new: Tensor) -> Tensor:
        nonlocal seen
        seen = new if new is prompt else torch.cat([seen, new], 1)
        return model(seen, use_cache=False).logits[:, -1]

    want = greedy(uncached, prompt, 15)
    caches = Caches(2, 2, 32, 2, 8, page_size)

    def attention(module, query, key, value, mask, scaling=None, softcap=None, sliding_window=None, **_):
        window = (-1, -1) if sliding_window is None else (sliding_window - 1, -1)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out = caches.attend(module.layer_idx, q, k, v, softmax_scale=scaling, softcap=softcap or 0.0, window_size=window)
        return out, None

    transformers.AttentionInterface.register("over_a_cache", attention)
    transformers.AttentionMaskInterface.register("over_a_cache", lambda *args, **kwargs: None)
    model = language_model(name, "over_a_cache")

    def cached(new: Tensor) -> Tensor:
        caches.grow(new.shape[1])
        positions = caches.used[:, None] + torch.arange(new.shape[1])
        logits = model(new, position_ids=positions, use_cache=False).logits[:, -1]
        caches.used += new.shape[1]
        return logits

    assert torch.equal(greedy(cached, prompt, 15), want)
    assert len(want[0, 9:].unique()) > 3, "a model that repeats itself tests nothing"


def test_a_shared_prefix_is_stored_once():
    """Three requests whose first two pages are the same; each goes on in pages of its own."""
    k, v, q = torch.randn(3, 11, 2, 16), torch.randn(3, 11, 2, 16), torch.randn(3, 3, 4, 16)
    k[1:, :8], v[1:, :8] = k[0, :8], v[0, :8]
    k_pages, v_pages = torch.full((2, 5, 4, 2, 16), float("nan"))
    for pages, x in ((k_pages, k), (v_pages, v)):
        pages[:2] = x[0, :8].view(2, 4, 2, 16)
    table = torch.tensor([[0, 1, 2], [0, 1, 3], [0, 1, 4]], dtype=I32)
    used = torch.full((3,), 8, dtype=I32)
    out = attention_with_kvcache(
        q, k_pages, v_pages, k[:, 8:], v[:, 8:], cache_seqlens=used, page_table=table, causal=True, check_values=True
    )
    want = attention_with_kvcache(q, k, v, causal=True)
    torch.testing.assert_close(out, want)


def test_requests_join_and_leave():
    """A batch whose members change between steps, each in its own row of the cache: all get what they get alone."""
    k, v, q = torch.randn(4, 12, 2, 16), torch.randn(4, 12, 2, 16), torch.randn(4, 12, 4, 16)
    want = attention_with_kvcache(q, k, v, causal=True)
    k_cache, v_cache = torch.full((2, 4, 12, 2, 16), float("nan"))
    used, got = torch.zeros(4, dtype=I32), torch.full_like(want, float("nan"))
    for running in ([0], [0, 2], [3, 0, 2], [2, 1, 3], [1, 3], [3], [1, 0], [0, 1, 2, 3], [2, 1]):
        rows = torch.tensor(running)
        size = 2 if len(running) == 1 else 1
        places = used[rows, None] + torch.arange(size)
        out = attention_with_kvcache(
            q[rows[:, None], places], k_cache, v_cache, k[rows[:, None], places], v[rows[:, None], places], cache_seqlens=used[rows],
            cache_batch_idx=rows.int(), causal=True, check_values=True,
        )  # fmt: skip
        got[rows[:, None], places] = out
        used[rows] += size
    for row, count in enumerate(used.tolist()):
        assert count >= 4
        torch.testing.assert_close(got[row, :count], want[row, :count])


def test_speculative_tokens_in_a_tree():
    """Five candidates after one prefix: a bool tensor says who descends from whom, and each path gets what it gets as a sequence."""
    parents = [-1, 0, 0, 1, 2]
    k_cache, v_cache = torch.randn(2, 1, 16, 2, 16)
    q, k, v = torch.randn(1, 5, 4, 16), torch.randn(1, 5, 2, 16), torch.randn(1, 5, 2, 16)
    prefix_k, prefix_v = k_cache[:, :7].clone(), v_cache[:, :7].clone()
    visible = torch.zeros(5, 16, dtype=torch.bool)
    visible[:, :7] = True
    paths = []
    for node, parent in enumerate(parents):
        paths.append(([] if parent < 0 else paths[parent]) + [node])
        visible[node, [7 + ancestor for ancestor in paths[node]]] = True
    out = attention_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=7, mask=visible)
    for node, path in enumerate(paths):
        alone = attention_with_kvcache(
            q[:, node : node + 1], torch.cat([prefix_k, k[:, path]], 1), torch.cat([prefix_v, v[:, path]], 1), causal=True
        )
        torch.testing.assert_close(out[:, node : node + 1], alone)
