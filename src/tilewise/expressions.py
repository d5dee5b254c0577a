"""The small language in which rules and score functions reach the kernels.

A graph holds scalar instructions over one (query, key) pair: the variables `score, b, h, q_idx, kv_idx, p`, constants, reads of
captured tensors, and operations on these (`operations`). Every value has one kind, `float` (computed in the accumulator dtype), `int`
or `bool`; conversions are instructions of their own, so that no evaluator has promotion rules. Equal instructions are one.

`Expr` is a handle on one instruction that behaves like a 0-d tensor: Python's operators and, through PyTorch's
`__torch_function__` protocol, functions of `torch` applied to it add instructions instead of computing.
"""

from __future__ import annotations

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
        return operations.arithmetic("add", self, other)

    def __radd__(self, other: Any) -> Expr:
        return operations.arithmetic("add", other, self)

    def __sub__(self, other: Any) -> Expr:
        return operations.arithmetic("sub", self, other)

    def __rsub__(self, other: Any) -> Expr:
        return operations.arithmetic("sub", other, self)

    def __mul__(self, other: Any) -> Expr:
        return operations.arithmetic("mul", self, other)

    def __rmul__(self, other: Any) -> Expr:
        return operations.arithmetic("mul", other, self)

    def __truediv__(self, other: Any) -> Expr:
        return operations.divide(self, other)

    def __rtruediv__(self, other: Any) -> Expr:
        return operations.divide(other, self)

    def __floordiv__(self, other: Any) -> Expr:
        return operations.floor_divide(self, other)

    def __rfloordiv__(self, other: Any) -> Expr:
        return operations.floor_divide(other, self)

    def __mod__(self, other: Any) -> Expr:
        return operations.remainder(self, other)

    def __rmod__(self, other: Any) -> Expr:
        return operations.remainder(other, self)

    def __pow__(self, other: Any) -> Expr:
        return operations.power(self, other)

    def __rpow__(self, other: Any) -> Expr:
        return operations.power(other, self)

    def __neg__(self) -> Expr:
        return operations.negative(self)

    def __pos__(self) -> Expr:
        return self

    def __abs__(self) -> Expr:
        return operations.absolute(self)

    def __lt__(self, other: Any) -> Expr:
        return operations.compare("lt", self, other)

    def __le__(self, other: Any) -> Expr:
        return operations.compare("le", self, other)

    def __gt__(self, other: Any) -> Expr:
        return operations.compare("gt", self, other)

    def __ge__(self, other: Any) -> Expr:
        return operations.compare("ge", self, other)

    def __eq__(self, other: Any) -> Expr:  # type: ignore[override]
        return operations.compare("eq", self, other)

    def __ne__(self, other: Any) -> Expr:  # type: ignore[override]
        return operations.compare("ne", self, other)

    def __and__(self, other: Any) -> Expr:
        return operations.bitwise("and", self, other)

    def __rand__(self, other: Any) -> Expr:
        return operations.bitwise("and", other, self)

    def __or__(self, other: Any) -> Expr:
        return operations.bitwise("or", self, other)

    def __ror__(self, other: Any) -> Expr:
        return operations.bitwise("or", other, self)

    def __xor__(self, other: Any) -> Expr:
        return operations.bitwise("xor", self, other)

    def __rxor__(self, other: Any) -> Expr:
        return operations.bitwise("xor", other, self)

    def __lshift__(self, other: Any) -> Expr:
        return operations.shift("lshift", self, other)

    def __rshift__(self, other: Any) -> Expr:
        return operations.shift("rshift", self, other)

    def __invert__(self) -> Expr:
        return operations.invert(self)

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
    """Sends functions of torch that meet an expression to `operations`, also where it hides in an index tuple, as in `table[h, q_idx]`.

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
    """What `operations` has under the name of a function of torch."""
    if name not in operations.FUNCTIONS:
        raise UnsupportedAttention(
            f"the operation {name.removeprefix('__').removesuffix('__')!r} cannot be traced into a kernel; supported are Python's "
            f"arithmetic, comparison and bitwise operators, indexing of captured tensors, and {', '.join(operations.SUPPORTED)}"
        )
    return operations.FUNCTIONS[name]


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


from . import operations  # noqa: E402  it is built on the classes above, whose operators are its functions
