"""Documents one after the other, given as a mask rule, are packed sequences: that means the same, and no pair is masked for it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import tile_cache
from .block_mask import BlockMask
from .mask_base import And, Mask
from .masks import Document
from .windows import UNLIMITED, intersection


class Packed(NamedTuple):
    """The offsets of the documents, int32 (documents + 1,), and the window inside each."""

    offsets: Tensor
    window: tuple[int, int]


def packed_by(
    mask: Any, q: Any, k: Any, layout: str, bias: Any, score_mod: Any, alibi_slopes: Any, dropout_p: Any, seqused_q: Any, seqused_k: Any
) -> Packed | None:
    """What a mask says of self attention over one row, if that is documents one after the other and a window; else None.

    So are the rules of `Document.from_cu_seqlens`, alone or under `&` with rules that are a window of p, in a `BlockMask` or not. None also
    where the mask was made for other sizes or another device, which the ordinary way refuses in words, and beside arguments whose meaning
    depends on what is an item, or on where in it a token lies.
    """
    rule = mask.rule if isinstance(mask, BlockMask) else mask
    others = (bias, score_mod, seqused_q, seqused_k)
    if not isinstance(rule, Mask) or dropout_p != 0 or any(x is not None for x in others) or getattr(alibi_slopes, "ndim", 1) != 1:
        return None
    document, window = None, (UNLIMITED, UNLIMITED)
    for part in _parts(rule):
        inner = part.window()
        if inner is not None:
            window = intersection(window, inner)
        elif isinstance(part, Document) and part.offsets is not None and document is None:
            document = part
        else:
            return None
    if document is None or not isinstance(q, Tensor) or not isinstance(k, Tensor) or q.ndim != 4 or q.is_nested:
        return None
    size = document.ids.shape[1]
    sequence = 1 if layout == "bshd" else 2
    if q.shape[0] != 1 or k.ndim != 4 or not q.shape[sequence] == k.shape[sequence] == size:
        return None
    offsets = document.offsets
    assert offsets is not None
    as_made = not isinstance(mask, BlockMask) or (
        mask.batch == mask.heads == 1 and mask.seqlen_q == mask.seqlen_k == size and not tile_cache.written_since(mask.read)
    )
    return Packed(offsets, window) if as_made and offsets.device == q.device and not _written([offsets, document.ids]) else None


def _parts(rule: Mask) -> list[Mask]:
    return [*_parts(rule.first), *_parts(rule.second)] if isinstance(rule, And) else [rule]


def _written(tensors: list[Tensor]) -> bool:
    """Whether somebody has written to tensors that the rule made, or may have: then they need not agree any more."""
    return not torch.compiler.is_compiling() and any(x.is_inference() or x._version for x in tensors)
