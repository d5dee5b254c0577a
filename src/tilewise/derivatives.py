"""How the four operators differentiate each other, and how they behave under every transform of PyTorch.

Attention f maps operands x to outputs. ``attention_backward`` is J(x)^T w, and two operators more close the circle: ``attention_jvp`` is
J(x) u, the tangent of the outputs, and ``attention_backward_jvp`` the tangent of J(x)^T w. Their derivatives are then calls of each other:

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
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from .late import when_imported
from .onlookers import batched_by_autograd, lies_as_it_is, ordinary, watched
from .ops import (
    BACKWARD_ARGS,
    DIFFERENTIABLE,
    FORWARD_ARGS,
    OPERANDS,
    REST,
    RULES,
    library,
    run_backward,
    run_forward,
    vmap,
    wanted_aux,
)
from .tangent_ops import BACKWARD_JVP_ARGS, COTANGENTS, JVP_ARGS, SAVED, TANGENTS, chosen_tf32

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


def common_arguments(args: Named) -> Named:
    """The arguments that all operators but the first share."""
    common = {name: args[name] for name in (*SAVED, *OPERANDS, *RULES, *REST)}
    if common["entropy"] is None:
        common["entropy"] = args["lse"].new_empty(0)
    return common | {"allow_tf32": args.get("allow_tf32")}


def _forward_vjp(args: Named, arrived: Sequence[Tensor | None], needed: Named) -> Named:
    dout, dlse, dmax_logits, dkey_mass, dentropy = arrived
    if dmax_logits is not None:
        raise NotImplementedError(
            "max_logits has no gradient: it is meant for monitoring (QK-clip); detach it, or differentiate lse instead"
        )
    needs = _operand_needs(needed)
    cot = dict(zip(COTANGENTS, (dout, dlse, dkey_mass, dentropy), strict=True))
    if not any(needs) or all(x is None for x in cot.values()):
        return {}
    given = {**cot, **common_arguments(args), "needs": needs}
    direct = ordinary() and _unobserved(args) and all(x is None or lies_as_it_is(x) for x in arrived)
    return _by_name(run_backward(given) if direct else call(BACKWARD, **given), needs)


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
        tangents = dict(zip(COTANGENTS, call(JVP, **u, **common_arguments(args), aux=aux), strict=True))
        result = {name: tangents[name] for name in moving}
    needs = _operand_needs(needed)
    if any(needs):
        cot = {name: args[name] for name in COTANGENTS} | {f"t{name}": None for name in COTANGENTS}
        result |= _by_name(call(BACKWARD_JVP, **cot, **u, **common_arguments(args), needs=needs), needs)
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
        result = _by_name(call(BACKWARD, **cot, **common_arguments(args), needs=moving), moving, "t")
        result["tcaptured"] = result["tcaptured"][: len(args["tcaptured"])]
    needs = _operand_needs(needed)
    if any(needs):
        u = {name: args[name] for name in (*TANGENTS, "tcaptured")}
        nothing = {f"t{name}": None for name in COTANGENTS}
        result |= _by_name(call(BACKWARD_JVP, **cot, **nothing, **u, **common_arguments(args), needs=needs), needs)
    return result


_NO_THIRD = (
    "tilewise.attention has first and second derivatives; this asks for {what}: use backend='reference', which autograd can differentiate "
    "any number of times in O(N^2) memory"
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
            "max_logits has no forward-mode derivative: it is meant for monitoring (QK-clip); leave it out of return_aux, or take lse"
        )
    common = common_arguments(args)
    tout, tlse, tkey_mass, tentropy = call(JVP, **_tangent_of(moved, args), **common, aux=",".join(sorted(aux - {"lse"})))
    return tout, tlse, tlse.new_zeros(0), tkey_mass, tentropy


def _backward_jvp_rule(args: Named, moved: Named) -> tuple[Tensor, ...]:
    cot = {name: args[name] for name in COTANGENTS} | {f"t{name}": moved[name] for name in COTANGENTS}
    return tuple(call(BACKWARD_JVP, **cot, **_tangent_of(moved, args), **common_arguments(args), needs=args["needs"]))


def _no_second_tangent(args: Named, moved: Named) -> tuple[Tensor, ...]:
    if torch._C._current_graph_task_id() >= 0:  # inside backward(), where a tangent's own inputs still carry theirs
        what, way = "the tangent of one, as a backward pass inside forward_ad.dual_level() does", "leave the level before backward()"
    else:
        what, way = "forward mode of a forward-mode or second derivative", "write a second one as jvp of grad, or torch.func.hessian"
    raise NotImplementedError(f"{_NO_THIRD.format(what=what)}; or {way}")


class Operator:
    """One of the four operators: its arguments in order, its formulas, and which of its results they need."""

    def __init__(
        self,
        name: str,
        arguments: tuple[str, ...],
        vjp: Callable[[Named, Sequence[Any], Named], Named],
        jvp: Callable[[Named, Named], tuple[Tensor, ...]],
        results: tuple[str | None, ...] = (),
    ) -> None:
        self.name, self.arguments, self.vjp, self.jvp, self.results = name, arguments, vjp, jvp, results
        self.overload = getattr(torch.ops.tilewise, name).default
        schema = self.overload._schema
        self.returns_list = len(schema.returns) == 1
        self.defaults = [argument.default_value for argument in schema.arguments]
        kinds = {argument.name: str(argument.type) for argument in schema.arguments}
        self.tensors = [x for x in arguments if kinds[x] in ("Tensor", "Optional[Tensor]")]
        self.lists = [x for x in arguments if kinds[x] == "Optional[List[Tensor]]"]
        self.others = [x for x in arguments if x not in self.tensors and x not in self.lists]


FORWARD = Operator("attention_forward", FORWARD_ARGS, _forward_vjp, _forward_jvp, ("out", "lse", None, None, "entropy"))
BACKWARD = Operator("attention_backward", BACKWARD_ARGS, _backward_vjp, _backward_jvp_rule)
JVP = Operator("attention_jvp", JVP_ARGS, _jvp_vjp, _no_second_tangent)
BACKWARD_JVP = Operator("attention_backward_jvp", BACKWARD_JVP_ARGS, _no_third_derivative, _no_second_tangent)


# ------------------------------------------------------------------------------------------------------ the formulas at work


def _keep(ctx: Any, op: Operator, args: Named, outputs: Sequence[Tensor | None]) -> None:
    """Saves what the formulas need: every argument, and those results that `op` names."""
    ctx.set_materialize_grads(False)
    # What was not asked for is not saved, be it None or without elements: checkpointing counts what a call saves, whichever way it goes.
    absent = {"entropy"} - wanted_aux(args["aux"]) if op.results else ()
    kept = [None if name in absent else x for name, x in zip(op.results, outputs, strict=False) if name is not None]
    lists = [args[name] or [] for name in op.lists]
    ctx.save_for_backward(*kept, *[args[name] for name in op.tensors], *[x for values in lists for x in values])
    ctx.lengths = [len(values) for values in lists]
    ctx.others = [args[name] for name in op.others]
    ctx.allow_tf32 = chosen_tf32(args)


def _kept(ctx: Any, op: Operator) -> Named:
    queue = iter(ctx.saved_tensors)
    args: Named = {name: next(queue) for name in op.results if name is not None}
    args |= {name: next(queue) for name in op.tensors}
    args |= {name: [next(queue) for _ in range(length)] for name, length in zip(op.lists, ctx.lengths, strict=True)}
    return args | dict(zip(op.others, ctx.others, strict=True)) | {"allow_tf32": ctx.allow_tf32}


def _register(op: Operator) -> None:
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _keep(ctx, op, dict(zip(op.arguments, inputs, strict=True)), output)

    def backward(ctx: Any, *arrived: Any) -> tuple[Any, ...]:
        needed = dict(zip(op.arguments, ctx.needs_input_grad, strict=True))
        args = _kept(ctx, op)
        for name in op.lists:
            if not isinstance(needed[name], (list, tuple)):
                needed[name] = [needed[name]] * len(args[name])
        return tuple(_gradients(op, args, arrived, needed))

    def batched(info: Any, in_dims: Any, *flat: Any) -> Any:
        outs = vmap(op.overload, op.arguments, info, in_dims, flat)
        return (outs, [0] * len(outs)) if op.returns_list else (tuple(outs), (0,) * len(outs))

    def transformed(*flat: Any) -> Any:
        results = _apply(op, [*flat, *op.defaults[len(flat) :]])  # the dispatcher leaves out trailing arguments equal to their defaults
        return list(results) if op.returns_list else results

    library.impl(op.name, transformed, "FuncTorchDynamicLayerFrontMode")
    library.impl(op.name, lambda *flat: _mapped_by_autograd(op, flat), "Batched")
    torch.library.register_autograd(f"tilewise::{op.name}", backward, setup_context=setup_context, lib=library)
    torch.library.register_vmap(f"tilewise::{op.name}", batched, lib=library)


class _Mapped(NamedTuple):
    batch_size: int


def _mapped_by_autograd(op: Operator, flat: Sequence[Any]) -> Any:
    """An operator under ``torch.autograd.grad(is_grads_batched=True)`` and ``torch.autograd.functional.jacobian(vectorize=True)``, which
    map a backward pass over cotangents by an older vmap of torch, with tensors of its own."""

    def each(rule: Callable[[Tensor], Any], value: Any, other: Callable[[Any], Any]) -> Any:
        if isinstance(value, (list, tuple)):
            return [each(rule, x, other) for x in value]
        return rule(value) if isinstance(value, Tensor) and batched_by_autograd(value) else other(value)

    values = [*flat, *op.defaults[len(flat) :]]
    found: list[Tensor] = []
    each(found.append, values, lambda x: None)
    # A tensor that is unwrapped at a level which is not its own stays one of these.
    level = next((n for n in range(1, 64) if not batched_by_autograd(torch._remove_batch_dim(found[0], n, 1, 0))), None)
    if level is None:
        raise NotImplementedError("one mapped backward pass within another cannot be served; torch.func.vmap may be nested")
    plain = each(lambda x: torch._remove_batch_dim(x, level, 1, 0), values, lambda x: x)
    dims = each(lambda x: 0, values, lambda x: None)
    size = torch._remove_batch_dim(found[0], level, 1, 0).shape[0]
    mapped = [torch._add_batch_dim(x, 0, level) for x in vmap(op.overload, op.arguments, _Mapped(size), dims, tuple(plain))]
    return mapped if op.returns_list else tuple(mapped)


def _gradients(op: Operator, args: Named, arrived: Sequence[Any], needed: Named) -> list[Any]:
    """The gradients of all arguments as autograd wants them: for a list of tensors a list, of None where there is none."""
    grads = op.vjp(args, arrived, needed)
    return [(grads.get(name) or [None] * len(args[name])) if name in op.lists else grads.get(name) for name in op.arguments]


class _Applied(torch.autograd.Function):
    """An operator under forward mode and under torch.func's transforms. Lists of tensors are spread among the arguments.

    `counts` holds their lengths, in the order of the operator's arguments.
    """

    @staticmethod
    def forward(op: Operator, counts: tuple[int, ...], *flat: Any) -> Any:
        return tuple(op.overload(*_grouped(op, counts, flat)))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        op, ctx.counts = inputs[:2]
        ctx.op = op
        _keep(ctx, op, dict(zip(op.arguments, _grouped(op, ctx.counts, inputs[2:]), strict=True)), output)
        ctx.save_for_forward(*ctx.to_save)

    @staticmethod
    def backward(ctx: Any, *arrived: Any) -> Any:
        op = ctx.op
        needed = dict(zip(op.arguments, _grouped(op, ctx.counts, ctx.needs_input_grad[2:]), strict=True))
        grads = _gradients(op, _kept(ctx, op), (arrived,) if op.returns_list else arrived, needed)
        return None, None, *_spread(op, grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        op = ctx.op
        return op.jvp(_kept(ctx, op), dict(zip(op.arguments, _grouped(op, ctx.counts, tangents[2:]), strict=True)))

    @staticmethod
    def vmap(info: Any, in_dims: Any, op: Operator, counts: tuple[int, ...], *flat: Any) -> Any:
        def one(*args: Any) -> Any:
            return call(op, **dict(zip(op.arguments, args, strict=True)))

        outs = vmap(one, op.arguments, info, _grouped(op, counts, in_dims[2:]), tuple(_grouped(op, counts, flat)))
        return tuple(outs), (0,) * len(outs)


def _spread(op: Operator, args: Sequence[Any]) -> list[Any]:
    flat: list[Any] = []
    for name, value in zip(op.arguments, args, strict=True):
        flat += value if name in op.lists else [value]
    return flat


def _grouped(op: Operator, counts: tuple[int, ...], flat: Sequence[Any]) -> list[Any]:
    queue, lengths = iter(flat), iter(counts)
    return [[next(queue) for _ in range(next(lengths))] if name in op.lists else next(queue) for name in op.arguments]


class _Direct(torch.autograd.Function):
    """The forward operator without the dispatcher, which takes several times as long as the launch of a kernel. See `_unobserved`."""

    @staticmethod
    def forward(ctx: Any, counts: tuple[int, ...], *flat: Any) -> Any:
        # With a setup_context of its own torch would inspect this signature on every call.
        ctx.counts = counts
        args = dict(zip(FORWARD_ARGS, _grouped(FORWARD, counts, flat), strict=True))
        results = run_forward(args)
        _keep(ctx, FORWARD, args, results)
        return results

    @staticmethod
    def backward(ctx: Any, *arrived: Any) -> Any:
        needed = dict(zip(FORWARD_ARGS, _grouped(FORWARD, ctx.counts, ctx.needs_input_grad[1:]), strict=True))
        return None, *_spread(FORWARD, _gradients(FORWARD, _kept(ctx, FORWARD), arrived, needed))


def _unobserved(args: Named) -> bool:
    """Whether nothing listens to operators, and no tensor is of a subclass that would."""
    if watched():
        return False
    tensors = [x for x in map(args.__getitem__, FORWARD.tensors) if x is not None] + args["captured"] + args["blocks"]
    return tensors[0].device.type in ("cuda", "cpu") and all(map(lies_as_it_is, tensors))


def _differentiates(args: Named) -> bool:
    return torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (*map(args.__getitem__, DIFFERENTIABLE), *args["captured"])
    )


def call(op: Operator, **args: Any) -> tuple[Tensor, ...]:
    """The results of an operator, in whatever way the active transforms need."""
    flat = [args[name] for name in op.arguments]
    if not _any_dual(flat):
        return op.overload(*flat)
    return _dual_call(op, args) if torch.compiler.is_compiling() else _apply(op, flat)


def _apply(op: Operator, flat: Sequence[Any]) -> tuple[Tensor, ...]:
    counts = _counts(op, dict(zip(op.arguments, flat, strict=True)))
    return _Applied.apply(op, counts, *_spread(op, flat))


def _counts(op: Operator, args: Named) -> tuple[int, ...]:
    return tuple(len(args[name]) for name in op.lists)


def _dual_call(op: Operator, args: Named) -> tuple[Tensor, ...]:
    """What `_Applied` does with dual tensors, spelled out for torch.compile, which does not trace a Function with a jvp."""
    parts: Named = {name: [_unpacked(x) for x in value] if name in op.lists else _unpacked(value) for name, value in args.items()}
    primals = {name: [p for p, _ in part] if name in op.lists else part[0] for name, part in parts.items()}
    moved = {name: [t for _, t in part] if name in op.lists else part[1] for name, part in parts.items()}
    results = op.overload(*(primals[name] for name in op.arguments))
    kept = {name: x for name, x in zip(op.results, results, strict=False) if name is not None}
    tangents = op.jvp({**primals, **kept}, moved)
    return tuple(forward_ad.make_dual(x, t) for x, t in zip(results, tangents, strict=True))


def _unpacked(x: Any) -> Any:
    return forward_ad.unpack_dual(x) if isinstance(x, Tensor) else (x, None)


def _any_dual(values: Sequence[Any]) -> bool:
    """Whether one of these carries a tangent that the operator itself would drop; torch.func's own are seen to where it dispatches."""
    return forward_ad._current_level >= 0 and not torch._C._are_functorch_transforms_active() and any(map(_is_dual, values))


def _is_dual(x: Any) -> bool:
    if isinstance(x, (list, tuple)):
        return any(_is_dual(y) for y in x)
    if isinstance(x, Tensor) and not torch.compiler.is_compiling() and batched_by_autograd(x):
        raise NotImplementedError(
            "forward mode under autograd's own vmap (jacobian(vectorize=True, strategy='forward-mode')); use torch.func.jacfwd"
        )
    return isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None


def attention_forward(**args: Any) -> tuple[Any, ...]:
    """The forward op by keywords, in whatever way the active transforms need: (out, lse, max_logits, key_mass, entropy).

    Auxiliary outputs that were not asked for are None or have no elements.
    """
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        return call(FORWARD, **args)
    if not _unobserved(args):
        return FORWARD.overload(*(args[name] for name in FORWARD_ARGS))
    if not _differentiates(args):
        return run_forward(args)
    return _Direct.apply(_counts(FORWARD, args), *_spread(FORWARD, [args[name] for name in FORWARD_ARGS]))


for _op in (FORWARD, BACKWARD, JVP, BACKWARD_JVP):
    _register(_op)


def _register_sharding(module: ModuleType) -> None:
    from .integrations import dtensor

    dtensor.register(module)


when_imported("torch.distributed.tensor", _register_sharding)
