"""What the tangent of the backward pass needs to know of each query, from one walk over the keys that it sees.

With dP the gradients of a row's probabilities P, the backward pass needs D = sum P dP - dlse, and its tangent also how the LSE and D move:
tlse = sum P ts and tD = sum (tP dP + P tdP) - tdlse, where tP = P (ts - tlse). A sink is one more key, whose value and so whose dP is zero.

tD is a covariance, for which two sums of one walk are enough: sum tP = 0, so that dP may be counted from any origin c,
sum tP dP = sum P ts (dP - c) - tlse sum P (dP - c). c is what the saved output says that sum P dP is: nothing large cancels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl

from ..launch import RUNTIME
from ..tiles import LOG2E, NEG_INF, ROW_BLOCK, head_of, key_tile_range, load_matrix, load_tile, used_length
from .steps import OWN, kept_pairs, load_moving, matrix_at, moving_probability_gradients, moving_scores, slope_at

if TYPE_CHECKING:
    from torch import Tensor


class MovingRows(NamedTuple):
    """Of each query, and how it moves: float32 (B, Hq, Sq padded to ROW_BLOCK), neutral for queries that see nothing."""

    lse: Tensor  # +inf for those
    rest: Tensor | None  # see `lse_rest`
    tlse: Tensor
    delta: Tensor
    tdelta: Tensor


@triton.jit
def sum_over_keys(
    tlse, mean, moved, q, tq, do, tdo, lse, rest, origin, k, tk, v, tv, offs_m, lo, hi, span, rules, bias, mask, tbias, tslope, drop,
    keep_scale, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
    SANITIZE: tl.constexpr, DENSE: tl.constexpr, PRECISION: tl.constexpr, FRUGAL: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Add what keys [lo, hi) contribute to the sums of P ts, of P (dP - c) and of P ts (dP - c) + P tdP."""
    MASKED: tl.constexpr = CUT or DENSE
    len_k = span[1]
    for n0 in tl.range(lo, hi, BLOCK_N, disable_licm=FRUGAL):
        offs_n = n0 + tl.arange(0, BLOCK_N)
        k_tile = load_tile(k, n0, len_k, BLOCK_N, BLOCK_D, D, False, CUT, FRUGAL)  # [N, D]
        tk_tile = load_moving(tk, n0, len_k, BLOCK_N, BLOCK_D, D, CUT, FRUGAL)
        bias_tile = load_matrix(bias, offs_m, offs_n, span, False, CUT)
        mask_tile = load_matrix(mask, offs_m, offs_n, span, False, CUT)
        tbias_tile = load_matrix(tbias, offs_m, offs_n, span, False, CUT)
        s, p, ts, _traw, _capped = moving_scores(
            q, tq, k_tile, tk_tile, lse[:, None], rest, offs_m, offs_n, span, rules, bias_tile, mask_tile, tbias_tile, tslope,
            SANITIZE, True, False, CUT, MASKED, PRECISION)  # fmt: skip
        v_tile = load_tile(v, n0, len_k, BLOCK_N, BLOCK_DV, DV, False, CUT, FRUGAL)  # [N, DV]
        tv_tile = load_moving(tv, n0, len_k, BLOCK_N, BLOCK_DV, DV, CUT, FRUGAL)
        keep = kept_pairs(offs_m, n0, BLOCK_N, drop, False)
        dp, tdp = moving_probability_gradients(do, tdo, v_tile, tv_tile, keep, keep_scale, s, PRECISION)
        dp -= origin[:, None]
        if MASKED:  # what is hidden may hold anything
            seen = s != NEG_INF
            ts, dp, tdp = tl.where(seen, ts, 0.0), tl.where(seen, dp, 0.0), tl.where(seen, tdp, 0.0)
        tlse += tl.sum(p * ts, 1)
        mean += tl.sum(p * dp, 1)
        moved += tl.sum(p * (ts * dp + tdp), 1)
    return tlse, mean, moved


@triton.jit(do_not_specialize=RUNTIME + OWN)
def row_tangents(
    q_ptr, k_ptr, v_ptr, do_ptr, tq_ptr, tk_ptr, tv_ptr, tdo_ptr, out_ptr, lse_ptr, rest_ptr, dlse_ptr, tdlse_ptr,
    row_lse_ptr, row_tlse_ptr, delta_ptr, tdelta_ptr, sink_partial_ptr,
    stride_qb: tl.int64, stride_qh: tl.int64, stride_qs: tl.int64, stride_qd,
    stride_kb: tl.int64, stride_kh: tl.int64, stride_ks: tl.int64, stride_kd,
    stride_vb: tl.int64, stride_vh: tl.int64, stride_vs: tl.int64, stride_vd,
    stride_dob: tl.int64, stride_doh: tl.int64, stride_dos: tl.int64, stride_dod,
    stride_tqb: tl.int64, stride_tqh: tl.int64, stride_tqs: tl.int64, stride_tqd,
    stride_tkb: tl.int64, stride_tkh: tl.int64, stride_tks: tl.int64, stride_tkd,
    stride_tvb: tl.int64, stride_tvh: tl.int64, stride_tvs: tl.int64, stride_tvd,
    stride_tdob: tl.int64, stride_tdoh: tl.int64, stride_tdos: tl.int64, stride_tdod,
    stride_ob: tl.int64, stride_oh: tl.int64, stride_os: tl.int64, stride_od,
    tbias_ptr, stride_tbias_b: tl.int64, stride_tbias_h: tl.int64, stride_tbias_m: tl.int64, stride_tbias_n,
    tslopes_ptr, stride_tslopes_b, stride_tslopes_h, sink_ptr, tsink_ptr,
    bias_ptr, stride_bias_b: tl.int64, stride_bias_h: tl.int64, stride_bias_m: tl.int64, stride_bias_n,
    mask_ptr, stride_mask_b: tl.int64, stride_mask_h: tl.int64, stride_mask_m: tl.int64, stride_mask_n,
    slopes_ptr, stride_slopes_b, stride_slopes_h, seqused_q_ptr, seqused_k_ptr, seed_ptr,
    heads, group, size_q, size_k, row_blocks, scale, softcap, window_left, window_right, dropout_threshold: tl.int64, keep_scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ALIGN: tl.constexpr, BIAS_ALIGN: tl.constexpr, MASK_ALIGN: tl.constexpr,
    SANITIZE: tl.constexpr, DENSE: tl.constexpr, PRECISION: tl.constexpr, FRUGAL: tl.constexpr,
):  # fmt: skip
    """The numbers of one tile of queries, and how the gradient of the sink's logit, -P_sink D, moves."""
    num_m = row_blocks * (ROW_BLOCK // BLOCK_M)
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
    slope, tslope, drop, rest, rest_log2 = None, None, None, None, None
    if slopes_ptr is not None:
        slope = slope_at(slopes_ptr, b, h, stride_slopes_b, stride_slopes_h)
    if tslopes_ptr is not None:
        tslope = slope_at(tslopes_ptr, b, h, stride_tslopes_b, stride_tslopes_h)
    if seed_ptr is not None:
        drop = (tl.load(seed_ptr), dropout_threshold, b, h)
    rules = (scale, softcap, slope, None)
    row, padded_row = bh.to(tl.int64) * size_q, bh.to(tl.int64) * (row_blocks * ROW_BLOCK)
    saved = tl.load(lse_ptr + row + offs_m, mask=inside, other=NEG_INF)
    empty = saved == NEG_INF
    lse = tl.where(empty, float("inf"), saved)  # of a row without keys every probability is 0
    if rest_ptr is not None:
        rest_log2 = tl.load(rest_ptr + padded_row + offs_m)
        rest = rest_log2[:, None]
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
    origin = tl.zeros([BLOCK_M], tl.float32)
    if do is not None:
        out_source = (head_of(out_ptr, at_q, stride_ob, stride_oh, stride_os, ALIGN, False), stride_os * ALIGN, stride_od, at_q)
        out = load_tile(out_source, m0, len_q, BLOCK_M, BLOCK_DV, DV, False, True)
        origin = tl.where(empty, 0.0, tl.sum(out.to(tl.float32) * do.to(tl.float32), 1))

    tlse, mean, moved = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    ends = key_tile_range(m0, span, BLOCK_M, BLOCK_N)
    for part in tl.static_range(3):
        if part > 0 or window_left is not None:
            tlse, mean, moved = sum_over_keys(
                tlse, mean, moved, q, tq, do, tdo, lse, rest, origin, k, tk, v, tv, offs_m, ends[part], ends[part + 1], span, rules, bias,
                mask, tbias, tslope, drop, keep_scale, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, SANITIZE, DENSE, PRECISION, FRUGAL,
                part != 1)  # fmt: skip

    if sink_ptr is not None:  # its dP is 0, and so dP - c is -c
        exponent = (tl.load(sink_ptr + h).to(tl.float32) - lse) * LOG2E
        if rest_log2 is not None:
            exponent -= rest_log2
        p_sink = tl.exp2(exponent)
        mean -= p_sink * origin
        ts_sink = 0.0
        if tsink_ptr is not None:
            ts_sink = tl.load(tsink_ptr + h).to(tl.float32)
            tlse += p_sink * ts_sink
            moved -= p_sink * ts_sink * origin
    delta, tdelta = mean + origin, moved - tlse * mean
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + row + offs_m, mask=inside, other=0.0)
    if tdlse_ptr is not None:
        tdelta -= tl.load(tdlse_ptr + row + offs_m, mask=inside, other=0.0)
    delta, tdelta, tlse = tl.where(empty, 0.0, delta), tl.where(empty, 0.0, tdelta), tl.where(empty, 0.0, tlse)
    if sink_partial_ptr is not None:
        moving = tl.where(empty, 0.0, p_sink * ((ts_sink - tlse) * delta + tdelta))
        tl.store(sink_partial_ptr + tl.program_id(0), -tl.sum(moving, 0))
    tl.store(row_lse_ptr + padded_row + offs_m, lse)
    tl.store(row_tlse_ptr + padded_row + offs_m, tlse)
    tl.store(delta_ptr + padded_row + offs_m, delta)
    tl.store(tdelta_ptr + padded_row + offs_m, tdelta)
