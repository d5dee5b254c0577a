"""What float32 lost of an LSE. -1e9 + ln 4 is -1e9: the LSE of a row of very low or very high biases has forgotten how many keys there
were, and probabilities recomputed from it would not sum to 1. This kernel sums them, and keeps the logarithm that makes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from . import configs
from .configs import FORWARD
from .launch import RUNTIME, Launch, alignment, contiguous, strides
from .packed import query_tiles
from .tiles import LOG2E, NEG_INF, ROW_BLOCK, head_of, key_tile_range, load_matrix, load_tile, matrix_of, packed_tile, scores, used_length

if TYPE_CHECKING:
    from torch import Tensor

    from ...plan import Operands

LARGE: tl.constexpr = tl.constexpr(2048.0)  # from here on the last digit of a float32 is 1e-4 or more


@triton.jit(do_not_specialize=RUNTIME)
def lse_rest(
    q_ptr, k_ptr, lse_ptr, rest_ptr,
    stride_qb: tl.int64, stride_qh: tl.int64, stride_qs: tl.int64, stride_qd,
    stride_kb: tl.int64, stride_kh: tl.int64, stride_ks: tl.int64, stride_kd,
    bias_ptr, stride_bias_b: tl.int64, stride_bias_h: tl.int64, stride_bias_m: tl.int64, stride_bias_n,
    mask_ptr, stride_mask_b: tl.int64, stride_mask_h: tl.int64, stride_mask_m: tl.int64, stride_mask_n,
    slopes_ptr, stride_slopes_b, stride_slopes_h, sink_ptr, seqused_q_ptr, seqused_k_ptr, seed_ptr,
    heads, group, size_q, size_k, row_blocks, scale, unit, unit_exact, softcap, window_left, window_right,
    dropout_threshold: tl.int64, keep_scale, tiles_ptr, slots,
    captured_ptr, captured_sizes, SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BIAS_ALIGN: tl.constexpr, MASK_ALIGN: tl.constexpr, ALIGN: tl.constexpr, TMA: tl.constexpr, NATURAL: tl.constexpr,
    SANITIZE: tl.constexpr, DENSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """log2 of the sum of exp(s - lse), the sink's part included: 0 but for rounding in most rows, whose tiles then walk no key."""
    if tiles_ptr is None:
        num_m = row_blocks * (ROW_BLOCK // BLOCK_M)
        tile, bh = tl.program_id(0) % num_m, tl.program_id(0) // num_m
        b, h, m0 = bh // heads, bh % heads, tile * BLOCK_M
        len_q, len_k = used_length(seqused_q_ptr, b, size_q), used_length(seqused_k_ptr, b, size_k)
        item, first_q, first_k, rows_q, row = b, None, None, num_m * BLOCK_M, bh.to(tl.int64) * size_q
        padded_row = bh.to(tl.int64) * (row_blocks * ROW_BLOCK)
    else:
        slot, h = tl.program_id(0) % slots, tl.program_id(0) // slots
        b, m0, first_q, rows_q, len_q, first_k, _rows_k, len_k = packed_tile(tiles_ptr + slot * 8)
        if b < 0:
            return
        item, row = 0, h.to(tl.int64) * size_q + first_q
        padded_row = h.to(tl.int64) * (row_blocks * ROW_BLOCK) + first_q
    span = (len_q, len_k, window_left, window_right)
    offs_m = m0 + tl.arange(0, BLOCK_M)
    lse = tl.load(lse_ptr + row + offs_m, mask=offs_m < len_q, other=NEG_INF)
    large = (tl.abs(lse) > LARGE) & (lse != NEG_INF)
    total = tl.zeros([BLOCK_M], tl.float32)
    if tl.max(large.to(tl.int32), 0) > 0:
        at_q = (item, h, first_q)
        q_head = (head_of(q_ptr, at_q, stride_qb, stride_qh, stride_qs, ALIGN, False), stride_qs * ALIGN, stride_qd, at_q)
        at_k = (item, h // group, first_k)
        k_head = (head_of(k_ptr, at_k, stride_kb, stride_kh, stride_ks, ALIGN, False), stride_ks * ALIGN, stride_kd, at_k)
        bias, mask, slope, program = None, None, None, None
        if bias_ptr is not None:
            bias = matrix_of(bias_ptr, b, h, stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n, BIAS_ALIGN)
        if mask_ptr is not None:
            mask = matrix_of(mask_ptr, b, h, stride_mask_b, stride_mask_h, stride_mask_m, stride_mask_n, MASK_ALIGN)
        if slopes_ptr is not None:
            slope = tl.load(slopes_ptr + b * stride_slopes_b + h * stride_slopes_h).to(tl.float32)
        if sink_ptr is not None:
            total += tl.exp2((tl.load(sink_ptr + h).to(tl.float32) - lse) * LOG2E)
        if SCORE_MOD != "" or MASK_MOD != "":
            program = (captured_ptr, captured_sizes, None, b, h, size_q - 1, size_k - 1)
        rules = (scale, softcap, slope, program)
        q = load_tile(q_head, m0, len_q, BLOCK_M, BLOCK_D, D, False, True)  # [M, D]
        ends = key_tile_range(m0, span, BLOCK_M, BLOCK_N)
        for n0 in tl.range(ends[0], ends[3], BLOCK_N):
            offs_n = n0 + tl.arange(0, BLOCK_N)
            k_tile = load_tile(k_head, n0, len_k, BLOCK_N, BLOCK_D, D, False, True)  # [N, D]
            bias_tile = load_matrix(bias, offs_m, offs_n, span, False, True)
            mask_tile = load_matrix(mask, offs_m, offs_n, span, False, True)
            qk = tl.dot(q, k_tile.T, input_precision=PRECISION)  # [M, N]
            s, _, _ = scores(
                qk, offs_m, offs_n, span, rules, bias_tile, mask_tile, SCORE_MOD, MASK_MOD, NATURAL, True, True, False, True,
                True)  # fmt: skip
            total += tl.sum(tl.exp2((s - lse[:, None]) * LOG2E), 1)
    rest = tl.where(large, tl.log2(total), 0.0)
    tl.store(rest_ptr + padded_row + offs_m, rest, mask=offs_m < rows_q)


def lse_rest_of(call: Launch, t: Operands, lse: Tensor) -> Tensor | None:
    """(B, Hq, Sq padded to ROW_BLOCK) in base 2; None without a bias or score function: scores are then no larger than what rounds them."""
    if t.bias is None and not call.r.score_mod:
        return None
    config = call.config(FORWARD)
    align = alignment(t.q, t.k)
    rest = lse.new_empty(call.batch, call.heads, call.rows_padded)
    if call.repeat(lse_rest, (lse, rest), config):
        return rest
    tiles = query_tiles(call, config.block_m, call.rows_padded // config.block_m)
    call.run(
        lse_rest,
        tiles.count * call.heads,
        t.q,
        t.k,
        lse,
        rest,
        *strides(t.q, align),
        *strides(t.k, align),
        **call.rule_arguments,
        **tiles.arguments(),
        **call.constants(config, align, False),
        sink_ptr=contiguous(t.sink),
        row_blocks=call.rows_padded // configs.ROW_BLOCK,
    )
    return rest
