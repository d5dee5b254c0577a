"""The tangents of dK and dV: one program a tile of keys, which walks the queries that see it, over all query heads that read it."""

from __future__ import annotations

import triton
import triton.language as tl

from ..launch import RUNTIME
from ..tiles import NEG_INF, ROW_BLOCK, head_of, load_matrix, load_tile, query_tile_range, store_tile, used_length
from .steps import (
    OWN,
    drop_pairs,
    kept_pairs,
    load_moving,
    load_seen,
    matrix_at,
    moving_probability_gradients,
    moving_product_gradients,
    moving_score_gradients,
    moving_scores,
    slope_at,
)


@triton.jit
def walk_queries(
    tdk, tdv, bias_cols, k, tk, v, tv, q, tq, do, tdo, rows, offs_n, n0, lo, hi, span, rules, bias, mask, tbias, tslope, drop, keep_scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WANT_DK: tl.constexpr, WANT_DV: tl.constexpr, WANT_COLS: tl.constexpr,
    SANITIZE: tl.constexpr, DENSE: tl.constexpr, PRECISION: tl.constexpr, FRUGAL: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Add what queries [lo, hi) of one head contribute to a tile of keys. Tiles are transposed, [N, M]: all four products then take what
    comes of the probabilities as their left operand, from registers."""
    MASKED: tl.constexpr = CUT or DENSE
    len_q = span[0]
    lse_ptr, rest_ptr, tlse_ptr, delta_ptr, tdelta_ptr = rows
    # What `load_seen` reads depends on the scores of its own turn: Triton 3.6 fails to compile a pipeline over it.
    for m0 in tl.range(lo, hi, BLOCK_M, num_stages=1 if MASKED else None, disable_licm=FRUGAL):
        offs_m = m0 + tl.arange(0, BLOCK_M)
        q_tile = load_tile(q, m0, len_q, BLOCK_M, BLOCK_D, D, False, True, FRUGAL)  # [M, D]
        tq_tile = load_moving(tq, m0, len_q, BLOCK_M, BLOCK_D, D, True, FRUGAL)
        bias_tile = load_matrix(bias, offs_m, offs_n, span, True, CUT)
        mask_tile = load_matrix(mask, offs_m, offs_n, span, True, CUT)
        tbias_tile = load_matrix(tbias, offs_m, offs_n, span, True, CUT)
        rest = None
        if rest_ptr is not None:
            rest = tl.load(rest_ptr + offs_m)[None, :]
        lse, tlse = tl.load(lse_ptr + offs_m)[None, :], tl.load(tlse_ptr + offs_m)[None, :]  # each [1, M]
        s, p, ts, traw, capped = moving_scores(
            k, tk, q_tile, tq_tile, lse, rest, offs_m, offs_n, span, rules, bias_tile, mask_tile, tbias_tile, tslope,
            SANITIZE, SANITIZE, True, CUT, MASKED, PRECISION)  # fmt: skip
        do_tile = load_moving(do, m0, len_q, BLOCK_M, BLOCK_DV, DV, True, FRUGAL)  # [M, DV]
        tdo_tile = load_moving(tdo, m0, len_q, BLOCK_M, BLOCK_DV, DV, True, FRUGAL)
        keep = kept_pairs(offs_m, n0, BLOCK_N, drop, True)
        dp, tdp = moving_probability_gradients(v, tv, do_tile, tdo_tile, keep, keep_scale, s, PRECISION)
        delta, tdelta = tl.load(delta_ptr + offs_m)[None, :], tl.load(tdelta_ptr + offs_m)[None, :]
        tp, ds, tds = moving_score_gradients(s, p, ts, dp, tdp, tlse, delta, tdelta, MASKED)
        if WANT_COLS:
            bias_cols += tl.sum(tds, 1)
        if WANT_DV:
            if do[0] is not None:
                if MASKED and SANITIZE:
                    do_tile = load_seen(do, m0, len_q, s != NEG_INF, BLOCK_M, BLOCK_DV, DV, FRUGAL)
                tdv = tl.dot(drop_pairs(tp, keep).to(do_tile.dtype), do_tile, tdv, input_precision=PRECISION)  # [N, DV]
            if tdo[0] is not None:
                if MASKED and SANITIZE:
                    tdo_tile = load_seen(tdo, m0, len_q, s != NEG_INF, BLOCK_M, BLOCK_DV, DV, FRUGAL)
                tdv = tl.dot(drop_pairs(p, keep).to(tdo_tile.dtype), tdo_tile, tdv, input_precision=PRECISION)
        if WANT_DK:
            ds, tds = moving_product_gradients(s, ds, tds, traw, capped, rules, MASKED)
            if MASKED and SANITIZE:
                q_tile = load_seen(q, m0, len_q, s != NEG_INF, BLOCK_M, BLOCK_D, D, FRUGAL)
            tdk = tl.dot(tds.to(q_tile.dtype), q_tile, tdk, input_precision=PRECISION)  # [N, D]
            if tq[0] is not None:
                if MASKED and SANITIZE:
                    tq_tile = load_seen(tq, m0, len_q, s != NEG_INF, BLOCK_M, BLOCK_D, D, FRUGAL)
                tdk = tl.dot(ds.to(tq_tile.dtype), tq_tile, tdk, input_precision=PRECISION)
    return tdk, tdv, bias_cols


@triton.jit
def one_head(
    tdk, tdv, k, tk, v, tv, arrays, matrices, slopes, rows, bias_cols_ptr, b, h, n0, heads, row_blocks, size_k, span, scale, softcap,
    seed_ptr, dropout_threshold, keep_scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WANT_DK: tl.constexpr, WANT_DV: tl.constexpr, ALIGN: tl.constexpr, BIAS_ALIGN: tl.constexpr, MASK_ALIGN: tl.constexpr,
    SANITIZE: tl.constexpr, DENSE: tl.constexpr, PRECISION: tl.constexpr, FRUGAL: tl.constexpr,
):  # fmt: skip
    """What one query head adds to the tangents of dK and dV of a tile of keys, and its own sums over queries for a bias that all share."""
    len_k, window_left, window_right = span[1], span[2], span[3]
    at_q = (b, h, None)
    x, tx, y, ty = arrays
    q = (head_of(x[0], at_q, x[1], x[2], x[3], ALIGN, False), x[3] * ALIGN, x[4], at_q)
    tq = (None if tx[0] is None else head_of(tx[0], at_q, tx[1], tx[2], tx[3], ALIGN, False), tx[3] * ALIGN, tx[4], at_q)
    do = (None if y[0] is None else head_of(y[0], at_q, y[1], y[2], y[3], ALIGN, False), y[3] * ALIGN, y[4], at_q)
    tdo = (None if ty[0] is None else head_of(ty[0], at_q, ty[1], ty[2], ty[3], ALIGN, False), ty[3] * ALIGN, ty[4], at_q)
    bias = matrix_at(matrices[0], b, h, BIAS_ALIGN)
    mask = matrix_at(matrices[1], b, h, MASK_ALIGN)
    tbias = matrix_at(matrices[2], b, h, 1)
    slope, tslope, drop, rest = None, None, None, None
    if slopes[0] is not None:
        slope = slope_at(slopes[0], b, h, slopes[1], slopes[2])
    if slopes[3] is not None:
        tslope = slope_at(slopes[3], b, h, slopes[4], slopes[5])
    if seed_ptr is not None:
        drop = (tl.load(seed_ptr), dropout_threshold, b, h)
    rules = (scale, softcap, slope, None)
    head = (b * heads + h).to(tl.int64)
    first = head * (row_blocks * ROW_BLOCK)
    if rows[1] is not None:
        rest = rows[1] + first
    own_rows = (rows[0] + first, rest, rows[2] + first, rows[3] + first, rows[4] + first)
    offs_n = n0 + tl.arange(0, BLOCK_N)
    cols = tl.zeros([BLOCK_N], tl.float32)
    TAIL: tl.constexpr = SANITIZE or window_left is not None
    lo, full_lo, full_hi, hi = query_tile_range(n0, span, BLOCK_M, BLOCK_N, TAIL)
    if DENSE:  # a tile of keys that the length cuts is cut at every query
        full_hi = tl.where(n0 + BLOCK_N <= len_k, full_hi, full_lo)
    starts, stops = (full_lo, lo, full_hi), (full_hi, full_lo, hi)
    for part in tl.static_range(3):
        if (part == 2 and TAIL) or part == 0 or (part == 1 and window_right is not None):
            tdk, tdv, cols = walk_queries(
                tdk, tdv, cols, k, tk, v, tv, q, tq, do, tdo, own_rows, offs_n, n0, starts[part], stops[part], span, rules, bias, mask,
                tbias, tslope, drop, keep_scale, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, WANT_DK, WANT_DV,
                bias_cols_ptr is not None, SANITIZE, DENSE, PRECISION, FRUGAL, part != 0)  # fmt: skip
    if bias_cols_ptr is not None:
        tl.store(bias_cols_ptr + head * size_k + offs_n, tl.where(offs_n < len_k, cols, 0.0), mask=offs_n < size_k)
    return tdk, tdv


@triton.jit(do_not_specialize=RUNTIME + OWN)
def attention_dkdv_tangent(
    q_ptr, k_ptr, v_ptr, do_ptr, tq_ptr, tk_ptr, tv_ptr, tdo_ptr, tdk_ptr, tdv_ptr,
    row_lse_ptr, rest_ptr, row_tlse_ptr, delta_ptr, tdelta_ptr, bias_cols_ptr,
    stride_qb: tl.int64, stride_qh: tl.int64, stride_qs: tl.int64, stride_qd,
    stride_kb: tl.int64, stride_kh: tl.int64, stride_ks: tl.int64, stride_kd,
    stride_vb: tl.int64, stride_vh: tl.int64, stride_vs: tl.int64, stride_vd,
    stride_dob: tl.int64, stride_doh: tl.int64, stride_dos: tl.int64, stride_dod,
    stride_tqb: tl.int64, stride_tqh: tl.int64, stride_tqs: tl.int64, stride_tqd,
    stride_tkb: tl.int64, stride_tkh: tl.int64, stride_tks: tl.int64, stride_tkd,
    stride_tvb: tl.int64, stride_tvh: tl.int64, stride_tvs: tl.int64, stride_tvd,
    stride_tdob: tl.int64, stride_tdoh: tl.int64, stride_tdos: tl.int64, stride_tdod,
    stride_tdkb: tl.int64, stride_tdkh: tl.int64, stride_tdks: tl.int64, stride_tdkd,
    stride_tdvb: tl.int64, stride_tdvh: tl.int64, stride_tdvs: tl.int64, stride_tdvd,
    tbias_ptr, stride_tbias_b: tl.int64, stride_tbias_h: tl.int64, stride_tbias_m: tl.int64, stride_tbias_n,
    tslopes_ptr, stride_tslopes_b, stride_tslopes_h,
    bias_ptr, stride_bias_b: tl.int64, stride_bias_h: tl.int64, stride_bias_m: tl.int64, stride_bias_n,
    mask_ptr, stride_mask_b: tl.int64, stride_mask_h: tl.int64, stride_mask_m: tl.int64, stride_mask_n,
    slopes_ptr, stride_slopes_b, stride_slopes_h, seqused_q_ptr, seqused_k_ptr, seed_ptr,
    heads, group, size_q, size_k, row_blocks, scale, softcap, window_left, window_right, dropout_threshold: tl.int64, keep_scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUPED: tl.constexpr, ALIGN: tl.constexpr, BIAS_ALIGN: tl.constexpr, MASK_ALIGN: tl.constexpr,
    SANITIZE: tl.constexpr, DENSE: tl.constexpr, PRECISION: tl.constexpr, FRUGAL: tl.constexpr,
):  # fmt: skip
    """How one tile of dK and dV moves, over all query heads that read it. Under a causal mask the first tiles are the longest."""
    num_n = tl.cdiv(size_k, BLOCK_N)
    tile, bh = tl.program_id(0) % num_n, tl.program_id(0) // num_n
    heads_k = heads // group
    b, head_k, n0 = bh // heads_k, bh % heads_k, tile * BLOCK_N
    len_q, len_k = used_length(seqused_q_ptr, b, size_q), used_length(seqused_k_ptr, b, size_k)
    span = (len_q, len_k, window_left, window_right)
    at_k = (b, head_k, None)
    k_source = (head_of(k_ptr, at_k, stride_kb, stride_kh, stride_ks, ALIGN, False), stride_ks * ALIGN, stride_kd, at_k)
    tk_source = (
        None if tk_ptr is None else head_of(tk_ptr, at_k, stride_tkb, stride_tkh, stride_tks, ALIGN, False),
        stride_tks * ALIGN,
        stride_tkd,
        at_k,
    )
    v_source = (head_of(v_ptr, at_k, stride_vb, stride_vh, stride_vs, ALIGN, False), stride_vs * ALIGN, stride_vd, at_k)
    tv_source = (
        None if tv_ptr is None else head_of(tv_ptr, at_k, stride_tvb, stride_tvh, stride_tvs, ALIGN, False),
        stride_tvs * ALIGN,
        stride_tvd,
        at_k,
    )
    k = load_tile(k_source, n0, len_k, BLOCK_N, BLOCK_D, D, False, True)  # [N, D]
    tk = load_moving(tk_source, n0, len_k, BLOCK_N, BLOCK_D, D, True, False)
    v = load_tile(v_source, n0, len_k, BLOCK_N, BLOCK_DV, DV, False, True)  # [N, DV]
    tv = load_moving(tv_source, n0, len_k, BLOCK_N, BLOCK_DV, DV, True, False)
    arrays = (
        (q_ptr, stride_qb, stride_qh, stride_qs, stride_qd),
        (tq_ptr, stride_tqb, stride_tqh, stride_tqs, stride_tqd),
        (do_ptr, stride_dob, stride_doh, stride_dos, stride_dod),
        (tdo_ptr, stride_tdob, stride_tdoh, stride_tdos, stride_tdod),
    )
    matrices = (
        (bias_ptr, stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n),
        (mask_ptr, stride_mask_b, stride_mask_h, stride_mask_m, stride_mask_n),
        (tbias_ptr, stride_tbias_b, stride_tbias_h, stride_tbias_m, stride_tbias_n),
    )
    slopes = (slopes_ptr, stride_slopes_b, stride_slopes_h, tslopes_ptr, stride_tslopes_b, stride_tslopes_h)
    rows = (row_lse_ptr, rest_ptr, row_tlse_ptr, delta_ptr, tdelta_ptr)
    tdk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    tdv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    # One head needs no loop around the loops, which the software pipeliner would have to see through.
    if GROUPED:
        for g in tl.range(0, group, num_stages=1, disable_licm=FRUGAL):
            tdk, tdv = one_head(
                tdk, tdv, k, tk, v, tv, arrays, matrices, slopes, rows, bias_cols_ptr, b, head_k * group + g, n0, heads, row_blocks,
                size_k, span, scale, softcap, seed_ptr, dropout_threshold, keep_scale, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N,
                tdk_ptr is not None, tdv_ptr is not None, ALIGN, BIAS_ALIGN, MASK_ALIGN, SANITIZE, DENSE, PRECISION, FRUGAL)  # fmt: skip
    else:
        tdk, tdv = one_head(
            tdk, tdv, k, tk, v, tv, arrays, matrices, slopes, rows, bias_cols_ptr, b, head_k, n0, heads, row_blocks,
            size_k, span, scale, softcap, seed_ptr, dropout_threshold, keep_scale, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N,
            tdk_ptr is not None, tdv_ptr is not None, ALIGN, BIAS_ALIGN, MASK_ALIGN, SANITIZE, DENSE, PRECISION, FRUGAL)  # fmt: skip
    used = (n0 + tl.arange(0, BLOCK_N) < len_k)[:, None]
    if tdk_ptr is not None:
        target = (head_of(tdk_ptr, at_k, stride_tdkb, stride_tdkh, stride_tdks, ALIGN, False), stride_tdks * ALIGN, stride_tdkd, at_k)
        store_tile(target, tl.where(used, tdk * scale, 0.0), n0, size_k, BLOCK_N, BLOCK_D, D)
    if tdv_ptr is not None:
        target = (head_of(tdv_ptr, at_k, stride_tdvb, stride_tdvh, stride_tdvs, ALIGN, False), stride_tdvs * ALIGN, stride_tdvd, at_k)
        store_tile(target, tl.where(used, tdv * keep_scale, 0.0), n0, size_k, BLOCK_N, BLOCK_DV, DV)
