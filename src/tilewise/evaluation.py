"""The values of a program on a tile, computed by torch one instruction after the other, and the memory that they lie in."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .expressions import Instruction

_TORCH: dict[str, Callable[..., Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "floordiv": torch.floor_divide, "mod": torch.remainder,
    "min": torch.minimum, "max": torch.maximum, "neg": torch.neg, "abs": torch.abs, "lt": torch.lt, "le": torch.le, "gt": torch.gt,
    "ge": torch.ge, "eq": torch.eq, "ne": torch.ne, "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor,
    "not": torch.bitwise_not, "lshift": torch.bitwise_left_shift, "rshift": torch.bitwise_right_shift, "where": torch.where,
    "exp": torch.exp, "exp2": torch.exp2, "log": torch.log, "log2": torch.log2, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt,
    "tanh": torch.tanh, "sigmoid": torch.sigmoid, "sin": torch.sin, "cos": torch.cos, "erf": torch.erf, "floor": torch.floor,
    "ceil": torch.ceil, "int": lambda x: x.to(torch.int64),
    "chain": lambda grad, slope: torch.where(grad == 0, grad, grad * slope),
}  # fmt: skip


class Memory:
    """Memory for the results of programs, used again tile after tile: fresh pages would cost several times the arithmetic on them.

    What a program returns may lie in it, until the next program runs.
    """

    def __init__(self) -> None:
        self.all: list[Tensor] = []
        self.free: list[Tensor] = []

    def take(self, size: torch.Size, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """A tensor of that size, and what to put back into `free` when it is not needed any more."""
        count = size.numel()
        fitting = [n for n, x in enumerate(self.free) if x.numel() >= count and x.dtype == dtype]
        if fitting:
            whole = self.free.pop(fitting[-1])
        else:
            whole = torch.empty(count, dtype=dtype, device=device)
            self.all.append(whole)
        return whole[:count].view(size), whole


_INTO_MEMORY = frozenset(
    ["add", "sub", "mul", "div", "min", "max", "neg", "abs", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "tanh", "sigmoid"]
)
_LARGE = 1 << 15  # elements: smaller results come from the allocator's own lists


def execute(
    instructions: Sequence[Instruction],
    outputs: Sequence[int],
    env: Mapping[str, Tensor],
    captured: Sequence[Tensor],
    dtype: torch.dtype,
    memory: Memory | None = None,
) -> list[Tensor]:
    """The outputs' values, which may lie in `memory`; what none of them needs is not computed."""
    device = env["q_idx"].device
    dtypes = {"float": dtype, "int": torch.int64, "bool": torch.bool}
    needed = set(outputs)
    for position in range(len(instructions) - 1, -1, -1):
        if position in needed:
            needed.update(instructions[position].args)
    last_use = {argument: position for position in sorted(needed) for argument in instructions[position].args}
    values: list[Any] = []
    lent: dict[int, Tensor] = {}
    if memory is not None:
        memory.free = list(memory.all)
    for position, (op, args, value, kind) in enumerate(instructions):
        if position not in needed:
            values.append(None)
            continue
        operands = [values[argument] for argument in args]
        if op == "var":
            result = env[value]
        elif op == "const":
            result = torch.full((), value, dtype=dtypes[kind], device=device)
        elif op == "load":
            result = _gather(captured[value], operands, dtypes[kind])
        elif op == "float":
            result = operands[0].to(dtype)
            if args[0] in lent and result is operands[0]:
                lent[position] = lent.pop(args[0])
        elif op == "pow":
            result = operands[0].pow(value)
        else:
            size = torch.broadcast_shapes(*(x.shape for x in operands))
            if memory is not None and op in _INTO_MEMORY and kind == "float" and size.numel() > _LARGE:
                result, lent[position] = memory.take(size, dtype, device)
                _TORCH[op](*operands, out=result)
            else:
                result = _TORCH[op](*operands)
        values.append(result)
        for argument in args:
            if last_use[argument] == position and argument not in outputs:
                values[argument] = None
                if memory is not None and argument in lent:
                    memory.free.append(lent.pop(argument))
    return [values[output] for output in outputs]


def _wrapped(shape: Sequence[int], indices: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Indices brought into range, negative ones counted from the end, and where they were in range."""
    inside = torch.ones((), dtype=torch.bool, device=indices[0].device)
    wrapped = []
    for size, index in zip(shape, indices, strict=True):
        index = torch.where(index < 0, index + size, index)
        inside = inside & (index >= 0) & (index < size)
        wrapped.append(index.clamp(0, max(size - 1, 0)))
    return wrapped, inside


def _gather(tensor: Tensor, indices: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    if not indices:
        return tensor.to(dtype)
    wrapped, inside = _wrapped(tensor.shape, indices)
    outside = torch.full((), math.nan if dtype.is_floating_point else 0, dtype=dtype, device=tensor.device)
    if tensor.numel() == 0:
        return outside.expand(inside.shape)
    return torch.where(inside, tensor[tuple(wrapped)].to(dtype), outside)


def scatter(total: Tensor, gradient: Tensor, indices: Sequence[Tensor]) -> None:
    """Adds a tile's gradient to the elements that were read, in an order that does not change from run to run."""
    if not indices:
        total.add_(gradient.sum())
        return
    if total.numel() == 0:
        return
    wrapped, inside = _wrapped(total.shape, indices)
    gradient = gradient.expand(torch.broadcast_shapes(gradient.shape, inside.shape)).sum_to_size(inside.shape)
    gradient = torch.where(inside, gradient, 0.0).reshape(-1)
    flat = torch.zeros_like(inside, dtype=torch.int64)
    for index, stride in zip(wrapped, total.stride(), strict=True):
        flat = flat + index * stride
    flat = flat.reshape(-1)
    if total.is_cuda:
        total.view(-1).index_put_((flat,), gradient, accumulate=True)  # sorts; index_add_ would add in the order of arrival
    else:
        total.view(-1).index_add_(0, flat, gradient)
