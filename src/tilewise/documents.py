"""Documents one after the other, given as a mask rule, are packed sequences: that means the same, and no pair is masked for it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from . import tile_cache
from .block_mask import BlockMask
from .kernels.triton import MAX_HEAD_DIM
from .mask_base import And, Mask
from .masks import Document
from .windows import UNLIMITED, intersection


class Packed(NamedTuple):
    """The offsets of the documents, int32 (documents + 1,), and the window inside each."""

    offsets: Tensor
    window: tuple[int, int]


def packed_by(
    mask: Any, q: Any, k: Any, v: Any, layout: str, bias: Any, score_mod: Any, alibi_slopes: Any, dropout_p: Any, seqused_q: Any,
    seqused_k: Any, backend: Any, return_aux: Any,
) -> Packed | None:  # fmt: skip
    """What a mask says of self attention over one row, if that is documents one after the other and a window; else None.

    So are the rules of `Document.from_cu_seqlens`, alone or under `&` with rules that are a window of p, in a `BlockMask` or not. None also
    where the mask was made for other sizes or another device, which the ordinary way refuses in words, beside arguments whose meaning
    depends on what is an item, or on where in it a token lies, and where that would be slower: see `_gains`.
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
    if document is None or not all(isinstance(x, Tensor) for x in (q, k, v)) or q.ndim != 4 or q.is_nested:
        return None
    size = document.ids.shape[1]
    sequence = 1 if layout == "bshd" else 2
    if q.shape[0] != 1 or k.ndim != 4 or v.ndim != 4 or not q.shape[sequence] == k.shape[sequence] == size:
        return None
    if not _gains(q, v, backend, return_aux):
        return None
    offsets = document.offsets
    assert offsets is not None
    as_made = not isinstance(mask, BlockMask) or (
        mask.batch == mask.heads == 1 and mask.seqlen_q == mask.seqlen_k == size and not tile_cache.written_since(mask.read)
    )
    return Packed(offsets, window) if as_made and offsets.device == q.device and _unwritten(document) else None


def _gains(q: Tensor, v: Tensor, backend: Any, return_aux: Any) -> bool:
    """Whether packed sequences are faster: on a CPU, and in kernels. The tiled path on another device would look at every key for every
    tile of every sequence, and outside a window, too; it also has the derivatives that kernels have not."""
    if q.device.type == "cpu":
        return True
    asked = return_aux if isinstance(return_aux, (str, tuple, list)) else ()
    tiled = backend == "tiled" or q.dtype == torch.float64 or max(q.shape[3], v.shape[3]) > MAX_HEAD_DIM
    return not (tiled or forward_ad._current_level >= 0 or "key_mass" in asked or "entropy" in asked)


def _parts(rule: Mask) -> list[Mask]:
    return [*_parts(rule.first), *_parts(rule.second)] if isinstance(rule, And) else [rule]


def _unwritten(document: Document) -> bool:
    """Whether the rule's numbers are surely those that its offsets were made with. In a graph, which runs again after whatever is written
    between, they are only if the graph makes the rule."""
    if tile_cache.recorded(document.ids.device):
        return document.in_graph
    return not any(x.is_inference() or x._version for x in (document.ids, document.offsets) if x is not None)
