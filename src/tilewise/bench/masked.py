"""The masks of benchmark cases: each as a function of indices, which every provider and the check can read, and as a rule of ours."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

BLOCK = 128


class CaseMask(NamedTuple):
    """One mask on one device."""

    function: Callable[..., Any]  # (b, h, q_idx, kv_idx) -> bool, indices of a square problem
    rule: Any  # the same as a rule of tilewise.masks
    density: float  # share of visible pairs
    offsets: Tensor | None = None  # int32 (documents + 1,): where packed documents start and end
    key_offsets: Tensor | None = None  # likewise of their keys, where these are not the same tokens
    bits: Tensor | None = None  # bool (1, 1, blocks, blocks) of a block mask


def case_mask(name: str, seqlen: int, device: str) -> CaseMask:
    """The mask of that name: "blocks-11" (random blocks of 128, 11 % of them), "documents-16" (16 packed documents, causal), "lengths-16"
    (likewise, of the lengths that `document_lengths` draws), "serving-64" (prefills beside 64 decodes, `serving_lengths`; causal).

    >>> round(case_mask("blocks-50", 1024, "cpu").density, 1)
    0.6
    """
    kind, _, amount = name.partition("-")
    return {"blocks": _blocks, "documents": _documents, "lengths": _lengths, "serving": _serving}[kind](
        int(amount), seqlen, torch.device(device)
    )


def density(name: str, seqlen: int) -> float:
    """The share of visible pairs; computed once."""
    return _density(name, seqlen)


@lru_cache(maxsize=64)
def _density(name: str, seqlen: int) -> float:
    return case_mask(name, seqlen, "cpu").density


def _blocks(percent: int, seqlen: int, device: torch.device) -> CaseMask:
    """Every block with the same probability, and those on the diagonal, so that each query sees a key."""
    from ..masks import Blocks

    count = -(-seqlen // BLOCK)
    bits = torch.rand(count, count, generator=torch.Generator().manual_seed(0)) < percent / 100
    bits |= torch.eye(count, dtype=torch.bool)
    on_device = bits.to(device)
    rule = Blocks(on_device[None, None], BLOCK)
    share = bits.float().mean().item()
    return CaseMask(lambda b, h, q_idx, kv_idx: on_device[q_idx // BLOCK, kv_idx // BLOCK], rule, share, bits=on_device[None, None])


def document_lengths(documents: int) -> list[int]:
    """Lengths of 64 to 4,095 tokens, each as likely as the others."""
    return torch.randint(64, 4096, (documents,), generator=torch.Generator().manual_seed(1)).tolist()


def serving_lengths(decodes: int) -> tuple[list[int], list[int]]:
    """The queries and the keys of each request in a step of a serving engine: eight prompts of 512 to 4,096 tokens, and single queries over
    8,192 keys that are there."""
    prompts = [512, 1024, 2048, 4096] * 2
    return prompts + [1] * decodes, prompts + [8192] * decodes


def _serving(decodes: int, seqlen: int, device: torch.device) -> CaseMask:
    lengths = [torch.tensor(x, device=device) for x in serving_lengths(decodes)]
    offsets, key_offsets = (torch.nn.functional.pad(x.cumsum(0), (1, 0)) for x in lengths)
    seen = (lengths[1] * lengths[0] - lengths[0] * (lengths[0] - 1) // 2).double().sum()

    def function(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        own, its = (torch.searchsorted(x, i.contiguous(), right=True) for x, i in ((offsets, q_idx), (key_offsets, kv_idx)))
        return (own == its) & (key_offsets[own] - kv_idx >= offsets[own] - q_idx)

    share = float(seen / (offsets[-1] * key_offsets[-1]))
    return CaseMask(function, None, share, offsets.to(torch.int32), key_offsets.to(torch.int32))


def _lengths(documents: int, seqlen: int, device: torch.device) -> CaseMask:
    """Those lengths where they fill the problem; else in proportion."""
    ends = torch.tensor([0, *document_lengths(documents)]).cumsum(0)
    return _packed(ends * seqlen // ends[-1], seqlen, device)


def _documents(documents: int, seqlen: int, device: torch.device) -> CaseMask:
    """Packed documents of uneven lengths, causal inside."""
    cuts = torch.randperm(seqlen - 1, generator=torch.Generator().manual_seed(0))[: documents - 1] + 1
    return _packed(torch.cat([torch.tensor([0]), cuts.sort().values, torch.tensor([seqlen])]), seqlen, device)


def _packed(bounds: Tensor, seqlen: int, device: torch.device) -> CaseMask:
    from ..masks import Causal, Document

    rule = Document.from_cu_seqlens(bounds.to(device), seqlen) & Causal()
    ids = rule.first.ids[0]  # type: ignore[attr-defined]
    lengths = bounds.diff().double()
    share = float((lengths * (lengths + 1) / 2).sum()) / seqlen**2

    def function(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (ids[q_idx] == ids[kv_idx])

    return CaseMask(function, rule, share, bounds.to(device, torch.int32))
