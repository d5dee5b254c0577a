"""Which blocks of keys each tile of queries visits, decided on the device: tiles by falling cost, each with the lengths of its two lists.

A block of LIST_M queries has an ascending list of the blocks of keys that the mask cuts, and one of those that it leaves whole. Under a
causal window both end at the tile's last query: what a window hides entirely is not visited, whoever made the lists.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from ..triton.launch import run

if TYPE_CHECKING:
    from torch import Tensor

RECORD = 4  # numbers of a tile: its number by rows, entries of its partial and of its full list, the row of these lists
CHUNK = 64  # tiles of a program
RUNTIME = ["tiles", "blocks", "share", "partial_width", "full_width", "first_end", "step"]


@triton.jit
def entries_below(list_ptr, num, limit, width):
    """How many of the first ``num`` of ascending entries are below ``limit``: a binary search in every lane."""
    low, high = num * 0, num
    reach = 1
    while reach <= width:
        middle = (low + high) // 2
        below = tl.load(list_ptr + middle, mask=low < high, other=0) < limit
        high = tl.where((low < high) & ~below, middle, high)
        low = tl.where((low < high) & below, middle + 1, low)
        reach *= 2
    return low


@triton.jit
def lengths(
    num_ptr, idx_ptr, full_num_ptr, full_idx_ptr, head, t, tiles, blocks, share, partial_width, full_width, first_end, step,
    CUT: tl.constexpr,
):  # fmt: skip
    """(entries of the partial list, of the full list, row of the lists) of the tiles ``t`` of a head."""
    row = head * blocks + t // share
    partial, full = tl.load(num_ptr + row, mask=t < tiles, other=0), tl.load(full_num_ptr + row, mask=t < tiles, other=0)
    if CUT:
        limit = first_end + t * step
        partial = entries_below(idx_ptr + row.to(tl.int64) * partial_width, partial, limit, partial_width)
        full = entries_below(full_idx_ptr + row.to(tl.int64) * full_width, full, limit, full_width)
    return partial, full, row


@triton.jit(do_not_specialize=RUNTIME)
def rank_tiles(
    num_ptr, idx_ptr, full_num_ptr, full_idx_ptr, records_ptr, tiles, blocks, share, partial_width, full_width, first_end, step,
    CUT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the records of CHUNK tiles of one head, each behind those of all tiles that cost more, and of equal ones that come first."""
    programs = tl.cdiv(tiles, CHUNK)
    head = tl.program_id(0) // programs
    mine = tl.program_id(0) % programs * CHUNK + tl.arange(0, CHUNK)
    lists = (num_ptr, idx_ptr, full_num_ptr, full_idx_ptr)
    partial, full, row = lengths(*lists, head, mine, tiles, blocks, share, partial_width, full_width, first_end, step, CUT)
    earlier = tl.zeros([CHUNK], tl.int32)
    for t0 in range(0, tiles, CHUNK):
        t = t0 + tl.arange(0, CHUNK)
        other_partial, other_full, _ = lengths(*lists, head, t, tiles, blocks, share, partial_width, full_width, first_end, step, CUT)
        cost, other_cost = (partial + full)[:, None], (other_partial + other_full)[None, :]
        before = (other_cost > cost) | ((other_cost == cost) & (t[None, :] < mine[:, None]))  # [mine, others]
        earlier += tl.sum((before & (t < tiles)[None, :]).to(tl.int32), 1)
    record_ptr = records_ptr + (head * tiles + earlier) * 4
    for field in tl.static_range(4):
        tl.store(record_ptr + field, (mine, partial, full, row)[field], mask=mine < tiles)


def ranked(lists: tuple[Tensor, Tensor, Tensor, Tensor], tiles: int, share: int, ends: tuple[int, int] | None) -> Tensor:
    """int32 (B or 1, H or 1, tiles, RECORD) of the tiles of each head, the costliest first.

    ``lists`` are the numbers and indices of partial and of full blocks, contiguous, (B or 1, H or 1, blocks[, entries]); ``share`` tiles
    have the lists of one block. ``ends`` (a, b) says that tile t sees no block of keys from a + b * t on; None: that it may see all.
    """
    num, idx, full_num, full_idx = lists
    batch, heads, blocks = num.shape
    records = num.new_empty(batch, heads, tiles, RECORD)
    run(
        rank_tiles, triton.cdiv(tiles, CHUNK) * batch * heads, num, idx, full_num, full_idx, records, tiles, blocks, share, idx.shape[-1],
        full_idx.shape[-1], *(ends or (0, 0)), CUT=ends is not None, CHUNK=CHUNK, num_warps=4, num_stages=1,
    )  # fmt: skip
    return records
