"""Which blocks each tile visits, decided on the device: tiles by falling cost, each with the lengths of its two lists.

A block of LIST_M queries has an ascending list of the blocks of keys that the mask cuts, and one of those that it leaves whole. Under a
causal window both end at the tile's last query: what a window hides entirely is not visited, whoever made the lists. The backward pass has
tiles of keys and the transposed lists, which start at the first block of queries that a causal window leaves.
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
KEYS_RUNTIME = ["tiles", "blocks", "share", "partial_width", "full_width", "offset", "heads_k", "group", "list_batch", "list_head"]


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


@triton.jit
def query_lists(
    num_ptr, idx_ptr, full_num_ptr, full_idx_ptr, owner, t, tiles, blocks, share, partial_width, full_width, offset, CUT: tl.constexpr
):  # fmt: skip
    """(entries of the partial list, of the full list, where either starts in its tensor) of the tiles ``t`` of keys for a query head."""
    block = t // share
    row = owner * blocks + block
    partial, full = tl.load(num_ptr + row, mask=t < tiles, other=0), tl.load(full_num_ptr + row, mask=t < tiles, other=0)
    partial_start, full_start = row * partial_width, row * full_width
    if CUT:
        above = entries_below(idx_ptr + partial_start, partial, block - offset, partial_width)
        full_above = entries_below(full_idx_ptr + full_start, full, block - offset, full_width)
        partial, full, partial_start, full_start = partial - above, full - full_above, partial_start + above, full_start + full_above
    return partial, full, partial_start, full_start


@triton.jit
def key_cost(lists, owner, group, list_head, t, tiles, blocks, share, partial_width, full_width, offset, CUT: tl.constexpr):
    """How many entries the tiles ``t`` of keys have over all query heads that share them; ``owner`` has the lists of the first."""
    cost = t * 0
    for g in range(group):
        mine = owner + g * list_head
        partial, full, _, _ = query_lists(*lists, mine, t, tiles, blocks, share, partial_width, full_width, offset, CUT)
        cost += partial + full
    return cost


@triton.jit(do_not_specialize=KEYS_RUNTIME)
def rank_keys(
    num_ptr, idx_ptr, full_num_ptr, full_idx_ptr, records_ptr, tiles, blocks, share, partial_width, full_width, offset, heads_k, group,
    list_batch, list_head, CUT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the records of CHUNK tiles of one key head, in the order of `rank_tiles`."""
    programs = tl.cdiv(tiles, CHUNK)
    item = tl.program_id(0) // programs  # key head of the batch
    mine = tl.program_id(0) % programs * CHUNK + tl.arange(0, CHUNK)
    owner = item // heads_k * list_batch + item % heads_k * group * list_head
    lists = (num_ptr, idx_ptr, full_num_ptr, full_idx_ptr)
    cost = key_cost(lists, owner, group, list_head, mine, tiles, blocks, share, partial_width, full_width, offset, CUT)
    earlier = tl.zeros([CHUNK], tl.int32)
    for t0 in range(0, tiles, CHUNK):
        t = t0 + tl.arange(0, CHUNK)
        other = key_cost(lists, owner, group, list_head, t, tiles, blocks, share, partial_width, full_width, offset, CUT)
        before = (other[None, :] > cost[:, None]) | ((other[None, :] == cost[:, None]) & (t[None, :] < mine[:, None]))  # [mine, others]
        earlier += tl.sum((before & (t < tiles)[None, :]).to(tl.int32), 1)
    record_ptr = records_ptr + (item * tiles + earlier).to(tl.int64) * (2 + 4 * group)
    tl.store(record_ptr, mine, mask=mine < tiles)
    tl.store(record_ptr + 1, cost, mask=mine < tiles)
    for g in range(group):
        found = query_lists(*lists, owner + g * list_head, mine, tiles, blocks, share, partial_width, full_width, offset, CUT)
        for field in tl.static_range(4):
            tl.store(record_ptr + (2 + 4 * g + field), found[field], mask=mine < tiles)


def ranked_keys(
    lists: tuple[Tensor, Tensor, Tensor, Tensor], batch: int, heads_k: int, group: int, tiles: int, share: int, offset: int | None
) -> Tensor:
    """int32 (batch, heads_k, tiles, 2 + 4 * group) of the tiles of keys of each key head, the costliest first: the tile's number, the
    entries of all its lists, and for each query head of the group the entries of its partial and of its full list and where these start.

    ``lists`` are the numbers and indices of partial and of full blocks of queries, as in `ranked`; ``share`` tiles have the lists of one
    block. ``offset`` says that block n of keys is seen by no block of queries before n - offset; None: that it may be seen by all.
    """
    num, idx, full_num, full_idx = lists
    list_batch, list_heads, blocks = num.shape
    records = num.new_empty(batch, heads_k, tiles, 2 + 4 * group)
    run(
        rank_keys, triton.cdiv(tiles, CHUNK) * batch * heads_k, num, idx, full_num, full_idx, records, tiles, blocks, share,
        idx.shape[-1], full_idx.shape[-1], offset or 0, heads_k, group, 0 if list_batch == 1 else list_heads, 0 if list_heads == 1 else 1,
        CUT=offset is not None, CHUNK=CHUNK, num_warps=4, num_stages=1,
    )  # fmt: skip
    return records
