"""What can be traced: the operations on expressions, and the functions of torch and methods of tensors that stand for them.

Each adds instructions to the graph of its operands, after the conversions that PyTorch would make of a tensor and a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .errors import UnsupportedAttention
from .expressions import Expr, Graph, PartlyIndexed, index, kind_of

_RANK = {"bool": 0, "int": 1, "float": 2}


def _graph(*values: Any) -> Graph:
    for value in values:
        if isinstance(value, (Expr, PartlyIndexed)):
            return value.graph
    raise UnsupportedAttention("none of the operands depends on score, b, h, q_idx or kv_idx")


def convert(x: Expr, kind: str) -> Expr:
    """x as a value of another kind; floats become integers by truncation, as with Tensor.to."""
    if x.kind == kind:
        return x
    source = x.graph.instructions[x.index]
    if source.op == "const":
        return x.graph.const(source.value, kind)
    if kind == "bool":
        return compare("ne", x, 0)
    return x.graph.add(kind, (x.index,), kind=kind)


def _unify(a: Any, b: Any, least: str = "bool") -> tuple[Expr, Expr]:
    graph = _graph(a, b)
    a, b = graph.lift(a), graph.lift(b)
    kind = least
    for value in (a, b):
        if _RANK[value.kind] > _RANK[kind]:
            kind = value.kind
    return convert(a, kind), convert(b, kind)


def _binary(op: str, a: Expr, b: Expr, kind: str | None = None) -> Expr:
    return a.graph.add(op, (a.index, b.index), kind=kind or a.kind)


def _real(op: str, x: Any) -> Expr:
    x = convert(_graph(x).lift(x), "float")
    return x.graph.add(op, (x.index,))


def arithmetic(op: str, a: Any, b: Any, *, alpha: float = 1) -> Expr:
    """add, sub, mul, min, max; on two booleans what PyTorch makes of them (or, and)."""
    if alpha != 1:
        b = arithmetic("mul", _graph(a, b).lift(b), alpha)
    a, b = _unify(a, b)
    if a.kind == "bool":
        if op == "sub":
            raise UnsupportedAttention("two booleans cannot be subtracted; use ^ or ~")
        return _binary("or" if op in ("add", "max") else "and", a, b)
    return _binary(op, a, b)


def divide(a: Any, b: Any, *, rounding_mode: str | None = None) -> Expr:
    if rounding_mode == "floor":
        return floor_divide(a, b)
    if rounding_mode is not None:
        raise UnsupportedAttention(f"div with rounding_mode={rounding_mode!r} cannot be traced; use None or 'floor'")
    return _binary("div", *_unify(a, b, "float"))


def floor_divide(a: Any, b: Any) -> Expr:
    a, b = _unify(a, b, "int")
    if a.kind == "float":
        return _real("floor", divide(a, b))
    _refuse_zero(b)
    return _binary("floordiv", a, b)


def remainder(a: Any, b: Any) -> Expr:
    a, b = _unify(a, b, "int")
    if a.kind == "float":
        return a - b * floor_divide(a, b)
    _refuse_zero(b)
    return _binary("mod", a, b)


def _refuse_zero(divisor: Expr) -> None:
    instruction = divisor.graph.instructions[divisor.index]
    if instruction.op == "const" and instruction.value == 0:
        raise ZeroDivisionError("the function divides integers by zero")


def power(a: Any, b: Any) -> Expr:
    """x to a constant, or a positive constant to x."""
    if isinstance(b, (int, float)) and not isinstance(b, bool):
        x = _graph(a).lift(a)
        if isinstance(b, int) and 1 <= b <= 8:
            result = x
            for _ in range(b - 1):
                result = result * x
            return result
        x = convert(x, "float")
        if b == 0.5:
            return _real("sqrt", x)
        if b == -0.5:
            return _real("rsqrt", x)
        return x.graph.add("pow", (x.index,), value=float(b))
    if isinstance(a, (int, float)) and a > 0:
        return _real("exp2", b if a == 2 else b * math.log2(a))
    raise UnsupportedAttention("pow needs a constant exponent, or a positive constant as base; write torch.exp(y * torch.log(x))")


def negative(x: Any) -> Expr:
    x = _graph(x).lift(x)
    if x.kind == "bool":
        raise UnsupportedAttention("a boolean has no negative; use ~")
    instruction = x.graph.instructions[x.index]
    if instruction.op == "const":
        return x.graph.const(-instruction.value)
    return x.graph.add("neg", (x.index,), kind=x.kind)


def absolute(x: Any) -> Expr:
    x = convert(_graph(x).lift(x), "int") if _graph(x).lift(x).kind == "bool" else _graph(x).lift(x)
    return x.graph.add("abs", (x.index,), kind=x.kind)


def compare(op: str, a: Any, b: Any) -> Expr:
    a, b = _unify(a, b, "bool" if op in ("eq", "ne") else "int")
    return _binary(op, a, b, "bool")


def bitwise(op: str, a: Any, b: Any) -> Expr:
    a, b = _unify(a, b)
    if a.kind == "float":
        raise UnsupportedAttention(f"bitwise_{op} needs booleans or integers, not floating-point values")
    for one, other in ((a, b), (b, a)):
        source = one.graph.instructions[one.index]
        if a.kind == "bool" and source.op == "const" and (op, source.value) in (("and", True), ("or", False)):
            return other  # the constant is what a combination of masks starts from
    return _binary(op, a, b)


def logical(op: str, a: Any, b: Any) -> Expr:
    graph = _graph(a, b)
    return _binary(op, convert(graph.lift(a), "bool"), convert(graph.lift(b), "bool"))


def shift(op: str, a: Any, b: Any) -> Expr:
    a, b = _unify(a, b, "int")
    if a.kind == "float":
        raise UnsupportedAttention("shifts need integers, not floating-point values")
    return _binary(op, a, b)


def invert(x: Any) -> Expr:
    x = _graph(x).lift(x)
    if x.kind == "float":
        raise UnsupportedAttention("bitwise_not needs a boolean or an integer, not a floating-point value")
    return x.graph.add("not", (x.index,), kind=x.kind)


def where(condition: Any, a: Any, b: Any) -> Expr:
    graph = _graph(condition, a, b)
    condition = convert(graph.lift(condition), "bool")
    a, b = _unify(graph.lift(a), b)
    return graph.add("where", (condition.index, a.index, b.index), kind=a.kind)


def clamp(x: Any, min: Any = None, max: Any = None) -> Expr:
    """Bounds as selections, so that the gradient passes at the bounds themselves, as PyTorch's does."""
    x = _graph(x, min, max).lift(x)
    if max is not None:
        x = where(x > max, max, x)
    if min is not None:
        x = where(x < min, min, x)
    return x


def to(x: Any, *args: Any, **kwargs: Any) -> Expr:
    for target in (*args, *kwargs.values()):
        dtype = target if isinstance(target, torch.dtype) else getattr(target, "dtype", None)
        if dtype is not None:
            return convert(x, kind_of(dtype))
    return x


def _getitem(tensor: Tensor, indices: Any) -> Any:
    indices = indices if isinstance(indices, tuple) else (indices,)
    return index(_graph(*indices), tensor, indices)


def _sign(x: Expr) -> Expr:
    return where(x > 0, 1.0, where(x < 0, -1.0, 0.0))


def _like(x: Expr, fill_value: float, *, dtype: torch.dtype | None = None, **_: Any) -> Expr:
    """A constant of x's kind, or of that of `dtype`."""
    return x.graph.const(fill_value, x.kind if dtype is None else kind_of(dtype))


def _new(x: Expr, size: Any, fill_value: float, **keywords: Any) -> Expr:
    """`x.new_full(size, ...)`: one value for each pair, as every other one."""
    if not isinstance(size, (tuple, list)) or len(size):
        raise UnsupportedAttention(f"the function sees one (query, key) pair at a time: a tensor that it makes has size (), not {size}")
    return _like(x, fill_value, **keywords)


def _new_filled(fill_value: float) -> Callable[..., Expr]:
    """`x.new_zeros` or `x.new_ones`, whose size may be one tuple, a keyword or several numbers."""

    def new(x: Expr, *sizes: Any, size: Any = None, **keywords: Any) -> Expr:
        given = sizes if size is None else (size,)
        return _new(x, given[0] if len(given) == 1 else given, fill_value, **keywords)

    return new


_NAMED: dict[str, Callable[..., Any]] = {
    "add": partial(arithmetic, "add"),
    "sub": partial(arithmetic, "sub"),
    "mul": partial(arithmetic, "mul"),
    "div": divide,
    "floor_divide": floor_divide,
    "remainder": remainder,
    "pow": power,
    "square": lambda x: x * x,
    "reciprocal": lambda x: divide(1.0, x),
    "neg": negative,
    "abs": absolute,
    "sign": _sign,
    "minimum": partial(arithmetic, "min"),
    "maximum": partial(arithmetic, "max"),
    "clamp": clamp,
    "clamp_min": lambda x, min: clamp(x, min=min),
    "clamp_max": lambda x, max: clamp(x, max=max),
    "relu": lambda x, inplace=False: where(x <= 0, 0, x),
    "exp": partial(_real, "exp"),
    "exp2": partial(_real, "exp2"),
    "log": partial(_real, "log"),
    "log2": partial(_real, "log2"),
    "sqrt": partial(_real, "sqrt"),
    "rsqrt": partial(_real, "rsqrt"),
    "tanh": partial(_real, "tanh"),
    "sigmoid": partial(_real, "sigmoid"),
    "sin": partial(_real, "sin"),
    "cos": partial(_real, "cos"),
    "erf": partial(_real, "erf"),
    "floor": partial(_real, "floor"),
    "ceil": partial(_real, "ceil"),
    "where": where,
    "masked_fill": lambda x, mask, value: where(mask, value, x),
    "eq": partial(compare, "eq"),
    "ne": partial(compare, "ne"),
    "lt": partial(compare, "lt"),
    "le": partial(compare, "le"),
    "gt": partial(compare, "gt"),
    "ge": partial(compare, "ge"),
    "logical_and": partial(logical, "and"),
    "logical_or": partial(logical, "or"),
    "logical_xor": partial(logical, "xor"),
    "logical_not": lambda x: invert(convert(x, "bool")),
    "bitwise_and": partial(bitwise, "and"),
    "bitwise_or": partial(bitwise, "or"),
    "bitwise_xor": partial(bitwise, "xor"),
    "bitwise_not": invert,
    "bitwise_left_shift": partial(shift, "lshift"),
    "bitwise_right_shift": partial(shift, "rshift"),
    "to": to,
    "type_as": to,
    "float": lambda x: convert(x, "float"),
    "long": lambda x: convert(x, "int"),
    "int": lambda x: convert(x, "int"),
    "bool": lambda x: convert(x, "bool"),
    "zeros_like": partial(_like, fill_value=0),
    "ones_like": partial(_like, fill_value=1),
    "full_like": _like,
    "new_zeros": _new_filled(0),
    "new_ones": _new_filled(1),
    "new_full": _new,
    "new_tensor": _like,
}
SUPPORTED = tuple(sorted(_NAMED))
_ALIASES = {
    "subtract": "sub",
    "multiply": "mul",
    "divide": "div",
    "true_divide": "div",
    "negative": "neg",
    "absolute": "abs",
    "sgn": "sign",
    "min": "minimum",
    "max": "maximum",
    "clip": "clamp",
    "not_equal": "ne",
    "less": "lt",
    "less_equal": "le",
    "greater": "gt",
    "greater_equal": "ge",
    "double": "float",
    "half": "float",
    "bfloat16": "float",
    "__pow__": "pow",
    "__floordiv__": "floor_divide",
    "__mod__": "remainder",
    "__and__": "bitwise_and",
    "__or__": "bitwise_or",
    "__xor__": "bitwise_xor",
    "__lshift__": "bitwise_left_shift",
    "__rshift__": "bitwise_right_shift",
}
FUNCTIONS: dict[str, Callable[..., Any]] = {**_NAMED, **{alias: _NAMED[name] for alias, name in _ALIASES.items()}, "__getitem__": _getitem}
