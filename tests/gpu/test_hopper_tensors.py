"""Bias and mask tensors that hide keys whose K and V hold anything: O is computed again exactly where it must be, in every kind of call."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewise import attention, repeats
from tilewise.kernels.hopper import launch

from .common import BACKENDS, compare, qkv, randn

pytestmark = pytest.mark.skipif("hopper" not in BACKENDS, reason="needs a Hopper GPU")

NAN, INFINITY = float("nan"), float("inf")
OPTIONS: dict[str, Any] = {"backend": "hopper", "deterministic": False}
QUERIES, KEYS = 200, 264
HIDDEN = slice(5, None, 50)  # of the keys


def seen_pairs(batch: int = 2, heads: int = 1) -> Tensor:
    """With keys that nobody sees and queries that see nothing."""
    seen = torch.rand(batch, heads, QUERIES, KEYS, device="cuda") < 0.7
    seen[..., HIDDEN] = False
    seen[:, :, 7::90] = False
    return seen


def as_bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return randn(*seen.shape, dtype=dtype).masked_fill_(~seen, -INFINITY)


HIDING = {
    "bfloat16 bias": lambda seen: {"bias": as_bias(seen, torch.bfloat16)},
    "float16 bias": lambda seen: {"bias": as_bias(seen, torch.float16)},
    "float32 bias": lambda seen: {"bias": as_bias(seen, torch.float32)},
    "mask": lambda seen: {"mask": seen},
    "bias and mask, causal": lambda seen: {"bias": as_bias(seen, torch.bfloat16), "mask": seen.roll(1, 2), "causal": True},
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """For each call that is worked out, the words in which CTAs say whether they met an O that is not finite."""
    words: list[Tensor] = []
    make = launch.finite_copy

    def copy(*given: Any, found: Tensor | None = None, **options: Any) -> Tensor:
        assert found is not None
        words.append(found)
        return make(*given, found=found, **options)

    monkeypatch.setattr(launch, "finite_copy", copy)
    return words


def anew(**arguments: Any) -> Tensor:
    """The output of a call that is worked out, whatever was recorded before."""
    repeats.forget()
    return attention(**arguments, **OPTIONS)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", HIDING)
def test_what_is_hidden_may_hold_anything(asked: list[Tensor], name: str, dim: int) -> None:
    dtype = torch.float16 if name == "float16 bias" else torch.bfloat16
    inputs, options = qkv(2, QUERIES, KEYS, head_dim=dim, dtype=dtype), HIDING[name](seen_pairs())
    clean = anew(**inputs, **options)
    assert asked[-1].max() == 0, "a call whose O is finite is computed twice"
    for wild, values in (("v", NAN), ("v", INFINITY), ("k", NAN), ("k", INFINITY)):
        poisoned = {**inputs, wild: inputs[wild].clone()}
        poisoned[wild][:, HIDDEN] = values
        assert torch.equal(anew(**poisoned, **options), clean), (wild, values)
        if wild == "v" or name in ("bfloat16 bias", "float16 bias"):  # a float32 bias and a mask select in the first launch already
            assert asked[-1].max() == 1, (wild, values)
    inputs["k"][:, HIDDEN] = inputs["v"][:, HIDDEN] = NAN
    compare({**inputs, **options}, "hopper", gradients=False)


@pytest.mark.parametrize("name", ["bfloat16 bias", "mask"])
def test_what_is_seen_shows(asked: list[Tensor], name: str) -> None:
    """A NaN that queries of one batch item see stays, and does not reach the other item."""
    seen = seen_pairs()
    seen[0, :, 50:, 30], seen[1, :, :, 30] = True, False
    inputs, options = qkv(2, QUERIES, KEYS), HIDING[name](seen)
    clean = anew(**inputs, **options)
    inputs["v"][:, 30] = NAN
    out = anew(**inputs, **options)
    assert asked[-1].max() == 1
    assert out[0, seen[0, 0, :, 30]].isnan().all() and torch.equal(out[1], clean[1])
    assert (out[0, 7] == 0).all(), "a query that sees nothing"


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", ["bfloat16 bias", "float32 bias", "mask"])
def test_heads_that_share_values_and_hide_others(asked: list[Tensor], name: str, dim: int) -> None:
    """A value is NaN for the head that sees it, not for the one beside it that reads the same V and does not."""
    seen = seen_pairs(heads=4)
    seen[:, 0, :, 30], seen[:, 1, :, 30] = True, False
    inputs, options = qkv(2, QUERIES, KEYS, head_dim=dim), HIDING[name](seen)
    clean = anew(**inputs, **options)
    assert asked[-1].max() == 0
    inputs["v"][:, 30, 0] = inputs["v"][:, HIDDEN] = NAN
    out = anew(**inputs, **options)
    assert torch.equal(out[:, :, 1:], clean[:, :, 1:]) and out[:, 8:90, 0].isnan().all()


def test_a_hidden_score_that_dropout_drops(asked: list[Tensor]) -> None:
    """Its probability is NaN, in the denominator also where it is in no product."""
    inputs = qkv(1, 1, KEYS, 1, 1)
    bias = randn(1, 1, 1, KEYS)
    bias[..., 100] = -INFINITY
    poisoned = {**inputs, "k": inputs["k"].clone()}
    poisoned["k"][:, 100] = NAN
    for seed in (1, 2):
        options = dict(bias=bias, dropout_p=0.8, dropout_seed=seed)
        assert torch.equal(anew(**poisoned, **options), anew(**inputs, **options))
        assert [int(words.max()) for words in asked[-2:]] == [1, 0]


def test_one_call_leaves_nothing_to_the_next() -> None:
    """Clean and poisoned calls in turn, also played from recordings: each is right, and the counters of tiles are zero behind them."""
    inputs, options = qkv(2, QUERIES, KEYS), HIDING["bfloat16 bias"](seen_pairs())
    poisoned = {**inputs, "v": inputs["v"].clone()}
    poisoned["v"][:, HIDDEN] = NAN
    clean = anew(**inputs, **options)
    for given in (inputs, inputs, poisoned, inputs, poisoned, poisoned, inputs):
        assert torch.equal(attention(**given, **options, **OPTIONS), clean)
    torch.cuda.synchronize()
    assert launch._counters and all(not words.any() for words in launch._counters.values())


def test_in_a_graph() -> None:
    inputs, options = qkv(2, QUERIES, KEYS), HIDING["bfloat16 bias"](seen_pairs())
    values, clean = inputs["v"].clone(), anew(**inputs, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(**inputs, **options, **OPTIONS)
    for wild in (0.0, NAN, INFINITY, 1.0, NAN):
        inputs["v"].copy_(values)
        inputs["v"][:, HIDDEN] = wild
        out.fill_(NAN)
        graph.replay()
        assert torch.equal(out, clean), wild


def test_threads_on_one_stream() -> None:
    """The launches of two calls may come in any order: what one found must not be lost to the other."""
    inputs, options = qkv(2, QUERIES, KEYS), HIDING["bfloat16 bias"](seen_pairs())
    poisoned = {**inputs, "v": inputs["v"].clone()}
    poisoned["v"][:, HIDDEN] = NAN
    clean = anew(**inputs, **options)

    def wrong(given: dict[str, Tensor]) -> int:
        return sum(not torch.equal(attention(**given, **options, **OPTIONS), clean) for _ in range(30))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(wrong, [inputs, poisoned, inputs, poisoned])) == [0] * 4
