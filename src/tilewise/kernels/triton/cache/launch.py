"""What the launches of the cache kernels share: the choices of one call, from its shapes alone, and the arguments that follow from them."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from ....plan import Target, target_of
from ..configs import architecture, shared_limit
from ..launch import LOG2E, WIDEST_WINDOW, alignment, as_bytes, broadcast_strides, contiguous, power_of_two_at_least, raw_scores, strides
from . import configs
from .configs import Config

if TYPE_CHECKING:
    from torch import Tensor

    from ....kvcache.call import CacheOperands, CacheRules

_HERE: AbstractContextManager[Any] = nullcontext()


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be that of the tensors."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(device)


@functools.lru_cache(maxsize=64)
def multiprocessors(device: torch.device) -> int:
    """How many there are; a few in the interpreter, so that small tests split their keys."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def config_of(t: CacheOperands, r: CacheRules, target: Target) -> Config | None:
    """The tiles of a call on a device, None where none fit."""
    dim, kv_heads = t.q.shape[3], t.k_cache.shape[2]
    main, rest = configs.column_blocks(dim)
    rows = max(1, r.max_seqlen_q * (t.q.shape[2] // kv_heads))
    bits, cache_bits = 8 * t.q.element_size(), 8 * t.k_cache.element_size()
    block_dv = max(16, 1 << (t.v_cache.shape[3] - 1).bit_length())
    return configs.choose(
        architecture(target),
        shared_limit(target),
        bits,
        cache_bits,
        rows,
        main + rest,
        block_dv,
        values_in_keys(t, main),
        t.page_table is not None,
    )


def values_in_keys(t: CacheOperands, main: int) -> bool:
    """Whether values are the first dims of the keys, in the same memory: then one load of a tile serves both products."""
    k, v = t.k_cache, t.v_cache
    return v.shape[3] <= main == max(16, 1 << (v.shape[3] - 1).bit_length()) and v.data_ptr() == k.data_ptr() and v.stride() == k.stride()


class CacheLaunch:
    """The choices of one reading call. Nothing here depends on a value on the device."""

    def __init__(self, t: CacheOperands, r: CacheRules) -> None:
        self.t = t
        self.heads, self.d = t.q.shape[2:]
        self.kv_heads, self.dv = t.v_cache.shape[2:]
        self.group = self.heads // self.kv_heads
        self.size_q = r.max_seqlen_q
        self.capacity = t.capacity
        self.page_size = 0 if t.page_table is None else t.k_cache.shape[1]
        self.main, self.rest = configs.column_blocks(self.d)
        self.block_dv = max(16, 1 << (self.dv - 1).bit_length())
        self.values_in_keys = values_in_keys(t, self.main)
        config = config_of(t, r, target_of(t.q.device))
        assert config is not None  # `why_not` has asked
        self.config = config

        scaled_by_head = t.k_descale is not None
        bits = 8 * t.q.element_size()
        self.natural = bits == 32 or scaled_by_head or not raw_scores(r.softmax_scale, r.softcap, t.alibi_slopes is not None)
        self.unit = 1.0 if self.natural else r.softmax_scale * LOG2E
        self.unit_exact = power_of_two_at_least(self.unit)
        self.softcap = r.softcap if r.softcap > 0.0 else None
        self.window_left = min(r.window_left, WIDEST_WINDOW) if r.window_left >= 0 else None
        self.window_right = min(r.window_right, WIDEST_WINDOW) if r.window_right >= 0 else None
        self.precision = "tf32" if r.allow_tf32 and bits == 32 else "ieee"
        self.align = alignment(t.q, t.k_cache, t.v_cache)
        self.rotary = 0 if t.rotary_cos is None else 2 * t.rotary_cos.shape[1]
        self.positions = 0 if t.rotary_cos is None else t.rotary_cos.shape[0]

        self.row_tiles = -(-self.size_q * self.group // config.block_m)
        self.programs = t.batch * self.kv_heads * self.row_tiles
        self.least = max(1, configs.LEAST_KEYS // config.block_n)
        self.part, self.splits = self._splits(r)

    def _splits(self, r: CacheRules) -> tuple[int, int]:
        """(tiles of a part, parts): 0 tiles where parts are equal shares of what an item has, however much that is."""
        n, keys = self.config.block_n, self.capacity
        if self.window_left is not None and self.window_right is not None:  # no tile of rows sees more
            keys = min(keys, self.window_left + self.window_right + -(-self.config.block_m // self.group) + n)
        key_tiles = max(1, -(-keys // n))
        if r.num_splits > 0:
            return 0, min(r.num_splits, key_tiles)
        if r.batch_invariant:
            part = max(1, configs.INVARIANT_KEYS // n)
            return part, -(-key_tiles // part) + (keys < self.capacity)  # a window may begin inside a part
        slots = multiprocessors(self.t.q.device) * self.config.per_multiprocessor
        return 0, configs.choose_splits(self.programs, key_tiles, self.least, slots)

    def vectors(self) -> tuple[Tensor | None, ...]:
        """The small tensors of the call, in the order of the kernel's arguments."""
        t = self.t
        return (
            contiguous(t.cache_seqlens), table(t.page_table), contiguous(t.cache_batch_idx), contiguous(t.cache_leftpad),
            contiguous(t.cu_seqlens_q), contiguous(t.rotary_cos), contiguous(t.rotary_sin), as_bytes(t.mask), contiguous(t.alibi_slopes),
            contiguous(t.sink), contiguous(t.k_descale), contiguous(t.v_descale),
        )  # fmt: skip

    def strides(self) -> tuple[int | None, ...]:
        """Strides of q, the caches, the mask, the table and what may have a row an item, in the order of the kernel's arguments."""
        t, align = self.t, self.align
        by_item = (t.alibi_slopes, t.k_descale, t.v_descale)
        return (
            *strides(t.q, align), *strides(t.k_cache, align), *strides(t.v_cache, align), *broadcast_strides(t.mask),
            0 if t.page_table is None else table_stride(t.page_table),
            *(0 if x is None or x.shape[0] == 1 else x.shape[1] for x in by_item),
        )  # fmt: skip


def table(page_table: Tensor | None) -> Tensor | None:
    """The table with adjacent entries in a row; rows may lie apart, as in a slice of a larger table."""
    return None if page_table is None else page_table if page_table.stride(1) == 1 else page_table.contiguous()


def table_stride(page_table: Tensor) -> int:
    return page_table.stride(0) if page_table.stride(1) == 1 else page_table.shape[1]
