"""The checks of a call over a cache, each in one sentence: the argument, what was given, what is allowed, what to do."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from .. import plan
from ..checks import typed
from ..errors import UnsupportedAttention

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FLOAT8 = (torch.float8_e4m3fn,)


class CacheSizes(NamedTuple):
    """The sizes of one call; `capacity` is how many keys an item can have."""

    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    appended: int
    capacity: int
    rows: int
    page_size: int
    head_dim: int
    head_dim_v: int
    device: torch.device


def check_tensors(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    page_table: Tensor | None,
    batch_idx: Tensor | None,
    items: int | None = None,
) -> CacheSizes:
    """Ranks, dtypes, devices and shapes of everything but the vectors. `items` is how many share packed queries (1, total, Hq, D)."""
    shapes = {
        "q": (q, "(B, Sq, Hq, D)"),
        "k_cache": (k_cache, "(B, capacity, Hk, D), or (pages, page_size, Hk, D) with a page_table"),
        "v_cache": (v_cache, "(B, capacity, Hk, Dv), or (pages, page_size, Hk, Dv) with a page_table"),
    }
    shapes |= {name: (x, f"(B, S, Hk, {dim})") for name, x, dim in (("k", k, "D"), ("v", v, "Dv")) if x is not None}
    for name, (x, shape) in shapes.items():
        typed(name, x, Tensor)
        if x.ndim != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must have rank 4, {shape}")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} but q is on {q.device}; move it with .to(q.device)")
    if q.dtype not in _DTYPES:
        raise TypeError(f"q has dtype {q.dtype}; it must be float16, bfloat16, float32 or float64")
    if k_cache.dtype != v_cache.dtype or k_cache.dtype not in (q.dtype, *FLOAT8):
        raise TypeError(
            f"k_cache and v_cache have dtypes {k_cache.dtype} and {v_cache.dtype}; both must be that of q, {q.dtype}, or float8_e4m3fn. "
            "a cache is never converted: allocate it in the dtype of the queries"
        )
    batch, seqlen_q, heads, head_dim = q.shape
    batch = batch if items is None else items
    rows, page_size, kv_heads, _ = k_cache.shape
    head_dim_v = v_cache.shape[3]
    if v_cache.shape[:3] != k_cache.shape[:3]:
        raise ValueError(
            f"k_cache has shape {tuple(k_cache.shape)} but v_cache has {tuple(v_cache.shape)}; only their last dimensions may differ"
        )
    if k_cache.shape[3] != head_dim:
        raise ValueError(f"q has head dim {head_dim} but k_cache has {k_cache.shape[3]}; they must agree (only v_cache may differ)")
    if (kv_heads == 0 and heads != 0) or (kv_heads and heads % kv_heads):
        raise ValueError(
            f"q has {heads} heads, which is no multiple of the {kv_heads} heads of the caches; in grouped-query attention each kv head "
            "serves the same number of query heads"
        )
    capacity = page_size
    if page_table is not None:
        typed("page_table", page_table, Tensor)
        if page_table.dtype != torch.int32 or page_table.ndim != 2 or page_table.shape[0] != batch:
            raise ValueError(
                f"page_table is {page_table.dtype} of shape {tuple(page_table.shape)}; it must be int32, (B, n) with B = {batch}: for each "
                "item the pages that hold its keys, in order"
            )
        if page_table.device != q.device:
            raise ValueError(f"page_table is on {page_table.device} but q is on {q.device}; move it with .to(q.device)")
        if page_size == 0:
            raise ValueError(f"k_cache has shape {tuple(k_cache.shape)}: pages of no keys; the page size must be at least 1")
        if batch_idx is not None:
            raise UnsupportedAttention("cache_batch_idx was given with a page_table; index the table instead: page_table[cache_batch_idx]")
        capacity = page_size * page_table.shape[1]
    elif batch_idx is None and rows != batch:
        raise ValueError(
            f"q has {batch} batch items but the caches have {rows} rows; they must agree, or cache_batch_idx must name the row of each item"
        )
    appended = 0
    if v is not None and k is None:
        raise ValueError("v was given without k; new keys and values are appended together")
    if k is not None:
        if k_cache.dtype in FLOAT8:
            raise UnsupportedAttention(
                f"k was given for a cache of {k_cache.dtype}; float8 caches are read, not written: quantise new keys yourself and pass no k"
            )
        appended = k.shape[1]
        for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
            if 0 not in x.shape and any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True)):
                raise ValueError(
                    f"{name} of shape {tuple(x.shape)} is expanded (strides {x.stride()}), so that what is written for one place lies in "
                    "others too; append to a cache that has memory of its own, or let items share keys by a page_table"
                )
        _check_new("k", k, (batch, appended, kv_heads, head_dim), q.dtype)
        if v is not None:
            _check_new("v", v, (batch, appended, kv_heads, head_dim_v), q.dtype)
        elif not torch.compiler.is_compiling() and not _values_in_keys(k_cache, v_cache):
            raise ValueError(
                "k was given without v; that is for a v_cache that is a view of k_cache (k_cache[..., :Dv]), which this is not"
            )
    return CacheSizes(batch, heads, kv_heads, seqlen_q, appended, capacity, rows, page_size, head_dim, head_dim_v, q.device)


def _check_new(name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if x.dtype != dtype:
        raise TypeError(f"{name} has dtype {x.dtype} but q and the caches have {dtype}; cast it")
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; with these q, k and caches it must be {shape}")


def _values_in_keys(k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether v_cache is k_cache[..., :Dv] in the same memory."""
    return v_cache.shape[3] <= k_cache.shape[3] and v_cache.data_ptr() == k_cache.data_ptr() and v_cache.stride() == k_cache.stride()


def vector(name: str, x: Any, sizes: CacheSizes, meaning: str) -> Tensor | None:
    """An int32 (B,) tensor on the device of q, or None."""
    if x is None:
        return None
    typed(name, x, Tensor)
    if x.dtype != torch.int32:
        raise TypeError(f"{name} has dtype {x.dtype}; it must be int32: use {name}.to(torch.int32)")
    if tuple(x.shape) != (sizes.batch,):
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be (B,) = ({sizes.batch},), {meaning}")
    if x.device != sizes.device:
        raise ValueError(f"{name} is on {x.device} but q is on {sizes.device}; move it with .to(q.device)")
    return x


def rotary(cos: Tensor | None, sin: Tensor | None, interleaved: bool, sizes: CacheSizes) -> tuple[Tensor | None, Tensor | None]:
    typed("rotary_interleaved", interleaved, bool)
    if cos is None and sin is None:
        return None, None
    if cos is None or sin is None:
        raise ValueError("rotary_cos and rotary_sin belong together; give both or neither")
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        typed(name, x, Tensor)
        if not x.is_floating_point() or x.ndim != 2 or x.shape != cos.shape or x.dtype != cos.dtype:
            raise ValueError(
                f"{name} is {x.dtype} of shape {tuple(x.shape)}; both tables must be floating, of one dtype and shape (positions, R / 2)"
            )
        if x.device != sizes.device:
            raise ValueError(f"{name} is on {x.device} but q is on {sizes.device}; move it with .to(q.device)")
    if not 0 < 2 * cos.shape[1] <= sizes.head_dim:
        raise ValueError(f"rotary_cos has {cos.shape[1]} columns for R = {2 * cos.shape[1]} rotary dims; R must be in 2..{sizes.head_dim}")
    if cos.shape[0] < sizes.capacity:
        raise ValueError(
            f"rotary_cos has {cos.shape[0]} positions but the cache has room for {sizes.capacity} keys; the tables must cover all of them"
        )
    return cos, sin


def descale(name: str, x: Tensor | None, k_cache: Tensor, sizes: CacheSizes) -> Tensor | None:
    """A scale for each kv head, (Hk,) or (B, Hk), as (1 or B, Hk)."""
    if x is None:
        return None
    typed(name, x, Tensor)
    if k_cache.dtype not in FLOAT8:
        raise UnsupportedAttention(f"{name} was given for a cache of {k_cache.dtype}; scales belong to caches in float8_e4m3fn")
    allowed = [(sizes.kv_heads,), (sizes.batch, sizes.kv_heads)]
    if x.dtype != torch.float32 or tuple(x.shape) not in allowed or x.device != sizes.device:
        raise ValueError(
            f"{name} is {x.dtype} of shape {tuple(x.shape)} on {x.device}; it must be float32, (Hk,) or (B, Hk) = "
            f"{' or '.join(map(str, allowed))}, on {sizes.device}"
        )
    return x[None] if x.ndim == 1 else x


def refuse_gradients(**tensors: Any) -> None:
    """A cache call has no derivative and writes where it is told: an input that wants one, or is mapped, would get silence."""
    mapped = torch._C._are_functorch_transforms_active()
    if (mapped or forward_ad._current_level >= 0) and not torch.compiler.is_compiling():
        for name, x in tensors.items():
            if not isinstance(x, Tensor):
                continue
            if mapped and torch._C._functorch.is_batchedtensor(x):
                raise UnsupportedAttention(
                    f"{name} is mapped by torch.vmap, and attention_with_kvcache cannot be: give what is mapped as batch items, or loop"
                )
            if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
                raise UnsupportedAttention(
                    f"{name} carries a tangent, and attention_with_kvcache is for inference: detach {name}, or use tilewise.attention"
                )
    if not torch.is_grad_enabled():
        return
    for name, x in tensors.items():
        if isinstance(x, Tensor) and x.requires_grad:
            raise UnsupportedAttention(
                f"{name} requires grad, and attention_with_kvcache is for inference: call it inside torch.no_grad(), detach {name}, or "
                "train with tilewise.attention"
            )


def check_out_dtype(out_dtype: torch.dtype | None, dtype: torch.dtype) -> None:
    if out_dtype not in (None, dtype, plan.accumulator_dtype(dtype)):
        raise ValueError(f"out_dtype is {out_dtype}; for inputs of {dtype} it must be None, {dtype} or {plan.accumulator_dtype(dtype)}")


def check_values_on_device(
    seqlens: Tensor | None, page_table: Tensor | None, batch_idx: Tensor | None, leftpad: Tensor | None, sizes: CacheSizes
) -> None:
    """Reads lengths, rows and pages on the host: a synchronisation, asked for by check_values=True."""
    lengths = [sizes.capacity - sizes.appended] * sizes.batch if seqlens is None else seqlens.tolist()
    for b, length in enumerate(lengths):
        if not 0 <= length <= sizes.capacity - sizes.appended:
            raise ValueError(
                f"cache_seqlens[{b}] is {length}; with {sizes.appended} new keys and room for {sizes.capacity} it must be between 0 and "
                f"{sizes.capacity - sizes.appended}"
            )
    for b, padding in enumerate([] if leftpad is None else leftpad.tolist()):
        if not 0 <= padding <= lengths[b] + sizes.appended:
            raise ValueError(f"cache_leftpad[{b}] is {padding}; that item has {lengths[b] + sizes.appended} keys, padding included")
    rows = list(range(sizes.batch)) if batch_idx is None else batch_idx.tolist()
    for b, row in enumerate(rows if page_table is None else []):
        if not 0 <= row < sizes.rows:
            raise ValueError(f"cache_batch_idx[{b}] is {row}; the caches have rows 0 to {sizes.rows - 1}")
    table = [] if page_table is None else page_table.tolist()
    for b, pages in enumerate(table):
        for n, page in enumerate(pages[: -(-(lengths[b] + sizes.appended) // sizes.page_size)]):
            if not 0 <= page < sizes.rows:
                raise ValueError(f"page_table[{b}, {n}] is {page}; the caches have pages 0 to {sizes.rows - 1}")
    written: dict[tuple[int, int], int] = {}
    for b, length in enumerate(lengths):
        for position in range(length, length + sizes.appended):
            place = (table[b][position // sizes.page_size], position % sizes.page_size) if table else (rows[b], position)
            if written.setdefault(place, b) != b:
                raise ValueError(
                    f"items {written[place]} and {b} both append to slot {place[1]} of {'page' if table else 'row'} {place[0]}; "
                    "a page that items share must be full, or be copied for one of them"
                )
