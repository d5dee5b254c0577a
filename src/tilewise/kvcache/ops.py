"""The two operators behind a call over a cache: one writes, one reads.

``tilewise::cache_append`` mutates the caches and returns nothing; ``tilewise::attention_cached`` returns new tensors and mutates nothing.
So functionalisation (torch.compile, export) finds a mutation of which nobody wants the old value, and leaves it in place: one operator
that did both would have to return the caches, or be given copies of them.
"""

from __future__ import annotations

import functools
import warnings
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .. import plan
from ..late import imported, when_imported
from ..ops import float32_precision_allows_tf32
from .call import AppendOperands, CacheOperands, CacheRules

_library = torch.library.Library("tilewise", "FRAGMENT")
_library.define(
    "cache_append(Tensor(a!) k_cache, Tensor(b!)? v_cache, Tensor k, Tensor? v, Tensor cache_seqlens, Tensor? page_table, "
    "Tensor? cache_batch_idx, Tensor? rotary_cos, Tensor? rotary_sin, bool rotary_interleaved) -> ()",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_library.define(
    "attention_cached(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? cu_seqlens_q, Tensor? cache_seqlens, Tensor? page_table, "
    "Tensor? cache_batch_idx, Tensor? cache_leftpad, Tensor? rotary_cos, Tensor? rotary_sin, Tensor? mask, Tensor? alibi_slopes, "
    "Tensor? sink, Tensor? k_descale, Tensor? v_descale, Tensor[] captured, float softmax_scale, float softcap, SymInt window_left, "
    "SymInt window_right, SymInt appended, bool rotary_interleaved, int num_splits, bool batch_invariant, "
    "str mask_mod, ScalarType? out_dtype) -> (Tensor out, Tensor lse)",
    tags=(torch.Tag.needs_fixed_stride_order,),
)


def attention_cached(
    *,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    page_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    captured: list[Tensor] | None = None,
    softmax_scale: float,
    softcap: float = 0.0,
    window_left: int = -1,
    window_right: int = -1,
    appended: int = 0,
    rotary_interleaved: bool = True,
    num_splits: int = 0,
    batch_invariant: bool = False,
    mask_mod: str = "",
    out_dtype: torch.dtype | None = None,
    direct: bool = False,
) -> tuple[Tensor, Tensor]:
    """The reading operator by keywords: (out, lse). Shapes as in `call.CacheOperands`; packed queries give lse (Hq, total). `direct`
    leaves the dispatcher out."""
    operator = _attention_cached if direct else torch.ops.tilewise.attention_cached
    return operator(
        q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, cache_batch_idx, cache_leftpad, rotary_cos, rotary_sin, mask,
        alibi_slopes, sink, k_descale, v_descale, captured or [], softmax_scale, softcap, window_left, window_right, appended,
        rotary_interleaved, num_splits, batch_invariant, mask_mod, out_dtype,
    )  # fmt: skip


def cache_append(k_cache: Tensor, v_cache: Tensor | None, *rest: Any, direct: bool = False) -> None:
    """The writing operator, with or without the dispatcher, which counts what is written in place as a new version of a tensor."""
    if not direct:
        torch.ops.tilewise.cache_append(k_cache, v_cache, *rest)
        return
    _cache_append(k_cache, v_cache, *rest)


def _allocate(q: Tensor, v_cache: Tensor, cu_seqlens_q: Tensor | None, out_dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    batch, seqlen_q, heads, _ = q.shape
    out = q.new_empty((batch, seqlen_q, heads, v_cache.shape[3]), dtype=out_dtype or q.dtype)
    lse_shape = (batch, heads, seqlen_q) if cu_seqlens_q is None else (heads, seqlen_q)
    return out, q.new_empty(lse_shape, dtype=plan.accumulator_dtype(q.dtype))


def _attention_cached(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cu_seqlens_q: Tensor | None, cache_seqlens: Tensor | None, page_table: Tensor | None,
    cache_batch_idx: Tensor | None, cache_leftpad: Tensor | None, rotary_cos: Tensor | None, rotary_sin: Tensor | None,
    mask: Tensor | None, alibi_slopes: Tensor | None, sink: Tensor | None, k_descale: Tensor | None, v_descale: Tensor | None,
    captured: list[Tensor] | None, softmax_scale: float, softcap: float, window_left: int, window_right: int, appended: int,
    rotary_interleaved: bool, num_splits: int, batch_invariant: bool, mask_mod: str, out_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out, lse = _allocate(q, v_cache, cu_seqlens_q, out_dtype)
    if cu_seqlens_q is not None:  # offsets that decrease or lie outside count as the largest before them, at most the total
        cu_seqlens_q = cu_seqlens_q.clamp(0, q.shape[1]).cummax(0).values
    if alibi_slopes is not None and alibi_slopes.ndim == 1:
        alibi_slopes = alibi_slopes[None]
    t = CacheOperands(
        q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, cache_batch_idx, cache_leftpad, rotary_cos, rotary_sin, mask,
        alibi_slopes, sink, k_descale, v_descale, tuple(captured or ()),  # packages of AOTInductor make None of an empty list
    )  # fmt: skip
    r = CacheRules(
        softmax_scale, softcap, window_left, window_right, appended, rotary_interleaved, num_splits,
        batch_invariant, mask_mod, q.dtype == torch.float32 and float32_precision_allows_tf32(),
    )  # fmt: skip
    if lse.numel():
        backend(t, r).attention(t, r, out, lse)
    return out, lse


def _attention_cached_fake(q: Tensor, k_cache: Tensor, v_cache: Tensor, cu_seqlens_q: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    return _allocate(q, v_cache, cu_seqlens_q, rest[-1])


def _cache_append(
    k_cache: Tensor, v_cache: Tensor | None, k: Tensor, v: Tensor | None, cache_seqlens: Tensor, page_table: Tensor | None,
    cache_batch_idx: Tensor | None, rotary_cos: Tensor | None, rotary_sin: Tensor | None, rotary_interleaved: bool,
) -> None:  # fmt: skip
    t = AppendOperands(k_cache, v_cache, k, v, cache_seqlens, page_table, cache_batch_idx, rotary_cos, rotary_sin, rotary_interleaved)
    if k.numel() or (v is not None and v.numel()):
        append_backend(t).append(t)


def _cache_append_fake(*_: Any) -> None:
    return None


# ------------------------------------------------------------------------------------------------------- which kernels serve


def backend(t: CacheOperands, r: CacheRules) -> Any:
    """The module whose `attention` reads the cache: the Hopper kernel for many queries, the Triton kernels where they can, else torch."""
    target = plan.target_of(t.q.device)
    if target.type == "cuda":
        from ..kernels.triton import cache

        if not target.hip and target.capability == (9, 0):
            for_many_queries = imported("tilewise.kernels.hopper.over_cache")
            if for_many_queries.why_not(t, r, target) is None:
                return for_many_queries
        reason = cache.why_not(t, r, target)
        if reason is None:
            return cache
        _warn_once(reason)
    from ..kernels import tiled_cache

    return tiled_cache


def append_backend(t: AppendOperands) -> Any:
    """The module whose `append` writes the cache."""
    target = plan.target_of(t.k.device)
    if target.type == "cuda":
        from ..kernels.triton import cache

        if cache.why_not_append(t, target) is None:
            return cache
    from ..kernels import tiled_cache

    return tiled_cache


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(
        f"tilewise serves this call over a cache with plain PyTorch tile by tile, which is exact but slow: {reason}.", stacklevel=2
    )


_library.impl("attention_cached", _attention_cached, "CompositeExplicitAutograd")
_library.impl("cache_append", _cache_append, "CompositeExplicitAutograd")
torch.library.register_fake("tilewise::attention_cached", _attention_cached_fake, lib=_library)
torch.library.register_fake("tilewise::cache_append", _cache_append_fake, lib=_library)


def _cached_flops(
    q: Any, k_cache: Any, v_cache: Any, cu_seqlens_q: Any, cache_seqlens: Any, page_table: Any, *rest: Any, out_shape: Any = None, **_: Any
) -> int:
    """Operations over the visible pairs of caches that are full. Lengths are values on the device, which a counter of sizes does not read;
    a shorter item computes less, because queries stand at its end. Packed queries: also no more than every row seeing all that one may.
    """
    from ..cost import attention_flops

    left, right = rest[12:14]
    capacity = k_cache[1] * (1 if page_table is None else page_table[1])
    shape = dict(heads=q[2], kv_heads=k_cache[2], seqlen_q=q[1], head_dim=q[3], head_dim_v=v_cache[3])
    batch = q[0] if cu_seqlens_q is None else cu_seqlens_q[0] - 1
    full = attention_flops("fwd", batch=batch, seqlen_k=capacity, window_left=left, window_right=right, **shape)
    if cu_seqlens_q is None:
        return full
    seen = capacity if left < 0 or right < 0 else min(capacity, left + right + 1)
    return min(full, attention_flops("fwd", batch=1, seqlen_k=seen, **shape))


def _register_flops(counter: ModuleType) -> None:
    counter.register_flop_formula(torch.ops.tilewise.attention_cached)(_cached_flops)


when_imported("torch.utils.flop_counter", _register_flops)
