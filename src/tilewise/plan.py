"""One call of attention, described without its Python arguments, and the choice of the kernels that serve it.

`Operands` holds the tensors, `Rules` everything else; every backend receives the same two. `select` decides which backend runs a
call and says, for each faster one, why it does not.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .errors import UnsupportedAttention

if TYPE_CHECKING:
    from .block_mask import TileLists


@dataclass(slots=True)
class Operands:
    """The tensors of one call, as (batch, heads, sequence, dim) views of what the user passed, whatever the layout was."""

    q: Tensor  # (B, Hq, Sq, D)
    k: Tensor  # (B, Hk, Sk, D)
    v: Tensor  # (B, Hk, Sk, Dv)
    bias: Tensor | None = None  # rank 4, each size 1 or that of (B, Hq, Sq, Sk)
    mask: Tensor | None = None  # bool, rank 4, sizes as bias; True = visible
    alibi_slopes: Tensor | None = None  # (B or 1, Hq), contiguous, as the next three
    sink: Tensor | None = None  # (Hq,)
    seqused_q: Tensor | None = None  # int32 (B,)
    seqused_k: Tensor | None = None  # int32 (B,)
    dropout_seed: Tensor | None = None  # int64, 0-d
    captured: tuple[Tensor, ...] = ()  # what the traced programs of `Rules` read
    blocks: TileLists | None = None  # which tiles `mask` and the mask program leave, and which they leave whole; changes no result
    # Packed sequences: q, k and v are one row, (1, H, total, D), of which sequence b owns rows [cu_seqlens[b], cu_seqlens[b + 1]). Every
    # other B then counts sequences, and the Sq and Sk of a bias or mask are the most queries and keys that a sequence may have.
    cu_seqlens_q: Tensor | None = None  # int32 (sequences + 1,)
    cu_seqlens_k: Tensor | None = None


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
    needs: frozenset[str] = frozenset()  # inputs whose gradient a backward pass may be asked for


@dataclass(slots=True)
class Saved:
    """What the forward pass leaves for the backward pass: O(N) memory."""

    out: Tensor
    lse: Tensor  # contiguous, as entropy
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
    """Preallocated gradients; None where not needed. Parameters' gradients are in the accumulator dtype, but that of a bias is
    in the bias's own where `ops.writes_bias_once` says so: one of full size (B, Hq, Sq, Sk) has nothing to add up."""

    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dbias: Tensor | None = None
    dalibi_slopes: Tensor | None = None
    dsink: Tensor | None = None
    dcaptured: list[Tensor | None] = field(default_factory=list)


@dataclass(slots=True)
class Tangents:
    """The direction of a forward-mode derivative: a tangent for each differentiable operand, None for one that stands still."""

    tq: Tensor | None = None
    tk: Tensor | None = None
    tv: Tensor | None = None
    tbias: Tensor | None = None
    talibi_slopes: Tensor | None = None
    tsink: Tensor | None = None
    tcaptured: tuple[Tensor, ...] = ()  # one a captured tensor, or none at all


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64 inputs, float32 for all others: the dtype of the softmax state, the LSE and every reduction."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# ------------------------------------------------------------------------------------------------------- which backend serves


@dataclass(frozen=True, slots=True)
class Target:
    """The device that a call runs on, or is explained for."""

    type: str  # torch device type: "cuda" (also AMD), "cpu", "xpu", "mps", "meta"
    capability: tuple[int, int] = (0, 0)  # CUDA compute capability; (0, 0) elsewhere
    name: str = ""
    hip: bool = False
    shared_memory: int = 0  # bytes that one block may use, 0 where unknown
    index: int | None = None


@functools.lru_cache(maxsize=64)
def target_of(device: torch.device) -> Target:
    """What `select` needs to know of a device; read once a device."""
    if device.type != "cuda":
        return Target(device.type)
    properties = torch.cuda.get_device_properties(device)
    return Target(
        type="cuda",
        capability=(properties.major, properties.minor),
        name=properties.name,
        hip=torch.version.hip is not None,
        shared_memory=getattr(properties, "shared_memory_per_block_optin", 0),
        index=device.index,
    )


@dataclass(frozen=True, slots=True)
class Request:
    """What else of a call decides which backend can serve it: the pass and its outputs."""

    backward: bool = False
    aux: frozenset[str] = frozenset()  # of max_logits, key_mass, entropy
    out_dtype: torch.dtype | None = None
    dlse: bool = False
    needs: frozenset[str] = frozenset()  # inputs whose gradient is asked for
    tangent: bool = False  # the forward-mode derivative of the pass


_PLAIN = Request()


@dataclass(frozen=True, slots=True)
class Plan:
    """The backend that serves a call, and why each one before it does not."""

    backend: str  # "hopper", "triton", "torch" or "tiled"
    declined: tuple[tuple[str, str], ...] = ()

    def kernels(self) -> ModuleType:
        """The module whose `forward` and `backward` run the call; imported on first use."""
        return importlib.import_module(_MODULES[self.backend])

    def tangent_kernels(self) -> ModuleType:
        """The module whose `jvp` and `backward_jvp` run the tangent of a call."""
        return importlib.import_module(_TANGENT_MODULES[self.backend])


# In order of preference. "torch" is PyTorch's own fused CPU kernel; it is never named by a user.
_MODULES = {
    "hopper": "tilewise.kernels.hopper",
    "triton": "tilewise.kernels.triton",
    "torch": "tilewise.kernels.torch_cpu",
    "tiled": "tilewise.kernels.tiled",
}
_TANGENT_MODULES = {"triton": "tilewise.kernels.triton.tangents", "tiled": "tilewise.kernels.tangents"}
_BY_DEVICE = {"cuda": ("hopper", "triton", "tiled"), "xpu": ("triton", "tiled"), "cpu": ("torch", "tiled")}
BACKENDS = ("auto", "reference", "tiled", "triton", "hopper")


def why_not(backend: str, t: Operands, r: Rules, request: Request, target: Target) -> str | None:
    """Why `backend` cannot serve a call, in words; None if it can. Reads no values, so meta tensors will do."""
    if backend == "tiled":
        return None
    if request.tangent and backend not in _TANGENT_MODULES:
        return "it has no forward-mode or second derivatives"
    for name, x in (("bias", t.bias), ("mask", t.mask)):
        if x is not None and out_of_reach(x):
            return (
                f"{name} has an inner stride of {x.stride(3)}, with which its keys lie further apart than 32-bit offsets reach: it needs 1"
            )
    module = importlib.import_module((_TANGENT_MODULES if request.tangent else _MODULES)[backend])
    return module.why_not(t, r, request, target)


def out_of_reach(x: Tensor) -> bool:
    """Whether kernels cannot reach the end of a row: along the last of four dimensions their offsets have 32 bits, along the others 64."""
    return (x.shape[3] - 1) * x.stride(3) >= 1 << 31


def select(
    t: Operands,
    r: Rules,
    backend: str = "auto",
    *,
    request: Request = _PLAIN,
    target: Target | None = None,
    warn: bool = True,
) -> Plan:
    """Chooses the backend of one call; with `warn`, says once for each reason that a GPU call falls to plain PyTorch.

    Raises:
        UnsupportedAttention: the backend that was named cannot serve the call; the message says why, and which can.
    """
    target = target_of(t.q.device) if target is None else target
    candidates = _BY_DEVICE.get(target.type, ("tiled",))
    differentiates = request.backward or request.tangent
    lends = (backend == "hopper" and differentiates) or (backend == "triton" and request.backward and bool(request.aux))
    if lends and why_not(backend, t, r, request, target) is not None:
        backend = "auto"  # these kernels differentiate less than they compute; the other gradients come from the fastest that has them
    if backend != "auto":
        reason = why_not(backend, t, r, request, target)
        if reason is not None:
            raise UnsupportedAttention(
                f"backend={backend!r} cannot serve this call on {target.name or target.type}: {reason}; use backend='auto', which serves "
                f"it with {select(t, r, request=request, target=target, warn=False).backend!r}."
            )
        return Plan(backend)
    declined = []
    for candidate in candidates:
        reason = why_not(candidate, t, r, request, target)
        if reason is None:
            break
        declined.append((candidate, reason))
    chosen = Plan(candidate, tuple(declined))
    if warn and candidate == "tiled" and target.type in ("cuda", "xpu"):
        _warn_once("; ".join(f"{name}: {reason}" for name, reason in declined))
    return chosen


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(
        f"tilewise serves this GPU call with plain PyTorch tile by tile, which is exact but slow ({reason}). "
        "tilewise.explain(...) with the same arguments shows what would make it fast.",
        stacklevel=2,
    )
