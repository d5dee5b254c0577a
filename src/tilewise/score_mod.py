"""Score and mask functions: traced into a program, written as text and read from it.

`trace_score_mod(f)` calls an ordinary Python function once with symbolic operands and returns what it computes as text, for example

    score + f0[h, q_idx - kv_idx]

together with the captured tensors that the text names f0 (floating), i1 (integer), b2 (boolean): the letter is the kind, the number
the position in the list. Text and tensors are what a torch.library op can carry. `Program.parse` turns the text back into
instructions; torch evaluates them (`evaluation`), kernels emit them as tile expressions, and `Program.derivative` is a list of the same
instructions (`score_adjoints`).
"""

from __future__ import annotations

import ast
import inspect
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from .errors import UnsupportedAttention
from .evaluation import Memory, execute, scatter
from .expressions import VARIABLES, Expr, Graph, Instruction, Tracing, compact
from .operations import FUNCTIONS, convert
from .score_adjoints import Derivative, derive

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%",
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=",
    "and": "&", "or": "|", "xor": "^", "lshift": "<<", "rshift": ">>",
}  # fmt: skip
_PREFIX = {"neg": "-", "not": "~"}
_DEEPEST = 24  # Python's parser gives up at about 100 nested brackets


# --------------------------------------------------------------------------------------------------------------------- tracing


def trace_score_mod(function: Callable[..., Any], device: torch.device | str | None = None, *, first: int = 0) -> tuple[str, list[Tensor]]:
    """The program text of `function(score, b, h, q_idx, kv_idx)` and the tensors it captures, numbered from `first` in the text.

    The function is called once. Lambdas, closures, bound methods and captured tensors (also such that require a gradient) work;
    Python numbers become constants of the text. Works inside torch.compile(fullgraph=True).

    Raises UnsupportedAttention for an operation outside the supported list and for Python control flow on symbolic operands.

    >>> slopes = torch.tensor([0.5, 0.25])
    >>> trace_score_mod(lambda score, b, h, q, k: score - slopes[h] * (q - k))[0]
    'score - (f0[h] * float(q_idx - kv_idx))'
    """
    graph = Graph(device)
    with Tracing():
        operands = [graph.var(name) for name in ("score", "b", "h", "q_idx", "kv_idx")]
        result = _called(function, "score_mod(score, b, h, q_idx, kv_idx)", *operands)
        root = convert(_result(graph, result, "score_mod", "the new score"), "float")
    return program_text(root, first=first)


def trace_mask_mod(function: Callable[..., Any], device: torch.device | str | None = None, *, first: int = 0) -> tuple[str, list[Tensor]]:
    """The program text of `function(b, h, q_idx, kv_idx)`, True where a query sees a key; otherwise as `trace_score_mod`.

    >>> trace_mask_mod(lambda b, h, q, k: (q >= k) & (q - k < 64))[0]
    '(q_idx >= kv_idx) & ((q_idx - kv_idx) < 64)'
    """
    graph = Graph(device)
    with Tracing():
        root = trace_mask(function, *[graph.var(name) for name in ("b", "h", "q_idx", "kv_idx")])
    return program_text(root, first=first)


def trace_mask(function: Callable[..., Any], b: Expr, h: Expr, q_idx: Expr, kv_idx: Expr) -> Expr:
    """The boolean expression that a mask function makes of these operands, as part of their graph; call it within `Tracing`."""
    result = _called(function, "the mask function(b, h, q_idx, kv_idx)", b, h, q_idx, kv_idx)
    root = _result(b.graph, result, "the mask function", "a boolean")
    if root.kind != "bool":
        raise UnsupportedAttention(f"the mask function returns a value of kind {root.kind}; return a boolean, as in q_idx >= kv_idx")
    return root


def _called(function: Callable[..., Any], call: str, *operands: Expr) -> Any:
    try:
        return function(*operands)
    except TypeError as error:
        advice = "" if _accepts(function, len(operands)) else f"; give a function of these {len(operands)} arguments"
        raise TypeError(f"calling {call} failed: {error}{advice}") from error


def _accepts(function: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(function).bind(*range(count))
    except ValueError:  # a function of C, of which nobody knows
        return True
    except TypeError:
        return False
    return True


def _result(graph: Graph, result: Any, name: str, wanted: str) -> Expr:
    if result is None or isinstance(result, (tuple, list, dict)):
        raise UnsupportedAttention(f"{name} returned {type(result).__name__}; it must return {wanted}")
    return graph.lift(result)


# ------------------------------------------------------------------------------------------------------------------------ text


def program_text(root: Expr, *, first: int = 0) -> tuple[str, list[Tensor]]:
    """The text that computes `root`, and the tensors it reads in the order of their numbers, which count from `first`."""
    graph = root.graph
    uses = [0] * root.index + [1]
    for position in range(root.index, -1, -1):
        if uses[position]:
            for argument in graph.instructions[position].args:
                uses[argument] += 1
    slots: list[int] = []
    lines: list[str] = []
    texts: list[str] = []
    operators: list[bool] = []  # written with an operator outside all brackets
    depths: list[int] = []
    for position in range(root.index + 1):
        instruction = graph.instructions[position]
        text, depth, has_operator = "", 0, False
        if uses[position]:
            if instruction.op == "load" and instruction.value not in slots:
                slots.append(instruction.value)
            number = first + slots.index(instruction.value) if instruction.op == "load" else 0
            has_operator = instruction.op in _INFIX or instruction.op in _PREFIX
            args = [f"({texts[i]})" if has_operator and operators[i] else texts[i] for i in instruction.args]
            text = _written(instruction, args, number)
            for argument in instruction.args:
                depth = max(depth, depths[argument] + 1)
            if position != root.index and (depth > _DEEPEST or (depth and uses[position] > 1)):
                lines.append(f"t{len(lines)} = {text}")
                text, depth, has_operator = f"t{len(lines) - 1}", 0, False
        texts.append(text)
        depths.append(depth)
        operators.append(has_operator)
    lines.append(texts[root.index])
    return "\n".join(lines), [graph.captured[slot] for slot in slots]


def _written(instruction: Instruction, args: list[str], number: int) -> str:
    op, value = instruction.op, instruction.value
    if op == "var":
        return value
    if op == "const":
        return f"{value}"
    if op == "load":
        name = f"{instruction.kind[0]}{number}"
        return f"{name}[{', '.join(args)}]" if args else name
    if op in _INFIX:
        return f"{args[0]} {_INFIX[op]} {args[1]}"
    if op in _PREFIX:
        return f"{_PREFIX[op]}{args[0]}"
    if op == "pow":
        return f"pow({args[0]}, {value})"
    return f"{op}({', '.join(args)})"


_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Eq: operator.eq,
    ast.NotEq: operator.ne, ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor,
    ast.LShift: operator.lshift, ast.RShift: operator.rshift, ast.USub: operator.neg, ast.Invert: operator.invert,
}  # fmt: skip
_KINDS = {"f": "float", "i": "int", "b": "bool"}


class _Reader:
    """Rebuilds the graph that a text describes. The text is Python's expression syntax, of which only what is named here is taken."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.names: dict[str, Expr] = {}

    def program(self, text: str) -> Expr:
        *assignments, last = ast.parse(text).body
        for statement in assignments:
            if not (isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)):
                raise ValueError("only assignments may precede the last line")
            self.names[statement.targets[0].id] = self.expression(statement.value)
        if not isinstance(last, ast.Expr):
            raise ValueError("the last line must be an expression")
        return self.expression(last.value)

    def expression(self, node: ast.expr) -> Expr:
        if isinstance(node, ast.Constant):
            return self.graph.lift(node.value)
        if isinstance(node, ast.Name):
            return self.name(node.id)
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            return self.load(node.value.id, tuple(self.expression(index) for index in indices))
        if isinstance(node, ast.UnaryOp):
            return _OPERATORS[type(node.op)](self.expression(node.operand))
        if isinstance(node, ast.BinOp):
            return _OPERATORS[type(node.op)](self.expression(node.left), self.expression(node.right))
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return _OPERATORS[type(node.ops[0])](self.expression(node.left), self.expression(node.comparators[0]))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id == "pow":
                return FUNCTIONS["pow"](self.expression(node.args[0]), float(ast.literal_eval(node.args[1])))
            return FUNCTIONS[node.func.id](*[self.expression(argument) for argument in node.args])
        raise ValueError(f"{ast.unparse(node)!r} is not part of the language")

    def name(self, name: str) -> Expr:
        if name in self.names:
            return self.names[name]
        if name in VARIABLES:
            return self.graph.var(name)
        if name in ("inf", "nan"):
            return self.graph.const(float(name))
        return self.load(name, ())

    def load(self, name: str, indices: tuple[Expr, ...]) -> Expr:
        if not re.fullmatch(r"[fib]\d+", name):
            raise ValueError(f"{name!r} is neither a variable nor a captured tensor")
        return self.graph.load(int(name[1:]), _KINDS[name[0]], indices)


def check_reads(text: str, captured: Sequence[Tensor], batch: int, heads: int) -> None:
    """Refuses a captured tensor that is indexed by b or h itself and has fewer places there: reads outside a tensor give NaN, 0 or False,
    and equal zeros would make a mask of ids show everything."""
    if not text or torch.compiler.is_compiling():
        return
    instructions = Program.parse(text).instructions
    for instruction in instructions:
        if instruction.op != "load":
            continue
        shape = captured[instruction.value].shape
        for dim, (size, position) in enumerate(zip(shape, instruction.args, strict=True)):
            index = instructions[position]
            count = {"b": batch, "h": heads}.get(index.value) if index.op == "var" else None
            if count is not None and size < count:
                raise ValueError(
                    f"a function of scores or masks reads a captured tensor of shape {tuple(shape)} at index {index.value} in dimension "
                    f"{dim}, and {index.value} runs to {count - 1}; expand the tensor there, or index it with 0 if one entry serves all"
                )


# -------------------------------------------------------------------------------------------------------------------- programs


@dataclass(frozen=True)
class Program:
    """A traced function as a list of instructions, each with positions of earlier ones as operands; the last is the result."""

    text: str
    instructions: tuple[Instruction, ...]

    @staticmethod
    def parse(text: str) -> Program:
        """The program of a text; the same object for the same text. Raises ValueError for anything that is not a program."""
        return _parse(text)

    @cached_property
    def derivative(self) -> Derivative:
        """Reverse-mode derivative, as instructions that also read `grad`, the gradient of the result."""
        return derive(self.instructions)

    def evaluate(self, env: Mapping[str, Tensor], captured: Sequence[Tensor], memory: Memory | None = None) -> Tensor:
        """The result on a tile.

        `env` maps `b, h, q_idx, kv_idx, p` to int64 tensors that broadcast to the tile, and `score` to the tile in the accumulator
        dtype, in which all floating-point arithmetic happens (float32 where there is no score). The result of a score function has
        the score's shape and dtype; it may share the score's memory, or lie in `memory`. That of a mask function is bool and broadcasts
        to the tile.
        """
        score = env.get("score")
        dtype = torch.float32 if score is None else score.dtype
        (result,) = execute(self.instructions, [len(self.instructions) - 1], env, captured, dtype, memory)
        return result if score is None else result.expand(score.shape)

    def vjp(
        self,
        env: Mapping[str, Tensor],
        captured: Sequence[Tensor],
        grad: Tensor,
        into: Sequence[Tensor | None] | None = None,
        memory: Memory | None = None,
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Gradients of a score function from `grad`, the gradient of its result on a tile: of the score, and of each captured tensor.

        A captured tensor's gradient has its shape and grad's dtype; None where the tensor is not floating or not read here. With
        `into`, contiguous buffers one a captured tensor, gradients are added to these instead, and those of None are skipped.
        Where `grad` is 0 every gradient is 0, whatever the score or the tensors hold. The result is the same on every run.
        """
        derivative = self.derivative
        reads = [read for read in derivative.reads if into is None or into[read.slot] is not None]
        outputs = [] if derivative.dscore is None else [derivative.dscore]
        for read in reads:
            outputs += [read.gradient, *read.indices]
        values = iter(execute(derivative.instructions, outputs, {**env, "grad": grad}, captured, grad.dtype, memory))
        dscore = torch.zeros_like(grad) if derivative.dscore is None else next(values)
        totals: list[Tensor | None] = [None] * len(captured) if into is None else list(into)
        for read in reads:
            gradient, indices = next(values), [next(values) for _ in read.indices]
            total = totals[read.slot]
            if total is None:
                total = totals[read.slot] = torch.zeros(captured[read.slot].shape, dtype=grad.dtype, device=grad.device)
            scatter(total, gradient, indices)
        return dscore.expand(grad.shape), totals


@lru_cache(maxsize=1024)
def _parse(text: str) -> Program:
    try:
        root = _Reader().program(text)
    except (ValueError, TypeError, KeyError, SyntaxError) as error:
        raise ValueError(f"not the text of a traced program: {error}\n{text}") from error
    instructions, _ = compact(root.graph, [root.index])
    return Program(text, instructions)
