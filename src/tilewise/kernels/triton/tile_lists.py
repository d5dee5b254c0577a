"""The lists of partial and full tiles, by blocks of queries and by blocks of keys, in one launch: a program walks one band and writes
where each of its tiles belongs. What a tile shows comes from a status for each, or from the window alone, which then is all there is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from .launch import run
from .tile_status import band_start

if TYPE_CHECKING:
    from torch import Tensor

    from ...tile_status import Grid

PARTIAL: tl.constexpr = tl.constexpr(1)
FULL: tl.constexpr = tl.constexpr(2)
MOST = 1024  # tiles looked at together


@triton.jit
def window_status(m, n, left, right, offset, size_q, size_k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """What a window shows of tile (m, n): consecutive queries see overlapping intervals, so a block's first and last query decide."""
    first = m * BLOCK_M + offset
    last = tl.minimum(m * BLOCK_M + BLOCK_M, size_q) - 1 + offset
    start = n * BLOCK_N
    stop = tl.minimum(start + BLOCK_N, size_k)
    seen = start < stop
    every = seen
    if left is not None:
        seen &= stop > first - left
        every &= start >= last - left
    if right is not None:
        seen &= start <= last + right
        every &= stop <= first + right + 1
    return tl.where(seen, tl.where(every, FULL, PARTIAL), 0)


@triton.jit
def list_chosen(idx_ptr, chosen, inside, place, other, number, width):
    """Appends the chosen blocks to a list of ``number`` entries. The others fill it from its end: whatever is read is a valid block."""
    rank = number + tl.cumsum(chosen.to(tl.int32), 0)  # of the chosen, up to and including each
    target = tl.where(chosen, rank - 1, width - 1 - (place - rank))
    tl.store(idx_ptr + target, other, mask=inside)
    return number + tl.sum(chosen.to(tl.int32), 0)


@triton.jit
def write_lists(
    status_ptr, num_ptr, idx_ptr, full_num_ptr, full_idx_ptr, item, block, count, others, width, shift,
    rows, columns, row_width, row_shift, left, right, offset, size_q, size_k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Both lists of one block of queries; TRANSPOSED: of one block of keys, whose band has ``width`` blocks of queries."""
    if TRANSPOSED:
        base = band_start(block, others, width, shift, BLOCK_N, BLOCK_M)
    else:
        base = band_start(block, others, width, shift, BLOCK_M, BLOCK_N)
    row = item * count + block
    partial, full = width * 0, width * 0
    for start in tl.range(0, width, CHUNK):
        place = start + tl.arange(0, CHUNK)
        inside = place < width
        other = base + place
        if TRANSPOSED:
            m, n = other, block
        else:
            m, n = block, other
        if status_ptr is None:
            status = window_status(m, n, left, right, offset, size_q, size_k, BLOCK_M, BLOCK_N)
        else:
            at = n - band_start(m, columns, row_width, row_shift, BLOCK_M, BLOCK_N)
            known = inside & (at >= 0) & (at < row_width)
            status = tl.load(status_ptr + (item * rows + m) * row_width + at, mask=known, other=0)
        partial = list_chosen(idx_ptr + row * width, inside & (status == PARTIAL), inside, place, other, partial, width)
        full = list_chosen(full_idx_ptr + row * width, inside & (status == FULL), inside, place, other, full, width)
    tl.store(num_ptr + row, partial)
    tl.store(full_num_ptr + row, full)


RUNTIME = ("rows", "columns", "row_width", "column_width", "row_shift", "column_shift", "left", "right", "offset", "size_q", "size_k")


@triton.jit(do_not_specialize=RUNTIME)
def tile_lists(
    status_ptr, kv_num_ptr, kv_idx_ptr, kv_full_num_ptr, kv_full_idx_ptr, q_num_ptr, q_idx_ptr, q_full_num_ptr, q_full_idx_ptr,
    rows, columns, row_width, column_width, row_shift, column_shift, left, right, offset, size_q, size_k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROW_CHUNK: tl.constexpr, COLUMN_CHUNK: tl.constexpr,
):  # fmt: skip
    """The programs of one batch item and head: a block of queries each, then a block of keys each."""
    program = tl.program_id(0)
    item, block = (program // (rows + columns)).to(tl.int64), program % (rows + columns)
    if block < rows:
        write_lists(
            status_ptr, kv_num_ptr, kv_idx_ptr, kv_full_num_ptr, kv_full_idx_ptr, item, block, rows, columns, row_width, row_shift,
            rows, columns, row_width, row_shift, left, right, offset, size_q, size_k, BLOCK_M, BLOCK_N, ROW_CHUNK, False,
        )  # fmt: skip
    else:
        write_lists(
            status_ptr, q_num_ptr, q_idx_ptr, q_full_num_ptr, q_full_idx_ptr, item, block - rows, columns, rows, column_width, column_shift,
            rows, columns, row_width, row_shift, left, right, offset, size_q, size_k, BLOCK_M, BLOCK_N, COLUMN_CHUNK, True,
        )  # fmt: skip


def build(status: Tensor | None, grid: Grid, lists: list[Tensor]) -> None:
    """Fills the eight tensors of `TileLists`, each list as long as its band is wide; ``status`` None stands for the grid's window."""
    if not grid.rows or not grid.columns:
        for number in lists[::2]:
            number.zero_()
        return
    other, far = grid.transposed(), grid.seqlen_q + grid.seqlen_k  # what lies further hides nothing
    run(
        tile_lists,
        lists[0].shape[0] * lists[0].shape[1] * (grid.rows + grid.columns),
        status,
        *lists,
        rows=grid.rows,
        columns=grid.columns,
        row_width=grid.width,
        column_width=other.width,
        row_shift=grid.shift,
        column_shift=other.shift,
        left=None if grid.left < 0 else min(grid.left, far),
        right=None if grid.right < 0 else min(grid.right, far),
        offset=grid.offset,
        size_q=grid.seqlen_q,
        size_k=grid.seqlen_k,
        BLOCK_M=grid.block_m,
        BLOCK_N=grid.block_n,
        ROW_CHUNK=chunk(grid.width),
        COLUMN_CHUNK=chunk(other.width),
        num_warps=4,
    )


def chunk(width: int) -> int:
    """Few sizes, as each is a compilation."""
    return 32 if width <= 32 else 256 if width <= 256 else MOST
