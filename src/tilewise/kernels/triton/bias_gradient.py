"""The gradient of a bias that is full in queries and keys and shared by batch items or heads: one program a tile of the bias."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from . import configs
from .configs import DBIAS
from .launch import RUNTIME, Launch, alignment, matrix_strides, run, strides
from .row_terms import RowTerms
from .tiles import ROW_BLOCK, head_of, key_tile_range, load_tile, matrix_pointers, tile_gradient, used_length

if TYPE_CHECKING:
    from torch import Tensor

    from ...plan import Operands


@triton.jit(do_not_specialize=RUNTIME)
def bias_gradient(
    q_ptr, k_ptr, v_ptr, do_ptr, row_lse_ptr, rest_ptr, delta_ptr,
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
    dropout_threshold: tl.int64, keep_scale, captured_ptr, captured_sizes,
    SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr, SCORE_GRAD: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ALIGN: tl.constexpr, TMA: tl.constexpr, NATURAL: tl.constexpr, SANITIZE: tl.constexpr, DENSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of one tile of scores over the batch items and heads that share the bias, in a fixed order."""
    num_m, num_n = tl.cdiv(size_q, BLOCK_M), tl.cdiv(size_k, BLOCK_N)
    tile, shared = tl.program_id(0) % (num_m * num_n), tl.program_id(0) // (num_m * num_n)
    m0, n0 = tile // num_n * BLOCK_M, tile % num_n * BLOCK_N
    offs_m, offs_n = m0 + tl.arange(0, BLOCK_M), n0 + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i in tl.range(0, shared_batch * shared_heads, num_stages=1):
        b, h = shared // bias_heads + i // shared_heads, shared % bias_heads + i % shared_heads
        len_q, len_k = used_length(seqused_q_ptr, b, size_q), used_length(seqused_k_ptr, b, size_k)
        span = (len_q, len_k, window_left, window_right)
        lo, _full_lo, _full_hi, hi = key_tile_range(m0, span, BLOCK_M, BLOCK_N, True)
        if (n0 + BLOCK_N > lo) & (n0 < hi):
            bias = (bias_ptr + b * stride_bias_b + h * stride_bias_h, stride_bias_m, 1 if stride_bias_n is None else stride_bias_n)
            mask, slope, drop, program = None, None, None, None
            if mask_ptr is not None:
                mask = (mask_ptr + b * stride_mask_b + h * stride_mask_h, stride_mask_m, 1 if stride_mask_n is None else stride_mask_n)
            if slopes_ptr is not None:
                slope = tl.load(slopes_ptr + b * stride_slopes_b + h * stride_slopes_h).to(tl.float32)
            if seed_ptr is not None:
                drop = (tl.load(seed_ptr), dropout_threshold, b, h)
            if SCORE_MOD != "" or MASK_MOD != "":
                program = (captured_ptr, captured_sizes, None, b, h, size_q - 1, size_k - 1)
            rules = (scale, softcap, slope, program)
            q = (head_of(q_ptr, b, h, stride_qb, stride_qh, ALIGN, False), stride_qs * ALIGN, stride_qd, b, h)
            k = (head_of(k_ptr, b, h // group, stride_kb, stride_kh, ALIGN, False), stride_ks * ALIGN, stride_kd, b, h)
            v = (head_of(v_ptr, b, h // group, stride_vb, stride_vh, ALIGN, False), stride_vs * ALIGN, stride_vd, b, h)
            do = (head_of(do_ptr, b, h, stride_dob, stride_doh, ALIGN, False), stride_dos * ALIGN, stride_dod, b, h)
            rows = (b * heads + h).to(tl.int64) * (row_blocks * ROW_BLOCK) + offs_m
            ds, _, _ = tile_gradient(
                load_tile(q, m0, len_q, BLOCK_M, BLOCK_D, D, False, True),
                load_tile(do, m0, len_q, BLOCK_M, BLOCK_DV, DV, False, True),
                tl.load(row_lse_ptr + rows),
                tl.load(rest_ptr + rows),
                tl.load(delta_ptr + rows),
                load_tile(k, n0, len_k, BLOCK_N, BLOCK_D, D, False, True),
                load_tile(v, n0, len_k, BLOCK_N, BLOCK_DV, DV, False, True),
                offs_m, offs_n, n0, span, rules, bias, mask, (unit, unit_exact), drop, keep_scale,
                SCORE_MOD, MASK_MOD, SCORE_GRAD, BLOCK_N, NATURAL, True, PRECISION, True)  # fmt: skip
            total += ds
    start = dbias_ptr + shared // bias_heads * stride_dbias_b + shared % bias_heads * stride_dbias_h
    inside = (offs_m < size_q)[:, None] & (offs_n < size_k)[None, :]
    tl.store(matrix_pointers((start, stride_dbias_m, 1 if stride_dbias_n is None else stride_dbias_n), offs_m, offs_n), total, mask=inside)


def launch_bias_gradient(call: Launch, t: Operands, dout: Tensor, rows: RowTerms, dbias: Tensor) -> None:
    """Fill ``dbias``, (B or 1, Hq or 1, Sq, Sk)."""
    config = call.config(DBIAS)
    align = alignment(t.q, t.k, t.v, dout)
    batch, heads = dbias.shape[:2]
    tiles = triton.cdiv(call.size_q, config.block_m) * triton.cdiv(call.size_k, config.block_n)
    run(
        bias_gradient,
        tiles * batch * heads,
        t.q,
        t.k,
        t.v,
        dout,
        rows.lse,
        rows.rest,
        rows.delta,
        dbias,
        *matrix_strides(dbias),
        batch,
        heads,
        call.batch // batch,
        call.heads // heads,
        *strides(t.q, align),
        *strides(t.k, align),
        *strides(t.v, align),
        *strides(dout, align),
        **call.rule_arguments,
        row_blocks=rows.lse.shape[2] // configs.ROW_BLOCK,
        SCORE_GRAD=call.score_gradient(),
        **call.constants(config, align, False),
    )
