"""Documents that lie one after the other in a row of tokens, from their boundaries as `cu_seqlens` has them.

The first document starts with the row and the last one ends with it; a boundary that decreases counts as the largest before it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .mask_checks import integers


def numbered(cu_seqlens: Tensor, total: int) -> Tensor:
    """The document of each token: (1, total) int64, from boundaries (n + 1,)."""
    integers("Document.from_cu_seqlens", "cu_seqlens", cu_seqlens, 1, "(n + 1,)")
    tokens = torch.arange(total, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:].cummax(0).values, tokens, right=True)[None]


def offsets_of(cu_seqlens: Tensor, total: int) -> Tensor:
    """The same documents as packed sequences have them: int32 (n + 2,), as tokens from the last boundary on are one further document."""
    return pad(pad(cu_seqlens[1:], (1, 0)), (0, 1), value=total).clamp(0, total).to(torch.int32)
