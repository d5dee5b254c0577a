"""Which tiles of the score matrix a rule leaves to compute, as lists that the kernels walk instead of all tiles.

A tile is empty (no pair visible: never visited), full (every pair visible: visited without a mask) or partial (visited with the rule's
own program). The lists are derived from the rule and never change its meaning; they only spare work.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import tile_cache
from .block_bits import bits_of_bsr, bits_of_lists, bits_of_topk
from .errors import UnsupportedAttention
from .expressions import same_device
from .mask_base import Mask, indices
from .masks import Blocks, Custom, Dense, Lowered, lower
from .tile_lists import TileLists, lists_of_rule, lists_of_status
from .tile_status import EMPTY, FULL, PARTIAL, Grid

BLOCK_SIZES = (16, 32, 64, 128, 256)


class BlockMask:
    """A rule with the lists of its partial and full tiles: `attention(..., mask=block_mask)` does no work in empty tiles.

    Built without an N x N tensor: from row ranges where the rule has them (windows, causal, chunks, prefixes, packed documents), else
    tile by tile from its predicate, on `device` and without reading values on the host. Takes O(tiles) memory, O(N / block) for
    rules inside a window. Lists are shared between batch items and heads unless the rule tells them apart.

    Args:
        rule: any rule of `tilewise.masks`.
        seqlen_q: number of queries, Sq.
        seqlen_k: number of keys, Sk; Sq by default.
        batch: number of batch items, where the rule tells them apart; by default that of its tensors.
        heads: number of query heads, likewise.
        block_size: queries and keys of a tile, each 16, 32, 64, 128 or 256; one number for both.
        device: where the lists live; by default with the rule's tensors, else torch's default device.

    Raises:
        ValueError: the rule does not fit these sizes, or needs `batch` or `heads`.
        UnsupportedAttention: the rule's function uses an operation that cannot be traced.

    A mask is built for one length and for what its rule's tensors hold. A call of another length, or after a write to those tensors, or
    with `seqused_q` or `seqused_k` where the rule depends on the query's position, raises and says what to do. Equal masks are built once
    and then found again (`tilewise.tile_cache`).

    Example:
        >>> from tilewise import masks
        >>> mask = BlockMask(masks.SlidingWindow(255, 0), 1024, block_size=128)
        >>> mask.counts()
        {'empty': 43, 'partial': 14, 'full': 7}
        >>> mask.density()
        0.328125
    """

    def __init__(
        self,
        rule: Mask,
        seqlen_q: int,
        seqlen_k: int | None = None,
        *,
        batch: int | None = None,
        heads: int | None = None,
        block_size: int | tuple[int, int] = 128,
        device: torch.device | str | None = None,
    ) -> None:
        if not isinstance(rule, Mask):
            raise TypeError(
                f"BlockMask: rule is {type(rule).__name__}; it must be a rule from tilewise.masks; for a function f(b, h, q_idx, kv_idx) "
                "use masks.Custom(f), for a bool tensor BlockMask.from_dense(visible)"
            )
        seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
        for name, length in (("seqlen_q", seqlen_q), ("seqlen_k", seqlen_k)):
            if isinstance(length, bool) or not isinstance(length, (int, torch.SymInt)):
                raise TypeError(f"BlockMask: {name} is {length!r} of type {type(length).__name__}; it must be an int")
            if length < 0:
                raise ValueError(f"BlockMask: {name} is {length}; it must be 0 or more")
        if device is None:
            device = next((t.device for t in rule.tensors()), None)
        device = torch.empty(0, device=device).device  # "cuda" becomes the current one
        key, captured = self._describe(rule, seqlen_q, seqlen_k, batch, heads, _block_sizes(block_size), device)
        self.exact = True
        self.lists = tile_cache.find(key, captured, lambda: lists_of_rule(rule, self.grid, self.batch, self.heads, device))

    def _describe(
        self,
        rule: Mask,
        seqlen_q: int,
        seqlen_k: int,
        batch: int | None,
        heads: int | None,
        sizes: tuple[int, int],
        device: torch.device,
    ) -> tuple[tuple[Any, ...], list[Tensor]]:
        """Everything but the lists. Returns what these depend on."""
        self.rule, self.seqlen_q, self.seqlen_k = rule, seqlen_q, seqlen_k
        text, captured = rule.program(seqlen_q, seqlen_k, device=device)
        names = names_of(text)
        own_batch, own_heads = rule.sizes()
        self.batch = _told_apart("batch", batch, own_batch, "b" in names)
        self.heads = _told_apart("heads", heads, own_heads, "h" in names)
        self.reads = names & {"b", "h", "p"}
        self.grid = Grid(seqlen_q, seqlen_k, *sizes, *rule.implied_window())
        self.lowered = self._lower(rule, device)
        self.read = tile_cache.versions([*rule.tensors(), *captured])
        return (text, self.grid, self.batch, self.heads, device), captured

    def _lower(self, rule: Mask, device: torch.device) -> Lowered:
        # Where nothing tells batch items or heads apart, what one of them takes serves any number.
        return lower(rule, batch=self.batch, heads=self.heads, seqlen_q=self.seqlen_q, seqlen_k=self.seqlen_k, device=device)

    # Constructors.

    @classmethod
    def from_dense(
        cls,
        visible: Tensor,
        *,
        seqlen_q: int | None = None,
        seqlen_k: int | None = None,
        block_size: int | tuple[int, int] = 128,
    ) -> BlockMask:
        """From a bool tensor that broadcasts to (B, H, Sq, Sk), True = visible; it is kept for the partial tiles, and not copied.

        `seqlen_q` and `seqlen_k` are needed where the tensor has size 1 there.

        >>> BlockMask.from_dense(torch.ones(256, 384, dtype=torch.bool).tril()).counts()
        {'empty': 3, 'partial': 2, 'full': 1}
        """
        rule = Dense(visible)
        seqlen_q = rule.rank4.shape[2] if seqlen_q is None else seqlen_q
        seqlen_k = rule.rank4.shape[3] if seqlen_k is None else seqlen_k
        return cls(rule, seqlen_q, seqlen_k, block_size=block_size)

    @classmethod
    def from_bsr(
        cls,
        crow_indices: Tensor,
        col_indices: Tensor,
        seqlen_q: int,
        seqlen_k: int | None = None,
        *,
        block_size: int | tuple[int, int] = 128,
    ) -> BlockMask:
        """From the indices of a block-sparse-row matrix (`torch.Tensor.to_sparse_bsr`): its blocks are visible, whatever they hold.

        `crow_indices` (Mb + 1,) counts the blocks before each row of blocks, `col_indices` (number of blocks,) holds their columns.

        >>> eye = torch.eye(64).to_sparse_bsr((16, 16))
        >>> BlockMask.from_bsr(eye.crow_indices(), eye.col_indices(), 64, block_size=16).counts()
        {'empty': 12, 'partial': 0, 'full': 4}
        """
        seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
        sizes = _block_sizes(block_size)
        bits = bits_of_bsr(crow_indices, col_indices, seqlen_q, seqlen_k, sizes)
        return cls(Blocks(bits, sizes), seqlen_q, seqlen_k, block_size=block_size)

    @classmethod
    def from_topk(
        cls,
        indices: Tensor,
        seqlen_q: int,
        seqlen_k: int | None = None,
        *,
        block_size: int | tuple[int, int] = 128,
        within: Mask | None = None,
    ) -> BlockMask:
        """From the blocks of keys chosen for each block of queries: integers (B or 1, H or 1, Mb, k); a negative index chooses nothing.

        `within` is a rule that holds inside the chosen blocks as well, such as `masks.Causal()`.

        >>> chosen = torch.tensor([[0, -1], [0, 1], [0, 2], [1, 3]])
        >>> BlockMask.from_topk(chosen[None, None], 64, block_size=16).counts()
        {'empty': 9, 'partial': 0, 'full': 7}
        """
        seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
        sizes = _block_sizes(block_size)
        rule: Mask = Blocks(bits_of_topk(indices, seqlen_q, seqlen_k, sizes), sizes)
        return cls(rule if within is None else rule & within, seqlen_q, seqlen_k, block_size=block_size)

    @classmethod
    def from_flex(cls, block_mask: Any) -> BlockMask:
        """From a `torch.nn.attention.flex_attention.BlockMask`: its full blocks, and its partial blocks with its `mask_mod`.

        Its lists are taken as they are, so a partial block stays one whatever the function shows there. Its blocks are multiples of 16;
        those larger than 256 are cut.

        >>> from torch.nn.attention.flex_attention import create_block_mask
        >>> flex = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, device="cpu")
        >>> BlockMask.from_flex(flex).counts()
        {'empty': 1, 'partial': 2, 'full': 1}
        """
        if not hasattr(block_mask, "kv_num_blocks"):
            raise TypeError(
                f"BlockMask.from_flex: block_mask is {type(block_mask).__name__}; it must come from create_block_mask of "
                "torch.nn.attention.flex_attention"
            )
        seqlen_q, seqlen_k = block_mask.seq_lengths
        partial = block_mask.kv_num_blocks, block_mask.kv_indices
        full = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
        # Torch's mark for "no mask at all" is one enormous block.
        size = tuple(min(block, -(-length // 16) * 16) for block, length in zip(block_mask.BLOCK_SIZE, (seqlen_q, seqlen_k), strict=True))
        sizes = served(size)
        rows, columns = -(-seqlen_q // size[0]), -(-seqlen_k // size[1])
        if partial[0].shape[2] < rows:
            raise ValueError(
                f"BlockMask.from_flex: block_mask has {partial[0].shape[2]} rows of blocks, and its seq_lengths say {seqlen_q} queries, "
                f"which fill {rows}: it was sliced; set its seq_lengths to (queries, {seqlen_k}), its mask_mod to one that counts from them"
            )
        bits_partial = bits_of_lists(*partial, rows, columns)
        rule: Mask = Blocks(bits_partial, size)
        if block_mask.mask_mod is not None:
            rule = rule & Custom(block_mask.mask_mod)
        bits_full = torch.zeros_like(bits_partial) if full[0] is None else bits_of_lists(*full, rows, columns)
        if full[0] is not None:
            rule = Blocks(bits_full, size) | rule
        self = object.__new__(cls)
        batch, heads = partial[0].shape[:2]
        key, _ = self._describe(rule, seqlen_q, seqlen_k, batch, heads, sizes, partial[1].device)
        self.exact = False

        def build() -> TileLists:
            status = torch.where(bits_full, FULL, torch.where(bits_partial, PARTIAL, EMPTY))
            m = torch.arange(self.grid.rows, device=status.device) * sizes[0] // size[0]
            n = torch.arange(self.grid.columns, device=status.device) * sizes[1] // size[1]
            return lists_of_status(status[: self.batch, : self.heads, m[:, None], n], self.grid)

        self.lists = tile_cache.find(("flex", *key), [x for x in (*partial, *full) if x is not None], build)
        return self

    # What it says of itself.

    @property
    def block_size(self) -> tuple[int, int]:
        return self.grid.block_m, self.grid.block_n

    @property
    def device(self) -> torch.device:
        return self.lists.kv_num.device

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B or 1, H or 1, blocks of queries, blocks of keys)."""
        return self.batch, self.heads, self.grid.rows, self.grid.columns

    def __repr__(self) -> str:
        sizes = f"seqlen_q={self.seqlen_q}, seqlen_k={self.seqlen_k}, batch={self.batch}, heads={self.heads}"
        return f"BlockMask({self.rule!r}, {sizes}, block_size={self.block_size}, device='{self.device}')"

    def status(self) -> Tensor:
        """uint8 (B or 1, H or 1, Mb, Nb): 0 for empty tiles, 1 for partial, 2 for full. Takes O(tiles) memory.

        >>> from tilewise import masks
        >>> BlockMask(masks.Causal(), 64, block_size=32).status()[0, 0]
        tensor([[1, 0],
                [2, 1]], dtype=torch.uint8)
        """
        result = torch.zeros(self.batch, self.heads, self.grid.rows, self.grid.columns + 1, dtype=torch.uint8, device=self.device)
        lists = self.lists
        for kind, count, index in ((PARTIAL, lists.kv_num, lists.kv_idx), (FULL, lists.kv_full_num, lists.kv_full_idx)):
            listed = torch.arange(index.shape[3], device=index.device) < count[..., None]
            result.scatter_(3, torch.where(listed, index, self.grid.columns).long(), kind)
        return result[..., :-1]

    def counts(self) -> dict[str, int]:
        """How many tiles are empty, partial and full, over the batch items and heads that have lists of their own. Reads the device."""
        partial, full = int(self.lists.kv_num.sum()), int(self.lists.kv_full_num.sum())
        total = self.batch * self.heads * self.grid.rows * self.grid.columns
        return {"empty": total - partial - full, "partial": partial, "full": full}

    def density(self) -> float:
        """The share of tiles that are not empty: what attention costs, relative to computing every tile. Reads the device."""
        counts = self.counts()
        total = sum(counts.values())
        return 1.0 - counts["empty"] / total if total else 0.0

    def plot(self, *, batch: int = 0, head: int = 0, ax: Any = None) -> Any:
        """Draws the tiles of one batch item and head: queries downwards, keys to the right; returns the Axes. Needs matplotlib.

        Full tiles are blue, partial ones light blue, empty ones grey.
        """
        from matplotlib import pyplot
        from matplotlib.colors import ListedColormap

        status = self.status()[min(batch, self.batch - 1), min(head, self.heads - 1)].cpu().numpy()
        if ax is None:
            ratio = min(max(self.seqlen_q / self.seqlen_k, 0.4), 1.6)
            ax = pyplot.subplots(figsize=(4.8, 4.8 * ratio), layout="constrained")[1]
        colours = ListedColormap(["#f2f2f2", "#7fbfe5", "#0072b2"])
        extent = (-0.5, self.grid.columns * self.grid.block_n - 0.5, self.grid.rows * self.grid.block_m - 0.5, -0.5)
        ax.imshow(status, cmap=colours, vmin=0, vmax=2, extent=extent, interpolation="nearest")
        ax.set(xlabel="key j", ylabel="query i", title=f"{self.rule!r}: {self.density():.1%} of tiles")
        ax.set_xlim(-0.5, self.seqlen_k - 0.5)
        ax.set_ylim(self.seqlen_q - 0.5, -0.5)
        return ax

    def verify(self) -> None:
        """Compares both lists with the rule's predicate, pair by pair, a block of queries at a time; AssertionError names a tile.

        Takes O(N block) memory and O(N^2) time: meant for small lengths.
        """
        grid, lists, device = self.grid, self.lists, self.device
        status = self.status()
        for m in range(grid.rows):
            queries = range(m * grid.block_m, min((m + 1) * grid.block_m, self.seqlen_q))
            at = indices(device, range(self.batch), range(self.heads), queries, self.seqlen_k, self.seqlen_q, None, None)
            shape = self.batch, self.heads, len(queries), self.seqlen_k
            visible = self.rule.predicate(at).expand(shape).to(torch.uint8)
            padding = (0, grid.columns * grid.block_n - self.seqlen_k)
            some, every = (
                reduce(torch.nn.functional.pad(visible, padding, value=fill).unflatten(3, (grid.columns, grid.block_n)), (2, 4))
                for reduce, fill in ((torch.amax, 0), (torch.amin, 1))
            )
            expected = some + every
            if not self.exact:
                expected = torch.where(status[:, :, m] == PARTIAL, PARTIAL, expected)
            self._compare(status[:, :, m], expected, "its list of keys", m)
        back = TileLists(grid.block_n, grid.block_m, *lists.tensors()[4:], *lists.tensors()[:4])
        transposed = object.__new__(BlockMask)
        transposed.__dict__.update(self.__dict__, grid=grid.transposed(), lists=back)
        self._compare(transposed.status().transpose(2, 3), status, "its list of queries", None)

    def _compare(self, found: Tensor, expected: Tensor, what: str, row: int | None) -> None:
        differ = (found != expected).nonzero()
        if len(differ):
            b, h, *tile = differ[0].tolist()
            tile = tile if row is None else [row, *tile]
            names = {EMPTY: "empty", PARTIAL: "partial", FULL: "full"}
            listed, shown = (names[int(x[tuple(differ[0])])] for x in (found, expected))
            raise AssertionError(f"{self!r}: {what} has tile {tuple(tile)} of b={b}, h={h} as {listed}; it is {shown}")

    # What calls ask of it.

    def to(self, device: torch.device | str) -> BlockMask:
        """The same mask on another device. Tensors that a Custom function captures stay where they are, and so must be there already."""
        device = torch.empty(0, device=device).device
        if device == self.device:
            return self
        moved = object.__new__(type(self))
        rule = self.rule.to(device)
        lowered = self._lower(rule, device)
        read = tile_cache.versions([*rule.tensors(), *lowered.captured])
        moved.__dict__.update(self.__dict__, rule=rule, lists=self.lists.to(device), lowered=lowered, read=read)
        return moved

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"read": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.read = tile_cache.versions([*self.rule.tensors(), *self.lowered.captured])  # copies of tensors count their writes anew

    def check(self, batch: int, heads: int, seqlen_q: int, seqlen_k: int, device: torch.device, ragged: bool = False) -> None:
        """Raises where the mask was built for another call; `ragged` says that batch items have lengths of their own."""
        if (seqlen_q, seqlen_k) != (self.seqlen_q, self.seqlen_k):
            raise ValueError(
                f"mask was built for {self.seqlen_q} queries and {self.seqlen_k} keys, and the call has {seqlen_q} and {seqlen_k}; "
                f"build it for these: BlockMask(rule, {seqlen_q}, {seqlen_k})"
            )
        for name, variable, own, given in (("batch items", "b", self.batch, batch), ("heads", "h", self.heads, heads)):
            if own != given and (own != 1 or variable in self.reads):
                raise ValueError(f"mask was built for {own} {name}, and the call has {given}; build it for these")
        if tile_cache.written_since(self.read):
            raise ValueError(
                f"mask was built from tensors that were written to since, so its lists of tiles are out of date: build it again, "
                f"BlockMask(rule, {seqlen_q}, {seqlen_k})"
            )
        if not same_device(self.device, device):
            raise ValueError(f"mask is on {self.device} but the inputs are on {device}; move it with mask.to('{device}')")
        if ragged and "p" in self.reads:
            raise UnsupportedAttention(
                "mask is a BlockMask of a rule that depends on the query's position, and seqused_q or seqused_k moves positions after "
                "it was built; pass the rule itself: mask=block_mask.rule"
            )

    def dense(self, batch: int, heads: int, sq: int, sk: int, **lengths: Any) -> Tensor:
        """The rule as a bool tensor: see `masks.Mask.dense`."""
        return self.rule.dense(batch, heads, sq, sk, **lengths)

    @property
    def needed(self) -> TileLists | None:
        """The lists, where kernels gain by them: tiles outside a plain window are skipped without."""
        return self.lists if self.lowered.program_text or self.lowered.dense is not None else None


def names_of(text: str) -> frozenset[str]:
    """The names in the text of a program."""
    return frozenset("".join(c if c.isalnum() or c == "_" else " " for c in text).split())


def served(sizes: tuple[int, ...]) -> tuple[int, int]:
    """The largest tiles of which such blocks are made."""
    for size in sizes:
        if size <= 0:
            raise ValueError(f"the mask has blocks of {sizes}; a block has at least {BLOCK_SIZES[0]} queries and keys")
        if size % BLOCK_SIZES[0]:
            raise UnsupportedAttention(f"the mask has blocks of {sizes}; tiles need multiples of {BLOCK_SIZES[0]}")
    return tuple(max(served for served in BLOCK_SIZES if size % served == 0) for size in sizes)  # type: ignore[return-value]


def _block_sizes(block_size: int | tuple[int, int]) -> tuple[int, int]:
    sizes = tuple(block_size) if isinstance(block_size, (tuple, list)) else (block_size, block_size)
    if len(sizes) != 2 or any(isinstance(size, bool) or size not in BLOCK_SIZES for size in sizes):
        raise ValueError(
            f"BlockMask: block_size is {block_size}; it must be one of {', '.join(map(str, BLOCK_SIZES))}, or a pair of these for queries "
            "and keys"
        )
    return sizes


def _told_apart(name: str, given: int | None, own: int, read: bool) -> int:
    """How many batch items or heads have lists of their own."""
    if not read:
        return 1
    if given is None and own == 1:
        raise ValueError(f"BlockMask: the rule tells {name} apart and says nowhere how many there are; pass {name}=")
    return own if given is None else given
