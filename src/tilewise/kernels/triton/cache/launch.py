"""What the launches of the cache kernels share: the choices of one call, from its shapes alone, and the arguments that follow from them."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ....plan import Target, target_of
from ..configs import architecture, padded, shared_limit
from ..emission import Facts, encoded, facts, forward_text, sizes
from ..launch import LOG2E, WIDEST_WINDOW, as_bytes, contiguous, power_of_two_at_least, raw_scores, rows_aligned, used_strides
from . import configs
from .configs import Config

if TYPE_CHECKING:
    from torch import Tensor

    from ....kvcache.call import CacheOperands, CacheRules

_HERE: AbstractContextManager[Any] = nullcontext()
ANY_ROWS = (1 << 31) - 1


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be that of the tensors."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(device)


@functools.lru_cache(maxsize=64)
def multiprocessors(device: torch.device) -> int:
    """How many there are; a few in the interpreter, so that small tests split their keys."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


class Signature(NamedTuple):
    """All that the choices of a reading call follow from: nothing of it is a value on the device, and a decoding loop repeats it."""

    rules: CacheRules
    device: torch.device
    dtype: torch.dtype
    cache_dtype: torch.dtype
    q: tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides
    k: tuple[tuple[int, ...], tuple[int, ...]]
    v: tuple[tuple[int, ...], tuple[int, ...]]
    mask: tuple[tuple[int, ...], tuple[int, ...]] | None
    table: tuple[tuple[int, ...], tuple[int, ...]] | None
    items: int
    packed: bool
    slopes: int  # rows of each of these tensors, 0: there is none
    k_scales: int
    v_scales: int
    rotary: tuple[int, int]  # positions and columns of the tables
    at_16_bytes: bool  # q and the caches start at a multiple
    same_start: bool  # values start where keys do
    captured: tuple[Facts, ...]  # what the program of the mask reads


def signature(t: CacheOperands, r: CacheRules) -> Signature:
    """The signature of a call."""
    q, k, v = t.q, t.k_cache, t.v_cache
    starts = q.data_ptr(), k.data_ptr(), v.data_ptr()
    return Signature(
        r,
        q.device,
        q.dtype,
        k.dtype,
        laid_out(q),
        laid_out(k),
        laid_out(v),
        None if t.mask is None else laid_out(t.mask),
        None if t.page_table is None else laid_out(t.page_table),
        t.batch,
        t.cu_seqlens_q is not None,
        0 if t.alibi_slopes is None else len(t.alibi_slopes),
        0 if t.k_descale is None else len(t.k_descale),
        0 if t.v_descale is None else len(t.v_descale),
        (0, 0) if t.rotary_cos is None else (t.rotary_cos.shape[0], t.rotary_cos.shape[1]),
        not (starts[0] | starts[1] | starts[2]) & 15,
        starts[1] == starts[2],
        tuple(map(facts, t.captured)),
    )


def laid_out(x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return x.shape, x.stride()


@functools.lru_cache(maxsize=4096)
def planned(s: Signature) -> tuple[CacheLaunch, ...] | None:
    """The launches of a call, None where no tile fits the device. Kept, since choosing takes longer than launching.

    Packed items are as different as one token and a long prompt, and how long each is only the device knows: one launch has those that
    fit a low tile, which decoding wants, a second one the others.
    """
    target, group = target_of(s.device), s.q[0][2] // s.k[0][2]
    if not s.packed:
        rows, r = s.q[0][1] * group, s.rules
        config = config_of(s, rows, target)
        if config is None:
            return None
        programs = -(-rows // config.block_m) * s.k[0][2] * s.items
        # With pages, waiting for a page's number is better hidden by a second program than by more stages.
        if configs.one_each(programs, multiprocessors(s.device)) and not (r.num_splits or r.batch_invariant or s.table is not None):
            config = config_of(s, rows, target, alone=True) or config
        return (CacheLaunch(s, config, 0, ANY_ROWS),)
    low, high = config_of(s, group, target), config_of(s, s.q[0][1] * group, target)
    if low is None or high is None:
        return None
    return CacheLaunch(s, low, 0, low.block_m), CacheLaunch(s, high, low.block_m, ANY_ROWS)


def config_of(s: Signature, rows: int, target: Target, alone: bool = False) -> Config | None:
    """The tiles for so many rows on a device, None where none fit."""
    dim = s.q[0][3]
    main, rest = configs.column_blocks(dim)
    return configs.choose(
        architecture(target),
        shared_limit(target),
        8 * s.dtype.itemsize,
        8 * s.cache_dtype.itemsize,
        max(1, rows),
        main + rest,
        padded(s.v[0][3]),
        values_in_keys(s, main),
        s.table is not None,
        alone,
    )


def values_in_keys(s: Signature, main: int) -> bool:
    """Whether values are the first dims of the keys, in the same memory: then one load of a tile serves both products."""
    dim_v = s.v[0][3]
    return s.same_start and s.v[1] == s.k[1] and dim_v <= main == padded(dim_v)


@functools.lru_cache(maxsize=64)
def dependent(device: torch.device) -> bool:
    """Whether a kernel may be set up while the one before it still runs, and wait inside (programmatic dependent launch)."""
    target = target_of(device)
    return device.type == "cuda" and not target.hip and target.capability >= (9, 0)


def merge_options(device: torch.device) -> dict[str, bool]:
    """What a merge is compiled and launched with behind a kernel that says early that its dependents may start."""
    return {"DEPENDENT": True, "launch_pdl": True} if dependent(device) else {"DEPENDENT": False}


class CacheLaunch:
    """One launch of all reading calls of a signature, and the arguments that follow from it. Of packed items it serves those that have
    more than `least_rows` and at most `most_rows` rows (queries times the heads of a group)."""

    def __init__(self, s: Signature, config: Config, least_rows: int, most_rows: int) -> None:
        r = s.rules
        self.config = config
        _, _, self.heads, dim = s.q[0]
        pages, slots, self.kv_heads, dim_v = s.v[0]
        self.group = self.heads // self.kv_heads
        main, rest = configs.column_blocks(dim)
        bits = 8 * s.dtype.itemsize
        natural = bits == 32 or bool(s.k_scales) or not raw_scores(r.softmax_scale, r.softcap, bool(s.slopes))
        self.unit = 1.0 if natural else r.softmax_scale * LOG2E
        self.unit_exact = power_of_two_at_least(self.unit)
        self.window_left = min(r.window_left, WIDEST_WINDOW) if r.window_left >= 0 else None
        self.window_right = min(r.window_right, WIDEST_WINDOW) if r.window_right >= 0 else None
        step = 16 // min(s.dtype.itemsize, s.cache_dtype.itemsize)
        self.align = step if s.at_16_bytes and all(rows_aligned(*x, step) for x in (s.q, s.k, s.v)) else 1

        self.size_q = s.q[0][1]
        self.capacity = slots * (1 if s.table is None else s.table[0][1])
        search = s.packed and least_rows > 0  # tiles of all items in one line
        rows, total = self.size_q * self.group, s.q[0][0] * s.q[0][1]
        row_tiles = total * self.group // config.block_m + s.items if search else 1 if s.packed else -(-rows // config.block_m)
        self.slots = row_tiles * self.kv_heads * (1 if search else s.items)
        self.rows = config.block_m if s.packed else min(rows, config.block_m)
        self.rows_and_heads = (
            self.kv_heads, self.group, self.size_q, total, s.items, row_tiles, self.slots, self.rows, least_rows, most_rows,
        )  # fmt: skip
        self.least = max(1, configs.LEAST_KEYS // config.block_n)
        part, self.splits = self._splits(r, s.device)

        table_stride = 0 if s.table is None else s.table[1][0] if s.table[1][1] == 1 else s.table[0][1]
        by_item = ((s.slopes, self.heads), (s.k_scales, self.kv_heads), (s.v_scales, self.kv_heads))
        self.strides = (
            *self._strides(s.q), *self._strides(s.k), *self._strides(s.v),
            *((0,) * 4 if s.mask is None else used_strides(*s.mask)), table_stride,
            *(width if rows > 1 else 0 for rows, width in by_item),
        )  # fmt: skip
        self.numbers = (
            pages, s.rotary[0], r.softmax_scale, self.unit, self.unit_exact, r.softcap if r.softcap > 0.0 else None, self.window_left,
            self.window_right,
        )  # fmt: skip
        self.merge_options = merge_options(s.device)
        self.shared_constants = {
            "DV": dim_v,
            "BLOCK_DV": padded(dim_v),
            "BLOCK_M": config.block_m,
            "SEARCH": search,
            "NATURAL": natural,
            "enable_fp_fusion": True,
        }
        self.constants = {
            "D": dim,
            "MAIN": main,
            "REST": rest,
            "BLOCK_N": config.block_n,
            "PART": part,
            "LEAST": self.least,
            "PAGE_SIZE": 0 if s.table is None else slots,
            "ROTARY": 2 * s.rotary[1],
            "INTERLEAVED": r.rotary_interleaved,
            "VALUES_IN_KEYS": values_in_keys(s, main),
            "ALIGN": self.align,
            "MASK_MOD": self._program(s),
            "PRECISION": "tf32" if r.allow_tf32 and bits == 32 else "ieee",
            "DEPENDENT": self.splits > 1 and dependent(s.device),
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            **self.shared_constants,
        }

    def _strides(self, x: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[int | None, ...]:
        """(batch or page, position, head) strides in units of `align` elements, and that of the head dim, None where it is 1."""
        shape, stride = x
        outer = used_strides(shape, stride)[:3]
        return *(n // self.align for n in outer), None if shape[3] == 1 or stride[3] == 1 else stride[3]

    def _program(self, s: Signature) -> str:
        """The mask function as the kernel runs it. Positions go from before the first key, where queries outnumber keys, to the last."""
        if not s.rules.mask_mod:
            return ""
        indices = sizes(s.items, self.heads, max(self.size_q, s.rules.appended), self.capacity, ragged=True)
        return forward_text(s.rules.mask_mod, s.captured, indices)

    def _splits(self, r: CacheRules, device: torch.device) -> tuple[int, int]:
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
        slots = multiprocessors(device) * self.config.per_multiprocessor
        return 0, configs.choose_splits(self.slots, key_tiles, self.least, slots)


def vectors(t: CacheOperands) -> tuple[Tensor | None, ...]:
    """The small tensors of a call, in the order of the kernel's arguments."""
    return (
        contiguous(t.cache_seqlens), table(t.page_table), contiguous(t.cache_batch_idx), contiguous(t.cache_leftpad),
        contiguous(t.cu_seqlens_q), contiguous(t.rotary_cos), contiguous(t.rotary_sin), as_bytes(t.mask), contiguous(t.alibi_slopes),
        contiguous(t.sink), contiguous(t.k_descale), contiguous(t.v_descale),
    )  # fmt: skip


def captured(t: CacheOperands) -> tuple[Any, Any]:
    """The tensors that the program of a mask reads, and their sizes and strides."""
    return (tuple(map(as_bytes, t.captured)), tuple(map(encoded, t.captured))) if t.captured else (None, None)


def table(page_table: Tensor | None) -> Tensor | None:
    """The table with adjacent entries in a row; rows may lie apart, as in a slice of a larger table."""
    return None if page_table is None else page_table if page_table.stride(1) == 1 else page_table.contiguous()
