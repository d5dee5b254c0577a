"""What `compat.flex.create_block_mask` returns: a `tilewise.BlockMask` that answers to the names of torch's as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torchs

from ..block_mask import BlockMask as TilewiseBlockMask
from ..masks import Custom
from ..tile_status import FULL, PARTIAL

# Attributes and methods of torch's mask, in torch's meaning.
_OF_TORCH = (
    "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "q_indices", "full_q_num_blocks",
    "full_q_indices", "seq_lengths", "BLOCK_SIZE", "as_tuple", "numel", "sparsity", "to_dense", "to_string", "_adjust",
)  # fmt: skip


class BlockMask(TilewiseBlockMask):
    """A `tilewise.BlockMask` with what `torch.nn.attention.flex_attention.BlockMask` can be asked: `mask[:, :, i]`, `mask_mod`,
    `kv_num_blocks` and the other lists, `sparsity()`, `to_dense()`.

    What takes a part of it gives a mask of torch's, which `flex_attention` takes as it takes this one. So a decoding step may be written
    as it is for torch. Lists are made when asked for; items and heads that the function does not tell apart share them.

    >>> from tilewise.compat.flex import create_block_mask
    >>> mask = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 256, 256, device="cpu")
    >>> mask.shape, mask.sparsity(), mask.kv_num_blocks.tolist()
    ((1, 1, 256, 256), 25.0, [[[1, 1]]])
    >>> row = mask[:, :, 1]
    >>> row.mask_mod, row.seq_lengths = mask.mask_mod, (1, 256)
    """

    from_kv_blocks = staticmethod(torchs.BlockMask.from_kv_blocks)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, Q_LEN, KV_LEN), in tokens as in torch."""
        return self.batch, self.heads, self.seqlen_q, self.seqlen_k

    @property
    def mask_mod(self) -> Callable[..., Any]:
        """The function that the mask was made of."""
        if not isinstance(self.rule, Custom):
            raise AttributeError("mask_mod")
        return self.rule.function

    def as_torch(self) -> torchs.BlockMask:
        """The same mask as torch's own; O(tiles) memory."""
        status = self.status()
        (partial, partial_at), (full, full_at) = _lists(status == PARTIAL), _lists(status == FULL)
        sizes, lengths = self.block_size, (self.seqlen_q, self.seqlen_k)
        return torchs.BlockMask.from_kv_blocks(partial, partial_at, full, full_at, sizes, self.mask_mod, lengths)

    def __getitem__(self, index: Any) -> torchs.BlockMask:
        return self.as_torch()[index]

    def __getattr__(self, name: str) -> Any:
        if name not in _OF_TORCH:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.as_torch(), name)


def _lists(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """How many tiles of each row of (..., Mb, Nb) are True, and the columns of these before those of the others; int32."""
    columns = torch.sort(tiles.to(torch.uint8), dim=-1, descending=True, stable=True).indices
    return tiles.sum(-1, dtype=torch.int32), columns.to(torch.int32)
