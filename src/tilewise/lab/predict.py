"""What each algorithm of the lab must cost, in closed form: bytes with and without a cache, operations, exponentials, extra memory.

An algorithm is a few `Launch`es, each a list of `Stream`s: an array of so many bytes that goes past `times` times. Summed as they stand
they are the traffic *without a cache* between chip and device memory: what `traffic.DeviceMemory` counts exactly, and what the L2 cache
of a GPU is asked for. *With* an L2 cache, device memory sees a stream once if what passes by between two of its uses fits in the cache,
else every time. That assumption is coarse on purpose and is printed beside every number made with it: an ideal cache, empty at the start
of a launch, whose programs keep in step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..cost import Device, Problem, exponentials, flops
from .traffic import Tiles

L2_BYTES = 50 << 20  # the second-level cache of a Hopper GPU, assumed where no device says otherwise


@dataclass(frozen=True, slots=True)
class Visit:
    """What a block mask leaves of one head: tiles, and summed over them their keys, their queries and their (query, key) pairs."""

    tiles: int
    keys: int
    queries: int
    pairs: int


@dataclass(frozen=True, slots=True)
class Case:
    """One problem of the lab: `heads` (batch times heads) independent attentions of N queries and keys, in one dtype."""

    heads: int
    n: int
    d: int
    itemsize: int
    tiles: Tiles
    visit: Visit | None = None  # None: every tile
    piece: int = 0  # columns of the head dimension at a time (`split_dim`)

    @property
    def state(self) -> int:
        """Bytes of a number in the accumulator's dtype."""
        return 8 if self.itemsize == 8 else 4

    @property
    def tiles_m(self) -> int:
        return -(-self.n // self.tiles.block_m)

    @property
    def tiles_n(self) -> int:
        return -(-self.n // self.tiles.block_n)


@dataclass(frozen=True, slots=True)
class Stream:
    """An array of `size` bytes that is loaded or stored `times` times; `between` bytes pass by between two of those."""

    kind: str  # "load" or "store"
    name: str
    size: int
    times: float = 1
    between: int = 0

    @property
    def bytes(self) -> int:
        return round(self.size * self.times)

    def device_bytes(self, l2_bytes: int) -> int:
        return min(self.size, self.bytes) if self.between <= l2_bytes else self.bytes


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel: its streams."""

    name: str
    streams: tuple[Stream, ...]


@dataclass(frozen=True, slots=True)
class Prediction:
    """One algorithm on one case."""

    launches: tuple[Launch, ...]
    flops: int
    exponentials: int
    extra_bytes: int
    on_chip_bytes: int  # tiles and state of one program, as the algorithm names them; double buffering comes on top

    def streams(self) -> Iterable[Stream]:
        for launch in self.launches:
            yield from launch.streams

    def bytes(self, kind: str = "") -> int:
        """Bytes between chip and memory without a cache, of one kind or both."""
        return sum(s.bytes for s in self.streams() if kind in ("", s.kind))

    def device_bytes(self, l2_bytes: int, kind: str = "") -> int:
        """Bytes of device memory behind an ideal L2 cache of this size."""
        return sum(s.device_bytes(l2_bytes) for s in self.streams() if kind in ("", s.kind))

    def seconds(self, device: Device, dtype: str, l2_bytes: int) -> float:
        """The roofline: the largest of the times for products, device memory and exponentials."""
        rates = (
            (self.flops, device.matmul_rate(dtype)),
            (self.device_bytes(l2_bytes), device.bandwidth),
            (self.exponentials, device.exponentials),
        )
        return max(amount / rate for amount, rate in rates if rate)


def softmax_rows(rows: int, n: int, itemsize: int, passes: int, resident_rows: int = 1) -> Prediction:
    """Softmax over the rows of a (rows, N) matrix with `passes` reads and one write; `resident_rows` are worked on at a time.

    Exponentials: two for every element, whatever the rung (one for the sum, one for the result), but one where the row stays on chip.
    The online rung also computes one for every block to rescale the sum; that is left out here as the block's size decides it.
    """
    size = rows * n * itemsize
    streams = (Stream("load", "x", size, passes, between=resident_rows * n * itemsize), Stream("store", "y", size))
    per_element = 1 if passes == 1 else 2
    return Prediction((Launch("softmax", streams),), 0, per_element * rows * n, 0, n * itemsize if passes == 1 else 0)


def standard_forward(c: Case) -> Prediction:
    """Algorithm 0: six trips, 4 N^2 + 4 N d elements behind a cache that holds one head's Q, K and V."""
    wide, square = c.heads * c.n * c.d * c.itemsize, c.heads * c.n * c.n * c.itemsize
    head = c.n * c.d * c.itemsize
    m, n = c.tiles.block_m, c.tiles.block_n
    return Prediction(
        (
            Launch(
                "scores",
                (Stream("load", "q", wide, c.tiles_n, head), Stream("load", "k", wide, c.tiles_m, head), Stream("store", "s", square)),
            ),
            Launch("softmax", (Stream("load", "s", square), Stream("store", "p", square))),
            Launch(
                "weighted sum",
                (Stream("load", "p", square), Stream("load", "v", wide, c.tiles_m, head), Stream("store", "o", wide)),
            ),
        ),
        flops=4 * c.heads * c.n * c.n * c.d,
        exponentials=c.heads * c.n * c.n,
        extra_bytes=2 * square,
        on_chip_bytes=(m + n) * c.d * c.itemsize + m * n * c.state,
    )


def fa1_forward(c: Case, heads_at_once: int = 1) -> Prediction:
    """Algorithm 1 of the first paper: K and V once; Q, O, m and l once for every K and V tile (and the state written at the start).

    `heads_at_once` programs run side by side, each over its own head, so the state of all of them passes between two uses of one tile.
    """
    wide, state, row = c.heads * c.n * c.d * c.itemsize, c.heads * c.n * c.d * c.state, c.heads * c.n * c.state
    between = heads_at_once * c.n * (c.d * (c.itemsize + c.state) + 2 * c.state)
    start = Launch("start", (Stream("store", "o", state), Stream("store", "m", row), Stream("store", "l", row)))
    loads = tuple(Stream("load", name, size, c.tiles_n, between) for name, size in (("q", wide), ("o", state), ("m", row), ("l", row)))
    stores = tuple(Stream("store", name, size, c.tiles_n, between) for name, size in (("o", state), ("m", row), ("l", row)))
    m, n = c.tiles.block_m, c.tiles.block_n
    return Prediction(
        (start, Launch("forward", (Stream("load", "k", wide), Stream("load", "v", wide), *loads, *stores))),
        flops=4 * c.heads * c.n * c.n * c.d,
        exponentials=c.heads * c.n * (c.n + 2 * c.tiles_n),
        extra_bytes=2 * row,
        on_chip_bytes=(m + 2 * n) * c.d * c.itemsize + m * c.d * c.state + m * n * c.state + 2 * m * c.state,
    )


def fa1_backward(c: Case, heads_at_once: int = 1) -> Prediction:
    """Algorithm 4: K, V, dK and dV once; Q, O, dO, dQ, m and l once for every K and V tile."""
    wide, state, row = c.heads * c.n * c.d * c.itemsize, c.heads * c.n * c.d * c.state, c.heads * c.n * c.state
    between = heads_at_once * c.n * (c.d * (2 * c.itemsize + 2 * c.state) + 2 * c.state)
    again = (("q", wide), ("do", wide), ("o", state), ("dq", state), ("m", row), ("l", row))
    loads = tuple(Stream("load", name, size, c.tiles_n, between) for name, size in again)
    once = (Stream("load", "k", wide), Stream("load", "v", wide), Stream("store", "dk", wide), Stream("store", "dv", wide))
    m, n = c.tiles.block_m, c.tiles.block_n
    return Prediction(
        (
            Launch("start", (Stream("store", "dq", state),)),
            Launch("backward", (*once, *loads, Stream("store", "dq", state, c.tiles_n, between))),
        ),
        flops=10 * c.heads * c.n * c.n * c.d,
        exponentials=c.heads * c.n * c.n,
        extra_bytes=0,
        on_chip_bytes=(2 * m + 2 * n) * c.d * c.itemsize + (2 * m + 2 * n) * c.d * c.state + 2 * m * n * c.state,
    )


def fa2_forward(c: Case) -> Prediction:
    """Algorithm 1 of the second paper: Q, O and the LSE once; K and V once for every query tile, from L2 where one head's fit."""
    wide, row = c.heads * c.n * c.d * c.itemsize, c.heads * c.n * c.state
    keys = c.n * c.d * c.itemsize * 2
    m, n = c.tiles.block_m, c.tiles.block_n
    streams = (
        Stream("load", "q", wide),
        Stream("load", "k", wide, c.tiles_m, keys),
        Stream("load", "v", wide, c.tiles_m, keys),
        Stream("store", "o", wide),
        Stream("store", "lse", row),
    )
    return Prediction(
        (Launch("forward", streams),),
        flops=4 * c.heads * c.n * c.n * c.d,
        exponentials=c.heads * c.n * (c.n + c.tiles_n),
        extra_bytes=row,
        on_chip_bytes=(m + 2 * n) * c.d * c.itemsize + m * c.d * c.state + m * n * c.state + 2 * m * c.state,
    )


def fa2_backward(c: Case) -> Prediction:
    """Three launches: delta; dK and dV, Q and dO once for every key tile; dQ, K and V once for every query tile."""
    wide, row = c.heads * c.n * c.d * c.itemsize, c.heads * c.n * c.state
    head = c.n * c.d * c.itemsize * 2
    rows = (("q", wide), ("do", wide), ("lse", row), ("delta", row))
    delta = (Stream("load", "do", wide), Stream("load", "o", wide), Stream("store", "delta", row))
    dkv = (
        *(Stream("load", name, size, c.tiles_n, head) for name, size in rows),
        *(Stream("load", name, wide) for name in ("k", "v")),
        *(Stream("store", name, wide) for name in ("dk", "dv")),
    )
    dq = (
        *(Stream("load", name, size) for name, size in rows),
        *(Stream("load", name, wide, c.tiles_m, head) for name in ("k", "v")),
        Stream("store", "dq", wide),
    )
    m, n = c.tiles.block_m, c.tiles.block_n
    return Prediction(
        (Launch("delta", delta), Launch("dk dv", dkv), Launch("dq", dq)),
        flops=14 * c.heads * c.n * c.n * c.d,
        exponentials=2 * c.heads * c.n * c.n,
        extra_bytes=row,
        on_chip_bytes=(2 * m + 2 * n) * c.d * c.itemsize + 2 * n * c.d * c.state + 2 * m * n * c.state + 2 * m * c.state,
    )


def split_dim_forward(c: Case) -> Prediction:
    """`fa2_forward` with the head dimension in pieces: Q and K go past once for every piece of O as well."""
    wide, row = c.heads * c.n * c.d * c.itemsize, c.heads * c.n * c.state
    pieces, keys = -(-c.d // c.piece), c.n * c.d * c.itemsize * 2
    m, n = c.tiles.block_m, c.tiles.block_n
    streams = (
        Stream("load", "q", wide, pieces * c.tiles_n, keys),
        Stream("load", "k", wide, pieces * c.tiles_m, keys),
        Stream("load", "v", wide, c.tiles_m, keys),
        Stream("store", "o", wide),
        Stream("store", "lse", row),
    )
    return Prediction(
        (Launch("forward", streams),),
        flops=2 * c.heads * c.n * c.n * c.d * (pieces + 1),
        exponentials=pieces * c.heads * c.n * (c.n + c.tiles_n),
        extra_bytes=row,
        on_chip_bytes=(m + 2 * n) * c.piece * c.itemsize + m * c.piece * c.state + m * n * c.state + 2 * m * c.state,
    )


def block_sparse_forward(c: Case) -> Prediction:
    """`fa2_forward` over the tiles that a mask keeps, plus the int32 lists that name them."""
    wide, row = c.heads * c.n * c.d * c.itemsize, c.heads * c.n * c.state
    keys = c.n * c.d * c.itemsize * 2
    visit = c.visit or Visit(c.tiles_m * c.tiles_n, c.tiles_m * c.n, c.tiles_n * c.n, c.n * c.n)
    streams = (
        Stream("load", "q", wide),
        *(Stream("load", name, wide, visit.keys / c.n, keys) for name in ("k", "v")),
        *(Stream("load", name, 4 * size, c.heads) for name, size in (("counts", c.tiles_m), ("indices", visit.tiles))),
        Stream("store", "o", wide),
        Stream("store", "lse", row),
    )
    return Prediction(
        (Launch("forward", streams),),
        flops=4 * c.heads * visit.pairs * c.d,
        exponentials=c.heads * (visit.pairs + visit.queries),
        extra_bytes=row + 4 * c.tiles_m * (1 + c.tiles_n),
        on_chip_bytes=fa2_forward(c).on_chip_bytes,
    )


def production(c: Case, pass_: str) -> Prediction:
    """The kernels that `tilewise.attention` chooses: every input and output once, as `tilewise.cost` says; their tiles are their own."""
    problem = Problem(batch=1, heads=c.heads, seqlen_q=c.n, head_dim=c.d, itemsize=c.itemsize)
    wide, row = c.heads * c.n * c.d * c.itemsize, c.heads * c.n * c.state
    loads, stores = (("q", "k", "v"), ("o",)) if pass_ == "fwd" else (("q", "k", "v", "o", "do"), ("dq", "dk", "dv"))
    streams = (
        *(Stream("load", name, wide) for name in loads),
        *(Stream("store", name, wide) for name in stores),
        Stream("store" if pass_ == "fwd" else "load", "lse", row),
    )
    return Prediction(
        (Launch("attention", streams),),
        flops=flops(problem, pass_),
        exponentials=exponentials(problem, pass_),
        extra_bytes=row,
        on_chip_bytes=0,
    )


def theorem_elements(n: int, d: int, on_chip_elements: int) -> float:
    """N^2 d^2 / M: what the accesses of FlashAttention grow as (Dao et al. 2022, Theorem 2), up to a constant.

    >>> theorem_elements(1024, 64, 32768)
    131072.0
    """
    return n * n * d * d / on_chip_elements


def paper_tiles(d: int, on_chip_elements: int) -> Tiles:
    """The tiles of Algorithm 1, line 1, for M elements on chip: Bc = M / 4d, Br = min(M / 4d, d), rounded up.

    >>> paper_tiles(64, 32768)
    Tiles(block_m=64, block_n=128)
    """
    block_n = max(1, -(-on_chip_elements // (4 * d)))
    return Tiles(min(block_n, d), block_n)


def traffic_over_compute(d: int, bandwidth: float, matmul: float, passes: int = 6, itemsize: int = 2) -> float:
    """Time to move `passes` N x N matrices of `itemsize` bytes over the time of the 4 N^2 d operations of attention.

    With six passes of fp16 it is 468 / d at 2 TB/s and 312 TFLOP/s. Algorithm 0 makes four passes over N^2, and four over N d.

    >>> traffic_over_compute(1, 2e12, 312e12)
    468.0
    >>> round(traffic_over_compute(1, 4.8e12, 989e12))
    618
    """
    return (passes * itemsize / bandwidth) / (4 * d / matmul)
