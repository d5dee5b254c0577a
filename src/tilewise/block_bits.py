"""The blocks that others list by their numbers, as bits: bool (B or 1, H or 1, blocks of queries, blocks of keys), True = visible."""

from __future__ import annotations

import torch
from torch import Tensor


def bits_of_bsr(crow_indices: Tensor, col_indices: Tensor, seqlen_q: int, seqlen_k: int, sizes: tuple[int, int]) -> Tensor:
    """From the indices of a block-sparse-row matrix: see `BlockMask.from_bsr`. Columns on a CPU are checked."""
    rows, columns = -(-seqlen_q // sizes[0]), -(-seqlen_k // sizes[1])
    _integers("from_bsr", crow_indices=crow_indices, col_indices=col_indices)
    if tuple(crow_indices.shape) != (rows + 1,):
        raise ValueError(
            f"BlockMask.from_bsr: crow_indices has shape {tuple(crow_indices.shape)}; {seqlen_q} queries in blocks of {sizes[0]} need "
            f"({rows + 1},)"
        )
    if col_indices.device.type == "cpu" and col_indices.numel():
        low, high = int(col_indices.min()), int(col_indices.max())
        if low < 0 or high >= columns:
            raise ValueError(
                f"BlockMask.from_bsr: col_indices holds numbers from {low} to {high}; {seqlen_k} keys in blocks of {sizes[1]} have the "
                f"numbers 0 to {columns - 1}"
            )
    entries = torch.arange(col_indices.shape[0], device=col_indices.device)
    row = torch.searchsorted(crow_indices[1:].to(torch.int64).contiguous(), entries, right=True)
    bits = torch.zeros(1, 1, rows, columns, dtype=torch.bool, device=col_indices.device)
    bits[0, 0, row, col_indices.long()] = True
    return bits


def bits_of_topk(indices: Tensor, seqlen_q: int, seqlen_k: int, sizes: tuple[int, int]) -> Tensor:
    """From the blocks of keys chosen for each block of queries: see `BlockMask.from_topk`. Numbers on a CPU are checked."""
    rows, columns = -(-seqlen_q // sizes[0]), -(-seqlen_k // sizes[1])
    _integers("from_topk", indices=indices)
    if indices.ndim != 4 or indices.shape[2] != rows:
        raise ValueError(
            f"BlockMask.from_topk: indices has shape {tuple(indices.shape)}; {seqlen_q} queries in blocks of {sizes[0]} need "
            f"(B or 1, H or 1, {rows}, k)"
        )
    if indices.device.type == "cpu" and indices.numel() and int(indices.max()) >= columns:
        raise ValueError(
            f"BlockMask.from_topk: indices holds {int(indices.max())}; {seqlen_k} keys in blocks of {sizes[1]} have the numbers 0 to "
            f"{columns - 1}, and -1 stands for no block"
        )
    return _chosen(torch.where(indices < 0, columns, indices), columns)


def bits_of_lists(number: Tensor, index: Tensor, rows: int, columns: int) -> Tensor:
    """From the first `rows` rows of FlexAttention's lists: of `index` (B, H, Mb, Nb) the first `number` (B, H, Mb) entries count."""
    listed = torch.arange(index.shape[3], device=index.device) < number[..., None]
    return _chosen(torch.where(listed, index, columns)[:, :, :rows], columns)


def _chosen(indices: Tensor, columns: int) -> Tensor:
    """Bits of the columns named, `columns` itself naming none."""
    bits = torch.zeros(*indices.shape[:3], columns + 1, dtype=torch.bool, device=indices.device)
    return bits.scatter_(3, indices.long(), True)[..., :columns]


def _integers(name: str, **tensors: Tensor) -> None:
    for argument, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.dtype not in (torch.int32, torch.int64):
            got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"BlockMask.{name}: {argument} is {got}; it must be a tensor of int32 or int64")
