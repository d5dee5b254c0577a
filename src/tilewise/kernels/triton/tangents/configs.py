"""Tile shapes of the tangents' kernels, as data, and the shared memory that they take: operands and their tangents, twice what a pass holds.

None was measured. The entries are what keeps operands, tangents and sums in registers and shared memory, as compiled for each architecture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..configs import DKDV, DQ, FORWARD, Config, architecture, shared_limit

if TYPE_CHECKING:
    from ..launch import Launch

ROWS = "rows"

# (bits, kernel) -> {largest padded head dim: tiles}. float32 operands of head dim 128 fit in no tile: products without tensor cores are
# unrolled, to kilobytes of spills a thread and half a minute of compilation.
TABLE: dict[tuple[int, str], dict[int, Config]] = {
    (16, FORWARD): {64: Config(64, 32, 4, 1), 128: Config(32, 32, 4, 1), 256: Config(32, 32, 8, 1)},
    (32, FORWARD): {64: Config(32, 32, 8, 1)},
    (16, ROWS): {64: Config(64, 32, 4, 1), 128: Config(32, 32, 4, 1), 256: Config(32, 32, 8, 1)},
    (32, ROWS): {64: Config(32, 32, 8, 1)},
    (16, DQ): {64: Config(64, 32, 4, 1, frugal=True), 128: Config(32, 32, 4, 1, frugal=True), 256: Config(32, 32, 8, 1, frugal=True)},
    (32, DQ): {64: Config(32, 32, 8, 1, frugal=True)},
    (16, DKDV): {64: Config(32, 64, 8, 1, frugal=True), 128: Config(32, 32, 8, 1, frugal=True), 256: Config(32, 32, 8, 1, frugal=True)},
    (32, DKDV): {64: Config(32, 32, 8, 1, frugal=True)},
}
SMALLEST = Config(16, 16, 2, 1)
# Of the interpreter: every loop takes several turns at the shapes of a test.
INTERPRETED = Config(32, 32, 1, 1)


def shared_bytes(config: Config, bits: int, purpose: str, block_d: int, block_dv: int) -> int:
    """Shared memory that a kernel takes at most: what it keeps through its loop, every stage of what it walks, and tiles of scores on
    their way between register layouts."""
    m, n = config.block_m, config.block_n
    queries, keys = 2 * m * (block_d if purpose == FORWARD else block_d + block_dv), 2 * n * (block_d + block_dv)
    kept, walked = (keys, queries) if purpose == DKDV else (queries, keys)
    scores = m * n * (1 if purpose == FORWARD else 2)
    return (kept + config.num_stages * walked + scores) * bits // 8 + 1024


def config_of(call: Launch, purpose: str) -> Config:
    """The table's tiles, or the smallest where those exceed the shared memory of a block."""
    from ....plan import target_of

    target = target_of(call.t.q.device)
    if target.type != "cuda":
        return INTERPRETED
    return choose(architecture(target), shared_limit(target), call.bits, purpose, call.block_d, call.block_dv)


def choose(arch: str, limit: int, bits: int, purpose: str, block_d: int, block_dv: int) -> Config:
    row = TABLE[bits, purpose]
    chosen = row[min(dim for dim in row if dim >= max(block_d, block_dv))]
    return chosen if shared_bytes(chosen, bits, purpose, block_d, block_dv) <= limit else SMALLEST
