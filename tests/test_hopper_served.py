"""What the Hopper kernels serve, forward and backward, and the reasons that `explain` gives where they do not.

Nothing runs: an H200 is named, and tensors have no values. The GPU tests skip what the kernels refuse in the words of `REFUSALS`; here
their calls are asked for all the same, so that no other refusal hides there.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

pytest.importorskip("triton")

from tilewise import BlockMask, UnsupportedAttention, explain, masks, plan
from tilewise.explaining import Explanation
from tilewise.kvcache import ops
from tilewise.kvcache.call import CacheOperands, CacheRules
from tilewise.plan import Operands, Request, Rules, Target

from .gpu import test_features, test_hopper_backward, test_pairs
from .gpu.common import REFUSALS, skip_refused

H200 = Target("cuda", (9, 0), "NVIDIA H200")
DIMS = ((8, 8), (16, 16), (40, 40), (64, 64), (96, 96), (128, 128), (136, 136), (192, 128), (192, 192), (256, 256))
BATCH, HEADS, KV_HEADS, QUERIES, KEYS = 2, 4, 2, 384, 512


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def qkv(dims: tuple[int, int], layout: str = "bshd", dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    shapes = {"q": (QUERIES, HEADS, dims[0]), "k": (KEYS, KV_HEADS, dims[0]), "v": (KEYS, KV_HEADS, dims[1])}
    if layout == "bshd":
        tensors = {name: meta(BATCH, seqlen, heads, dim, dtype=dtype) for name, (seqlen, heads, dim) in shapes.items()}
    else:
        tensors = {name: meta(BATCH, heads, seqlen, dim, dtype=dtype) for name, (seqlen, heads, dim) in shapes.items()}
    return {**tensors, "layout": layout}


def told(arguments: dict[str, Any], pass_: str) -> Explanation:
    return explain(**arguments, pass_=pass_, device="NVIDIA H200")


FEATURES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (100, 30)},
    "causal window": {"causal": True, "window_size": (128, -1)},
    "softcap": {"softcap": 5.0},
    "negative scale": {"softmax_scale": -0.2},
    "alibi": {"alibi_slopes": meta(HEADS, dtype=torch.float32)},
    "alibi per batch": {"alibi_slopes": meta(BATCH, HEADS, dtype=torch.float32)},
    "sink": {"learnable_sink": meta(HEADS, dtype=torch.float32)},
    "lengths": {"seqused_q": meta(BATCH, dtype=torch.int32), "seqused_k": meta(BATCH, dtype=torch.int32)},
    "dropout": {"dropout_p": 0.1, "dropout_seed": 3},
    "LSE": {"return_aux": "lse"},
    "float32 output": {"out_dtype": torch.float32},
    "fixed order": {"deterministic": True},
    "lists": {"mask": BlockMask(masks.Blocks(torch.ones(1, 1, 3, 4, dtype=torch.bool), 128), QUERIES, KEYS, block_size=128).to("meta")},
}
MATRICES: dict[str, dict[str, Any]] = {
    "bias": {"bias": meta(BATCH, 1, QUERIES, KEYS)},
    "bias of keys": {"bias": meta(BATCH, 1, 1, KEYS)},
    "float32 bias": {"bias": meta(1, 1, QUERIES, KEYS, dtype=torch.float32)},
    "mask": {"mask": meta(BATCH, 1, QUERIES, KEYS, dtype=torch.bool)},
    "key padding": {"mask": meta(BATCH, 1, 1, KEYS, dtype=torch.bool)},
}


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_every_feature_is_served(dims: tuple[int, int], layout: str) -> None:
    """Both passes; with bias and mask tensors up to head dim 128, and beyond it the reason names that."""
    for dtype in (torch.bfloat16, torch.float16):
        for name, given in (FEATURES | MATRICES).items():
            for pass_ in ("fwd", "bwd"):
                found = told({"deterministic": False, **qkv(dims, layout, dtype), **given}, pass_)
                if name in MATRICES and max(dims) > 128:
                    assert found.backend == "triton", (name, pass_)
                    assert "with head dims up to 128" in dict(found.declined)["hopper"]
                else:
                    assert (found.backend, found.declined) == ("hopper", ()), (name, pass_)


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_packed_sequences_are_served(dims: tuple[int, int]) -> None:
    offsets = meta(BATCH + 1, dtype=torch.int32)
    q, k, v = (meta(BATCH * KEYS, heads, dim).transpose(0, 1)[None] for heads, dim in zip((HEADS, 2, 2), (*dims[:1], *dims), strict=True))
    t = Operands(q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    for rules in (Rules(0.1), Rules(0.1, window_right=0), Rules(0.1, 100, 30), Rules(0.1, dropout_p=0.2), Rules(0.1, deterministic=True)):
        for request in (Request(), Request(backward=True, needs=frozenset("qkv"))):
            chosen = plan.select(t, rules, request=request, target=H200)
            assert (chosen.backend, chosen.declined) == ("hopper", ())


class OnMeta(TorchFunctionMode):
    """Tensors that a GPU test would make on the GPU have no values instead."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return func(*args, **kwargs | {"device": "meta"}) if kwargs.get("device") == "cuda" else func(*args, **kwargs)


def gpu_calls() -> Iterable[tuple[str, dict[str, Any], bool]]:
    """Calls of the GPU tests that the Hopper kernels must serve, by name, and whether their gradients too."""
    for name, make in test_features.FEATURES.items():
        yield name, {**test_features.qkv(), **make()}, name not in test_features.OF_HEADS
    for name in test_features.WIDE:
        yield name, {**test_features.qkv(head_dim=128, kv_heads=4), **test_features.FEATURES[name](), "deterministic": True}, True
    for dim in test_features.OTHER_DIMS:
        yield f"{dim}", {**test_features.qkv(2, 129, 300, head_dim=dim), "causal": True}, True
    for name, make in test_hopper_backward.WIDEST.items():
        yield name, {**test_features.qkv(head_dim=256), **make()}, True
    for choice in test_pairs.CALLS:
        yield "-".join(choice.values()), test_pairs.built(choice) | {"deterministic": choice["order"] == "fixed"}, True


def test_calls_of_the_gpu_tests_are_served() -> None:
    with OnMeta():
        for name, arguments, gradients in gpu_calls():
            for pass_, backend in (("fwd", "hopper"), ("bwd", "hopper" if gradients else "triton")):
                found = told(arguments, pass_)
                assert found.backend == backend, (name, pass_, found.declined)


def strided(how: str, dim: int = 64) -> Tensor:
    """Queries that TMA cannot address, with memory behind them: whether a start is aligned is a matter of its address."""
    if how == "inner":
        return torch.empty(BATCH, QUERIES, HEADS, 2 * dim, dtype=torch.bfloat16)[..., ::2]
    if how == "rows":
        return torch.empty(BATCH, QUERIES, HEADS, dim + 1, dtype=torch.bfloat16)[..., :dim]
    size = BATCH * QUERIES * HEADS * dim
    return torch.empty(size + 8, dtype=torch.bfloat16)[1 : 1 + size].view(BATCH, QUERIES, HEADS, dim)


def real(dim: int = 64) -> dict[str, Tensor]:
    tensors = {"q": (QUERIES, HEADS), "k": (KEYS, KV_HEADS), "v": (KEYS, KV_HEADS)}
    return {name: torch.empty(BATCH, *shape, dim, dtype=torch.bfloat16) for name, shape in tensors.items()}


DECLINED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "inner stride": (lambda: {**real(), "q": strided("inner")}, "q has an inner stride of 2: TMA needs 1"),
    "row stride": (lambda: {**real(), "q": strided("rows")}, "TMA needs positive multiples of 16 bytes"),
    "an expanded head": (lambda: {**real(), "k": real()["k"][:, :, :1].expand(-1, -1, 2, -1)}, "k has a stride of 0 elements"),
    "unaligned start": (lambda: {**real(), "q": strided("start")}, "q has a first element that is not aligned to 16 bytes"),
    "odd head dim": (lambda: real(33), "q has head dim 33: it needs a multiple of 8 from 8 to 256"),
    "head dim 100": (lambda: real(100), "q has head dim 100: it needs a multiple of 8 from 8 to 256"),
    "head dim 512": (lambda: real(512), "q has head dim 512: it needs a multiple of 8 from 8 to 256"),
    "float32": (lambda: qkv((64, 64), dtype=torch.float32), "it computes in bfloat16 and float16, not torch.float32"),
    "wide heads and a bias": (lambda: {**qkv((192, 128)), **MATRICES["bias"]}, "it reads a bias with head dims up to 128"),
    "wide heads and a mask": (lambda: {**qkv((256, 256)), **MATRICES["mask"]}, "it reads a mask with head dims up to 128"),
}


@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
@pytest.mark.parametrize("name", DECLINED)
def test_explain_names_the_reason(name: str, pass_: str) -> None:
    make, words = DECLINED[name]
    found = told(make(), pass_)
    assert found.backend == ("tiled" if name == "head dim 512" else "triton")
    assert words in dict(found.declined)["hopper"]


def test_the_refusals_that_gpu_tests_skip_are_these() -> None:
    """In today's words, so that none of them is left over."""
    for words in REFUSALS:
        assert any(words in reason for _, reason in DECLINED.values()), words
    with pytest.raises(pytest.skip.Exception):
        skip_refused("hopper", UnsupportedAttention(f"q has an inner stride of 2: {REFUSALS[2]}"))
    for backend, words in (("hopper", "it counts tiles and positions in 32 bits"), ("triton", REFUSALS[2])):
        with pytest.raises(UnsupportedAttention):
            skip_refused(backend, UnsupportedAttention(words))


def test_which_calls_over_a_cache_the_forward_kernel_serves() -> None:
    """Many rows of a contiguous cache; whatever it does not do stays with the decoding kernel."""
    over_cache = importlib.import_module("tilewise.kernels.hopper.over_cache")

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    lengths = meta(2, dtype=torch.int32)
    t, r = CacheOperands(meta(2, 16, 64, 128), meta(2, 4096, 8, 128), meta(2, 4096, 8, 128), cache_seqlens=lengths), CacheRules(0.1)
    assert over_cache.why_not(t, r, H200) is None
    assert over_cache.why_not(t, replace(r, appended=16, window_left=100, window_right=0, softcap=5.0), H200) is None
    assert "bound by memory" in over_cache.why_not(replace(t, q=meta(2, 7, 64, 128)), r, H200)
    # A tile has at most 16 heads: one query of 64 would take four of them, an eighth full, and read the keys four times.
    one_head = {"k_cache": meta(2, 4096, 1, 128), "v_cache": meta(2, 4096, 1, 128)}
    for queries, served in ((1, False), (2, False), (4, True), (16, True)):
        assert (over_cache.why_not(replace(t, q=meta(2, queries, 64, 128), **one_head), r, H200) is None) == served
    for change in ({"page_table": lengths}, {"cache_batch_idx": lengths}, {"cache_leftpad": lengths}, {"rotary_cos": lengths}):
        assert "over a cache" in over_cache.why_not(replace(t, **change), r, H200)
    for change in ({"num_splits": 2}, {"batch_invariant": True}, {"mask_mod": "p >= 0"}):
        assert "parts that are told" in over_cache.why_not(t, replace(r, **change), H200)
    assert "another dtype" in over_cache.why_not(replace(t, k_cache=meta(2, 4096, 8, 128, dtype=torch.float16)), r, H200)
    assert "Hopper GPU" in over_cache.why_not(t, r, Target("cuda", (8, 0)))


def test_one_query_of_many_heads_stays_with_the_decoding_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile of the forward kernel holds 16 heads: four tiles of 16 rows would each read all keys that 64 heads share."""
    monkeypatch.setattr(plan, "target_of", lambda device: H200)

    def served(queries: int, heads: int, kv_heads: int) -> str:
        q, cache = (torch.empty(2, n, h, 128, dtype=torch.bfloat16, device="meta") for n, h in ((queries, heads), (4096, kv_heads)))
        return ops.backend(CacheOperands(q, cache, cache), CacheRules(0.1)).__name__.rpartition(".")[2]

    assert served(1, 64, 1) == served(3, 64, 1) == served(1, 128, 1) == "cache"
    assert served(4, 64, 1) == served(8, 64, 8) == served(64, 8, 8) == "over_cache"
    assert served(7, 64, 8) == "cache"
