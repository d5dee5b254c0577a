"""Padded batches to packed tokens and back: the helpers of `flash_attn.bert_padding`, differentiable on any device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """Rows ``indices`` ``(n,)`` of x ``(N, ...)``.

    >>> index_first_axis(torch.arange(8).view(4, 2), torch.tensor([3, 0])).tolist()
    [[6, 7], [0, 1]]
    """
    return x.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """``(first_axis_dim, ...)``: zeros, with row i of values ``(n, ...)`` at ``indices[i]``.

    >>> index_put_first_axis(torch.ones(2, 1), torch.tensor([3, 0]), 4).flatten().tolist()
    [1.0, 0.0, 0.0, 1.0]
    """
    return values.new_zeros((first_axis_dim, *values.shape[1:])).index_copy(0, indices, values)


def index_first_axis_residual(x: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """`index_first_axis` and x itself, detached.

    >>> rows, all_rows = index_first_axis_residual(torch.eye(3), torch.tensor([1]))
    >>> rows.shape, all_rows.shape
    (torch.Size([1, 3]), torch.Size([3, 3]))
    """
    return index_first_axis(x, indices), x.detach()


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Keeps the real tokens of a padded batch. Reads the count on the host: a synchronisation on a GPU.

    Args:
        hidden_states: ``(B, S, ...)``.
        attention_mask: ``(B, S)`` bool or integer, 1 = real.
        unused_mask: ``(B, S)``, 1 = a place to keep though it is not real: it is packed, but not counted in ``seqused``.

    Returns:
        tokens ``(total, ...)``, their flat indices ``(total,)``, cu_seqlens int32 ``(B + 1,)``, the longest length, and seqused int32
        ``(B,)``, the real tokens of each item.

    Example:
        >>> tokens, indices, cu_seqlens, longest, used = unpad_input(torch.randn(2, 3, 4), torch.tensor([[1, 1, 0], [1, 1, 1]]))
        >>> tokens.shape, cu_seqlens.tolist(), longest
        (torch.Size([5, 4]), [0, 2, 5], 3)
    """
    _same_places("unpad_input", "attention_mask", attention_mask, hidden_states)
    if unused_mask is not None:
        _same_places("unpad_input", "unused_mask", unused_mask, hidden_states)
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    indices, cu_seqlens, longest = _layout(kept, kept.sum(-1, dtype=torch.int32))
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest, attention_mask.sum(-1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(hidden_states: Tensor, attention_mask_in_length: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """`unpad_input` of rows that hold several sequences each.

    Args:
        hidden_states: ``(B, S, ...)``.
        attention_mask_in_length: ``(B, S)`` integers: the lengths of the sequences of each row, one after the other, then zeros.

    Returns:
        tokens, flat indices, cu_seqlens with one sequence for each length, and the longest length.

    Example:
        >>> lengths = torch.tensor([[2, 1, 0, 0], [3, 0, 0, 0]])
        >>> tokens, indices, cu_seqlens, longest = unpad_input_for_concatenated_sequences(torch.randn(2, 4, 8), lengths)
        >>> indices.tolist(), cu_seqlens.tolist(), longest
        ([0, 1, 2, 4, 5, 6], [0, 2, 3, 6], 3)
    """
    _same_places("unpad_input_for_concatenated_sequences", "attention_mask_in_length", attention_mask_in_length, hidden_states)
    places = torch.arange(attention_mask_in_length.shape[-1], device=attention_mask_in_length.device)
    kept = places < attention_mask_in_length.sum(-1, keepdim=True)
    lengths = attention_mask_in_length[attention_mask_in_length > 0].to(torch.int32)
    indices, cu_seqlens, longest = _layout(kept, lengths)
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of `unpad_input`: ``(batch, seqlen, ...)`` with tokens ``(total, ...)`` at their flat ``indices`` and zeros elsewhere.

    >>> pad_input(torch.ones(3, 1), torch.tensor([0, 1, 3]), 2, 2)[..., 0].tolist()
    [[1.0, 1.0], [0.0, 1.0]]
    """
    if indices.shape[0] > batch * seqlen:
        raise ValueError(f"pad_input has {indices.shape[0]} tokens for {batch} rows of {seqlen}; give the batch and seqlen they came from")
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def _same_places(function: str, name: str, mask: Tensor, hidden_states: Tensor) -> None:
    if mask.shape != hidden_states.shape[:2]:
        raise ValueError(
            f"{function}: {name} has shape {tuple(mask.shape)} and hidden_states {tuple(hidden_states.shape)}; it must be (B, S) = "
            f"{tuple(hidden_states.shape[:2])}"
        )


def _layout(kept: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, int]:
    """Flat indices of the tokens kept, offsets of the sequences, and the longest length."""
    indices = torch.nonzero(kept.flatten()).flatten()
    cu_seqlens = F.pad(torch.cumsum(lengths, 0, dtype=torch.int32), (1, 0))
    return indices, cu_seqlens, int(lengths.max()) if lengths.numel() else 0
