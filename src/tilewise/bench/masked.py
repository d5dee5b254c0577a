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


def case_mask(name: str, seqlen: int, device: str) -> CaseMask:
    """The mask of that name: "blocks-11" (random blocks of 128, 11 % of them), "documents-16" (16 packed documents, causal).

    >>> round(case_mask("blocks-50", 1024, "cpu").density, 1)
    0.6
    """
    kind, _, amount = name.partition("-")
    return {"blocks": _blocks, "documents": _documents}[kind](int(amount), seqlen, torch.device(device))


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
    return CaseMask(lambda b, h, q_idx, kv_idx: on_device[q_idx // BLOCK, kv_idx // BLOCK], rule, bits.float().mean().item())


def _documents(documents: int, seqlen: int, device: torch.device) -> CaseMask:
    """Packed documents of uneven lengths, causal inside."""
    from ..masks import Causal, Document

    cuts = torch.randperm(seqlen - 1, generator=torch.Generator().manual_seed(0))[: documents - 1] + 1
    bounds = torch.cat([torch.tensor([0]), cuts.sort().values, torch.tensor([seqlen])])
    rule = Document.from_cu_seqlens(bounds.to(device), seqlen) & Causal()
    ids = rule.first.ids[0]  # type: ignore[attr-defined]
    lengths = bounds.diff().double()
    share = float((lengths * (lengths + 1) / 2).sum()) / seqlen**2

    def function(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (ids[q_idx] == ids[kv_idx])

    return CaseMask(function, rule, share)
