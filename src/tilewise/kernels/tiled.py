"""Attention in plain torch, tile by tile: any device, every feature, O(N) memory, forward and backward.

The loop is FlashAttention-2's (Dao 2023, algorithms 1 and 2): a tile of queries stays, tiles of keys stream past it, and the softmax is
kept as a running maximum m and a running denominator l. The backward pass recomputes the probabilities from the LSE. One program visits
several heads (and batch items) at once, so that each torch call has enough work; tiles that no query sees are not visited.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..plan import Cotangents, Gradients, Operands, Outputs, Rules, Saved
from . import packed
from .chunks import (
    NEG_INF,
    Chunk,
    Place,
    TileSizes,
    chunks,
    distances,
    host_reads,
    indices,
    key_tiles,
    program,
    query_tiles,
    tame,
)
from .philox import in_threads, write_keep_mask
from .steps import Keys, Queries, pieces

INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}
INF_BITS = {dtype: torch.tensor(NEG_INF, dtype=dtype, device="cpu").view(INTEGERS[dtype]).item() for dtype in INTEGERS}
PHILOX_STEP = 1 << 17  # probabilities whose dropout one thread of a CPU draws at once: the generator's integers stay in its L2 cache

# On a CPU the scores of a step stay near the caches; elsewhere a step must be long compared with the launch of a dozen kernels.
CPU_TILES = TileSizes(block_m=512, block_n=512, scores=1 << 20)
DEVICE_TILES = TileSizes(block_m=1024, block_n=1024, scores=1 << 24)


def tile_sizes(device: torch.device) -> TileSizes:
    return CPU_TILES if device.type == "cpu" else DEVICE_TILES


def load_queries(c: Chunk, x: Tensor, i: Queries, hidden: Tensor | None = None) -> Tensor:
    """(C, R, D): a tile of q, out or dout in the accumulator dtype; rows `hidden` (B, H, M, 1) are 0, whatever they hold."""
    tile = c.take(x, i).to(c.dtype)
    if hidden is not None:
        tile = tile.masked_fill(hidden, 0.0)
    return c.per_key_tile(tile)


def load_keys(c: Chunk, x: Tensor, j: Keys, hidden: Tensor | None) -> Tensor:
    """(C, N, D): a tile of k or v in the accumulator dtype. Keys hidden from the whole tile are 0: a NaN there must meet no product."""
    own, memory = x[c.b, c.kv_heads], None
    if j.one_run is None and (x is c.t.k or x is c.t.v):
        count = len(j.runs) * j.width
        memory = c.buffer("k" if x is c.t.k else "v", *own.shape[:2], count, own.shape[3], dtype=x.dtype)
    tile = j.take(own, 2, memory).to(c.dtype)
    if c.own_keys:
        tile = tile.repeat_interleave(c.group, 1)
    if hidden is not None:
        tile = tile.masked_fill(hidden.view(torch.uint8).amin(2).view(torch.bool).unsqueeze(-1), 0.0)
    return tile.flatten(0, 1)


class Scores(NamedTuple):
    """The scores of a tile and what their derivative needs."""

    s: Tensor  # (C, R, N), -inf where hidden
    hidden: Tensor | None
    tanh: Tensor | None  # (C, R, N) of the softcap
    raw: Tensor | None  # (B, H, M, N): what score_mod saw


def scores(c: Chunk, q: Tensor, k: Tensor, i: Queries, j: Keys, hidden: Tensor | None, keep: bool = False) -> Scores:
    """Scaled products, softcap, bias, ALiBi, score function, mask; `q` (C, R, D) carries the scale. `keep` is for the backward pass."""
    t, r, tanh, raw = c.t, c.r, None, None
    s = product(c, "s", q, k.mT)
    if r.softcap > 0:
        s.div_(r.softcap).tanh_()
        tanh = c.buffer("tanh", *s.shape).copy_(s) if keep else None
        s.mul_(r.softcap)
    tile = c.per_head(s)  # (B, H, M, N), the same memory
    if t.bias is not None:
        bias = c.tile(t.bias, i, j)
        tile.add_(bias if bias.dtype == c.dtype else c.buffer("bias", *bias.shape).copy_(bias))  # a sum of two dtypes takes twice as long
    if t.alibi_slopes is not None:
        tile.addcmul_(c.part(t.alibi_slopes)[..., None, None].to(c.dtype), distances(c, i, j), value=-1)
    if r.score_mod:
        raw = c.buffer("raw", *tile.shape).copy_(tile) if keep else tile
        tile.copy_(program(r.score_mod).evaluate({"score": raw, **indices(c, i, j)}, t.captured, c.memory))
        if not c.host or not tile.amin() > NEG_INF:  # the minimum costs a fraction of the comparison
            masked = tile == NEG_INF
            hidden = masked if hidden is None else masked | hidden
    if hidden is not None:
        hide(tile, hidden)
    return Scores(s, hidden, tanh, raw)


def online_softmax_update(s: Tensor, m: Tensor, l: Tensor) -> tuple[Tensor, Tensor]:
    """Moves the state (m, l) past one tile. Returns p = exp(s - m), in the memory of s, and the factor for what was summed before."""
    m_new = torch.maximum(m, s.amax(-1, keepdim=True))
    reference = finite(m_new)
    p = probabilities(s.sub_(reference))
    alpha = (m - reference).exp_()
    l.mul_(alpha).add_(p.sum(-1, keepdim=True))
    m.copy_(m_new)
    return p, alpha


def probabilities(s: Tensor) -> Tensor:
    """exp(s) in place, and exactly 0 where it is below about 1e-30, far less than any sum of probabilities can show.

    CPUs take a hundred times as long for a product with a denormal number, and the exponential nearly as long to make one (or exp(-inf)).
    """
    return torch.threshold_(s.clamp_min_(-70.0).exp_(), 5e-31, 0.0)  # exp(-70) = 4e-31


def finite(m: Tensor) -> Tensor:
    """The maximum to subtract: 0 for a row that has seen no key yet, as (-inf) - (-inf) would be NaN."""
    return m.masked_fill(m == NEG_INF, 0.0)


def accumulate(o: Tensor, alpha: Tensor, pv: Tensor) -> None:
    """o <- alpha * o + p v."""
    o.mul_(alpha).add_(pv)


def product(c: Chunk, name: str, a: Tensor, b: Tensor) -> Tensor:
    """a b, in a buffer of that name. (On a CPU a product that adds to its result takes a third longer than a product and a sum.)

    Factors are in the accumulator dtype for 16-bit inputs too: torch rounds a 16-bit product, and in bfloat16 units of CPUs rows whose
    length is no multiple of 32 meet the next row times 0, so that a NaN there would show where it does not belong.
    """
    return torch.bmm(a, b, out=c.buffer(name, *a.shape[:2], b.shape[2]))


def as_bits(x: Tensor) -> Tensor:
    """The same memory as integers. CPUs select by `&` of the bits ten times as fast as by `masked_fill_` or `where`."""
    return x.view(INTEGERS[x.dtype])


def hide(s: Tensor, hidden: Tensor) -> None:
    """s <- -inf where hidden, in place, whatever s holds; `hidden` broadcasts to s."""
    keep = hidden.to(INTEGERS[s.dtype]).sub_(1)  # all bits 1 where visible, else 0
    as_bits(s).bitwise_and_(keep).bitwise_or_(keep.bitwise_not_().bitwise_and_(INF_BITS[s.dtype]))


def dropout_bits(c: Chunk, x: Tensor, i: Queries, j: Keys) -> Tensor:
    """For the scores `x` of a tile: integers with all bits 1 where dropout keeps the probability, else 0."""
    assert c.t.dropout_seed is not None  # dropout_p > 0
    index, bits = indices(c, i, j), as_bits(c.buffer("keep", *x.shape))
    tile = c.per_head(bits)
    seed, dropout_p = c.t.dropout_seed, c.r.dropout_p

    def draw(rows: slice) -> None:
        for n, run, span in j.spans():
            own = slice(None) if len(j.runs) == 1 else slice(n, n + 1)
            q_index = index["q_idx"][own, :, rows]
            write_keep_mask(tile[own, :, rows, span], seed, dropout_p, index["b"], index["h"], q_index, run.start, run.stop)

    if c.host:
        in_threads(draw, list(pieces(0, tile.shape[2], max(1, PHILOX_STEP // tile[:, :, 0].numel()))))
    else:
        draw(slice(None))
    return bits.neg_()


# ------------------------------------------------------------------------------------------------------------ forward


def forward(t: Operands, r: Rules, out: Outputs) -> None:
    """Fills every buffer of `out`: see `plan.Outputs` for their shapes.

    Auxiliary outputs other than `max_logits` take a second pass over the tiles, since they need the final LSE.
    """
    if out.max_logits is not None:
        out.max_logits.fill_(NEG_INF)
    if out.key_mass is not None:
        out.key_mass.zero_()
    if t.cu_seqlens_q is None:
        forward_chunks(t, r, out, Place())
        return
    packed.blank(t, out)
    for part in packed.parts(t, tile_sizes(t.q.device).block_m, host_reads(t.q.device)):
        results = part.outputs(out)
        forward_chunks(part.operands, r, results, part.place)
        part.put_outputs(results, out)


def forward_chunks(t: Operands, r: Rules, out: Outputs, place: Place) -> None:
    """Fills `out`, but for what is summed over queries or batch items: adds to that."""
    for c in chunks(t, r, tile_sizes(t.q.device), place, tame(t, r)):
        for i in query_tiles(c):
            forward_tile(c, i, out)
        rest = slice(c.len_q, t.q.shape[2])
        out.out[c.b, c.heads, rest].zero_()
        out.lse[c.b, c.heads, rest].fill_(NEG_INF)
        if out.entropy is not None:
            out.entropy[c.b, c.heads, rest].zero_()


def forward_tile(c: Chunk, i: Queries, out: Outputs) -> None:
    """Output and LSE of one tile of queries."""
    t, r = c.t, c.r
    q = load_queries(c, t.q, i) * r.softmax_scale
    m = q.new_full((*q.shape[:2], 1), NEG_INF)
    l = torch.zeros_like(m)
    o = q.new_zeros((*q.shape[:2], t.v.shape[3]))
    for j, hidden in key_tiles(c, i):
        s, hidden, *_ = scores(c, q, load_keys(c, t.k, j, hidden), i, j, hidden)
        p, alpha = online_softmax_update(s, m, l)
        if r.dropout_p > 0:
            as_bits(p).bitwise_and_(dropout_bits(c, p, i, j))
        accumulate(o, alpha, product(c, "pv", p, load_keys(c, t.v, j, hidden)))

    if out.max_logits is not None:
        best = out.max_logits[c.heads]
        torch.maximum(best, c.per_head(m).amax((0, 2, 3)), out=best)
    if t.sink is not None:
        join_sink(c, m, l, o)
    lse = c.per_head(m + l.log())  # (B, H, M, 1); an empty row: -inf + log(0)
    if t.sink is not None and c.lengths is not None:
        lse.masked_fill_(c.rows(i) >= c.lengths[0], NEG_INF)
    o.div_(l.masked_fill_(l == 0, 1.0).mul_(1.0 - r.dropout_p))
    c.put(out.out, i, c.per_head(o))
    c.put(out.lse, i, lse.squeeze(-1))
    if out.key_mass is not None or out.entropy is not None:
        auxiliary_outputs(c, i, q, finite_or_empty(c, lse), out)


def join_sink(c: Chunk, m: Tensor, l: Tensor, o: Tensor) -> None:
    """The sink is one more key, whose value is 0."""
    assert c.t.sink is not None
    sink = c.per_key_tile(c.t.sink[c.heads].to(c.dtype).view(1, -1, 1, 1).expand_as(c.per_head(m)))
    m_new = torch.maximum(m, sink)
    reference = finite(m_new)
    alpha = (m - reference).exp_()
    l.mul_(alpha).add_(sink.sub(reference).exp_())
    o.mul_(alpha)
    m.copy_(m_new)


def finite_or_empty(c: Chunk, lse: Tensor) -> Tensor:
    """(B, H, M, 1) -> (C, R, 1): the LSE to subtract. +inf stands for an empty row, so that exp(s - lse) is 0 for every s."""
    return c.per_key_tile(lse.masked_fill(lse == NEG_INF, float("inf")))


def log_probabilities(s: Tensor, lse: Tensor) -> Tensor:
    """ln p; s becomes s - lse. It is only ever multiplied by p, so where p is 0 any finite number will do: 0 ln 0 counts as 0.

    A bias of -3e38 must not meet the gradient of an entropy as it is: their product may be infinite, and 0 times that is NaN.
    """
    return s.sub_(lse).clamp(min=-1000.0)


def auxiliary_outputs(c: Chunk, i: Queries, q: Tensor, lse: Tensor, out: Outputs) -> None:
    """The second pass: sum of p over queries for each key, and -sum p ln p over keys for each query. P is taken before dropout."""
    entropy = torch.zeros_like(lse)
    weight = row_weights(c, i, q, lse)
    for j, hidden in key_tiles(c, i):
        s = scores(c, q, load_keys(c, c.t.k, j, hidden), i, j, hidden).s
        log_p = log_probabilities(s, lse)
        p = probabilities(s)
        if weight is not None:
            log_p.add_(weight.clamp_min(1e-30).log())  # 0 for an empty row
            p.mul_(weight)
        if out.key_mass is not None:
            c.add_to_keys(out.key_mass, j, c.per_head(p).sum(2))
        if out.entropy is not None:
            entropy.sub_(log_p.mul_(p).sum(-1, keepdim=True))
    if out.entropy is not None:
        c.put(out.entropy, i, c.per_head(entropy).squeeze(-1))


# ------------------------------------------------------------------------------------------------------------ backward


def backward(t: Operands, r: Rules, saved: Saved, cot: Cotangents, grads: Gradients) -> None:
    """Fills every buffer of `grads` that is not None: see `plan.Gradients`. Sums run in one fixed order: the same bits on every run."""
    # Without query heads no chunk writes dk and dv; of packed sequences, none writes rows that belong to nobody.
    untouched = (grads.dq, grads.dk, grads.dv) if t.q.numel() == 0 or t.cu_seqlens_q is not None else ()
    for x in (grads.dbias, grads.dalibi_slopes, grads.dsink, *grads.dcaptured, *untouched):
        if x is not None:
            x.zero_()
    if t.cu_seqlens_q is None:
        backward_chunks(t, r, saved, cot, grads, Place())
        return
    host = host_reads(t.q.device)
    totals = grads if host else packed.wide(grads, t.q.dtype)
    for part in packed.parts(t, tile_sizes(t.q.device).block_m, host):
        results = part.gradients(totals)
        backward_chunks(part.operands, r, part.saved(saved), part.cotangents(cot), results, part.place)
        part.put_gradients(results, totals)
    for grad, total in ((grads.dk, totals.dk), (grads.dv, totals.dv)):
        if grad is not None and total is not None and grad is not total:
            grad.copy_(total)


def backward_chunks(t: Operands, r: Rules, saved: Saved, cot: Cotangents, grads: Gradients, place: Place) -> None:
    """Fills dq, dk and dv, and adds to the gradients of parameters."""
    for c in chunks(t, r, tile_sizes(t.q.device), place, tame(t, r, cot.dout)):
        kv_rows = (c.b.stop - c.b.start) * (c.kv_heads.stop - c.kv_heads.start), t.k.shape[2]
        totals = [None if g is None else torch.zeros(*kv_rows, g.shape[3], dtype=c.dtype, device=g.device) for g in (grads.dk, grads.dv)]
        for i in query_tiles(c):
            backward_tile(c, i, saved, cot, grads, *totals)
        if grads.dq is not None:
            grads.dq[c.b, c.heads, c.len_q :].zero_()
        for grad, total in zip((grads.dk, grads.dv), totals, strict=True):
            if grad is not None and total is not None:
                grad[c.b, c.kv_heads] = total.view(grad[c.b, c.kv_heads].shape)


def backward_tile(c: Chunk, i: Queries, saved: Saved, cot: Cotangents, grads: Gradients, dk: Tensor | None, dv: Tensor | None) -> None:
    """What one tile of queries adds to every gradient. dk (C, Sk, D) and dv (C, Sk, Dv) are running sums in the accumulator dtype."""
    t, r = c.t, c.r
    lse = c.take(saved.lse, i).unsqueeze(-1)  # (B, H, M, 1)
    empty: Tensor | None = lse == NEG_INF
    if c.host and empty is not None and not empty.any():
        empty = None
    lse = finite_or_empty(c, lse)
    q = load_queries(c, t.q, i, empty) * r.softmax_scale
    dout = None if cot.dout is None else load_queries(c, cot.dout, i, empty)
    weight = row_weights(c, i, q, lse)
    delta = row_terms(c, i, q, lse, empty, dout, saved, cot, weight)
    if weight is not None:
        delta.mul_(weight)
        dout = None if dout is None else dout * weight
    if grads.dsink is not None:
        add_sink_gradient(c, lse, delta, grads.dsink)
    if dout is not None and r.dropout_p > 0:
        dout = dout / (1.0 - r.dropout_p)

    dq = torch.zeros_like(q)
    need_ds = dk is not None or any(x is not None for x in (grads.dq, grads.dbias, grads.dalibi_slopes, *grads.dcaptured))
    for j, hidden in key_tiles(c, i):
        k = load_keys(c, t.k, j, hidden)
        tile = scores(c, q, k, i, j, hidden, keep=True)
        daux = auxiliary_cotangents(c, i, j, tile.s, lse, cot)
        if daux is not None and weight is not None:
            daux.mul_(weight)
        p = probabilities(tile.s if daux is not None else tile.s.sub_(lse))
        kept = dropout_bits(c, p, i, j) if r.dropout_p > 0 else None
        dp = None
        if dout is not None and need_ds:
            v = load_keys(c, t.v, j, tile.hidden)
            dp = product(c, "dp", dout, v.mT)
            if kept is not None:
                as_bits(dp).bitwise_and_(kept)
        if need_ds:
            ds = score_gradients(c, p, dp, daux, delta)
            if r.score_mod:
                k = load_keys(c, t.k, j, tile.hidden)
            add_parameter_gradients(c, i, j, tile, ds, grads)
            dq.add_(product(c, "dq", ds, k))
            if dk is not None:
                add_to_keys(c, dk, ds, q, j)
        if dv is not None and dout is not None:
            if kept is not None:
                as_bits(p).bitwise_and_(kept)
            add_to_keys(c, dv, p, dout, j)
    if grads.dq is not None:
        c.put(grads.dq, i, c.per_head(dq.mul_(r.softmax_scale)))


def row_weights(c: Chunk, i: Queries, q: Tensor, lse: Tensor) -> Tensor | None:
    """1 / sum_j exp(s_ij - lse_i), (C, R, 1), where that is not 1 within rounding; None where it is for every row.

    -1e9 + ln 4 is -1e9 in float32: the LSE of a row of very low (or high) scores has lost the logarithm of its sum. The factor belongs to
    the row, so it is given to dout and D_i instead of to every probability.
    """
    if host_reads(lse.device):
        large = 2.0 ** (40 if lse.dtype == torch.float64 else 11)  # from here on a last digit is 1e-4 or more
        if not bool(((lse.abs() > large) & lse.isfinite()).any()):
            return None
    elif c.t.bias is None and not c.r.score_mod:
        return None
    total = torch.zeros_like(lse)
    for j, hidden in key_tiles(c, i):
        s = scores(c, q, load_keys(c, c.t.k, j, hidden), i, j, hidden).s
        total.add_(probabilities(s.sub_(lse)).sum(-1, keepdim=True))
    if c.t.sink is not None:
        sink = c.per_key_tile(c.t.sink[c.heads].to(c.dtype).view(1, -1, 1, 1).expand_as(c.per_head(lse)))
        total.add_((sink - lse).exp_())
    return torch.where(total == 0, 0.0, 1.0 / total)


def row_terms(
    c: Chunk,
    i: Queries,
    q: Tensor,
    lse: Tensor,
    empty: Tensor | None,
    dout: Tensor | None,
    saved: Saved,
    cot: Cotangents,
    weight: Tensor | None,
) -> Tensor:
    """D_i = sum_j p_ij dp_ij - dlse_i, (C, R, 1): the part of dS that a whole row shares. sum_j p_ij (dout_i . v_j) is out_i . dout_i."""
    delta = torch.zeros_like(lse)
    if dout is not None:
        delta.add_((load_queries(c, saved.out, i, empty) * dout).sum(-1, keepdim=True))
    if cot.dlse is not None:
        delta.sub_(load_queries(c, cot.dlse.unsqueeze(-1), i, empty))
    if cot.dkey_mass is not None or cot.dentropy is not None:
        for j, hidden in key_tiles(c, i):
            s = scores(c, q, load_keys(c, c.t.k, j, hidden), i, j, hidden).s
            daux = auxiliary_cotangents(c, i, j, s, lse, cot)
            assert daux is not None
            share = daux.mul_(probabilities(s)).sum(-1, keepdim=True)
            delta.add_(share if weight is None else share.mul_(weight))
    return delta


def auxiliary_cotangents(c: Chunk, i: Queries, j: Keys, s: Tensor, lse: Tensor, cot: Cotangents) -> Tensor | None:
    """The derivative of the loss with respect to p_ij through key_mass and entropy, (C, R, N); leaves ln p in the memory of s."""
    if cot.dkey_mass is None and cot.dentropy is None:
        return None
    log_p = log_probabilities(s, lse)
    hidden = s == NEG_INF
    daux = log_p.zero_() if cot.dentropy is None else log_p.add_(1.0).mul_(load_queries(c, cot.dentropy.unsqueeze(-1), i)).neg_()
    if cot.dkey_mass is not None:
        c.per_head(daux).add_(j.take(cot.dkey_mass[c.b, c.heads], 2).unsqueeze(2))
    return daux.masked_fill_(hidden, 0.0)


def score_gradients(c: Chunk, p: Tensor, dp: Tensor | None, daux: Tensor | None, delta: Tensor) -> Tensor:
    """dS = P (dP - D), in a buffer of its own."""
    if dp is None:
        dp = c.buffer("dp", *p.shape).zero_()
    if daux is not None:
        dp.add_(daux)
    return dp.sub_(delta).mul_(p)


def add_parameter_gradients(c: Chunk, i: Queries, j: Keys, tile: Scores, ds: Tensor, grads: Gradients) -> None:
    """Walks back from the final score to the scaled product, in place in `ds`, and adds to each parameter's gradient on the way."""
    t, r = c.t, c.r
    ds_tile = c.per_head(ds)
    if r.score_mod:
        dscore, _ = program(r.score_mod).vjp({"score": tile.raw, **indices(c, i, j)}, t.captured, ds_tile, grads.dcaptured, c.memory)
        ds_tile.copy_(dscore)
    if grads.dbias is not None:
        add_bias_gradient(c, i, j, ds_tile, grads.dbias)
    if grads.dalibi_slopes is not None:
        total = c.part(grads.dalibi_slopes)
        total.sub_((ds_tile * distances(c, i, j)).sum((2, 3)).sum_to_size(total.shape))
    if tile.tanh is not None:
        ds.addcmul_(ds, tile.tanh.square_(), value=-1)


def add_bias_gradient(c: Chunk, i: Queries, j: Keys, ds: Tensor, dbias: Tensor) -> None:
    """dbias += ds, (B, H, M, N), summed over what the bias is broadcast along."""
    for n, run, span in j.spans():
        rows, part = c.part(dbias, i.runs[n]), ds[..., span] if len(j.runs) == 1 else ds[n : n + 1, ..., span]
        total = rows if rows.shape[3] == 1 else rows[..., run]
        if total.dtype != c.dtype:  # of full size: no other tile has a part in it, and torch takes five times as long for a 16-bit sum
            total.copy_(part)
        else:
            total.add_(part.sum_to_size(total.shape))


def add_sink_gradient(c: Chunk, lse: Tensor, delta: Tensor, dsink: Tensor) -> None:
    """The sink has a probability and no value: its dS is -p D, summed over everything it serves."""
    assert c.t.sink is not None
    p = (c.t.sink[c.heads].to(c.dtype).view(1, -1, 1, 1) - c.per_head(lse)).exp_()
    dsink[c.heads].sub_((p * c.per_head(delta)).sum((0, 2, 3)))


def add_to_keys(c: Chunk, total: Tensor, x: Tensor, rows: Tensor, j: Keys) -> None:
    """total[:, j] += x^T rows, for x (C, R, N) and rows (C, R, D), summed over the query heads of each key head."""
    each = product(c, "keys", x.mT, rows)
    if c.own_keys:
        each = each.unflatten(0, (-1, c.group)).sum(1)
    j.add(total, each)
