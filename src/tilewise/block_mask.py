"""Which tiles of the score matrix a rule leaves to compute, as lists that the kernels walk instead of all tiles.

A tile is empty (no pair visible: never visited), full (every pair visible: visited without a mask) or partial (visited with the rule's
own program). The lists are derived from the rule and never change its meaning; they only spare work.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TileLists:
    """The partial and the full tiles of a call, for each block of queries (forward) and for each block of keys (backward).

    Tile (m, n) holds the queries [m block_m, (m + 1) block_m) and the keys [n block_n, (n + 1) block_n), counted from 0 in both
    sequences, cut at the lengths. All tensors are int32; B and H (query heads) are 1 where all share the lists. Indices ascend; entries
    past their number are arbitrary valid indices. The last dimension of the index tensors is as long as needed, at most the number of
    blocks. In a full tile the call's dense mask and mask program hide nothing; windows, lengths and a bias of -inf still apply.
    """

    block_m: int
    block_n: int
    kv_num: Tensor  # (B|1, H|1, Mb): how many partial tiles a block of queries has
    kv_idx: Tensor  # (B|1, H|1, Mb, <= Nb): their blocks of keys
    kv_full_num: Tensor  # the same of full tiles
    kv_full_idx: Tensor
    q_num: Tensor  # (B|1, H|1, Nb): how many partial tiles a block of keys has
    q_idx: Tensor  # (B|1, H|1, Nb, <= Mb): their blocks of queries
    q_full_num: Tensor
    q_full_idx: Tensor

    def tensors(self) -> list[Tensor]:
        """The eight tensors, in the order of the fields; `TileLists(block_m, block_n, *tensors)` takes them back."""
        return [getattr(self, field.name) for field in fields(self)[2:]]

    def to(self, device: torch.device | str) -> TileLists:
        return TileLists(self.block_m, self.block_n, *(x.to(device) for x in self.tensors()))
