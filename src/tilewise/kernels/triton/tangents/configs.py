"""Tile shapes of the tangents' kernels, as data, and the shared memory that they take: operands and tangents, twice what a pass holds.

Those of the tangent of the backward pass were compiled and not measured: they are the largest that keep what a thread holds in registers.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING

from ..configs import DKDV, DQ, FORWARD, HEAVY, PIECE, Config, architecture, features, shared_limit

if TYPE_CHECKING:
    from ..launch import Launch

ROWS = "rows"

# Calls with one of these hold more in registers than the tiles of `TABLE` leave, and take those of `HEAVY_TABLE` where it has any.
HEAVIER = HEAVY[DKDV]


def frugal(block_m: int, block_n: int, num_warps: int, num_stages: int = 1) -> Config:
    """With operands read from shared memory again in every turn: eight of them fit in no register file."""
    return Config(block_m, block_n, num_warps, num_stages, frugal=True)


# (architecture, bits, kernel) -> {largest padded head dim: tiles}. float32 operands of head dim 128 fit in no tile: products without tensor
# cores are unrolled, to kilobytes of spills a thread and half a minute of compilation.
TABLE: dict[tuple[str, int, str], dict[int, Config]] = {
    ("sm80", 16, ROWS): {64: frugal(64, 32, 4), 128: frugal(64, 16, 8), 256: frugal(16, 32, 4)},
    ("sm80", 16, DQ): {64: frugal(64, 32, 4), 128: frugal(64, 32, 8), 256: frugal(16, 32, 4)},
    ("sm80", 16, DKDV): {64: frugal(32, 32, 4), 256: frugal(32, 32, 8)},
    ("sm90", 16, ROWS): {64: frugal(64, 64, 4, 2), 128: frugal(64, 64, 4), 256: frugal(16, 32, 4)},
    ("sm90", 16, DQ): {64: frugal(64, 64, 4, 2), 128: frugal(64, 32, 8, 2), 256: frugal(16, 32, 4)},
    ("sm90", 16, DKDV): {64: frugal(32, 64, 4, 2), 256: frugal(32, 32, 8)},
    ("sm100", 16, ROWS): {64: frugal(64, 64, 4, 2), 128: frugal(64, 64, 8), 256: frugal(64, 32, 8)},
    ("sm100", 16, DQ): {64: frugal(64, 64, 4, 2), 128: frugal(64, 64, 8), 256: frugal(64, 32, 8)},
    ("sm100", 16, DKDV): {64: frugal(64, 64, 8, 2), 128: frugal(32, 64, 8), 256: frugal(32, 64, 8)},
    ("gfx942", 16, ROWS): {128: frugal(64, 32, 4), 256: frugal(16, 16, 4)},
    ("gfx942", 16, DQ): {128: frugal(64, 32, 4), 256: frugal(16, 16, 4)},
    ("gfx942", 16, DKDV): {128: frugal(32, 64, 4), 256: frugal(16, 16, 4)},
}
HEAVY_TABLE: dict[tuple[str, int, str], dict[int, Config]] = {
    ("sm80", 16, DQ): {64: frugal(32, 32, 8), 128: frugal(32, 32, 8)},
    ("sm80", 16, DKDV): {64: frugal(32, 32, 8)},
    ("sm90", 16, ROWS): {64: frugal(64, 32, 4), 128: frugal(64, 32, 8)},
    ("sm90", 16, DQ): {64: frugal(64, 32, 4)},
    ("sm90", 16, DKDV): {64: frugal(32, 32, 8)},
}
# With three or more.
HEAVIEST: dict[tuple[str, int, str], dict[int, Config]] = {
    ("sm80", 16, ROWS): {64: frugal(32, 32, 8), 128: frugal(16, 32, 4)},
    ("sm80", 16, DQ): {64: frugal(32, 32, 8), 128: frugal(16, 32, 4)},
    ("sm90", 16, ROWS): {128: frugal(16, 32, 4)},
    ("sm90", 16, DQ): {64: frugal(32, 32, 8), 128: frugal(16, 32, 4)},
}
for _arch in ("sm80", "sm90", "sm100", "gfx942"):
    TABLE[_arch, 16, FORWARD] = {64: Config(64, 32, 4, 1), 128: Config(32, 32, 4, 1), 256: Config(32, 32, 8, 1)}
    TABLE[_arch, 32, FORWARD] = {64: Config(32, 32, 8, 1)}
    TABLE |= {(_arch, 32, purpose): {64: frugal(32, 32, 8)} for purpose in (ROWS, DQ, DKDV)}
# Of the interpreter: every loop takes several turns at the shapes of a test.
TABLE |= {("interpreter", bits, purpose): {256: Config(32, 32, 1, 1)} for bits in (16, 32) for purpose in (FORWARD, DQ, DKDV)}
TABLE |= {("interpreter", bits, ROWS): {256: Config(64, 32, 1, 1)} for bits in (16, 32)}  # fewer of them lie in the padding
# Whose entries an architecture shares.
RELATIVES = {"sm86": "sm80", "sm120": "sm80"}

# Where the table's choice does not fit: the first of these that does.
SMALLER = (frugal(32, 32, 8), frugal(16, 32, 4), frugal(16, 16, 2))


def shared_bytes(config: Config, arch: str, bits: int, purpose: str, block_d: int, block_dv: int) -> int:
    """Shared memory that a kernel takes at most: what it keeps through its loop, every stage of what it walks, and scores or an operand on
    their way between register layouts. On AMD operands stay in registers, and pass through it one by one."""
    m, n, element = config.block_m, config.block_n, bits // 8
    if arch == "gfx942":
        return element * max(m, n) * max(block_d, block_dv) + 4 * m * n + 1024
    queries, keys = 2 * m * (block_d if purpose == FORWARD else block_d + block_dv), 2 * n * (block_d + block_dv)
    kept, walked = (keys, queries) if purpose == DKDV else (queries, keys)
    exchanged = m * n if purpose == FORWARD else max(4 * m * n, max(m, n) * max(block_d, block_dv))
    # Triton 3.6 gives a pipeline into the tensor cores of sm100 one stage more than it is told.
    stages = config.num_stages + (1 if arch == "sm100" and config.num_stages > 1 else 0)
    return element * (kept + stages * walked + exchanged) + 1024


def config_of(call: Launch, purpose: str) -> Config:
    """The tiles of a kernel of this call."""
    from ....plan import target_of

    target = target_of(call.t.q.device)
    used = features(call.t, call.r)
    return choose(architecture(target), shared_limit(target), call.bits, purpose, used, call.block_d, call.block_dv)


@functools.cache
def choose(arch: str, limit: int, bits: int, purpose: str, used: frozenset[str], block_d: int, block_dv: int) -> Config:
    """The table's config, or the first smaller one whose shared memory is within `limit` bytes."""
    key = RELATIVES.get(arch, arch), bits, purpose
    row = TABLE[key]
    heavy = len(used & HEAVIER)
    if heavy:
        row = {**row, **HEAVY_TABLE.get(key, {})}
    if heavy > 2:
        row = {**row, **HEAVIEST.get(key, {})}
    found = row[min(dim for dim in row if dim >= max(block_d, block_dv))]
    candidates = (found, *SMALLER)
    found = next(c for c in candidates if c is SMALLER[-1] or shared_bytes(c, arch, bits, purpose, block_d, block_dv) <= limit)
    if arch != "gfx942" and (bits == 16 or "tf32" in used):
        found = replace(found, num_warps=min(found.num_warps, pieces(found, purpose, block_d, block_dv)))
    return found


def pieces(config: Config, purpose: str, block_d: int, block_dv: int) -> int:
    """As `kernels.triton.configs.pieces`: into how many the smallest product divides for matrix units."""
    m, n = config.block_m, config.block_n
    products = {FORWARD: (m * n, m * block_dv), ROWS: (m * n,), DQ: (m * n, m * block_d), DKDV: (m * n, n * block_d, n * block_dv)}
    return min(products[purpose]) // PIECE
