"""Tiles, stages and registers of the Hopper forward kernel, and the shared memory each choice needs.

A `Tile` is what a person tunes, a `Variant` is what the compiler sees: one compiled kernel per `Variant`. Neither holds a length or a
batch size, so a call with other lengths never compiles again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SHARED_MEMORY_LIMIT = 232_448  # bytes a CTA may have on sm_90
ROWS = 64  # query rows of one consumer warp group: the M of its wgmma
MOST_PROGRAMS = 256  # CTAs of a launch, one a multiprocessor: GPUs of sm_90 have up to 144


@dataclass(frozen=True)
class Tile:
    """One CTA: `warpgroups` consumers of 64 query rows each, one producer warp, a ring of `stages` key and value tiles."""

    block_n: int
    stages: int
    warpgroups: int
    cross_tile: bool  # the last PV of a tile and its epilogue run under the first QK of the next; needs two Q buffers and one for O
    consumer_registers: int  # a thread; the first consumer gets what the others leave of launch_registers
    producer_registers: int
    launch_registers: int
    matrix_stages: int = 0  # of the ring of bias and mask tiles
    split: bool = False  # the PV product is waited for between the exponentials of the left and the right half of a block's keys


@dataclass(frozen=True)
class Variant:
    """Everything that the compiled kernel is specialised on."""

    tile: Tile
    dtype: str  # "bf16" or "fp16"
    chunk: int  # columns of one Q or K tile in shared memory: a power of two
    chunks: int  # so many of them make the head dim
    dim_v: int  # columns of the V tile: a power of two
    right: bool = False  # window_right >= 0 (causal is 0)
    left: bool = False  # window_left >= 0
    lengths_q: bool = False
    lengths_k: bool = False
    scale_first: bool = False  # scores are scaled before the maximum: scale <= 0, softcap, ALiBi
    softcap: bool = False
    alibi: bool = False
    sink: bool = False
    packed: bool = False  # sequences one after the other; goes with both lengths
    listed: bool = False  # a tile's blocks of keys stand in lists
    log2_list: int = 0  # of the blocks that make a listed one
    store_tma: bool = True  # out leaves through shared memory and TMA; False: from registers
    bias: str = ""  # the form of a bias, see `matrices`
    bias_dtype: str = "bf16"
    mask: str = ""
    dropout: bool = False
    parts: bool = False  # a tile visits one part of its blocks and leaves its state to a merge; out is the workspace, in float32
    heads: int = 1  # of one group whose queries share a tile; more than one goes with `parts`
    values_a_head: bool = False  # in the copy of V every query head has a head of its own, in which what it alone does not see is cleared

    @property
    def block_m(self) -> int:
        return ROWS * self.tile.warpgroups

    @property
    def queries(self) -> int:
        """Of each head of a tile."""
        return self.block_m // self.heads

    @property
    def log2_heads(self) -> int:
        return self.heads.bit_length() - 1

    @property
    def own_heads(self) -> int:
        """Heads of one warp group: its rows are those of the first, then those of the second."""
        return max(self.heads // self.tile.warpgroups, 1)

    @property
    def own_queries(self) -> int:
        """Rows that a warp group has of each."""
        return ROWS // self.own_heads

    @property
    def log2_own_queries(self) -> int:
        return self.own_queries.bit_length() - 1

    @property
    def block_n(self) -> int:
        return self.tile.block_n

    @property
    def log2_block_n(self) -> int:
        return self.tile.block_n.bit_length() - 1

    @property
    def stages(self) -> int:
        return self.tile.stages

    @property
    def warpgroups(self) -> int:
        return self.tile.warpgroups

    @property
    def q_stages(self) -> int:
        return 2 if self.tile.cross_tile else 1

    @property
    def split(self) -> bool:
        """Whether P is made in halves; the bits of dropout are one tile's."""
        return self.tile.split and not self.dropout

    @property
    def positional(self) -> bool:
        """Whether blocks other than the rightmost may need a mask."""
        return self.right or self.left or self.listed

    @property
    def may_be_empty(self) -> bool:
        """Whether a row may see no key in a block that is visited."""
        return self.positional or self.lengths_k or self.parts or self.bias != "" or self.mask != ""

    @property
    def guarded(self) -> bool:
        """Whether hidden keys and values are read as they are, and O is looked at: see `guard`."""
        return self.bias != "" or self.mask != ""

    @property
    def may_be_idle(self) -> bool:
        """Whether there may be fewer tiles than CTAs."""
        return self.packed or self.guarded

    @property
    def ranked(self) -> bool:
        """Whether the device has put the tiles into an order, by falling cost."""
        return self.packed or self.listed

    @property
    def longest_first(self) -> bool:
        return self.right and not self.left

    # Numbers of the shared-memory barriers, one after the other; data words follow: two for tiles, of lists two a stage for blocks.
    @property
    def q_full(self) -> int:
        return 0

    @property
    def q_empty(self) -> int:
        return self.q_full + self.warpgroups * self.q_stages

    @property
    def k_full(self) -> int:
        return self.q_empty + self.warpgroups * self.q_stages

    @property
    def k_empty(self) -> int:
        return self.k_full + self.stages

    @property
    def v_full(self) -> int:
        return self.k_empty + self.stages

    @property
    def v_empty(self) -> int:
        return self.v_full + self.stages

    @property
    def next_full(self) -> int:
        return self.v_empty + self.stages

    @property
    def next_empty(self) -> int:
        return self.next_full + 2

    @property
    def next_slot(self) -> int:
        return self.next_empty + 2

    @property
    def block_slot(self) -> int:
        return self.next_slot + 2

    @property
    def matrix_full(self) -> int:
        return self.block_slot + (2 * self.stages if self.listed else 0)

    @property
    def matrix_empty(self) -> int:
        return self.matrix_full + self.matrix_stages

    @property
    def barriers(self) -> int:
        return self.matrix_empty + self.matrix_stages

    @property
    def barrier_words(self) -> int:
        """How many are allocated: more than needed, so that the compiler, which places large buffers first, puts them behind the tiles."""
        return 64

    # Bytes of the tiles.
    @property
    def q_bytes(self) -> int:
        """One warp group's Q chunk."""
        return ROWS * self.chunk * 2

    @property
    def k_bytes(self) -> int:
        """One K chunk."""
        return self.block_n * self.chunk * 2

    @property
    def v_bytes(self) -> int:
        return self.block_n * self.dim_v * 2

    @property
    def out_bytes(self) -> int:
        """One warp group's O tile."""
        return ROWS * self.dim_v * 2

    @property
    def matrix_stages(self) -> int:
        return self.tile.matrix_stages if "tma" in (self.bias, self.mask) else 0

    @property
    def matrix_bytes(self) -> int:
        """One warp group's tiles of a bias and a mask in one stage."""
        return ROWS * self.block_n * (2 * (self.bias == "tma") + (self.mask == "tma"))

    @property
    def bias_ring(self) -> int:
        return 2 * self.warpgroups * self.matrix_stages * ROWS * self.block_n if self.bias == "tma" else 0

    @property
    def mask_ring(self) -> int:
        return self.warpgroups * self.matrix_stages * ROWS * self.block_n if self.mask == "tma" else 0

    @property
    def q_swizzle(self) -> int:
        return min(128, 2 * self.chunk)

    @property
    def v_swizzle(self) -> int:
        return min(128, 2 * self.dim_v)

    @property
    def own_out_buffer(self) -> bool:
        """Whether O has shared memory of its own; otherwise it leaves through Q's."""
        return self.store_tma and (self.tile.cross_tile or self.out_bytes > self.chunks * self.q_bytes)

    @property
    def tile_bytes(self) -> int:
        """Shared memory of the tiles, barriers behind them."""
        q = self.warpgroups * self.q_stages * self.chunks * self.q_bytes
        k = self.stages * self.chunks * self.k_bytes
        v = self.stages * self.v_bytes
        return q + k + v + self.bias_ring + self.mask_ring + (self.warpgroups * self.out_bytes if self.own_out_buffer else 0)


_TWO: dict[str, Any] = {"warpgroups": 2, "consumer_registers": 232, "producer_registers": 40, "launch_registers": 168}
_THREE: dict[str, Any] = {"warpgroups": 3, "consumer_registers": 160, "producer_registers": 32, "launch_registers": 128}

TILES = {
    "64": Tile(block_n=128, stages=4, cross_tile=True, matrix_stages=2, split=True, **_TWO),
    "64 bias": Tile(block_n=128, stages=2, cross_tile=True, matrix_stages=2, split=True, **_TWO),
    "64 long": Tile(block_n=128, stages=4, cross_tile=True, split=True, **_THREE),
    "64 long causal": Tile(block_n=128, stages=4, cross_tile=True, **_THREE),
    "128": Tile(block_n=128, stages=2, cross_tile=True, split=True, **_TWO),
    "192": Tile(block_n=128, stages=2, cross_tile=False, split=True, **_TWO),
    "128 matrix": Tile(block_n=64, stages=2, cross_tile=True, matrix_stages=2, split=True, **_TWO),
    "256": Tile(block_n=64, stages=2, cross_tile=False, **_TWO),
}


def tile_columns(head_dim: int) -> tuple[int, int]:
    """(columns of a chunk, chunks) of the Q and K tiles for a head dim that is a multiple of 8: what lies past it is zero-filled."""
    if head_dim <= 64:
        return 64, 1
    if head_dim <= 96:
        return 32, 3
    if head_dim <= 128:
        return 128, 1
    if head_dim <= 192:
        return 64, 3
    return 256, 1


def value_columns(head_dim_v: int) -> int:
    """Columns of the V and O tiles: the next supported power of two."""
    return 64 if head_dim_v <= 64 else 128 if head_dim_v <= 128 else 256


def tile_name(
    head_dim: int, head_dim_v: int, seqlen_q: int, seqlen_k: int, causal: bool, plain: bool, bias: str = "", mask: str = ""
) -> str:
    """The tile that serves a call. `plain`: no mask but causal, no score transformation, no dropout. `bias` and `mask`: the forms of such
    tensors.

    Three consumers of head dim 64 need long sequences to fill their 192 rows and have 80 registers fewer each, so that they only
    take calls without further features.
    """
    widest = max(head_dim, head_dim_v)
    if widest <= 64:
        if bias == "tma":
            return "64 bias"
        if plain and seqlen_q >= (3072 if causal else 1536):
            return "64 long causal" if causal else "64 long"
        return "64"
    if widest <= 128:
        return "128 matrix" if bias or mask else "128"
    if head_dim <= 192 and head_dim_v <= 128:
        return "192"
    return "256"


@dataclass(frozen=True)
class Addresses:
    """Offsets in shared memory of what raw PTX touches; the compiler places it, the launcher checks it."""

    barriers: int
    values: int
