"""Programs in the form that kernels are compiled for: one line an instruction, as ``op kind operands``, where operands are line numbers.

Kinds are f (float32), i and l (integers of 32 and 64 bits) and b. Every integer gets the width that no index below 2^30 can overflow, by
interval arithmetic; the same arithmetic at the call's own sizes proves reads of captured tensors to be inside, so that they need no mask.
A length reaches the text only through such proofs: calls that differ in nothing else run the same compiled kernel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...expressions import Graph, Instruction
from ...score_mod import Program, compact

if TYPE_CHECKING:
    from torch import Tensor

Range = tuple[int, int]

INT32, INT64 = (-(1 << 31), (1 << 31) - 1), (-(1 << 63), (1 << 63) - 1)
LARGEST = (1 << 30) + (1 << 10)  # positions are 32-bit
ANY_SIZE: dict[str, Range] = {"b": (0, LARGEST), "h": (0, LARGEST), "q_idx": (0, LARGEST), "kv_idx": (0, LARGEST), "p": (-LARGEST, LARGEST)}
KINDS = {"float": "f", "bool": "b"}


class Facts(NamedTuple):
    """What the text says of a captured tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    narrow: bool  # 32-bit offsets reach every element
    adjacent: bool  # the elements of the last dimension are neighbours


def facts(x: Tensor) -> Facts:
    reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return Facts(x.dtype, tuple(x.shape), reach <= INT32[1], x.ndim > 0 and x.stride(-1) == 1)


def encoded(x: Tensor) -> tuple[int, ...]:
    """Size and stride of every dimension, as kernels take them. Triton compiles anew for every integer in a tuple that is 1, a multiple of
    16 or the first beyond 32 bits; these are none of that."""
    return encoded_numbers([n for pair in zip(x.shape, x.stride(), strict=True) for n in pair] or [0])


def encoded_numbers(numbers: Sequence[int]) -> tuple[int, ...]:
    return tuple((1 << 62) + 2 * n + 1 for n in numbers)


def sizes(batch: int, heads: int, size_q: int, size_k: int, ragged: bool) -> tuple[tuple[str, Range], ...]:
    """What a call's indices can be. Lengths on the device only bound positions."""
    first = -size_q if ragged else size_k - size_q
    ends = {"b": (0, batch - 1), "h": (0, heads - 1), "q_idx": (0, size_q - 1), "kv_idx": (0, size_k - 1), "p": (first, size_k + size_q)}
    return tuple(ends.items())


@functools.lru_cache(maxsize=1024)
def forward_text(text: str, tensors: tuple[Facts, ...], indices: tuple[tuple[str, Range], ...]) -> str:
    """A score or mask function."""
    instructions = Program.parse(text).instructions
    return _written(instructions, len(instructions) - 1, (), tensors, dict(indices))


@functools.lru_cache(maxsize=1024)
def gradient_text(text: str, wanted: frozenset[int], tensors: tuple[Facts, ...], indices: tuple[tuple[str, Range], ...]) -> str:
    """From the gradient of a score function's result to that of its score; adds to the gradients of the captured tensors ``wanted``."""
    derivative, graph = Program.parse(text).derivative, Graph()
    graph.instructions = list(derivative.instructions)
    dscore = graph.const(0.0).index if derivative.dscore is None else derivative.dscore
    reads = [read for read in derivative.reads if read.slot in wanted]
    kept, places = compact(graph, [dscore, *(place for read in reads for place in (read.gradient, *read.indices))])
    queue = iter(places[1:])
    scatters = tuple((read.slot, next(queue), tuple(next(queue) for _ in read.indices)) for read in reads)
    return _written(kept, places[0], scatters, tensors, dict(indices))


@functools.lru_cache(maxsize=1024)
def may_hide(text: str) -> bool:
    """Whether a score function can turn a finite score into -inf, as far as its instructions tell. What tensors hold is not known."""
    finite: list[bool] = []
    for op, args, value, kind in Program.parse(text).instructions:
        if op == "const":
            known = math.isfinite(value)
        elif op == "load":
            known = kind != "float"
        elif op == "div":
            divisor = Program.parse(text).instructions[args[1]]
            known = finite[args[0]] and divisor.op == "const" and divisor.value != 0
        elif op == "pow":
            known = finite[args[0]] and value >= 0
        else:
            known = op not in ("exp", "exp2", "log", "log2", "rsqrt") and all(finite[a] for a in args)
        finite.append(known)
    return not finite[-1]


# ---- writing


def _written(
    instructions: Sequence[Instruction],
    result: int,
    scatters: Sequence[tuple[int, int, tuple[int, ...]]],
    tensors: Sequence[Facts],
    indices: dict[str, Range],
) -> str:
    instructions = _folded(instructions)
    safe, tight = _ranges(instructions, tensors, ANY_SIZE), _ranges(instructions, tensors, indices)
    axes = _axes(instructions)
    kinds: list[str] = []
    lines: list[str] = []
    for position, (op, args, value, kind) in enumerate(instructions):
        wide = safe[position] != _clipped(safe[position], INT32) or any(kinds[a] == "l" for a in args)
        kinds.append(KINDS.get(kind, "l" if wide else "i"))
        words: list[Any] = list(args)
        if op == "var":
            op = value
        elif op == "const":
            words = [repr(torch.tensor(value, dtype=torch.float32, device="cpu").item()) if kind == "float" else int(value)]
        elif op == "load":
            known = all(tight[a][0] >= 0 and tight[a][1] < size for a, size in zip(args, tensors[value].shape, strict=True))
            words = [value, _flags(inside=known, narrow=tensors[value].narrow, adjacent=tensors[value].adjacent), *args]
        elif op == "pow":
            words.append(value)
        elif op in ("floordiv", "mod"):
            op, words = _division(op, args, instructions[args[1]], safe)
        lines.append(" ".join([op, kinds[-1], *map(str, words)]))
    for slot, gradient, places in scatters:
        seen = [axes[place] for place in places]
        flags = _flags(sum_rows=not any(rows for rows, _ in seen), sum_cols=not any(cols for _, cols in seen))
        lines.append(" ".join(map(str, ["scatter", "f", slot, flags, gradient, *places])))
    if not all(axes[result]) and kinds[result] == "f":
        lines.append(f"spread f {result}")
    elif result != len(lines) - 1:
        lines.append(f"float f {result}")
    return "\n".join(lines)


def _flags(**given: bool) -> str:
    return ",".join(name for name, on in given.items() if on) or "-"


def _division(op: str, args: tuple[int, ...], divisor: Instruction, ranges: Sequence[Range]) -> tuple[str, list[Any]]:
    """Division rounds down, as Python's; the hardware's rounds towards zero, which is the same for what is not negative."""
    if divisor.op == "const" and divisor.value > 0 and divisor.value & (divisor.value - 1) == 0:
        if op == "floordiv":
            return "shifted", [args[0], divisor.value.bit_length() - 1]
        return "masked", [args[0], divisor.value - 1]
    if ranges[args[0]][0] >= 0 and ranges[args[1]][0] > 0:
        return {"floordiv": "quotient", "mod": "rest"}[op], list(args)
    return op, list(args)


def _folded(instructions: Sequence[Instruction]) -> list[Instruction]:
    """Operations on constants alone, which derivatives have, become constants."""
    known: list[Instruction] = []
    for instruction in instructions:
        parts = [known[a] for a in instruction.args]
        if parts and instruction.op != "load" and all(part.op == "const" for part in parts):
            program = Program("", (*parts, instruction._replace(args=tuple(range(len(parts))))))
            value = program.evaluate({"q_idx": torch.zeros((), device="cpu")}, ()).item()
            instruction = Instruction("const", (), value, instruction.kind)
        known.append(instruction)
    return known


def _axes(instructions: Sequence[Instruction]) -> list[tuple[bool, bool]]:
    """Whether each value differs between the queries, and between the keys, of a tile."""
    axes: list[tuple[bool, bool]] = []
    for op, args, value, _ in instructions:
        if op == "var":
            axes.append((value in ("score", "grad", "q_idx", "p"), value in ("score", "grad", "kv_idx")))
        else:
            axes.append((any(axes[a][0] for a in args), any(axes[a][1] for a in args)))
    return axes


# ---- intervals


def _clipped(x: Range, limit: Range) -> Range:
    return max(x[0], limit[0]), min(x[1], limit[1])


def _hull(*values: int) -> Range:
    return min(values), max(values)


def _corners(f: Callable[[int, int], int], x: Range, y: Range) -> Range:
    return _hull(*(f(a, b) for a in x for b in y))


def _floordiv(x: Range, y: Range) -> Range:
    if y[0] <= 0 <= y[1]:
        return -max(map(abs, x)), max(map(abs, x))
    return _corners(lambda a, b: a // b, x, y)


def _mod(x: Range, y: Range) -> Range:
    if x[0] >= 0 and x[1] < y[0]:
        return x
    return min(y[0] + 1, 0), max(y[1] - 1, 0)


def _bitwise(x: Range, y: Range) -> Range:
    if x[0] < 0 or y[0] < 0:
        return INT32 if _clipped(x, INT32) == x and _clipped(y, INT32) == y else INT64
    return 0, (1 << max(x[1], y[1]).bit_length()) - 1


def _shift(f: Callable[[int, int], int]) -> Callable[[Range, Range], Range]:
    return lambda x, y: _corners(f, x, y) if y[0] >= 0 and y[1] < 63 else INT64


_INTERVALS: dict[str, Callable[..., Range]] = {
    "add": lambda x, y: (x[0] + y[0], x[1] + y[1]),
    "sub": lambda x, y: (x[0] - y[1], x[1] - y[0]),
    "mul": lambda x, y: _corners(lambda a, b: a * b, x, y),
    "floordiv": _floordiv,
    "mod": _mod,
    "neg": lambda x: (-x[1], -x[0]),
    "abs": lambda x: (0 if x[0] <= 0 <= x[1] else min(map(abs, x)), max(map(abs, x))),
    "min": lambda x, y: (min(x[0], y[0]), min(x[1], y[1])),
    "max": lambda x, y: (max(x[0], y[0]), max(x[1], y[1])),
    "where": lambda c, x, y: (min(x[0], y[0]), max(x[1], y[1])),
    "not": lambda x: (~x[1], ~x[0]),
    "and": _bitwise,
    "or": _bitwise,
    "xor": _bitwise,
    "lshift": _shift(lambda a, b: a << b),
    "rshift": _shift(lambda a, b: a >> b),
}


def _ranges(instructions: Sequence[Instruction], tensors: Sequence[Facts], indices: dict[str, Range]) -> list[Range]:
    """The least and the largest value of every integer; of booleans 0 and 1, of floats nothing."""
    ranges: list[Range] = []
    for op, args, value, kind in instructions:
        parts = [ranges[a] for a in args]
        if kind != "int":
            found = (0, 1 if kind == "bool" else 0)
        elif op == "var":
            found = indices[value]
        elif op == "const":
            found = (value, value)
        elif op == "load":
            info = torch.iinfo(tensors[value].dtype)
            found = (info.min, info.max)
        elif op == "int":
            found = parts[0] if instructions[args[0]].kind == "bool" else INT64
        else:
            found = _INTERVALS[op](*parts)
        ranges.append(_clipped(found, INT64))
    return ranges
