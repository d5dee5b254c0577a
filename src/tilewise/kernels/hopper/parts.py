"""Calls with few tiles or few queries: how their tiles are cut and filled so that the machine has work, and the merge of what they leave.

A tile is the work of one CTA, so a call with fewer tiles than multiprocessors leaves some idle. Its tiles are cut along the keys, as in
Flash-Decoding (Dao et al. 2023). A tile has 128 rows, so a call with fewer queries leaves tensor cores idle. There the queries of several
heads that share K and V make one tile. In both cases each part leaves its maximum, its denominator and its accumulator, unnormalised and in
float32, and the merge of the cache kernels adds them up. All of this follows from shapes and the number of multiprocessors alone.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from ...plan import Operands, Outputs, Rules, Target

MULTIPROCESSORS = 132  # of an H100 or H200 on SXM: for calls that are explained without a device
MOST_PARTS = 64
SHARED_BY = (1, 2, 4, 8, 16)  # heads of a tile
FEW = 4  # parts of a row that one warp adds up at once; such calls have many rows, each a program of its own
# In units of the time that a block of keys takes, some 1.5 microseconds for 128 queries, keys and columns. Estimates from sizes and rates.
EDGES = 2.0  # a part's first product and its last store, under which nothing else runs
MERGE = 6.0  # one launch more, on the host too
MERGE_A_PART = 1 / 16  # parts are read by the dozen, each time at the latency of memory
TRAFFIC = 3.0  # a wave of parts, written and read
GAIN = 0.85  # of the time of whole tiles of one head: what a cut must at least promise


class Cut(NamedTuple):
    """Into how many parts the keys of each tile go, and of how many heads it has queries. Tiles of packed sequences are whole: they write
    what they compute."""

    parts: int = 1
    heads: int = 1
    packed: bool = False

    @property
    def merged(self) -> bool:
        return not self.packed and (self.parts > 1 or self.heads > 1)


def tiles_of(rows: int, seqlen_q: int, group: int, heads: int) -> int:
    """Tiles of `rows` rows that cover all queries of a group of heads which share keys, each tile having those of `heads` of them."""
    return -(-seqlen_q // (rows // heads)) * -(-group // heads)


def fewest_tiles(rows: int, seqlen_q: int, group: int) -> int:
    """As many as there are with the best number of heads.

    >>> fewest_tiles(128, 16, 8), fewest_tiles(128, 64, 8), fewest_tiles(128, 1, 64)
    (1, 4, 4)
    """
    return min(tiles_of(rows, seqlen_q, group, heads) for heads in SHARED_BY)


@lru_cache(maxsize=4096)
def choose(rows: int, seqlen_q: int, shared: int, group: int, blocks: int, multiprocessors: int, alone: bool = False) -> Cut:
    """How to cut tiles of `rows` rows and at most `blocks` blocks of keys: what takes the least time. Each of `shared` key heads has
    `group` query heads; `alone`: these do not go into one tile. Where whole tiles fill the machine, their keys stay whole.

    >>> [choose(128, queries, shared, 1, blocks, 132).parts for queries, shared, blocks in ((128, 8, 512), (512, 16, 64), (4096, 16, 32))]
    [16, 2, 1]
    >>> [(cut.parts, cut.heads) for cut in (choose(128, 16, 4, 8, 256, 132), choose(128, 16, 256, 8, 256, 132))]
    [(32, 8), (1, 8)]
    """

    def tiles(heads: int) -> int:
        return shared * tiles_of(rows, seqlen_q, group, heads)

    def time(cut: Cut) -> float:
        parts = tiles(cut.heads) * cut.parts
        merge = MERGE + MERGE_A_PART * cut.parts + TRAFFIC * parts / multiprocessors
        return -(-parts // multiprocessors) * (-(-blocks // cut.parts) + EDGES) + (merge if cut.merged else 0.0)

    choices = [Cut(1, n) for n in (SHARED_BY[:1] if alone or group == 1 else SHARED_BY)]
    few = [cut.heads for cut in choices if tiles(cut.heads) < multiprocessors]
    choices += [Cut(parts, n) for n in few for parts in range(2, min(MOST_PARTS, blocks) + 1)]
    best = min(choices, key=time)
    return best if time(best) <= GAIN * time(Cut()) else Cut()


def heads_of_packed(group: int) -> int:
    """How many of `group` heads share a tile of packed sequences: as many as leave at most an eighth of the tiles' rows empty.

    >>> [heads_of_packed(group) for group in (1, 2, 3, 4, 6, 7, 8, 16, 32)]
    [1, 2, 1, 4, 2, 8, 8, 16, 16]
    """
    return max(heads for heads in SHARED_BY if -(-group // heads) * heads * 7 <= group * 8)


def cut_of(t: Operands, r: Rules, multiprocessors: int) -> Cut:
    """How the tiles of a call are cut. Those of block lists, a bias or a mask tensor never are, and those of packed sequences keep their
    keys whole. Where there are fewer queries than keys, some sequences may have few for many, as those that a server generates one token
    a step for: a tile of one head would be all but empty and read all keys."""
    if t.blocks is not None or t.bias is not None or t.mask is not None:
        return Cut()
    if t.cu_seqlens_q is not None:
        shared = t.q.shape[2] < t.k.shape[2] and r.dropout_p == 0
        return Cut(1, heads_of_packed(t.q.shape[1] // max(t.k.shape[1], 1)) if shared else 1, packed=True)
    from .configs import ROWS
    from .launch import tile_of

    tile = tile_of(t, r, cut=True)
    batch, heads, seqlen_q, _ = t.q.shape
    heads_k, keys = t.k.shape[1:3]
    rows = ROWS * tile.warpgroups
    if r.window_left >= 0 and r.window_right >= 0:  # no tile sees more
        keys = min(keys, r.window_left + r.window_right + rows + tile.block_n)
    # The bits of dropout are those of one head.
    return choose(rows, seqlen_q, batch * heads_k, heads // max(heads_k, 1), -(-keys // tile.block_n), multiprocessors, r.dropout_p > 0)


def multiprocessors_of(target: Target) -> int:
    """Those of a device, or of the usual one where a call is explained for a device by name."""
    from .launch import multiprocessors

    return MULTIPROCESSORS if target.index is None else multiprocessors(target.index)


def floats(t: Operands, parts: int) -> int:
    """float32 numbers that the parts of a call leave: accumulators (parts, B, H, Sq, Dv), then m and l (parts, B, H, Sq)."""
    batch, heads, seqlen_q, _ = t.q.shape
    return parts * batch * heads * seqlen_q * (t.v.shape[3] + 2)


def workspace(t: Operands, parts: int) -> Tensor:
    return torch.empty(floats(t, parts), dtype=torch.float32, device=t.q.device)


def state_offset(t: Operands, parts: int) -> int:
    """Bytes of the accumulators, behind which m and l stand."""
    batch, heads, seqlen_q, _ = t.q.shape
    return 4 * parts * batch * heads * seqlen_q * t.v.shape[3]


def merge(work: Tensor, parts: int, unit: float, out: Outputs) -> None:
    """Fill out.out and out.lse with what the parts in `work` add up to. `unit` turned scores into exponents of 2."""
    from ..triton.cache.launch import ANY_ROWS, merge_options
    from ..triton.cache.merge import MERGED_AT_ONCE, merge_parts
    from ..triton.configs import padded
    from ..triton.launch import power_of_two_at_least, run

    batch, heads, seqlen_q, dim_v = out.out.shape
    if out.out.transpose(1, 2).is_contiguous():
        items = batch
    else:  # heads before queries: each is an item of its own
        assert out.out.is_contiguous()
        items, heads = batch * heads, 1
    rows = items * heads * seqlen_q
    shape = heads, 1, seqlen_q, items * seqlen_q, items, 1, items * heads, seqlen_q, 0, ANY_ROWS  # one tile a head, which has all queries
    few = parts <= FEW
    run(
        merge_parts, rows, work, out.out, out.lse, None, *shape, parts, unit, power_of_two_at_least(unit),
        DV=dim_v, BLOCK_DV=padded(dim_v), BLOCK_M=16, SEARCH=False, BLOCK_S=FEW if few else MERGED_AT_ONCE, NATURAL=False,
        num_warps=1 if few else 4, enable_fp_fusion=True, **merge_options(work.device),
    )  # fmt: skip
