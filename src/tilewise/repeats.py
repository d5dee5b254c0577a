"""Calls of `attention` that come again: found by one look-up, checked, chosen and launched as they were the first time.

In training and serving the same call comes on every step with other numbers in its tensors. Validation, the choice of kernels and the
arguments of their launches follow from what `key_of` puts together; `kernels.replay` keeps what they led to. Only calls whose tensors are
q, k and v are looked for, on CUDA devices, and only where nothing watches, transforms or traces: all others go the ordinary way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from . import derivatives
from .kernels.replay import Passes
from .ops import DIFFERENTIABLE, FORWARD_ARGS, float32_precision_allows_tf32, run_backward, run_forward

MOST = 1024  # calls kept at a time
_PLAIN = (Tensor, torch.nn.Parameter)
_STRIDED = torch.strided
known: dict[tuple[Any, ...], Repeated] = {}


def key_of(
    q: Any,
    k: Any,
    v: Any,
    causal: Any,
    window_size: Any,
    softmax_scale: Any,
    softcap: Any,
    dropout_p: Any,
    deterministic: Any,
    layout: Any,
    backend: Any,
    out_dtype: Any,
    check_values: Any,
    return_aux: Any,
) -> tuple[Any, ...] | None:
    """All that a call with these arguments and no other ones follows from, apart from what q, k and v hold and where they lie. None where
    it must go the ordinary way. Values that are equal but of another type are not the same: some of them are errors."""
    if torch.compiler.is_compiling() or type(q) not in _PLAIN or type(k) not in _PLAIN or type(v) not in _PLAIN:
        return None
    if not (q.is_cuda and k.is_cuda and v.is_cuda) or q.is_nested or k.is_nested or v.is_nested:
        return None
    if q.layout is not _STRIDED or k.layout is not _STRIDED or v.layout is not _STRIDED:
        return None
    if type(window_size) is not tuple or len(window_size) != 2 or type(window_size[0]) is not int or type(window_size[1]) is not int:
        return None
    if not (softmax_scale is None or type(softmax_scale) is float) or type(softcap) is not float:
        return None
    if type(causal) is not bool or not (deterministic is None or type(deterministic) is bool):
        return None
    if type(dropout_p) is not float or dropout_p != 0.0 or check_values is not False or (return_aux != () and return_aux != "lse"):
        return None
    if type(layout) is not str or type(backend) is not str or backend == "reference":
        return None
    if not (out_dtype is None or type(out_dtype) is torch.dtype):
        return None
    if derivatives.watched() or forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        return None
    if torch.is_autocast_enabled("cuda"):
        return None
    return (
        q.dtype, k.dtype, v.dtype, q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(),
        q.get_device(), k.get_device(), v.get_device(), causal, window_size, softmax_scale, softcap,
        torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic,
        layout, backend, out_dtype, return_aux, q.dtype is torch.float32 and float32_precision_allows_tf32(),
    )  # fmt: skip


def remember(key: tuple[Any, ...], arguments: dict[str, Any]) -> Repeated:
    """The call of a key from now on; `arguments` are those of the forward operator."""
    if len(known) >= MOST:
        known.clear()
    found = known[key] = Repeated(arguments)
    return found


class Repeated:
    """One call, with the arguments of its operator but q, k and v, and the passes that it has led to."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = {name: x for name, x in arguments.items() if name not in ("q", "k", "v")}
        self.allow_tf32 = float32_precision_allows_tf32()
        self.passes = Passes()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Sequence[Tensor]:
        """(out, lse)"""
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            return _Differentiable.apply(self, q, k, v)
        return self.forward(q, k, v)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Sequence[Tensor]:
        return self.passes.run("forward", (q, k, v), lambda: run_forward({**self.arguments, "q": q, "k": k, "v": v})[:2])  # type: ignore[arg-type, return-value]

    def backward(self, saved: Sequence[Tensor], dout: Tensor | None, dlse: Tensor | None, needs: Sequence[bool]) -> list[Tensor | None]:
        """The gradients of q, k and v, None where they are not needed."""
        if dout is None and dlse is None:
            return [None] * 3
        names = dict(zip(("q", "k", "v", "out", "lse"), saved, strict=True))
        args = {**self.arguments, **names, "entropy": None, "allow_tf32": self.allow_tf32}
        cotangents = {"dout": dout, "dlse": dlse, "dkey_mass": None, "dentropy": None}
        given = [*saved, *(x for x in (dout, dlse) if x is not None)]
        if not derivatives.ordinary() or not all(type(x) in _PLAIN and x.is_cuda for x in given):
            needed = {**dict.fromkeys(FORWARD_ARGS, False), **dict(zip("qkv", needs, strict=True)), "captured": [], "blocks": []}
            grads = derivatives.FORWARD.vjp(args, (dout, dlse, None, None, None), needed)
            return [grads.get(name) for name in ("q", "k", "v")]
        key = (dout is None, dlse is None, *needs, *[(x.dtype, x.shape, x.stride(), x.get_device()) for x in given])

        def compute() -> list[Tensor]:
            all_needs = [*needs, *[False] * (len(DIFFERENTIABLE) - 3)]
            return run_backward({**cotangents, **derivatives.common_arguments(args), "needs": all_needs})

        computed = iter(self.passes.run(key, given, compute))
        return [next(computed) if needed else None for needed in needs]


class _Differentiable(torch.autograd.Function):
    """A repeated call under autograd."""

    @staticmethod
    def forward(ctx: Any, call: Repeated, q: Tensor, k: Tensor, v: Tensor) -> Any:
        out, lse = call.forward(q, k, v)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = call
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        return None, *ctx.call.backward(ctx.saved_tensors, dout, dlse, ctx.needs_input_grad[1:])
