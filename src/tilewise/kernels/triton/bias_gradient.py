"""The gradient of a bias that is full in queries and keys and shared by batch items or heads: one program a tile of the bias."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from . import configs
from .configs import DBIAS
from .launch import RUNTIME, Launch, alignment, describable, matrix_strides, source, strides
from .row_terms import RowTerms
from .tiles import (
    ROW_BLOCK,
    head_of,
    key_tile_range,
    load_rows,
    load_tile,
    matrix_of,
    matrix_pointers,
    packed_tile,
    tile_gradient,
    used_length,
)

if TYPE_CHECKING:
    from torch import Tensor

    from ...plan import Operands


@triton.jit(do_not_specialize=RUNTIME)
def bias_gradient(
    q_ref, k_ref, v_ref, do_ref, row_lse_ptr, rest_ptr, delta_ptr,
    dbias_ptr, stride_dbias_b: tl.int64, stride_dbias_h: tl.int64, stride_dbias_m: tl.int64, stride_dbias_n,
    bias_batch, bias_heads, shared_batch, shared_heads,
    stride_qb: tl.int64, stride_qh: tl.int64, stride_qs: tl.int64, stride_qd,
    stride_kb: tl.int64, stride_kh: tl.int64, stride_ks: tl.int64, stride_kd,
    stride_vb: tl.int64, stride_vh: tl.int64, stride_vs: tl.int64, stride_vd,
    stride_dob: tl.int64, stride_doh: tl.int64, stride_dos: tl.int64, stride_dod,
    bias_ptr, stride_bias_b: tl.int64, stride_bias_h: tl.int64, stride_bias_m: tl.int64, stride_bias_n,
    mask_ptr, stride_mask_b: tl.int64, stride_mask_h: tl.int64, stride_mask_m: tl.int64, stride_mask_n,
    slopes_ptr, stride_slopes_b, stride_slopes_h, seqused_q_ptr, seqused_k_ptr, seed_ptr,
    heads, group, size_q, size_k, row_blocks, scale, unit, unit_exact, softcap, window_left, window_right,
    dropout_threshold: tl.int64, keep_scale, sequences_ptr, captured_ptr, captured_sizes,
    SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr, SCORE_GRAD: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BIAS_ALIGN: tl.constexpr, MASK_ALIGN: tl.constexpr, ALIGN: tl.constexpr, TMA: tl.constexpr, TMA_DO: tl.constexpr,
    NATURAL: tl.constexpr, SANITIZE: tl.constexpr, DENSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of one tile of scores over the batch items and heads that share the bias, in a fixed order.

    Q, K, V and dO change with every turn of the loop, and come ahead of their use where it has no branch. Nothing is multiplied with the
    gradients of scores here, so what they are computed from may hold anything where it is hidden.
    """
    num_m, num_n = tl.cdiv(size_q, BLOCK_M), tl.cdiv(size_k, BLOCK_N)
    tile, shared = tl.program_id(0) % (num_m * num_n), tl.program_id(0) // (num_m * num_n)
    m0, n0 = tile // num_n * BLOCK_M, tile % num_n * BLOCK_N
    offs_m, offs_n = m0 + tl.arange(0, BLOCK_M), n0 + tl.arange(0, BLOCK_N)
    PACKED: tl.constexpr = sequences_ptr is not None
    RAGGED: tl.constexpr = PACKED or seqused_q_ptr is not None or seqused_k_ptr is not None
    items = shared_batch * shared_heads
    if not RAGGED:  # all items see the tile, or none does
        lo, _full_lo, _full_hi, hi = key_tile_range(m0, (size_q, size_k, window_left, window_right), BLOCK_M, BLOCK_N)
        items = tl.where((n0 + BLOCK_N > lo) & (n0 < hi), items, 0)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i in tl.range(0, items):
        b, h = shared // bias_heads + i // shared_heads, shared % bias_heads + i % shared_heads
        if PACKED:
            _b, _row0, first_q, _rows_q, len_q, first_k, _rows_k, len_k = packed_tile(sequences_ptr + b * 8)
            item, head = 0, h
        else:
            len_q, len_k = used_length(seqused_q_ptr, b, size_q), used_length(seqused_k_ptr, b, size_k)
            item, head, first_q, first_k = b, b * heads + h, None, None
        span = (len_q, len_k, window_left, window_right)
        lo, _full_lo, _full_hi, hi = key_tile_range(m0, span, BLOCK_M, BLOCK_N)
        if not RAGGED or ((n0 + BLOCK_N > lo) & (n0 < hi)):
            bias = matrix_of(bias_ptr, b, h, stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n, BIAS_ALIGN)
            mask, slope, drop, program = None, None, None, None
            if mask_ptr is not None:
                mask = matrix_of(mask_ptr, b, h, stride_mask_b, stride_mask_h, stride_mask_m, stride_mask_n, MASK_ALIGN)
            if slopes_ptr is not None:
                slope = tl.load(slopes_ptr + b * stride_slopes_b + h * stride_slopes_h).to(tl.float32)
            if seed_ptr is not None:
                drop = (tl.load(seed_ptr), dropout_threshold, b, h)
            if SCORE_MOD != "" or MASK_MOD != "":
                program = (captured_ptr, captured_sizes, None, b, h, size_q - 1, size_k - 1)
            rules = (scale, softcap, slope, program)
            at_q = (item, h, first_q)
            q = (head_of(q_ref, at_q, stride_qb, stride_qh, stride_qs, ALIGN, TMA), stride_qs * ALIGN, stride_qd, at_q)
            at_k = (item, h // group, first_k)
            k = (head_of(k_ref, at_k, stride_kb, stride_kh, stride_ks, ALIGN, TMA), stride_ks * ALIGN, stride_kd, at_k)
            v = (head_of(v_ref, at_k, stride_vb, stride_vh, stride_vs, ALIGN, TMA), stride_vs * ALIGN, stride_vd, at_k)
            do = (head_of(do_ref, at_q, stride_dob, stride_doh, stride_dos, ALIGN, TMA_DO), stride_dos * ALIGN, stride_dod, at_q)
            rows = head.to(tl.int64) * (row_blocks * ROW_BLOCK) + offs_m
            if first_q is not None:
                rows += first_q
            ds, _, _ = tile_gradient(
                load_tile(q, m0, len_q, BLOCK_M, BLOCK_D, D, TMA, True),
                load_tile(do, m0, len_q, BLOCK_M, BLOCK_DV, DV, TMA_DO, True),
                load_rows(row_lse_ptr + rows, offs_m, len_q, float("inf"), PACKED),
                load_rows(rest_ptr + rows, offs_m, len_q, 0.0, PACKED),
                load_rows(delta_ptr + rows, offs_m, len_q, 0.0, PACKED),
                load_tile(k, n0, len_k, BLOCK_N, BLOCK_D, D, TMA, True),
                load_tile(v, n0, len_k, BLOCK_N, BLOCK_DV, DV, TMA, True),
                offs_m, offs_n, n0, span, rules, bias, mask, (unit, unit_exact), drop, keep_scale,
                SCORE_MOD, MASK_MOD, SCORE_GRAD, BLOCK_N, NATURAL, True, PRECISION, True, True)  # fmt: skip
            total += ds
    start = dbias_ptr + shared // bias_heads * stride_dbias_b + shared % bias_heads * stride_dbias_h
    inside = (offs_m < size_q)[:, None] & (offs_n < size_k)[None, :]
    tl.store(matrix_pointers((start, stride_dbias_m, 1 if stride_dbias_n is None else stride_dbias_n), offs_m, offs_n), total, mask=inside)


def launch_bias_gradient(call: Launch, t: Operands, dout: Tensor, rows: RowTerms, dbias: Tensor, sequences: Tensor | None) -> None:
    """Fill ``dbias``, (B or 1, Hq or 1, Sq, Sk); `sequences` are those of `sequence_records`."""
    config = call.config(DBIAS)
    if call.repeat(bias_gradient, (dout, rows.lse, rows.rest, rows.delta, dbias), config):
        return
    tma = config.descriptors and describable(t.q, t.k, t.v)
    tma_do = config.descriptors and describable(dout)
    align = alignment(t.q, t.k, t.v, dout)
    batch, heads, size_q, size_k = dbias.shape
    tiles = triton.cdiv(size_q, config.block_m) * triton.cdiv(size_k, config.block_n)
    call.run(
        bias_gradient,
        tiles * batch * heads,
        source(t.q, config.block_m, call.block_d, tma),
        source(t.k, config.block_n, call.block_d, tma),
        source(t.v, config.block_n, call.block_dv, tma),
        source(dout, config.block_m, call.block_dv, tma_do),
        rows.lse,
        rows.rest,
        rows.delta,
        dbias,
        *matrix_strides(dbias),
        batch,
        heads,
        call.items // batch,
        call.heads // heads,
        *strides(t.q, align),
        *strides(t.k, align),
        *strides(t.v, align),
        *strides(dout, align),
        **call.rule_arguments | {"size_q": size_q, "size_k": size_k},
        sequences_ptr=sequences,
        row_blocks=rows.lse.shape[2] // configs.ROW_BLOCK,
        SCORE_GRAD=call.score_gradient(),
        **call.constants(config, align, tma),
        TMA_DO=tma_do,
    )
