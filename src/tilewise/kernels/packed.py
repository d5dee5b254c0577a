"""Packed sequences on the tiled path: one small dense call for each part, and where its results belong.

Where the host may read offsets (a CPU), a part is a sequence and everything it touches is a view. Elsewhere nobody knows where a sequence
starts without waiting for the device, so a part is a slot that may hold one tile of queries of some sequence: which one, and its rows, are
found and gathered on the device. There are as many slots as the totals allow: total / tile + sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from ..plan import Cotangents, Gradients, Operands, Outputs, Saved, Tangents, accumulator_dtype
from .chunks import NEG_INF, Place


def boundaries(cu_seqlens: Tensor, total: int) -> Tensor:
    """int64 (sequences + 1,): the offsets as they count, never less than those before nor more than the total."""
    return cu_seqlens.long().clamp(0, total).cummax(0).values


def covered(t: Operands, dim: int) -> int | None:
    """How many queries (dim 2) or keys (dim 3) of a sequence the bias and the mask have entries for; None: any number."""
    sizes = [x.shape[dim] for x in (t.bias, t.mask) if x is not None and x.shape[dim] > 1]
    return min(sizes, default=None)


def used(sizes: Tensor, seqused: Tensor | None, most: int | None) -> Tensor:
    """int64 (sequences,): how many of each sequence's rows are real."""
    if seqused is not None:
        sizes = torch.minimum(sizes, seqused.long().clamp(min=0))
    return sizes if most is None else sizes.clamp(max=most)


class Part(Protocol):
    """One dense call: its operands, and its share of everything else. What `put_*` writes back, a view has already written."""

    operands: Operands
    place: Place

    def outputs(self, out: Outputs) -> Outputs: ...

    def put_outputs(self, results: Outputs, out: Outputs) -> None: ...

    def saved(self, saved: Saved) -> Saved: ...

    def cotangents(self, cot: Cotangents) -> Cotangents: ...

    def tangents(self, u: Tangents) -> Tangents: ...

    def gradients(self, grads: Gradients) -> Gradients: ...

    def put_gradients(self, results: Gradients, grads: Gradients) -> None: ...


def parts(t: Operands, block_m: int, host: bool) -> Iterator[Part]:
    """The parts of a packed call that has at least one sequence; rows that belong to none are in no part."""
    assert t.cu_seqlens_q is not None and t.cu_seqlens_k is not None
    starts_q, starts_k = boundaries(t.cu_seqlens_q, t.q.shape[2]), boundaries(t.cu_seqlens_k, t.k.shape[2])
    len_q = used(starts_q.diff(), t.seqused_q, covered(t, 2))
    len_k = used(starts_k.diff(), t.seqused_k, covered(t, 3))
    if host:
        rows_q, rows_k = starts_q.tolist(), starts_k.tolist()
        for b in range(len(len_q)):
            queries, keys = slice(rows_q[b], rows_q[b + 1]), slice(rows_k[b], rows_k[b + 1])
            yield Sequence(t, b, queries, keys, len_q[b : b + 1], len_k[b : b + 1])
        return
    sequences, total = len(len_q), t.q.shape[2]
    if total == 0:
        return
    block_m = max(1, min(block_m, max(16, -(-total // sequences))))
    tiles = (starts_q.diff() + block_m - 1) // block_m
    ends = tiles.cumsum(0)
    for number in range(total // block_m + sequences):
        slot = torch.full((1,), number, device=t.q.device)
        own = torch.searchsorted(ends, slot, right=True).clamp(max=sequences - 1)
        query = (slot - (ends - tiles)[own]) * block_m
        yield Slot(t, own, query, block_m, starts_q, starts_k, len_q[own], len_k[own])


def matrix_part(x: Tensor | None, b: slice, queries: slice, keys: slice) -> Tensor | None:
    """The piece of a broadcast (sequences, Hq, max_q, max_k) tensor that belongs to one sequence: a view."""
    if x is None:
        return None
    b, queries, keys = (slice(None) if size == 1 else part for size, part in zip(_without_heads(x), (b, queries, keys), strict=True))
    return x[b, :, queries, keys]


def _without_heads(x: Tensor) -> tuple[int, int, int]:
    return x.shape[0], x.shape[2], x.shape[3]


class Sequence:
    """A sequence whose rows the host knows."""

    def __init__(self, t: Operands, b: int, queries: slice, keys: slice, len_q: Tensor, len_k: Tensor) -> None:
        self.queries, self.keys, self.b = queries, keys, slice(b, b + 1)
        self.inside = (self.b, slice(0, queries.stop - queries.start), slice(0, keys.stop - keys.start))
        slopes = t.alibi_slopes
        self.place = Place(item=b)
        self.operands = replace(
            t,
            q=t.q[:, :, queries],
            k=t.k[:, :, keys],
            v=t.v[:, :, keys],
            bias=matrix_part(t.bias, *self.inside),
            mask=matrix_part(t.mask, *self.inside),
            alibi_slopes=slopes if slopes is None or slopes.shape[0] == 1 else slopes[self.b],
            seqused_q=len_q,
            seqused_k=len_k,
            cu_seqlens_q=None,
            cu_seqlens_k=None,
        )

    def outputs(self, out: Outputs) -> Outputs:
        mass, entropy = out.key_mass, out.entropy
        return Outputs(
            out.out[:, :, self.queries],
            out.lse[:, :, self.queries],
            out.max_logits,
            None if mass is None else mass[:, :, self.keys],
            None if entropy is None else entropy[:, :, self.queries],
        )

    def put_outputs(self, results: Outputs, out: Outputs) -> None:
        pass

    def saved(self, saved: Saved) -> Saved:
        return Saved(saved.out[:, :, self.queries], saved.lse[:, :, self.queries])

    def cotangents(self, cot: Cotangents) -> Cotangents:
        rows = {"dout": self.queries, "dlse": self.queries, "dkey_mass": self.keys, "dentropy": self.queries}
        return Cotangents(**{name: None if (x := getattr(cot, name)) is None else x[:, :, part] for name, part in rows.items()})

    def tangents(self, u: Tangents) -> Tangents:
        slopes = u.talibi_slopes
        return replace(
            u,
            tq=None if u.tq is None else u.tq[:, :, self.queries],
            tk=None if u.tk is None else u.tk[:, :, self.keys],
            tv=None if u.tv is None else u.tv[:, :, self.keys],
            tbias=matrix_part(u.tbias, *self.inside),
            talibi_slopes=slopes if slopes is None or slopes.shape[0] == 1 else slopes[self.b],
        )

    def gradients(self, grads: Gradients) -> Gradients:
        slopes = grads.dalibi_slopes
        return replace(
            grads,
            dq=None if grads.dq is None else grads.dq[:, :, self.queries],
            dk=None if grads.dk is None else grads.dk[:, :, self.keys],
            dv=None if grads.dv is None else grads.dv[:, :, self.keys],
            dbias=matrix_part(grads.dbias, *self.inside),
            dalibi_slopes=slopes if slopes is None or slopes.shape[0] == 1 else slopes[self.b],
        )

    def put_gradients(self, results: Gradients, grads: Gradients) -> None:
        pass


class Slot:
    """At most `block_m` queries of a sequence that only the device knows, and all keys that it might have: gathered, then put back.

    Rows that are not the slot's are read from some other row, count as hidden, and are written to nothing: they add 0 to a row.
    """

    def __init__(
        self, t: Operands, b: Tensor, query: Tensor, block_m: int, starts_q: Tensor, starts_k: Tensor, len_q: Tensor, len_k: Tensor
    ) -> None:
        total_q, total_k = t.q.shape[2], t.k.shape[2]
        most_k = covered(t, 3)
        self.b = b
        self.in_q = query + torch.arange(block_m, device=b.device)  # within the sequence
        self.in_k = torch.arange(total_k if most_k is None else min(most_k, total_k), device=b.device)
        self.own_q = self.in_q < starts_q[b + 1] - starts_q[b]
        self.real_q = self.in_q < len_q
        self.real_k = (self.in_k < len_k) & (query < len_q)
        self.queries = (starts_q[b] + self.in_q).clamp(max=max(total_q - 1, 0))
        self.keys = (starts_k[b] + self.in_k).clamp(max=max(total_k - 1, 0))
        self.place = Place(b.view(1, 1, 1, 1), query.view(1, 1, 1, 1), ((len_q - query).view(1, 1, 1, 1), len_k.view(1, 1, 1, 1)))
        self.operands = replace(
            t,
            q=t.q.index_select(2, self.queries),
            k=t.k.index_select(2, self.keys),
            v=t.v.index_select(2, self.keys),
            bias=self.gathered(t.bias),
            mask=self.gathered(t.mask),
            alibi_slopes=t.alibi_slopes if t.alibi_slopes is None or t.alibi_slopes.shape[0] == 1 else t.alibi_slopes[b],
            seqused_q=None,
            seqused_k=None,
            cu_seqlens_q=None,
            cu_seqlens_k=None,
        )

    def gathered(self, x: Tensor | None) -> Tensor | None:
        """This slot's piece of a broadcast (sequences, Hq, max_q, max_k) tensor."""
        if x is None:
            return None
        x = x if x.shape[0] == 1 else x.index_select(0, self.b)
        x = x if x.shape[2] == 1 else x.index_select(2, self.in_q.clamp(max=x.shape[2] - 1))
        return x if x.shape[3] == 1 else x[..., : len(self.in_k)]

    def rows_of(self, x: Tensor) -> Tensor:
        return x.index_select(2, self.queries)

    def outputs(self, out: Outputs) -> Outputs:
        mass = out.key_mass
        return Outputs(
            self.rows_of(out.out),
            self.rows_of(out.lse),
            out.max_logits,
            None if mass is None else mass.new_zeros(1, mass.shape[1], len(self.in_k)),
            None if out.entropy is None else self.rows_of(out.entropy),
        )

    def put_outputs(self, results: Outputs, out: Outputs) -> None:
        add(out.out, self.queries, self.own_q, results.out)
        add(out.lse, self.queries, self.own_q, results.lse)
        if out.entropy is not None and results.entropy is not None:
            add(out.entropy, self.queries, self.own_q, results.entropy)
        if out.key_mass is not None and results.key_mass is not None:
            add(out.key_mass, self.keys, self.real_k, results.key_mass)

    def saved(self, saved: Saved) -> Saved:
        return Saved(self.rows_of(saved.out), torch.where(self.real_q, self.rows_of(saved.lse), NEG_INF))

    def cotangents(self, cot: Cotangents) -> Cotangents:
        rows = {"dout": self.queries, "dlse": self.queries, "dkey_mass": self.keys, "dentropy": self.queries}
        return Cotangents(**{n: None if (x := getattr(cot, n)) is None else x.index_select(2, index) for n, index in rows.items()})

    def tangents(self, u: Tangents) -> Tangents:
        slopes = u.talibi_slopes
        return replace(
            u,
            tq=None if u.tq is None else self.rows_of(u.tq),
            tk=None if u.tk is None else u.tk.index_select(2, self.keys),
            tv=None if u.tv is None else u.tv.index_select(2, self.keys),
            tbias=self.gathered(u.tbias),
            talibi_slopes=slopes if slopes is None or slopes.shape[0] == 1 else slopes[self.b],
        )

    def gradients(self, grads: Gradients) -> Gradients:
        def zeros(x: Tensor | None, *shape: int) -> Tensor | None:
            return None if x is None else x.new_zeros(shape)

        bias, slopes, heads = self.operands.bias, grads.dalibi_slopes, self.operands.k.shape[1]
        return replace(
            grads,
            dq=zeros(grads.dq, *self.operands.q.shape),
            dk=zeros(grads.dk, 1, heads, len(self.in_k), self.operands.k.shape[3]),
            dv=zeros(grads.dv, 1, heads, len(self.in_k), self.operands.v.shape[3]),
            dbias=None if bias is None else zeros(grads.dbias, *bias.shape),
            dalibi_slopes=zeros(slopes, 1, 0 if slopes is None else slopes.shape[1]),
        )

    def put_gradients(self, results: Gradients, grads: Gradients) -> None:
        if grads.dq is not None and results.dq is not None:
            add(grads.dq, self.queries, self.own_q, results.dq)
        for total, result in ((grads.dk, results.dk), (grads.dv, results.dv)):
            if total is not None and result is not None:
                add(total, self.keys, self.real_k, result)
        if grads.dbias is not None and results.dbias is not None:
            self.put_bias(results.dbias, grads.dbias)
        if grads.dalibi_slopes is not None and results.dalibi_slopes is not None:
            own = self.b if grads.dalibi_slopes.shape[0] > 1 else torch.zeros_like(self.b)
            grads.dalibi_slopes.index_add_(0, own, results.dalibi_slopes)

    def put_bias(self, result: Tensor, total: Tensor) -> None:
        """Adds to the tile of a bias's gradient, whose place only the device knows: what is not the slot's is 0 and goes anywhere."""
        by_row = total[..., : result.shape[3]].transpose(1, 2)  # (sequences, max_q, Hq, keys)
        rows = self.in_q.clamp(max=by_row.shape[1] - 1) if by_row.shape[1] > 1 else self.in_q[:1] * 0
        item = self.b.expand(len(rows)) if by_row.shape[0] > 1 else rows * 0
        by_row.index_put_((item, rows), result.transpose(1, 2)[0], accumulate=True)


def add(total: Tensor, rows: Tensor, own: Tensor, values: Tensor) -> None:
    """Adds (1, H, rows, ...) to the rows of a packed tensor; rows that are not one's own add 0. No two real ones meet, so that order is
    of no account."""
    own = own.view(1, 1, -1, *(1,) * (values.ndim - 3))
    total.index_add_(2, rows, torch.where(own, values, 0.0).to(total.dtype))


def blank(t: Operands, out: Outputs) -> None:
    """What rows of no sequence give. Those of sequences start from 0, because slots add."""
    assert t.cu_seqlens_q is not None
    starts, rows = boundaries(t.cu_seqlens_q, t.q.shape[2]), torch.arange(t.q.shape[2], device=t.q.device)
    out.out.zero_()
    out.lse.zero_().masked_fill_((rows < starts[0]) | (rows >= starts[-1]), NEG_INF)
    if out.entropy is not None:
        out.entropy.zero_()


def wide(grads: Gradients, dtype: torch.dtype) -> Gradients:
    """The same buffers, with those that several slots add to in the accumulator dtype."""
    dk, dv = (None if x is None else torch.zeros_like(x, dtype=accumulator_dtype(dtype)) for x in (grads.dk, grads.dv))
    return replace(grads, dk=dk, dv=dv)
