"""Triton kernels over a cache, for every GPU that Triton serves. Nothing here imports Triton before a call runs."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from ....kvcache.call import AppendOperands, CacheOperands, CacheRules
    from ....plan import Target

MAX_HEAD_DIM, MAX_HEAD_DIM_V = 640, 512


def why_not(t: CacheOperands, r: CacheRules, target: Target) -> str | None:
    """Why these kernels cannot read the cache, in words; None if they can. Reads shapes and dtypes only."""
    reason = _device_reason(target)
    if reason is not None:
        return reason
    if t.q.element_size() not in (2, 4):
        return f"the dtype is {str(t.q.dtype).removeprefix('torch.')}, and these kernels take float16, bfloat16 and float32"
    if t.k_cache.element_size() == 1 and (target.hip or target.capability < (8, 9)):
        return "the cache is float8_e4m3fn, which needs an NVIDIA GPU of compute capability 8.9 or newer"
    dim, dim_v = t.q.shape[3], t.v_cache.shape[3]
    if not (1 <= dim <= MAX_HEAD_DIM and 1 <= dim_v <= MAX_HEAD_DIM_V):
        return f"head dims are {dim} and {dim_v}, and these kernels take up to {MAX_HEAD_DIM} and {MAX_HEAD_DIM_V}"
    from .launch import planned, signature

    if planned(signature(t, r)) is None:
        return f"head dims {dim} and {dim_v} in {t.q.dtype} need more shared memory than {target.name} has"
    return None


def why_not_append(t: AppendOperands, target: Target) -> str | None:
    """Why these kernels cannot write the cache; None if they can."""
    reason = _device_reason(target)
    if reason is None and t.k.element_size() not in (2, 4):
        reason = f"the dtype is {str(t.k.dtype).removeprefix('torch.')}, and these kernels take float16, bfloat16 and float32"
    return reason


def _device_reason(target: Target) -> str | None:
    if find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    if target.type != "cuda":
        return f"Triton kernels run on NVIDIA and AMD GPUs, and the tensors are on {target.type!r}"
    if not target.hip and target.capability < (8, 0):
        return f"Triton needs compute capability 8.0 or newer, and this device has {target.capability[0]}.{target.capability[1]}"
    return None


def attention(t: CacheOperands, r: CacheRules, out: Tensor, lse: Tensor) -> None:
    """Fill out (B, Sq, Hq, Dv) and lse (B, Hq, Sq); packed: (1, total, Hq, Dv) and (Hq, total)."""
    from .decode import attention as run
    from .launch import planned, signature

    calls = planned(signature(t, r))
    assert calls is not None  # `why_not` has asked
    run(t, r, out, lse, calls)


def append(t: AppendOperands) -> None:
    """Write new keys and values into their slots."""
    from .appending import append as run

    run(t)
