"""Triton kernels for tangents: that of the forward pass, and that of the backward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import why_not as why_no_pass

if TYPE_CHECKING:
    from ....plan import Cotangents, Gradients, Operands, Outputs, Request, Rules, Saved, Tangents, Target


def why_not(t: Operands, r: Rules, request: Request, target: Target) -> str | None:
    """Why these kernels cannot serve a tangent, in words; None if they can. Reads shapes and dtypes only."""
    aux = sorted(request.aux)
    reasons = {
        f"they do not compute the tangent of {' and '.join(aux)}": bool(aux),
        "their tangents of float32 inputs take head dims to 64": t.q.element_size() == 4 and max(t.q.shape[3], t.v.shape[3]) > 64,
        "their tangents do not run score functions": bool(r.score_mod),
        "their tangents do not run mask functions": bool(r.mask_mod),
        "their tangents do not take tile lists": t.blocks is not None,
        "their tangents do not take packed sequences": t.cu_seqlens_q is not None,
        "they do not compute the tangent of the gradient of a bias of all queries and keys that batch items or heads share": (
            request.backward and "bias" in request.needs and is_shared(t)
        ),
    }
    return why_no_pass(t, r, request, target) or next((reason for reason, applies in reasons.items() if applies), None)


def is_shared(t: Operands) -> bool:
    """Whether a bias that tells all queries and keys apart holds one number for several batch items or heads."""
    return t.bias is not None and 1 not in t.bias.shape[2:] and t.bias.shape[:2] != t.q.shape[:2]


def jvp(t: Operands, r: Rules, u: Tangents, saved: Saved, tangents: Outputs) -> None:
    """Fills the tangents of out and lse; see `kernels.tangents.jvp`."""
    from .forward import jvp as run

    run(t, r, u, saved, tangents)


def backward_jvp(t: Operands, r: Rules, u: Tangents, saved: Saved, cot: Cotangents, tcot: Cotangents, tangents: Gradients) -> None:
    """Fills the tangent of every gradient that `tangents` asks for; see `kernels.tangents.backward_jvp`."""
    from .backward import backward_jvp as run

    run(t, r, u, saved, cot, tcot, tangents)
