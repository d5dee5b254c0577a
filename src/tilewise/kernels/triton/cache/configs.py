"""Tiles of the cache kernels, and into how many parts the keys are split: data and arithmetic, no kernels.

A read of the cache is bound by memory where queries are few: what counts is how many bytes are on their way. A multiprocessor of an H200
needs about 30 KB of them at any time, so every program has several tiles of `stage_bytes` under way or in use, and as many programs share
a multiprocessor as its shared memory and registers admit.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """What a row of the table says: the bytes of one tile of keys and values, how many tiles are on their way, and by how many warps."""

    stage_bytes: int
    num_stages: int
    num_warps: int
    per_multiprocessor: int  # programs that run beside each other
    alone: Shape | None = None  # of a program that has a multiprocessor to itself and need not share its keys; None: it does


@dataclass(frozen=True, slots=True)
class Config:
    """One call's tiles: BLOCK_M rows (queries times the heads of a group) by BLOCK_N keys."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    per_multiprocessor: int


_KB = 1024
# (architecture, rows) -> shape. Up to 64 rows are decoding: memory decides. 128 are prefill: tensor cores do.
TABLE: dict[tuple[str, int], Shape] = {
    ("sm80", 16): Shape(16 * _KB, 4, 4, 2),
    ("sm80", 32): Shape(16 * _KB, 4, 4, 2),
    ("sm80", 64): Shape(16 * _KB, 3, 4, 2),
    ("sm80", 128): Shape(16 * _KB, 3, 8, 1),
    ("sm86", 16): Shape(16 * _KB, 3, 4, 2),
    ("sm86", 32): Shape(16 * _KB, 3, 4, 2),
    ("sm86", 64): Shape(16 * _KB, 2, 4, 1),
    ("sm86", 128): Shape(16 * _KB, 2, 8, 1),
    # Alone, the steps from tile to tile have nobody to hide behind: tiles are twice as large, and as many as fit.
    ("sm90", 16): Shape(32 * _KB, 3, 4, 2, alone=Shape(64 * _KB, 4, 8, 1)),
    ("sm90", 32): Shape(32 * _KB, 3, 4, 2),
    ("sm90", 64): Shape(32 * _KB, 3, 4, 2),
    ("sm90", 128): Shape(64 * _KB, 2, 8, 1),
    ("gfx942", 16): Shape(16 * _KB, 2, 4, 2),
    ("gfx942", 32): Shape(16 * _KB, 2, 4, 2),
    ("gfx942", 64): Shape(16 * _KB, 2, 4, 1),
    ("gfx942", 128): Shape(16 * _KB, 1, 4, 1),
    # The interpreter runs on the host: tiles so small that every loop takes several turns at the shapes of a test.
    ("interpreter", 16): Shape(1 * _KB, 1, 1, 2),
    ("interpreter", 32): Shape(1 * _KB, 1, 1, 2),
}
for _rows in (16, 32, 64, 128):
    TABLE["sm100", _rows] = TABLE["sm90", _rows]
    TABLE["sm120", _rows] = TABLE["sm86", _rows]
TABLE["sm100", 128] = Shape(32 * _KB, 3, 8, 1)

# Values wider than this fill the registers with half as many rows; float32 products take twice the registers of 16-bit ones.
WIDE = 256
INVARIANT_KEYS = 1024  # batch_invariant: parts end at its multiples
LEAST_KEYS = 256  # a shorter part is not worth the merge
MOST_SPLITS = 256


def column_blocks(dim: int) -> tuple[int, int]:
    """A head dim as a power of two and a rest padded to one, 0 where nothing is left: what two products sum over.

    >>> column_blocks(64), column_blocks(96), column_blocks(576), column_blocks(80), column_blocks(7)
    ((64, 0), (64, 32), (512, 64), (64, 16), (16, 0))
    """
    main = 1 << (dim.bit_length() - 1)
    if main < 16 or main == dim:
        return max(16, 1 << (dim - 1).bit_length()), 0
    return main, max(16, 1 << (dim - main - 1).bit_length())


def row_block(rows: int, arch: str, bits: int, block_dv: int) -> int:
    """The rows of a tile for `rows` queries times heads of a group."""
    most = max(size for name, size in TABLE if name == arch)
    if bits == 32 or block_dv > WIDE:
        most = min(most, 64)
    return min(most, max(16, 1 << (rows - 1).bit_length()))


def shared_bytes(block_m: int, block_n: int, num_stages: int, bits: int, cache_bits: int, key_dim: int, value_dim: int) -> int:
    """Shared memory of a program at most: its queries, the tiles under way or in use, and the weights between two products.

    Tensor cores that read their operands from shared memory (64 rows and more) hold one tile longer.
    """
    kept = block_m * key_dim * bits // 8
    walked = block_n * (key_dim + value_dim) * cache_bits // 8
    converted = block_n * (key_dim + value_dim) * bits // 8 if cache_bits != bits else 0
    tiles = num_stages if block_m >= 64 else max(1, num_stages - 1)
    return kept + tiles * walked + converted + block_m * block_n * 4 + 1024


@functools.cache
def choose(
    arch: str,
    limit: int,
    bits: int,
    cache_bits: int,
    rows: int,
    key_dim: int,
    block_dv: int,
    values_in_keys: bool,
    paged: bool,
    alone: bool = False,
) -> Config | None:
    """The tiles of a call, within `limit` bytes of shared memory; None where no tile fits. `key_dim` is padded. `alone`: each program has a
    multiprocessor to itself; where the table has nothing for that, the tiles are those of programs beside each other."""
    value_dim = 0 if values_in_keys else block_dv
    wide = block_dv > WIDE
    row_bytes = (key_dim + value_dim) * max(cache_bits, 16) // 8
    block_m = row_block(rows, arch, bits, block_dv)
    while block_m >= 16:
        shape = TABLE[arch, block_m]
        if alone and shape.alone is not None:
            shape = shape.alone
        most = max(16, min(128, 1 << max(1, shape.stage_bytes // row_bytes).bit_length() - 1))
        for block_n in (n for n in (128, 64, 32, 16) if n <= most):
            for stages in range(shape.num_stages, 0, -1):
                if shared_bytes(block_m, block_n, stages, bits, cache_bits, key_dim, value_dim) <= limit:
                    # The compiler shares its stages between the load of a page's number and the loads that need it.
                    depth = 2 * stages - 1 if paged else stages
                    warps = 8 if wide and shape.num_warps > 1 else shape.num_warps
                    return Config(block_m, block_n, warps, depth, 1 if wide else shape.per_multiprocessor)
        block_m //= 2
    return None


def one_each(programs: int, multiprocessors: int) -> bool:
    """Whether so many programs leave few multiprocessors without one, and give none two: then the keys need no splitting."""
    return 0.9 * multiprocessors <= programs <= multiprocessors


@functools.lru_cache(maxsize=1024)
def choose_splits(programs: int, key_tiles: int, least_tiles: int, slots: int) -> int:
    """Into how many parts to split keys, `programs` being what runs without: the fewest that fill the device's slots nearly as well as any.

    >>> choose_splits(128, 128, 4, 264), choose_splits(32, 1024, 4, 264), choose_splits(8, 2048, 4, 264), choose_splits(1000, 64, 4, 264)
    (2, 8, 32, 1)
    """
    most = max(1, min(MOST_SPLITS, key_tiles // least_tiles))
    if programs >= 0.8 * slots or most == 1:
        return 1

    def full(splits: int) -> float:
        waves = programs * splits / slots
        return waves / -(-programs * splits // slots)

    fullness = [full(splits) for splits in range(1, most + 1)]
    good = 0.95 * max(fullness)
    return next(splits for splits, value in enumerate(fullness, 1) if value >= good)
