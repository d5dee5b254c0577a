"""Hands a call to PyTorch's own fused CPU kernel where that kernel means the same.

The kernel is ``torch.ops.aten._scaled_dot_product_flash_attention_for_cpu``; it returns the natural-log LSE with the output. It is not
used where it was seen to differ: its causal mask is aligned top-left, it has no gradient of the LSE, a row of NaN scores shorter than one
vector register comes out as zeros, and its 16-bit backward pass keeps running sums in 16 bits, with errors of up to three times those of
eager attention. Other non-finite scores make the LSE non-finite, so they are caught there.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..plan import Cotangents, Gradients, Operands, Outputs, Request, Rules, Saved, Target
from . import tiled

MIN_KEYS = 32  # twice the float32 lanes of the widest vector register

_forward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def why_not(t: Operands, r: Rules, request: Request, target: Target) -> str | None:
    """Why torch's CPU kernel cannot serve a call with the same meaning, in words; None if it can."""
    q, k, v = t.q, t.k, t.v
    features = {
        "a bias": t.bias is not None,
        "a mask": t.mask is not None,
        "a mask function": bool(r.mask_mod),
        "a score function": bool(r.score_mod),
        "ALiBi": t.alibi_slopes is not None,
        "a sink": t.sink is not None,
        "packed sequences": t.cu_seqlens_q is not None,
        "lengths": t.seqused_q is not None or t.seqused_k is not None,
        "softcap": r.softcap > 0,
        "dropout keyed by position": r.dropout_p > 0,
        "a window": r.window_left >= 0 or r.window_right > 0,
        "causal queries that are not as many as the keys": r.window_right == 0 and q.shape[2] != k.shape[2],
        "auxiliary outputs other than lse": bool(request.aux),
        "a gradient of the LSE": request.dlse,
        "v of another head dim than q": q.shape[3] != v.shape[3],
        "an empty tensor": 0 in q.shape or 0 in v.shape,
        f"fewer than {MIN_KEYS} keys": k.shape[2] < MIN_KEYS,
        "a stride other than 1 in the head dim": any(x.stride(3) != 1 for x in (q, k, v)),
        f"{q.dtype}": q.dtype not in (torch.float32, torch.bfloat16, torch.float16),
        f"causal {q.dtype} with a scale of 0 or less": r.window_right == 0 and r.softmax_scale <= 0 and q.dtype != torch.float32,
        f"gradients in {q.dtype} as exact as eager attention's": request.backward and q.dtype != torch.float32,
        f"an output of {request.out_dtype}": request.out_dtype not in (None, q.dtype),
    }
    if target.type != "cpu":
        return f"it runs on CPUs, not on {target.type}"
    missing = [name for name, present in features.items() if present]
    return f"torch's CPU kernel does not serve {', '.join(missing)}" if missing else None


def forward(t: Operands, r: Rules, out: Outputs) -> None:
    """Fills `out.out` and `out.lse`."""
    q, scale = scaled_queries(t, r)
    o, lse = _forward_op(q, t.k, t.v, 0.0, r.window_right == 0, scale=scale)
    if not lse.isfinite().all():
        return tiled.forward(t, r, out)
    out.out.copy_(o)
    out.lse.copy_(lse)


def backward(t: Operands, r: Rules, saved: Saved, cot: Cotangents, grads: Gradients) -> None:
    """Fills dq, dk and dv where they are needed."""
    if cot.dout is None or not saved.lse.isfinite().all():
        return tiled.backward(t, r, saved, cot, grads)
    q, scale = scaled_queries(t, r)
    # The kernel reads rows of dout, and its LSE in the order (B, S, H).
    dout = cot.dout if cot.dout.stride(3) == 1 else cot.dout.contiguous()
    lse = saved.lse.transpose(1, 2).contiguous().transpose(1, 2)
    dq, dk, dv = _backward_op(dout, q, t.k, t.v, saved.out, lse, 0.0, r.window_right == 0, scale=scale)
    if grads.dq is not None:
        if q is t.q:
            grads.dq.copy_(dq)
        else:
            torch.mul(dq, r.softmax_scale, out=grads.dq)
    for grad, result in ((grads.dk, dk), (grads.dv, dv)):
        if grad is not None:
            grad.copy_(result)


def scaled_queries(t: Operands, r: Rules) -> tuple[Tensor, float]:
    """The queries and the scale to give the kernel.

    In float32 a scale that is not a positive power of two goes into q: the kernel rounds ``scale * s`` in forward and fuses it in
    backward, so that its recomputed probabilities would not sum to 1 (up to 5 times the error of eager attention), and it masks before it
    scales, which a scale of 0 or less turns into NaN. In 16-bit dtypes rounding q would cost more.
    """
    if t.q.dtype != torch.float32 or (r.softmax_scale > 0 and math.frexp(r.softmax_scale)[0] == 0.5):
        return t.q, r.softmax_scale
    return t.q * r.softmax_scale, 1.0
