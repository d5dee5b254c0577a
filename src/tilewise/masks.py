"""Which query sees which key: one object a rule, combined with `&`, `|` and `~`.

A rule is a predicate over pairs: query i = `q_idx`, key j = `kv_idx`, and p = i + len_k - len_q, the query's position among the keys
(so the last query stands at the last key). The same few lines are applied to tensors of indices (`dense`, pictures, the reference)
and to symbols (`program`, what the kernels run). Lengths limit what is visible after the rule, hence also after `~`.

    Causal() & (Document(ids) | FirstKeys(4))

The pages of `docs/conventions.md` show every rule as a small matrix.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .errors import UnsupportedAttention
from .expressions import Expr, Graph, Tracing
from .score_mod import Program, program_text, trace_mask

__all__ = [
    "Blocks",
    "Causal",
    "Chunked",
    "Custom",
    "Dense",
    "Dilated",
    "Document",
    "FirstKeys",
    "Full",
    "Lowered",
    "Mask",
    "PrefixLM",
    "SlidingWindow",
    "lower",
]

UNLIMITED = -1


class Pair(NamedTuple):
    """What a predicate may depend on: five indices, tensors of int64 that broadcast to (B, H, Sq, Sk) or symbols, and two lengths."""

    b: Any
    h: Any
    q_idx: Any
    kv_idx: Any
    p: Any
    seqlen_q: int
    seqlen_k: int


class Lowered(NamedTuple):
    """A rule as the kernels take it: a window in p, AND a traced program with the tensors it reads, AND a bool tensor."""

    window_left: int  # -1: unlimited
    window_right: int
    program_text: str  # "": none
    captured: list[Tensor]
    dense: Tensor | None  # rank 4, each size 1 or that of (B, H, Sq, Sk); a view of what the user gave


class Mask:
    """What all rules share. Rules are immutable, can be pickled and copied, and show themselves as the expression that builds them."""

    def __and__(self, other: Any) -> Mask:
        return And(self, other) if isinstance(other, Mask) else NotImplemented

    def __or__(self, other: Any) -> Mask:
        return Or(self, other) if isinstance(other, Mask) else NotImplemented

    def __invert__(self) -> Mask:
        return Not(self)

    def __bool__(self) -> bool:
        raise TypeError("a mask has no truth value; combine masks with & | ~, not with and, or, not")

    def __repr__(self) -> str:
        shown = [f"{f.name}={_shown(value)}" for f in dataclasses.fields(self) if (value := getattr(self, f.name)) is not f.default]  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(shown)})"

    # What a rule says about itself.

    def predicate(self, at: Pair) -> Any:
        """Whether the query sees the key: bool, of the type (tensor or symbol) that the indices have."""
        raise NotImplementedError

    def window(self) -> tuple[int, int] | None:
        """(left, right) where the rule is p - left <= j <= p + right and nothing else, -1 being unlimited; None where it is more."""
        return None

    def implied_window(self) -> tuple[int, int]:
        """A window outside which the rule shows nothing; (-1, -1) where there is none."""
        return self.window() or (UNLIMITED, UNLIMITED)

    def row_ranges(self, q_idx: Tensor, p: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor] | None:
        """Half-open ranges [start, stop) of the keys that each query sees, where these are intervals for every query; else None.

        `q_idx` (Sq,) and `p` (B or 1, Sq) are int64; so are the results, which broadcast to (B, Sq) and may reach beyond the keys.
        """
        return None

    def check(self, batch: int | None, heads: int | None, seqlen_q: int, seqlen_k: int) -> None:
        """Raises ValueError where the rule's tensors do not fit a call of these sizes; None leaves a size open."""

    def tensors(self) -> Iterator[Tensor]:
        """The tensors that the rule holds."""
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                yield value
            elif isinstance(value, Mask):
                yield from value.tensors()

    def sizes(self) -> tuple[int, int]:
        """The (batch, heads) that the rule's tensors distinguish, 1 where they distinguish none."""
        return 1, 1

    # What follows from it.

    def to(self, device: torch.device | str) -> Mask:
        """The same rule with its tensors on another device. Tensors that a Custom function captures stay where they are."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        moved = {name: value.to(device) for name, value in values.items() if isinstance(value, (Tensor, Mask))}
        return dataclasses.replace(self, **moved) if moved else self  # type: ignore[type-var]

    def program(self, seqlen_q: int, seqlen_k: int, *, device: torch.device | str | None = None) -> tuple[str, list[Tensor]]:
        """The whole predicate as the text of one program over b, h, q_idx, kv_idx and p, and the tensors it reads.

        >>> (Causal() & Chunked(4)).program(8, 8)[0]
        '(kv_idx <= p) & ((p // 4) == (kv_idx // 4))'
        """
        return _traced(self, seqlen_q, seqlen_k, device)

    def dense(
        self,
        batch: int,
        heads: int,
        sq: int,
        sk: int,
        len_q: Tensor | None = None,
        len_k: Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """The rule as a bool tensor (B or 1, H or 1, Sq, Sk), True = visible, limited to the lengths `len_q`, `len_k` (B,) if given.

        Takes N x N memory: for looking, for tests and for the reference.

        >>> Causal().dense(1, 1, 2, 4).int()[0, 0]
        tensor([[1, 1, 1, 0],
                [1, 1, 1, 1]], dtype=torch.int32)
        """
        self.check(batch, heads, sq, sk)
        at = _indices(self._device(device), range(batch), range(heads), range(sq), sk, sq, len_q, len_k)
        return _within_lengths(self.predicate(at), at, len_q, len_k)

    def tile_range(
        self,
        block_m: int,
        block_n: int,
        *,
        seqlen_q: int,
        seqlen_k: int,
        len_q: Tensor | None = None,
        len_k: Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        """For each tile of `block_m` queries, the smallest range of tiles of `block_n` keys that holds every key it sees.

        Returns (first, stop), int64 (B or 1, ceil(Sq / block_m)), half-open and 0, 0 for a tile that sees nothing; None where the rule
        does not show an interval to every query. Takes O(Sq) memory and does not synchronise with the device.

        >>> SlidingWindow(4, 0).tile_range(4, 2, seqlen_q=8, seqlen_k=8)
        (tensor([[0, 0]]), tensor([[2, 4]]))
        """
        self.check(None, None, seqlen_q, seqlen_k)
        ranges = self._limited_ranges(seqlen_q, seqlen_k, len_q, len_k, self._device(device))
        if ranges is None:
            return None
        start, stop = ranges
        seen = stop > start
        padding = -seqlen_q % block_m
        start = torch.where(seen, start, seqlen_k)
        start = torch.nn.functional.pad(start, (0, padding), value=seqlen_k).unflatten(1, (-1, block_m)).amin(2)
        stop = torch.nn.functional.pad(torch.where(seen, stop, 0), (0, padding)).unflatten(1, (-1, block_m)).amax(2)
        first = torch.where(stop > start, start // block_n, 0)
        return first, (stop + block_n - 1) // block_n

    def density(
        self,
        seqlen_q: int,
        seqlen_k: int,
        *,
        batch: int | None = None,
        heads: int | None = None,
        len_q: Tensor | None = None,
        len_k: Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> float:
        """The visible share of all (b, h, i, j), computed in O(N) memory. Sizes not given are those of the rule's own tensors.

        >>> Causal().density(4, 4)
        0.625
        """
        own_batch, own_heads = self.sizes()
        batch, heads, device = batch or own_batch, heads or own_heads, self._device(device)
        self.check(batch, heads, seqlen_q, seqlen_k)
        if not seqlen_q * seqlen_k:
            return 0.0
        ranges = self._limited_ranges(seqlen_q, seqlen_k, len_q, len_k, device)
        if ranges is not None:
            return (ranges[1] - ranges[0]).clamp(min=0).double().mean().item() / seqlen_k
        program = Program.parse((traced := self.program(seqlen_q, seqlen_k, device=device))[0])
        visible, rows = torch.zeros((), dtype=torch.int64, device=device), max(1, 2**20 // seqlen_k)
        for b in range(batch):
            for h in range(heads):
                for i in range(0, seqlen_q, rows):
                    chosen = range(i, min(i + rows, seqlen_q))
                    at = _indices(device, [b], [h], chosen, seqlen_k, seqlen_q, len_q, len_k)
                    visible += _within_lengths(program.evaluate(at._asdict(), traced[1]), at, len_q, len_k).sum()
        return visible.item() / (batch * heads * seqlen_q * seqlen_k)

    def plot(self, seqlen_q: int, seqlen_k: int | None = None, *, batch: int = 0, head: int = 0, ax: Any = None) -> Any:
        """Draws the rule for one batch item and head: queries downwards, keys to the right, visible pairs blue; returns the Axes.

        Beyond 512 positions one cell stands for a square of pairs, darker the more of them are visible. Needs matplotlib.
        """
        from matplotlib import pyplot
        from matplotlib.colors import LinearSegmentedColormap
        from matplotlib.ticker import MaxNLocator

        seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
        self.check(None, None, seqlen_q, seqlen_k)
        cell = max(1, math.ceil(max(seqlen_q, seqlen_k) / 512))
        rows = []
        for i in range(0, seqlen_q, cell):
            at = _indices(self._device(None), [batch], [head], range(i, min(i + cell, seqlen_q)), seqlen_k, seqlen_q, None, None)
            share = _within_lengths(self.predicate(at), at, None, None)[0, 0].float().mean(0)
            ends = torch.arange(0, seqlen_k, cell, device=share.device)
            sums = torch.zeros(len(ends), device=share.device).index_add_(0, torch.arange(seqlen_k, device=share.device) // cell, share)
            rows.append(sums / (seqlen_k - ends).clamp(max=cell))
        picture = torch.stack(rows).cpu().numpy()
        if ax is None:
            ax = pyplot.subplots(figsize=(4.8, 4.8 * min(max(seqlen_q / seqlen_k, 0.4), 1.6)), layout="constrained")[1]
        colours = LinearSegmentedColormap.from_list("visible", ["#f2f2f2", "#0072b2"])
        ax.imshow(picture, cmap=colours, vmin=0, vmax=1, extent=(-0.5, seqlen_k - 0.5, seqlen_q - 0.5, -0.5), interpolation="nearest")
        if max(seqlen_q, seqlen_k) <= 32:
            ax.set_xticks([j + 0.5 for j in range(seqlen_k - 1)], minor=True)
            ax.set_yticks([i + 0.5 for i in range(seqlen_q - 1)], minor=True)
            ax.grid(which="minor", color="white", linewidth=1)
            ax.tick_params(which="minor", length=0)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.yaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set(xlabel="key j", ylabel="query i", title=repr(self))
        return ax

    def verify(self, seqlen_q: int, seqlen_k: int, *, batch: int | None = None, heads: int | None = None) -> None:
        """Checks at a small size that the predicate on tensors, the traced program, what the kernels get and the ranges agree.

        Raises AssertionError that names the first pair where they differ.
        """
        own_batch, own_heads = self.sizes()
        batch, heads, device = batch or own_batch, heads or own_heads, self._device(None)
        expected = self.dense(batch, heads, seqlen_q, seqlen_k, device=device).expand(batch, heads, -1, -1)
        at = _indices(device, range(batch), range(heads), range(seqlen_q), seqlen_k, seqlen_q, None, None)
        text, captured = self.program(seqlen_q, seqlen_k, device=device)
        _same(self, "its program", Program.parse(text).evaluate(at._asdict(), captured), expected)

        low = lower(self, batch=batch, heads=heads, seqlen_q=seqlen_q, seqlen_k=seqlen_k, device=device)
        combined = SlidingWindow(low.window_left, low.window_right).predicate(at)
        if low.program_text:
            combined = combined & Program.parse(low.program_text).evaluate(at._asdict(), low.captured)
        if low.dense is not None:
            combined = combined & low.dense
        _same(self, "what the kernels get", combined, expected)

        ranges = self._limited_ranges(seqlen_q, seqlen_k, None, None, device)
        if ranges is not None:
            start, stop = (end[:, None, :, None] for end in ranges)
            _same(self, "its row ranges", (at.kv_idx >= start) & (at.kv_idx < stop), expected)

    def _device(self, device: torch.device | str | None) -> torch.device:
        return torch.device(device) if device is not None else next((t.device for t in self.tensors()), torch.device("cpu"))

    def _limited_ranges(
        self, seqlen_q: int, seqlen_k: int, len_q: Tensor | None, len_k: Tensor | None, device: torch.device
    ) -> tuple[Tensor, Tensor] | None:
        at = _indices(device, range(1), range(1), range(seqlen_q), seqlen_k, seqlen_q, len_q, len_k)
        q_idx, p = at.q_idx.view(-1), at.p.view(-1, seqlen_q) if seqlen_q else at.p.new_zeros(at.p.shape[0], 0)
        ranges = self.row_ranges(q_idx, p, seqlen_k)
        if ranges is None:
            return None
        limit = torch.full((1, 1), seqlen_k, device=device) if len_k is None else len_k.view(-1, 1).clamp(0, seqlen_k)
        if len_q is not None:
            limit = torch.where(q_idx < len_q.view(-1, 1), limit, 0)
        shape = torch.broadcast_shapes(p.shape, ranges[0].shape, ranges[1].shape, limit.shape)
        return ranges[0].clamp(min=0).expand(shape), torch.minimum(ranges[1], limit).clamp(min=0).expand(shape)


@dataclass(frozen=True, repr=False)
class Full(Mask):
    """Every query sees every key."""

    def predicate(self, at: Pair) -> Any:
        return at.kv_idx >= 0

    def window(self) -> tuple[int, int]:
        return UNLIMITED, UNLIMITED

    def row_ranges(self, q_idx: Tensor, p: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(p), torch.full_like(p, seqlen_k)


@dataclass(frozen=True, repr=False)
class Causal(Mask):
    """j <= p: the last query sees every key. With `align="top_left"` j <= i, as in torch's scaled_dot_product_attention."""

    align: str = "bottom_right"

    def __post_init__(self) -> None:
        if self.align not in ("bottom_right", "top_left"):
            raise ValueError(f"Causal: align is {self.align!r}; it must be 'bottom_right' or 'top_left'")

    def predicate(self, at: Pair) -> Any:
        return at.kv_idx <= (at.p if self.align == "bottom_right" else at.q_idx)

    def window(self) -> tuple[int, int] | None:
        return (UNLIMITED, 0) if self.align == "bottom_right" else None

    def row_ranges(self, q_idx: Tensor, p: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor]:
        last = p if self.align == "bottom_right" else q_idx.expand(p.shape)
        return torch.zeros_like(p), last + 1


@dataclass(frozen=True, repr=False)
class SlidingWindow(Mask):
    """p - left <= j <= p + right, both ends included; -1 is unlimited."""

    left: int
    right: int

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            _whole_number("SlidingWindow", name, getattr(self, name), UNLIMITED, "; -1 is unlimited")

    def predicate(self, at: Pair) -> Any:
        if self.left == UNLIMITED and self.right == UNLIMITED:
            return Full().predicate(at)
        if self.right == UNLIMITED:
            return at.kv_idx >= at.p - self.left
        if self.left == UNLIMITED:
            return at.kv_idx <= at.p + self.right
        return (at.kv_idx >= at.p - self.left) & (at.kv_idx <= at.p + self.right)

    def window(self) -> tuple[int, int]:
        return self.left, self.right

    def row_ranges(self, q_idx: Tensor, p: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor]:
        start = torch.zeros_like(p) if self.left == UNLIMITED else p - self.left
        return start, torch.full_like(p, seqlen_k) if self.right == UNLIMITED else p + self.right + 1


@dataclass(frozen=True, repr=False)
class Chunked(Mask):
    """floor(p / size) = floor(j / size): queries see the keys of their own chunk."""

    size: int

    def __post_init__(self) -> None:
        _whole_number("Chunked", "size", self.size, 1)

    def predicate(self, at: Pair) -> Any:
        return at.p // self.size == at.kv_idx // self.size

    def implied_window(self) -> tuple[int, int]:
        return self.size - 1, self.size - 1

    def row_ranges(self, q_idx: Tensor, p: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor]:
        start = p // self.size * self.size
        return start, start + self.size


@dataclass(frozen=True, repr=False)
class FirstKeys(Mask):
    """j < n: every query sees the first n keys, as with attention sinks."""

    n: int

    def __post_init__(self) -> None:
        _whole_number("FirstKeys", "n", self.n, 0)

    def predicate(self, at: Pair) -> Any:
        return at.kv_idx < self.n

    def row_ranges(self, q_idx: Tensor, p: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(p), torch.full_like(p, self.n)


@dataclass(frozen=True, repr=False)
class Dilated(Mask):
    """The keys at p, p - step, p - 2 step, ... no further back than `left` (-1: unlimited)."""

    step: int
    left: int

    def __post_init__(self) -> None:
        _whole_number("Dilated", "step", self.step, 1)
        _whole_number("Dilated", "left", self.left, UNLIMITED, "; -1 is unlimited")

    def predicate(self, at: Pair) -> Any:
        return SlidingWindow(self.left, 0).predicate(at) & ((at.p - at.kv_idx) % self.step == 0)

    def window(self) -> tuple[int, int] | None:
        return (self.left, 0) if self.step == 1 else None

    def implied_window(self) -> tuple[int, int]:
        return self.left, 0

    def row_ranges(self, q_idx: Tensor, p: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor] | None:
        return SlidingWindow(self.left, 0).row_ranges(q_idx, p, seqlen_k) if self.step == 1 else None


@dataclass(frozen=True, repr=False, eq=False)
class PrefixLM(Mask):
    """Causal, and both directions inside a prefix or inside spans.

    `lengths` (B or 1,) integers: j <= p or j < length. `spans` (B or 1, n, 2) integers, half-open: j <= p, or p and j in one span.
    Exactly one of the two is given.
    """

    lengths: Tensor | None = None
    spans: Tensor | None = None

    def __post_init__(self) -> None:
        if (self.lengths is None) == (self.spans is None):
            raise ValueError("PrefixLM: give either lengths (B or 1,) or spans (B or 1, n, 2), and not both")
        if self.lengths is not None:
            _integers("PrefixLM", "lengths", self.lengths, 1, "(B or 1,)")
        if self.spans is not None:
            _integers("PrefixLM", "spans", self.spans, 3, "(B or 1, n, 2)")
            if self.spans.shape[2] != 2:
                raise ValueError(f"PrefixLM: spans has shape {tuple(self.spans.shape)}; it must be (B or 1, n, 2): start and stop of each")

    def check(self, batch: int | None, heads: int | None, seqlen_q: int, seqlen_k: int) -> None:
        for tensor in self.tensors():
            _per_batch("PrefixLM", tensor, batch)

    def sizes(self) -> tuple[int, int]:
        return next(self.tensors()).shape[0], 1

    def predicate(self, at: Pair) -> Any:
        causal = at.kv_idx <= at.p
        if self.lengths is not None:
            return causal | (at.kv_idx < self.lengths[_item(self.lengths, at.b)])
        reach = self._reach(at.seqlen_k)
        furthest = reach[_item(reach, at.b), at.p * (at.p >= 0)]  # a position before the keys stands in no span
        return causal | ((at.p >= 0) & (at.kv_idx < furthest))

    def row_ranges(self, q_idx: Tensor, p: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor]:
        if self.lengths is not None:
            furthest = self.lengths.view(-1, 1)
        else:
            reach = self._reach(seqlen_k)
            batch = max(reach.shape[0], p.shape[0])
            furthest = reach.expand(batch, -1).gather(1, p.clamp(min=0).expand(batch, -1))
            furthest = torch.where(p >= 0, furthest, 0)
        return torch.zeros_like(p), torch.maximum(p + 1, furthest)

    def _reach(self, seqlen_k: int) -> Tensor:
        """(B or 1, Sk + 1): the end of the furthest span that starts at or before a position.

        A key j > p lies in one span with p exactly when it lies before this end, so that one number a position stands for all spans.
        """
        starts, ends = self.spans.to(torch.int64).unbind(2)  # type: ignore[union-attr]
        at_start = torch.zeros(starts.shape[0], seqlen_k + 1, dtype=torch.int64, device=starts.device)
        return at_start.scatter_reduce(1, starts.clamp(0, seqlen_k), ends, "amax").cummax(1).values


@dataclass(frozen=True, repr=False, eq=False)
class Document(Mask):
    """Queries see the keys that carry their own number.

    `ids` (B or 1, Sq) integers are the queries'; `kv_ids` (B or 1, Sk) the keys', to be left out where both sequences are one.
    """

    ids: Tensor
    kv_ids: Tensor | None = None

    def __post_init__(self) -> None:
        _integers("Document", "ids", self.ids, 2, "(B or 1, S)")
        if self.kv_ids is not None:
            _integers("Document", "kv_ids", self.kv_ids, 2, "(B or 1, Sk)")

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, total: int, cu_seqlens_k: Tensor | None = None, total_k: int | None = None) -> Document:
        """Documents that lie one after the other in one row of `total` tokens, with boundaries `cu_seqlens` (n + 1,) = 0, ..., total.

        `cu_seqlens_k` and `total_k` describe the keys where they are another row. Tokens from the last boundary on are one further
        document. Does not synchronise with the device.

        >>> Document.from_cu_seqlens(torch.tensor([0, 2, 5]), total=6).ids
        tensor([[0, 0, 1, 1, 1, 2]])
        """
        if (cu_seqlens_k is None) != (total_k is None):
            raise ValueError("Document.from_cu_seqlens: give cu_seqlens_k and total_k together")
        return cls(_numbered(cu_seqlens, total), None if cu_seqlens_k is None else _numbered(cu_seqlens_k, total_k))

    def check(self, batch: int | None, heads: int | None, seqlen_q: int, seqlen_k: int) -> None:
        if self.kv_ids is None and seqlen_q != seqlen_k:
            raise ValueError(
                f"Document: there are {seqlen_q} queries and {seqlen_k} keys but only one set of ids; "
                "pass the keys' own as kv_ids (B or 1, Sk)"
            )
        for name, tensor, length in (("ids", self.ids, seqlen_q), ("kv_ids", self.kv_ids, seqlen_k)):
            if tensor is not None:
                _per_batch("Document", tensor, batch)
                if tensor.shape[1] != length:
                    raise ValueError(
                        f"Document: {name} has {tensor.shape[1]} entries in a row but the sequence has {length}; build it for this length"
                    )

    def sizes(self) -> tuple[int, int]:
        return max(tensor.shape[0] for tensor in self.tensors()), 1

    def predicate(self, at: Pair) -> Any:
        kv_ids = self.ids if self.kv_ids is None else self.kv_ids
        return self.ids[_item(self.ids, at.b), at.q_idx] == kv_ids[_item(kv_ids, at.b), at.kv_idx]


@dataclass(frozen=True, repr=False, eq=False)
class Blocks(Mask):
    """Query i sees key j where `bits[b, h, floor(i / block_size), floor(j / block_size)]`.

    `bits` is bool, (B or 1, H or 1, ceil(Sq / block_size), ceil(Sk / block_size)), over query heads.
    """

    bits: Tensor
    block_size: int

    def __post_init__(self) -> None:
        _whole_number("Blocks", "block_size", self.block_size, 1)
        _booleans("Blocks", "bits", self.bits)
        if self.bits.ndim != 4:
            raise ValueError(f"Blocks: bits has shape {tuple(self.bits.shape)}; it must be (B or 1, H or 1, query blocks, key blocks)")

    def check(self, batch: int | None, heads: int | None, seqlen_q: int, seqlen_k: int) -> None:
        _per_batch("Blocks", self.bits, batch)
        _per_head("Blocks", self.bits, heads)
        blocks = tuple(-(-length // self.block_size) for length in (seqlen_q, seqlen_k))
        if tuple(self.bits.shape[2:]) != blocks:
            raise ValueError(
                f"Blocks: bits has {self.bits.shape[2]} x {self.bits.shape[3]} blocks; {seqlen_q} queries and {seqlen_k} keys in "
                f"blocks of {self.block_size} need {blocks[0]} x {blocks[1]}"
            )

    def sizes(self) -> tuple[int, int]:
        return self.bits.shape[0], self.bits.shape[1]

    def predicate(self, at: Pair) -> Any:
        b, h = _item(self.bits, at.b), _item(self.bits, at.h, 1)
        return self.bits[b, h, at.q_idx // self.block_size, at.kv_idx // self.block_size]


@dataclass(frozen=True, repr=False, eq=False)
class Dense(Mask):
    """A bool tensor that broadcasts to (B, H, Sq, Sk), True = visible; read in place, never copied."""

    visible: Tensor

    def __post_init__(self) -> None:
        _booleans("Dense", "visible", self.visible)
        if self.visible.ndim > 4:
            raise ValueError(f"Dense: visible has shape {tuple(self.visible.shape)}; it must broadcast to (B, H, Sq, Sk)")

    @property
    def rank4(self) -> Tensor:
        """The tensor as a view of rank 4."""
        return self.visible[(None,) * (4 - self.visible.ndim)]

    def check(self, batch: int | None, heads: int | None, seqlen_q: int, seqlen_k: int) -> None:
        for size, wanted in zip(self.rank4.shape, (batch, heads, seqlen_q, seqlen_k), strict=True):
            if wanted is not None and size not in (1, wanted):
                raise ValueError(
                    f"Dense: visible has shape {tuple(self.visible.shape)}; it must broadcast to (B, H, Sq, Sk) = "
                    f"{(batch or 'B', heads or 'H', seqlen_q, seqlen_k)}"
                )

    def sizes(self) -> tuple[int, int]:
        return self.rank4.shape[0], self.rank4.shape[1]

    def predicate(self, at: Pair) -> Any:
        visible = self.rank4
        return visible[tuple(_item(visible, index, axis) for axis, index in enumerate((at.b, at.h, at.q_idx, at.kv_idx)))]


@dataclass(frozen=True, repr=False)
class Custom(Mask):
    """`function(b, h, q_idx, kv_idx)` returns a bool, True = visible: the function that FlexAttention takes.

    q_idx = i and kv_idx = j count from 0 in both sequences, so `Custom(lambda b, h, q, k: q >= k)` is `Causal(align="top_left")`.
    """

    function: Callable[..., Any]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"Custom: function is {type(self.function).__name__}; it must be a function (b, h, q_idx, kv_idx) -> bool")

    def predicate(self, at: Pair) -> Any:
        if isinstance(at.q_idx, Expr):
            return trace_mask(self.function, at.b, at.h, at.q_idx, at.kv_idx)
        axes = [index.reshape(-1) for index in (at.b, at.h, at.q_idx, at.kv_idx)]
        if any(axis.numel() == 0 for axis in axes):
            return torch.ones([axis.numel() for axis in axes], dtype=torch.bool, device=at.q_idx.device)

        def each(*indices: Tensor) -> Tensor:
            return torch.as_tensor(self.function(*indices), device=at.q_idx.device)

        for axis in (3, 2, 1, 0):
            each = torch.vmap(each, in_dims=tuple(0 if other == axis else None for other in range(4)))
        return each(*axes)


@dataclass(frozen=True, repr=False)
class _Both(Mask):
    first: Mask
    second: Mask

    def check(self, batch: int | None, heads: int | None, seqlen_q: int, seqlen_k: int) -> None:
        self.first.check(batch, heads, seqlen_q, seqlen_k)
        self.second.check(batch, heads, seqlen_q, seqlen_k)

    def sizes(self) -> tuple[int, int]:
        first, second = self.first.sizes(), self.second.sizes()
        return max(first[0], second[0]), max(first[1], second[1])


@dataclass(frozen=True, repr=False)
class And(_Both):
    """What both rules show."""

    def predicate(self, at: Pair) -> Any:
        return self.first.predicate(at) & self.second.predicate(at)

    def window(self) -> tuple[int, int] | None:
        first, second = self.first.window(), self.second.window()
        return None if first is None or second is None else _intersection(first, second)

    def implied_window(self) -> tuple[int, int]:
        return _intersection(self.first.implied_window(), self.second.implied_window())

    def row_ranges(self, q_idx: Tensor, p: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor] | None:
        first, second = self.first.row_ranges(q_idx, p, seqlen_k), self.second.row_ranges(q_idx, p, seqlen_k)
        if first is None or second is None:
            return None
        return torch.maximum(first[0], second[0]), torch.minimum(first[1], second[1])

    def __repr__(self) -> str:
        return " & ".join(f"({part!r})" if isinstance(part, Or) else repr(part) for part in (self.first, self.second))


@dataclass(frozen=True, repr=False)
class Or(_Both):
    """What at least one of the rules shows."""

    def predicate(self, at: Pair) -> Any:
        return self.first.predicate(at) | self.second.predicate(at)

    def window(self) -> tuple[int, int] | None:
        first, second = self.first.window(), self.second.window()
        return None if first is None or second is None else _hull(first, second)  # both contain p, so no gap lies between them

    def implied_window(self) -> tuple[int, int]:
        return _hull(self.first.implied_window(), self.second.implied_window())

    def row_ranges(self, q_idx: Tensor, p: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor] | None:
        window = self.window()
        return None if window is None else SlidingWindow(*window).row_ranges(q_idx, p, seqlen_k)

    def __repr__(self) -> str:
        return f"{self.first!r} | {self.second!r}"


@dataclass(frozen=True, repr=False)
class Not(Mask):
    """What the rule hides; pairs beyond a length stay hidden."""

    rule: Mask

    def __invert__(self) -> Mask:
        return self.rule

    def check(self, batch: int | None, heads: int | None, seqlen_q: int, seqlen_k: int) -> None:
        self.rule.check(batch, heads, seqlen_q, seqlen_k)

    def sizes(self) -> tuple[int, int]:
        return self.rule.sizes()

    def predicate(self, at: Pair) -> Any:
        return ~self.rule.predicate(at)

    def __repr__(self) -> str:
        return f"~({self.rule!r})" if isinstance(self.rule, _Both) else f"~{self.rule!r}"


def lower(
    rule: Mask,
    *,
    batch: int,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    device: torch.device | str,
    ragged: bool = False,
) -> Lowered:
    """Splits a rule into what the kernels take: a window, a program for the rest, and at most one bool tensor.

    Windows that the rule merely implies are added too, since kernels do not visit tiles outside the window. `ragged` says that the
    sequences of the batch have lengths of their own, where Blocks have no meaning.

    Raises ValueError where the rule does not fit the sizes or the device, UnsupportedAttention for Blocks in a ragged batch.

    >>> lower(Causal() & Chunked(4), batch=1, heads=1, seqlen_q=8, seqlen_k=8, device="cpu")[:3]
    (3, 0, '(p // 4) == (kv_idx // 4)')
    """
    rule.check(batch, heads, seqlen_q, seqlen_k)
    for tensor in rule.tensors():
        if tensor.device != torch.device(device):
            raise ValueError(f"mask {rule!r} is on {tensor.device} but the inputs are on {device}; move it with mask.to('{device}')")
    window = rule.implied_window()
    rest: Mask | None = None
    visible: Tensor | None = None
    for part in _conjuncts(rule):
        if ragged and any(isinstance(leaf, Blocks) for leaf in _leaves(part)):
            raise UnsupportedAttention(
                "Blocks count from the start of one common sequence and have no meaning for packed sequences; use Document & Custom"
            )
        if part.window() is not None:
            continue
        if isinstance(part, Dense) and visible is None:
            visible = part.rank4
        else:
            rest = part if rest is None else And(rest, part)
    text, captured = ("", []) if rest is None else _traced(rest, seqlen_q, seqlen_k, device)
    return Lowered(*window, text, captured, visible)


def _traced(rule: Mask, seqlen_q: int, seqlen_k: int, device: torch.device | str | None) -> tuple[str, list[Tensor]]:
    graph = Graph(device)
    with Tracing():
        at = Pair(*[graph.var(name) for name in ("b", "h", "q_idx", "kv_idx", "p")], seqlen_q, seqlen_k)
        root = rule.predicate(at)
    return program_text(root)


def _conjuncts(rule: Mask) -> Iterator[Mask]:
    if isinstance(rule, And):
        yield from _conjuncts(rule.first)
        yield from _conjuncts(rule.second)
    else:
        yield rule


def _leaves(rule: Mask) -> Iterator[Mask]:
    parts = [value for f in dataclasses.fields(rule) if isinstance(value := getattr(rule, f.name), Mask)]  # type: ignore[arg-type]
    for part in parts:
        yield from _leaves(part)
    if not parts:
        yield rule


def _intersection(first: tuple[int, int], second: tuple[int, int]) -> tuple[int, int]:
    return tuple(max(a, b) if UNLIMITED in (a, b) else min(a, b) for a, b in zip(first, second, strict=True))  # type: ignore[return-value]


def _hull(first: tuple[int, int], second: tuple[int, int]) -> tuple[int, int]:
    return tuple(UNLIMITED if UNLIMITED in (a, b) else max(a, b) for a, b in zip(first, second, strict=True))  # type: ignore[return-value]


def _indices(
    device: torch.device,
    batch: Any,
    heads: Any,
    queries: Any,
    seqlen_k: int,
    seqlen_q: int,
    len_q: Tensor | None,
    len_k: Tensor | None,
) -> Pair:
    """Index tensors that broadcast to (B, H, M, Sk) for chosen batch items, heads and queries, and all keys."""
    b, h, q_idx, kv_idx = (
        torch.as_tensor(list(axis), dtype=torch.int64, device=device) for axis in (batch, heads, queries, range(seqlen_k))
    )
    shift = torch.full((1,), seqlen_k - seqlen_q, device=device)
    if len_q is not None or len_k is not None:
        keys = torch.full((1,), seqlen_k, device=device) if len_k is None else len_k.to(torch.int64).clamp(0, seqlen_k)
        shift = keys - (seqlen_q if len_q is None else len_q.to(torch.int64).clamp(0, seqlen_q))
    p = q_idx + shift.view(-1, 1)
    return Pair(
        b.view(-1, 1, 1, 1), h.view(1, -1, 1, 1), q_idx.view(1, 1, -1, 1), kv_idx.view(1, 1, 1, -1), p[:, None, :, None], seqlen_q, seqlen_k
    )


def _within_lengths(visible: Tensor, at: Pair, len_q: Tensor | None, len_k: Tensor | None) -> Tensor:
    if len_q is not None:
        visible = visible & (at.q_idx < len_q.view(-1, 1, 1, 1))
    if len_k is not None:
        visible = visible & (at.kv_idx < len_k.view(-1, 1, 1, 1))
    shape = torch.broadcast_shapes(visible.shape, (1, 1, at.q_idx.shape[2], at.kv_idx.shape[3]))
    return visible.expand(shape)


def _same(rule: Mask, what: str, found: Tensor, expected: Tensor) -> None:
    differ = (found.expand(expected.shape) != expected).nonzero()
    if len(differ):
        b, h, i, j = differ[0].tolist()
        raise AssertionError(
            f"{rule!r}: {what} and the predicate disagree at b={b}, h={h}, q_idx={i}, kv_idx={j} and {len(differ) - 1} more"
        )


def _item(tensor: Tensor, index: Any, axis: int = 0) -> Any:
    """The index along an axis that may have size 1 for all."""
    return 0 if tensor.shape[axis] == 1 else index


def _numbered(cu_seqlens: Tensor, total: int | None) -> Tensor:
    _integers("Document.from_cu_seqlens", "cu_seqlens", cu_seqlens, 1, "(n + 1,)")
    tokens = torch.arange(total, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), tokens, right=True)[None]


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"<{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}>"
    return value.__qualname__ if callable(value) and hasattr(value, "__qualname__") else repr(value)


def _whole_number(rule: str, name: str, value: Any, least: int, note: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{rule}: {name} is {value!r} of type {type(value).__name__}; it must be an int")
    if value < least:
        raise ValueError(f"{rule}: {name} is {value}; it must be at least {least}{note}")


def _integers(rule: str, name: str, value: Any, rank: int, shape: str) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{rule}: {name} is {type(value).__name__}; it must be an integer tensor {shape}")
    if value.dtype == torch.bool or value.dtype.is_floating_point or value.dtype.is_complex:
        raise TypeError(f"{rule}: {name} has dtype {value.dtype}; it must be an integer tensor {shape}")
    if value.ndim != rank:
        raise ValueError(f"{rule}: {name} has shape {tuple(value.shape)}; it must be {shape}")


def _booleans(rule: str, name: str, value: Any) -> None:
    if not isinstance(value, Tensor) or value.dtype != torch.bool:
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{rule}: {name} is {got}; it must be a torch.bool tensor, True = visible")


def _per_batch(rule: str, tensor: Tensor, batch: int | None) -> None:
    if batch is not None and tensor.shape[0] not in (1, batch):
        raise ValueError(f"{rule}: a tensor of shape {tuple(tensor.shape)} serves {tensor.shape[0]} batch items; the batch has {batch}")


def _per_head(rule: str, tensor: Tensor, heads: int | None) -> None:
    if heads is not None and tensor.shape[1] not in (1, heads):
        raise ValueError(f"{rule}: a tensor of shape {tuple(tensor.shape)} serves {tensor.shape[1]} heads; there are {heads} query heads")
