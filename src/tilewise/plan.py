"""One call of attention, described without its Python arguments, and the choice of the kernels that serve it.

`Operands` holds the tensors, `Rules` everything else; every backend receives the same two. `select` decides which backend runs a
call and says, for each faster one, why it does not.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class Operands:
    """The tensors of one call, as (batch, heads, sequence, dim) views of what the user passed, whatever the layout was."""

    q: Tensor  # (B, Hq, Sq, D)
    k: Tensor  # (B, Hk, Sk, D)
    v: Tensor  # (B, Hk, Sk, Dv)
    bias: Tensor | None = None  # rank 4, each size 1 or that of (B, Hq, Sq, Sk)
    mask: Tensor | None = None  # bool, rank 4, sizes as bias; True = visible
    alibi_slopes: Tensor | None = None  # (B or 1, Hq)
    sink: Tensor | None = None  # (Hq,)
    seqused_q: Tensor | None = None  # int32 (B,)
    seqused_k: Tensor | None = None  # int32 (B,)
    dropout_seed: Tensor | None = None  # int64, 0-d
    captured: tuple[Tensor, ...] = ()  # what the traced programs of `Rules` read


@dataclass(frozen=True, slots=True)
class Rules:
    """What one call computes, apart from its tensors. `causal` is a window whose right end is 0."""

    softmax_scale: float
    softcap: float = 0.0  # 0: none
    window_left: int = -1  # -1: unlimited
    window_right: int = -1
    dropout_p: float = 0.0
    allow_tf32: bool = False
    deterministic: bool = False
    score_mod: str = ""  # text of a traced program, "": none
    mask_mod: str = ""


@dataclass(slots=True)
class Outputs:
    """Preallocated results of a forward pass; what was not asked for is None."""

    out: Tensor  # (B, Hq, Sq, Dv) view
    lse: Tensor  # (B, Hq, Sq), contiguous, accumulator dtype
    max_logits: Tensor | None = None  # (Hq,)
    key_mass: Tensor | None = None  # (B, Hq, Sk)
    entropy: Tensor | None = None  # (B, Hq, Sq)


@dataclass(slots=True)
class Saved:
    """What the forward pass leaves for the backward pass: O(N) memory."""

    out: Tensor
    lse: Tensor
    entropy: Tensor | None = None


@dataclass(slots=True)
class Cotangents:
    """Gradients of the loss with respect to the outputs; None where none arrived."""

    dout: Tensor | None = None
    dlse: Tensor | None = None
    dkey_mass: Tensor | None = None
    dentropy: Tensor | None = None


@dataclass(slots=True)
class Gradients:
    """Preallocated gradients; None where not needed. Parameters' gradients are in the accumulator dtype."""

    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dbias: Tensor | None = None
    dalibi_slopes: Tensor | None = None
    dsink: Tensor | None = None
    dcaptured: list[Tensor | None] = field(default_factory=list)


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64 inputs, float32 for all others: the dtype of the softmax state, the LSE and every reduction."""
    return torch.float64 if dtype == torch.float64 else torch.float32
