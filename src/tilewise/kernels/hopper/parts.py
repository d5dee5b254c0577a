"""Calls with few tiles: into how many parts the key blocks of a tile are cut so that the machine is full, and the merge of the parts.

A tile is the work of one CTA, so a call with fewer tiles than multiprocessors leaves some idle. Its tiles are cut along the keys, as in
Flash-Decoding (Dao et al. 2023). Each part leaves its maximum, its denominator and its accumulator, unnormalised and in float32; the merge
of the cache kernels adds them up. How many parts there are follows from shapes and the number of multiprocessors alone.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from ...plan import Operands, Outputs, Rules, Target

MULTIPROCESSORS = 132  # of an H100 or H200 on SXM: for calls that are explained without a device
MOST = 64
# In units of the time that a block of keys takes, some 1.5 microseconds for 128 queries, keys and columns. Estimates from sizes and rates.
EDGES = 2.0  # a part's first product and its last store, under which nothing else runs
MERGE = 6.0  # one launch more, on the host too
MERGE_A_PART = 1 / 16  # parts are read by the dozen, each time at the latency of memory
TRAFFIC = 3.0  # a wave of parts, written and read
GAIN = 0.85  # of the time without parts: what a cut must at least promise


@lru_cache(maxsize=4096)
def choose(tiles: int, blocks: int, multiprocessors: int) -> int:
    """The number of parts for `tiles` tiles of at most `blocks` blocks of keys: the fewest of those that take the least time.

    >>> choose(8, 512, 132), choose(64, 64, 132), choose(100, 64, 132), choose(8, 8, 132), choose(132, 512, 132)
    (16, 2, 1, 1, 1)
    """

    def time(parts: int) -> float:
        waves = -(-tiles * parts // multiprocessors)
        merge = MERGE + MERGE_A_PART * parts + TRAFFIC * tiles * parts / multiprocessors
        return waves * (-(-blocks // parts) + EDGES) + (merge if parts > 1 else 0.0)

    if tiles >= multiprocessors:
        return 1
    best = min(range(1, min(MOST, blocks) + 1), key=time)
    return best if time(best) <= GAIN * time(1) else 1


def parts_of(t: Operands, r: Rules, multiprocessors: int) -> int:
    """The number of parts of a call, 1: it is not cut. Calls with packed sequences, block lists, a bias or a mask tensor never are."""
    if t.cu_seqlens_q is not None or t.blocks is not None or t.bias is not None or t.mask is not None:
        return 1
    from .configs import ROWS
    from .launch import tile_of

    tile = tile_of(t, r, cut=True)
    batch, heads, seqlen_q, _ = t.q.shape
    rows, keys = ROWS * tile.warpgroups, t.k.shape[2]
    if r.window_left >= 0 and r.window_right >= 0:  # no tile sees more
        keys = min(keys, r.window_left + r.window_right + rows + tile.block_n)
    return choose(-(-seqlen_q // rows) * batch * heads, -(-keys // tile.block_n), multiprocessors)


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


def strides(t: Operands) -> tuple[int, int, int]:
    """Of one part's accumulators: from one batch item, head and query to the next."""
    _, heads, seqlen_q, _ = t.q.shape
    dim_v = t.v.shape[3]
    return heads * seqlen_q * dim_v, seqlen_q * dim_v, dim_v


def merge(work: Tensor, parts: int, unit: float, out: Outputs) -> None:
    """Fill out.out and out.lse with what the parts in `work` add up to. `unit` turned scores into exponents of 2."""
    from ..triton.cache.launch import ANY_ROWS
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
    run(
        merge_parts, rows, work, out.out, out.lse, None, *shape, parts, unit, power_of_two_at_least(unit),
        DV=dim_v, BLOCK_DV=padded(dim_v), BLOCK_M=16, SEARCH=False, BLOCK_S=MERGED_AT_ONCE, NATURAL=False, num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip
