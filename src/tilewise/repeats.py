"""Calls that come again: found by one look-up, checked, chosen and launched as they were the first time.

In training and serving the same call comes on every step with other numbers in its tensors. Validation, the choice of kernels and the
arguments of their launches follow from what a key holds; `kernels.replay` keeps what they led to. Keys are made for calls on CUDA devices
whose tensors are all arguments of their own, and only where nothing watches, transforms or traces: all others go the ordinary way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from . import derivatives
from .kernels.replay import Passes
from .ops import DIFFERENTIABLE, FORWARD_ARGS, float32_precision_allows_tf32, run_backward, run_forward

MOST = 512  # calls kept at a time
_PLAIN = (Tensor, torch.nn.Parameter)
_STRIDED, _FLOAT32 = torch.strided, torch.float32
_SIMPLE = frozenset((bool, int, float, str, type(None), torch.dtype))
# The operands that a call with a key may have, by their names in the operators.
OPERANDS = ("q", "k", "v", "bias", "mask", "alibi_slopes", "sink", "seqused_q", "seqused_k")
_NO_MORE = (None,) * (len(OPERANDS) - 3)
known: dict[tuple[Any, ...], Repeated] = {}


def key_of(
    tensors: Sequence[Any], rules: Sequence[Any], window_size: Any, deterministic: Any, excluded: Sequence[Any], return_aux: Any
) -> tuple[Any, ...] | None:
    """All that a call with these tensors, rules and window follows from, torch's settings included, apart from what its tensors hold and
    where they lie. None where it must go the ordinary way, also where anything of `excluded` is not 0 or False. Values that are equal but
    of another type are not the same, for some of them are errors."""
    if torch.compiler.is_compiling() or type(window_size) is not tuple or len(window_size) != 2:
        return None
    values = (*rules, *window_size, deterministic, *excluded)
    kinds = tuple(map(type, values))
    if not _SIMPLE.issuperset(kinds) or any(excluded) or (return_aux != () and return_aux != "lse"):
        return None
    if derivatives.watched() or forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        return None
    if torch.is_autocast_enabled("cuda"):
        return None
    if tensors[0] is None or tensors[1] is None or tensors[2] is None:
        return None
    layouts: list[Any] = []
    for x in tensors:
        if x is None:
            layouts.append(None)
        elif type(x) in _PLAIN and x.is_cuda and x.layout is _STRIDED and not (x.is_nested or x.is_neg()):
            layouts.append((x.dtype, x.shape, x.stride(), x.get_device()))
        else:
            return None
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    tf32 = tensors[0].dtype is _FLOAT32 and float32_precision_allows_tf32()
    return (*layouts, values, kinds, deterministic, return_aux, tf32)


def remember(key: tuple[Any, ...], arguments: dict[str, Any]) -> Repeated:
    """The call of a key from now on; `arguments` are those of the forward operator."""
    if len(known) >= MOST:
        known.clear()
    found = known[key] = Repeated(arguments)
    return found


def over_a_cache(key: tuple[Any, ...], tensors: Sequence[Any], compute: Callable[[], tuple[Tensor, Tensor]]) -> Sequence[Tensor]:
    """(out, lse) of a call over a cache, as `compute` gives them: the arguments of `kvcache.attention_with_kvcache` that are tensors.

    Values may lie in the memory of the keys, as the latent vectors of MLA do: then one address stands for both.
    """
    k_cache, v_cache, new_k = tensors[1:4]
    given = [x for x in tensors if x is not None]
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        return compute()  # which refuses it in words
    together = k_cache.data_ptr() == v_cache.data_ptr()
    results = _over_caches.run((together, *key), [x for x in given if not (together and x is v_cache)], compute)
    if new_k is not None:  # written in place, and not by an operator of torch
        torch.autograd.graph.increment_version([k_cache, v_cache])
    return results


_over_caches = Passes(MOST)


class Repeated:
    """One call of `attention`: the arguments of its operator but `OPERANDS`, and the passes that it has led to. Operands are in that order,
    None where there is none."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = {name: x for name, x in arguments.items() if name not in OPERANDS}
        self.allow_tf32 = float32_precision_allows_tf32()
        self.passes = Passes()

    def __call__(self, *operands: Tensor | None) -> Sequence[Tensor]:
        """out, lse, and perhaps more that nobody asked for."""
        if torch.is_grad_enabled():
            q, k, v, *others = operands
            for x in others:
                if x is not None and x.requires_grad:
                    return derivatives.attention_forward(**self._named(operands))
            if q.requires_grad or k.requires_grad or v.requires_grad:  # type: ignore[union-attr]
                return _Differentiable.apply(self, *operands)
        return self.forward(operands)

    def forward(self, operands: Sequence[Tensor | None]) -> Sequence[Tensor]:
        given = [x for x in operands if x is not None]
        return self.passes.run("forward", given, lambda: run_forward(self._named(operands))[:2])  # type: ignore[arg-type, return-value]

    def backward(self, saved: Sequence[Tensor | None], arrived: Sequence[Tensor | None], needs: Sequence[bool]) -> Sequence[Tensor | None]:
        """The gradients of q, k and v, None where they are not needed. `saved` are out, lse and the operands, or what hooks made of them;
        `arrived` the gradients of out and lse."""
        if arrived[0] is None and arrived[1] is None:
            return [None] * 3
        given = [x for x in (*saved, *arrived) if x is not None]
        layouts = [(x.dtype, x.shape, x.stride(), x.get_device()) for x in given if type(x) in _PLAIN and x.is_cuda and not x.is_neg()]
        if len(layouts) < len(given) or not derivatives.ordinary():
            return self._differentiable_backward(saved, arrived, needs)
        key = (arrived[0] is None, arrived[1] is None, needs, *layouts)
        computed = iter(self.passes.run(key, given, lambda: self._backward(saved, arrived, needs)))
        return [next(computed) if needed else None for needed in needs]

    def _named(self, operands: Sequence[Tensor | None]) -> dict[str, Any]:
        return {**self.arguments, **dict(zip(OPERANDS, operands, strict=True))}

    def _kept(self, saved: Sequence[Tensor | None]) -> dict[str, Any]:
        """The arguments of the forward operator and its results."""
        out, lse, *operands = saved
        return {**self._named(operands), "out": out, "lse": lse, "entropy": None, "allow_tf32": self.allow_tf32}

    def _backward(self, saved: Sequence[Tensor | None], arrived: Sequence[Tensor | None], needs: Sequence[bool]) -> list[Tensor]:
        cotangents = {"dout": arrived[0], "dlse": arrived[1], "dkey_mass": None, "dentropy": None}
        all_needs = [*needs, *[False] * (len(DIFFERENTIABLE) - len(needs))]
        return run_backward({**cotangents, **derivatives.common_arguments(self._kept(saved)), "needs": all_needs})

    def _differentiable_backward(
        self, saved: Sequence[Tensor | None], arrived: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        needed = {**dict.fromkeys(FORWARD_ARGS, False), **dict(zip("qkv", needs, strict=True)), "captured": [], "blocks": []}
        grads = derivatives.FORWARD.vjp(self._kept(saved), (*arrived, None, None, None), needed)
        return [grads.get(name) for name in ("q", "k", "v")]


class _Differentiable(torch.autograd.Function):
    """A repeated call under autograd, with gradients of q, k and v."""

    @staticmethod
    def forward(ctx: Any, call: Repeated, *operands: Tensor | None) -> Any:
        out, lse = call.forward(operands)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(out, lse, *operands)
        ctx.call = call
        return out, lse

    @staticmethod
    def backward(ctx: Any, *arrived: Tensor | None) -> Any:
        return None, *ctx.call.backward(ctx.saved_tensors, arrived, ctx.needs_input_grad[1:4]), *_NO_MORE
