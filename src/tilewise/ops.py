"""The PyTorch operators behind `attention`: schemas, fakes, autograd, vmap and FLOP formulas, in one place.

``tilewise::attention_forward`` and ``tilewise::attention_backward`` are ordinary operators to torch.compile, export, checkpointing and the
profiler: opaque, functional, with exact fakes. Which kernels run is decided inside them (`plan.select`), from what is known at run time.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import plan
from .block_mask import TENSORS, TileLists
from .cost import Problem, flops
from .plan import Cotangents, Gradients, Operands, Outputs, Request, Rules, Saved, accumulator_dtype

# The arguments of both ops after their own first ones, in this order. One list, so that schemas, autograd and vmap cannot disagree.
OPERANDS = ("q", "k", "v", "bias", "mask", "alibi_slopes", "sink", "seqused_q", "seqused_k", "dropout_seed", "captured")
RULES = (
    "softmax_scale",
    "softcap",
    "window_left",
    "window_right",
    "dropout_p",
    "deterministic",
    "score_mod",
    "mask_mod",
    "layout",
    "backend",
)
BLOCKS = ("blocks", "block_m", "block_n")  # the tensors of `TileLists`, or none, and the sizes of its tiles
# The last arguments of both ops, None unless the sequences are packed.
PACKED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
AUX = ("max_logits", "key_mass", "entropy")
# What a gradient can be taken of, in the order in which the backward op returns those that are needed.
DIFFERENTIABLE = ("q", "k", "v", "bias", "alibi_slopes", "sink")

_OPERAND_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? mask, Tensor? alibi_slopes, Tensor? sink, Tensor? seqused_q, "
    "Tensor? seqused_k, Tensor? dropout_seed, Tensor[] captured"
)
_RULE_SCHEMA = (
    "float softmax_scale, float softcap, SymInt window_left, SymInt window_right, float dropout_p, bool deterministic, "
    "str score_mod, str mask_mod, str layout, str backend"
)
_BLOCK_SCHEMA = "Tensor[] blocks, int block_m, int block_n"
_PACKED_SCHEMA = "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt? max_seqlen_q, SymInt? max_seqlen_k"

_library = torch.library.Library("tilewise", "FRAGMENT")
_library.define(
    f"attention_forward({_OPERAND_SCHEMA}, {_RULE_SCHEMA}, ScalarType? out_dtype, str aux, {_BLOCK_SCHEMA}, {_PACKED_SCHEMA}) "
    "-> (Tensor out, Tensor lse, Tensor max_logits, Tensor key_mass, Tensor entropy)",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_library.define(
    "attention_backward(Tensor? dout, Tensor? dlse, Tensor? dkey_mass, Tensor? dentropy, Tensor out, Tensor lse, Tensor entropy, "
    f"{_OPERAND_SCHEMA}, {_RULE_SCHEMA}, bool allow_tf32, bool[] needs, {_BLOCK_SCHEMA}, {_PACKED_SCHEMA}) -> Tensor[]",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_FORWARD_ARGS = (*OPERANDS, *RULES, "out_dtype", "aux", *BLOCKS, *PACKED)
_RESULTS = ("dout", "dlse", "dkey_mass", "dentropy", "out", "lse", "entropy")
_BACKWARD_ARGS = (*_RESULTS, *OPERANDS, *RULES, "allow_tf32", "needs", *BLOCKS, *PACKED)


def float32_precision_allows_tf32() -> bool:
    """Whether torch's settings let float32 matrix products use TF32: False for "highest"/"ieee", True otherwise. Never raises.

    Torch has a new switch (``torch.backends.cuda.matmul.fp32_precision``) and a legacy one (``allow_tf32``,
    ``set_float32_matmul_precision``); reading the legacy one raises after the new one was used, and the new one reads "none" when unset.
    """
    try:
        setting = torch.backends.cuda.matmul.fp32_precision
        if setting in ("none", None):
            setting = getattr(torch.backends, "fp32_precision", "none")
        if setting not in ("none", None):
            return setting != "ieee"
    except (AttributeError, RuntimeError):
        pass
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:
        return False


# ------------------------------------------------------------------------------------------------------------------ forward


def _heads_first(x: Tensor, layout: str) -> Tensor:
    return x.transpose(1, 2) if layout == "bshd" else x


def operands(args: dict[str, Any]) -> Operands:
    layout = args["layout"]
    tensors = {name: args[name] for name in OPERANDS}
    for name in ("q", "k", "v"):
        tensors[name] = _heads_first(tensors[name], layout)
    for name in ("bias", "mask"):
        if tensors[name] is not None:
            tensors[name] = tensors[name][(None,) * (4 - tensors[name].ndim)]
    if tensors["alibi_slopes"] is not None and tensors["alibi_slopes"].ndim == 1:
        tensors["alibi_slopes"] = tensors["alibi_slopes"][None]
    tensors["captured"] = tuple(tensors["captured"])
    lists = TileLists(args["block_m"], args["block_n"], *args["blocks"]) if args["blocks"] else None
    return Operands(**tensors, blocks=lists, cu_seqlens_q=args["cu_seqlens_q"], cu_seqlens_k=args["cu_seqlens_k"])


def has_no_sequence(t: Operands) -> bool:
    return t.cu_seqlens_q is not None and t.cu_seqlens_q.shape[0] == 1


def rules(args: dict[str, Any], allow_tf32: bool) -> Rules:
    names = ("softmax_scale", "softcap", "window_left", "window_right", "dropout_p", "deterministic", "score_mod", "mask_mod")
    return Rules(allow_tf32=allow_tf32, **{name: args[name] for name in names})


def wanted_aux(aux: str) -> frozenset[str]:
    """The auxiliary outputs that the op's argument ``aux`` names, separated by commas."""
    return frozenset(aux.split(",")) if aux else frozenset()


def _allocate_outputs(args: dict[str, Any]) -> tuple[Any, ...]:
    """out, lse and the auxiliary outputs, None for those that were not asked for. Used by the op and by its fake alike."""
    q, k, v = args["q"], args["k"], args["v"]
    heads_dim, seq_dim = (2, 1) if args["layout"] == "bshd" else (1, 2)
    batch, heads, seqlen_q, seqlen_k = q.shape[0], q.shape[heads_dim], q.shape[seq_dim], k.shape[seq_dim]
    accumulate, wanted = accumulator_dtype(q.dtype), args["aux"]
    out = q.new_empty((*q.shape[:3], v.shape[3]), dtype=args["out_dtype"] or q.dtype)
    lse = q.new_empty((batch, heads, seqlen_q), dtype=accumulate)
    if not wanted:
        return out, lse, None, None, None
    shapes = {"max_logits": (heads,), "key_mass": (batch, heads, seqlen_k), "entropy": (batch, heads, seqlen_q)}
    return out, lse, *(q.new_empty(shapes[name], dtype=accumulate) if name in wanted_aux(wanted) else None for name in AUX)


def _run_forward(args: dict[str, Any]) -> tuple[Tensor | None, ...]:
    """out, lse and the auxiliary outputs, None for those that were not asked for."""
    t, r = operands(args), rules(args, float32_precision_allows_tf32())
    request = Request(aux=wanted_aux(args["aux"]), out_dtype=args["out_dtype"])
    chosen = plan.select(t, r, args["backend"], request=request)
    results = _allocate_outputs(args)
    out = Outputs(_heads_first(results[0], args["layout"]), *results[1:])
    if has_no_sequence(t):
        for x in results:
            if x is not None:
                x.fill_(float("-inf") if x is out.lse or x is out.max_logits else 0.0)
    elif out.lse.numel() or out.key_mass is not None or out.max_logits is not None:
        chosen.kernels().forward(t, r, out)
    return results


def _as_tensors(results: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    """An operator returns tensors: what was not asked for has no elements."""
    lse = results[1]
    assert lse is not None
    return tuple(lse.new_empty(0) if x is None else x for x in results)


def _forward(*flat: Any) -> tuple[Tensor, ...]:
    return _as_tensors(_run_forward(dict(zip(_FORWARD_ARGS, flat, strict=True))))


def _forward_fake(*flat: Any) -> tuple[Tensor, ...]:
    return _as_tensors(_allocate_outputs(dict(zip(_FORWARD_ARGS, flat, strict=True))))


# ----------------------------------------------------------------------------------------------------------------- backward


def _gradient_sources(args: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """The tensors whose gradient the backward op returns, in order: those of DIFFERENTIABLE, then the captured ones."""
    sources = [(name, args[name]) for name in DIFFERENTIABLE] + [("captured", x) for x in args["captured"]]
    return [source for source, needed in zip(sources, args["needs"], strict=True) if needed]


def _backward(*flat: Any) -> list[Tensor]:
    args = dict(zip(_BACKWARD_ARGS, flat, strict=True))
    layout, needs = args["layout"], args["needs"]
    t, r = operands(args), rules(args, args["allow_tf32"])
    accumulate = accumulator_dtype(t.q.dtype)
    results = _backward_fake(*flat)
    # Kernels reduce the parameters' gradients in the accumulator dtype, whatever the parameter's own is. A bias of full size has nothing to
    # reduce: each element is written once.
    full = t.q.shape[:3].numel() * t.k.shape[2] if t.cu_seqlens_q is None else -1
    buffers = [
        x if name in ("q", "k", "v") or (name == "bias" and x.numel() == full) else _like(x, accumulate)
        for (name, _), x in zip(_gradient_sources(args), results, strict=True)
    ]
    queue = iter(buffers)
    by_name = {name: next(queue) if needed else None for name, needed in zip(DIFFERENTIABLE, needs, strict=False)}
    captured = [next(queue) if needed else None for needed in needs[len(DIFFERENTIABLE) :]]
    dq, dk, dv = (_heads_first(x, layout) if (x := by_name[name]) is not None else None for name in ("q", "k", "v"))
    dbias, dslopes = by_name["bias"], by_name["alibi_slopes"]
    grads = Gradients(
        dq,
        dk,
        dv,
        dbias=None if dbias is None else dbias[(None,) * (4 - dbias.ndim)],
        dalibi_slopes=None if dslopes is None else dslopes[None] if dslopes.ndim == 1 else dslopes,
        dsink=by_name["sink"],
        dcaptured=captured,
    )
    dout = args["dout"]
    cot = Cotangents(None if dout is None else _heads_first(dout, layout), args["dlse"], args["dkey_mass"], args["dentropy"])
    saved = Saved(_heads_first(args["out"], layout), args["lse"], args["entropy"] if args["dentropy"] is not None else None)
    if saved.lse.numel() and t.k.shape[2] and not has_no_sequence(t):
        needed = frozenset(name for name, _ in _gradient_sources(args))
        request = Request(
            backward=True,
            aux=frozenset(name for name in ("key_mass", "entropy") if args[f"d{name}"] is not None),
            out_dtype=args["out"].dtype,
            dlse=args["dlse"] is not None,
            needs=needed,
        )
        plan.select(t, r, args["backend"], request=request).kernels().backward(t, r, saved, cot, grads)
    else:  # no query or no key: nothing depends on q, k or v, and only a sink can move the LSE
        for x in buffers:
            x.zero_()
        if grads.dsink is not None and saved.lse.numel() and cot.dlse is not None:
            in_use = saved.lse != float("-inf")
            grads.dsink.copy_(torch.where(in_use, cot.dlse, 0.0).sum((0, 2)))
    return [result if result is buffer else result.copy_(buffer) for result, buffer in zip(results, buffers, strict=True)]


def _like(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else torch.empty_like(x, dtype=dtype)


def _backward_fake(*flat: Any) -> list[Tensor]:
    args = dict(zip(_BACKWARD_ARGS, flat, strict=True))
    return [x.new_empty(x.shape) for _, x in _gradient_sources(args)]


# ----------------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _save(ctx, dict(zip(_FORWARD_ARGS, inputs, strict=True)), output)


def _save(ctx: Any, args: dict[str, Any], output: tuple[Any, ...]) -> None:
    """What the backward pass needs of the arguments and results of the forward pass."""
    out, lse, _, _, entropy = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(out, lse, entropy, *(args[name] for name in _TENSORS), *args["blocks"], *args["captured"])
    ctx.captured = len(args["captured"])
    ctx.block_sizes = args["block_m"], args["block_n"]
    ctx.rules = tuple(args[name] for name in RULES)
    ctx.max_seqlens = (args["max_seqlen_q"], args["max_seqlen_k"])
    ctx.allow_tf32 = float32_precision_allows_tf32()


def _gradients(ctx: Any, cotangents: tuple[Tensor | None, ...], needs: list[bool], backward_op: Any) -> list[Tensor | None]:
    """Calls the backward op for the gradients that are needed; None for the others, in the order of DIFFERENTIABLE and captured."""
    dout, dlse, dmax_logits, dkey_mass, dentropy = cotangents
    if dmax_logits is not None:
        raise NotImplementedError(
            "max_logits has no gradient: it is meant for monitoring (QK-clip). Detach it, or differentiate lse instead."
        )
    out, lse, entropy, *saved = ctx.saved_tensors
    count, lists = len(_TENSORS), _list_count(ctx.block_sizes[0])
    (*operands, cu_seqlens_q, cu_seqlens_k), blocks, captured = saved[:count], saved[count : count + lists], saved[count + lists :]
    if not any(needs) or all(x is None for x in (dout, dlse, dkey_mass, dentropy)):
        return [None] * len(needs)
    entropy = out.new_empty(0) if entropy is None else entropy
    given = (dout, dlse, dkey_mass, dentropy, out, lse, entropy, *operands, captured, *ctx.rules, ctx.allow_tf32, needs)
    grads = iter(backward_op(*given, blocks, *ctx.block_sizes, cu_seqlens_q, cu_seqlens_k, *ctx.max_seqlens))
    return [next(grads) if needed else None for needed in needs]


def _split(grads: list[Tensor | None]) -> tuple[dict[str, Tensor | None], list[Tensor | None]]:
    return dict(zip(DIFFERENTIABLE, grads, strict=False)), grads[len(DIFFERENTIABLE) :]


def _autograd(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
    needed = dict(zip(_FORWARD_ARGS, ctx.needs_input_grad, strict=True))
    needs = [bool(needed[name]) for name in DIFFERENTIABLE] + _as_list(needed["captured"], ctx.captured)
    named, captured = _split(_gradients(ctx, cotangents, needs, torch.ops.tilewise.attention_backward))
    lists = {"captured": captured, "blocks": [None] * _list_count(ctx.block_sizes[0])}
    return tuple(lists[name] if name in lists else named.get(name) for name in _FORWARD_ARGS)


def _list_count(block_m: int) -> int:
    return len(TENSORS) if block_m else 0


def _as_list(needed: Any, count: int) -> list[bool]:
    return [bool(x) for x in needed] if isinstance(needed, (list, tuple)) else [bool(needed)] * count


_NO_DOUBLE_BACKWARD = (
    "tilewise.attention has no second derivative yet: its backward pass was differentiated. Use backend='reference', which "
    "autograd can differentiate any number of times in O(N^2) memory."
)


def _refuse_double_backward(ctx: Any, *cotangents: Any) -> Any:
    raise NotImplementedError(_NO_DOUBLE_BACKWARD)


def _setup_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


# Autograd functions take tensors one by one, so the lists come last: of the tiles, then the captured ones.
_LISTS = ("blocks", "captured")
_FLAT_ARGS = tuple(name for name in _FORWARD_ARGS if name not in _LISTS)
_TENSORS = (*OPERANDS[:-1], "cu_seqlens_q", "cu_seqlens_k")


def _named(names: tuple[str, ...], flat: Sequence[Any], like: Sequence[Any] | None = None) -> dict[str, Any]:
    """The op's arguments by name, from an autograd function's; or what is laid out `like` these, such as the vmapped dimensions."""
    single = [name for name in names if name not in _LISTS]
    given = dict(zip(single, flat, strict=False))
    stop = len(single) + _list_count(given["block_m"] if like is None else like[single.index("block_m")])
    return given | {"blocks": list(flat[len(single) : stop]), "captured": list(flat[stop:])}


def _ordered(names: tuple[str, ...], flat: Sequence[Any], like: Sequence[Any] | None = None) -> list[Any]:
    """The op's arguments in its own order."""
    named = _named(names, flat, like)
    return [named[name] for name in names]


class _Attention(torch.autograd.Function):
    """The forward op under torch.func transforms, which do not accept an op's registered autograd formula."""

    @staticmethod
    def forward(*flat: Any) -> Any:
        return torch.ops.tilewise.attention_forward(*_ordered(_FORWARD_ARGS, flat))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _save(ctx, _named(_FORWARD_ARGS, inputs), output)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return _flat_gradients(ctx, cotangents, _call_backward_function)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *flat: Any) -> Any:
        return _vmap_forward(info, _ordered(_FORWARD_ARGS, in_dims, flat), *_ordered(_FORWARD_ARGS, flat))


def _flat_gradients(ctx: Any, cotangents: tuple[Any, ...], backward_op: Any) -> tuple[Any, ...]:
    lists = _list_count(ctx.block_sizes[0])
    needed = dict(zip(_FLAT_ARGS, ctx.needs_input_grad, strict=False))
    needs = [needed[name] for name in DIFFERENTIABLE] + list(ctx.needs_input_grad[len(_FLAT_ARGS) + lists :])
    named, captured = _split(_gradients(ctx, cotangents, needs, backward_op))
    return (*(named.get(name) for name in _FLAT_ARGS), *[None] * lists, *captured)


class _AttentionBackward(torch.autograd.Function):
    """The backward op under torch.func transforms: differentiating it raises instead of giving a silent zero."""

    @staticmethod
    def forward(*flat: Any) -> Any:
        return tuple(torch.ops.tilewise.attention_backward(*_ordered(_BACKWARD_ARGS, flat)))

    setup_context = staticmethod(_setup_nothing)
    backward = staticmethod(_refuse_double_backward)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *flat: Any) -> Any:
        outs, dims = _vmap_backward(info, _ordered(_BACKWARD_ARGS, in_dims, flat), *_ordered(_BACKWARD_ARGS, flat))
        return tuple(outs), tuple(dims)


def _call_backward_function(*args: Any) -> Any:
    given = dict(zip(_BACKWARD_ARGS, args, strict=True))
    single = [value for name, value in given.items() if name not in _LISTS]
    return _AttentionBackward.apply(*single, *given["blocks"], *given["captured"])


class _Direct(torch.autograd.Function):
    """The same without the dispatcher, which takes several times as long as the launch of a kernel. See `_unobserved`."""

    @staticmethod
    def forward(ctx: Any, *flat: Any) -> Any:  # with a separate setup_context torch would inspect this signature on every call
        args = _named(_FORWARD_ARGS, flat)
        results = _run_forward(args)
        _save(ctx, args, results)
        return results

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        # With create_graph somebody may differentiate this again: only the operator knows what to do then.
        run = torch.ops.tilewise.attention_backward if torch.is_grad_enabled() else _backward
        return _flat_gradients(ctx, cotangents, run)


def _unobserved(args: dict[str, Any]) -> bool:
    """Whether nothing listens to operators: no mode (fake tensors, FLOP counter, checkpointing, tracing), no profiler, no subclass."""
    if torch._C._len_torch_dispatch_stack() or torch.autograd._profiler_enabled() or torch.jit.is_tracing():
        return False
    tensors = [x for x in map(args.__getitem__, _TENSORS) if x is not None] + args["captured"] + args["blocks"]
    return tensors[0].device.type in ("cuda", "cpu") and all(type(x) is Tensor or type(x) is torch.nn.Parameter for x in tensors)


def attention_forward(**args: Any) -> tuple[Any, ...]:
    """The forward op by keywords, in whatever way the active transforms need: (out, lse, max_logits, key_mass, entropy).

    Auxiliary outputs that were not asked for are None or have no elements.
    """
    if torch.compiler.is_compiling():
        return torch.ops.tilewise.attention_forward(*(args[name] for name in _FORWARD_ARGS))
    transformed = torch._C._are_functorch_transforms_active()
    if transformed or _unobserved(args):
        function = _Attention if transformed else _Direct
        if not transformed and not _differentiates(args):
            return _run_forward(args)
        return function.apply(*(args[name] for name in _FLAT_ARGS), *args["blocks"], *args["captured"])
    return torch.ops.tilewise.attention_forward(*(args[name] for name in _FORWARD_ARGS))


def _differentiates(args: dict[str, Any]) -> bool:
    return torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (*map(args.__getitem__, DIFFERENTIABLE), *args["captured"])
    )


# --------------------------------------------------------------------------------------------------------------------- vmap


def _vmap(op: Any, names: tuple[str, ...], info: Any, in_dims: Any, flat: tuple[Any, ...], fold: bool) -> Any:
    """The mapped dimension joins the batch where that changes no meaning; else one call for each of its elements.

    Both ways equal a loop. Joining is refused where the batch index itself matters (programs, dropout), where sequences are packed, or
    where it would copy an N x N tensor.
    """
    args, dims = dict(zip(names, flat, strict=True)), dict(zip(names, in_dims, strict=True))
    size = info.batch_size
    if fold and _can_fold(args, dims):
        return _fold(op, names, size, args, dims)

    def element(index: int) -> list[Any]:
        def pick(value: Any, dim: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return [pick(x, d) for x, d in zip(value, dim, strict=True)] if isinstance(dim, (list, tuple)) else value
            return value.select(dim, index) if dim is not None and isinstance(value, Tensor) else value

        return [pick(args[name], dims[name]) for name in names]

    results = [op(*element(index)) for index in range(size)]
    return [torch.stack(parts) for parts in zip(*results, strict=True)]


def _can_fold(args: dict[str, Any], dims: dict[str, Any]) -> bool:
    if args["score_mod"] or args["mask_mod"] or args["dropout_p"] > 0 or dims["sink"] is not None or args["cu_seqlens_q"] is not None:
        return False
    if "max_logits" in args.get("aux", ""):
        return False
    if "needs" in args and any(args["needs"][3:]):  # gradients of parameters are summed over the batch: one sum an element
        return False
    batch = args["q"].shape[0 if dims["q"] is None or dims["q"] > 0 else 1]
    if any(x.shape[0] > 1 for x in args["blocks"]):
        return False
    for name in ("bias", "mask"):
        x, dim = args[name], dims[name]
        if x is None:
            continue
        inner = x.ndim - (dim is not None)
        full = inner == 4 and (x.movedim(dim, 0).shape[1] if dim is not None else x.shape[0]) == batch
        if (dim is None and full and batch > 1) or (dim is not None and not full):
            return False
    return True


_FOLDED_AS_THEY_ARE = ("sink", "dropout_seed", "captured")


def _fold(op: Any, names: tuple[str, ...], size: int, args: dict[str, Any], dims: dict[str, Any]) -> list[Tensor]:
    folded = dict(args)
    for name, x in args.items():
        if not isinstance(x, Tensor) or name in _FOLDED_AS_THEY_ARE:
            continue
        if dims[name] is None:
            if name in ("bias", "mask"):
                continue
            if name == "alibi_slopes" and x.ndim == 1:
                continue
            if x.numel() == 0 and name == "entropy":
                continue
            x = x.unsqueeze(0).expand(size, *x.shape)
        else:
            x = x.movedim(dims[name], 0)
        if name == "alibi_slopes" and x.ndim == 2:  # (V, Hq): one row for every batch item
            batch = args["q"].shape[0 if dims["q"] is None or dims["q"] > 0 else 1]
            x = x[:, None].expand(size, batch, x.shape[1])
        folded[name] = x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
    return [x.reshape(size, -1, *x.shape[1:]) if x.ndim > 1 else x.expand(size, *x.shape) for x in op(*(folded[name] for name in names))]


def _vmap_forward(info: Any, in_dims: Any, *flat: Any) -> Any:
    outs = _vmap(torch.ops.tilewise.attention_forward, _FORWARD_ARGS, info, in_dims, flat, fold=True)
    return tuple(outs), (0,) * len(outs)


def _vmap_backward(info: Any, in_dims: Any, *flat: Any) -> Any:
    outs = _vmap(torch.ops.tilewise.attention_backward, _BACKWARD_ARGS, info, in_dims, flat, fold=True)
    return list(outs), [0] * len(outs)


# ------------------------------------------------------------------------------------------------------------- registration

_library.impl("attention_forward", _forward, "CompositeExplicitAutograd")
_library.impl("attention_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("tilewise::attention_forward", _forward_fake, lib=_library)
torch.library.register_fake("tilewise::attention_backward", _backward_fake, lib=_library)
torch.library.register_autograd("tilewise::attention_forward", _autograd, setup_context=_setup_context, lib=_library)
torch.library.register_autograd("tilewise::attention_backward", _refuse_double_backward, setup_context=_setup_nothing, lib=_library)
torch.library.register_vmap("tilewise::attention_forward", _vmap_forward, lib=_library)
torch.library.register_vmap("tilewise::attention_backward", _vmap_backward, lib=_library)


def _flops(names: tuple[str, ...], flat: tuple[Any, ...], pass_: str) -> int:
    """The visible pairs' operations. Where the lengths are values on the device, the least of the bounds that follow from sizes."""
    return min(flops(problem, pass_) for problem in problems(dict(zip(names, flat, strict=False))))


def problems(args: dict[str, Any]) -> list[Problem]:
    """The call as one problem of `cost`; a packed call as two, neither smaller than what it computes: every sequence as long as the
    longest may be, and every query seeing as many keys as one may see. Tensors may be given as their sizes, as torch's counter does."""
    args = {name: x.shape if isinstance(x, Tensor) else x for name, x in args.items()}
    heads_dim, seq_dim = (2, 1) if args["layout"] == "bshd" else (1, 2)
    q, k, v, left, right = args["q"], args["k"], args["v"], args["window_left"], args["window_right"]
    whole = Problem(
        batch=q[0],
        heads=q[heads_dim],
        kv_heads=k[heads_dim],
        seqlen_q=q[seq_dim],
        seqlen_k=k[seq_dim],
        head_dim=q[3],
        head_dim_v=v[3],
        window_left=left,
        window_right=right,
    )
    if args["cu_seqlens_q"] is None:
        return [whole]
    most_q, most_k = (
        size if most is None else min(size, most)
        for size, most in ((whole.seqlen_q, args["max_seqlen_q"]), (whole.seqlen_k, args["max_seqlen_k"]))
    )
    seen = most_k if left < 0 or right < 0 else min(most_k, left + right + 1)
    return [
        replace(whole, batch=args["cu_seqlens_q"][0] - 1, seqlen_q=most_q, seqlen_k=most_k),
        replace(whole, seqlen_k=seen, window_left=-1, window_right=-1),
    ]


def _register_flops(counter: ModuleType) -> None:
    @counter.register_flop_formula(torch.ops.tilewise.attention_forward)
    def _forward_flops(*flat: Any, out_shape: Any = None, **_: Any) -> int:
        return _flops(_FORWARD_ARGS, flat, "fwd")

    @counter.register_flop_formula(torch.ops.tilewise.attention_backward)
    def _backward_flops(*flat: Any, out_shape: Any = None, **_: Any) -> int:
        return _flops(_BACKWARD_ARGS, flat, "bwd")


class _WhenFlopsAreCounted(importlib.abc.MetaPathFinder):
    """Registers the formulas when torch's FLOP counter is imported, not before: that module imports Triton."""

    name = "torch.utils.flop_counter"

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_then_register(module: ModuleType) -> None:
                execute(module)
                _register_flops(module)

            spec.loader.exec_module = execute_then_register  # type: ignore[method-assign]
        return spec


if _WhenFlopsAreCounted.name in sys.modules:
    _register_flops(sys.modules[_WhenFlopsAreCounted.name])
else:
    sys.meta_path.insert(0, _WhenFlopsAreCounted())
