"""The tangent of dQ: one program a tile of queries, which walks the keys that they see."""

from __future__ import annotations

import triton
import triton.language as tl

from ..launch import RUNTIME
from ..tiles import (
    NEG_INF,
    ROW_BLOCK,
    distances,
    head_of,
    inside_matrix,
    key_tile_range,
    load_matrix,
    load_tile,
    matrix_pointers,
    store_tile,
    used_length,
)
from .steps import (
    OWN,
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
def walk_keys(
    tdq, bias_rows, slope_rows, q, tq, do, tdo, lse, rest, tlse, delta, tdelta, k, tk, v, tv, offs_m, lo, hi, span, rules, bias, mask,
    tbias, tslope, drop, keep_scale, dbias,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
    WANT_DQ: tl.constexpr, WANT_BIAS_ROWS: tl.constexpr, WANT_SLOPE_ROWS: tl.constexpr,
    SANITIZE: tl.constexpr, DENSE: tl.constexpr, PRECISION: tl.constexpr, FRUGAL: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Add what keys [lo, hi) contribute to a tile of queries."""
    MASKED: tl.constexpr = CUT or DENSE
    len_k = span[1]
    # What `load_seen` reads depends on the scores of its own turn: Triton 3.6 fails to compile a pipeline over it.
    for n0 in tl.range(lo, hi, BLOCK_N, num_stages=1 if MASKED else None, disable_licm=FRUGAL):
        offs_n = n0 + tl.arange(0, BLOCK_N)
        k_tile = load_tile(k, n0, len_k, BLOCK_N, BLOCK_D, D, False, CUT, FRUGAL)  # [N, D]
        tk_tile = load_moving(tk, n0, len_k, BLOCK_N, BLOCK_D, D, CUT, FRUGAL)
        bias_tile = load_matrix(bias, offs_m, offs_n, span, False, CUT)
        mask_tile = load_matrix(mask, offs_m, offs_n, span, False, CUT)
        tbias_tile = load_matrix(tbias, offs_m, offs_n, span, False, CUT)
        s, p, ts, traw, capped = moving_scores(
            q, tq, k_tile, tk_tile, lse, rest, offs_m, offs_n, span, rules, bias_tile, mask_tile, tbias_tile, tslope,
            SANITIZE, True, False, CUT, MASKED, PRECISION)  # fmt: skip
        v_tile = load_tile(v, n0, len_k, BLOCK_N, BLOCK_DV, DV, False, CUT, FRUGAL)  # [N, DV]
        tv_tile = load_moving(tv, n0, len_k, BLOCK_N, BLOCK_DV, DV, CUT, FRUGAL)
        keep = kept_pairs(offs_m, n0, BLOCK_N, drop, False)
        dp, tdp = moving_probability_gradients(do, tdo, v_tile, tv_tile, keep, keep_scale, s, PRECISION)
        _tp, ds, tds = moving_score_gradients(s, p, ts, dp, tdp, tlse, delta, tdelta, MASKED)
        if WANT_BIAS_ROWS:
            bias_rows += tl.sum(tds, 1)
        if WANT_SLOPE_ROWS:
            slope_rows -= tl.sum(tds * distances(offs_m, offs_n, span, False), 1)
        if dbias is not None:
            tl.store(matrix_pointers(dbias, offs_m, offs_n), tds, mask=inside_matrix(offs_m, offs_n, span, CUT))
        if WANT_DQ:
            ds, tds = moving_product_gradients(s, ds, tds, traw, capped, rules, MASKED)
            if MASKED and SANITIZE:
                k_tile = load_seen(k, n0, len_k, s != NEG_INF, BLOCK_N, BLOCK_D, D, FRUGAL)
            tdq = tl.dot(tds.to(k_tile.dtype), k_tile, tdq, input_precision=PRECISION)  # [M, D]
            if tk[0] is not None:
                if MASKED and SANITIZE:
                    tk_tile = load_seen(tk, n0, len_k, s != NEG_INF, BLOCK_N, BLOCK_D, D, FRUGAL)
                tdq = tl.dot(ds.to(tk_tile.dtype), tk_tile, tdq, input_precision=PRECISION)
    return tdq, bias_rows, slope_rows


@triton.jit(do_not_specialize=RUNTIME + OWN)
def attention_dq_tangent(
    q_ptr, k_ptr, v_ptr, do_ptr, tq_ptr, tk_ptr, tv_ptr, tdo_ptr, tdq_ptr, row_lse_ptr, rest_ptr, row_tlse_ptr, delta_ptr, tdelta_ptr,
    bias_rows_ptr, slope_rows_ptr,
    stride_qb: tl.int64, stride_qh: tl.int64, stride_qs: tl.int64, stride_qd,
    stride_kb: tl.int64, stride_kh: tl.int64, stride_ks: tl.int64, stride_kd,
    stride_vb: tl.int64, stride_vh: tl.int64, stride_vs: tl.int64, stride_vd,
    stride_dob: tl.int64, stride_doh: tl.int64, stride_dos: tl.int64, stride_dod,
    stride_tqb: tl.int64, stride_tqh: tl.int64, stride_tqs: tl.int64, stride_tqd,
    stride_tkb: tl.int64, stride_tkh: tl.int64, stride_tks: tl.int64, stride_tkd,
    stride_tvb: tl.int64, stride_tvh: tl.int64, stride_tvs: tl.int64, stride_tvd,
    stride_tdob: tl.int64, stride_tdoh: tl.int64, stride_tdos: tl.int64, stride_tdod,
    stride_tdqb: tl.int64, stride_tdqh: tl.int64, stride_tdqs: tl.int64, stride_tdqd,
    dbias_ptr, stride_dbias_b: tl.int64, stride_dbias_h: tl.int64, stride_dbias_m: tl.int64, stride_dbias_n,
    tbias_ptr, stride_tbias_b: tl.int64, stride_tbias_h: tl.int64, stride_tbias_m: tl.int64, stride_tbias_n,
    tslopes_ptr, stride_tslopes_b, stride_tslopes_h,
    bias_ptr, stride_bias_b: tl.int64, stride_bias_h: tl.int64, stride_bias_m: tl.int64, stride_bias_n,
    mask_ptr, stride_mask_b: tl.int64, stride_mask_h: tl.int64, stride_mask_m: tl.int64, stride_mask_n,
    slopes_ptr, stride_slopes_b, stride_slopes_h, seqused_q_ptr, seqused_k_ptr, seed_ptr,
    heads, group, size_q, size_k, row_blocks, scale, softcap, window_left, window_right, dropout_threshold: tl.int64, keep_scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ALIGN: tl.constexpr, BIAS_ALIGN: tl.constexpr, MASK_ALIGN: tl.constexpr, DBIAS_ALIGN: tl.constexpr,
    SANITIZE: tl.constexpr, DENSE: tl.constexpr, PRECISION: tl.constexpr, FRUGAL: tl.constexpr,
):  # fmt: skip
    """How one tile of dQ moves, and the sums over keys that a bias with one column and the ALiBi slopes need."""
    num_m = tl.cdiv(size_q, BLOCK_M)
    tile, bh = tl.program_id(0) % num_m, tl.program_id(0) // num_m
    if window_right is not None:
        tile = num_m - 1 - tile
    b, h, m0 = bh // heads, bh % heads, tile * BLOCK_M
    len_q, len_k = used_length(seqused_q_ptr, b, size_q), used_length(seqused_k_ptr, b, size_k)
    span = (len_q, len_k, window_left, window_right)
    offs_m = m0 + tl.arange(0, BLOCK_M)
    inside = offs_m < len_q
    at_q, at_k = (b, h, None), (b, h // group, None)
    k = (head_of(k_ptr, at_k, stride_kb, stride_kh, stride_ks, ALIGN, False), stride_ks * ALIGN, stride_kd, at_k)
    tk = (
        None if tk_ptr is None else head_of(tk_ptr, at_k, stride_tkb, stride_tkh, stride_tks, ALIGN, False),
        stride_tks * ALIGN,
        stride_tkd,
        at_k,
    )
    v = (head_of(v_ptr, at_k, stride_vb, stride_vh, stride_vs, ALIGN, False), stride_vs * ALIGN, stride_vd, at_k)
    tv = (
        None if tv_ptr is None else head_of(tv_ptr, at_k, stride_tvb, stride_tvh, stride_tvs, ALIGN, False),
        stride_tvs * ALIGN,
        stride_tvd,
        at_k,
    )
    bias = matrix_at((bias_ptr, stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n), b, h, BIAS_ALIGN)
    mask = matrix_at((mask_ptr, stride_mask_b, stride_mask_h, stride_mask_m, stride_mask_n), b, h, MASK_ALIGN)
    tbias = matrix_at((tbias_ptr, stride_tbias_b, stride_tbias_h, stride_tbias_m, stride_tbias_n), b, h, 1)
    dbias = matrix_at((dbias_ptr, stride_dbias_b, stride_dbias_h, stride_dbias_m, stride_dbias_n), b, h, DBIAS_ALIGN)
    slope, tslope, drop, rest = None, None, None, None
    if slopes_ptr is not None:
        slope = slope_at(slopes_ptr, b, h, stride_slopes_b, stride_slopes_h)
    if tslopes_ptr is not None:
        tslope = slope_at(tslopes_ptr, b, h, stride_tslopes_b, stride_tslopes_h)
    if seed_ptr is not None:
        drop = (tl.load(seed_ptr), dropout_threshold, b, h)
    rules = (scale, softcap, slope, None)
    rows = bh.to(tl.int64) * (row_blocks * ROW_BLOCK) + offs_m
    if rest_ptr is not None:
        rest = tl.load(rest_ptr + rows)[:, None]
    lse, tlse = tl.load(row_lse_ptr + rows)[:, None], tl.load(row_tlse_ptr + rows)[:, None]  # each [M, 1]
    delta, tdelta = tl.load(delta_ptr + rows)[:, None], tl.load(tdelta_ptr + rows)[:, None]
    q_source = (head_of(q_ptr, at_q, stride_qb, stride_qh, stride_qs, ALIGN, False), stride_qs * ALIGN, stride_qd, at_q)
    tq_source = (
        None if tq_ptr is None else head_of(tq_ptr, at_q, stride_tqb, stride_tqh, stride_tqs, ALIGN, False),
        stride_tqs * ALIGN,
        stride_tqd,
        at_q,
    )
    do_source = (
        None if do_ptr is None else head_of(do_ptr, at_q, stride_dob, stride_doh, stride_dos, ALIGN, False),
        stride_dos * ALIGN,
        stride_dod,
        at_q,
    )
    tdo_source = (
        None if tdo_ptr is None else head_of(tdo_ptr, at_q, stride_tdob, stride_tdoh, stride_tdos, ALIGN, False),
        stride_tdos * ALIGN,
        stride_tdod,
        at_q,
    )
    q = load_tile(q_source, m0, len_q, BLOCK_M, BLOCK_D, D, False, True)  # [M, D]
    tq = load_moving(tq_source, m0, len_q, BLOCK_M, BLOCK_D, D, True, False)
    do = load_moving(do_source, m0, len_q, BLOCK_M, BLOCK_DV, DV, True, False)  # [M, DV]
    tdo = load_moving(tdo_source, m0, len_q, BLOCK_M, BLOCK_DV, DV, True, False)
    tdq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    bias_rows, slope_rows = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)

    ends = key_tile_range(m0, span, BLOCK_M, BLOCK_N)
    for part in tl.static_range(3):
        if part > 0 or window_left is not None:
            tdq, bias_rows, slope_rows = walk_keys(
                tdq, bias_rows, slope_rows, q, tq, do, tdo, lse, rest, tlse, delta, tdelta, k, tk, v, tv, offs_m, ends[part],
                ends[part + 1], span, rules, bias, mask, tbias, tslope, drop, keep_scale, dbias, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N,
                tdq_ptr is not None, bias_rows_ptr is not None, slope_rows_ptr is not None, SANITIZE, DENSE, PRECISION, FRUGAL,
                part != 1)  # fmt: skip

    if tdq_ptr is not None:
        target = (head_of(tdq_ptr, at_q, stride_tdqb, stride_tdqh, stride_tdqs, ALIGN, False), stride_tdqs * ALIGN, stride_tdqd, at_q)
        store_tile(target, tl.where(inside[:, None], tdq * scale, 0.0), m0, size_q, BLOCK_M, BLOCK_D, D)
    sums = bh.to(tl.int64) * size_q + offs_m
    if bias_rows_ptr is not None:
        tl.store(bias_rows_ptr + sums, tl.where(inside, bias_rows, 0.0), mask=offs_m < size_q)
    if slope_rows_ptr is not None:
        tl.store(slope_rows_ptr + sums, tl.where(inside, slope_rows, 0.0), mask=offs_m < size_q)
