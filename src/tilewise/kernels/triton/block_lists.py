"""Walks over listed tiles. A block of queries (or, transposed, of keys) has two lists of ascending blocks to visit: those that the mask
cuts, and those that it leaves whole. Windows and lengths may still cut the latter, but only at the two ends of their list.

    listed  (partial_ptr, full_ptr, num_partial, num_full, first, last)   entries [first, last) of the full list are not cut

A listed block is LIST_M queries by LIST_N keys, a multiple of the kernel's own tile in both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from .programs import decoded

if TYPE_CHECKING:
    from torch import Tensor

CHUNK: tl.constexpr = tl.constexpr(128)


@triton.jit
def ordered_tile(tile, lists_ptr, list_sizes, b, h):
    """The tile that a program owns: those of one head come by falling cost, so that no long one starts last."""
    row = b * decoded(list_sizes[4], False) + h * decoded(list_sizes[5], False)
    return tl.load(lists_ptr[4] + row + tile).to(tl.int32)


@triton.jit
def lists_of(lists_ptr, list_sizes, b, h, block, full_lo, full_hi, LIST: tl.constexpr):
    """The lists of one block; what lies within [full_lo, full_hi) of the walked axis is cut by neither a window nor a length."""
    row = b * decoded(list_sizes[0], False) + h * decoded(list_sizes[1], False) + block
    num_partial, num_full = tl.load(lists_ptr[0] + row), tl.load(lists_ptr[2] + row)
    partial_ptr = lists_ptr[1] + row * decoded(list_sizes[2], False)
    full_ptr = lists_ptr[3] + row * decoded(list_sizes[3], False)
    first, last = num_full * 0, num_full
    if num_full > 0:
        if tl.load(full_ptr) * LIST < full_lo:
            first = entries_below(full_ptr, num_full, tl.cdiv(full_lo, LIST))
        if (tl.load(full_ptr + num_full - 1) + 1) * LIST > full_hi:
            last = tl.maximum(entries_below(full_ptr, num_full, full_hi // LIST), first)
    return partial_ptr, full_ptr, num_partial, num_full, first, last


@triton.jit
def entries_below(ptr, num, limit):
    """How many of the first ``num`` entries, which ascend, are below a limit."""
    count = num * 0
    for start in tl.range(0, num, CHUNK, num_stages=1):
        offs = start + tl.arange(0, CHUNK)
        entries = tl.load(ptr + offs, mask=offs < num, other=limit)
        count += tl.sum((entries < limit).to(tl.int32), 0)
    return count


@triton.jit
def listed_end(listed, some, LIST: tl.constexpr, CUT: tl.constexpr):
    """The length of the walk over cut or uncut blocks, as if they lay side by side; 0 unless there is ``some``."""
    _, _, num_partial, num_full, first, last = listed
    length = (num_partial + first + (num_full - last) if CUT else last - first) * LIST
    return tl.where(some, length, 0)


@triton.jit
def listed_start(listed, at, LIST: tl.constexpr, CUT: tl.constexpr):
    """Where on its axis the tile at position ``at`` of the walk starts."""
    partial_ptr, full_ptr, num_partial, _, first, last = listed
    entry = at // LIST
    if CUT:
        cut = entry - num_partial
        ptr = tl.where(cut < 0, partial_ptr + entry, full_ptr + tl.where(cut < first, cut, cut - first + last))
    else:
        ptr = full_ptr + (first + entry)
    return tl.load(ptr) * LIST + at % LIST


def list_arguments(tensors: tuple[Tensor, Tensor, Tensor, Tensor], tiles: int, tiles_of_block: int) -> dict[str, Any]:
    """The kernels' arguments from the numbers and indices of partial and of full blocks, (B or 1, H or 1, blocks[, entries]).

    ``tiles`` are the programs of one head, ``tiles_of_block`` of which share the lists of one block.
    """
    from .emission import encoded_numbers

    num, idx, full_num, full_idx = (x.contiguous() for x in tensors)
    batch, heads, blocks = num.shape
    # Neighbouring programs are blocks of one head, so the longest of each head first leaves the shortest of the last head for the end.
    cost = num + full_num
    if tiles_of_block > 1:
        cost = cost.repeat_interleave(tiles_of_block, -1, output_size=blocks * tiles_of_block)[..., :tiles]
    order = cost.argsort(dim=-1, descending=True, stable=True)
    strides = [0 if batch == 1 else heads * blocks, 0 if heads == 1 else blocks, idx.shape[-1], full_idx.shape[-1]]
    strides += [0 if batch == 1 else heads * tiles, 0 if heads == 1 else tiles]
    return {"lists_ptr": (num, idx, full_num, full_idx, order), "list_sizes": encoded_numbers(strides)}
