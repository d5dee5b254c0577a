"""The tangent of the forward pass: one program a tile of queries, which walks the keys it can see once.

With p from the saved LSE and ts the tangent of a score, the LSE moves by tlse = sum_j p_j ts_j and the output by
sum_j p_j (ts_j v_j + tv_j) - tlse out: all sums of one walk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from ..configs import FORWARD
from ..configs import ROW_BLOCK as ROWS
from ..launch import RUNTIME, Launch, alignment, contiguous, matrix_strides, run, strides
from ..lse_rest import lse_rest_of
from ..tiles import (
    LOG2E,
    NEG_INF,
    ROW_BLOCK,
    head_of,
    hide_rows,
    key_tile_range,
    load_matrix,
    load_tile,
    matrix_of,
    store_tile,
    used_length,
)
from .configs import config_of
from .steps import OWN, drop_pairs, kept_pairs, load_moving, moving_scores

if TYPE_CHECKING:
    from ....plan import Operands, Outputs, Rules, Saved, Tangents


@triton.jit
def walk_keys(
    acc, tl_sum, q, tq, lse, rest, k, tk, v, tv, offs_m, lo, hi, span, rules, bias, mask, tbias, tslope, drop,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
    SANITIZE: tl.constexpr, DENSE: tl.constexpr, PRECISION: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Add what keys [lo, hi) contribute to the sums of p ts and of p (ts v + tv)."""
    MASKED: tl.constexpr = CUT or DENSE
    len_k = span[1]
    for n0 in tl.range(lo, hi, BLOCK_N):
        offs_n = n0 + tl.arange(0, BLOCK_N)
        k_tile = load_tile(k, n0, len_k, BLOCK_N, BLOCK_D, D, False, CUT)  # [N, D]
        tk_tile = load_moving(tk, n0, len_k, BLOCK_N, BLOCK_D, D, CUT, False)
        bias_tile = load_matrix(bias, offs_m, offs_n, span, False, CUT)
        mask_tile = load_matrix(mask, offs_m, offs_n, span, False, CUT)
        tbias_tile = load_matrix(tbias, offs_m, offs_n, span, False, CUT)
        s, p, ts, _traw, _capped = moving_scores(
            q, tq, k_tile, tk_tile, lse[:, None], rest, offs_m, offs_n, span, rules, bias_tile, mask_tile, tbias_tile, tslope,
            SANITIZE, True, False, CUT, MASKED, PRECISION)  # fmt: skip
        if MASKED:
            ts = tl.where(s != NEG_INF, ts, 0.0)  # what is hidden may hold anything
        w = p * ts
        tl_sum += tl.sum(w, 1)
        keep = kept_pairs(offs_m, n0, BLOCK_N, drop, False)
        w, p = drop_pairs(w, keep), drop_pairs(p, keep)
        v_tile = load_tile(v, n0, len_k, BLOCK_N, BLOCK_DV, DV, False, CUT)  # [N, DV]
        if MASKED and SANITIZE:
            v_tile = hide_rows(v_tile, s != NEG_INF, 0)
        acc = tl.dot(w.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)  # [M, DV]
        if tv[0] is not None:
            tv_tile = load_tile(tv, n0, len_k, BLOCK_N, BLOCK_DV, DV, False, CUT)
            if MASKED and SANITIZE:
                tv_tile = hide_rows(tv_tile, s != NEG_INF, 0)
            acc = tl.dot(p.to(tv_tile.dtype), tv_tile, acc, input_precision=PRECISION)
    return acc, tl_sum


@triton.jit(do_not_specialize=RUNTIME + OWN)
def attention_jvp(
    q_ptr, k_ptr, v_ptr, tq_ptr, tk_ptr, tv_ptr, out_ptr, lse_ptr, rest_ptr, tout_ptr, tlse_ptr,
    stride_qb: tl.int64, stride_qh: tl.int64, stride_qs: tl.int64, stride_qd,
    stride_kb: tl.int64, stride_kh: tl.int64, stride_ks: tl.int64, stride_kd,
    stride_vb: tl.int64, stride_vh: tl.int64, stride_vs: tl.int64, stride_vd,
    stride_tqb: tl.int64, stride_tqh: tl.int64, stride_tqs: tl.int64, stride_tqd,
    stride_tkb: tl.int64, stride_tkh: tl.int64, stride_tks: tl.int64, stride_tkd,
    stride_tvb: tl.int64, stride_tvh: tl.int64, stride_tvs: tl.int64, stride_tvd,
    stride_ob: tl.int64, stride_oh: tl.int64, stride_os: tl.int64, stride_od,
    stride_tob: tl.int64, stride_toh: tl.int64, stride_tos: tl.int64, stride_tod,
    tbias_ptr, stride_tbias_b: tl.int64, stride_tbias_h: tl.int64, stride_tbias_m: tl.int64, stride_tbias_n,
    tslopes_ptr, stride_tslopes_b, stride_tslopes_h, sink_ptr, tsink_ptr,
    bias_ptr, stride_bias_b: tl.int64, stride_bias_h: tl.int64, stride_bias_m: tl.int64, stride_bias_n,
    mask_ptr, stride_mask_b: tl.int64, stride_mask_h: tl.int64, stride_mask_m: tl.int64, stride_mask_n,
    slopes_ptr, stride_slopes_b, stride_slopes_h, seqused_q_ptr, seqused_k_ptr, seed_ptr,
    heads, group, size_q, size_k, row_blocks, scale, softcap, window_left, window_right,
    dropout_threshold: tl.int64, keep_scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ALIGN: tl.constexpr, BIAS_ALIGN: tl.constexpr, MASK_ALIGN: tl.constexpr,
    SANITIZE: tl.constexpr, DENSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Tangents of one tile of the output and of its LSE."""
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
    q_head = (head_of(q_ptr, at_q, stride_qb, stride_qh, stride_qs, ALIGN, False), stride_qs * ALIGN, stride_qd, at_q)
    k_head = (head_of(k_ptr, at_k, stride_kb, stride_kh, stride_ks, ALIGN, False), stride_ks * ALIGN, stride_kd, at_k)
    v_head = (head_of(v_ptr, at_k, stride_vb, stride_vh, stride_vs, ALIGN, False), stride_vs * ALIGN, stride_vd, at_k)
    out_head = (head_of(out_ptr, at_q, stride_ob, stride_oh, stride_os, ALIGN, False), stride_os * ALIGN, stride_od, at_q)
    tout_head = (head_of(tout_ptr, at_q, stride_tob, stride_toh, stride_tos, ALIGN, False), stride_tos * ALIGN, stride_tod, at_q)
    tq, bias, mask, tbias, slope, tslope, drop, rest = None, None, None, None, None, None, None, None
    if tq_ptr is not None:
        tq_head = (head_of(tq_ptr, at_q, stride_tqb, stride_tqh, stride_tqs, ALIGN, False), stride_tqs * ALIGN, stride_tqd, at_q)
        tq = load_tile(tq_head, m0, len_q, BLOCK_M, BLOCK_D, D, False, True)  # [M, D]
    tk_head = (
        None if tk_ptr is None else head_of(tk_ptr, at_k, stride_tkb, stride_tkh, stride_tks, ALIGN, False), stride_tks * ALIGN,
        stride_tkd, at_k)  # fmt: skip
    tv_head = (
        None if tv_ptr is None else head_of(tv_ptr, at_k, stride_tvb, stride_tvh, stride_tvs, ALIGN, False), stride_tvs * ALIGN,
        stride_tvd, at_k)  # fmt: skip
    if bias_ptr is not None:
        bias = matrix_of(bias_ptr, b, h, stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n, BIAS_ALIGN)
    if mask_ptr is not None:
        mask = matrix_of(mask_ptr, b, h, stride_mask_b, stride_mask_h, stride_mask_m, stride_mask_n, MASK_ALIGN)
    if tbias_ptr is not None:
        tbias = matrix_of(tbias_ptr, b, h, stride_tbias_b, stride_tbias_h, stride_tbias_m, stride_tbias_n, 1)
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + b * stride_slopes_b + h * stride_slopes_h).to(tl.float32)
    if tslopes_ptr is not None:
        tslope = tl.load(tslopes_ptr + b * stride_tslopes_b + h * stride_tslopes_h).to(tl.float32)
    if seed_ptr is not None:
        drop = (tl.load(seed_ptr), dropout_threshold, b, h)
    rules = (scale, softcap, slope, None)
    row = bh.to(tl.int64) * size_q
    saved = tl.load(lse_ptr + row + offs_m, mask=inside, other=NEG_INF)
    lse = tl.where(saved == NEG_INF, float("inf"), saved)  # of a row without keys every probability is 0
    if rest_ptr is not None:
        rest = tl.load(rest_ptr + bh.to(tl.int64) * (row_blocks * ROW_BLOCK) + offs_m)[:, None]
    q = load_tile(q_head, m0, len_q, BLOCK_M, BLOCK_D, D, False, True)  # [M, D]
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    tlse = tl.zeros([BLOCK_M], tl.float32)

    ends = key_tile_range(m0, span, BLOCK_M, BLOCK_N)
    for part in tl.static_range(3):
        if part > 0 or window_left is not None:
            acc, tlse = walk_keys(
                acc, tlse, q, tq, lse, rest, k_head, tk_head, v_head, tv_head, offs_m, ends[part], ends[part + 1], span, rules, bias,
                mask, tbias, tslope, drop, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, SANITIZE, DENSE, PRECISION, part != 1)  # fmt: skip

    if tsink_ptr is not None:  # a key without a value
        exponent = (tl.load(sink_ptr + h).to(tl.float32) - lse) * LOG2E
        if rest_ptr is not None:
            exponent -= tl.load(rest_ptr + bh.to(tl.int64) * (row_blocks * ROW_BLOCK) + offs_m)
        tlse += tl.exp2(exponent) * tl.load(tsink_ptr + h).to(tl.float32)
    out = load_tile(out_head, m0, len_q, BLOCK_M, BLOCK_DV, DV, False, True).to(tl.float32)
    tout = tl.where(inside[:, None], acc * keep_scale - tlse[:, None] * out, 0.0)
    store_tile(tout_head, tout, m0, size_q, BLOCK_M, BLOCK_DV, DV)
    tl.store(tlse_ptr + row + offs_m, tl.where(inside, tlse, 0.0), mask=offs_m < size_q)


def jvp(t: Operands, r: Rules, u: Tangents, saved: Saved, tangents: Outputs) -> None:
    """Fill ``tangents.out`` and ``tangents.lse`` on the current stream of the tensors' device."""
    if tangents.lse.numel() == 0:
        return
    call = Launch(t, r)
    config = config_of(call, FORWARD)
    tq, tk, tv = (None if x is None else x.to(t.q.dtype) for x in (u.tq, u.tk, u.tv))
    given = [x for x in (t.q, t.k, t.v, tq, tk, tv, saved.out, tangents.out) if x is not None]
    align = alignment(*given)
    slopes = u.talibi_slopes
    with call.device_guard():
        # The rest comes from kernels whose scores are natural wherever there is one to take.
        rest = lse_rest_of(call, t, saved.lse)
        named: dict[str, Any] = {
            **call.rule_arguments,
            **call.constants(config, align, False),
            "tbias_ptr": u.tbias,
            **{f"stride_tbias_{dim}": stride for dim, stride in zip("bhmn", matrix_strides(u.tbias), strict=True)},
            "tslopes_ptr": slopes,
            "stride_tslopes_b": 0 if slopes is None or slopes.shape[0] == 1 else slopes.stride(0),
            "stride_tslopes_h": 0 if slopes is None else slopes.stride(1),
            "sink_ptr": contiguous(t.sink),
            "tsink_ptr": contiguous(u.tsink),
            "row_blocks": call.rows_padded // ROWS,
        }
        own = {*attention_jvp.arg_names, "num_warps", "num_stages", "enable_fp_fusion"}
        run(
            attention_jvp,
            triton.cdiv(call.size_q, config.block_m) * call.batch * call.heads,
            t.q,
            t.k,
            t.v,
            tq,
            tk,
            tv,
            saved.out,
            saved.lse,
            rest,
            tangents.out,
            tangents.lse,
            *(stride for x in (t.q, t.k, t.v, tq, tk, tv, saved.out, tangents.out) for stride in strides(x, align)),
            **{name: value for name, value in named.items() if name in own},
        )
