"""The small kernels around the Hopper backward kernel: what it must know of each query, and dQ, and where tiles are apart dK and dV, as the
caller wants them.

Strides come in units of ALIGN elements, so that the compiler knows how wide it may read; an inner stride of 1 comes as None.

LSE, delta and the accumulator of dQ have `row_blocks` blocks of BLOCK_M rows a head. Those of a packed sequence s, whose first query is q,
start at block q // BLOCK_M + s: each sequence before it needs at most one more than its queries fill.
"""

import triton
import triton.language as tl

from ..triton.tiles import packed_tile

# Columns are taken in chunks: wide enough for full memory transactions, few enough for the registers at head dim 256.
CHUNK: tl.constexpr = tl.constexpr(64)
CLEARED: tl.constexpr = tl.constexpr(4096)  # numbers at a time: 16 KB
KEYS: tl.constexpr = tl.constexpr(64)
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
NEG_INF: tl.constexpr = tl.constexpr(float("-inf"))
_RUNTIME = ["heads", "seqlen", "seqlen_k", "window_right", "tiles", "row_blocks", "key_sums"]
_RUNTIME += [f"stride_{x}_{dim}" for x in ("o", "do", "dlse", "dq", "dk", "dv") for dim in "bhs"]


@triton.jit(do_not_specialize=_RUNTIME)
def prepare_rows(
    out_ptr, do_ptr, lse_ptr, dlse_ptr, lengths_q_ptr, lengths_k_ptr, records_ptr, sink_ptr,
    acc_ptr, turns_ptr, key_sums_ptr, row_lse_ptr, delta_ptr, sink_partial_ptr,
    stride_o_b: tl.int64, stride_o_h: tl.int64, stride_o_s: tl.int64, stride_o_d,
    stride_do_b: tl.int64, stride_do_h: tl.int64, stride_do_s: tl.int64, stride_do_d,
    stride_dlse_b: tl.int64, stride_dlse_h: tl.int64, stride_dlse_s: tl.int64,
    heads, seqlen, seqlen_k, window_right, tiles, row_blocks, key_sums,
    ALIGN: tl.constexpr, RIGHT: tl.constexpr, ACC: tl.constexpr, PARTS: tl.constexpr, DIM_V: tl.constexpr, BLOCK_M: tl.constexpr,
    LISTED: tl.constexpr,
):  # fmt: skip
    """delta = sum(out * dout) - dlse and the LSE in base 2, (B * Hq, row_blocks * BLOCK_M), both neutral for queries that see nothing. The
    turns of dQ's blocks are set to 0, or without them its accumulator; also the sums of dK and dV, `key_sums` times CLEARED numbers, which
    the programs share. One program BLOCK_M queries, of a packed sequence where there are records.

    A sink's logit gains -exp(sink - lse) * delta from each query: it is a key whose value, and so whose dP, is zero.
    """
    tile, bh = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    length, length_k, first_q, block = seqlen, seqlen_k, 0, bh.to(tl.int64) * row_blocks + tile
    if records_ptr is not None:
        sequence, row0, first_q, _rows_q, length, _first_k, _rows_k, length_k = packed_tile(records_ptr + tile * 8)
        if row0 >= length:  # nothing reads what follows
            if sink_ptr is not None:
                tl.store(sink_partial_ptr + tl.program_id(0), 0.0)
            return
        offs_m = row0 + tl.arange(0, BLOCK_M)
        block = bh.to(tl.int64) * row_blocks + first_q // BLOCK_M + sequence + row0 // BLOCK_M
    if lengths_q_ptr is not None:
        length = tl.minimum(tl.maximum(tl.load(lengths_q_ptr + b), 0), seqlen)
    if lengths_k_ptr is not None:
        length_k = tl.minimum(tl.maximum(tl.load(lengths_k_ptr + b), 0), seqlen_k)
    inside = offs_m < length
    rows = (first_q + offs_m).to(tl.int64)[:, None]
    # What reaches the output of a query without keys is hidden, also where a sink gives it a finite LSE.
    seen = offs_m < tl.where(length_k > 0, length, 0)
    if RIGHT:
        seen = seen & (offs_m + window_right >= length - length_k)
    o_row = out_ptr + (b * stride_o_b + h * stride_o_h + rows * stride_o_s) * ALIGN
    do_row = do_ptr + (b * stride_do_b + h * stride_do_h + rows * stride_do_s) * ALIGN
    delta = tl.zeros([BLOCK_M], tl.float32)
    for first in tl.static_range(0, DIM_V, CHUNK):
        columns = (first + tl.arange(0, CHUNK))[None, :]
        visible = seen[:, None] & (columns < DIM_V)
        o = tl.load(o_row + columns * (1 if stride_o_d is None else stride_o_d), mask=visible, other=0.0).to(tl.float32)
        do = tl.load(do_row + columns * (1 if stride_do_d is None else stride_do_d), mask=visible, other=0.0).to(tl.float32)
        if LISTED:  # only the lists know which queries see no key, but the output of these is 0
            do = tl.where(o == 0.0, 0.0, do)
        delta += tl.sum(o * do, 1)
    lse = tl.load(lse_ptr + bh.to(tl.int64) * seqlen + first_q + offs_m, mask=inside, other=NEG_INF)
    if dlse_ptr is not None:
        dlse_row = dlse_ptr + b * stride_dlse_b + h * stride_dlse_h + (first_q + offs_m) * stride_dlse_s
        delta -= tl.load(dlse_row, mask=inside, other=0.0)
    empty = lse == NEG_INF
    delta = tl.where(empty, 0.0, delta)
    if sink_ptr is not None:
        weight = tl.where(empty, 0.0, tl.exp2((tl.load(sink_ptr + h).to(tl.float32) - lse) * LOG2E))
        tl.store(sink_partial_ptr + tl.program_id(0), -tl.sum(weight * delta, 0))
    padded = block * BLOCK_M + tl.arange(0, BLOCK_M)
    tl.store(delta_ptr + padded, delta)
    tl.store(row_lse_ptr + padded, tl.where(empty, float("inf"), lse * LOG2E))
    if turns_ptr is not None:
        for part in tl.static_range(PARTS):
            tl.store(turns_ptr + block * PARTS + part, 0)
    else:
        for first in tl.static_range(0, ACC, CHUNK):
            columns = (first + tl.arange(0, CHUNK))[None, :]
            tl.store(acc_ptr + padded[:, None] * ACC + columns, tl.zeros([BLOCK_M, CHUNK], tl.float32))
    if key_sums_ptr is not None:
        cleared_ptr = key_sums_ptr + tl.program_id(0).to(tl.int64) * CLEARED + tl.arange(0, CLEARED)
        for _ in range(tl.program_id(0), key_sums, tl.num_programs(0)):
            tl.store(cleared_ptr, tl.zeros([CLEARED], tl.float32))
            cleared_ptr += tl.num_programs(0).to(tl.int64) * CLEARED


@triton.jit(do_not_specialize=_RUNTIME)
def finish_queries(
    acc_ptr, turns_ptr, records_ptr, dq_ptr, scale, stride_dq_b: tl.int64, stride_dq_h: tl.int64, stride_dq_s: tl.int64, stride_dq_d,
    heads, seqlen, tiles, row_blocks,
    ALIGN: tl.constexpr, DIM: tl.constexpr, ACC: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr,
    SPLIT: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """dQ = scale * accumulator, in dQ's own dtype and strides; 0 where no turn was taken. One program BLOCK_M queries, as in
    `prepare_rows`, but also those that lie beyond the length of their sequence, or in none.

    The accumulator has ACC columns, a multiple of 64; in two parts they lie as `backward_pass.halves` says. With LANES its
    numbers lie in the order of `backward_pass.by_lanes`, where SPLIT warp groups share the columns.
    """
    tile, bh = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    SIZE: tl.constexpr = BLOCK_M * CHUNK
    rows, first_q, block, filled = seqlen, 0, bh.to(tl.int64) * row_blocks + tile, SIZE
    if records_ptr is not None:
        sequence, row0, first_q, rows, length, _first_k, _rows_k, _length_k = packed_tile(records_ptr + tile * 8)
        if sequence < 0:
            return
        offs_m = row0 + tl.arange(0, BLOCK_M)
        block = bh.to(tl.int64) * row_blocks + first_q // BLOCK_M + sequence + row0 // BLOCK_M
        filled = tl.where(row0 < length, SIZE, 0)
    if turns_ptr is not None:
        filled = tl.where(tl.load(turns_ptr + block * PARTS, mask=filled > 0, other=0) > 0, SIZE, 0)
    start = acc_ptr + block * BLOCK_M * ACC
    numbers = tl.arange(0, SIZE)
    GROUPS: tl.constexpr = CHUNK * SPLIT * PARTS // ACC  # warp groups that have columns in a chunk
    target = dq_ptr + (b * stride_dq_b + h * stride_dq_h + (first_q + offs_m).to(tl.int64)[:, None] * stride_dq_s) * ALIGN
    for first in tl.static_range(0, ACC, CHUNK):
        source = first if PARTS == 1 else first // 64 % 2 * 128 + first // 128 * 64
        columns = tl.arange(0, CHUNK)[None, :]
        if LANES:
            acc = tl.load(start + source * BLOCK_M + numbers, mask=numbers < filled, other=0.0)
            acc = tl.reshape(acc, [GROUPS, CHUNK // GROUPS // 8, BLOCK_M // 16, 8, 4, 2, 2])
            acc = tl.reshape(tl.permute(acc, (2, 5, 3, 0, 1, 4, 6)), [BLOCK_M, CHUNK])
        else:
            acc = tl.load(start + tl.arange(0, BLOCK_M)[:, None] * ACC + source + columns, mask=columns < filled, other=0.0)
        visible = (first + columns < DIM) & (offs_m < rows)[:, None]
        offsets = (first + columns) * (1 if stride_dq_d is None else stride_dq_d)
        tl.store(target + offsets, (acc * scale).to(dq_ptr.dtype.element_ty), mask=visible)


@triton.jit
def _finish_sums(start, target_ptr, scale, stride_d, inside, DIM: tl.constexpr, SUMS: tl.constexpr, SPLIT: tl.constexpr):
    """The gradient of KEYS keys, whose first element is at target_ptr [KEYS, 1], from the sums of a tile's SUMS columns.

    They lie as `barriers.add_in_memory` adds what the threads hold: [warp of 16 keys, 8 columns, lane, 2 rows of 8 keys, 2 columns], where
    four neighbouring lanes have 8 columns of the same keys. SPLIT warp groups share the columns, one behind the other.
    """
    WIDTH: tl.constexpr = SUMS // SPLIT  # columns of a warp
    WIDE: tl.constexpr = CHUNK if WIDTH > CHUNK else WIDTH
    numbers = tl.arange(0, KEYS * WIDE)
    for first in tl.static_range(0, SUMS, WIDE):
        of_group = first // WIDTH * KEYS * WIDTH + first % WIDTH * 16
        x = tl.load(start + of_group + numbers // (16 * WIDE) * (16 * WIDTH) + numbers % (16 * WIDE))
        x = tl.reshape(x, [KEYS // 16, WIDE // 8, 8, 4, 2, 2])
        x = tl.reshape(tl.permute(x, (0, 4, 2, 1, 3, 5)), [KEYS, WIDE])
        columns = first + tl.arange(0, WIDE)[None, :]
        offsets = columns * (1 if stride_d is None else stride_d)
        tl.store(target_ptr + offsets, (x * scale).to(target_ptr.dtype.element_ty), mask=inside & (columns < DIM))


@triton.jit(do_not_specialize=_RUNTIME)
def finish_keys(
    sums_ptr, dk_ptr, dv_ptr, scale, scale_v,
    stride_dk_b: tl.int64, stride_dk_h: tl.int64, stride_dk_s: tl.int64, stride_dk_d,
    stride_dv_b: tl.int64, stride_dv_h: tl.int64, stride_dv_s: tl.int64, stride_dv_d,
    heads, seqlen, tiles,
    ALIGN: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, SUMS: tl.constexpr, SUMS_V: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """dK = scale * its sums over query heads, dV likewise, in their own dtype and strides; either may be left out. One program KEYS keys
    of a key head; sums of a tile of BLOCK_N keys are those of dK, SUMS columns, and then those of dV.
    """
    number, bh = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    PARTS: tl.constexpr = BLOCK_N // KEYS  # of a tile, one behind the other, as warps are: 2 where SPLIT is 1
    offs_n = number * KEYS + tl.arange(0, KEYS)
    rows, inside = offs_n.to(tl.int64)[:, None], (offs_n < seqlen)[:, None]
    start = sums_ptr + (bh * (tiles // PARTS) + number // PARTS).to(tl.int64) * (BLOCK_N * (SUMS + SUMS_V))
    part = number % PARTS * KEYS
    if dk_ptr is not None:
        target_ptr = dk_ptr + (b * stride_dk_b + h * stride_dk_h + rows * stride_dk_s) * ALIGN
        _finish_sums(start + part * SUMS, target_ptr, scale, stride_dk_d, inside, DIM, SUMS, SPLIT)
    if dv_ptr is not None:
        target_ptr = dv_ptr + (b * stride_dv_b + h * stride_dv_h + rows * stride_dv_s) * ALIGN
        _finish_sums(start + BLOCK_N * SUMS + part * SUMS_V, target_ptr, scale_v, stride_dv_d, inside, DIM_V, SUMS_V, SPLIT)


@triton.jit(do_not_specialize=_RUNTIME)
def clear_ends(
    records_ptr, dk_ptr, dv_ptr, stride_dk_h: tl.int64, stride_dk_s: tl.int64, stride_dv_h: tl.int64, stride_dv_s: tl.int64, tiles,
    ALIGN: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """0 in the keys of each packed sequence that fill only a part of a tile: the backward kernel adds to these. One program a tile."""
    tile, h = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    _sequence, row0, _first_q, _rows_q, _length, first_k, rows_k, _length_k = packed_tile(records_ptr + tile * 8)
    if row0 + BLOCK_N <= rows_k:
        return
    offs_n = row0 + tl.arange(0, BLOCK_N)
    rows = (first_k + offs_n).to(tl.int64)[:, None]
    for first in tl.static_range(0, DIM, CHUNK):
        columns = (first + tl.arange(0, CHUNK))[None, :]
        target = dk_ptr + (h * stride_dk_h + rows * stride_dk_s) * ALIGN + columns
        tl.store(target, tl.zeros([BLOCK_N, CHUNK], dk_ptr.dtype.element_ty), mask=(offs_n < rows_k)[:, None] & (columns < DIM))
    for first in tl.static_range(0, DIM_V, CHUNK):
        columns = (first + tl.arange(0, CHUNK))[None, :]
        target = dv_ptr + (h * stride_dv_h + rows * stride_dv_s) * ALIGN + columns
        tl.store(target, tl.zeros([BLOCK_N, CHUNK], dv_ptr.dtype.element_ty), mask=(offs_n < rows_k)[:, None] & (columns < DIM_V))
