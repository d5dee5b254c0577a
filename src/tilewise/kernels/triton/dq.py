"""dQ: one program a tile of queries, which walks the keys that they see. Sums over keys leave with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from . import configs
from .block_lists import listed_end, listed_start, lists_of, ordered_tile
from .configs import DQ, Config
from .launch import RUNTIME, Arguments, Launch, alignment, describable, matrix_alignment, matrix_strides, source, strides
from .packed import query_tiles
from .row_terms import RowTerms
from .tiles import (
    NEG_INF,
    ROW_BLOCK,
    distances,
    head_of,
    hide_rows,
    inside_matrix,
    key_tile_range,
    load_rows,
    load_tile,
    matrix_of,
    matrix_pointers,
    other_variant,
    packed_tile,
    product_gradient,
    store_tile,
    tile_gradient,
    used_length,
)

if TYPE_CHECKING:
    from torch import Tensor

    from ...plan import Operands


@triton.jit
def walk_keys(
    dq, bias_rows, slope_rows, q, do, lse, rest, delta, k, v, offs_m, lo, hi, span, rules, bias, mask, base2, drop, keep_scale, dbias,
    listed,
    SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr, SCORE_GRAD: tl.constexpr, DENSE: tl.constexpr, LIST_N: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
    WANT_DQ: tl.constexpr, WANT_BIAS_ROWS: tl.constexpr, WANT_SLOPE_ROWS: tl.constexpr, TMA: tl.constexpr,
    NATURAL: tl.constexpr, SANITIZE: tl.constexpr, HIDE: tl.constexpr, PRECISION: tl.constexpr, FRUGAL: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Add what keys [lo, hi) contribute to a tile of queries. As in the forward pass, a block list changes only `n0`."""
    MASKED: tl.constexpr = CUT or DENSE
    RULED: tl.constexpr = CUT or LIST_N == 0
    len_k = span[1]
    for at in tl.range(lo, hi, BLOCK_N, disable_licm=FRUGAL):
        n0 = at if LIST_N == 0 else listed_start(listed, at, LIST_N, CUT)
        offs_n = n0 + tl.arange(0, BLOCK_N)
        k_tile = load_tile(k, n0, len_k, BLOCK_N, BLOCK_D, D, TMA, CUT, FRUGAL)  # [N, D]
        v_tile = load_tile(v, n0, len_k, BLOCK_N, BLOCK_DV, DV, TMA, CUT, FRUGAL)  # [N, DV]
        ds, s, capped = tile_gradient(
            q, do, lse, rest, delta, k_tile, v_tile, offs_m, offs_n, n0, span, rules, bias, mask if RULED else None, base2, drop,
            keep_scale,
            SCORE_MOD, MASK_MOD if RULED else "", SCORE_GRAD, BLOCK_N, NATURAL, SANITIZE, PRECISION, CUT, MASKED)  # fmt: skip
        if WANT_BIAS_ROWS:
            bias_rows += tl.sum(ds, 1)
        if WANT_SLOPE_ROWS:
            slope_rows -= tl.sum(ds * distances(offs_m, offs_n, span, False), 1)
        if dbias is not None:
            tl.store(matrix_pointers(dbias, offs_m, offs_n), ds, mask=inside_matrix(offs_m, offs_n, span, CUT))
        if WANT_DQ:
            if MASKED and HIDE:
                k_tile = hide_rows(k_tile, s != NEG_INF, 0)
            ds = product_gradient(ds, capped, rules)
            dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision=PRECISION)  # [M, D]
    return dq, bias_rows, slope_rows


@triton.jit(do_not_specialize=RUNTIME)
def attention_dq(
    q_ref, k_ref, v_ref, do_ref, dq_ptr, row_lse_ptr, rest_ptr, delta_ptr, bias_rows_ptr, slope_rows_ptr,
    dbias_ptr, stride_dbias_b: tl.int64, stride_dbias_h: tl.int64, stride_dbias_m: tl.int64, stride_dbias_n,
    stride_qb: tl.int64, stride_qh: tl.int64, stride_qs: tl.int64, stride_qd,
    stride_kb: tl.int64, stride_kh: tl.int64, stride_ks: tl.int64, stride_kd,
    stride_vb: tl.int64, stride_vh: tl.int64, stride_vs: tl.int64, stride_vd,
    stride_dob: tl.int64, stride_doh: tl.int64, stride_dos: tl.int64, stride_dod,
    stride_dqb: tl.int64, stride_dqh: tl.int64, stride_dqs: tl.int64, stride_dqd,
    bias_ptr, stride_bias_b: tl.int64, stride_bias_h: tl.int64, stride_bias_m: tl.int64, stride_bias_n,
    mask_ptr, stride_mask_b: tl.int64, stride_mask_h: tl.int64, stride_mask_m: tl.int64, stride_mask_n,
    slopes_ptr, stride_slopes_b, stride_slopes_h, seqused_q_ptr, seqused_k_ptr, seed_ptr,
    heads, group, size_q, size_k, row_blocks, scale, unit, unit_exact, softcap, window_left, window_right,
    dropout_threshold: tl.int64, keep_scale, tiles_ptr, slots, captured_ptr, captured_sizes, dcaptured_ptr, lists_ptr, list_sizes,
    nonfinite_ptr,
    SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr, SCORE_GRAD: tl.constexpr, LIST_M: tl.constexpr, LIST_N: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BIAS_ALIGN: tl.constexpr, MASK_ALIGN: tl.constexpr, DBIAS_ALIGN: tl.constexpr, ALIGN: tl.constexpr, TMA: tl.constexpr,
    TMA_DO: tl.constexpr,
    NATURAL: tl.constexpr, SANITIZE: tl.constexpr, HIDE: tl.constexpr, DENSE: tl.constexpr, PRECISION: tl.constexpr,
    FRUGAL: tl.constexpr,
):  # fmt: skip
    """dQ of one tile of queries, and the sums over keys that a bias with one column and the ALiBi slopes need."""
    if other_variant(nonfinite_ptr, HIDE):
        return
    if tiles_ptr is None:
        num_m = tl.cdiv(size_q, BLOCK_M)
        tile, bh = tl.program_id(0) % num_m, tl.program_id(0) // num_m
        if window_right is not None and LIST_N == 0:
            tile = num_m - 1 - tile
        b, h = bh // heads, bh % heads
        if LIST_N > 0:
            tile = ordered_tile(tile, lists_ptr, list_sizes, b, h)
        m0 = tile * BLOCK_M
        len_q, len_k = used_length(seqused_q_ptr, b, size_q), used_length(seqused_k_ptr, b, size_k)
        item, head, first_q, first_k, rows_q = b, bh, None, None, size_q
    else:
        slot, h = tl.program_id(0) % slots, tl.program_id(0) // slots
        b, m0, first_q, rows_q, len_q, first_k, _rows_k, len_k = packed_tile(tiles_ptr + slot * 8)
        if b < 0:
            return
        item, head = 0, h
    span = (len_q, len_k, window_left, window_right)
    offs_m = m0 + tl.arange(0, BLOCK_M)
    at_q = (item, h, first_q)
    q_head = (head_of(q_ref, at_q, stride_qb, stride_qh, stride_qs, ALIGN, TMA), stride_qs * ALIGN, stride_qd, at_q)
    at_k = (item, h // group, first_k)
    k_head = (head_of(k_ref, at_k, stride_kb, stride_kh, stride_ks, ALIGN, TMA), stride_ks * ALIGN, stride_kd, at_k)
    v_head = (head_of(v_ref, at_k, stride_vb, stride_vh, stride_vs, ALIGN, TMA), stride_vs * ALIGN, stride_vd, at_k)
    do_head = (head_of(do_ref, at_q, stride_dob, stride_doh, stride_dos, ALIGN, TMA_DO), stride_dos * ALIGN, stride_dod, at_q)
    bias, mask, slope, drop, program, dbias = None, None, None, None, None, None
    if bias_ptr is not None:
        bias = matrix_of(bias_ptr, b, h, stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n, BIAS_ALIGN)
    if mask_ptr is not None:
        mask = matrix_of(mask_ptr, b, h, stride_mask_b, stride_mask_h, stride_mask_m, stride_mask_n, MASK_ALIGN)
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + b * stride_slopes_b + h * stride_slopes_h).to(tl.float32)
    if seed_ptr is not None:
        drop = (tl.load(seed_ptr), dropout_threshold, b, h)
    if dbias_ptr is not None:
        dbias = matrix_of(dbias_ptr, b, h, stride_dbias_b, stride_dbias_h, stride_dbias_m, stride_dbias_n, DBIAS_ALIGN)
    if SCORE_MOD != "" or MASK_MOD != "":
        program = (captured_ptr, captured_sizes, dcaptured_ptr, b, h, size_q - 1, size_k - 1)
    rules = (scale, softcap, slope, program)
    base2 = (unit, unit_exact)
    rows = head.to(tl.int64) * size_q + offs_m
    padded_rows = head.to(tl.int64) * (row_blocks * ROW_BLOCK) + offs_m
    if first_q is not None:
        rows, padded_rows = rows + first_q, padded_rows + first_q
    inside = offs_m < len_q
    q = load_tile(q_head, m0, len_q, BLOCK_M, BLOCK_D, D, TMA, True)  # [M, D]
    do = load_tile(do_head, m0, len_q, BLOCK_M, BLOCK_DV, DV, TMA_DO, True)  # [M, DV]
    PACKED: tl.constexpr = tiles_ptr is not None
    lse = load_rows(row_lse_ptr + padded_rows, offs_m, len_q, float("inf"), PACKED)
    rest = None
    if rest_ptr is not None:
        rest = load_rows(rest_ptr + padded_rows, offs_m, len_q, 0.0, PACKED)
    delta = load_rows(delta_ptr + padded_rows, offs_m, len_q, 0.0, PACKED)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    bias_rows = tl.zeros([BLOCK_M], tl.float32)
    slope_rows = tl.zeros([BLOCK_M], tl.float32)

    lo, full_lo, full_hi, hi = key_tile_range(m0, span, BLOCK_M, BLOCK_N)
    starts, stops, listed = (lo, full_lo, full_hi), (full_lo, full_hi, hi), None
    if LIST_N > 0:
        listed = lists_of(lists_ptr, list_sizes, b, h, m0 // LIST_M, full_lo, full_hi, LIST_N)
        starts, stops = (0, 0, 0), (0, listed_end(listed, m0 < len_q, LIST_N, False), listed_end(listed, m0 < len_q, LIST_N, True))
    for part in tl.static_range(3):
        if part > 0 or (window_left is not None and LIST_N == 0):
            dq, bias_rows, slope_rows = walk_keys(
                dq, bias_rows, slope_rows, q, do, lse, rest, delta, k_head, v_head, offs_m, starts[part], stops[part], span, rules, bias,
                mask, base2, drop, keep_scale, dbias, listed, SCORE_MOD, MASK_MOD, SCORE_GRAD, DENSE, LIST_N, D, DV, BLOCK_D, BLOCK_DV,
                BLOCK_N,
                dq_ptr is not None, bias_rows_ptr is not None, slope_rows_ptr is not None,
                TMA, NATURAL, SANITIZE, HIDE, PRECISION, FRUGAL, part != 1)  # fmt: skip

    if dq_ptr is not None:
        dq_head = (head_of(dq_ptr, at_q, stride_dqb, stride_dqh, stride_dqs, ALIGN, False), stride_dqs * ALIGN, stride_dqd, at_q)
        store_tile(dq_head, tl.where(inside[:, None], dq * scale, 0.0), m0, rows_q, BLOCK_M, BLOCK_D, D)
    if bias_rows_ptr is not None:
        tl.store(bias_rows_ptr + rows, tl.where(inside, bias_rows, 0.0), mask=offs_m < rows_q)
    if slope_rows_ptr is not None:
        tl.store(slope_rows_ptr + rows, tl.where(inside, slope_rows, 0.0), mask=offs_m < rows_q)


def launch_dq(
    call: Launch, t: Operands, dout: Tensor, rows: RowTerms, flag: Tensor | None,
    dq: Tensor | None, bias_rows: Tensor | None, slope_rows: Tensor | None, dbias: Tensor | None, dcaptured: Sequence[Tensor | None],
) -> None:  # fmt: skip
    """Fill what is not None: dQ, sums over keys (B, Hq, Sq) for a bias with one column and for the slopes, and a bias's own gradient. Add
    to the gradients of captured tensors, float32 and contiguous."""
    config = call.config(DQ)
    further = (dout, dq, rows.lse, rows.rest, rows.delta, bias_rows, slope_rows, dbias)
    given = (call, t, dout, rows, dq, bias_rows, slope_rows, dbias, dcaptured, config)
    call.run_tiles(attention_dq, further, config, flag, lambda: dq_arguments(*given))


def dq_arguments(
    call: Launch, t: Operands, dout: Tensor, rows: RowTerms,
    dq: Tensor | None, bias_rows: Tensor | None, slope_rows: Tensor | None, dbias: Tensor | None, dcaptured: Sequence[Tensor | None],
    config: Config,
) -> Arguments:  # fmt: skip
    wanted = frozenset(slot for slot, x in enumerate(dcaptured) if x is not None)
    tma = config.descriptors and describable(t.q, t.k, t.v)
    tma_do = config.descriptors and describable(dout)
    align = alignment(t.q, t.k, t.v, dout, *([] if dq is None else [dq]))
    tiles = query_tiles(call, config.block_m)
    given = (
        source(t.q, config.block_m, call.block_d, tma),
        source(t.k, config.block_n, call.block_d, tma),
        source(t.v, config.block_n, call.block_dv, tma),
        source(dout, config.block_m, call.block_dv, tma_do),
        dq,
        rows.lse,
        rows.rest,
        rows.delta,
        bias_rows,
        slope_rows,
        dbias,
        *matrix_strides(dbias, matrix_alignment(dbias)),
        *strides(t.q, align),
        *strides(t.k, align),
        *strides(t.v, align),
        *strides(dout, align),
        *strides(dq, align),
    )
    named = {
        **call.rule_arguments,
        **tiles.arguments(),
        **call.key_lists(config),
        "row_blocks": rows.lse.shape[2] // configs.ROW_BLOCK,
        "dcaptured_ptr": tuple(dcaptured) if wanted else None,
        "SCORE_GRAD": call.score_gradient(wanted),
        **call.constants(config, align, tma),
        "TMA_DO": tma_do,
        "DBIAS_ALIGN": matrix_alignment(dbias),
        "FRUGAL": config.frugal,
    }
    return Arguments(tiles.count * call.heads, given, named)
