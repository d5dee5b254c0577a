"""What one step of the tiled path visits: the queries of a tile, and the keys that they are multiplied with.

Without tile lists both are one run of indices. With lists, every block of queries has runs of keys of its own. One block of one head is
little work for a dozen torch calls, so that blocks which see equally many keys stand side by side, where batch items otherwise stand.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..tile_lists import TileLists

Runs = tuple[slice, ...]  # ascending within a list of blocks, not empty


class Queries:
    """The queries of a tile: one run, or equally long runs side by side, with the keys that lists leave to each."""

    def __init__(self, runs: Runs, listed: tuple[Listed, ...] | None = None) -> None:
        self.runs, self.listed = runs, listed
        self.rows = runs[0].stop - runs[0].start

    @cached_property
    def index(self) -> Tensor:
        """int64, one after another; on the host."""
        return (torch.tensor([run.start for run in self.runs])[:, None] + torch.arange(self.rows)).flatten()

    def take(self, x: Tensor) -> Tensor:
        """These queries of x (B, H, Sq, ...): a view of one run; of several, (1, H, Sq, ...) becomes (runs, H, M, ...)."""
        if len(self.runs) == 1:
            return x[:, :, self.runs[0]]
        return x.index_select(2, self.index).unflatten(2, (len(self.runs), self.rows)).movedim(2, 1)[0]

    def put(self, x: Tensor, values: Tensor) -> None:
        """Writes what `take` reads."""
        for n, run in enumerate(self.runs):
            x[:, :, run] = values if len(self.runs) == 1 else values[n : n + 1]


class Listed(NamedTuple):
    """The keys that tile lists leave to a run of queries, those of partial tiles before those of full ones."""

    runs: Runs
    width: int
    masked: int  # how many of these keys lie in partial tiles

    def cut(self, start: int, stop: int) -> Runs:
        """The keys from number `start` to number `stop`."""
        if start == 0 and stop == self.width:
            return self.runs
        ends = list(accumulate(run.stop - run.start for run in self.runs))
        parts = ((run, max(start - end, run.start - run.stop), min(stop - end, 0)) for run, end in zip(self.runs, ends, strict=True))
        return tuple(slice(run.stop + first, run.stop + last) for run, first, last in parts if first < last)


class Keys:
    """The keys of one step: for each run of queries, runs of keys that are loaded side by side, equally many for each."""

    def __init__(self, *runs: Runs) -> None:
        self.runs = runs
        self.width = sum(run.stop - run.start for run in runs[0])

    @property
    def one_run(self) -> slice | None:
        return self.runs[0][0] if len(self.runs) == len(self.runs[0]) == 1 else None

    @cached_property
    def index(self) -> Tensor:
        """int64, one after another; on the host."""
        first, last = torch.tensor([(run.start, run.stop) for runs in self.runs for run in runs]).unbind(1)
        counts = last - first
        return torch.arange(self.width * len(self.runs)) + (last - counts.cumsum(0)).repeat_interleave(counts)

    def take(self, x: Tensor, dim: int, memory: Tensor | None = None) -> Tensor:
        """These keys along a dimension of x, those of several runs of queries side by side in its first, of size 1.

        One run is a view; others are copied to `memory`, where they lie one after another along the dimension, if it is given.
        """
        if self.one_run is not None:
            return x.narrow(dim, self.one_run.start, self.width)
        if len(self.runs) == 1:
            parts = [x.narrow(dim, run.start, run.stop - run.start) for run in self.runs[0]]
            return torch.cat(parts, dim) if memory is None else torch.cat(parts, dim, out=memory)
        taken = x.index_select(dim, self.index) if memory is None else torch.index_select(x, dim, self.index, out=memory)
        return taken.unflatten(dim, (len(self.runs), self.width)).movedim(dim, 1)[0]

    def add(self, total: Tensor, x: Tensor) -> None:
        """total[:, these] += x, for total (H, Sk, ...) and x (H, N, ...), or (runs * H, N, ...) of several runs of queries."""
        if self.one_run is not None:
            total[:, self.one_run].add_(x)
            return
        if len(self.runs) == 1:
            for _, run, place in self.spans():
                total[:, run].add_(x[:, place])
            return
        for h, own in enumerate(total):  # by rows: torch adds rows of a matrix several times as fast as slices of more dimensions
            own.index_add_(0, self.index, x[h :: len(total)].flatten(0, 1))

    def spans(self) -> Iterator[tuple[int, slice, slice]]:
        """Each run: the number of its run of queries, itself, and where it lies among the keys of that."""
        for n, runs in enumerate(self.runs):
            at = 0
            for run in runs:
                width = run.stop - run.start
                yield n, run, slice(at, at + width)
                at += width


def pieces(start: int, stop: int, size: int) -> Iterator[slice]:
    """Cuts start..stop into the fewest pieces of at most `size`, about equally long."""
    count = -(-(stop - start) // size)
    for n in range(count):
        yield slice(start + n * (stop - start) // count, start + (n + 1) * (stop - start) // count)


class Lists:
    """Tile lists as the host reads them, for some batch items and query heads together."""

    def __init__(self, lists: TileLists, items: slice, heads: slice) -> None:
        self.block_n = lists.block_n
        shared = lists.kv_num.shape[0] == 1, lists.kv_num.shape[1] == 1
        own = slice(None) if shared[0] else items, slice(None) if shared[1] else heads
        self.partial = _blocks(lists.kv_num[own], lists.kv_idx[own])
        self.full = _blocks(lists.kv_full_num[own], lists.kv_full_idx[own])

    def of(self, m: int, start: int, stop: int) -> Listed:
        """What block m of queries sees of the keys from `start` to `stop`."""
        if len(self.full) == 1:
            anywhere, everywhere = self.partial[0][m], self.full[0][m]
        else:  # what is full for one head and not for another is masked for both
            whole = set.intersection(*(set(own[m]) for own in self.full))
            anywhere, everywhere = sorted({n for own in (*self.partial, *self.full) for n in own[m]} - whole), sorted(whole)
        masked, width = self.runs(anywhere, start, stop)
        full, more = self.runs(everywhere, start, stop)
        return Listed((*masked, *full), width + more, width)

    def runs(self, blocks: list[int], start: int, stop: int) -> tuple[list[slice], int]:
        """Ascending blocks of keys as the fewest runs, and how many keys these are."""
        runs: list[slice] = []
        first = last = width = 0
        for n in (*blocks, -1):
            if n != last:
                begin, end = max(start, first * self.block_n), min(stop, last * self.block_n)
                if begin < end:
                    runs.append(slice(begin, end))
                    width += end - begin
                first = n
            last = n + 1
        return runs, width


def _blocks(number: Tensor, index: Tensor) -> list[list[list[int]]]:
    """For each item and head, the blocks of keys of each block of queries."""
    rows = zip(number.flatten(0, 1).tolist(), index.flatten(0, 1).tolist(), strict=True)
    return [[blocks[:count] for count, blocks in zip(counts, lists, strict=True)] for counts, lists in rows]
