"""The small language in which rules and score functions reach the kernels.

A graph holds scalar instructions over one (query, key) pair: the variables `score, b, h, q_idx, kv_idx, p`, constants, reads of
captured tensors, and the operations of `SUPPORTED`. Every value has one kind, `float` (computed in the accumulator dtype), `int`
or `bool`; conversions are instructions of their own, so that no evaluator has promotion rules. Equal instructions are one.

`Expr` is a handle on one instruction that behaves like a 0-d tensor: Python's operators and, through PyTorch's
`__torch_function__` protocol, functions of `torch` applied to it add instructions instead of computing.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .errors import UnsupportedAttention

VARIABLES = {
    **dict.fromkeys(("score", "score_tangent", "grad", "grad_tangent"), "float"),
    **dict.fromkeys(("b", "h", "q_idx", "kv_idx", "p"), "int"),
}
_RANDOM = frozenset(
    ("rand", "randn", "randint", "normal", "bernoulli", "rand_like", "randn_like", "randint_like", "multinomial", "dropout")
)
_RANK = {"bool": 0, "int": 1, "float": 2}
_DTYPE = {"bool": torch.bool, "int": torch.int64, "float": torch.float32}


class Instruction(NamedTuple):
    """One operation; `args` are positions of earlier instructions, `value` a constant, a variable's name or a slot number."""

    op: str
    args: tuple[int, ...]
    value: Any
    kind: str


def same_device(one: torch.device, other: torch.device) -> bool:
    """Whether two devices are the same as far as they say; `cuda` leaves the index open."""
    return one.type == other.type and (one.index == other.index or None in (one.index, other.index))


def kind_of(dtype: torch.dtype) -> str:
    """The kind in which values of this dtype are computed."""
    if dtype.is_complex:
        raise UnsupportedAttention(f"functions of scores and masks cannot read complex tensors ({dtype}); pass real ones")
    return "float" if dtype.is_floating_point else "bool" if dtype == torch.bool else "int"


class Graph:
    """A growing list of instructions and the tensors they read."""

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.device = None if device is None else torch.device(device)
        self.instructions: list[Instruction] = []
        self.captured: list[Tensor] = []
        self._known: dict[tuple[str, tuple[int, ...], str, str], int] = {}

    def add(self, op: str, args: tuple[int, ...] = (), value: Any = None, kind: str = "float") -> Expr:
        key = (op, args, f"{value}", kind)  # torch.compile makes a symbolic size a number in an f-string, not in repr
        if key not in self._known:
            self._known[key] = len(self.instructions)
            self.instructions.append(Instruction(op, args, value, kind))
        return Expr(self, self._known[key], kind)

    def var(self, name: str) -> Expr:
        return self.add("var", value=name, kind=VARIABLES[name])

    def const(self, value: bool | int | float, kind: str | None = None) -> Expr:
        if kind is None:
            kind = "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "float"
        if kind == "int" and not -(2**63) <= value < 2**63:
            raise ValueError(f"a function of scores or masks uses the integer {value}; its integers have 64 bits")
        cast: Callable[[Any], Any] = float if kind == "float" else int if kind == "int" else bool
        return self.add("const", value=cast(value), kind=kind)

    def load(self, slot: int, kind: str, indices: tuple[Expr, ...] = ()) -> Expr:
        return self.add("load", tuple(i.index for i in indices), slot, kind)

    def slot(self, tensor: Tensor) -> int:
        """The number under which programs read this tensor."""
        for number, known in enumerate(self.captured):
            if known is tensor:
                return number
        self.captured.append(tensor)
        return len(self.captured) - 1

    def lift(self, value: Any) -> Expr:
        """A number, a 0-d tensor or an expression, as an expression."""
        if isinstance(value, Expr):
            return value
        if isinstance(value, (bool, int, float)):
            return self.const(value)
        if isinstance(value, PartlyIndexed):
            raise UnsupportedAttention(
                f"a captured tensor of shape {tuple(value.tensor.shape)} is used with only {len(value.indices)} of its "
                f"{value.tensor.ndim} dimensions indexed; index all of them with integers made from b, h, q_idx and kv_idx"
            )
        if isinstance(value, Tensor):
            if value.ndim:
                raise UnsupportedAttention(
                    f"a captured tensor of shape {tuple(value.shape)} is used whole, but the function sees one (query, key) pair "
                    "at a time; index it with integers made from b, h, q_idx and kv_idx, as in table[h, q_idx - kv_idx]"
                )
            return index(self, value, ())
        if isinstance(value, numbers.Integral):
            return self.const(int(value))
        if isinstance(value, numbers.Real):
            return self.const(float(value))
        raise UnsupportedAttention(f"a value of type {type(value).__name__} cannot take part in a function of scores or masks")


def compact(graph: Graph, outputs: Sequence[int]) -> tuple[tuple[Instruction, ...], list[int]]:
    """The instructions that the outputs need, in order, and the outputs' positions among them."""
    needed = set(outputs)
    for position in range(max(outputs, default=-1), -1, -1):
        if position in needed:
            needed.update(graph.instructions[position].args)
    place = {position: rank for rank, position in enumerate(sorted(needed))}
    kept = tuple(graph.instructions[p]._replace(args=tuple(place[a] for a in graph.instructions[p].args)) for p in sorted(needed))
    return kept, [place[output] for output in outputs]


class Expr:
    """One value of a graph; it behaves like a 0-d tensor whose value is not known yet."""

    __slots__ = ("graph", "index", "kind")
    __hash__ = None  # type: ignore[assignment]
    __array_ufunc__ = None  # numpy scalars on the left then leave the operation to this class

    def __init__(self, graph: Graph, index: int, kind: str) -> None:
        self.graph = graph
        self.index = index
        self.kind = kind

    def __repr__(self) -> str:
        return f"<{self.kind} value number {self.index}: {self.graph.instructions[self.index].op}>"

    def __add__(self, other: Any) -> Expr:
        return arithmetic("add", self, other)

    def __radd__(self, other: Any) -> Expr:
        return arithmetic("add", other, self)

    def __sub__(self, other: Any) -> Expr:
        return arithmetic("sub", self, other)

    def __rsub__(self, other: Any) -> Expr:
        return arithmetic("sub", other, self)

    def __mul__(self, other: Any) -> Expr:
        return arithmetic("mul", self, other)

    def __rmul__(self, other: Any) -> Expr:
        return arithmetic("mul", other, self)

    def __truediv__(self, other: Any) -> Expr:
        return divide(self, other)

    def __rtruediv__(self, other: Any) -> Expr:
        return divide(other, self)

    def __floordiv__(self, other: Any) -> Expr:
        return floor_divide(self, other)

    def __rfloordiv__(self, other: Any) -> Expr:
        return floor_divide(other, self)

    def __mod__(self, other: Any) -> Expr:
        return remainder(self, other)

    def __rmod__(self, other: Any) -> Expr:
        return remainder(other, self)

    def __pow__(self, other: Any) -> Expr:
        return power(self, other)

    def __rpow__(self, other: Any) -> Expr:
        return power(other, self)

    def __neg__(self) -> Expr:
        return negative(self)

    def __pos__(self) -> Expr:
        return self

    def __abs__(self) -> Expr:
        return absolute(self)

    def __lt__(self, other: Any) -> Expr:
        return compare("lt", self, other)

    def __le__(self, other: Any) -> Expr:
        return compare("le", self, other)

    def __gt__(self, other: Any) -> Expr:
        return compare("gt", self, other)

    def __ge__(self, other: Any) -> Expr:
        return compare("ge", self, other)

    def __eq__(self, other: Any) -> Expr:  # type: ignore[override]
        return compare("eq", self, other)

    def __ne__(self, other: Any) -> Expr:  # type: ignore[override]
        return compare("ne", self, other)

    def __and__(self, other: Any) -> Expr:
        return bitwise("and", self, other)

    def __rand__(self, other: Any) -> Expr:
        return bitwise("and", other, self)

    def __or__(self, other: Any) -> Expr:
        return bitwise("or", self, other)

    def __ror__(self, other: Any) -> Expr:
        return bitwise("or", other, self)

    def __xor__(self, other: Any) -> Expr:
        return bitwise("xor", self, other)

    def __rxor__(self, other: Any) -> Expr:
        return bitwise("xor", other, self)

    def __lshift__(self, other: Any) -> Expr:
        return shift("lshift", self, other)

    def __rshift__(self, other: Any) -> Expr:
        return shift("rshift", self, other)

    def __invert__(self) -> Expr:
        return invert(self)

    def __bool__(self) -> bool:
        raise UnsupportedAttention(
            "the function decides in Python (if, and, or, not, min(), max(), in) on a value that differs from one (query, key) "
            "pair to the next; write torch.where(condition, a, b), combine conditions with & | ~, use torch.minimum/torch.maximum"
        )

    def _to_python(self) -> Any:
        raise UnsupportedAttention(
            "the function turns a value that differs from one (query, key) pair to the next into a Python number "
            "(int(), float(), range(), .item(), math functions); use torch functions, and .to(torch.int64) or .float()"
        )

    __int__ = __float__ = __index__ = __complex__ = __len__ = __iter__ = item = tolist = _to_python

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPE[self.kind]

    @property
    def device(self) -> torch.device | None:
        return self.graph.device

    @property
    def shape(self) -> torch.Size:
        return torch.Size(())

    @property
    def ndim(self) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return partial(_function(name), self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        return _function(func.__name__)(*args, **(kwargs or {}))


class PartlyIndexed:
    """A captured tensor on the way to one of its elements, as in `table[b][h]`."""

    __slots__ = ("graph", "indices", "tensor")

    def __init__(self, graph: Graph, tensor: Tensor, indices: tuple[Any, ...]) -> None:
        self.graph = graph
        self.tensor = tensor
        self.indices = indices

    def __getitem__(self, indices: Any) -> Any:
        return index(self.graph, self.tensor, (*self.indices, *(indices if isinstance(indices, tuple) else (indices,))))


class Tracing(TorchFunctionMode):
    """Sends functions of torch that meet an expression to this module, also where it hides in an index tuple, as in `table[h, q_idx]`.

    In eager mode `Expr.__torch_function__` alone would do; torch.compile looks only at the arguments themselves.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        for argument in args:
            if isinstance(argument, Expr) or (isinstance(argument, tuple) and any(isinstance(item, Expr) for item in argument)):
                return _function(func.__name__)(*args, **(kwargs or {}))
        if func.__name__ in _RANDOM:
            raise UnsupportedAttention(
                f"{func.__name__} would be drawn once and be the same number for every (query, key) pair; use dropout_p, or read a tensor "
                "that was drawn outside the function"
            )
        return func(*args, **(kwargs or {}))


def _function(name: str) -> Callable[..., Any]:
    if name not in FUNCTIONS:
        raise UnsupportedAttention(
            f"the operation {name.removeprefix('__').removesuffix('__')!r} cannot be traced into a kernel; supported are Python's "
            f"arithmetic, comparison and bitwise operators, indexing of captured tensors, and {', '.join(SUPPORTED)}"
        )
    return FUNCTIONS[name]


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


def index(graph: Graph, tensor: Tensor, indices: tuple[Any, ...]) -> Any:
    """An element of a captured tensor; negative indices count from the end, an index outside reads NaN (0 or False)."""
    if any(position is None or position is Ellipsis or isinstance(position, slice) for position in indices):
        raise UnsupportedAttention(
            "captured tensors are indexed by one integer for each dimension, not by slices, None or ...; slice the tensor outside the "
            "function"
        )
    if len(indices) > tensor.ndim:
        raise IndexError(f"too many indices for a captured tensor of shape {tuple(tensor.shape)}")
    if len(indices) < tensor.ndim:
        return PartlyIndexed(graph, tensor, indices)
    lifted = []
    for position in indices:
        number = graph.lift(position)
        if number.kind != "int":
            raise UnsupportedAttention(f"captured tensors are indexed by integers, not by a {number.kind}; convert with .to(torch.int64)")
        lifted.append(number)
    if tensor.ndim == 0 and graph.device is not None and tensor.device.type == "cpu" and graph.device.type != "cpu":
        tensor = tensor.to(graph.device)
    if graph.device is not None and not same_device(tensor.device, graph.device):
        raise ValueError(
            f"a function of scores or masks captures a tensor of shape {tuple(tensor.shape)} that is on {tensor.device}, but the "
            f"inputs are on {graph.device}; move it there"
        )
    return graph.load(graph.slot(tensor), kind_of(tensor.dtype), tuple(lifted))


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
