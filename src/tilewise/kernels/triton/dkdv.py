"""dK and dV: one program a tile of keys, which walks the queries that see it, over all query heads that read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from . import configs
from .block_lists import listed_end, listed_start, lists_of, ordered_tile
from .configs import DKDV, Config
from .launch import RUNTIME, Arguments, Launch, alignment, describable, source, strides
from .packed import key_tiles
from .row_terms import RowTerms
from .tiles import (
    NEG_INF,
    ROW_BLOCK,
    dropout_keep,
    head_of,
    hide_rows,
    load_matrix,
    load_rows,
    load_tile,
    matrix_of,
    other_variant,
    packed_tile,
    probabilities,
    product_gradient,
    program_gradient,
    query_tile_range,
    score_gradient,
    scores,
    store_tile,
    used_length,
)

if TYPE_CHECKING:
    from torch import Tensor

    from ...plan import Gradients, Operands


@triton.jit
def walk_queries(
    dk, dv, bias_cols, k, v, q, do, row_lse_ptr, rest_ptr, delta_ptr, offs_n, n0, lo, hi, span, rules, bias, mask, base2, drop, keep_scale,
    listed, SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr, SCORE_GRAD: tl.constexpr, LIST_M: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WANT_DK: tl.constexpr, WANT_DV: tl.constexpr, WANT_COLS: tl.constexpr, TMA: tl.constexpr, TMA_DO: tl.constexpr,
    NATURAL: tl.constexpr, SANITIZE: tl.constexpr, HIDE: tl.constexpr, DENSE: tl.constexpr, PRECISION: tl.constexpr, FRUGAL: tl.constexpr,
    CUT: tl.constexpr,
):  # fmt: skip
    """Add what queries [lo, hi) of one head contribute to a tile of keys. Tiles are transposed, [N, M]: both products then take the
    probabilities as their left operand, from registers. A transposed block list changes only `m0`."""
    MASKED: tl.constexpr = CUT or DENSE
    RULED: tl.constexpr = CUT or LIST_M == 0
    # A stretch at the ends has few tiles: without a pipeline it leaves registers to the stretch that matters.
    PACKED: tl.constexpr = q[3][2] is not None
    len_q = span[0]
    for at in tl.range(lo, hi, BLOCK_M, num_stages=1 if CUT else None, disable_licm=FRUGAL):
        m0 = at if LIST_M == 0 else listed_start(listed, at, LIST_M, CUT)
        offs_m = m0 + tl.arange(0, BLOCK_M)
        q_tile = load_tile(q, m0, len_q, BLOCK_M, BLOCK_D, D, TMA, True, FRUGAL)  # [M, D]
        lse = load_rows(row_lse_ptr + offs_m, offs_m, len_q, float("inf"), PACKED)
        bias_tile = load_matrix(bias, offs_m, offs_n, span, True, CUT)
        mask_tile = load_matrix(mask if RULED else None, offs_m, offs_n, span, True, CUT)
        qk = tl.dot(k, q_tile.T, input_precision=PRECISION)  # [N, M]
        s, capped, raw = scores(
            qk, offs_m, offs_n, span, rules, bias_tile, mask_tile, SCORE_MOD, MASK_MOD if RULED else "", NATURAL, SANITIZE, SANITIZE, True,
            CUT, MASKED
        )  # fmt: skip
        rest = None
        if rest_ptr is not None:
            rest = load_rows(rest_ptr + offs_m, offs_m, len_q, 0.0, PACKED)[None, :]
        p = probabilities(s, lse[None, :], rest, base2, NATURAL)
        do_tile = load_tile(do, m0, len_q, BLOCK_M, BLOCK_DV, DV, TMA_DO, True, FRUGAL)  # [M, DV]
        if MASKED and HIDE:
            q_tile = hide_rows(q_tile, s != NEG_INF, 0)
            do_tile = hide_rows(do_tile, s != NEG_INF, 0)
        kept = p
        if drop is not None:
            keep = dropout_keep(offs_m, n0, BLOCK_N, drop).T  # [N, M]
            kept = tl.where(keep, p, 0.0)
        if WANT_DV:
            dv = tl.dot(kept.to(do_tile.dtype), do_tile, dv, input_precision=PRECISION)  # [N, DV]
        if WANT_DK or WANT_COLS:
            dp = tl.dot(v, do_tile.T, input_precision=PRECISION)  # [N, M]
            delta = load_rows(delta_ptr + offs_m, offs_m, len_q, 0.0, PACKED)
            if drop is not None:
                dp = tl.where(keep, dp * keep_scale, 0.0)
            ds = score_gradient(p, dp, delta[None, :], MASKED and SANITIZE)
            ds = program_gradient(ds, raw, offs_m, offs_n, span, rules, SCORE_GRAD, True)
            if WANT_COLS:
                bias_cols += tl.sum(ds, 1)
            if WANT_DK:
                ds = product_gradient(ds, capped, rules)
                dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision=PRECISION)  # [N, D]
    return dk, dv, bias_cols


@triton.jit
def one_head_dkdv(
    dk, dv, k, v, q_ref, do_ref, row_lse_ptr, rest_ptr, delta_ptr, bias_cols_ptr,
    stride_qb, stride_qh, stride_qs, stride_qd, stride_dob, stride_doh, stride_dos, stride_dod,
    bias_ptr, stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n,
    mask_ptr, stride_mask_b, stride_mask_h, stride_mask_m, stride_mask_n,
    slopes_ptr, stride_slopes_b, stride_slopes_h, seed_ptr, b, h, n0, heads, row_blocks, size_k, span, scale, softcap, base2,
    dropout_threshold, keep_scale, item, first_q, first_k, rows_k, captured_ptr, captured_sizes, lists_ptr, list_sizes, size_q,
    SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr, SCORE_GRAD: tl.constexpr, LIST_M: tl.constexpr, LIST_N: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WANT_DK: tl.constexpr, WANT_DV: tl.constexpr, BIAS_ALIGN: tl.constexpr, MASK_ALIGN: tl.constexpr, ALIGN: tl.constexpr,
    TMA: tl.constexpr, TMA_DO: tl.constexpr,
    NATURAL: tl.constexpr, SANITIZE: tl.constexpr, HIDE: tl.constexpr, DENSE: tl.constexpr, PRECISION: tl.constexpr,
    FRUGAL: tl.constexpr,
):  # fmt: skip
    """What one query head adds to dK and dV of a tile of keys, and its own sums over queries for a bias that all of them share."""
    len_k, window_left, window_right = span[1], span[2], span[3]
    at_q = (item, h, first_q)
    q = (head_of(q_ref, at_q, stride_qb, stride_qh, stride_qs, ALIGN, TMA), stride_qs * ALIGN, stride_qd, at_q)
    do = (head_of(do_ref, at_q, stride_dob, stride_doh, stride_dos, ALIGN, TMA_DO), stride_dos * ALIGN, stride_dod, at_q)
    bias, mask, slope, drop, program = None, None, None, None, None
    if bias_ptr is not None:
        bias = matrix_of(bias_ptr, b, h, stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n, BIAS_ALIGN)
    if mask_ptr is not None:
        mask = matrix_of(mask_ptr, b, h, stride_mask_b, stride_mask_h, stride_mask_m, stride_mask_n, MASK_ALIGN)
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + b * stride_slopes_b + h * stride_slopes_h).to(tl.float32)
    if seed_ptr is not None:
        drop = (tl.load(seed_ptr), dropout_threshold, b, h)
    if SCORE_MOD != "" or MASK_MOD != "":
        program = (captured_ptr, captured_sizes, None, b, h, size_q - 1, size_k - 1)
    rules = (scale, softcap, slope, program)
    head = (item * heads + h).to(tl.int64)
    row, col = head * (row_blocks * ROW_BLOCK), head * size_k
    if first_q is not None:
        row, col = row + first_q, col + first_k
    lse, delta = row_lse_ptr + row, delta_ptr + row
    rest = None
    if rest_ptr is not None:
        rest = rest_ptr + row
    offs_n = n0 + tl.arange(0, BLOCK_N)
    cols = tl.zeros([BLOCK_N], tl.float32)
    TAIL: tl.constexpr = SANITIZE or window_left is not None
    lo, full_lo, full_hi, hi = query_tile_range(n0, span, BLOCK_M, BLOCK_N, TAIL)
    if DENSE:  # a tile of keys that the length cuts is cut at every query
        full_hi = tl.where(n0 + BLOCK_N <= len_k, full_hi, full_lo)
    starts, stops, listed = (full_lo, lo, full_hi), (full_hi, full_lo, hi), None
    if LIST_M > 0:
        listed = lists_of(lists_ptr, list_sizes, b, h, n0 // LIST_N, full_lo, full_hi, LIST_M)
        starts, stops = (0, 0, 0), (listed_end(listed, n0 < len_k, LIST_M, False), 0, listed_end(listed, n0 < len_k, LIST_M, True))
    for part in tl.static_range(3):
        if (part == 2 and TAIL) or part == 0 or (part == 1 and window_right is not None and LIST_M == 0):
            dk, dv, cols = walk_queries(
                dk, dv, cols, k, v, q, do, lse, rest, delta, offs_n, n0, starts[part], stops[part], span, rules, bias, mask, base2, drop,
                keep_scale, listed, SCORE_MOD, MASK_MOD, SCORE_GRAD, LIST_M, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, WANT_DK, WANT_DV,
                bias_cols_ptr is not None, TMA, TMA_DO, NATURAL, SANITIZE, HIDE, DENSE, PRECISION, FRUGAL, part != 0)  # fmt: skip
    if bias_cols_ptr is not None:
        tl.store(bias_cols_ptr + col + offs_n, tl.where(offs_n < len_k, cols, 0.0), mask=offs_n < rows_k)
    return dk, dv


@triton.jit(do_not_specialize=RUNTIME)
def attention_dkdv(
    q_ref, k_ref, v_ref, do_ref, dk_ptr, dv_ptr, row_lse_ptr, rest_ptr, delta_ptr, bias_cols_ptr,
    stride_qb: tl.int64, stride_qh: tl.int64, stride_qs: tl.int64, stride_qd,
    stride_kb: tl.int64, stride_kh: tl.int64, stride_ks: tl.int64, stride_kd,
    stride_vb: tl.int64, stride_vh: tl.int64, stride_vs: tl.int64, stride_vd,
    stride_dob: tl.int64, stride_doh: tl.int64, stride_dos: tl.int64, stride_dod,
    stride_dkb: tl.int64, stride_dkh: tl.int64, stride_dks: tl.int64, stride_dkd,
    stride_dvb: tl.int64, stride_dvh: tl.int64, stride_dvs: tl.int64, stride_dvd,
    bias_ptr, stride_bias_b: tl.int64, stride_bias_h: tl.int64, stride_bias_m: tl.int64, stride_bias_n,
    mask_ptr, stride_mask_b: tl.int64, stride_mask_h: tl.int64, stride_mask_m: tl.int64, stride_mask_n,
    slopes_ptr, stride_slopes_b, stride_slopes_h, seqused_q_ptr, seqused_k_ptr, seed_ptr,
    heads, group, size_q, size_k, row_blocks, scale, unit, unit_exact, softcap, window_left, window_right,
    dropout_threshold: tl.int64, keep_scale, tiles_ptr, slots, captured_ptr, captured_sizes, lists_ptr, list_sizes, nonfinite_ptr,
    SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr, SCORE_GRAD: tl.constexpr, LIST_M: tl.constexpr, LIST_N: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUPED: tl.constexpr, BIAS_ALIGN: tl.constexpr, MASK_ALIGN: tl.constexpr, ALIGN: tl.constexpr, TMA: tl.constexpr, TMA_DO: tl.constexpr,
    NATURAL: tl.constexpr, SANITIZE: tl.constexpr, HIDE: tl.constexpr, DENSE: tl.constexpr, PRECISION: tl.constexpr,
    FRUGAL: tl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of keys, over all query heads that read it. Under a causal mask the first tiles are the longest."""
    if other_variant(nonfinite_ptr, HIDE):
        return
    if tiles_ptr is None:
        num_n = tl.cdiv(size_k, BLOCK_N)
        tile, bh = tl.program_id(0) % num_n, tl.program_id(0) // num_n
        heads_k = heads // group
        b, head_k = bh // heads_k, bh % heads_k
        if LIST_N > 0:
            tile = ordered_tile(tile, lists_ptr, list_sizes, b, head_k * group)
        n0 = tile * BLOCK_N
        len_q, len_k = used_length(seqused_q_ptr, b, size_q), used_length(seqused_k_ptr, b, size_k)
        item, first_q, first_k, rows_k = b, None, None, size_k
    else:
        slot, head_k = tl.program_id(0) % slots, tl.program_id(0) // slots
        b, n0, first_q, _rows_q, len_q, first_k, rows_k, len_k = packed_tile(tiles_ptr + slot * 8)
        if b < 0:
            return
        item = 0
    span = (len_q, len_k, window_left, window_right)
    at_k = (item, head_k, first_k)
    k_head = (head_of(k_ref, at_k, stride_kb, stride_kh, stride_ks, ALIGN, TMA), stride_ks * ALIGN, stride_kd, at_k)
    v_head = (head_of(v_ref, at_k, stride_vb, stride_vh, stride_vs, ALIGN, TMA), stride_vs * ALIGN, stride_vd, at_k)
    k = load_tile(k_head, n0, len_k, BLOCK_N, BLOCK_D, D, TMA, True)  # [N, D]
    v = load_tile(v_head, n0, len_k, BLOCK_N, BLOCK_DV, DV, TMA, True)  # [N, DV]
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    # One head needs no loop around the loops, which the software pipeliner would have to see through.
    if GROUPED:
        for g in tl.range(0, group, num_stages=1, disable_licm=FRUGAL):
            dk, dv = one_head_dkdv(
                dk, dv, k, v, q_ref, do_ref, row_lse_ptr, rest_ptr, delta_ptr, bias_cols_ptr,
                stride_qb, stride_qh, stride_qs, stride_qd, stride_dob, stride_doh, stride_dos, stride_dod,
                bias_ptr, stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n,
                mask_ptr, stride_mask_b, stride_mask_h, stride_mask_m, stride_mask_n,
                slopes_ptr, stride_slopes_b, stride_slopes_h, seed_ptr, b, head_k * group + g, n0, heads, row_blocks, size_k, span, scale,
                softcap, (unit, unit_exact), dropout_threshold, keep_scale, item, first_q, first_k, rows_k, captured_ptr, captured_sizes,
                lists_ptr, list_sizes, size_q, SCORE_MOD, MASK_MOD, SCORE_GRAD, LIST_M, LIST_N, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N,
                dk_ptr is not None, dv_ptr is not None, BIAS_ALIGN, MASK_ALIGN, ALIGN, TMA, TMA_DO, NATURAL, SANITIZE, HIDE, DENSE,
                PRECISION, FRUGAL)  # fmt: skip
    else:
        dk, dv = one_head_dkdv(
            dk, dv, k, v, q_ref, do_ref, row_lse_ptr, rest_ptr, delta_ptr, bias_cols_ptr,
            stride_qb, stride_qh, stride_qs, stride_qd, stride_dob, stride_doh, stride_dos, stride_dod,
            bias_ptr, stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n,
            mask_ptr, stride_mask_b, stride_mask_h, stride_mask_m, stride_mask_n,
            slopes_ptr, stride_slopes_b, stride_slopes_h, seed_ptr, b, head_k, n0, heads, row_blocks, size_k, span, scale,
            softcap, (unit, unit_exact), dropout_threshold, keep_scale, item, first_q, first_k, rows_k, captured_ptr, captured_sizes,
            lists_ptr, list_sizes, size_q, SCORE_MOD, MASK_MOD, SCORE_GRAD, LIST_M, LIST_N, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N,
            dk_ptr is not None, dv_ptr is not None, BIAS_ALIGN, MASK_ALIGN, ALIGN, TMA, TMA_DO, NATURAL, SANITIZE, HIDE, DENSE,
            PRECISION, FRUGAL)  # fmt: skip
    used = (n0 + tl.arange(0, BLOCK_N) < len_k)[:, None]
    if dk_ptr is not None:
        dk_head = (head_of(dk_ptr, at_k, stride_dkb, stride_dkh, stride_dks, ALIGN, False), stride_dks * ALIGN, stride_dkd, at_k)
        store_tile(dk_head, tl.where(used, dk * scale, 0.0), n0, rows_k, BLOCK_N, BLOCK_D, D)
    if dv_ptr is not None:
        dv_head = (head_of(dv_ptr, at_k, stride_dvb, stride_dvh, stride_dvs, ALIGN, False), stride_dvs * ALIGN, stride_dvd, at_k)
        store_tile(dv_head, tl.where(used, dv * keep_scale, 0.0), n0, rows_k, BLOCK_N, BLOCK_DV, DV)


def launch_dkdv(
    call: Launch, t: Operands, dout: Tensor, rows: RowTerms, flag: Tensor | None, grads: Gradients, bias_cols: Tensor | None
) -> None:
    """Fill ``grads.dk`` and ``grads.dv`` where asked for, and sums over queries (B, Hq, Sk) for a bias that all queries share."""
    config = call.config(DKDV)
    further = (dout, grads.dk, grads.dv, rows.lse, rows.rest, rows.delta, bias_cols)
    call.run_tiles(attention_dkdv, further, config, flag, lambda: dkdv_arguments(call, t, dout, rows, grads, bias_cols, config))


def dkdv_arguments(
    call: Launch, t: Operands, dout: Tensor, rows: RowTerms, grads: Gradients, bias_cols: Tensor | None, config: Config
) -> Arguments:
    tma = config.descriptors and describable(t.q, t.k, t.v)
    tma_do = config.descriptors and describable(dout)
    written = [x for x in (grads.dk, grads.dv) if x is not None]
    align = alignment(t.q, t.k, t.v, dout, *written)
    tiles = key_tiles(call, config.block_n)
    given = (
        source(t.q, config.block_m, call.block_d, tma),
        source(t.k, config.block_n, call.block_d, tma),
        source(t.v, config.block_n, call.block_dv, tma),
        source(dout, config.block_m, call.block_dv, tma_do),
        grads.dk,
        grads.dv,
        rows.lse,
        rows.rest,
        rows.delta,
        bias_cols,
        *strides(t.q, align),
        *strides(t.k, align),
        *strides(t.v, align),
        *strides(dout, align),
        *strides(grads.dk, align),
        *strides(grads.dv, align),
    )
    named = {
        **call.rule_arguments,
        **tiles.arguments(),
        **call.query_lists(config),
        "row_blocks": rows.lse.shape[2] // configs.ROW_BLOCK,
        "SCORE_GRAD": call.score_gradient(),
        **call.constants(config, align, tma),
        "TMA_DO": tma_do,
        "GROUPED": call.heads != call.heads_k,
        "FRUGAL": config.frugal,
    }
    return Arguments(tiles.count * call.heads_k, given, named)
