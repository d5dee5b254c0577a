"""The operators for tangents: ``attention_jvp``, that of the forward pass, and ``attention_backward_jvp``, that of the backward pass.

Arguments are those of the passes themselves, with a tangent (``tq`` for that of ``q``) for everything that may move.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import plan
from .late import when_imported
from .ops import (
    DIFFERENTIABLE,
    OPERAND_SCHEMA,
    OPERANDS,
    REST,
    REST_SCHEMA,
    RULE_SCHEMA,
    RULES,
    GradientBuffers,
    allocate_outputs,
    as_tensors,
    backward_request,
    cotangents,
    float32_precision_allows_tf32,
    gradients_fake,
    has_no_sequence,
    heads_first,
    library,
    on_device,
    operands,
    rank2,
    rank4,
    rules,
    saved,
    visible_flops,
    wanted_aux,
)
from .plan import Outputs, Request, Tangents, out_of_reach

COTANGENTS = ("dout", "dlse", "dkey_mass", "dentropy")
TANGENTS = tuple(f"t{name}" for name in DIFFERENTIABLE)
SAVED = ("out", "lse", "entropy")
JVP_ARGS = (*TANGENTS, "tcaptured", *SAVED, *OPERANDS, *RULES, "allow_tf32", "aux", *REST)
BACKWARD_JVP_ARGS = (
    *(*COTANGENTS, *(f"t{name}" for name in COTANGENTS), *TANGENTS, "tcaptured"),
    *(*SAVED, *OPERANDS, *RULES, "allow_tf32", "needs", *REST),
)

_DIRECTION_SCHEMA = "Tensor? tq, Tensor? tk, Tensor? tv, Tensor? tbias, Tensor? talibi_slopes, Tensor? tsink, Tensor[]? tcaptured"
_SAVED_SCHEMA = "Tensor out, Tensor lse, Tensor entropy"
library.define(
    f"attention_jvp({_DIRECTION_SCHEMA}, {_SAVED_SCHEMA}, {OPERAND_SCHEMA}, {RULE_SCHEMA}, bool? allow_tf32, str aux, {REST_SCHEMA}) "
    "-> (Tensor tout, Tensor tlse, Tensor tkey_mass, Tensor tentropy)",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
library.define(
    "attention_backward_jvp(Tensor? dout, Tensor? dlse, Tensor? dkey_mass, Tensor? dentropy, "
    "Tensor? tdout, Tensor? tdlse, Tensor? tdkey_mass, Tensor? tdentropy, "
    f"{_DIRECTION_SCHEMA}, {_SAVED_SCHEMA}, {OPERAND_SCHEMA}, {RULE_SCHEMA}, bool? allow_tf32, bool[] needs, {REST_SCHEMA}) -> Tensor[]",
    tags=(torch.Tag.needs_fixed_stride_order,),
)


def chosen_tf32(args: dict[str, Any]) -> bool:
    """What the call in question was made with; torch's setting where that call is being made now."""
    chosen = args.get("allow_tf32")
    return float32_precision_allows_tf32() if chosen is None else chosen


def _direction(args: dict[str, Any]) -> Tangents:
    tq, tk, tv = (None if args[name] is None else heads_first(args[name], args["layout"]) for name in ("tq", "tk", "tv"))
    tbias, tslopes = rank4(args["tbias"]), rank2(args["talibi_slopes"])
    if tbias is not None and out_of_reach(tbias):
        tbias = tbias.contiguous()
    return Tangents(tq, tk, tv, tbias, None if tslopes is None else tslopes.contiguous(), args["tsink"], tuple(args["tcaptured"] or ()))


def _jvp_outputs(args: dict[str, Any]) -> tuple[Any, ...]:
    out, lse, _, key_mass, entropy = allocate_outputs(args | {"out_dtype": args["out"].dtype})
    return out, lse, key_mass, entropy


def _jvp(*flat: Any) -> tuple[Tensor, ...]:
    args = dict(zip(JVP_ARGS, flat, strict=True))
    t, r, u = operands(args), rules(args, chosen_tf32(args)), _direction(args)
    results = _jvp_outputs(args)
    tout, tlse, tkey_mass, tentropy = results
    tangents = Outputs(heads_first(tout, args["layout"]), tlse, key_mass=tkey_mass, entropy=tentropy)
    if has_no_sequence(t):
        for x in results:
            if x is not None:
                x.zero_()
    else:
        request = Request(aux=wanted_aux(args["aux"]), out_dtype=args["out"].dtype, tangent=True)
        chosen = plan.select(t, r, args["backend"], request=request)
        with on_device(t.q):
            chosen.tangent_kernels().jvp(t, r, u, saved(args), tangents)
    return as_tensors(results)


def _jvp_fake(*flat: Any) -> tuple[Tensor, ...]:
    return as_tensors(_jvp_outputs(dict(zip(JVP_ARGS, flat, strict=True))))


def _backward_jvp(*flat: Any) -> list[Tensor]:
    args = dict(zip(BACKWARD_JVP_ARGS, flat, strict=True))
    t, r, u = operands(args), rules(args, chosen_tf32(args)), _direction(args)
    buffers = GradientBuffers(args)
    if has_no_sequence(t):
        for x in buffers.buffers:
            x.zero_()
    else:
        request = replace(backward_request(args), tangent=True)
        kernels = plan.select(t, r, args["backend"], request=request).tangent_kernels()
        with on_device(t.q):
            kernels.backward_jvp(t, r, u, saved(args), cotangents(args), cotangents(args, "td"), buffers.grads)
    return buffers.finished()


def _backward_jvp_fake(*flat: Any) -> list[Tensor]:
    return gradients_fake(dict(zip(BACKWARD_JVP_ARGS, flat, strict=True)))


library.impl("attention_jvp", _jvp, "CompositeExplicitAutograd")
library.impl("attention_backward_jvp", _backward_jvp, "CompositeExplicitAutograd")
torch.library.register_fake("tilewise::attention_jvp", _jvp_fake, lib=library)
torch.library.register_fake("tilewise::attention_backward_jvp", _backward_jvp_fake, lib=library)


def _register_flops(counter: ModuleType) -> None:
    from .cost import tangent_flops

    @counter.register_flop_formula(torch.ops.tilewise.attention_jvp)
    def _jvp_flops(*flat: Any, out_shape: Any = None, **_: Any) -> int:
        return visible_flops(tangent_flops, JVP_ARGS, flat, "fwd")

    @counter.register_flop_formula(torch.ops.tilewise.attention_backward_jvp)
    def _backward_jvp_flops(*flat: Any, out_shape: Any = None, **_: Any) -> int:
        return visible_flops(tangent_flops, BACKWARD_JVP_ARGS, flat, "bwd")


when_imported("torch.utils.flop_counter", _register_flops)
