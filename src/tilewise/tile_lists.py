"""The lists of tiles that kernels walk, made from a status for each tile or from a window's ends.

GPUs write all of them in one launch; elsewhere, and for the wrapped tensors of functorch, torch's own operations do the same.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from . import tile_cache
from .mask_base import Mask
from .tile_status import EMPTY, FULL, PARTIAL, Grid, by_operator, has_triton, tile_status
from .windows import UNLIMITED


@dataclass(frozen=True, slots=True)
class TileLists:
    """The partial and the full tiles of a call, for each block of queries (forward) and for each block of keys (backward).

    Tile (m, n) holds the queries [m block_m, (m + 1) block_m) and the keys [n block_n, (n + 1) block_n), counted from 0 in both
    sequences, cut at the lengths. All tensors are int32; B and H (query heads) are 1 where all share the lists. Indices ascend; entries
    past their number are arbitrary valid indices. The last dimension of the index tensors is as long as needed, at most the number of
    blocks. In a full tile the call's dense mask and mask program hide nothing; windows, lengths and a bias of -inf still apply.
    """

    block_m: int
    block_n: int
    kv_num: Tensor  # (B|1, H|1, Mb): how many partial tiles a block of queries has
    kv_idx: Tensor  # (B|1, H|1, Mb, <= Nb): their blocks of keys
    kv_full_num: Tensor  # the same of full tiles
    kv_full_idx: Tensor
    q_num: Tensor  # (B|1, H|1, Nb): how many partial tiles a block of keys has
    q_idx: Tensor  # (B|1, H|1, Nb, <= Mb): their blocks of queries
    q_full_num: Tensor
    q_full_idx: Tensor

    def tensors(self) -> list[Tensor]:
        """The eight tensors, in the order of the fields; `TileLists(block_m, block_n, *tensors)` takes them back."""
        return [getattr(self, name) for name in TENSORS]

    def to(self, device: torch.device | str) -> TileLists:
        return TileLists(self.block_m, self.block_n, *(x.to(device) for x in self.tensors()))


TENSORS = tuple(field.name for field in fields(TileLists)[2:])


def lists_of_rule(rule: Mask, grid: Grid, batch: int, heads: int, device: torch.device) -> TileLists:
    """The lists of a rule, whose window the grid has. `batch` and `heads` are those that differ."""
    if rule.window() is None:
        return lists_of_status(tile_status(rule, grid, batch, heads, device), grid)
    if by_operator(device):
        nothing = torch.empty(0, dtype=torch.uint8, device=device)
        return TileLists(grid.block_m, grid.block_n, *torch.ops.tilewise.tile_lists(nothing, True, *grid.numbers))
    return TileLists(grid.block_m, grid.block_n, *_of_window(grid, device, tile_cache.host_may_read(device)))


def lists_of_status(status: Tensor, grid: Grid) -> TileLists:
    """From the status of every tile in the band, (B, H, rows, width)."""
    if by_operator(status.device):
        return TileLists(grid.block_m, grid.block_n, *torch.ops.tilewise.tile_lists(status, False, *grid.numbers))
    return TileLists(grid.block_m, grid.block_n, *_of_status(status, grid, tile_cache.host_may_read(status.device)))


def _of_window(grid: Grid, device: torch.device, shorten: bool = False) -> list[Tensor]:
    tensors = window_lists(grid, device) + window_lists(grid.transposed(), device)
    return [x for i in range(0, 8, 2) for x in _shortened(tensors[i], tensors[i + 1], shorten)]


def _of_status(status: Tensor, grid: Grid, shorten: bool = False) -> list[Tensor]:
    lists: list[Tensor] = []
    for cut, by_row in ((grid, status), (grid.transposed(), transpose(status, grid))):
        base = cut.base(status.device)
        for kind in (PARTIAL, FULL):
            lists += _shortened(*_compact(by_row == kind, base), shorten)
    return lists


def _compact(chosen: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
    """The count and the ascending blocks of the chosen places of each row's band: int32 (B, H, rows) and (B, H, rows, width)."""
    rank = chosen.cumsum(3, dtype=torch.int32)
    width = chosen.shape[3]
    number = rank[..., -1].contiguous() if width else rank.new_zeros(chosen.shape[:3])
    place = torch.arange(width, dtype=torch.int32, device=chosen.device)
    # The places that were not chosen follow those that were, so that each is written exactly once.
    target = torch.where(chosen, rank - 1, number[..., None] + place - rank)
    blocks = (base[:, None] + place).to(torch.int32).expand(chosen.shape)
    index = torch.empty_like(target).scatter_(3, target.long(), blocks)
    return number, index


def _shortened(number: Tensor, index: Tensor, shorten: bool) -> list[Tensor]:
    """The index tensor cut at the largest number, where the host may know it."""
    if shorten:
        index = index[..., : int(number.max()) if number.numel() else 0].contiguous()
    return [number, index]


def window_lists(grid: Grid, device: torch.device) -> list[Tensor]:
    """The lists of the grid's own window: numbers and blocks of partial and of full tiles, int32 (1, 1, rows) and (1, 1, rows, width).

    The visible tiles of a block of queries are an interval, and so are the full ones inside it: a few numbers a block, no status.
    """
    m = torch.arange(grid.rows, dtype=torch.int32, device=device)
    first = m * grid.block_m + grid.offset
    last = (m * grid.block_m + (grid.block_m - 1)).clamp(max=grid.seqlen_q - 1) + grid.offset
    start, stop = torch.zeros_like(m), torch.full_like(m, grid.columns)  # of the visible tiles
    full, full_stop = start, stop
    if grid.left != UNLIMITED:
        left = min(grid.left, grid.seqlen_q + grid.seqlen_k)
        start = (first - left).clamp(min=0).div(grid.block_n, rounding_mode="floor")
        full = (last + (grid.block_n - 1 - left)).clamp(min=0).div(grid.block_n, rounding_mode="floor")
    if grid.right != UNLIMITED:
        right = min(grid.right, grid.seqlen_q + grid.seqlen_k)
        stop = (last + (right + grid.block_n)).clamp(min=0).div(grid.block_n, rounding_mode="floor").clamp(max=grid.columns)
        end = first + (right + 1)
        full_stop = torch.where(end >= grid.seqlen_k, grid.columns, end.clamp(min=0).div(grid.block_n, rounding_mode="floor"))
    stop = torch.maximum(start, stop)
    some = (full < full_stop) & (start < stop)
    full, full_stop = torch.where(some, full, stop), torch.where(some, full_stop, stop)
    before = full - start  # partial tiles left of the full ones
    place = torch.arange(grid.width, dtype=torch.int32, device=device)
    partial = torch.where(place < before[:, None], start[:, None] + place, (full_stop - before)[:, None] + place)
    limit = max(grid.columns - 1, 0)
    lists = [before + stop - full_stop, partial.clamp(max=limit), full_stop - full, (full[:, None] + place).clamp(max=limit)]
    return [x[None, None] for x in lists]


def transpose(status: Tensor, grid: Grid) -> Tensor:
    """The status by blocks of keys: (B, H, columns, width of the transposed grid)."""
    other = grid.transposed()
    if not (grid.banded or other.banded):
        return status.transpose(2, 3)
    m = other.blocks(status.device)  # (columns, width')
    place = torch.arange(grid.columns, device=status.device)[:, None] - grid.base(status.device)[m]
    inside = (place >= 0) & (place < grid.width)
    found = status.flatten(2)[:, :, m * grid.width + place.clamp(0, grid.width - 1)]
    return torch.where(inside, found, EMPTY)


# ------------------------------------------------------------------------------------------------------------ as one operator


def _build(status: Tensor, windowed: bool, *numbers: int) -> list[Tensor]:
    """The tensors of `TileLists`, each list as wide as its band. `windowed`: the grid's window is the whole rule, and `status` is empty."""
    grid = Grid(*numbers)
    if not has_triton(status.device):
        return _of_window(grid, status.device) if windowed else _of_status(status, grid)
    from .kernels.triton.tile_lists import build

    lists = _allocate(status, windowed, *numbers)
    with torch.cuda.device(status.device):
        build(None if windowed else status.contiguous(), grid, lists)
    return lists


def _allocate(status: Tensor, windowed: bool, *numbers: int) -> list[Tensor]:
    grid = Grid(*numbers)
    result, shared = [], (1, 1) if windowed else tuple(status.shape[:2])
    for cut in (grid, grid.transposed()):
        for size in ((*shared, cut.rows), (*shared, cut.rows, cut.width)) * 2:
            result.append(torch.empty(size, dtype=torch.int32, device=status.device))
    return result


_library = torch.library.Library("tilewise", "FRAGMENT")
_library.define(
    "tile_lists(Tensor status, bool windowed, SymInt seqlen_q, SymInt seqlen_k, int block_m, int block_n, SymInt left, SymInt right)"
    " -> Tensor[]"
)
_library.impl("tile_lists", _build, "CompositeExplicitAutograd")
torch.library.register_fake("tilewise::tile_lists", _allocate, lib=_library)
