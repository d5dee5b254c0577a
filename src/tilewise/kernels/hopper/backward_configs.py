"""Tiles, stages and registers of the Hopper backward kernel, and the shared memory each choice needs; see `configs` for the forward's.

A `BackwardTile` is what a person tunes, a `BackwardVariant` is what the compiler sees. Neither holds a length or a batch size.
"""

from __future__ import annotations

from dataclasses import dataclass

WARPS = 8  # of the partition that computes: two warp groups


@dataclass(frozen=True)
class BackwardTile:
    """One CTA: `block_n` keys, which both warp groups share; rings of Q and dO tiles of `block_m` rows."""

    block_m: int
    block_n: int
    stages: int  # of Q
    do_stages: int
    key_groups: int = 2  # 2: each warp group has half of the keys, P and dS stay in registers; 1: half of the columns, they are shared
    dq_rows: int = 1  # warp groups along the rows of dQ; the other ones split its columns
    early_dv: bool = False  # dV is issued before dS is computed: hides more, keeps P twice; needs P in registers
    worker_registers: int = 24  # a thread of the warps that load and of those that add dQ
    launch_registers: int = 168


@dataclass(frozen=True)
class BackwardVariant:
    """Everything that the compiled kernel is specialised on."""

    tile: BackwardTile
    dtype: str  # "bf16" or "fp16"
    dim: int  # columns of Q, K, dQ, dK: a power of two
    dim_v: int  # columns of V, dO, dV: a power of two
    right: bool = False  # window_right >= 0 (causal is 0)
    left: bool = False  # window_left >= 0
    lengths_q: bool = False
    lengths_k: bool = False
    hidden_keys: bool = False  # some key of a visited tile may be seen by no query: its K and V are cleared
    hidden_rows: bool = False  # some query of a visited tile may see no key or lie beyond its length: its Q and dO are cleared
    grouped: bool = False  # there is a loop over the query heads that share a key head
    apart: bool = False  # each of them has tiles of its own instead, whose dK and dV are added up in memory
    softcap: bool = False
    alibi: bool = False
    slope_gradient: bool = False
    bias: str = ""  # the form of a bias, see `matrices`
    bias_dtype: str = "bf16"
    bias_gradient: str = ""  # "added": dS of each block is added up in memory; "stored": it is the gradient of a bias that nothing shares
    mask: str = ""
    heads_first: bool = False  # tiles of one head's batch items follow one another: they share what a bias or mask says
    dropout: bool = False
    # How tiles of keys add to a block of dQ. "all": one after the other, the same bits on every run; "first": the first one stores, so that
    # nothing is cleared before, and the others add in any order; "": all add in any order to what was cleared.
    order: str = ""
    packed: bool = False  # the batch is one row of packed sequences, and tiles are described by records
    listed: bool = False  # the blocks of queries that see a tile stand in lists, and tiles are described by records
    log2_list: int = 0  # of lists: how many blocks of queries an entry is

    @property
    def ordered(self) -> bool:
        return self.order == "all"

    @property
    def block_m(self) -> int:
        return self.tile.block_m

    @property
    def block_n(self) -> int:
        return self.tile.block_n

    @property
    def early_delta(self) -> bool:
        """Whether delta is read among the exponentials: where no branch of cut blocks follows and no other term takes the registers."""
        return not (self.right or self.left or self.softcap or self.alibi or self.bias or self.mask or self.dropout)

    @property
    def heads_inside(self) -> bool:
        """Whether a block of queries is visited for all heads that share the keys before the block in front of it: CTAs of one key head,
        which all start at the last block, then read the same blocks at about the same time, however many of them each sees. Not where a
        head brings terms of its own.
        """
        return self.grouped and not (self.listed or self.alibi or self.dropout)

    @property
    def key_numbers(self) -> int:
        """Of dK and dV of a tile: dK comes first where they are added up."""
        return self.block_n * (self.dim + self.dim_v)

    @property
    def lanes(self) -> bool:
        """Whether dQ lies in memory as threads hold it (`backward_pass.by_lanes`), not as rows and columns. With the other features
        ptxas then gives up uniform registers, which costs more than the banks do.
        """
        return not (self.alibi or self.mask or self.bias == "full" or self.dropout)

    @property
    def stages(self) -> int:
        return self.tile.stages

    @property
    def do_stages(self) -> int:
        return self.tile.do_stages

    @property
    def ranked(self) -> bool:
        """Whether the device has put the tiles into an order, by falling cost; there may be tiles that nobody sees."""
        return self.packed or self.listed

    @property
    def share_p(self) -> bool:
        return self.tile.key_groups == 1

    @property
    def dq_parts(self) -> int:
        """dQ leaves in so many column parts, one after the other, through one buffer."""
        return max(1, self.dim // 128)

    @property
    def dq_columns(self) -> int:
        return self.dim // self.dq_parts

    @property
    def dq_box(self) -> tuple[int, int]:
        """A part of a block of dQ in shared memory and as TMA adds it: lines of 32 numbers, which are 128 bytes, or rows and columns."""
        return (self.block_m * self.dq_columns // 32, 32) if self.lanes else (self.block_m, self.dq_columns)

    @property
    def log2_block_m(self) -> int:
        return self.tile.block_m.bit_length() - 1

    @property
    def log2_block_n(self) -> int:
        return self.tile.block_n.bit_length() - 1

    # Numbers of the shared-memory barriers, one after the other; of lists, numbers of rows follow.
    @property
    def q_full(self) -> int:
        return 0

    @property
    def q_empty(self) -> int:
        return self.q_full + self.stages

    @property
    def do_full(self) -> int:
        return self.q_empty + self.stages

    @property
    def do_empty(self) -> int:
        return self.do_full + self.do_stages

    @property
    def dq_full(self) -> int:
        """One for each adding warp: they take parts of dQ in turn."""
        return self.do_empty + self.do_stages

    @property
    def dq_empty(self) -> int:
        return self.dq_full + 2

    @property
    def row_slot(self) -> int:
        """Twice as many as stages of Q, one for each block in flight: the row at which its dQ starts."""
        return self.dq_empty + 1

    @property
    def barriers(self) -> int:
        return self.row_slot + (2 * self.stages if self.listed else 0)

    @property
    def barrier_words(self) -> int:
        """How many are allocated: more than needed, so that the compiler, which places large buffers first, puts them behind the tiles."""
        return 64

    # Bytes of the tiles.
    @property
    def q_bytes(self) -> int:
        return self.block_m * self.dim * 2

    @property
    def do_bytes(self) -> int:
        return self.block_m * self.dim_v * 2

    @property
    def row_bytes(self) -> int:
        """One number a query."""
        return self.block_m * 4

    @property
    def matrix_bytes(self) -> int:
        """What TMA brings of a bias and a mask beside a tile of Q."""
        return self.block_m * self.block_n * (2 * (self.bias == "tma") + (self.mask == "tma"))

    @property
    def q_stage_bytes(self) -> int:
        """What TMA brings with a tile of Q: the LSE of its rows, with a bias also what float32 lost of it, and the matrices."""
        return self.q_bytes + self.row_bytes * (2 if self.bias else 1) + self.matrix_bytes

    @property
    def k_bytes(self) -> int:
        return self.block_n * self.dim * 2

    @property
    def v_bytes(self) -> int:
        return self.block_n * self.dim_v * 2

    @property
    def swizzle(self) -> int:
        return min(128, 2 * self.dim)

    @property
    def swizzle_v(self) -> int:
        return min(128, 2 * self.dim_v)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of the tiles, without barriers."""
        q = self.stages * self.q_stage_bytes
        do = self.do_stages * (self.do_bytes + self.row_bytes)
        scores = self.block_n * self.block_m * 2 * (2 if self.share_p else 1)
        return q + do + self.k_bytes + self.v_bytes + scores + self.block_m * self.dq_columns * 4

    @property
    def barrier_offset(self) -> int:
        """Where the barriers lie, behind every buffer that is not smaller than they are."""
        rings = (stages * self.row_bytes for stages in (self.stages, self.do_stages, *((self.stages,) if self.bias else ())))
        return self.shared_bytes - sum(size for size in rings if size < 8 * self.barrier_words)


_WIDE = BackwardTile(block_m=64, block_n=128, stages=2, do_stages=2, early_dv=True)

TILES = {
    "64": BackwardTile(block_m=128, block_n=128, stages=2, do_stages=2, dq_rows=2),
    "64 featured": _WIDE,
    "128": _WIDE,
    "256": BackwardTile(block_m=64, block_n=64, stages=2, do_stages=1, key_groups=1),
}


def columns(head_dim: int) -> int:
    """Columns of a tile for a head dim that is a multiple of 8: what lies past it is zero-filled."""
    return 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256


def tile_name(head_dim: int, head_dim_v: int, featured: bool) -> str:
    """The tile that serves a call. `featured`: softcap, ALiBi, a bias, a mask or dropout, whose terms need the registers of half a tile."""
    widest = max(head_dim, head_dim_v)
    if widest > 64:
        return "128" if widest <= 128 else "256"
    return "64 featured" if featured else "64"
