"""Which query sees which key: one object a rule, combined with `&`, `|` and `~`.

A rule is a predicate over pairs: query i = `q_idx`, key j = `kv_idx`, and p = i + len_k - len_q, the query's position among the keys
(so the last query stands at the last key). The same few lines are applied to tensors of indices (`dense`, pictures, the reference)
and to symbols (`program`, what the kernels run). Lengths limit what is visible after the rule, hence also after `~`.

    Causal() & (Document(ids) | FirstKeys(4))

The pages of `docs/conventions.md` show every rule as a small matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import tile_cache
from .document_rows import numbered, offsets_of
from .errors import UnsupportedAttention
from .expressions import Expr, same_device
from .mask_base import And, Mask, Pair, conjuncts, leaves, traced
from .mask_checks import booleans, checked_number, integers, per_batch, per_head, whole_number
from .score_mod import trace_mask
from .windows import UNLIMITED, window_predicate, window_ranges

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
            whole_number(self, name, UNLIMITED, "; -1 is unlimited")

    def predicate(self, at: Pair) -> Any:
        return window_predicate(self.left, self.right, at)

    def window(self) -> tuple[int, int]:
        return self.left, self.right

    def row_ranges(self, q_idx: Tensor, p: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor]:
        return window_ranges(self.left, self.right, p, seqlen_k)


@dataclass(frozen=True, repr=False)
class Chunked(Mask):
    """floor(p / size) = floor(j / size): queries see the keys of their own chunk."""

    size: int

    def __post_init__(self) -> None:
        whole_number(self, "size", 1)

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
        whole_number(self, "n", 0)

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
        whole_number(self, "step", 1)
        whole_number(self, "left", UNLIMITED, "; -1 is unlimited")

    def predicate(self, at: Pair) -> Any:
        return window_predicate(self.left, 0, at) & ((at.p - at.kv_idx) % self.step == 0)

    def window(self) -> tuple[int, int] | None:
        return (self.left, 0) if self.step == 1 else None

    def implied_window(self) -> tuple[int, int]:
        return self.left, 0

    def row_ranges(self, q_idx: Tensor, p: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor] | None:
        return window_ranges(self.left, 0, p, seqlen_k) if self.step == 1 else None


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
            integers("PrefixLM", "lengths", self.lengths, 1, "(B or 1,)")
        if self.spans is not None:
            integers("PrefixLM", "spans", self.spans, 3, "(B or 1, n, 2)")
            if self.spans.shape[2] != 2:
                raise ValueError(f"PrefixLM: spans has shape {tuple(self.spans.shape)}; it must be (B or 1, n, 2): start and stop of each")

    def check(self, batch: int | None, heads: int | None, seqlen_q: int, seqlen_k: int) -> None:
        for tensor in self.tensors():
            per_batch("PrefixLM", tensor, batch)

    def sizes(self) -> tuple[int, int]:
        return next(self.tensors()).shape[0], 1

    def predicate(self, at: Pair) -> Any:
        causal = at.kv_idx <= at.p
        if self.lengths is not None:
            return causal | (at.kv_idx < self.lengths[_item(self.lengths, at.b)])
        reach = self._reach(at.seqlen_k)
        # Programs read 0 outside a tensor; leaving the length out of their text spares kernels a compilation for each length.
        position = at.p.clamp(0, at.seqlen_k) if isinstance(at.p, Tensor) else at.p
        furthest = reach[_item(reach, at.b), position]
        return causal | ((at.p >= 0) & (at.kv_idx < furthest))  # a position before the keys stands in no span

    def row_ranges(self, q_idx: Tensor, p: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor]:
        if self.lengths is not None:
            furthest = self.lengths.view(-1, 1)
        else:
            reach = self._reach(seqlen_k)
            batch = max(reach.shape[0], p.shape[0])
            furthest = reach.expand(batch, -1).gather(1, p.clamp(0, seqlen_k).expand(batch, -1))
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
    _ascending: bool = field(default=False, repr=False)  # known to ascend in each row, so that a document's keys are an interval
    offsets: Tensor | None = field(default=None, repr=False)  # int32 (documents + 1,) of one row of both, as packed sequences have them
    in_graph: bool = field(default=False, repr=False)  # whether a graph makes the rule anew whenever it runs

    def __post_init__(self) -> None:
        integers("Document", "ids", self.ids, 2, "(B or 1, S)")
        if self.kv_ids is not None:
            integers("Document", "kv_ids", self.kv_ids, 2, "(B or 1, Sk)")

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, total: int, cu_seqlens_k: Tensor | None = None, total_k: int | None = None) -> Document:
        """Documents that lie one after the other in one row of `total` tokens, with boundaries `cu_seqlens` (n + 1,) = 0, ..., total.

        `cu_seqlens_k` and `total_k` describe the keys where they are another row. Tokens from the last boundary on are one further
        document; a boundary that decreases counts as the largest before it. Does not synchronise with the device. The
        rule is what the boundaries were when it was made; made in a compiled function or a captured graph, what they are when that runs.

        >>> Document.from_cu_seqlens(torch.tensor([0, 2, 5]), total=6).ids
        tensor([[0, 0, 1, 1, 1, 2]])
        """
        if cu_seqlens_k is None or total_k is None:
            if cu_seqlens_k is not None or total_k is not None:
                raise ValueError("Document.from_cu_seqlens: give cu_seqlens_k and total_k together")
            in_graph = tile_cache.recorded(cu_seqlens.device)
            return cls(numbered(cu_seqlens, total), _ascending=True, offsets=offsets_of(cu_seqlens, total), in_graph=in_graph)
        return cls(numbered(cu_seqlens, total), numbered(cu_seqlens_k, total_k), _ascending=True)

    def check(self, batch: int | None, heads: int | None, seqlen_q: int, seqlen_k: int) -> None:
        if self.kv_ids is None and seqlen_q != seqlen_k:
            raise ValueError(
                f"Document: there are {seqlen_q} queries and {seqlen_k} keys but only one set of ids; "
                "pass the keys' own as kv_ids (B or 1, Sk)"
            )
        for name, tensor, length in (("ids", self.ids, seqlen_q), ("kv_ids", self.kv_ids, seqlen_k)):
            if tensor is not None:
                per_batch("Document", tensor, batch)
                if tensor.shape[1] != length:
                    raise ValueError(
                        f"Document: {name} has {tensor.shape[1]} entries in a row but the sequence has {length}; build it for this length"
                    )

    def sizes(self) -> tuple[int, int]:
        return max(tensor.shape[0] for tensor in (self.ids, self.kv_ids) if tensor is not None), 1

    def row_ranges(self, q_idx: Tensor, p: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor] | None:
        if not self._ascending:
            return None
        keys = self.ids if self.kv_ids is None else self.kv_ids
        return torch.searchsorted(keys, self.ids), torch.searchsorted(keys, self.ids, right=True)

    def predicate(self, at: Pair) -> Any:
        kv_ids = self.ids if self.kv_ids is None else self.kv_ids
        return self.ids[_item(self.ids, at.b), at.q_idx] == kv_ids[_item(kv_ids, at.b), at.kv_idx]


@dataclass(frozen=True, repr=False, eq=False)
class Blocks(Mask):
    """Query i sees key j where `bits[b, h, floor(i / block_size), floor(j / block_size)]`.

    `bits` is bool, (B or 1, H or 1, ceil(Sq / block_size), ceil(Sk / block_size)), over query heads. `block_size` is one number, or a
    pair for queries and keys.
    """

    bits: Tensor
    block_size: int | tuple[int, int]

    def __post_init__(self) -> None:
        for size in self.block_sizes:
            checked_number("Blocks", "block_size", size, 1)
        booleans("Blocks", "bits", self.bits)
        if self.bits.ndim != 4:
            raise ValueError(f"Blocks: bits has shape {tuple(self.bits.shape)}; it must be (B or 1, H or 1, query blocks, key blocks)")

    @property
    def block_sizes(self) -> tuple[int, int]:
        """Queries and keys of a block."""
        if not isinstance(self.block_size, (tuple, list)):
            return self.block_size, self.block_size
        if len(self.block_size) != 2:
            raise ValueError(f"Blocks: block_size is {self.block_size}; it must be one number, or a pair for queries and keys")
        return self.block_size[0], self.block_size[1]

    def check(self, batch: int | None, heads: int | None, seqlen_q: int, seqlen_k: int) -> None:
        per_batch("Blocks", self.bits, batch)
        per_head("Blocks", self.bits, heads)
        blocks = tuple(-(-length // size) for length, size in zip((seqlen_q, seqlen_k), self.block_sizes, strict=True))
        if tuple(self.bits.shape[2:]) != blocks:
            raise ValueError(
                f"Blocks: bits has {self.bits.shape[2]} x {self.bits.shape[3]} blocks; {seqlen_q} queries and {seqlen_k} keys in "
                f"blocks of {self.block_size} need {blocks[0]} x {blocks[1]}"
            )

    def sizes(self) -> tuple[int, int]:
        return self.bits.shape[0], self.bits.shape[1]

    def predicate(self, at: Pair) -> Any:
        b, h = _item(self.bits, at.b), _item(self.bits, at.h, 1)
        size_q, size_k = self.block_sizes
        return self.bits[b, h, at.q_idx // size_q, at.kv_idx // size_k]


@dataclass(frozen=True, repr=False, eq=False)
class Dense(Mask):
    """A bool tensor that broadcasts to (B, H, Sq, Sk), True = visible; read in place, never copied."""

    visible: Tensor

    def __post_init__(self) -> None:
        booleans("Dense", "visible", self.visible)
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


class Lowered(NamedTuple):
    """A rule as the kernels take it: a window in p, AND a traced program with the tensors it reads, AND a bool tensor."""

    window_left: int  # -1: unlimited
    window_right: int
    program_text: str  # "": none
    captured: list[Tensor]
    dense: Tensor | None  # rank 4, each size 1 or that of (B, H, Sq, Sk); a view of what the user gave


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
        if not same_device(tensor.device, torch.device(device)):
            raise ValueError(f"mask {rule!r} is on {tensor.device} but the inputs are on {device}; move it with mask.to('{device}')")
    window = rule.implied_window()
    rest: Mask | None = None
    visible: Tensor | None = None
    for part in conjuncts(rule):
        if ragged and any(isinstance(leaf, Blocks) for leaf in leaves(part)):
            raise UnsupportedAttention(
                "Blocks count from the start of one common sequence and have no meaning for packed sequences; use Document & Custom"
            )
        if part.window() is not None:
            continue
        if isinstance(part, Dense) and visible is None:
            visible = part.rank4
        else:
            rest = part if rest is None else And(rest, part)
    text, captured = ("", []) if rest is None else traced(rest, seqlen_q, seqlen_k, device)
    return Lowered(*window, text, captured, visible)


def _item(tensor: Tensor, index: Any, axis: int = 0) -> Any:
    """The index along an axis that may have size 1 for all."""
    return 0 if tensor.shape[axis] == 1 else index
