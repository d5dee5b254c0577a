"""Reverse-mode derivatives of score programs: how the gradient of the new score reaches the score and the captured tensors.

A derivative is a list of instructions too, which torch and the kernels evaluate as they do a program. `score_tangents` is the forward mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .expressions import Expr, Graph, Instruction, compact
from .operations import FUNCTIONS, where


class Read(NamedTuple):
    """One use of a captured tensor: its number, the positions of its indices, and that of the gradient of the element read."""

    slot: int
    indices: tuple[int, ...]
    gradient: int


class Derivative(NamedTuple):
    """Instructions of the forward pass and its derivative; `dscore` is None where the result does not depend on the score.

    The one operation that programs lack is `chain(grad, slope)`: grad · slope, and 0 where grad is 0 even if the slope is inf or NaN.
    """

    instructions: tuple[Instruction, ...]
    dscore: int | None
    reads: tuple[Read, ...]


def derive(instructions: Sequence[Instruction]) -> Derivative:
    """The derivative of a program's last instruction."""
    graph = Graph()
    values = [graph.add(*instruction) for instruction in instructions]
    adjoints: list[Expr | None] = [None] * len(values)
    adjoints[-1] = graph.var("grad")
    dscore, reads = None, []
    for position in reversed(range(len(values))):
        op, args, value, kind = instructions[position]
        grad = adjoints[position]
        if grad is None or kind != "float":
            continue
        if op == "var" and value == "score":
            dscore = grad.index
        elif op == "load":
            reads.append(Read(value, args, grad.index))
        elif op in ADJOINTS:
            operands = [values[argument] for argument in args]
            for argument, part in zip(args, ADJOINTS[op](grad, values[position], value, *operands), strict=True):
                if part is not None:
                    adjoints[argument] = part if adjoints[argument] is None else adjoints[argument] + part
    outputs = [] if dscore is None else [dscore]
    for read in reads:
        outputs += [read.gradient, *read.indices]
    kept, places = compact(graph, outputs)
    queue = iter(places)
    dscore = None if dscore is None else next(queue)
    return Derivative(kept, dscore, tuple(Read(r.slot, gradient=next(queue), indices=tuple(next(queue) for _ in r.indices)) for r in reads))


def chain(grad: Expr, slope: Expr) -> Expr:
    instruction = grad.graph.instructions[slope.index]
    if instruction.op == "const" and math.isfinite(instruction.value):
        return grad * slope
    return grad.graph.add("chain", (grad.index, slope.index))


def _adjoint_of_extremum(a_wins: str) -> Callable[..., tuple[Expr, Expr]]:
    def adjoint(grad: Expr, y: Expr, value: None, a: Expr, b: Expr) -> tuple[Expr, Expr]:
        ahead = a < b if a_wins == "less" else a > b
        half = where(a == b, grad * 0.5, 0.0)  # PyTorch's convention for ties
        return where(ahead, grad, half), where(ahead | (a == b), half, grad)

    return adjoint


# operation -> (gradient of the result, result, constant, *operands) -> gradient of each operand, None where it has none.
# A selection passes its gradient by selecting, so what the other branch holds never enters.
ADJOINTS: dict[str, Callable[..., tuple[Expr | None, ...]]] = {
    "add": lambda g, y, c, a, b: (g, g),
    "sub": lambda g, y, c, a, b: (g, -g),
    "mul": lambda g, y, c, a, b: (chain(g, b), chain(g, a)),
    "div": lambda g, y, c, a, b: (chain(g, 1.0 / b), chain(g, -(y / b))),
    "neg": lambda g, y, c, a: (-g,),
    "abs": lambda g, y, c, a: (where(a < 0, -g, where(a > 0, g, 0.0)),),
    "min": _adjoint_of_extremum("less"),
    "max": _adjoint_of_extremum("greater"),
    "where": lambda g, y, c, condition, a, b: (None, where(condition, g, 0.0), where(condition, 0.0, g)),
    "exp": lambda g, y, c, a: (chain(g, y),),
    "exp2": lambda g, y, c, a: (chain(g, y * math.log(2.0)),),
    "log": lambda g, y, c, a: (chain(g, 1.0 / a),),
    "log2": lambda g, y, c, a: (chain(g, 1.0 / (a * math.log(2.0))),),
    "sqrt": lambda g, y, c, a: (chain(g, 0.5 / y),),
    "rsqrt": lambda g, y, c, a: (chain(g, -0.5 * y * y * y),),
    "pow": lambda g, y, c, a: (chain(g, c * FUNCTIONS["pow"](a, c - 1.0)),),
    "tanh": lambda g, y, c, a: (chain(g, 1.0 - y * y),),
    "sigmoid": lambda g, y, c, a: (chain(g, y * (1.0 - y)),),
    "sin": lambda g, y, c, a: (chain(g, FUNCTIONS["cos"](a)),),
    "cos": lambda g, y, c, a: (chain(g, -FUNCTIONS["sin"](a)),),
    "erf": lambda g, y, c, a: (chain(g, (2.0 / math.sqrt(math.pi)) * FUNCTIONS["exp"](-(a * a))),),
}
