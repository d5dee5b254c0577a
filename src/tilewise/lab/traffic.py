"""Device memory that counts: every tile an algorithm loads or stores goes through here.

What `load` returns and what the algorithm computes from it is on chip and free; only `load` and `store` cost. So the counts are those of
a GPU without caches between its multiprocessors and its memory, which is also what the second-level cache of a real one is asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Index = int | slice


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rows of queries (`block_m`) and of keys (`block_n`) that an algorithm handles at a time."""

    block_m: int
    block_n: int


def tile_ranges(length: int, block: int) -> Iterator[slice]:
    """The tiles of `length` rows, the last one ragged.

    >>> list(tile_ranges(5, 2))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    for start in range(0, length, block):
        yield slice(start, min(start + block, length))


@dataclass(frozen=True, slots=True)
class Access:
    """One tile that crossed the border of the chip."""

    kind: str  # "load" or "store"
    name: str
    index: tuple[Index, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Step:
    """What happened between two calls of `DeviceMemory.step`, and the state on chip at the second."""

    accesses: tuple[Access, ...]
    state: dict[str, Any]


@dataclass(slots=True)
class DeviceMemory:
    """Slow memory. Inputs are `place`d, results and scratch allocated (filled with NaN, as memory that nobody wrote).

    >>> memory = DeviceMemory()
    >>> x = memory.place("x", torch.zeros(8, 4))
    >>> x.load(slice(0, 2)).shape, memory.bytes("load")
    (torch.Size([2, 4]), 32)
    """

    record: bool = False
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    scratch_bytes: int = 0
    peak_scratch_bytes: int = 0
    steps: list[Step] = field(default_factory=list)
    _pending: list[Access] = field(default_factory=list)

    def place(self, name: str, data: Tensor) -> DeviceTensor:
        """An input, already there."""
        return DeviceTensor(self, name, data)

    def result(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> DeviceTensor:
        """Room for a result that the caller keeps."""
        return DeviceTensor(self, name, _unwritten(shape, dtype))

    def scratch(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> DeviceTensor:
        """Room for something between input and result: the extra memory of the algorithm."""
        tensor = DeviceTensor(self, name, _unwritten(shape, dtype))
        self.scratch_bytes += tensor.nbytes
        self.peak_scratch_bytes = max(self.peak_scratch_bytes, self.scratch_bytes)
        return tensor

    def free(self, *tensors: DeviceTensor) -> None:
        """Gives scratch back."""
        self.scratch_bytes -= sum(tensor.nbytes for tensor in tensors)

    def bytes(self, kind: str = "", name: str = "") -> int:
        """Bytes moved, of one kind ("load", "store") or name or both, or all."""
        return sum(n for (k, of), n in self.counts.items() if kind in ("", k) and name in ("", of))

    def count(self, kind: str, name: str, index: tuple[Index, ...], nbytes: int) -> None:
        self.counts[kind, name] += nbytes
        if self.record:
            self._pending.append(Access(kind, name, index, nbytes))

    def step(self, **state: Any) -> None:
        """Marks the end of one visible step; where steps are recorded, keeps a copy of the state on chip."""
        if self.record:
            copies = {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
            self.steps.append(Step(tuple(self._pending), copies))
            self._pending.clear()


@dataclass(slots=True)
class DeviceTensor:
    """A tensor in `DeviceMemory`: reached by tiles, each of which is counted."""

    memory: DeviceMemory
    name: str
    data: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def nbytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    def load(self, *index: Index) -> Tensor:
        """A copy of a tile on chip, in the accumulator's dtype (float64 for float64, else float32; integers stay)."""
        tile = self.data[index]
        self.memory.count("load", self.name, index, tile.numel() * tile.element_size())
        return tile.to(accumulator(tile.dtype), copy=True) if tile.is_floating_point() else tile.clone()

    def store(self, value: Tensor | float, *index: Index) -> None:
        """Writes a tile, rounded to the tensor's dtype."""
        tile = self.data[index]
        self.memory.count("store", self.name, index, tile.numel() * tile.element_size())
        self.data[index] = value


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which tiles of `dtype` are computed on."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _unwritten(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.full(shape, float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max, dtype=dtype)
