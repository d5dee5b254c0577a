"""Tile shapes, as data: a table by architecture, bits of the dtype, pass and head dim, and the shared memory that each takes.

Entries for sm90 were measured on an H200; those of other architectures follow from their shared memory and register files. There is no
tuning in a user's call: `choose` reads the table, and falls to smaller tiles where the device at hand has less shared memory.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...plan import Operands, Rules, Target


@dataclass(frozen=True, slots=True)
class Config:
    """One kernel's tiles: BLOCK_M queries by BLOCK_N keys."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    descriptors: bool = False  # tiles come through tensor descriptors (TMA) where strides allow
    frugal: bool = False  # what every turn of a loop can work out anew is not kept over it: slower, with room for calls of many features


FORWARD, DKDV, DQ, DBIAS = "forward", "dkdv", "dq", "dbias"

# No tile of queries is longer. What the backward pass keeps of each query is padded to a multiple, and so loads without a mask.
ROW_BLOCK = 128

# Packed sequences that a program places at a time, and with how many others it compares them at once.
CHUNK = 64

# Shared memory of one block in bytes, as the driver grants it.
SHARED_LIMIT = {
    "sm80": 166_912,
    "sm86": 101_376,
    "sm90": 232_448,
    "sm100": 232_448,
    "sm120": 101_376,
    "gfx942": 65_536,
    "interpreter": 1 << 30,
}

# Calls with one of these hold more in registers than the tiles of `TABLE` leave; they take those of `HEAVY_TABLE` where it has any, and
# with three or more those of `HEAVIEST`.
HEAVY = {
    FORWARD: {"mask", "bias", "dropout", "program"},
    DKDV: {"mask", "bias", "dropout", "softcap", "alibi", "window_left", "lengths", "program"},
    DQ: {"mask", "bias", "dropout", "program"},
    DBIAS: set(),
}

# (architecture, bits, pass) -> {largest padded head dim: config}
TABLE: dict[tuple[str, int, str], dict[int, Config]] = {
    ("sm90", 16, FORWARD): {
        64: Config(64, 128, 4, 2, True),
        128: Config(128, 128, 8, 3, True),
        256: Config(128, 64, 8, 2, True),
    },
    ("sm90", 16, DKDV): {64: Config(128, 128, 8, 3, True), 128: Config(64, 128, 8, 3, True), 256: Config(64, 64, 8, 2, True)},
    ("sm90", 16, DQ): {64: Config(128, 64, 8, 2, True), 128: Config(128, 64, 8, 3, True), 256: Config(64, 64, 4, 2, True)},
    ("sm90", 32, FORWARD): {64: Config(128, 64, 8, 2), 128: Config(64, 64, 8, 2), 256: Config(64, 32, 8, 1)},
    ("sm90", 32, DKDV): {64: Config(64, 64, 8, 2), 128: Config(32, 64, 8, 1), 256: Config(32, 32, 8, 1)},
    ("sm90", 32, DQ): {64: Config(64, 64, 8, 2), 128: Config(64, 32, 8, 1), 256: Config(32, 32, 8, 1)},
    ("sm100", 16, FORWARD): {
        64: Config(128, 128, 8, 2, True),
        128: Config(128, 128, 8, 2, True),
        256: Config(128, 32, 8, 2, True),
    },
    ("sm100", 16, DKDV): {64: Config(64, 128, 8, 2, True), 128: Config(64, 128, 8, 1, True), 256: Config(32, 64, 8, 1, True)},
    ("sm100", 16, DQ): {64: Config(64, 64, 8, 2, True), 128: Config(64, 64, 8, 2, True), 256: Config(64, 32, 8, 1, True)},
    ("sm100", 32, FORWARD): {64: Config(128, 64, 8, 2), 128: Config(64, 64, 8, 2), 256: Config(64, 32, 8, 1)},
    ("sm100", 32, DKDV): {64: Config(64, 64, 8, 2), 128: Config(32, 64, 8, 1), 256: Config(32, 32, 8, 1)},
    ("sm100", 32, DQ): {64: Config(64, 64, 8, 2), 128: Config(64, 32, 8, 1), 256: Config(32, 32, 8, 1)},
    ("sm80", 16, FORWARD): {64: Config(128, 64, 4, 3), 128: Config(128, 32, 8, 3), 256: Config(64, 64, 8, 2)},
    ("sm80", 16, DKDV): {64: Config(32, 128, 8, 2), 128: Config(32, 64, 8, 2), 256: Config(32, 32, 8, 1)},
    ("sm80", 16, DQ): {64: Config(64, 64, 8, 2), 128: Config(64, 32, 4, 2), 256: Config(32, 32, 8, 1)},
    ("sm80", 32, FORWARD): {64: Config(64, 64, 4, 2), 128: Config(64, 32, 8, 2), 256: Config(32, 32, 8, 1)},
    ("sm80", 32, DKDV): {64: Config(32, 64, 4, 1), 128: Config(32, 32, 8, 1), 256: Config(16, 16, 8, 1)},
    ("sm80", 32, DQ): {64: Config(64, 32, 4, 1), 128: Config(32, 32, 8, 1), 256: Config(16, 16, 8, 1)},
    ("gfx942", 16, FORWARD): {64: Config(128, 64, 4, 1), 128: Config(128, 64, 4, 1), 256: Config(64, 32, 4, 1)},
    ("gfx942", 16, DKDV): {64: Config(32, 64, 4, 1), 128: Config(32, 64, 4, 1), 256: Config(16, 32, 4, 1)},
    ("gfx942", 16, DQ): {64: Config(64, 32, 4, 1), 128: Config(64, 32, 4, 1), 256: Config(32, 16, 4, 1)},
    ("gfx942", 32, FORWARD): {64: Config(64, 32, 4, 1), 128: Config(64, 32, 4, 1), 256: Config(32, 16, 4, 1)},
    ("gfx942", 32, DKDV): {64: Config(32, 32, 4, 1), 128: Config(16, 32, 4, 1), 256: Config(16, 16, 4, 1)},
    ("gfx942", 32, DQ): {64: Config(32, 32, 4, 1), 128: Config(32, 16, 4, 1), 256: Config(16, 16, 4, 1)},
}
HEAVY_TABLE: dict[tuple[str, int, str], dict[int, Config]] = {
    ("sm90", 16, FORWARD): {64: Config(64, 64, 4, 3, True), 128: Config(128, 32, 8, 2, True), 256: Config(64, 32, 8, 2, True)},
    ("sm90", 16, DKDV): {64: Config(64, 128, 8, 2, True), 128: Config(32, 64, 8, 2, True), 256: Config(32, 64, 8, 1, True)},
    ("sm90", 16, DQ): {64: Config(128, 64, 8, 2, True), 128: Config(128, 32, 8, 2, True), 256: Config(64, 32, 8, 1, True)},
    ("sm100", 16, FORWARD): {64: Config(128, 64, 8, 2, True), 128: Config(64, 64, 8, 2, True), 256: Config(64, 32, 8, 2, True)},
    ("sm100", 16, DKDV): {64: Config(64, 64, 8, 2, True), 128: Config(32, 64, 8, 2, True), 256: Config(32, 64, 8, 1, True)},
    ("sm100", 16, DQ): {64: Config(64, 64, 8, 2, True), 128: Config(64, 64, 8, 2, True), 256: Config(64, 32, 8, 1, True)},
    ("sm80", 16, FORWARD): {64: Config(64, 64, 8, 2), 128: Config(64, 32, 8, 2), 256: Config(64, 32, 8, 1)},
    ("sm80", 16, DKDV): {64: Config(32, 64, 8, 2), 128: Config(32, 32, 8, 2), 256: Config(32, 32, 8, 1)},
    ("sm80", 16, DQ): {64: Config(64, 32, 8, 2), 128: Config(32, 32, 8, 2), 256: Config(32, 32, 8, 1)},
}
# Programs keep what they read of captured tensors; derivatives of programs also scatter into the gradients of these.
PROGRAM_TABLE: dict[tuple[str, int, str], dict[int, Config]] = {
    ("sm90", 16, DQ): {64: Config(128, 64, 8, 2, True), 128: Config(64, 32, 8, 2, True), 256: Config(64, 32, 8, 1, True)},
    ("sm100", 16, FORWARD): {64: Config(128, 64, 8, 2, True), 128: Config(64, 32, 8, 2, True), 256: Config(64, 32, 8, 2, True)},
    ("sm100", 16, DQ): {64: Config(64, 64, 8, 2, True), 128: Config(64, 32, 8, 2, True), 256: Config(64, 32, 8, 1, True)},
}
HEAVIEST: dict[tuple[str, str], dict[int, Config]] = {
    ("gfx942", FORWARD): {256: Config(32, 32, 8, 2)},
    ("gfx942", DKDV): {256: Config(32, 32, 8, 1)},
    ("gfx942", DQ): {256: Config(32, 32, 8, 1)},
}
for _arch in ("sm80", "sm86", "sm90", "sm100", "sm120"):
    HEAVIEST[_arch, FORWARD] = {16: Config(64, 16, 8, 2), 256: Config(32, 32, 8, 2)}
    HEAVIEST[_arch, DKDV] = {32: Config(16, 64, 8, 1, frugal=True), 256: Config(64, 16, 8, 1, frugal=True)}
    HEAVIEST[_arch, DQ] = {32: Config(64, 16, 8, 1, frugal=True), 256: Config(16, 64, 8, 1, frugal=True)}
# Of calls with one of these and nothing heavy: entries for which a few registers are missing, or that have more warps than `pieces`.
SLIGHT: dict[tuple[str, int, str], dict[str, dict[int, Config]]] = {
    ("sm90", 16, DKDV): {"lists": {128: Config(64, 128, 8, 3, True, True)}, "hidden": {128: Config(64, 128, 8, 3, True, True)}},
    ("sm80", 16, FORWARD): {"lists": {128: Config(128, 32, 8, 3, frugal=True)}, "aux": {128: Config(128, 32, 8, 2)}},
}
SLIGHT["sm80", 32, DKDV] = {"tf32": {256: Config(32, 16, 4, 1)}}  # 133,120 bytes: too much for relatives
for _arch in ("sm80", "sm86", "sm120"):
    SLIGHT[_arch, 32, DQ] = {"tf32": {256: Config(16, 32, 4, 1)}}
# The interpreter runs on the host: tiles so small that every loop takes several turns at the shapes of a test.
TABLE |= {("interpreter", bits, purpose): {256: Config(32, 32, 1, 1)} for bits in (16, 32) for purpose in (FORWARD, DKDV, DQ, DBIAS)}
# A bias that items or heads share: small tiles, which fit anywhere and leave room for a whole head dim of four inputs. Where these come by
# TMA, two blocks of eight warps fit on a multiprocessor.
TABLE |= {(arch, 16, DBIAS): {128: Config(32, 64, 8, 1), 256: Config(64, 32, 4, 1)} for arch in SHARED_LIMIT if arch != "interpreter"}
TABLE |= {(arch, 16, DBIAS): {128: Config(64, 64, 8, 2, True), 256: Config(64, 64, 8, 1, True)} for arch in ("sm90", "sm100")}
TABLE["gfx942", 16, DBIAS] = {128: Config(64, 32, 4, 1), 256: Config(64, 32, 4, 1)}
TABLE |= {(arch, 32, DBIAS): {128: Config(64, 32, 4, 1), 256: Config(32, 32, 4, 1)} for arch in SHARED_LIMIT if arch != "interpreter"}
for _bits in (16, 32):
    for _pass in (FORWARD, DKDV, DQ):
        TABLE["sm86", _bits, _pass] = TABLE["sm80", _bits, _pass]
        TABLE["sm120", _bits, _pass] = TABLE["sm80", _bits, _pass]
TABLE["sm86", 16, FORWARD] = TABLE["sm120", 16, FORWARD] = {**TABLE["sm80", 16, FORWARD], 64: Config(128, 64, 8, 3)}
for _pass in (FORWARD, DKDV, DQ):
    HEAVY_TABLE["sm86", 16, _pass] = HEAVY_TABLE["sm120", 16, _pass] = HEAVY_TABLE["sm80", 16, _pass]

# Where the table's choice does not fit: the first of these that does.
SMALLER = (Config(64, 64, 4, 1), Config(64, 32, 4, 1), Config(32, 32, 4, 1), Config(16, 16, 4, 1))

# What a matrix unit of NVIDIA computes at once, at least: 16 by 8 elements of a product.
PIECE = 128


def padded(dim: int) -> int:
    """The power of two, at least 16, that a head dim is padded to inside the kernels.

    >>> padded(1), padded(64), padded(96)
    (16, 64, 128)
    """
    return max(16, 1 << (dim - 1).bit_length())


def shared_bytes(config: Config, bits: int, purpose: str, block_d: int, block_dv: int, used: frozenset[str] = frozenset()) -> int:
    """Shared memory that a kernel takes at most: what it keeps through its loop, and every stage of what it walks; for the heavier calls
    also the tiles of bias, mask and dropout on their way between register layouts, 6 bytes a score by measurement."""
    m, n, element = config.block_m, config.block_n, bits // 8
    keys, queries = n * (block_d + block_dv), m * (block_d + block_dv)
    if purpose == FORWARD:
        kept, walked, scores = m * block_d, keys, 0
    elif purpose == DQ:
        kept, walked, scores = queries, keys, m * n
    elif purpose == DKDV:
        kept, walked, scores = keys, queries, m * n
    else:
        kept, walked, scores = 0, queries + keys, m * n
    return element * (kept + config.num_stages * walked + scores) + (6 * m * n if used & HEAVY[purpose] else 0) + 1024


def architecture(target: Target) -> str:
    """The row of the table for a device: its own, or that of its closest relative."""
    if target.type != "cuda":
        return "interpreter"
    if target.hip:
        return "gfx942"
    major, minor = target.capability
    return {8: "sm80" if minor in (0, 7) else "sm86", 9: "sm90", 10: "sm100"}.get(major, "sm120")


def shared_limit(target: Target) -> int:
    """Shared memory of one block on a device, in bytes."""
    return target.shared_memory or SHARED_LIMIT[architecture(target)]


def features(t: Operands, r: Rules) -> frozenset[str]:
    """What of a call decides between the tables."""
    # With tile lists a mask is read only in the few tiles that it cuts.
    given = {"mask": t.mask is not None and t.blocks is None, "bias": t.bias is not None, "window_left": r.window_left >= 0}
    given |= {"softcap": r.softcap > 0.0, "dropout": r.dropout_p > 0.0, "alibi": t.alibi_slopes is not None}
    given["program"] = bool(r.score_mod) or (bool(r.mask_mod) and t.blocks is None)
    given["tf32"] = r.allow_tf32
    given["lists"] = t.blocks is not None
    given["hidden"] = 0 <= r.window_right < t.q.shape[2] - t.k.shape[2]  # queries before the first key
    given["lengths"] = any(x is not None for x in (t.seqused_q, t.seqused_k, t.cu_seqlens_q))
    return frozenset(name for name, on in given.items() if on)


@functools.cache
def choose(
    arch: str, limit: int, bits: int, purpose: str, used: frozenset[str], block_d: int, block_dv: int, listed: tuple[int, int] | None = None
) -> Config:
    """The table's config, or the first smaller one whose shared memory is within ``limit`` bytes; no larger than ``listed``, the queries
    and keys of the blocks that lists name."""
    key, heavy = (arch, bits, purpose), used & HEAVY[purpose]
    if purpose == FORWARD and arch != "sm90":
        heavy |= used & {"window_left"}
    row = TABLE[key]
    if heavy:
        row = HEAVY_TABLE.get(key, row)
    if "program" in heavy:
        row = PROGRAM_TABLE.get(key, row)
    if len(heavy) > 2 and bits == 16:
        row = HEAVIEST.get((arch, purpose), row)
    dim = min(dim for dim in row if dim >= max(block_d, block_dv))
    slight = {} if heavy else SLIGHT.get(key, {})
    chosen = next((slight[name][dim] for name in slight if name in used and dim in slight[name]), row[dim])
    candidates = (chosen, *SMALLER)
    found = next(c for c in candidates if c is SMALLER[-1] or shared_bytes(c, bits, purpose, block_d, block_dv, used) <= limit)
    if listed is not None:
        found = replace(found, block_m=min(found.block_m, listed[0]), block_n=min(found.block_n, listed[1]))
    if arch != "gfx942" and (bits == 16 or "tf32" in used):
        found = replace(found, num_warps=min(found.num_warps, pieces(found, purpose, block_d, block_dv)))
    return found


def pieces(config: Config, purpose: str, block_d: int, block_dv: int) -> int:
    """Into how many pieces the smallest product of a kernel divides for matrix units, which IEEE float32 does not use. More warps than that
    do not help, and Triton 3.6 compiled such tiles to wrong gradients for sm90."""
    m, n = config.block_m, config.block_n
    products = {FORWARD: (m * n, m * block_dv), DKDV: (m * n, n * block_d, n * block_dv), DQ: (m * n, m * block_d), DBIAS: (m * n,)}
    return min(products[purpose]) // PIECE
