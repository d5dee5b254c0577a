"""Packed sequences: which tile of which sequence each program computes, decided on the device from the offsets.

A head has room for ``total // BLOCK + sequences + 2`` tiles, whatever the lengths: each sequence, and the rows before the first and after
the last, ends in at most one partial tile. That many programs are launched, `schedule` writes a record for each, and those that are left
over, fewer than there are sequences, return at once. Nothing depends on the longest sequence, so that none among many short ones launches
idle programs; the sequences whose tiles walk the furthest come first, so that what runs last is short.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from .configs import CHUNK
from .launch import RUNTIME, Launch, run
from .tiles import packed_tile

if TYPE_CHECKING:
    from torch import Tensor

RECORD = 8  # numbers of a tile, see `tiles.packed_tile`
BLOCK = 128  # rows of a tile of `sum_rows`
ANY = (1 << 31) - 1


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def boundaries(cu_seqlens_ptr, seqused_ptr, s, sequences, total, most, passed):
    """First row, rows and real rows of sequences `s`, and the furthest offset so far. Offsets that decrease count as the furthest one
    before them, `passed` included, and none leaves [0, total]: no row belongs to two sequences, whatever the offsets hold."""
    inside = s < sequences
    start = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + s, mask=inside, other=0), 0), total)
    stop = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + s + 1, mask=inside, other=0), 0), total)
    start = tl.maximum(tl.associative_scan(start, 0, larger), passed)
    stop = tl.maximum(start, stop)
    rows = stop - start
    used = tl.minimum(rows, most)
    if seqused_ptr is not None:
        used = tl.minimum(used, tl.maximum(tl.load(seqused_ptr + s, mask=inside, other=0), 0))
    return start, rows, used, tl.max(stop, 0)


@triton.jit(do_not_specialize=RUNTIME)
def schedule(
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_q_ptr, seqused_k_ptr, tiles_ptr, sequences_ptr,
    sequences, size_q, size_k, most_q, most_k, slots,
    OVER_KEYS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the records of CHUNK sequences' tiles, and of the sequences themselves; the first program also those that belong to none, and
    behind them all how many tiles there are.

    A sequence's tiles start where those of all that come before it end: of sequences with more keys for a tile of queries to walk (or more
    queries for one of keys), and of equal ones with a lower number. One pass over all sequences finds that, without sorting them.
    """
    mine = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    passed_q, passed_k = 0, 0
    for s0 in range(0, tl.program_id(0) * CHUNK, CHUNK):
        s = s0 + tl.arange(0, CHUNK)
        _start, _rows, _used, passed_q = boundaries(cu_seqlens_q_ptr, None, s, sequences, size_q, most_q, passed_q)
        _start, _rows, _used, passed_k = boundaries(cu_seqlens_k_ptr, None, s, sequences, size_k, most_k, passed_k)
    first_q, rows_q, len_q, _stop_q = boundaries(cu_seqlens_q_ptr, seqused_q_ptr, mine, sequences, size_q, most_q, passed_q)
    first_k, rows_k, len_k, _stop_k = boundaries(cu_seqlens_k_ptr, seqused_k_ptr, mine, sequences, size_k, most_k, passed_k)
    tiles = tl.cdiv(rows_k if OVER_KEYS else rows_q, BLOCK)
    walk = len_q if OVER_KEYS else len_k

    earlier = tl.zeros([CHUNK], tl.int32)
    total, passed_q, passed_k = 0, 0, 0
    for s0 in range(0, sequences, CHUNK):
        s = s0 + tl.arange(0, CHUNK)
        _start, other_rows_q, other_len_q, passed_q = boundaries(cu_seqlens_q_ptr, seqused_q_ptr, s, sequences, size_q, most_q, passed_q)
        _start, other_rows_k, other_len_k, passed_k = boundaries(cu_seqlens_k_ptr, seqused_k_ptr, s, sequences, size_k, most_k, passed_k)
        other_tiles = tl.cdiv(other_rows_k if OVER_KEYS else other_rows_q, BLOCK)
        other_walk = other_len_q if OVER_KEYS else other_len_k
        same = (other_walk[None, :] == walk[:, None]) & (s[None, :] < mine[:, None])
        before = (other_walk[None, :] > walk[:, None]) | same  # [mine, others]
        earlier += tl.sum(tl.where(before, other_tiles[None, :], 0), 1)
        total += tl.sum(other_tiles, 0)

    for t0 in range(0, tl.max(tiles, 0), 16):
        t = t0 + tl.arange(0, 16)[None, :]
        # The last tiles of queries walk the furthest under a causal mask, the first of keys.
        row0 = (t if OVER_KEYS else tiles[:, None] - 1 - t) * BLOCK
        slot = earlier[:, None] + t
        inside = (t < tiles[:, None]) & (slot < slots)
        record = (mine[:, None], row0, first_q[:, None], rows_q[:, None], len_q[:, None], first_k[:, None], rows_k[:, None], len_k[:, None])
        write_records(tiles_ptr + slot * 8, record, inside)
    if sequences_ptr is not None:
        write_records(sequences_ptr + mine * 8, (mine, mine * 0, first_q, rows_q, len_q, first_k, rows_k, len_k), mine < sequences)

    if tl.program_id(0) == 0:
        # Rows of no sequence, as tiles of one without a real row, so that they are written all the same.
        size = size_k if OVER_KEYS else size_q
        passed = passed_k if OVER_KEYS else passed_q
        head = tl.minimum(tl.maximum(tl.load(cu_seqlens_k_ptr if OVER_KEYS else cu_seqlens_q_ptr), 0), size)
        head_tiles, tail_tiles = tl.cdiv(head, BLOCK), tl.cdiv(size - passed, BLOCK)
        tl.store(tiles_ptr + slots * 8, total + head_tiles + tail_tiles)
        for slot0 in range(total, slots, CHUNK):
            slot = slot0 + tl.arange(0, CHUNK)
            t = slot - total
            in_head = t < head_tiles
            b = tl.where(t < head_tiles + tail_tiles, 0, -1)
            row0 = tl.where(in_head, t, t - head_tiles) * BLOCK
            first, rows = tl.where(in_head, 0, passed), tl.where(in_head, head, size - passed)
            zero = slot * 0
            if OVER_KEYS:
                write_records(tiles_ptr + slot * 8, (b, row0, zero, zero, zero, first, rows, zero), slot < slots)
            else:
                write_records(tiles_ptr + slot * 8, (b, row0, first, rows, zero, zero, zero, zero), slot < slots)


@triton.jit
def write_records(record_ptr, record, inside):
    for field in tl.static_range(8):
        tl.store(record_ptr + field, record[field], mask=inside)


@triton.jit(do_not_specialize=RUNTIME)
def sum_rows(
    partial_ptr, sequences_ptr, result_ptr, heads, size, total, shared, KEYS: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr
):
    """Sum a packed row of numbers (H, total) over its sequences, always in the same order.

    KEEP: result (groups, H, size) sums place i of `shared` neighbouring sequences, for every i. Else result (sequences, H) sums all places
    of each sequence.
    """
    if KEEP:
        tiles = tl.cdiv(size, BLOCK)
        tile, rest = tl.program_id(0) % tiles, tl.program_id(0) // tiles
        h, b = rest % heads, rest // heads
        offs = tile * BLOCK + tl.arange(0, BLOCK)
        acc = tl.zeros([BLOCK], tl.float32)
        for i in range(b * shared, (b + 1) * shared):
            _b, _row0, first_q, _rows_q, len_q, first_k, _rows_k, len_k = packed_tile(sequences_ptr + i * 8)
            row = partial_ptr + h.to(tl.int64) * total + (first_k if KEYS else first_q)
            acc += tl.load(row + offs, mask=offs < (len_k if KEYS else len_q), other=0.0)
        tl.store(result_ptr + rest.to(tl.int64) * size + offs, acc, mask=offs < size)
    else:
        h, b = tl.program_id(0) % heads, tl.program_id(0) // heads
        _b, _row0, first_q, _rows_q, len_q, first_k, _rows_k, len_k = packed_tile(sequences_ptr + b * 8)
        row = partial_ptr + h.to(tl.int64) * total + (first_k if KEYS else first_q)
        acc = tl.zeros([BLOCK], tl.float32)
        for start in range(0, len_k if KEYS else len_q, BLOCK):
            offs = start + tl.arange(0, BLOCK)
            acc += tl.load(row + offs, mask=offs < (len_k if KEYS else len_q), other=0.0)
        tl.store(result_ptr + tl.program_id(0), tl.sum(acc, 0))


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of a head, over all batch items: how many, and where packed ones are described."""

    count: int
    records: Tensor | None = None  # int32 (count + 1, RECORD), behind them how many are tiles

    def arguments(self) -> dict[str, Any]:
        return {"tiles_ptr": self.records, "slots": None if self.records is None else self.count}


def query_tile_count(call: Launch, block: int) -> int:
    """How many tiles of `block` queries a head has room for, over all batch items."""
    return triton.cdiv(call.size_q, block) * call.batch if call.sequences is None else slots_of(call.size_q, block, call.sequences)


def slots_of(size: int, block: int, sequences: int) -> int:
    return size // block + sequences + 2


def query_tiles(call: Launch, block: int, per_item: int | None = None) -> Tiles:
    """Tiles of `block` queries; a batch item has `per_item` of them, by default as many as hold its queries."""
    if call.sequences is None:
        return Tiles((triton.cdiv(call.size_q, block) if per_item is None else per_item) * call.batch)
    return scheduled(call, block, over_keys=False)[0]


def key_tiles(call: Launch, block: int) -> Tiles:
    """Tiles of `block` keys."""
    if call.sequences is None:
        return Tiles(triton.cdiv(call.size_k, block) * call.batch)
    return scheduled(call, block, over_keys=True)[0]


def sequence_records(call: Launch) -> Tensor | None:
    """int32 (sequences, RECORD): where each sequence lies; None unless sequences are packed."""
    return None if call.sequences is None else scheduled(call, ROWS_OF_A_SEQUENCE, over_keys=False, with_sequences=True)[1]


ROWS_OF_A_SEQUENCE = 1 << 30  # a tile that holds any sequence


def scheduled(call: Launch, block: int, over_keys: bool, with_sequences: bool = False) -> tuple[Tiles, Tensor | None]:
    """Launch `schedule` for tiles of `block` rows."""
    t, sequences = call.t, call.sequences
    assert t.cu_seqlens_q is not None and t.cu_seqlens_k is not None and sequences is not None
    slots = slots_of(call.size_k if over_keys else call.size_q, block, sequences)
    records = t.cu_seqlens_q.new_empty(slots + 1, RECORD)
    of_sequences = t.cu_seqlens_q.new_empty(sequences, RECORD) if with_sequences else None
    matrices = [x for x in (t.bias, t.mask) if x is not None]
    most_q, most_k = (min([x.shape[dim] for x in matrices if x.shape[dim] > 1], default=ANY) for dim in (2, 3))
    run(
        schedule, triton.cdiv(sequences, CHUNK), t.cu_seqlens_q.contiguous(), t.cu_seqlens_k.contiguous(),
        None if t.seqused_q is None else t.seqused_q.contiguous(), None if t.seqused_k is None else t.seqused_k.contiguous(),
        records, of_sequences, sequences, call.size_q, call.size_k, most_q, most_k, slots,
        OVER_KEYS=over_keys, BLOCK=block, CHUNK=CHUNK, num_warps=4, num_stages=1,
    )  # fmt: skip
    return Tiles(slots, records), of_sequences


def by_place(partial: Tensor, records: Tensor, groups: int, size: int, keys: bool) -> Tensor:
    """Sum a packed (1, H, total) over the sequences of each of `groups` groups, place by place: (groups, H, size)."""
    heads, total = partial.shape[1:]
    result = partial.new_empty(groups, heads, size)
    shared = records.shape[0] // groups
    if result.numel():
        programs = triton.cdiv(size, BLOCK) * heads * groups
        given = (partial, records, result, heads, size, total, shared)
        run(sum_rows, programs, *given, KEYS=keys, KEEP=True, BLOCK=BLOCK, num_warps=4)
    return result


def by_sequence(partial: Tensor, records: Tensor) -> Tensor:
    """Sum a packed (1, H, total_q) over each sequence's queries: (sequences, H)."""
    heads, total = partial.shape[1:]
    result = partial.new_empty(records.shape[0], heads)
    if result.numel():
        given = (partial, records, result, heads, 0, total, 1)
        run(sum_rows, result.numel(), *given, KEYS=False, KEEP=False, BLOCK=BLOCK, num_warps=4)
    return result
