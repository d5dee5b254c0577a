"""Between padded batches and packed sequences: what `tilewise.attention_varlen` takes, made from what a batch with a padding mask has."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .checks import typed


class Packed(NamedTuple):
    """What `unpad` gives: the real tokens of a batch, and what `pad` and `attention_varlen` need to know of them."""

    values: Tensor  # (total, ...)
    indices: Tensor  # int64 (total,): where in the batch, rows counted through, each token came from
    cu_seqlens: Tensor  # int32 (B + 1,)
    max_seqlen: int  # an upper bound of the lengths: the length of the batch


def lengths(mask: Tensor) -> Tensor:
    """How many tokens of each batch item are real: int32 (B,), from a mask (B, S), bool or integers, that is not 0 where they are.

    >>> lengths(torch.tensor([[1, 1, 0], [0, 0, 1]]))
    tensor([2, 1], dtype=torch.int32)
    """
    return _real(mask).sum(1, dtype=torch.int32)


def cu_seqlens(lengths: Tensor) -> Tensor:
    """Where sequences of these lengths (B,) start and end when they are packed: int32 (B + 1,), on their device.

    >>> cu_seqlens(torch.tensor([2, 0, 1]))
    tensor([0, 2, 2, 3], dtype=torch.int32)
    """
    typed("lengths", lengths, Tensor)
    if lengths.ndim != 1 or lengths.is_floating_point() or lengths.dtype == torch.bool:
        raise ValueError(f"lengths is {lengths.dtype} of shape {tuple(lengths.shape)}; it must hold integers, (B,): one for each sequence")
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def unpad(x: Tensor, mask: Tensor, total: int | None = None) -> Packed:
    """The real tokens of a padded batch, one after the other.

    Args:
        x: ``(B, S, ...)``.
        mask: ``(B, S)``, bool or integers, not 0 where a token is real: anywhere in the row, so padding may be on either side.
        total: how many rows to make room for, at least the number of real tokens. None counts them, which waits for the device; a number
            does not, and a captured graph may be replayed with another mask. Rows to spare hold padding, and come last.

    Returns:
        `Packed`. ``values`` is differentiable.

    Example:
        >>> x, mask = torch.randn(2, 5, 4, 16), torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
        >>> p = unpad(x, mask)
        >>> out = tilewise.attention_varlen(p.values, p.values, p.values, p.cu_seqlens, p.cu_seqlens, causal=True)
        >>> pad(out, p.indices, *mask.shape).shape
        torch.Size([2, 5, 4, 16])
    """
    real = _real(mask)
    typed("x", x, Tensor)
    if x.shape[:2] != real.shape:
        raise ValueError(f"x has shape {tuple(x.shape)} and mask {tuple(mask.shape)}; the first two dimensions of x must be those of mask")
    flat = real.flatten()
    if total is None:
        indices = flat.nonzero().squeeze(1)
    elif not 0 <= total <= flat.shape[0]:
        raise ValueError(f"total is {total}; it must be between the number of real tokens and {flat.shape[0]}, all that the batch has")
    else:
        indices = (~flat).to(torch.uint8).argsort(stable=True)[:total]
    return Packed(x.flatten(0, 1).index_select(0, indices), indices, cu_seqlens(real.sum(1, dtype=torch.int32)), mask.shape[1])


def pad(values: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The batch ``(batch, seqlen, ...)`` whose tokens at `indices` (see `unpad`) are `values` ``(total, ...)``, and 0 elsewhere.

    Differentiable, and never waits for the device.

    >>> pad(torch.tensor([1.0, 2.0]), torch.tensor([0, 3]), 2, 2)
    tensor([[1., 0.],
            [0., 2.]])
    """
    typed("values", values, Tensor)
    if values.shape[0] != indices.shape[0]:
        raise ValueError(f"values has {values.shape[0]} rows and indices {indices.shape[0]}; each row needs its place")
    flat = values.new_zeros(batch * seqlen, *values.shape[1:])
    return flat.index_copy(0, indices, values).unflatten(0, (batch, seqlen))


def _real(mask: Tensor) -> Tensor:
    typed("mask", mask, Tensor)
    if mask.ndim != 2 or mask.is_floating_point():
        raise ValueError(
            f"mask is {mask.dtype} of shape {tuple(mask.shape)}; it must be bool or integers, (B, S), not 0 where a token is real"
        )
    return mask != 0


__all__ = ["Packed", "cu_seqlens", "lengths", "pad", "unpad"]
