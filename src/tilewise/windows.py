"""Windows in the query's position p: (left, right) lets through the keys p - left <= j <= p + right, -1 being unlimited."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .mask_base import Pair

UNLIMITED = -1


def window_predicate(left: int, right: int, at: Pair) -> Any:
    """p - left <= j <= p + right, -1 being unlimited."""
    if left == UNLIMITED and right == UNLIMITED:
        return at.kv_idx >= 0
    if right == UNLIMITED:
        return at.kv_idx >= at.p - left
    if left == UNLIMITED:
        return at.kv_idx <= at.p + right
    return (at.kv_idx >= at.p - left) & (at.kv_idx <= at.p + right)


def window_ranges(left: int, right: int, p: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor]:
    """The half-open range of keys that each query sees through a window."""
    start = torch.zeros_like(p) if left == UNLIMITED else p - left
    return start, torch.full_like(p, seqlen_k) if right == UNLIMITED else p + right + 1


def intersection(first: tuple[int, int], second: tuple[int, int]) -> tuple[int, int]:
    """The window that both let through."""
    return tuple(max(a, b) if UNLIMITED in (a, b) else min(a, b) for a, b in zip(first, second, strict=True))  # type: ignore[return-value]


def hull(first: tuple[int, int], second: tuple[int, int]) -> tuple[int, int]:
    """The least window that has both in it."""
    return tuple(UNLIMITED if UNLIMITED in (a, b) else max(a, b) for a, b in zip(first, second, strict=True))  # type: ignore[return-value]
