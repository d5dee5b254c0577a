"""Forward-mode derivatives of score programs: how a score, and its gradient, move with the inputs.

A program is a list of scalar instructions, and so is its reverse derivative (`score_mod.Program`). `_push` walks such a list once more and
writes beside every floating value its tangent, again as instructions: pushed through the program it gives the tangent of the new score,
pushed through the derivative the tangents of the score's gradient and of each captured tensor's. The factor by which an operation passes a
tangent on is the one by which it passes a gradient back (both are products with the same slope), so the table of adjoints serves both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from .evaluation import execute, scatter
from .expressions import Expr, Graph, Instruction, compact
from .score_adjoints import ADJOINTS, chain
from .score_mod import Program

_TANGENT_OF = {"score": "score_tangent", "grad": "grad_tangent"}


class Tangents:
    """A list of instructions, and the positions of wanted values and of their tangents in it; None for a tangent that is always 0."""

    def __init__(self, instructions: Sequence[Instruction], outputs: Sequence[int], shift: int) -> None:
        graph = Graph()
        values = [graph.add(*instruction) for instruction in instructions]
        tangents: list[Expr | None] = []
        for instruction, value in zip(instructions, values, strict=True):
            tangents.append(_push(instruction, value, values, tangents, shift))
        moving = [tangents[output] for output in outputs]
        wanted = [values[output].index for output in outputs] + [x.index for x in moving if x is not None]
        self.instructions, places = compact(graph, wanted)
        self.values = places[: len(outputs)]
        queue = iter(places[len(outputs) :])
        self.tangents = [None if x is None else next(queue) for x in moving]

    def evaluate(
        self, env: Mapping[str, Tensor], captured: Sequence[Tensor], dtype: torch.dtype
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        moving = [place for place in self.tangents if place is not None]
        results = execute(self.instructions, [*self.values, *moving], env, captured, dtype)
        queue = iter(results[len(self.values) :])
        return results[: len(self.values)], [None if place is None else next(queue) for place in self.tangents]


def _push(instruction: Instruction, value: Expr, values: list[Expr], tangents: list[Expr | None], shift: int) -> Expr | None:
    """The tangent of one value; `shift` is the distance from a captured tensor's number to its tangent's, 0 where none has one."""
    op, args, constant, kind = instruction
    graph = value.graph
    if kind != "float":
        return None
    if op == "var":
        return graph.add("var", value=_TANGENT_OF[constant])
    if op == "load":
        return graph.load(constant + shift, kind, tuple(values[arg] for arg in args)) if shift else None
    operands = [values[arg] for arg in args]
    total = None
    for position, arg in enumerate(args):
        tangent = tangents[arg]
        if tangent is None:
            continue
        if op == "chain":  # grad * slope: linear in both
            part: Expr | None = chain(tangent, operands[1]) if position == 0 else chain(operands[0], tangent)
        elif op in ADJOINTS:
            part = ADJOINTS[op](tangent, value, constant, *operands)[position]
        else:
            part = None
        if part is not None:
            total = part if total is None else total + part
    return total


@lru_cache(maxsize=256)
def _of_program(text: str, shift: int) -> Tangents:
    instructions = Program.parse(text).instructions
    return Tangents(instructions, [len(instructions) - 1], shift)


@lru_cache(maxsize=256)
def _of_derivative(text: str, shift: int) -> Tangents:
    derivative = Program.parse(text).derivative
    outputs = [] if derivative.dscore is None else [derivative.dscore]
    return Tangents(derivative.instructions, outputs + [read.gradient for read in derivative.reads], shift)


def jvp(text: str, env: Mapping[str, Tensor], captured: Sequence[Tensor], tcaptured: Sequence[Tensor], tscore: Tensor) -> Tensor:
    """The tangent of a score function's result on a tile, shaped as `tscore`, the tangent of the score it is given.

    `env` as in `Program.evaluate`; `tcaptured` holds a tangent for every captured tensor, in the same order, or nothing.
    """
    program = _of_program(text, len(captured) if tcaptured else 0)
    _, (tangent,) = program.evaluate({**env, "score_tangent": tscore}, (*captured, *tcaptured), tscore.dtype)
    return torch.zeros_like(tscore) if tangent is None else tangent.expand(tscore.shape)


def vjp_jvp(
    text: str,
    env: Mapping[str, Tensor],
    captured: Sequence[Tensor],
    tcaptured: Sequence[Tensor],
    tscore: Tensor,
    grad: Tensor,
    tgrad: Tensor,
    into: Sequence[Tensor | None],
) -> tuple[Tensor, Tensor]:
    """`Program.vjp` and its tangent: (dscore, tdscore) from a gradient of the result and that gradient's tangent.

    The tangents of captured tensors' gradients are added to `into`, one buffer a captured tensor; those of None are skipped.
    """
    derivative = Program.parse(text).derivative
    program = _of_derivative(text, len(captured) if tcaptured else 0)
    env = {**env, "score_tangent": tscore, "grad": grad, "grad_tangent": tgrad}
    values, tangents = program.evaluate(env, (*captured, *tcaptured), grad.dtype)
    dscore, tdscore = torch.zeros_like(grad), torch.zeros_like(grad)
    if derivative.dscore is not None:
        dscore = values[0].expand(grad.shape)
        tdscore = tdscore if tangents[0] is None else tangents[0].expand(grad.shape)
    indices = iter(execute(derivative.instructions, [n for read in derivative.reads for n in read.indices], env, captured, grad.dtype))
    for read, tangent in zip(derivative.reads, tangents[len(tangents) - len(derivative.reads) :], strict=True):
        own = [next(indices) for _ in read.indices]
        total = into[read.slot]
        if total is not None and tangent is not None:
            scatter(total, tangent, own)
    return dscore, tdscore
