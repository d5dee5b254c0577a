"""What all mask rules share: how a rule is applied to tensors and to symbols, measured, drawn and checked."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .expressions import Graph, Tracing
from .score_mod import Program, program_text
from .windows import UNLIMITED, hull, intersection, window_predicate, window_ranges


class Pair(NamedTuple):
    """What a predicate may depend on: five indices, tensors of int64 that broadcast to (B, H, Sq, Sk) or symbols, and two lengths."""

    b: Any
    h: Any
    q_idx: Any
    kv_idx: Any
    p: Any
    seqlen_q: int
    seqlen_k: int


class Mask:
    """What all rules share. Rules are immutable, can be pickled and copied, and show themselves as the expression that builds them."""

    def __and__(self, other: Any) -> Mask:
        return And(self, _rule(other, "&"))

    def __or__(self, other: Any) -> Mask:
        return Or(self, _rule(other, "|"))

    def __invert__(self) -> Mask:
        return Not(self)

    def __bool__(self) -> bool:
        raise TypeError("a mask has no truth value; combine masks with & | ~, not with and, or, not")

    def __repr__(self) -> str:
        shown = []
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if field.repr and (isinstance(value, Tensor) or value != field.default):
                shown.append(f"{field.name}={_shown(value)}")
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
        return traced(self, seqlen_q, seqlen_k, device)

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
        at = indices(self._device(device), range(batch), range(heads), range(sq), sk, sq, len_q, len_k)
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
        text, captured = self.program(seqlen_q, seqlen_k, device=device)
        program = Program.parse(text)
        visible, rows = torch.zeros((), dtype=torch.int64, device=device), max(1, 2**20 // seqlen_k)
        for b in range(batch):
            lengths = [None if length is None else length[b : b + 1] for length in (len_q, len_k)]
            for h in range(heads):
                for i in range(0, seqlen_q, rows):
                    chosen = range(i, min(i + rows, seqlen_q))
                    at = indices(device, range(b, b + 1), range(h, h + 1), chosen, seqlen_k, seqlen_q, *lengths)
                    visible += _within_lengths(program.evaluate(at._asdict(), captured), at, *lengths).sum()
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
            chosen = range(batch, batch + 1), range(head, head + 1), range(i, min(i + cell, seqlen_q))
            at = indices(self._device(None), *chosen, seqlen_k, seqlen_q, None, None)
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
        at = indices(device, range(batch), range(heads), range(seqlen_q), seqlen_k, seqlen_q, None, None)
        text, captured = self.program(seqlen_q, seqlen_k, device=device)
        _same(self, "its program", Program.parse(text).evaluate(at._asdict(), captured), expected)

        from .masks import lower  # which is built on this class

        low = lower(self, batch=batch, heads=heads, seqlen_q=seqlen_q, seqlen_k=seqlen_k, device=device)
        combined = window_predicate(low.window_left, low.window_right, at)
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
        at = indices(device, range(1), range(1), range(seqlen_q), seqlen_k, seqlen_q, len_q, len_k)
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
        return None if first is None or second is None else intersection(first, second)

    def implied_window(self) -> tuple[int, int]:
        return intersection(self.first.implied_window(), self.second.implied_window())

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
        return None if first is None or second is None else hull(first, second)  # both contain p, so no gap lies between them

    def implied_window(self) -> tuple[int, int]:
        return hull(self.first.implied_window(), self.second.implied_window())

    def row_ranges(self, q_idx: Tensor, p: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor] | None:
        window = self.window()
        return None if window is None else window_ranges(*window, p, seqlen_k)

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
        return torch.logical_not(self.rule.predicate(at))  # torch.compile traces no `~` of objects

    def __repr__(self) -> str:
        return f"~({self.rule!r})" if isinstance(self.rule, _Both) else f"~{self.rule!r}"


def conjuncts(rule: Mask) -> Iterator[Mask]:
    """The rules that are combined by `&`."""
    if isinstance(rule, And):
        yield from conjuncts(rule.first)
        yield from conjuncts(rule.second)
    else:
        yield rule


def leaves(rule: Mask) -> Iterator[Mask]:
    """The rules that a combination is made of."""
    parts = [value for f in dataclasses.fields(rule) if isinstance(value := getattr(rule, f.name), Mask)]  # type: ignore[arg-type]
    for part in parts:
        yield from leaves(part)
    if not parts:
        yield rule


def _rule(other: Any, operator: str) -> Mask:
    if not isinstance(other, Mask):
        hint = "; a bool tensor is masks.Dense(tensor), a function masks.Custom(function), and a BlockMask is built from the combined rule"
        raise TypeError(
            f"a mask rule is combined by {operator} with {type(other).__name__}; it must be another rule of tilewise.masks{hint}"
        )
    return other


def traced(rule: Mask, seqlen_q: int, seqlen_k: int, device: torch.device | str | None) -> tuple[str, list[Tensor]]:
    graph = Graph(device)
    with Tracing():
        b, h, q_idx, kv_idx, p = [graph.var(name) for name in ("b", "h", "q_idx", "kv_idx", "p")]
        at = Pair(b, h, q_idx, kv_idx, p, seqlen_q, seqlen_k)
        root = graph.lift(rule.predicate(at))
    return program_text(root)


def indices(
    device: torch.device,
    batch: range,
    heads: range,
    queries: range,
    seqlen_k: int,
    seqlen_q: int,
    len_q: Tensor | None,
    len_k: Tensor | None,
) -> Pair:
    """Index tensors that broadcast to (B, H, M, Sk) for chosen batch items, heads and queries, and all keys."""
    axes = (batch, heads, queries, range(seqlen_k))
    b, h, q_idx, kv_idx = (torch.arange(axis.start, axis.stop, device=device) for axis in axes)
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


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"<{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}>"
    return value.__qualname__ if callable(value) and hasattr(value, "__qualname__") else repr(value)
