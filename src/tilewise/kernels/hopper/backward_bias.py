"""The gradient of a bias that batch items or heads share: sums of dS, which `backward_pass` adds up in float32, put in order and rounded.

The sums lie in whole blocks of scores as the threads hold them (`barriers.add_in_memory`): (heads of the bias, tiles of keys, blocks of
queries, numbers of a block).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from ..triton.launch import alignment, run, strides

if TYPE_CHECKING:
    from torch import Tensor

    from ...plan import Operands, Rules
    from .backward_configs import BackwardVariant

_RUNTIME = ["heads", "seqlen", "seqlen_k", "window_left", "window_right", "row_tiles", "row_blocks", "key_tiles"]
_RUNTIME += [f"stride_dbias_{dim}" for dim in "bhs"]


@triton.jit(do_not_specialize=_RUNTIME)
def finish_bias(
    sums_ptr, dbias_ptr, stride_dbias_b: tl.int64, stride_dbias_h: tl.int64, stride_dbias_s: tl.int64, stride_dbias_d,
    heads, seqlen, seqlen_k, window_left, window_right, row_tiles, row_blocks, key_tiles,
    ALIGN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The gradient of a bias, in its dtype, from the sums of `backward_pass.add_to_bias`; 0 in blocks of scores that a window hides, which
    have none. One program a block; `heads` and the batch items are those of the bias. ALIGN also divides the number of keys.

    A block of sums lies as its threads held it, transposed: [warp of 16 keys, 8 queries, lane, 2 rows of 8 keys, 2 queries], where four
    neighbouring lanes have 8 queries of the same keys.
    """
    tile, bh = tl.program_id(0) % (row_tiles * key_tiles), tl.program_id(0) // (row_tiles * key_tiles)
    block, keys = tile % row_tiles, tile // row_tiles
    SIZE: tl.constexpr = BLOCK_M * BLOCK_N
    start = sums_ptr + ((bh.to(tl.int64) * key_tiles + keys) * row_blocks + block) * SIZE
    row, key, shift = block * BLOCK_M, keys * BLOCK_N, seqlen_k - seqlen
    begin = tl.maximum(key - shift - window_right, 0)  # the queries that see these keys, as in `backward_walk.find_keys`
    end = tl.minimum(tl.minimum(key + BLOCK_N, seqlen_k) - shift + window_left, seqlen)
    x = tl.zeros([SIZE], tl.float32)
    if (begin < end) & (row < end) & (row + BLOCK_M > begin):
        x = tl.load(start + tl.arange(0, SIZE))
    x = tl.reshape(x, [BLOCK_N // 16, BLOCK_M // 8, 8, 4, 2, 2])
    x = tl.reshape(tl.permute(x, (1, 3, 5, 0, 4, 2)), [BLOCK_M, BLOCK_N])
    offs_m, offs_n = row + tl.arange(0, BLOCK_M), key + tl.arange(0, BLOCK_N)
    inside = (offs_m < seqlen)[:, None] & (offs_n // ALIGN < seqlen_k // ALIGN)[None, :]
    head = dbias_ptr + ((bh // heads).to(tl.int64) * stride_dbias_b + (bh % heads).to(tl.int64) * stride_dbias_h) * ALIGN
    rows = head + offs_m.to(tl.int64)[:, None] * (stride_dbias_s * ALIGN)
    tl.store(rows + offs_n[None, :] * (1 if stride_dbias_d is None else stride_dbias_d), x.to(dbias_ptr.dtype.element_ty), mask=inside)


def sums_of(t: Operands, variant: BackwardVariant, row_blocks: int) -> int:
    """How many numbers the gradient of a bias is added up in; `row_blocks`: blocks of queries of a head, with those that pad it."""
    if t.bias is None or variant.bias_gradient != "added":
        return 0
    tiles = -(-t.k.shape[2] // variant.block_n) * row_blocks
    return t.bias.shape[0] * t.bias.shape[1] * tiles * variant.block_m * variant.block_n


def stores_first(t: Operands, heads_first: bool, key_tiles: int, multiprocessors: int) -> bool:
    """Whether one launch stores the gradients of the first of the items that share a bias, so that nothing needs to be cleared, and another
    adds those of the rest: where all items visit the same blocks, and the first ones keep the device busy. Items are those of the batch
    where `heads_first`, else key heads.
    """
    if t.bias is None or t.seqused_q is not None or t.seqused_k is not None:
        return False
    batch, heads_k = t.k.shape[:2]
    apart = t.bias.shape[1] == t.q.shape[1] if heads_first else t.bias.shape[0] == batch  # others have a bias of their own
    return apart and key_tiles * (heads_k if heads_first else batch) >= multiprocessors


@dataclass(slots=True)
class BiasSums:
    """The sums, how far apart they lie for batch items and heads, and which items a launch takes: (first one, how many, stores)."""

    sums: Tensor
    stride_b: int
    stride_h: int
    shares: list[tuple[int, int, bool]]

    @staticmethod
    def of(t: Operands, variant: BackwardVariant, row_blocks: int, multiprocessors: int) -> BiasSums:
        """Sums that are cleared, or stored first."""
        assert t.bias is not None
        batch, heads = t.bias.shape[:2]
        sums = t.q.new_empty(sums_of(t, variant, row_blocks), dtype=torch.float32)
        items = t.k.shape[0 if variant.heads_first else 1]
        shares = [(0, items, False)]
        if stores_first(t, variant.heads_first, -(-t.k.shape[2] // variant.block_n), multiprocessors):
            shares = [(0, 1, True), (1, items - 1, False)][: min(items, 2)]
        else:
            sums.zero_()
        per_head = sums.numel() // (batch * heads)
        return BiasSums(sums, heads * per_head if batch > 1 else 0, per_head if heads > 1 else 0, shares)

    def finish(self, dbias: Tensor, t: Operands, r: Rules, variant: BackwardVariant, row_blocks: int) -> None:
        """Fill ``dbias``, (B or 1, Hq or 1, Sq, Sk), in its dtype."""
        batch, heads, seqlen_q, seqlen_k = dbias.shape
        align = alignment(dbias)
        align = align if seqlen_k % align == 0 else 1
        row_tiles, key_tiles = -(-seqlen_q // variant.block_m), -(-seqlen_k // variant.block_n)
        furthest = seqlen_q + seqlen_k
        cleared = t.seqused_q is not None or t.seqused_k is not None  # also what windows hide: it lies elsewhere in each item
        windows = (furthest if cleared or window < 0 else min(window, furthest) for window in (r.window_left, r.window_right))
        run(
            finish_bias, batch * heads * row_tiles * key_tiles,
            self.sums, dbias, *strides(dbias, align), heads, seqlen_q, seqlen_k, *windows, row_tiles, row_blocks, key_tiles,
            ALIGN=align, BLOCK_M=variant.block_m, BLOCK_N=variant.block_n, num_warps=8,
        )  # fmt: skip
