"""What each tile of the score matrix shows: nothing, something or everything. Found tile by tile, never pair by pair of the whole matrix.

A rule is asked for what it knows: windows and row ranges give every tile's status from the ends of the ranges, blocks from their bits,
documents from the smallest and largest number in each block, and `&`, `|`, `~` combine statuses. Of what stays unknown, intervals of the
values in the rule's program tell most (`tile_bounds`), and the rest is computed pair by pair, some tiles at a time. Rules
that show nothing outside a window of p are described in a band: for each block of queries only the `width` blocks of keys from `base` on,
so that memory is O(N / block) there, and O(tiles) elsewhere.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from .mask_base import And, Mask, Not, Or
from .masks import Blocks, Document
from .plan import target_of
from .score_mod import Program
from .windows import UNLIMITED

EMPTY, PARTIAL, FULL, UNKNOWN = 0, 1, 2, 3
HOST_PAIRS, DEVICE_PAIRS = 1 << 20, 1 << 24  # pairs looked at together: near the caches; long compared with a launch


@dataclass(frozen=True, slots=True)
class Grid:
    """Sequences cut into blocks, and the window outside which nothing is visible. Everything here is known on the host."""

    seqlen_q: int
    seqlen_k: int
    block_m: int
    block_n: int
    left: int = UNLIMITED
    right: int = UNLIMITED

    @property
    def rows(self) -> int:
        """Blocks of queries."""
        return -(-self.seqlen_q // self.block_m)

    @property
    def columns(self) -> int:
        """Blocks of keys."""
        return -(-self.seqlen_k // self.block_n)

    @property
    def offset(self) -> int:
        """Position of query 0 among the keys."""
        return self.seqlen_k - self.seqlen_q

    @property
    def banded(self) -> bool:
        return self.width < self.columns

    @property
    def width(self) -> int:
        """How many blocks of keys can meet a block of queries and the window of each query in it."""
        if UNLIMITED in (self.left, self.right):
            return self.columns
        return min(self.columns, (self.left + self.right + self.block_m + self.block_n - 2) // self.block_n + 1)

    @property
    def numbers(self) -> tuple[int, int, int, int, int, int]:
        """What `Grid` takes."""
        return self.seqlen_q, self.seqlen_k, self.block_m, self.block_n, self.left, self.right

    @property
    def shift(self) -> int:
        """How far the band's first key lies left of its first query's index; 0 where the band is everything."""
        return self.left - self.offset if self.banded else 0

    def base(self, device: torch.device) -> Tensor:
        """(rows,) int64: the first block of keys of the band of each block of queries."""
        m = torch.arange(self.rows, device=device)
        if not self.banded:
            return torch.zeros_like(m)
        first = (m * self.block_m + self.offset - self.left).div(self.block_n, rounding_mode="floor")
        return first.clamp(0, self.columns - self.width)

    def blocks(self, device: torch.device) -> Tensor:
        """(rows, width) int64: the block of keys in each place of the band."""
        return self.base(device)[:, None] + torch.arange(self.width, device=device)

    def transposed(self) -> Grid:
        """Keys in the place of queries: key j sees p from j - right to j + left, so the window's sides change places."""
        return Grid(self.seqlen_k, self.seqlen_q, self.block_n, self.block_m, self.right, self.left)


def tile_status(rule: Mask, grid: Grid, batch: int, heads: int, device: torch.device) -> Tensor:
    """EMPTY, PARTIAL or FULL for each tile in the band: uint8 (batch, heads, rows, width). `batch` and `heads` are those that differ."""
    found = known(rule, grid, device)
    status = found.status.expand(batch, heads, -1, -1).contiguous()
    if found.exact or not status.numel():
        return status
    text, captured = rule.program(grid.seqlen_q, grid.seqlen_k, device=device)
    return torch.ops.tilewise.tile_status(text, captured, status, *grid.numbers)


class Known(NamedTuple):
    """What a rule's structure says of its tiles."""

    status: Tensor  # (B or 1, H or 1, rows, width)
    exact: bool  # nothing is UNKNOWN
    whole: bool = False  # nothing is PARTIAL or UNKNOWN


def known(rule: Mask, grid: Grid, device: torch.device) -> Known:
    """What follows from the rule's structure, without reading values on the host and without its program."""
    window = rule.window()
    if window is not None:
        return Known(_of_window(*window, grid, device), exact=True)
    q_idx = torch.arange(grid.seqlen_q, device=device)
    ranges = rule.row_ranges(q_idx, (q_idx + grid.offset)[None], grid.seqlen_k)
    if ranges is not None:
        start, stop = torch.broadcast_tensors(*ranges)
        if by_operator(device):
            return Known(torch.ops.tilewise.tile_status_of_ranges(start, stop, *grid.numbers), exact=True)
        return Known(_of_ranges(start, stop, grid), exact=True)
    match rule:
        case And():
            return _combined(known(rule.first, grid, device), known(rule.second, grid, device), neutral=FULL)
        case Or():
            return _combined(known(rule.first, grid, device), known(rule.second, grid, device), neutral=EMPTY)
        case Not():
            found = known(rule.rule, grid, device)
            status = torch.where(found.status == EMPTY, FULL, torch.where(found.status == FULL, EMPTY, found.status))
            return found._replace(status=status)
        case Blocks():
            from_bits = _of_blocks(rule, grid)
            if from_bits is not None:
                return from_bits
        case Document():
            return Known(_of_documents(rule, grid), exact=False)
    return Known(torch.full((1, 1, grid.rows, grid.width), UNKNOWN, dtype=torch.uint8, device=device), exact=False)


def _combined(first: Known, second: Known, neutral: int) -> Known:
    """Of two rules. `neutral` is what changes nothing (full for `&`, empty for `|`); its opposite decides alone.

    Two partial tiles may leave nothing in common, or everything between them: that is unknown.
    """
    a, b = first.status, second.status
    decides = EMPTY if neutral == FULL else FULL
    status = torch.where((a == decides) | (b == decides), decides, UNKNOWN)
    status = torch.where(a == neutral, b, torch.where(b == neutral, a, status)).to(torch.uint8)
    exact = first.exact and second.exact and (first.whole or second.whole)
    return Known(status, exact, first.whole and second.whole)


def _of_window(left: int, right: int, grid: Grid, device: torch.device) -> Tensor:
    """Consecutive queries see overlapping intervals, so that the first and the last query of a block decide."""
    m = torch.arange(grid.rows, device=device)[:, None]
    n = grid.blocks(device)
    first = m * grid.block_m + grid.offset
    last = (m * grid.block_m + (grid.block_m - 1)).clamp(max=grid.seqlen_q - 1) + grid.offset
    start, stop = n * grid.block_n, (n * grid.block_n + grid.block_n).clamp(max=grid.seqlen_k)
    seen, all_seen = start < stop, start < stop
    if left != UNLIMITED:
        seen, all_seen = seen & (stop > first - left), all_seen & (start >= last - left)
    if right != UNLIMITED:
        seen, all_seen = seen & (start <= last + right), all_seen & (stop <= first + right + 1)
    return seen.to(torch.uint8).add_(all_seen & seen)[None, None]


def _of_ranges(start: Tensor, stop: Tensor, grid: Grid) -> Tensor:
    """From the half-open range of keys that each query sees, (B or 1, Sq) each.

    A block of keys is seen by the queries whose first block lies at or before it, without those whose last block lies before it: two
    searches in sorted lists, instead of a comparison of every query with every block.
    """
    start, stop = start.clamp(0, grid.seqlen_k), stop.clamp(0, grid.seqlen_k)
    nowhere = grid.columns + 1
    seen = start < stop
    first = torch.where(seen, start.div(grid.block_n, rounding_mode="floor"), nowhere)
    after = torch.where(seen, (stop + (grid.block_n - 1)).div(grid.block_n, rounding_mode="floor"), nowhere)
    whole = (start + (grid.block_n - 1)).div(grid.block_n, rounding_mode="floor")
    whole_stop = torch.where(stop == grid.seqlen_k, grid.columns, stop.div(grid.block_n, rounding_mode="floor"))
    has_whole = seen & (whole < whole_stop)
    whole, whole_stop = torch.where(has_whole, whole, nowhere), torch.where(has_whole, whole_stop, nowhere)

    blocks = grid.blocks(start.device).to(torch.int32).expand(start.shape[0], -1, -1).contiguous()
    padding = (0, grid.rows * grid.block_m - grid.seqlen_q)

    def at_or_before(ends: Tensor) -> Tensor:
        """How many queries of each block of queries have their end at or before each block of keys: (B or 1, rows, width)."""
        ends = torch.nn.functional.pad(ends.to(torch.int32), padding, value=nowhere).unflatten(1, (grid.rows, grid.block_m))
        return torch.searchsorted(ends.sort(2).values, blocks, right=True, out_int32=True)

    queries = torch.full((grid.rows, 1), grid.block_m, dtype=torch.int32, device=start.device)
    queries[-1:] -= padding[1]
    some = at_or_before(first) > at_or_before(after)
    every = at_or_before(whole) - at_or_before(whole_stop) == queries
    return some.to(torch.uint8).add_(every)[:, None]


def _of_blocks(rule: Blocks, grid: Grid) -> Known | None:
    """From the bits, where the rule's blocks and the grid's nest; else None."""
    size_m, size_n = rule.block_sizes
    bits = rule.bits
    if size_m % grid.block_m == 0 and size_n % grid.block_n == 0:
        m = torch.arange(grid.rows, device=bits.device)[:, None] * grid.block_m // size_m
        status = bits[:, :, m, grid.blocks(bits.device) * grid.block_n // size_n].to(torch.uint8) * FULL
        return Known(status, exact=True, whole=True)
    if grid.block_m % size_m or grid.block_n % size_n:
        return None
    down, across = grid.block_m // size_m, grid.block_n // size_n
    padding = (0, grid.columns * across - bits.shape[3], 0, grid.rows * down - bits.shape[2])

    def pooled(fill: bool) -> Tensor:
        whole = torch.nn.functional.pad(bits.to(torch.uint8), padding, value=int(fill))
        whole = whole.unflatten(3, (grid.columns, across)).unflatten(2, (grid.rows, down))
        reduced = whole.amin((3, 5)) if fill else whole.amax((3, 5))
        return reduced.gather(3, grid.blocks(bits.device).expand(*bits.shape[:2], -1, -1)) if grid.banded else reduced

    return Known(pooled(False) + pooled(True), exact=True)


def _of_documents(rule: Document, grid: Grid) -> Tensor:
    """Blocks whose numbers do not overlap share nothing; two blocks of one and the same number share everything."""
    keys = rule.ids if rule.kv_ids is None else rule.kv_ids
    if not (grid.rows and grid.columns):
        return torch.zeros(1, 1, grid.rows, grid.width, dtype=torch.uint8, device=rule.ids.device)
    q_low, q_high = (x[:, :, None] for x in ends_of_blocks(rule.ids, grid.block_m, grid.seqlen_q))
    blocks = grid.blocks(rule.ids.device)
    k_low, k_high = (x[:, blocks] for x in ends_of_blocks(keys, grid.block_n, grid.seqlen_k))
    apart = (q_high < k_low) | (k_high < q_low)
    one = (q_low == q_high) & (k_low == k_high) & (q_low == k_low)
    return torch.where(one, FULL, torch.where(apart, EMPTY, UNKNOWN)).to(torch.uint8)[:, None]


def ends_of_blocks(x: Tensor, block: int, length: int) -> tuple[Tensor, Tensor]:
    """The least and the largest number in each block of the first `length` columns of x (B, columns): (B, blocks) each."""
    # Repeating the last number pads the last block without a new one.
    index = torch.arange(-(-length // block) * block, device=x.device).clamp(max=length - 1)
    cut = x[:, index].unflatten(1, (-1, block))
    return cut.amin(2), cut.amax(2)


# ------------------------------------------------------------------------------------------------------- from the rule's program


def _evaluate(text: str, captured: list[Tensor], status: Tensor, *numbers: int) -> Tensor:
    """The status with every UNKNOWN tile looked at. A CPU looks only at these; elsewhere that would mean waiting for the device."""
    from .tile_bounds import narrowed

    grid = Grid(*numbers)
    status = narrowed(Program.parse(text), captured, status, grid)
    if status.device.type == "cpu":
        return _evaluate_unknown(text, captured, status, grid)
    if has_triton(status.device):
        from .kernels.triton.tile_status import evaluate

        with torch.cuda.device(status.device):
            return evaluate(text, captured, status.contiguous(), grid)
    return _evaluate_rows(text, captured, status, grid)


def _evaluate_unknown(text: str, captured: list[Tensor], status: Tensor, grid: Grid) -> Tensor:
    result, program = status.clone(), Program.parse(text)
    b, h, m, place = (status == UNKNOWN).nonzero(as_tuple=True)
    n = grid.base(status.device)[m] + place
    step = max(1, HOST_PAIRS // (grid.block_m * grid.block_n))
    for t in range(0, len(m), step):
        part = slice(t, t + step)
        q_idx = m[part, None, None] * grid.block_m + torch.arange(grid.block_m, device=m.device)[:, None]
        kv_idx = n[part, None, None] * grid.block_n + torch.arange(grid.block_n, device=n.device)
        env = {"b": b[part, None, None], "h": h[part, None, None], "q_idx": q_idx, "kv_idx": kv_idx, "p": q_idx + grid.offset}
        visible = program.evaluate(env, captured)
        result[b[part], h[part], m[part], place[part]] = _summary(visible, q_idx, kv_idx, grid, (1, 2))
    return result


def _evaluate_rows(text: str, captured: list[Tensor], status: Tensor, grid: Grid) -> Tensor:
    program, device = Program.parse(text), status.device
    found = torch.empty_like(status)
    batch, heads = status.shape[:2]
    b = torch.arange(batch, device=device).view(-1, 1, 1, 1, 1, 1)
    h = torch.arange(heads, device=device).view(1, -1, 1, 1, 1, 1)
    base = grid.base(device)
    columns = max(1, min(grid.width, DEVICE_PAIRS // (batch * heads * grid.block_m * grid.block_n)))
    rows = max(1, DEVICE_PAIRS // (batch * heads * grid.block_m * columns * grid.block_n))
    for m in range(0, grid.rows, rows):
        part = torch.arange(m, min(m + rows, grid.rows), device=device)
        q_idx = (part[:, None] * grid.block_m + torch.arange(grid.block_m, device=device))[:, :, None, None]
        for place in range(0, grid.width, columns):
            n = base[part, None] + torch.arange(place, min(place + columns, grid.width), device=device)
            kv_idx = (n[:, :, None] * grid.block_n + torch.arange(grid.block_n, device=device))[:, None]
            env = {"b": b, "h": h, "q_idx": q_idx, "kv_idx": kv_idx, "p": q_idx + grid.offset}
            visible = program.evaluate(env, captured)
            found[:, :, m : m + rows, place : place + columns] = _summary(visible, q_idx, kv_idx, grid, (-3, -1))
    return torch.where(status == UNKNOWN, found, status)


def _summary(visible: Tensor, q_idx: Tensor, kv_idx: Tensor, grid: Grid, dims: tuple[int, int]) -> Tensor:
    """EMPTY, PARTIAL or FULL over two dimensions; pairs beyond the lengths count neither way."""
    exists = (q_idx < grid.seqlen_q) & (kv_idx < grid.seqlen_k)
    some = (visible & exists).view(torch.uint8).amax(dims)
    return some + (visible | ~exists).view(torch.uint8).amin(dims)


# ---------------------------------------------------------------------------------------------------------------- as operators


def by_operator(device: torch.device) -> bool:
    """Whether to leave the work to an operator, which has a kernel for it. It cannot be given the wrapped tensors of functorch."""
    return device.type == "cuda" and (torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active())


@functools.cache
def has_triton(device: torch.device) -> bool:
    target = target_of(device)
    return target.type == "cuda" and (target.hip or target.capability >= (8, 0)) and find_spec("triton") is not None


def _ranges(start: Tensor, stop: Tensor, *numbers: int) -> Tensor:
    if not has_triton(start.device):
        return _of_ranges(start, stop, Grid(*numbers))
    from .kernels.triton.tile_status import of_ranges

    with torch.cuda.device(start.device):
        return of_ranges(start, stop, Grid(*numbers))


def _fake(text: str, captured: list[Tensor], status: Tensor, *numbers: int) -> Tensor:
    return torch.empty_like(status)


def _fake_ranges(start: Tensor, stop: Tensor, *numbers: int) -> Tensor:
    grid = Grid(*numbers)
    return torch.empty(start.shape[0], 1, grid.rows, grid.width, dtype=torch.uint8, device=start.device)


_library = torch.library.Library("tilewise", "FRAGMENT")
_GRID = "SymInt seqlen_q, SymInt seqlen_k, int block_m, int block_n, SymInt left, SymInt right"
_library.define(f"tile_status(str program, Tensor[] captured, Tensor status, {_GRID}) -> Tensor")
_library.impl("tile_status", _evaluate, "CompositeExplicitAutograd")
torch.library.register_fake("tilewise::tile_status", _fake, lib=_library)
_library.define(f"tile_status_of_ranges(Tensor start, Tensor stop, {_GRID}) -> Tensor")
_library.impl("tile_status_of_ranges", _ranges, "CompositeExplicitAutograd")
torch.library.register_fake("tilewise::tile_status_of_ranges", _fake_ranges, lib=_library)
