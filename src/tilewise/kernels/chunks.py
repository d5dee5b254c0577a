"""How the tiled path cuts a call into pieces: chunks of batch and heads, tiles of queries and keys, and what is hidden in each.

No arithmetic of attention is here. What does not depend on values is decided on the host; where values decide (masks, lengths), a CPU
looks at them and skips what is hidden, and other devices, which would have to wait for it, mask instead.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..plan import Operands, Rules, accumulator_dtype
from .steps import Keys, Listed, Lists, Queries, pieces

if TYPE_CHECKING:
    from ..score_mod import Memory

NEG_INF = float("-inf")
TAME = 2.0**30


class TileSizes(NamedTuple):
    """Rows and columns of a score tile, and how many scores all heads of one step may have together."""

    block_m: int
    block_n: int
    scores: int


class Place(NamedTuple):
    """Where the call that is cut stands in the user's: its first batch item and query, as numbers or as tensors of one element."""

    item: int | Tensor = 0
    query: int | Tensor = 0
    lengths: tuple[Tensor, Tensor] | None = None  # (1, 1, 1, 1): queries from `query` on, and keys, where the host must not read them


@dataclass(slots=True)
class Chunk:
    """Some batch items and some key heads (with the query heads that read them), visited together.

    B, H, M, N: sizes of a tile. B counts batch items, or the runs of queries of one item that stand side by side: see `steps`.
    """

    t: Operands
    r: Rules
    b: slice
    kv_heads: slice
    heads: slice  # query heads
    group: int  # query heads of one key head
    own_keys: bool  # each query head gets its own copy of a key tile, because what is hidden differs between heads
    len_q: int
    len_k: int
    lengths: tuple[Tensor, Tensor] | None  # (B, 1, 1, 1): the true lengths where the host must not read them, else None
    host: bool  # the host may read values without waiting for a device
    tiles: TileSizes
    dtype: torch.dtype
    tame: bool  # no product can be infinite or NaN: see `tame`
    place: Place
    buffers: dict[tuple[str, torch.dtype], Tensor] = field(default_factory=dict)
    memory: Memory | None = None  # of the score function's results

    @property
    def offset(self) -> int | Tensor:
        """Position of query 0 among the keys."""
        return self.len_k - self.len_q if self.lengths is None else self.lengths[1] - self.lengths[0]

    def arange(self, part: slice) -> Tensor:
        return torch.arange(part.start, part.stop, device=self.t.q.device)

    def rows(self, i: Queries) -> Tensor:
        """(1 or B, 1, M, 1)."""
        index = self.arange(i.runs[0]) if len(i.runs) == 1 else i.index
        return index.view(len(i.runs), 1, -1, 1)

    def columns(self, j: Keys) -> Tensor:
        """(1 or B, 1, 1, N)."""
        index = j.index if j.one_run is None else self.arange(j.one_run)
        return index.view(len(j.runs), 1, 1, -1)

    def take(self, x: Tensor, i: Queries) -> Tensor:
        """The queries of a tile, of x (B, Hq, Sq, ...): a view of one run."""
        return i.take(x[self.b, self.heads])

    def put(self, x: Tensor, i: Queries, values: Tensor) -> None:
        """Writes what `take` reads."""
        i.put(x[self.b, self.heads], values)

    def part(self, x: Tensor, *index: slice) -> Tensor:
        """The piece of a broadcast (B, Hq, ...) tensor that belongs to these batch items, these heads and `index`: a view."""
        wanted = (self.b, self.heads, *index)
        return x[tuple(s if size != 1 else slice(None) for s, size in zip(wanted, x.shape, strict=False))]

    def add_to_keys(self, total: Tensor, j: Keys, values: Tensor) -> None:
        """total[b, h, j] += values (B, H, N), for total (B, Hq, Sk)."""
        for b, own in enumerate(total[self.b, self.heads]):
            j.add(own, values[b] if len(j.runs) == 1 else values.flatten(0, 1))

    def tile(self, x: Tensor, i: Queries, j: Keys) -> Tensor:
        """The piece of a broadcast (B, Hq, Sq, Sk) tensor that belongs to a tile."""
        rows = [self.part(x, run) for run in i.runs]
        if x.shape[3] > 1:
            rows = [Keys(runs).take(own, 3) for own, runs in zip(rows, j.runs, strict=True)]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def buffer(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Uninitialised memory that every step uses again: fresh pages for each tile would cost more than the arithmetic on it."""
        key, size = (name, dtype or self.dtype), math.prod(shape)
        if key not in self.buffers or self.buffers[key].numel() < size:
            self.buffers[key] = torch.empty(size, dtype=key[1], device=self.t.q.device)
        return self.buffers[key][:size].view(shape)

    def per_head(self, x: Tensor) -> Tensor:
        """(C, R, n) as the matrix products see it -> (B, H, M, n)."""
        heads = self.heads.stop - self.heads.start
        batch = x.shape[0] * (1 if self.own_keys else self.group) // heads
        return x.view(batch, heads, x.shape[0] * x.shape[1] // (batch * heads), x.shape[2])

    def per_key_tile(self, x: Tensor) -> Tensor:
        """(B, H, M, n) -> (C, R, n): the rows of all query heads that multiply one copy of a key tile stand together."""
        batch, heads, rows, width = x.shape
        fold = 1 if self.own_keys else self.group
        return x.reshape(batch * heads // fold, fold * rows, width)


def tame(t: Operands, r: Rules, dout: Tensor | None = None) -> bool:
    """Whether all factors are far from the range's ends, as far as the host may know.

    Then no score or dP is infinite or NaN, and what a bias of -inf hides needs no selecting away: its probability is 0 of itself, and 0
    times what it meets is 0. Else the bias must be searched for -inf, at the price of a tenth of the pass. A score function may make
    anything of -inf.
    """
    if t.bias is None or r.score_mod or abs(r.softmax_scale) > TAME or not host_reads(t.q.device):
        return False
    factors = [x for x in (t.q, t.k, t.v, dout, t.alibi_slopes) if x is not None and x.numel()]
    return all(bool(x.amax() < TAME) and bool(x.amin() > -TAME) for x in factors)


def host_reads(device: torch.device) -> bool:
    """Whether the host may read a tensor's values without waiting for a device."""
    return device.type == "cpu"


def chunks(t: Operands, r: Rules, limit: TileSizes, place: Place = Place(), tame: bool = False) -> Iterator[Chunk]:
    """Cuts batch and heads so that one step has about `limit.scores` scores."""
    batch, heads, seqlen_q, _ = t.q.shape
    kv_heads, seqlen_k = t.k.shape[1:3]
    if batch == 0 or heads == 0:
        return
    group = heads // kv_heads
    host = host_reads(t.q.device)
    used = [None if x is None else x.long().clamp(0, n) for x, n in ((t.seqused_q, seqlen_q), (t.seqused_k, seqlen_k))]
    ragged = any(x is not None for x in used)

    lists = t.blocks if host else None  # elsewhere reading them would mean waiting
    rows = limit.block_m if r.window_left < 0 else limit.block_m // 2  # a step at each end of a window has about as many hidden keys
    block_m = max(1, min(rows, seqlen_q, max(16, limit.scores // (group * limit.block_n))))
    block_n = max(1, min(seqlen_k, max(limit.block_n, min(16 * limit.block_n, limit.block_m * limit.block_n // block_m))))
    if lists is not None:
        block_m, block_n = min(block_m, lists.block_m), 2 * limit.block_n
    together = max(1, limit.scores // (group * block_m * block_n))  # key heads of a step, of one batch item or of several
    step_h = min(kv_heads, together)
    step_b = 1 if (ragged and host) or step_h < kv_heads else max(1, together // kv_heads)
    if lists is not None:  # only what shares a list is visited together, and query heads of one key head
        step_h = 1 if lists.kv_num.shape[1] > 1 else step_h
        step_b = 1 if lists.kv_num.shape[0] > 1 or step_h < kv_heads else step_b
        block_n = max(block_n, limit.scores // (step_h * group * block_m))  # of one head, all keys of a block are often one step

    by_head = (t.mask is not None and t.mask.shape[1] > 1) or (t.bias is not None and t.bias.shape[1] > 1)
    own_keys = group > 1 and (by_head or bool(r.score_mod) or bool(r.mask_mod))
    for b in pieces(0, batch, step_b):
        len_q, len_k, lengths = seqlen_q, seqlen_k, place.lengths
        if ragged and host:
            len_q, len_k = (n if x is None else int(x[b.start]) for x, n in zip(used, (seqlen_q, seqlen_k), strict=True))
        elif ragged:
            full = (torch.full_like(next(x for x in used if x is not None), n) for n in (seqlen_q, seqlen_k))
            own_q, own_k = ((y if x is None else x)[b].view(-1, 1, 1, 1) for x, y in zip(used, full, strict=True))
            lengths = (own_q, own_k)
        for kv in pieces(0, kv_heads, step_h):
            yield Chunk(
                t=t,
                r=r,
                b=b,
                kv_heads=kv,
                heads=slice(kv.start * group, kv.stop * group),
                group=group,
                own_keys=own_keys,
                len_q=len_q,
                len_k=len_k,
                lengths=lengths,
                host=host,
                tiles=TileSizes(block_m, block_n, limit.scores),
                dtype=accumulator_dtype(t.q.dtype),
                tame=tame,
                memory=memory_of_programs() if r.score_mod else None,
                place=place,
            )


def query_tiles(c: Chunk) -> Iterator[Queries]:
    """The queries in use, cut into tiles; with tile lists each lies in blocks of queries that see equally many keys."""
    lists = c.t.blocks if c.host else None
    if lists is None:
        yield from (Queries((run,)) for run in pieces(0, c.len_q, c.tiles.block_m))
        return
    listed, equal = Lists(lists, c.b, c.heads), defaultdict[tuple[int, int], list[tuple[slice, Listed]]](list)
    for m in range(-(-c.len_q // lists.block_m)):
        for run in pieces(m * lists.block_m, min((m + 1) * lists.block_m, c.len_q), c.tiles.block_m):
            keys = listed.of(m, *key_range(c, run))
            equal[run.stop - run.start, keys.width].append((run, keys))
    tiles = []
    for (rows, width), members in equal.items():
        scores = (c.heads.stop - c.heads.start) * rows * max(1, min(width, c.tiles.block_n))
        together = max(1, c.tiles.scores // scores) if c.b.stop - c.b.start == 1 else 1
        for part in pieces(0, len(members), together):
            runs, keys = zip(*members[part], strict=True)
            tiles.append((scores * len(runs), Queries(runs, keys)))
    yield from (tile for _, tile in sorted(tiles, key=lambda tile: -tile[0]))  # the largest first, so that no buffer has to grow


# ------------------------------------------------------------------------------------------------------------ what is visible


def key_range(c: Chunk, run: slice) -> tuple[int, int]:
    """The keys inside the window of some query of a run, as far as the host knows the lengths."""
    start, stop = 0, c.len_k
    if c.lengths is None:
        if c.r.window_left >= 0:
            start = max(start, run.start + c.offset - c.r.window_left)
        if c.r.window_right >= 0:
            stop = min(stop, run.stop + c.offset + c.r.window_right)
    return start, max(start, stop)


def key_tiles(c: Chunk, i: Queries) -> Iterator[tuple[Keys, Tensor | None]]:
    """The key tiles that some query of tile `i` may see, each with what is hidden in it: bool, broadcasts to (B, H, M, N), or None."""
    if i.listed is None:
        steps = ((Keys((run,)), True) for run in pieces(*key_range(c, i.runs[0]), c.tiles.block_n))
    else:
        partial = max(own.masked for own in i.listed)
        cuts = (*pieces(0, partial, c.tiles.block_n), *pieces(partial, i.listed[0].width, c.tiles.block_n))
        steps = ((Keys(*(own.cut(cut.start, cut.stop) for own in i.listed)), cut.start < partial) for cut in cuts)
    for j, masked in steps:
        hidden = None
        for condition in hiding_conditions(c, i, j, masked):
            if not c.host or condition.view(torch.uint8).amax():
                hidden = condition if hidden is None else hidden | condition
        if hidden is None or not c.host or not hidden.view(torch.uint8).amin():
            yield j, hidden


def hiding_conditions(c: Chunk, i: Queries, j: Keys, masked: bool) -> Iterator[Tensor]:
    """Every reason why a score of tile (i, j) may be hidden, apart from what `score_mod` decides, and from the mask unless `masked`."""
    t, r = c.t, c.r
    # Distance of the tile's corners from the diagonal; with lengths on the device nothing is known and all conditions apply.
    known = c.lengths is None
    corners = list(
        zip(i.runs, (min(x.start for x in runs) for runs in j.runs), (max(x.stop for x in runs) for runs in j.runs), strict=True)
    )
    if r.window_right >= 0 and not (known and all(last - 1 <= run.start + c.offset + r.window_right for run, _, last in corners)):
        yield c.columns(j) > c.rows(i) + c.offset + r.window_right
    if r.window_left >= 0 and not (known and all(first >= run.stop - 1 + c.offset - r.window_left for run, first, _ in corners)):
        yield c.columns(j) < c.rows(i) + c.offset - r.window_left
    if c.lengths is not None:
        len_q, len_k = c.lengths
        yield (c.rows(i) >= len_q) | (c.columns(j) >= len_k)
    if t.mask is not None and masked:
        yield ~c.tile(t.mask, i, j)
    if t.bias is not None:
        bias = c.tile(t.bias, i, j)
        if not c.host or bias_hides(c, bias):
            yield bias == NEG_INF
    if r.mask_mod and masked:
        yield ~program(r.mask_mod).evaluate(indices(c, i, j), t.captured)


def bias_hides(c: Chunk, bias: Tensor) -> bool:
    """Whether a tile of the bias has a -inf of which the host must know; for tame factors, whether it seems to hide the whole tile."""
    if c.tame:
        corners = bias[..., :: max(1, bias.shape[2] - 1), :: max(1, bias.shape[3] - 1)]
        if corners.amax() > NEG_INF:
            return False
    return not bool(bias.amin() > NEG_INF)  # the minimum costs a fraction of the comparison


def memory_of_programs() -> Memory:
    from ..score_mod import Memory  # few calls have one

    return Memory()


def program(text: str) -> Any:
    from ..score_mod import Program  # few calls have one

    return Program.parse(text)


def indices(c: Chunk, i: Queries, j: Keys) -> dict[str, Tensor]:
    """What a traced program reads: batch item, query head, query, key and position, each broadcasting to (B, H, M, N)."""
    rows = c.rows(i)
    return {
        "b": c.arange(c.b).view(-1, 1, 1, 1) + c.place.item,
        "h": c.arange(c.heads).view(1, -1, 1, 1),
        "q_idx": rows + c.place.query,
        "kv_idx": c.columns(j),
        "p": rows + c.offset,
    }


def distances(c: Chunk, i: Queries, j: Keys) -> Tensor:
    """|p - j|, broadcasts to (B, H, M, N)."""
    return (c.rows(i) + c.offset - c.columns(j)).abs_().to(c.dtype)
