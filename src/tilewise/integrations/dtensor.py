"""How DTensors of `torch.distributed.tensor` (tensor and data parallelism, FSDP2) run through the operators: over batch and heads.

Every (batch item, head) pair is computed alone, so a mesh dimension may shard q, k and v over the batch or over the heads and no value has
to move. Parameters that a shard shares with others get partial gradients, which DTensor adds up. What counts batch items or heads from the
start of the whole tensor (dropout's generator, a score or mask function that reads b or h) is computed on whole tensors: they are gathered.

`register` runs by itself when `torch.distributed.tensor` is imported.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

from ..derivatives import BACKWARD, BACKWARD_JVP, FORWARD, JVP, Operator
from ..ops import DIFFERENTIABLE, wanted_aux

_OF_OUTPUTS = ("lse", "entropy", "dlse", "dkey_mass", "dentropy", "tdlse", "tdkey_mass", "tdentropy")
_OF_QUERIES_AND_KEYS = ("q", "k", "v", "out", "dout", "tdout", "tq", "tk", "tv")
_OVER_SCORES = ("bias", "mask", "tbias")
_PER_HEAD = ("alibi_slopes", "talibi_slopes", "sink", "tsink")
KINDS = ("replicate", "batch", "heads")


def allowed(args: dict[str, Any]) -> list[str]:
    """Over what the call may be sharded with the same result."""
    from ..score_mod import Program

    reads = {
        instruction.value
        for text in (args["score_mod"], args["mask_mod"])
        if text
        for instruction in Program.parse(text).instructions
        if instruction.op == "var"
    }
    counted = {"b", "h"} if args["dropout_p"] > 0 else reads
    return [kind for kind in KINDS if {"batch": "b", "heads": "h"}.get(kind, "") not in counted]


def sharded_dim(name: str, shape: tuple[int, ...], kind: str, layout: str) -> int | None:
    """The dimension of an argument that lies on the mesh; None where each rank holds all of it."""
    heads = 2 if layout == "bshd" else 1
    if kind == "replicate" or 0 in shape[:1]:
        return None
    if name in _OF_QUERIES_AND_KEYS:
        dim = 0 if kind == "batch" else heads
        return None if kind == "heads" and name in ("k", "v", "tk", "tv") and shape[heads] == 1 else dim  # one key head serves all
    if name in _OF_OUTPUTS:
        return 0 if kind == "batch" else 1
    if name in _OVER_SCORES:
        dim = len(shape) - (4 if kind == "batch" else 3)
        return dim if dim >= 0 and shape[dim] > 1 else None
    if name in _PER_HEAD:
        if kind == "heads":
            return len(shape) - 1
        return 0 if len(shape) == 2 and shape[0] > 1 else None
    if name == "blocks":
        dim = 0 if kind == "batch" else 1
        return dim if shape[dim] > 1 else None
    return 0 if name in ("seqused_q", "seqused_k") and kind == "batch" else None


def strategy(op: Operator, op_schema: Any) -> Any:
    """DTensor's question for one call of an operator: every acceptable placement of inputs and outputs."""
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._op_schema import OpSpec, OpStrategy
    from torch.distributed.tensor._ops.utils import generate_redistribute_costs

    args = dict(zip(op.arguments, [*op_schema.args_schema, *op.defaults[len(op_schema.args_schema) :]], strict=True))
    mesh, layout = op_schema.get_mesh_from_args(), args["layout"]
    inputs = [(name, x) for name in op.arguments if name not in op.others for x in _tensors(args[name])]
    shapes = {name: tuple(x.shape) for name, x in inputs}

    def placement(name: str, shape: tuple[int, ...], kind: str) -> Any:
        dim = sharded_dim(name, shape, kind, layout)
        return Replicate() if dim is None else Shard(dim)

    def gradient(name: str, shape: tuple[int, ...], kind: str) -> Any:
        own = placement(name, shape, kind)
        return Partial() if kind != "replicate" and own == Replicate() else own

    def results(kind: str) -> list[Any]:
        if op in (BACKWARD, BACKWARD_JVP):
            sources = [(name, args[name]) for name in DIFFERENTIABLE] + [("captured", x) for x in _tensors(args["captured"])]
            needed = [source for source, wanted in zip(sources, args["needs"], strict=True) if wanted]
            return [gradient(name, tuple(x.shape), kind) for name, x in needed]
        aux, rows = wanted_aux(args["aux"]), placement("lse", (1, 1, 1), kind)
        found = [placement("out", (1,) * 4, kind), rows]
        if op is FORWARD:
            most = {"replicate": Replicate(), "batch": Partial("max"), "heads": Shard(0)}[kind]
            found.append(most if "max_logits" in aux else Replicate())
        return found + [rows if name in aux else Replicate() for name in ("key_mass", "entropy")]

    choices = []
    for kinds in itertools.product(allowed(args), repeat=mesh.ndim):
        if not _divides(kinds, mesh, shapes, layout):
            continue
        placed = [[placement(name, tuple(x.shape), kind) for kind in kinds] for name, x in inputs]
        specs = [DTensorSpec(mesh, tuple(p), tensor_meta=x.tensor_meta) for p, (_, x) in zip(placed, inputs, strict=True)]
        outputs = tuple(DTensorSpec(mesh, tuple(p)) for p in zip(*map(results, kinds), strict=True))
        costs = [generate_redistribute_costs(x, spec) for (_, x), spec in zip(inputs, specs, strict=True)]
        choices.append(OpSpec(output_specs=outputs, input_specs=specs, redistribute_cost=costs))
    return OpStrategy(choices)


def _divides(kinds: tuple[str, ...], mesh: Any, shapes: dict[str, tuple[int, ...]], layout: str) -> bool:
    """Whether each rank gets whole groups of heads, and as many batch items as the others."""
    ranks = dict.fromkeys(KINDS, 1)
    for size, kind in zip(mesh.shape, kinds, strict=True):
        ranks[kind] *= size
    heads = 2 if layout == "bshd" else 1
    counts = (shapes["q"][heads], shapes["k"][heads])
    return shapes["q"][0] % ranks["batch"] == 0 and all(n % ranks["heads"] == 0 or (n == 1 and n != counts[0]) for n in counts)


def _tensors(x: Any) -> list[Any]:
    """The tensors of one argument: itself, the parts of a list, or nothing."""
    if x is None:
        return []
    children = getattr(x, "children", x if isinstance(x, (list, tuple)) else [x])
    return list(children)


def register(module: Any) -> None:
    """Tells DTensor how the operators shard. `module` is `torch.distributed.tensor`.

    Where this version of torch has no such interface nothing happens, and DTensor refuses the operators in words.
    """
    try:
        from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

        add = module.DTensor._op_dispatcher.sharding_propagator.register_op_strategy
    except (ImportError, AttributeError):
        return
    for op in (FORWARD, BACKWARD, JVP, BACKWARD_JVP):
        first = op.arguments.index("softmax_scale")  # from here on values decide
        add(op.overload, functools.partial(strategy, op), RuntimeSchemaInfo(first, needs_pytree=True))
