"""Portable Triton kernels, forward and backward, for every GPU that Triton serves. Nothing here imports Triton before a call runs."""

from __future__ import annotations

import time
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ...late import imported
from . import configs

if TYPE_CHECKING:
    from ...plan import Cotangents, Gradients, Operands, Outputs, Request, Rules, Saved, Target

MAX_HEAD_DIM = 256
FIRST_IMPORT = time.time()  # of any kernel: what is read from a source that is older is what was imported


def why_not(t: Operands, r: Rules, request: Request, target: Target) -> str | None:
    """Why these kernels cannot serve a call, in words; None if they can. Reads shapes and dtypes only."""
    dims = (t.q.shape[3], t.v.shape[3])
    aux = sorted(request.aux)
    reasons = {
        "Triton is not installed (pip install triton)": find_spec("triton") is None,
        f"Triton kernels run on NVIDIA and AMD GPUs, and the tensors are on {target.type!r}": target.type != "cuda",
        f"Triton needs compute capability 8.0 or newer, and this device has {target.capability[0]}.{target.capability[1]}": (
            not target.hip and target.capability < (8, 0)
        ),
        f"the dtype is {str(t.q.dtype).removeprefix('torch.')}, and these kernels take float16, bfloat16 and float32": (
            t.q.element_size() not in (2, 4)
        ),
        f"head dims are {dims[0]} and {dims[1]}, and these kernels take 1 to {MAX_HEAD_DIM}": (
            not all(1 <= dim <= MAX_HEAD_DIM for dim in dims)
        ),
        "they add gradients of tensors that score_mod captures in the order of arrival, and deterministic=True asks for one order": (
            request.backward and r.deterministic and "captured" in request.needs and bool(r.score_mod)
        ),
        f"they do not compute the gradient of {' and '.join(aux)}": bool(aux) and request.backward,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def describe(t: Operands, r: Rules, request: Request, target: Target) -> str:
    """The tiles that would serve a call, for people."""
    arch, limit = configs.architecture(target), configs.shared_limit(target)
    bits, dims = 8 * t.q.element_size(), (configs.padded(t.q.shape[3]), configs.padded(t.v.shape[3]))
    purposes = (configs.DKDV, configs.DQ) if request.backward else (configs.FORWARD,)
    used, listed = configs.features(t, r), None if t.blocks is None else (t.blocks.block_m, t.blocks.block_n)
    chosen = {purpose: configs.choose(arch, limit, bits, purpose, used, *dims, listed) for purpose in purposes}
    return "; ".join(f"{name} {c.block_m} x {c.block_n} tiles, {c.num_warps} warps, {c.num_stages} stages" for name, c in chosen.items())


def forward(t: Operands, r: Rules, out: Outputs) -> None:
    """Fill ``out.out`` and ``out.lse``; see `plan.Outputs`."""
    imported(f"{__name__}.forward_pass").forward(t, r, out)


def backward(t: Operands, r: Rules, saved: Saved, cot: Cotangents, grads: Gradients) -> None:
    """Fill every gradient that `grads` asks for; see `plan.Gradients`."""
    imported(f"{__name__}.backward_pass").backward(t, r, saved, cot, grads)
