"""How the four operators differentiate each other, and how they behave under every transform of PyTorch.

Attention f maps operands x to outputs. ``attention_backward`` is J(x)^T w, and two operators more close the circle: ``attention_jvp`` is J(x) u,
the tangent of the outputs, and ``attention_backward_jvp`` the tangent of J(x)^T w. Each one's derivatives are then calls of the others:

    operator               reverse mode                                         forward mode
    attention_forward      attention_backward                                   attention_jvp
    attention_backward     attention_jvp (in w), attention_backward_jvp (in x)  attention_backward_jvp
    attention_jvp          attention_backward (in u), attention_backward_jvp    refused
    attention_backward_jvp refused                                              refused

The first formula of each row is registered with the operator, which is what autograd, torch.compile and export use. Forward mode and the
transforms of torch.func do not look there, and an operator without a rule gives them a zero tangent without a word; for them the same
formulas are a `torch.autograd.Function`, and `call` takes whichever is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from . import plan
from .ops import (
    BACKWARD_ARGS,
    DIFFERENTIABLE,
    FORWARD_ARGS,
    OPERAND_SCHEMA,
    OPERANDS,
    RULE_SCHEMA,
    RULES,
    GradientBuffers,
    allocate_outputs,
    backward_request,
    cotangents,
    float32_precision_allows_tf32,
    gradients_fake,
    heads_first,
    library,
    operands,
    rank2,
    rank4,
    rules,
    saved,
    vmap,
    wanted_aux,
)
from .plan import Outputs, Request, Tangents

COTANGENTS = ("dout", "dlse", "dkey_mass", "dentropy")
TANGENTS = tuple(f"t{name}" for name in DIFFERENTIABLE)
_SAVED = ("out", "lse", "entropy")
JVP_ARGS = (*TANGENTS, "tcaptured", *_SAVED, *OPERANDS, *RULES, "allow_tf32", "aux")
BACKWARD_JVP_ARGS = (
    *(*COTANGENTS, *(f"t{name}" for name in COTANGENTS), *TANGENTS, "tcaptured"),
    *(*_SAVED, *OPERANDS, *RULES, "allow_tf32", "needs"),
)

_DIRECTION_SCHEMA = "Tensor? tq, Tensor? tk, Tensor? tv, Tensor? tbias, Tensor? talibi_slopes, Tensor? tsink, Tensor[] tcaptured"
_SAVED_SCHEMA = "Tensor out, Tensor lse, Tensor entropy"
library.define(
    f"attention_jvp({_DIRECTION_SCHEMA}, {_SAVED_SCHEMA}, {OPERAND_SCHEMA}, {RULE_SCHEMA}, bool? allow_tf32, str aux) "
    "-> (Tensor tout, Tensor tlse, Tensor tkey_mass, Tensor tentropy)",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
library.define(
    "attention_backward_jvp(Tensor? dout, Tensor? dlse, Tensor? dkey_mass, Tensor? dentropy, "
    "Tensor? tdout, Tensor? tdlse, Tensor? tdkey_mass, Tensor? tdentropy, "
    f"{_DIRECTION_SCHEMA}, {_SAVED_SCHEMA}, {OPERAND_SCHEMA}, {RULE_SCHEMA}, bool? allow_tf32, bool[] needs) -> Tensor[]",
    tags=(torch.Tag.needs_fixed_stride_order,),
)


# ------------------------------------------------------------------------------------------------------------ the two operators


def _allow_tf32(args: dict[str, Any]) -> bool:
    """What the call in question was made with; torch's setting where that call is being made now."""
    chosen = args.get("allow_tf32")
    return float32_precision_allows_tf32() if chosen is None else chosen


def _direction(args: dict[str, Any]) -> Tangents:
    tq, tk, tv = (None if args[name] is None else heads_first(args[name], args["layout"]) for name in ("tq", "tk", "tv"))
    return Tangents(tq, tk, tv, rank4(args["tbias"]), rank2(args["talibi_slopes"]), args["tsink"], tuple(args["tcaptured"]))


def _jvp_outputs(args: dict[str, Any]) -> list[Tensor]:
    out, lse, _, key_mass, entropy = allocate_outputs(args | {"out_dtype": args["out"].dtype})
    return [out, lse, key_mass, entropy]


def _jvp(*flat: Any) -> tuple[Tensor, ...]:
    args = dict(zip(JVP_ARGS, flat, strict=True))
    t, r, u = operands(args), rules(args, _allow_tf32(args)), _direction(args)
    wanted = wanted_aux(args["aux"])
    results = _jvp_outputs(args)
    tout, tlse, tkey_mass, tentropy = results
    tangents = Outputs(
        heads_first(tout, args["layout"]),
        tlse,
        key_mass=tkey_mass if "key_mass" in wanted else None,
        entropy=tentropy if "entropy" in wanted else None,
    )
    request = Request(aux=wanted, out_dtype=args["out"].dtype, tangent=True)
    plan.select(t, r, args["backend"], request=request).tangent_kernels().jvp(t, r, u, saved(args), tangents)
    return tuple(results)


def _jvp_fake(*flat: Any) -> tuple[Tensor, ...]:
    return tuple(_jvp_outputs(dict(zip(JVP_ARGS, flat, strict=True))))


def _backward_jvp(*flat: Any) -> list[Tensor]:
    args = dict(zip(BACKWARD_JVP_ARGS, flat, strict=True))
    t, r, u = operands(args), rules(args, _allow_tf32(args)), _direction(args)
    buffers = GradientBuffers(args)
    request = replace(backward_request(args), tangent=True)
    kernels = plan.select(t, r, args["backend"], request=request).tangent_kernels()
    kernels.backward_jvp(t, r, u, saved(args), cotangents(args), cotangents(args, "td"), buffers.grads)
    return buffers.finished()


def _backward_jvp_fake(*flat: Any) -> list[Tensor]:
    return gradients_fake(dict(zip(BACKWARD_JVP_ARGS, flat, strict=True)))


# --------------------------------------------------------------------------------------------------------------- the formulas
# Each takes the operator's arguments by name and, for the forward operator, what it returned.

Named = dict[str, Any]


def _present(values: Sequence[Tensor | None], likes: Sequence[Tensor]) -> list[Tensor]:
    """A tangent for every captured tensor, where any has one: zeros of no memory for the others."""
    if all(x is None for x in values):
        return []
    return [like.new_zeros(()).expand(like.shape) if x is None else x for x, like in zip(values, likes, strict=True)]


def _operand_needs(needed: Named) -> list[bool]:
    return [bool(needed[name]) for name in DIFFERENTIABLE] + [bool(x) for x in needed["captured"]]


def _by_name(grads: Sequence[Tensor], needs: list[bool], prefix: str = "") -> Named:
    """What a backward op returned, by the names of the operands; captured tensors' as a list."""
    queue = iter(grads)
    spread = [next(queue) if needed else None for needed in needs]
    named: Named = {prefix + name: x for name, x in zip(DIFFERENTIABLE, spread, strict=False)}
    return named | {prefix + "captured": spread[len(DIFFERENTIABLE) :]}


def _common(args: Named) -> Named:
    """The arguments that all operators share."""
    return {name: args[name] for name in (*_SAVED, *OPERANDS, *RULES, "allow_tf32")}


def _forward_vjp(args: Named, arrived: Sequence[Tensor | None], needed: Named) -> Named:
    dout, dlse, dmax_logits, dkey_mass, dentropy = arrived
    if dmax_logits is not None:
        raise NotImplementedError(
            "max_logits has no gradient: it is meant for monitoring (QK-clip). Detach it, or differentiate lse instead."
        )
    needs = _operand_needs(needed)
    cot = dict(zip(COTANGENTS, (dout, dlse, dkey_mass, dentropy), strict=True))
    if not any(needs) or all(x is None for x in cot.values()):
        return {}
    return _by_name(call(BACKWARD, **cot, **_common(args), needs=needs), needs)


def _backward_vjp(args: Named, arrived: Sequence[Any], needed: Named) -> Named:
    """With u the gradients that arrived: J u for each output's gradient, and the tangent of J^T w along u for each operand."""
    (grads,) = arrived
    if all(x is None for x in grads):
        return {}
    u = _by_name(grads, args["needs"], "t")
    u["tcaptured"] = _present(u["tcaptured"], args["captured"])
    result: Named = {}
    moving = [name for name in COTANGENTS if needed[name]]
    if moving:
        aux = ",".join(name[1:] for name in moving if name in ("dkey_mass", "dentropy"))
        tangents = dict(zip(COTANGENTS, call(JVP, **u, **_common(args), aux=aux), strict=True))
        result = {name: tangents[name] for name in moving}
    needs = _operand_needs(needed)
    if any(needs):
        cot = {name: args[name] for name in COTANGENTS} | {f"t{name}": None for name in COTANGENTS}
        result |= _by_name(call(BACKWARD_JVP, **cot, **u, **_common(args), needs=needs), needs)
    return result


def _jvp_vjp(args: Named, arrived: Sequence[Tensor | None], needed: Named) -> Named:
    """J u is linear in u, so its gradient there is J^T w; that of <w, J(x) u> in x is the tangent of J^T w along u."""
    cot = dict(zip(COTANGENTS, arrived, strict=True))
    if all(x is None for x in cot.values()):
        return {}
    result: Named = {}
    moving = [bool(needed[name]) for name in TANGENTS] + [bool(x) for x in needed["tcaptured"]]
    moving += [False] * (len(DIFFERENTIABLE) + len(args["captured"]) - len(moving))
    if any(moving):
        result = _by_name(call(BACKWARD, **cot, **_common(args), needs=moving), moving, "t")
        result["tcaptured"] = result["tcaptured"][: len(args["tcaptured"])]
    needs = _operand_needs(needed)
    if any(needs):
        u = {name: args[name] for name in (*TANGENTS, "tcaptured")}
        nothing = {f"t{name}": None for name in COTANGENTS}
        result |= _by_name(call(BACKWARD_JVP, **cot, **nothing, **u, **_common(args), needs=needs), needs)
    return result


_NO_THIRD = (
    "tilewise.attention has first and second derivatives; this asks for {what}. Use backend='reference', which autograd can differentiate "
    "any number of times in O(N^2) memory."
)


def _no_third_derivative(args: Named, arrived: Any, needed: Named) -> Named:
    raise NotImplementedError(_NO_THIRD.format(what="a third one"))


def _tangent_of(moved: Named, args: Named) -> Named:
    u = {f"t{name}": moved[name] for name in DIFFERENTIABLE}
    return u | {"tcaptured": _present(moved["captured"], args["captured"])}


def _forward_jvp(args: Named, moved: Named) -> tuple[Tensor, ...]:
    aux = wanted_aux(args["aux"])
    if "max_logits" in aux:
        raise NotImplementedError(
            "max_logits has no forward-mode derivative: it is meant for monitoring (QK-clip). Leave it out of return_aux, or take lse."
        )
    common = _common(args)
    tout, tlse, tkey_mass, tentropy = call(JVP, **_tangent_of(moved, args), **common, aux=",".join(sorted(aux - {"lse"})))
    return tout, tlse, torch.zeros_like(args["max_logits"]), tkey_mass, tentropy


def _backward_jvp_rule(args: Named, moved: Named) -> tuple[Tensor, ...]:
    cot = {name: args[name] for name in COTANGENTS} | {f"t{name}": moved[name] for name in COTANGENTS}
    return tuple(call(BACKWARD_JVP, **cot, **_tangent_of(moved, args), **_common(args), needs=args["needs"]))


def _no_second_tangent(args: Named, moved: Named) -> tuple[Tensor, ...]:
    raise NotImplementedError(
        _NO_THIRD.format(what="forward mode of a forward-mode or second derivative")
        + " A second derivative is forward over reverse: jvp of grad, or torch.func.hessian."
    )


@dataclass(frozen=True, eq=False)
class Operator:
    """One of the four operators: its arguments in order, its formulas, and which tensors of its results they need."""

    name: str
    arguments: tuple[str, ...]
    vjp: Callable[[Named, Sequence[Any], Named], Named]
    jvp: Callable[[Named, Named], tuple[Tensor, ...]]
    results: tuple[str | None, ...] = ()

    @property
    def overload(self) -> Any:
        return getattr(torch.ops.tilewise, self.name).default


FORWARD = Operator("attention_forward", FORWARD_ARGS, _forward_vjp, _forward_jvp, ("out", "lse", "max_logits", None, "entropy"))
BACKWARD = Operator("attention_backward", BACKWARD_ARGS, _backward_vjp, _backward_jvp_rule)
JVP = Operator("attention_jvp", JVP_ARGS, _jvp_vjp, _no_second_tangent)
BACKWARD_JVP = Operator("attention_backward_jvp", BACKWARD_JVP_ARGS, _no_third_derivative, _no_second_tangent)


# ------------------------------------------------------------------------------------------------------ the formulas at work


def _keep(ctx: Any, op: Operator, inputs: Sequence[Any], outputs: Sequence[Tensor]) -> None:
    """Saves what the formulas need: every argument, and those results that `op` names."""
    args = dict(zip(op.arguments, inputs, strict=True))
    args |= {name: x for name, x in zip(op.results, outputs, strict=False) if name is not None}
    tensors: list[Tensor] = []
    ctx.skeleton = {}
    for name, value in args.items():
        start = len(tensors)
        if isinstance(value, Tensor):
            tensors.append(value)
            ctx.skeleton[name] = start
        elif name in ("captured", "tcaptured"):
            tensors.extend(value)
            ctx.skeleton[name] = slice(start, len(tensors))
        else:
            ctx.skeleton[name] = (value,)
    ctx.skeleton["allow_tf32"] = (_allow_tf32(args),)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)


def _kept(ctx: Any) -> Named:
    tensors = ctx.saved_tensors
    return {name: place[0] if isinstance(place, tuple) else tensors[place] for name, place in ctx.skeleton.items()}


def _register(op: Operator) -> None:
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _keep(ctx, op, inputs, output)

    def backward(ctx: Any, *arrived: Any) -> tuple[Any, ...]:
        needed = dict(zip(op.arguments, ctx.needs_input_grad, strict=True))
        args = _kept(ctx)
        for name in ("captured", "tcaptured"):
            if name in needed and not isinstance(needed[name], (list, tuple)):
                needed[name] = [needed[name]] * len(args[name])
        grads = op.vjp(args, arrived, needed)
        return tuple(_shaped(name, grads, args) for name in op.arguments)

    def batched(info: Any, in_dims: Any, *flat: Any) -> Any:
        outs = vmap(op.overload, op.arguments, info, in_dims, flat)
        return (tuple(outs), (0,) * len(outs)) if op.results or op is JVP else (list(outs), [0] * len(outs))

    def transformed(*flat: Any) -> Any:
        defaults = op.overload._schema.arguments[len(flat) :]  # the dispatcher leaves out trailing arguments equal to their defaults
        results = _apply(op, [*flat, *(argument.default_value for argument in defaults)])
        return list(results) if op in (BACKWARD, BACKWARD_JVP) else results

    library.impl(op.name, transformed, "FuncTorchDynamicLayerFrontMode")
    torch.library.register_autograd(f"tilewise::{op.name}", backward, setup_context=setup_context, lib=library)
    torch.library.register_vmap(f"tilewise::{op.name}", batched, lib=library)


def _shaped(name: str, grads: Named, args: Named) -> Any:
    """A gradient as autograd wants it: for a list of tensors a list, of None where there is none."""
    if name in ("captured", "tcaptured"):
        return grads.get(name) or [None] * len(args[name])
    return grads.get(name)


class _Applied(torch.autograd.Function):
    """An operator under forward mode and under torch.func's transforms. Lists of tensors are spread among the arguments.

    `counts` holds their lengths, in the order of the operator's arguments.
    """

    @staticmethod
    def forward(op: Operator, counts: tuple[int, ...], *flat: Any) -> Any:
        return tuple(op.overload(*_grouped(op, counts, flat)))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.op, ctx.counts = inputs[:2]
        _keep(ctx, ctx.op, _grouped(ctx.op, ctx.counts, inputs[2:]), output)
        ctx.save_for_forward(*ctx.to_save)

    @staticmethod
    def backward(ctx: Any, *arrived: Any) -> Any:
        needed = dict(zip(ctx.op.arguments, _grouped(ctx.op, ctx.counts, ctx.needs_input_grad[2:]), strict=True))
        args = _kept(ctx)
        grads = ctx.op.vjp(args, arrived if ctx.op.results or ctx.op is JVP else (arrived,), needed)
        return None, None, *_spread([_shaped(name, grads, args) for name in ctx.op.arguments], ctx.op)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        moved = dict(zip(ctx.op.arguments, _grouped(ctx.op, ctx.counts, tangents[2:]), strict=True))
        return ctx.op.jvp(_kept(ctx), moved)

    @staticmethod
    def vmap(info: Any, in_dims: Any, op: Operator, counts: tuple[int, ...], *flat: Any) -> Any:
        def one(*args: Any) -> Any:
            return call(op, **dict(zip(op.arguments, args, strict=True)))

        outs = vmap(one, op.arguments, info, _grouped(op, counts, in_dims[2:]), tuple(_grouped(op, counts, flat)))
        return tuple(outs), (0,) * len(outs)


def _spread(args: Sequence[Any], op: Operator) -> list[Any]:
    flat: list[Any] = []
    for name, value in zip(op.arguments, args, strict=True):
        flat += value if name in ("captured", "tcaptured") else [value]
    return flat


def _grouped(op: Operator, counts: tuple[int, ...], flat: Sequence[Any]) -> list[Any]:
    queue, lengths = iter(flat), iter(counts)
    return [[next(queue) for _ in range(next(lengths))] if name in ("captured", "tcaptured") else next(queue) for name in op.arguments]


def call(op: Operator, **args: Any) -> tuple[Tensor, ...]:
    """The results of an operator, in whatever way the active transforms need."""
    flat = [args[name] for name in op.arguments]
    dual = forward_ad._current_level >= 0 and not torch._C._are_functorch_transforms_active() and any(_is_dual(x) for x in flat)
    if not dual:
        return op.overload(*flat)
    if torch.compiler.is_compiling():
        return _dual_call(op, args)
    return _apply(op, flat)


def _dual_call(op: Operator, args: Named) -> tuple[Tensor, ...]:
    """What `_Applied` does with dual tensors, spelled out for torch.compile, which does not trace a Function with a jvp."""
    parts = {name: [_unpacked(x) for x in value] if isinstance(value, (list, tuple)) else _unpacked(value) for name, value in args.items()}
    primals = {name: [p for p, _ in part] if isinstance(part, list) else part[0] for name, part in parts.items()}
    moved = {name: [t for _, t in part] if isinstance(part, list) else part[1] for name, part in parts.items()}
    results = op.overload(*(primals[name] for name in op.arguments))
    kept = dict(zip(op.results, results, strict=False))
    tangents = op.jvp({**primals, **kept, "allow_tf32": args.get("allow_tf32")}, moved)
    return tuple(forward_ad.make_dual(x, t) for x, t in zip(results, tangents, strict=True))


def _unpacked(x: Any) -> tuple[Any, Tensor | None]:
    return tuple(forward_ad.unpack_dual(x)) if isinstance(x, Tensor) else (x, None)


def _apply(op: Operator, flat: Sequence[Any]) -> tuple[Tensor, ...]:
    counts = tuple(len(value) for name, value in zip(op.arguments, flat, strict=True) if name in ("captured", "tcaptured"))
    return _Applied.apply(op, counts, *_spread(flat, op))


def _is_dual(x: Any) -> bool:
    if isinstance(x, (list, tuple)):
        return any(_is_dual(y) for y in x)
    return isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None


def attention_forward(**args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The forward op by keywords. Returns (out, lse, max_logits, key_mass, entropy)."""
    return call(FORWARD, **args)  # type: ignore[return-value]


library.impl("attention_jvp", _jvp, "CompositeExplicitAutograd")
library.impl("attention_backward_jvp", _backward_jvp, "CompositeExplicitAutograd")
torch.library.register_fake("tilewise::attention_jvp", _jvp_fake, lib=library)
torch.library.register_fake("tilewise::attention_backward_jvp", _backward_jvp_fake, lib=library)
for _op in (FORWARD, BACKWARD, JVP, BACKWARD_JVP):
    _register(_op)
