"""Which problems the lab runs: sizes for a CPU, where the counted twins run, and for a GPU, where the kernels do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from . import algorithms
from .algorithms import Algorithm, Inputs
from .predict import paper_tiles
from .traffic import Tiles

DENSITIES = (0.0625, 0.125, 0.25, 0.5, 1.0)
CPU_TILE_SIZES = (16, 32, 64, 128, 256)
GPU_TILE_SIZES = (16, 32, 64, 128)
ON_CHIP_ELEMENTS = (2048, 4096, 8192, 16384, 32768)
# Elements of each of q, k, v, o on a GPU: 128 MiB in 16 bits, well beyond any L2 cache, so that what stays in it is a small part.
GPU_ELEMENTS = 64 << 20


@dataclass(frozen=True, slots=True)
class Point:
    """One algorithm at one size. For the softmax rungs the matrix has `heads * n` rows of length `d`.

    Tiles of 0 mean that the kernel chooses its own.
    """

    experiment: str  # softmax, bytes, production, tiles, theorem, density, memory, headdim
    algorithm: str
    pass_: str
    heads: int
    n: int
    d: int
    block_m: int
    block_n: int
    density: float = 1.0
    piece: int = 0

    def found(self) -> Algorithm:
        return next(a for a in algorithms.ALL if (a.name, a.pass_) == (self.algorithm, self.pass_))

    def inputs(self, dtype: torch.dtype, device: str) -> Inputs:
        tiles = Tiles(self.block_m or self.n, self.block_n or self.n)
        return Inputs.random(
            self.heads, self.n, self.d, tiles, dtype=dtype, device=device, density=self.density, piece=self.piece
        )  # fmt: skip

    def row(self) -> dict[str, Any]:
        """The point as keys of a results row."""
        fields = asdict(self)
        names = {"pass_": "pass", "n": "seqlen", "d": "head_dim"}
        return {names.get(key, key): value for key, value in fields.items()}


def cpu_points(seqlens: tuple[int, ...], head_dims: tuple[int, ...], block: int = 64, heads: int = 1) -> Iterator[Point]:
    """Everything the counted twins run, most telling first; every experiment is small enough for seconds on one core."""
    for rung in algorithms.SOFTMAX:
        yield Point("softmax", rung.name, "fwd", 1, 64, 4096, block, 1024)
    for d in head_dims:
        for n in seqlens:
            for step in algorithms.ATTENTION:
                yield Point("bytes", step.name, step.pass_, heads, n, d, block, block, piece=max(16, d // 2))
            for step in algorithms.PRODUCTION:
                yield Point("production", step.name, step.pass_, heads, n, d, 0, 0)
    n, d = max(seqlens), max(head_dims)
    for density in DENSITIES:
        yield Point("density", "block_sparse", "fwd", heads, n, d, block, block, density)
    for elements in ON_CHIP_ELEMENTS:
        tiles = paper_tiles(d, elements)
        yield Point("theorem", "fa1", "fwd", heads, n, d, tiles.block_m, tiles.block_n)
    for size in CPU_TILE_SIZES:
        for step in (algorithms.FA1, algorithms.FA2):
            yield Point("tiles", step.name, "fwd", heads, n, d, size, size)


def gpu_points() -> Iterator[Point]:
    """Everything the kernels run on a GPU: the same total size at every N and D, so that times and bytes can be compared."""
    for length, rows in ((4096, 16384), (32768, 4096)):
        for rung in algorithms.SOFTMAX:
            yield Point("softmax", rung.name, "fwd", 1, rows, length, 1, 1024)
    for d in (64, 128):
        for n in (1024, 2048, 4096, 8192):
            heads = GPU_ELEMENTS // (n * d)
            for step in algorithms.ATTENTION:
                if (step is algorithms.STANDARD and n > 4096) or step in (algorithms.BLOCK_SPARSE, algorithms.SPLIT_DIM):
                    continue
                block_m = 128 if step in (algorithms.STANDARD, algorithms.FA2) else 64
                yield Point("bytes", step.name, step.pass_, heads, n, d, block_m, 64)
            for step in algorithms.PRODUCTION:
                yield Point("production", step.name, step.pass_, heads, n, d, 0, 0)
    for density in DENSITIES:
        yield Point("density", "block_sparse", "fwd", GPU_ELEMENTS // (4096 * 64), 4096, 64, 128, 64, density)
    for size in GPU_TILE_SIZES:
        for step in (algorithms.FA1, algorithms.FA2):
            yield Point("tiles", step.name, "fwd", GPU_ELEMENTS // (2048 * 64), 2048, 64, size, size)
    for d in (64, 128, 256, 512):
        for block_n in (64, 32):
            yield Point("headdim", "fa2", "fwd", GPU_ELEMENTS // (2048 * d), 2048, d, 64, block_n)
    for d in (256, 512, 1024):
        yield Point("headdim", "split_dim", "fwd", GPU_ELEMENTS // (2048 * d), 2048, d, 64, 64, piece=128)


def memory_points() -> Iterator[Point]:
    """Growing N at one head count: the exponent of the extra memory."""
    for n in (1024, 2048, 4096, 8192):
        for step in (algorithms.STANDARD, algorithms.FA1, algorithms.FA2, *algorithms.PRODUCTION):
            yield Point("memory", step.name, step.pass_, 16, n, 64, 64, 64)
