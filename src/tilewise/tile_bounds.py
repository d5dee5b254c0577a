"""What a program can show in a tile at all, by interval arithmetic: a tile where it is surely true, or surely false, need not be looked at.

Every instruction gets the least and the largest value that it can take in each tile; truths are intervals of False and True. Captured
integers that are read at the query or at the key, such as numbers of documents, count with the ends of each block. What is not followed
(other captured tensors, floating-point numbers, integers that might overflow) may be anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .tile_status import EMPTY, FULL, UNKNOWN, ends_of_blocks

if TYPE_CHECKING:
    from .expressions import Instruction
    from .score_mod import Program
    from .tile_status import Grid

TOGETHER = 1 << 22  # tiles: an instruction takes up to 16 bytes of each
LARGEST_INDEX, LARGEST = 1 << 33, 1 << 62
COMPARED = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)  # torch has no minimum of wider unsigned integers


class Interval(NamedTuple):
    """Both ends belong to it: int64 or bool tensors that broadcast to (B, H, rows, width). No value lies further from 0 than `most`."""

    low: Tensor
    high: Tensor
    most: int = 1


def narrowed(program: Program, captured: list[Tensor], status: Tensor, grid: Grid) -> Tensor:
    """The status (B, H, rows, width), with EMPTY and FULL in the place of UNKNOWN wherever the intervals tell."""
    batch, heads, rows, width = status.shape
    step = max(1, TOGETHER // max(1, batch * heads * width))
    parts = []
    for m in range(0, rows, step):
        given = status[:, :, m : m + step]
        low, high, _ = _program_interval(program, captured, given, grid, m)
        found = torch.where(high, UNKNOWN, EMPTY).where(~low, FULL)
        parts.append(torch.where(given == UNKNOWN, found, given).to(torch.uint8))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2) if parts else status


def _program_interval(program: Program, captured: list[Tensor], status: Tensor, grid: Grid, first: int) -> Interval:
    device, (batch, heads, rows, width) = status.device, status.shape
    m = torch.arange(first, first + rows, device=device)[:, None]
    n = grid.base(device)[first : first + rows, None] + torch.arange(width, device=device)
    q_idx, q_last = m * grid.block_m, (m * grid.block_m + (grid.block_m - 1)).clamp(max=grid.seqlen_q - 1)
    b, h = torch.arange(batch, device=device).view(-1, 1, 1, 1), torch.arange(heads, device=device).view(-1, 1, 1)
    variables = {
        "b": (b, b),
        "h": (h, h),
        "q_idx": (q_idx, q_last),
        "kv_idx": (n * grid.block_n, (n * grid.block_n + (grid.block_n - 1)).clamp(max=grid.seqlen_k - 1)),
        "p": (q_idx + grid.offset, q_last + grid.offset),
    }
    anything = Interval(torch.zeros((), dtype=torch.bool, device=device), torch.ones((), dtype=torch.bool, device=device))
    last_use = {argument: position for position, instruction in enumerate(program.instructions) for argument in instruction.args}
    known: list[Interval | None] = []
    for position, instruction in enumerate(program.instructions):
        if instruction.op == "var":
            known.append(Interval(*variables[instruction.value], LARGEST_INDEX))
        elif instruction.op == "const":
            known.append(_constant(instruction, device))
        elif instruction.op == "load":
            at = tuple(program.instructions[i].value if program.instructions[i].op == "var" else "" for i in instruction.args)
            found = _loaded(captured[instruction.value], at, batch, grid, m, n)
            known.append(found or (anything if instruction.kind == "bool" else None))
        else:
            sources = [program.instructions[i] for i in instruction.args]
            found = _interval(instruction, [known[i] for i in instruction.args], sources)
            if instruction.kind == "bool":
                found = found or anything
            known.append(None if found is None or found.most >= LARGEST else found)
        for argument in instruction.args:
            if last_use[argument] == position:
                known[argument] = None  # the memory
    return known[-1] or anything


def _constant(instruction: Instruction, device: torch.device) -> Interval | None:
    value = instruction.value
    if instruction.kind == "float" or abs(value) >= LARGEST:
        return None
    here = torch.full((), value, device=device)  # filled there: a number from the host would have to be waited for
    return Interval(here, here, abs(int(value)))


def _loaded(tensor: Tensor, at: tuple[str, ...], batch: int, grid: Grid, m: Tensor, n: Tensor) -> Interval | None:
    """Of a tensor read at [q_idx] or [kv_idx], or for each batch item at [b, q_idx] or [b, kv_idx]: from the ends of its blocks."""
    over_keys = at[-1:] == ("kv_idx",)
    length, block, blocks = (grid.seqlen_k, grid.block_n, n) if over_keys else (grid.seqlen_q, grid.block_m, m)
    if at[-1:] not in (("q_idx",), ("kv_idx",)) or at[:-1] not in ((), ("b",)) or tensor.dtype not in COMPARED:
        return None
    if tensor.shape[-1] < length or (at[0] == "b" and tensor.shape[0] < batch):  # what lies outside reads as 0
        return None
    rows = tensor[:batch] if at[0] == "b" else tensor[None]  # (B or 1, length or more)
    low, high = (end.to(torch.int64)[:, None, blocks] for end in ends_of_blocks(rows, block, length))
    return Interval(low, high, min(LARGEST - 1, torch.iinfo(tensor.dtype).max + 1))


def _interval(instruction: Instruction, given: list[Interval | None], sources: list[Instruction]) -> Interval | None:
    """None where nothing is known."""
    op, kind = instruction.op, instruction.kind
    args = [x for x in given if x is not None]
    if len(args) < len(given):  # floating-point values are never known
        return None
    if len(args) == 1:
        return _of_one(op, kind, args[0])
    if op == "where":
        return _selected(*args)
    a, b = args
    if kind == "bool" and op in ("lt", "le", "gt", "ge", "eq", "ne"):
        return _compared(op, _whole(a), _whole(b))
    if kind == "bool":
        return _logical(op, a, b)
    return _arithmetic(op, a, b, sources[1].value if sources[1].op == "const" else None)


def _whole(a: Interval) -> Interval:
    return Interval(a.low.to(torch.int64), a.high.to(torch.int64), a.most)


def _of_one(op: str, kind: str, a: Interval) -> Interval | None:
    if op == "int":
        return _whole(a)
    if op == "neg":
        return Interval(-a.high, -a.low, a.most)
    if op == "abs":
        return Interval(torch.maximum(a.low, -a.high).clamp(min=0), torch.maximum(-a.low, a.high), a.most)
    if op == "not" and kind == "bool":
        return Interval(~a.high, ~a.low)
    return None


def _compared(op: str, a: Interval, b: Interval) -> Interval:
    if op in ("gt", "ge"):
        op, a, b = {"gt": "lt", "ge": "le"}[op], b, a
    if op == "lt":
        return Interval(a.high < b.low, a.low < b.high)
    if op == "le":
        return Interval(a.high <= b.low, a.low <= b.high)
    surely = (a.low == b.high) & (a.high == b.low)  # one value and the same
    maybe = (a.low <= b.high) & (b.low <= a.high)
    return Interval(surely, maybe) if op == "eq" else Interval(~maybe, ~surely)


def _logical(op: str, a: Interval, b: Interval) -> Interval | None:
    if op == "and":
        return Interval(a.low & b.low, a.high & b.high)
    if op == "or":
        return Interval(a.low | b.low, a.high | b.high)
    if op == "xor":
        return Interval((a.low & ~b.high) | (b.low & ~a.high), (a.high & ~b.low) | (b.high & ~a.low))
    return None


def _arithmetic(op: str, a: Interval, b: Interval, constant: int | None) -> Interval | None:
    if op == "add":
        return Interval(a.low + b.low, a.high + b.high, a.most + b.most)
    if op == "sub":
        return Interval(a.low - b.high, a.high - b.low, a.most + b.most)
    if op == "mul" and a.most * b.most < LARGEST:
        ends = torch.broadcast_tensors(a.low * b.low, a.low * b.high, a.high * b.low, a.high * b.high)
        low, high = torch.minimum(*ends[:2]), torch.maximum(*ends[:2])
        return Interval(torch.minimum(low, torch.minimum(*ends[2:])), torch.maximum(high, torch.maximum(*ends[2:])), a.most * b.most)
    if op == "min":
        return Interval(torch.minimum(a.low, b.low), torch.minimum(a.high, b.high), max(a.most, b.most))
    if op == "max":
        return Interval(torch.maximum(a.low, b.low), torch.maximum(a.high, b.high), max(a.most, b.most))
    if constant is None or constant <= 0:
        return None
    if op == "floordiv":
        return Interval(_divided(a.low, constant), _divided(a.high, constant), a.most)
    if op == "mod":
        start = _divided(a.low, constant) * constant
        same = a.high - start < constant  # no multiple in between
        return Interval(torch.where(same, a.low - start, 0), torch.where(same, a.high - start, constant - 1), constant)
    return None


def _divided(x: Tensor, constant: int) -> Tensor:
    return x.div(constant, rounding_mode="floor")


def _selected(condition: Interval, a: Interval, b: Interval) -> Interval | None:
    a, b = (x if x.low.dtype == torch.bool and y.low.dtype == torch.bool else _whole(x) for x, y in ((a, b), (b, a)))
    low = torch.where(condition.low, a.low, torch.where(condition.high, torch.minimum(a.low, b.low), b.low))
    high = torch.where(condition.low, a.high, torch.where(condition.high, torch.maximum(a.high, b.high), b.high))
    return Interval(low, high, max(a.most, b.most))
