"""The tile lists of a rule that is given to a call as it is, without a `BlockMask`: where it brings them along, and where they pay."""

from __future__ import annotations

import torch

from . import tile_cache
from .block_mask import BLOCK_SIZES, BlockMask, names_of, served
from .mask_base import Mask, conjuncts, leaves
from .masks import Blocks, Dense
from .tile_lists import TileLists
from .tile_status import Grid

TILE_LISTS = 4  # of int32, that a tile may stand in: partial and full ones, by queries and by keys
MANY = 1 << 24  # pairs from which finding the tiles of a rule, some 0.2 to 2 ms of small launches, takes far less than it saves


def lists_of_given(
    rule: Mask, *, batch: int, heads: int, seqlen_q: int, seqlen_k: int, device: torch.device, ragged: bool = False
) -> TileLists | None:
    """The lists of a rule: with `Blocks` among what it combines by `&`, in tiles that its blocks are made of; of others where they pay.

    None for blocks too odd for tiles, and where lengths move the positions that the rule depends on.
    """
    sizes = [part.block_sizes for part in conjuncts(rule) if isinstance(part, Blocks)]
    if not sizes:
        return None if ragged else _lists_of_long(rule, seqlen_q, seqlen_k, device)
    if any(size % BLOCK_SIZES[0] for size in sizes[0]):
        return None
    mask = BlockMask(rule, seqlen_q, seqlen_k, batch=batch, heads=heads, block_size=served(sizes[0]), device=device)
    return None if ragged and "p" in mask.reads else mask.lists


def _lists_of_long(rule: Mask, seqlen_q: int, seqlen_k: int, device: torch.device) -> TileLists | None:
    """The lists of a rule that is more than a window, where finding them takes far less time than they save: in calls of `MANY` pairs, of
    rules that are one for all batch items and heads, and where they can be kept.

    They are kept if there are not too many tiles, and if what the rule reads is known to be what it was: tensors on a CPU are compared by
    content. Those of other devices may change without a new version (by a graph that is replayed, through ``.data``), and a rule that is
    given as it is speaks of what they hold now.
    """
    if tile_cache.watched(device) or seqlen_q * seqlen_k < MANY or rule.window() is not None:
        return None
    if rule.sizes() != (1, 1) or any(isinstance(leaf, Dense) for leaf in leaves(rule)):
        return None
    grid = Grid(seqlen_q, seqlen_k, 128, 128, *rule.implied_window())
    if 4 * TILE_LISTS * grid.rows * grid.width > tile_cache.LARGEST:
        return None
    text, captured = rule.program(seqlen_q, seqlen_k, device=device)
    if names_of(text) & {"b", "h"} or any(x.device.type != "cpu" for x in captured):
        return None
    return BlockMask(rule, seqlen_q, seqlen_k, device=device).needed
