"""The PyTorch operators behind `attention`: schemas, fakes, autograd, vmap and FLOP formulas, in one place.

``tilewise::attention_forward`` and ``tilewise::attention_backward`` are ordinary operators to torch.compile, export, checkpointing and the
profiler: opaque, functional, with exact fakes. Which kernels run is decided inside them (`plan.select`), from what is known at run time.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import plan
from .block_mask import TileLists
from .late import when_imported
from .plan import Cotangents, Gradients, Operands, Outputs, Request, Rules, Saved, accumulator_dtype

if TYPE_CHECKING:
    from .cost import Problem

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
VECTORS = ("alibi_slopes", "sink", "seqused_q", "seqused_k")
# What a gradient can be taken of, in the order in which the backward op returns those that are needed.
DIFFERENTIABLE = ("q", "k", "v", "bias", "alibi_slopes", "sink")

OPERAND_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? mask, Tensor? alibi_slopes, Tensor? sink, Tensor? seqused_q, "
    "Tensor? seqused_k, Tensor? dropout_seed, Tensor[]? captured"
)
RULE_SCHEMA = (
    "float softmax_scale, float softcap, SymInt window_left, SymInt window_right, float dropout_p, bool deterministic, "
    "str score_mod, str mask_mod, str layout, str backend"
)
REST = (*BLOCKS, *PACKED)  # the last arguments of every operator
REST_SCHEMA = (
    "Tensor[]? blocks, int block_m, int block_n, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt? max_seqlen_q, SymInt? max_seqlen_k"
)

library = torch.library.Library("tilewise", "FRAGMENT")
library.define(
    f"attention_forward({OPERAND_SCHEMA}, {RULE_SCHEMA}, ScalarType? out_dtype, str aux, {REST_SCHEMA}) "
    "-> (Tensor out, Tensor lse, Tensor max_logits, Tensor key_mass, Tensor entropy)",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
library.define(
    "attention_backward(Tensor? dout, Tensor? dlse, Tensor? dkey_mass, Tensor? dentropy, Tensor out, Tensor lse, Tensor entropy, "
    f"{OPERAND_SCHEMA}, {RULE_SCHEMA}, bool allow_tf32, bool[] needs, {REST_SCHEMA}) -> Tensor[]",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
FORWARD_ARGS = (*OPERANDS, *RULES, "out_dtype", "aux", *REST)
BACKWARD_ARGS = ("dout", "dlse", "dkey_mass", "dentropy", "out", "lse", "entropy", *OPERANDS, *RULES, "allow_tf32", "needs", *REST)


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


def heads_first(x: Tensor, layout: str) -> Tensor:
    return x.transpose(1, 2) if layout == "bshd" else x


def operands(args: dict[str, Any]) -> Operands:
    layout = args["layout"]
    tensors = {name: args[name] for name in OPERANDS}
    for name in ("q", "k", "v"):
        tensors[name] = heads_first(tensors[name], layout)
    for name in ("bias", "mask"):
        tensors[name] = rank4(tensors[name])
    tensors["alibi_slopes"] = rank2(tensors["alibi_slopes"])
    for name in VECTORS:  # a number a batch item or head: kernels read one after the other
        if (x := tensors[name]) is not None:
            tensors[name] = x.contiguous()
    tensors["captured"] = tuple(tensors["captured"] or ())  # packages of AOTInductor make None of an empty list
    lists = TileLists(args["block_m"], args["block_n"], *args["blocks"]) if args["blocks"] else None
    return Operands(**tensors, blocks=lists, cu_seqlens_q=args["cu_seqlens_q"], cu_seqlens_k=args["cu_seqlens_k"])


_HERE: AbstractContextManager[Any] = nullcontext()


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    """Makes the device of x the current one: kernels keep what they worked out for the current device, and launch there."""
    device = x.device
    return _HERE if device.type != "cuda" or device.index == torch.cuda.current_device() else torch.cuda.device(device)


def has_no_sequence(t: Operands) -> bool:
    return t.cu_seqlens_q is not None and t.cu_seqlens_q.shape[0] == 1


def rules(args: dict[str, Any], allow_tf32: bool) -> Rules:
    names = ("softmax_scale", "softcap", "window_left", "window_right", "dropout_p", "deterministic", "score_mod", "mask_mod")
    return Rules(allow_tf32=allow_tf32, **{name: args[name] for name in names})


def wanted_aux(aux: str) -> frozenset[str]:
    """The auxiliary outputs that the op's argument ``aux`` names, separated by commas."""
    return frozenset(aux.split(",")) if aux else frozenset()


def allocate_outputs(args: dict[str, Any]) -> tuple[Any, ...]:
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


def run_forward(args: dict[str, Any]) -> tuple[Tensor | None, ...]:
    """out, lse and the auxiliary outputs, None for those that were not asked for."""
    t, r = operands(args), rules(args, float32_precision_allows_tf32())
    request = Request(aux=wanted_aux(args["aux"]), out_dtype=args["out_dtype"])
    chosen = plan.select(t, r, args["backend"], request=request)
    results = allocate_outputs(args)
    out = Outputs(heads_first(results[0], args["layout"]), *results[1:])
    out.needs = frozenset(name for name in DIFFERENTIABLE if (x := args[name]) is not None and x.requires_grad)
    if has_no_sequence(t):
        for x in results:
            if x is not None:
                x.fill_(float("-inf") if x is out.lse or x is out.max_logits else 0.0)
    elif out.lse.numel() or out.key_mass is not None or out.max_logits is not None:
        with on_device(t.q):
            chosen.kernels().forward(t, r, out)
    return results


def as_tensors(results: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    """An operator returns tensors: what was not asked for has no elements."""
    lse = results[1]
    assert lse is not None
    return tuple(lse.new_empty(0) if x is None else x for x in results)


def _forward(*flat: Any) -> tuple[Tensor, ...]:
    return as_tensors(run_forward(dict(zip(FORWARD_ARGS, flat, strict=True))))


def _forward_fake(*flat: Any) -> tuple[Tensor, ...]:
    return as_tensors(allocate_outputs(dict(zip(FORWARD_ARGS, flat, strict=True))))


# ----------------------------------------------------------------------------------------------------------------- backward


def gradient_sources(args: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """The tensors whose gradient the backward op returns, in order: those of DIFFERENTIABLE, then the captured ones."""
    sources = [(name, args[name]) for name in DIFFERENTIABLE] + [("captured", x) for x in args["captured"] or ()]
    return [source for source, needed in zip(sources, args["needs"], strict=True) if needed]


class GradientBuffers:
    """The results of a backward op in the inputs' dtypes, and what kernels fill: parameters' gradients in the accumulator dtype."""

    def __init__(self, args: dict[str, Any], bias_written_once: bool = False) -> None:
        layout, needs = args["layout"], args["needs"]
        accumulate = accumulator_dtype(args["q"].dtype)
        sources = gradient_sources(args)
        self.results = gradients_fake(args)
        self.buffers = [
            x if name in ("q", "k", "v") or (name == "bias" and bias_written_once) else _like(x, accumulate)
            for (name, _), x in zip(sources, self.results, strict=True)
        ]
        queue = iter(self.buffers)
        by_name = {name: next(queue) if needed else None for name, needed in zip(DIFFERENTIABLE, needs, strict=False)}
        dq, dk, dv = (heads_first(x, layout) if (x := by_name[name]) is not None else None for name in ("q", "k", "v"))
        self.grads = Gradients(
            dq,
            dk,
            dv,
            dbias=rank4(by_name["bias"]),
            dalibi_slopes=rank2(by_name["alibi_slopes"]),
            dsink=by_name["sink"],
            dcaptured=[next(queue) if needed else None for needed in needs[len(DIFFERENTIABLE) :]],
        )

    def finished(self) -> list[Tensor]:
        """The results, once the kernels have filled the buffers."""
        return [result if result is buffer else result.copy_(buffer) for result, buffer in zip(self.results, self.buffers, strict=True)]


def rank4(x: Tensor | None) -> Tensor | None:
    return None if x is None else x[(None,) * (4 - x.ndim)]


def rank2(x: Tensor | None) -> Tensor | None:
    return x[None] if x is not None and x.ndim == 1 else x


def cotangents(args: dict[str, Any], prefix: str = "d") -> Cotangents:
    """The gradients of the outputs among a backward op's arguments; `prefix` "td" gives their tangents."""
    dout, *rest = (args[prefix + name] for name in ("out", "lse", "key_mass", "entropy"))
    if dout is not None and plan.out_of_reach(dout):
        dout = dout.contiguous()
    return Cotangents(None if dout is None else heads_first(dout, args["layout"]), *rest)


def saved(args: dict[str, Any]) -> Saved:
    """What the forward pass kept. Kernels read the LSE row after row; under vmap the samples may share it, by a stride of 0."""
    entropy = args["entropy"]
    return Saved(heads_first(args["out"], args["layout"]), args["lse"].contiguous(), entropy.contiguous() if entropy.numel() else None)


def backward_request(args: dict[str, Any]) -> Request:
    """What a backward op asks of a backend."""
    return Request(
        backward=True,
        aux=frozenset(name for name in ("key_mass", "entropy") if args[f"d{name}"] is not None),
        out_dtype=args["out"].dtype,
        dlse=args["dlse"] is not None,
        needs=frozenset(name for name, _ in gradient_sources(args)),
    )


def writes_bias_once(t: Operands, r: Rules, chosen: plan.Plan | None) -> bool:
    """Whether kernels write each number of a bias's gradient once: of one of full size, which has nothing to add up, or from sums that they
    keep themselves."""
    if t.bias is None or t.cu_seqlens_q is not None:
        return False
    full = t.bias.numel() == t.q.shape[:3].numel() * t.k.shape[2]
    return full or (chosen is not None and chosen.backend == "hopper" and chosen.kernels().bias_gradient_of(t, r) == "added")


def run_backward(args: dict[str, Any]) -> list[Tensor]:
    t, r = operands(args), rules(args, args["allow_tf32"])
    cot, kept = cotangents(args), saved(args)
    chosen = None
    if kept.lse.numel() and t.k.shape[2] and not has_no_sequence(t):
        chosen = plan.select(t, r, args["backend"], request=backward_request(args))
    buffers = GradientBuffers(args, bias_written_once=writes_bias_once(t, r, chosen))
    if chosen is not None:
        with on_device(t.q):
            chosen.kernels().backward(t, r, kept, cot, buffers.grads)
    else:  # no query or no key: nothing depends on q, k or v, and only a sink can move the LSE
        for x in buffers.buffers:
            x.zero_()
        dsink = buffers.grads.dsink
        if dsink is not None and kept.lse.numel() and cot.dlse is not None:
            in_use = kept.lse != float("-inf")
            dsink.copy_(torch.where(in_use, cot.dlse, 0.0).sum((0, 2)))
    return buffers.finished()


def _backward(*flat: Any) -> list[Tensor]:
    return run_backward(dict(zip(BACKWARD_ARGS, flat, strict=True)))


def _like(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else torch.empty_like(x, dtype=dtype)


def gradients_fake(args: dict[str, Any]) -> list[Tensor]:
    return [x.new_empty(x.shape) for _, x in gradient_sources(args)]


def _backward_fake(*flat: Any) -> list[Tensor]:
    return gradients_fake(dict(zip(BACKWARD_ARGS, flat, strict=True)))


# --------------------------------------------------------------------------------------------------------------------- vmap


def vmap(op: Any, names: tuple[str, ...], info: Any, in_dims: Any, flat: tuple[Any, ...]) -> list[Tensor]:
    """The mapped dimension joins the batch where that changes no meaning; else one call for each of its elements.

    Both ways equal a loop. Joining is refused where the batch index itself matters (programs, dropout), where sequences are packed, or
    where it would copy an N x N tensor.
    """
    args, dims = dict(zip(names, flat, strict=True)), dict(zip(names, in_dims, strict=True))
    size = info.batch_size
    if _can_fold(args, dims):
        return _fold(op, names, size, args, dims)

    def element(index: int) -> list[Any]:
        def pick(value: Any, dim: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return [pick(x, d) for x, d in zip(value, dim, strict=True)] if isinstance(dim, (list, tuple)) else value
            if dim is None or not isinstance(value, Tensor):
                return value
            return value.select(dim, index) if size else value.new_zeros(value.movedim(dim, 0).shape[1:])

        return [pick(args[name], dims[name]) for name in names]

    results = [op(*element(index)) for index in range(max(size, 1))]  # of no elements, one says how large the results are
    return [torch.stack(parts)[:size] for parts in zip(*results, strict=True)]


def _can_fold(args: dict[str, Any], dims: dict[str, Any]) -> bool:
    if args["score_mod"] or args["mask_mod"] or args["dropout_p"] > 0 or dims["sink"] is not None or args["cu_seqlens_q"] is not None:
        return False
    if "max_logits" in args.get("aux", "") or args.get("tcaptured"):
        return False
    if any(args.get(name) is not None for name in ("tbias", "talibi_slopes", "tsink")):
        return False
    if "needs" in args and any(args["needs"][3:]):  # gradients of parameters are summed over the batch: one sum an element
        return False
    batch = args["q"].shape[0 if dims["q"] is None or dims["q"] > 0 else 1]
    if any(x.shape[0] > 1 for x in args["blocks"] or ()):
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
    batch = args["q"].shape[0 if dims["q"] is None or dims["q"] > 0 else 1]
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
            x = x[:, None].expand(size, batch, x.shape[1])
        folded[name] = x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
    return [x.reshape(size, batch, *x.shape[1:]) if x.ndim > 1 else x.expand(size, *x.shape) for x in op(*(folded[name] for name in names))]


# ------------------------------------------------------------------------------------------------------------- registration

library.impl("attention_forward", _forward, "CompositeExplicitAutograd")
library.impl("attention_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("tilewise::attention_forward", _forward_fake, lib=library)
torch.library.register_fake("tilewise::attention_backward", _backward_fake, lib=library)


def visible_flops(count: Any, names: tuple[str, ...], flat: tuple[Any, ...], pass_: str) -> int:
    """The visible pairs' operations. Where the lengths are values on the device, the least of the bounds that follow from sizes."""
    return min(count(problem, pass_) for problem in problems(dict(zip(names, flat, strict=False))))


def problems(args: dict[str, Any]) -> list[Problem]:
    """The call as one problem of `cost`; a packed call as two, neither smaller than what it computes: every sequence as long as the
    longest may be, and every query seeing as many keys as one may see. Tensors may be given as their sizes, as torch's counter does."""
    from .cost import Problem

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
    from .cost import flops

    @counter.register_flop_formula(torch.ops.tilewise.attention_forward)
    def _forward_flops(*flat: Any, out_shape: Any = None, **_: Any) -> int:
        return visible_flops(flops, FORWARD_ARGS, flat, "fwd")

    @counter.register_flop_formula(torch.ops.tilewise.attention_backward)
    def _backward_flops(*flat: Any, out_shape: Any = None, **_: Any) -> int:
        return visible_flops(flops, BACKWARD_ARGS, flat, "bwd")


when_imported("torch.utils.flop_counter", _register_flops)
