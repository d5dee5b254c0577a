"""Forward-mode and second derivatives in plain torch, tile by tile: any device, every feature, O(N) memory.

`jvp` is the tangent of the forward pass: how output, LSE, key mass and entropy move when the inputs do. `backward_jvp` is the tangent of
the backward pass: how the gradients move. The second serves double backward too, since a Hessian is symmetric: with w the gradients that
reached the outputs and u those that reach the gradients, d/dx <u, J(x)^T w> is the tangent of J^T w along u, and d/dw of it is J u.

With p the probabilities and ts the tangent of a score, a row's LSE moves by tlse = sum_j p_j ts_j and its probabilities by p (ts - tlse).
The rows' state is recomputed in a first pass, so that the probabilities sum to 1 whatever the magnitude of the scores.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import score_tangents
from ..plan import Cotangents, Gradients, Operands, Outputs, Rules, Saved, Tangents
from . import packed
from .chunks import NEG_INF, Chunk, Place, chunks, distances, host_reads, indices, key_tiles, query_tiles
from .steps import Keys, Queries
from .tiled import add_bias_gradient, add_to_keys, as_bits, dropout_bits, finite, load_keys, load_queries, probabilities, scores, tile_sizes


class QueryTile(NamedTuple):
    """A tile of queries and their tangents, (C, R, D), both carrying the scale; `empty` (B, H, M, 1) marks rows that see nothing."""

    q: Tensor
    tq: Tensor | None
    empty: Tensor


class KeyTile(NamedTuple):
    """A tile of keys (C, N, D) or values (C, N, Dv), and their tangents."""

    x: Tensor
    tx: Tensor | None


class Rows(NamedTuple):
    """The state of a tile's rows, each (C, R, 1): p = exp(s - reference) * inverse, and what the sink takes."""

    reference: Tensor
    inverse: Tensor
    tlse: Tensor
    sink: Tensor | None  # its probability
    tsink: Tensor | None  # the tangent of its probability


class Tile(NamedTuple):
    """One tile of scores, (C, R, N), with tangents."""

    s: Tensor  # -inf where hidden
    ts: Tensor  # 0 where hidden
    hidden: Tensor | None
    tanh: Tensor | None
    traw: Tensor  # tangent of the scaled product
    score: Tensor | None  # (B, H, M, N): what score_mod saw
    tscore: Tensor | None


def load_query_tile(c: Chunk, i: Queries, u: Tangents, saved: Saved) -> QueryTile:
    empty = c.take(saved.lse, i).unsqueeze(-1) == NEG_INF
    q = load_queries(c, c.t.q, i, empty) * c.r.softmax_scale
    return QueryTile(q, None if u.tq is None else load_queries(c, u.tq, i, empty) * c.r.softmax_scale, empty)


def load_key_tile(c: Chunk, x: Tensor, tx: Tensor | None, j: Keys, hidden: Tensor | None) -> KeyTile:
    return KeyTile(load_keys(c, x, j, hidden), None if tx is None else load_keys(c, tx, j, hidden))


def product_tangent(a: Tensor, ta: Tensor | None, b: Tensor, tb: Tensor | None) -> Tensor:
    """The tangent of a b^T, for a (C, R, D) and b (C, N, D)."""
    total = a.new_zeros((*a.shape[:2], b.shape[1]))
    if ta is not None:
        total.baddbmm_(ta, b.mT)
    if tb is not None:
        total.baddbmm_(a, tb.mT)
    return total


def score_tile(c: Chunk, rows: QueryTile, keys: KeyTile, i: Queries, j: Keys, hidden: Tensor | None, u: Tangents) -> Tile:
    """Scores and their tangents, each step of the one followed by the same step of the other."""
    r = c.r
    s, hidden, tanh, score = scores(c, rows.q, keys.x, i, j, hidden, keep=True)
    traw = product_tangent(rows.q, rows.tq, keys.x, keys.tx)
    ts = traw.clone() if tanh is None else traw.addcmul(traw, tanh * tanh, value=-1)
    tile, tscore = c.per_head(ts), None
    if u.tbias is not None:
        tile.add_(c.tile(u.tbias, i, j))
    if u.talibi_slopes is not None:
        tile.addcmul_(c.part(u.talibi_slopes)[..., None, None].to(c.dtype), distances(c, i, j), value=-1)
    if r.score_mod:
        tscore = tile.clone()
        assert score is not None
        tile.copy_(score_tangents.jvp(r.score_mod, {"score": score, **indices(c, i, j)}, c.t.captured, u.tcaptured, tscore))
    if hidden is not None:
        tile.masked_fill_(hidden, 0.0)
    return Tile(s, ts, hidden, tanh, traw, score, tscore)


def row_state(c: Chunk, i: Queries, rows: QueryTile, u: Tangents) -> Rows:
    """The first pass: an online softmax that sums exp(s - m) and exp(s - m) ts."""
    m = rows.q.new_full((*rows.q.shape[:2], 1), NEG_INF)
    l, tl = torch.zeros_like(m), torch.zeros_like(m)
    for j, hidden in key_tiles(c, i):
        tile = score_tile(c, rows, load_key_tile(c, c.t.k, u.tk, j, hidden), i, j, hidden, u)
        m_new = torch.maximum(m, tile.s.amax(-1, keepdim=True))
        p = probabilities(tile.s.sub_(finite(m_new)))
        alpha = (m - finite(m_new)).exp_()
        l.mul_(alpha).add_(p.sum(-1, keepdim=True))
        tl.mul_(alpha).add_(p.mul_(tile.ts).sum(-1, keepdim=True))
        m = m_new
    sink = None
    if c.t.sink is not None:  # one more key, whose value is 0; rows beyond the length have none
        logit = per_row(c, c.t.sink, rows).masked_fill(rows.empty, NEG_INF)
        m_new = torch.maximum(m, c.per_key_tile(logit))
        alpha = (m - finite(m_new)).exp_()
        sink = (c.per_key_tile(logit) - finite(m_new)).exp_()
        l.mul_(alpha).add_(sink)
        tl.mul_(alpha)
        if u.tsink is not None:
            tl.addcmul_(sink, c.per_key_tile(per_row(c, u.tsink, rows)))
        m = m_new
    inverse = torch.where(l == 0, 0.0, 1.0 / l)
    tlse = tl.mul_(inverse)
    tsink = None
    if sink is not None:
        sink = sink * inverse
        tsink = sink * (-tlse if u.tsink is None else c.per_key_tile(per_row(c, u.tsink, rows)) - tlse)
    return Rows(finite(m), inverse, tlse, sink, tsink)


def per_row(c: Chunk, x: Tensor, rows: QueryTile) -> Tensor:
    """(Hq,) -> (B, H, M, 1)."""
    return x[c.heads].to(c.dtype).view(1, -1, 1, 1).expand(rows.empty.shape)


def log_probabilities(tile: Tile, state: Rows) -> Tensor:
    """ln p, and some finite number where p is 0: see `tiled.log_probabilities`."""
    return (tile.s - state.reference).add_(state.inverse.log()).clamp_(min=-1000.0)


def probability_tile(tile: Tile, state: Rows) -> tuple[Tensor, Tensor]:
    """p, in the memory of s, and its tangent p (ts - tlse)."""
    p = probabilities(tile.s.sub_(state.reference)).mul_(state.inverse)
    return p, (tile.ts - state.tlse).mul_(p)


# ------------------------------------------------------------------------------------------------------------ forward


def jvp(t: Operands, r: Rules, u: Tangents, saved: Saved, tangents: Outputs) -> None:
    """Fills every buffer of `tangents` (its `out`, `lse`, `key_mass`, `entropy`) with the tangent of that output along `u`."""
    if t.cu_seqlens_q is None:
        if tangents.key_mass is not None:
            tangents.key_mass.zero_()
        jvp_chunks(t, r, u, saved, tangents, Place())
        return
    for x in (tangents.out, tangents.lse, tangents.key_mass, tangents.entropy):
        if x is not None:
            x.zero_()
    for part in packed.parts(t, tile_sizes(t.q.device).block_m, host_reads(t.q.device)):
        results = part.outputs(tangents)
        jvp_chunks(part.operands, r, part.tangents(u), part.saved(saved), results, part.place)
        part.put_outputs(results, tangents)


def jvp_chunks(t: Operands, r: Rules, u: Tangents, saved: Saved, tangents: Outputs, place: Place) -> None:
    """Fills `tangents`, but for key_mass, which is summed over queries: adds to that."""
    for c in chunks(t, r, tile_sizes(t.q.device), place):
        for i in query_tiles(c):
            jvp_tile(c, i, u, saved, tangents)
        rest = slice(c.len_q, t.q.shape[2])
        for x in (tangents.out, tangents.lse, tangents.entropy):
            if x is not None:
                x[c.b, c.heads, rest].zero_()


def jvp_tile(c: Chunk, i: Queries, u: Tangents, saved: Saved, tangents: Outputs) -> None:
    t, r = c.t, c.r
    rows = load_query_tile(c, i, u, saved)
    state = row_state(c, i, rows, u)
    tout = rows.q.new_zeros((*rows.q.shape[:2], t.v.shape[3]))
    tentropy = torch.zeros_like(state.tlse)
    for j, hidden in key_tiles(c, i):
        tile = score_tile(c, rows, load_key_tile(c, t.k, u.tk, j, hidden), i, j, hidden, u)
        log_p = log_probabilities(tile, state) if tangents.entropy is not None else None
        p, tp = probability_tile(tile, state)
        if tangents.key_mass is not None:
            c.add_to_keys(tangents.key_mass, j, c.per_head(tp).sum(2))
        if log_p is not None:
            tentropy.sub_(log_p.add_(1.0).mul_(tp).sum(-1, keepdim=True))
        if r.dropout_p > 0:
            kept = dropout_bits(c, p, i, j)
            for x in (p, tp):
                as_bits(x).bitwise_and_(kept)
        v = load_key_tile(c, t.v, u.tv, j, tile.hidden)
        tout.baddbmm_(tp, v.x)
        if v.tx is not None:
            tout.baddbmm_(p, v.tx)
    c.put(tangents.out, i, c.per_head(tout.div_(1.0 - r.dropout_p)))
    c.put(tangents.lse, i, c.per_head(state.tlse).squeeze(-1))
    if tangents.entropy is not None:
        c.put(tangents.entropy, i, c.per_head(tentropy).squeeze(-1))


# ----------------------------------------------------------------------------------------------------------- backward


def backward_jvp(t: Operands, r: Rules, u: Tangents, saved: Saved, cot: Cotangents, tcot: Cotangents, tangents: Gradients) -> None:
    """Fills every buffer of `tangents` that is not None with the tangent of that gradient.

    The operands move along `u` and the outputs' gradients `cot` along `tcot`. Sums run in one fixed order: the same bits on every run.
    """
    # Without query heads no chunk writes dk and dv; of packed sequences, none writes rows that belong to nobody.
    untouched = (tangents.dq, tangents.dk, tangents.dv) if t.q.numel() == 0 or t.cu_seqlens_q is not None else ()
    for x in (tangents.dbias, tangents.dalibi_slopes, tangents.dsink, *tangents.dcaptured, *untouched):
        if x is not None:
            x.zero_()
    if t.cu_seqlens_q is None:
        backward_jvp_chunks(t, r, u, saved, cot, tcot, tangents, Place())
        return
    host = host_reads(t.q.device)
    totals = tangents if host else packed.wide(tangents, t.q.dtype)
    for part in packed.parts(t, tile_sizes(t.q.device).block_m, host):
        results, own = part.gradients(totals), (part.saved(saved), part.cotangents(cot), part.cotangents(tcot))
        backward_jvp_chunks(part.operands, r, part.tangents(u), *own, results, part.place)
        part.put_gradients(results, totals)
    for x, total in ((tangents.dk, totals.dk), (tangents.dv, totals.dv)):
        if x is not None and total is not None and x is not total:
            x.copy_(total)


def backward_jvp_chunks(
    t: Operands, r: Rules, u: Tangents, saved: Saved, cot: Cotangents, tcot: Cotangents, tangents: Gradients, place: Place
) -> None:
    """Fills the tangents of dq, dk and dv, and adds to those of the parameters' gradients."""
    for c in chunks(t, r, tile_sizes(t.q.device), place):
        kv_rows = (c.b.stop - c.b.start) * (c.kv_heads.stop - c.kv_heads.start), t.k.shape[2]
        wanted = (tangents.dk, tangents.dv)
        totals = [None if x is None else torch.zeros(*kv_rows, x.shape[3], dtype=c.dtype, device=x.device) for x in wanted]
        for i in query_tiles(c):
            backward_jvp_tile(c, i, u, saved, cot, tcot, tangents, *totals)
        if tangents.dq is not None:
            tangents.dq[c.b, c.heads, c.len_q :].zero_()
        for x, total in zip(wanted, totals, strict=True):
            if x is not None and total is not None:
                x[c.b, c.kv_heads] = total.view(x[c.b, c.kv_heads].shape)


class OutputGradients(NamedTuple):
    """The gradients of the loss with respect to a tile's outputs, (C, R, Dv), and their tangents; the inverse of dropout is in them."""

    dout: Tensor | None
    tdout: Tensor | None
    cot: Cotangents
    tcot: Cotangents


def load_output_gradients(c: Chunk, i: Queries, rows: QueryTile, cot: Cotangents, tcot: Cotangents) -> OutputGradients:
    def load(x: Tensor | None) -> Tensor | None:
        return None if x is None else load_queries(c, x, i, rows.empty) / (1.0 - c.r.dropout_p)

    return OutputGradients(load(cot.dout), load(tcot.dout), cot, tcot)


def probability_gradients(
    c: Chunk, i: Queries, j: Keys, tile: Tile, state: Rows, w: OutputGradients, v: KeyTile, kept: Tensor | None
) -> tuple[Tensor, Tensor]:
    """dP and its tangent, both 0 where hidden: through the output, key_mass and entropy. For a tile whose s is still there."""
    dp, tdp = torch.zeros_like(tile.s), torch.zeros_like(tile.s)
    if w.dout is not None:
        dp = torch.bmm(w.dout, v.x.mT)
    if w.dout is not None and v.tx is not None:
        tdp.baddbmm_(w.dout, v.tx.mT)
    if w.tdout is not None:
        tdp.baddbmm_(w.tdout, v.x.mT)
    if kept is not None:
        for x in (dp, tdp):
            as_bits(x).bitwise_and_(kept)

    def rows_of(x: Tensor) -> Tensor:
        return c.per_key_tile(c.take(x, i).unsqueeze(-1))

    for x, cot in ((dp, w.cot), (tdp, w.tcot)):
        if cot.dkey_mass is not None:
            c.per_head(x).add_(j.take(cot.dkey_mass[c.b, c.heads], 2).unsqueeze(2))
        if cot.dentropy is not None:
            x.sub_(log_probabilities(tile, state).add_(1.0).mul_(rows_of(cot.dentropy)))
    if w.cot.dentropy is not None:
        tdp.sub_((tile.ts - state.tlse).mul_(rows_of(w.cot.dentropy)))
    if tile.hidden is not None:
        for x in (dp, tdp):
            c.per_head(x).masked_fill_(tile.hidden, 0.0)
    return dp, tdp


def row_terms(c: Chunk, i: Queries, rows: QueryTile, state: Rows, w: OutputGradients, u: Tangents) -> tuple[Tensor, Tensor]:
    """D_i = sum_j p_ij dp_ij - dlse_i and its tangent, (C, R, 1): the second pass."""
    delta, tdelta = torch.zeros_like(state.tlse), torch.zeros_like(state.tlse)
    for x, cot in ((delta, w.cot), (tdelta, w.tcot)):
        if cot.dlse is not None:
            x.sub_(load_queries(c, cot.dlse.unsqueeze(-1), i, rows.empty))
    for j, hidden in key_tiles(c, i):
        tile = score_tile(c, rows, load_key_tile(c, c.t.k, u.tk, j, hidden), i, j, hidden, u)
        kept = dropout_bits(c, tile.s, i, j) if c.r.dropout_p > 0 else None
        dp, tdp = probability_gradients(c, i, j, tile, state, w, load_key_tile(c, c.t.v, u.tv, j, tile.hidden), kept)
        p, tp = probability_tile(tile, state)
        delta.add_((p * dp).sum(-1, keepdim=True))
        tdelta.add_(tp.mul_(dp).addcmul_(p, tdp).sum(-1, keepdim=True))
    return delta, tdelta


def backward_jvp_tile(
    c: Chunk,
    i: Queries,
    u: Tangents,
    saved: Saved,
    cot: Cotangents,
    tcot: Cotangents,
    tangents: Gradients,
    tdk: Tensor | None,
    tdv: Tensor | None,
) -> None:
    """What one tile of queries adds to the tangent of every gradient. tdk (C, Sk, D) and tdv (C, Sk, Dv) are running sums."""
    t, r = c.t, c.r
    rows = load_query_tile(c, i, u, saved)
    state = row_state(c, i, rows, u)
    w = load_output_gradients(c, i, rows, cot, tcot)
    delta, tdelta = row_terms(c, i, rows, state, w, u)
    if tangents.dsink is not None:
        assert state.sink is not None and state.tsink is not None
        tangents.dsink[c.heads].sub_(c.per_head(state.tsink * delta + state.sink * tdelta).sum((0, 2, 3)))

    tdq = torch.zeros_like(rows.q)
    for j, hidden in key_tiles(c, i):
        tile = score_tile(c, rows, load_key_tile(c, t.k, u.tk, j, hidden), i, j, hidden, u)
        keys = load_key_tile(c, t.k, u.tk, j, tile.hidden)  # what score_mod hides is known now
        kept = dropout_bits(c, tile.s, i, j) if r.dropout_p > 0 else None
        dp, tdp = probability_gradients(c, i, j, tile, state, w, load_key_tile(c, t.v, u.tv, j, tile.hidden), kept)
        p, tp = probability_tile(tile, state)
        ds = dp.sub_(delta)
        tds = tdp.sub_(tdelta).mul_(p).addcmul_(tp, ds)
        ds.mul_(p)
        ds, tds = to_scaled_products(c, i, j, tile, ds, tds, u, tangents)
        tdq.baddbmm_(tds, keys.x)
        if keys.tx is not None:
            tdq.baddbmm_(ds, keys.tx)
        if tdk is not None:
            add_to_keys(c, tdk, tds, rows.q, j)
            if rows.tq is not None:
                add_to_keys(c, tdk, ds, rows.tq, j)
        if tdv is not None:
            for x, dout in ((tp, w.dout), (p, w.tdout)):
                if dout is not None:
                    if kept is not None:
                        as_bits(x).bitwise_and_(kept)
                    add_to_keys(c, tdv, x, dout, j)
    if tangents.dq is not None:
        c.put(tangents.dq, i, c.per_head(tdq.mul_(r.softmax_scale)))


def to_scaled_products(
    c: Chunk, i: Queries, j: Keys, tile: Tile, ds: Tensor, tds: Tensor, u: Tangents, tangents: Gradients
) -> tuple[Tensor, Tensor]:
    """Walks dS and its tangent back from the final score to the scaled product, adding to each parameter's tangent on the way."""
    t, r = c.t, c.r
    if r.score_mod:
        assert tile.score is not None and tile.tscore is not None
        env = {"score": tile.score, **indices(c, i, j)}
        before = c.per_head(ds), c.per_head(tds)
        after = score_tangents.vjp_jvp(r.score_mod, env, t.captured, u.tcaptured, tile.tscore, *before, tangents.dcaptured)
        ds, tds = (x.contiguous().view(ds.shape) for x in after)
    tds_tile = c.per_head(tds)
    if tangents.dbias is not None:
        add_bias_gradient(c, i, j, tds_tile, tangents.dbias)
    if tangents.dalibi_slopes is not None:
        total = c.part(tangents.dalibi_slopes)
        total.sub_((tds_tile * distances(c, i, j)).sum((2, 3)).sum_to_size(total.shape))
    if tile.tanh is not None:  # ds (1 - tanh^2), whose tangent takes that of tanh: (1 - tanh^2) traw / c
        slope = 1.0 - tile.tanh * tile.tanh
        bend = tile.tanh * tile.traw * ds * (2.0 / r.softcap)
        ds, tds = ds * slope, (tds - bend) * slope
    return ds, tds
