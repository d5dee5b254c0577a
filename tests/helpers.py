"""Inputs, the float64 answer with its gradients, and the derived tolerance."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise import reference

DIFFERENTIABLE = ("q", "k", "v", "bias", "alibi_slopes", "learnable_sink")


def make_inputs(
    batch=2,
    seqlen_q=33,
    seqlen_k=None,
    heads=4,
    kv_heads=None,
    head_dim=16,
    head_dim_v=None,
    *,
    dtype=torch.float32,
    device="cpu",
    layout="bshd",
    scale=1.0,
) -> dict[str, Tensor]:
    """Random q, k, v by name, in the layout asked for; ``scale`` widens the scores."""
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    kv_heads = heads if kv_heads is None else kv_heads
    head_dim_v = head_dim if head_dim_v is None else head_dim_v

    def make(seqlen, count, dim):
        shape = (batch, seqlen, count, dim) if layout == "bshd" else (batch, count, seqlen, dim)
        return torch.randn(shape, device=device, dtype=torch.float32)

    q, k, v = make(seqlen_q, heads, head_dim) * scale, make(seqlen_k, kv_heads, head_dim), make(seqlen_k, kv_heads, head_dim_v)
    return {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype)}


@dataclass
class Answer:
    """Output, LSE and gradients by name, of one implementation."""

    out: Tensor
    lse: Tensor
    grads: dict[str, Tensor]


def run_on_leaves(fn, arguments, dout, dlse, leaf) -> Answer:
    given = {name: x for name, x in arguments.items() if isinstance(x, Tensor) and x.is_floating_point() and name in DIFFERENTIABLE}
    leaves = {name: leaf(x) for name, x in given.items()}
    out, lse = fn(**{**arguments, **leaves})
    loss_out, loss_grad = [out], [dout.to(out.dtype)]
    if dlse is not None:
        finite = torch.isfinite(lse)
        loss_out.append(torch.where(finite, lse, 0.0))
        loss_grad.append(dlse.to(lse.dtype))
    names = list(leaves)
    grads = torch.autograd.grad(loss_out, [leaves[n] for n in names], loss_grad, allow_unused=True)
    return Answer(
        out.detach(),
        lse.detach(),
        {n: torch.zeros_like(leaves[n]) if g is None else g for n, g in zip(names, grads, strict=True)},
    )


def reference_with_grads(arguments, dout, dlse=None, compute_dtype=torch.float64) -> Answer:
    """The answer of the specification in ``compute_dtype``. ``arguments`` are those of `tilewise.attention`, q, k and v among them."""

    def leaf(x):
        # a leaf in the compute dtype, so that no gradient is rounded to the input's
        return x.detach().to(compute_dtype).requires_grad_()

    return run_on_leaves(lambda **a: reference.attention(**a, compute_dtype=compute_dtype), arguments, dout, dlse, leaf)


def unfused_with_grads(arguments, dout, dlse=None) -> Answer:
    """The same computation without fusion in the dtype of the inputs: the yardstick of the tolerance.

    Float32 rounding happens in every operation, and 16-bit inputs round S, P and every product to 16 bits, as eager attention does.
    """
    return reference_with_grads(arguments, dout, dlse, compute_dtype=arguments["q"].dtype)


def run_with_grads(fn, arguments, dout, dlse=None) -> Answer:
    """The answer of ``fn(**arguments) -> (out, lse)``."""
    return run_on_leaves(fn, arguments, dout, dlse, lambda x: x.detach().clone(memory_format=torch.preserve_format).requires_grad_())


def assert_close_to_reference(answer: Answer, exact: Answer, unfused: Answer, factor: float = 1.5, recomputed: bool = False) -> None:
    """Each result's error against float64 is at most ``factor`` times that of the unfused computation, plus one rounding of the result.

    Errors are maxima over the tensor; the rounding, half a unit in the last place of the result's dtype, is taken at the largest magnitude
    of the exact result. Eight units of the accumulator's dtype come on top: sums in another order. Infinite LSEs must agree exactly.

    With `recomputed`, gradients are of probabilities recomputed from the LSE that was saved: its own rounding, half a unit in the last
    place, is a relative error of each of them that the unfused computation, which keeps its probabilities, does not have.
    """
    finite = exact.lse[torch.isfinite(exact.lse)].abs()
    saved = torch.finfo(answer.lse.dtype).eps / 2 * (finite.max().item() if recomputed and finite.numel() else 0.0)
    parts = [("out", answer.out, exact.out, unfused.out), ("lse", answer.lse, exact.lse, unfused.lse)]
    parts += [(f"d{name}", answer.grads[name], exact.grads[name], unfused.grads[name]) for name in exact.grads]
    for name, got, want, eager in parts:
        assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
        if not want.numel():
            continue
        infinite = torch.isinf(want)
        assert torch.equal(got[infinite].double(), want[infinite].double()), f"{name}: infinities differ"
        got, want, eager = (torch.where(infinite, 0.0, x.double()) for x in (got, want, eager))
        assert torch.isfinite(got).all(), f"{name}: not finite"
        error, allowed = (got - want).abs().max().item(), (eager - want).abs().max().item()
        dtype = answer.grads.get(name[1:], answer.out).dtype if name != "lse" else answer.lse.dtype
        size = max(want.abs().max().item(), 1e-3)
        bound = factor * allowed + torch.finfo(dtype).eps / 2 * size + 8 * torch.finfo(answer.lse.dtype).eps * size
        bound += saved * size if name not in ("out", "lse") else 0.0
        assert error <= bound, f"{name}: error {error:.3e} against float64, unfused has {allowed:.3e}, bound {bound:.3e}"
