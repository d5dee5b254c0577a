"""What rules check of their numbers and tensors, each in one sentence: the rule, the field, what was given, what it must be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .checks import WIDEST

if TYPE_CHECKING:
    from .mask_base import Mask


def whole_number(rule: Mask, name: str, least: int, note: str = "") -> None:
    """Checks a field of a rule; what is wider than any sequence becomes the widest."""
    value = checked_number(type(rule).__name__, name, getattr(rule, name), least, note)
    if value > WIDEST:
        object.__setattr__(rule, name, WIDEST)


def checked_number(rule: str, name: str, value: Any, least: int, note: str = "") -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{rule}: {name} is {value!r} of type {type(value).__name__}; it must be an int")
    if value < least:
        raise ValueError(f"{rule}: {name} is {value}; it must be at least {least}{note}")
    return value


def integers(rule: str, name: str, value: Any, rank: int, shape: str) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{rule}: {name} is {type(value).__name__}; it must be an integer tensor {shape}")
    if value.dtype == torch.bool or value.dtype.is_floating_point or value.dtype.is_complex:
        raise TypeError(f"{rule}: {name} has dtype {value.dtype}; it must be an integer tensor {shape}")
    if value.ndim != rank:
        raise ValueError(f"{rule}: {name} has shape {tuple(value.shape)}; it must be {shape}")


def booleans(rule: str, name: str, value: Any) -> None:
    if not isinstance(value, Tensor) or value.dtype != torch.bool:
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{rule}: {name} is {got}; it must be a torch.bool tensor, True = visible")


def per_batch(rule: str, tensor: Tensor, batch: int | None) -> None:
    if batch is not None and tensor.shape[0] not in (1, batch):
        raise ValueError(f"{rule}: a tensor of shape {tuple(tensor.shape)} serves {tensor.shape[0]} batch items; the batch has {batch}")


def per_head(rule: str, tensor: Tensor, heads: int | None) -> None:
    if heads is not None and tensor.shape[1] not in (1, heads):
        raise ValueError(f"{rule}: a tensor of shape {tuple(tensor.shape)} serves {tensor.shape[1]} heads; there are {heads} query heads")
