"""How much attention each key receives: the column sums of P, before dropout. They need the LSE of every query, so they take a second walk
over the scores, by a program a tile of keys; nothing is added atomically."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from . import configs
from .configs import DKDV
from .launch import RUNTIME, Launch, alignment, strides
from .lse_rest import lse_rest_of
from .packed import key_tiles
from .tiles import (
    LOG2E,
    NEG_INF,
    ROW_BLOCK,
    head_of,
    load_matrix,
    load_tile,
    matrix_of,
    packed_tile,
    probabilities,
    query_tile_range,
    scores,
    used_length,
)

if TYPE_CHECKING:
    from torch import Tensor

    from ...plan import Operands


@triton.jit(do_not_specialize=RUNTIME)
def key_mass(
    q_ptr, k_ptr, lse_ptr, rest_ptr, mass_ptr,
    stride_qb: tl.int64, stride_qh: tl.int64, stride_qs: tl.int64, stride_qd,
    stride_kb: tl.int64, stride_kh: tl.int64, stride_ks: tl.int64, stride_kd,
    bias_ptr, stride_bias_b: tl.int64, stride_bias_h: tl.int64, stride_bias_m: tl.int64, stride_bias_n,
    mask_ptr, stride_mask_b: tl.int64, stride_mask_h: tl.int64, stride_mask_m: tl.int64, stride_mask_n,
    slopes_ptr, stride_slopes_b, stride_slopes_h, seqused_q_ptr, seqused_k_ptr, seed_ptr,
    heads, group, size_q, size_k, row_blocks, scale, unit, unit_exact, softcap, window_left, window_right,
    dropout_threshold: tl.int64, keep_scale, tiles_ptr, slots,
    captured_ptr, captured_sizes, SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BIAS_ALIGN: tl.constexpr, MASK_ALIGN: tl.constexpr, ALIGN: tl.constexpr, TMA: tl.constexpr, NATURAL: tl.constexpr,
    SANITIZE: tl.constexpr, DENSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The mass of one tile of keys at one query head. Tiles are transposed, [N, M], so that each sum runs along its own row."""
    if tiles_ptr is None:
        num_n = tl.cdiv(size_k, BLOCK_N)
        n0, bh = tl.program_id(0) % num_n * BLOCK_N, tl.program_id(0) // num_n
        b, h = bh // heads, bh % heads
        len_q, len_k = used_length(seqused_q_ptr, b, size_q), used_length(seqused_k_ptr, b, size_k)
        item, first_q, first_k, rows_k, row, col = b, None, None, size_k, bh.to(tl.int64) * size_q, bh.to(tl.int64) * size_k
        padded_row = bh.to(tl.int64) * (row_blocks * ROW_BLOCK)
    else:
        slot, h = tl.program_id(0) % slots, tl.program_id(0) // slots
        b, n0, first_q, _rows_q, len_q, first_k, rows_k, len_k = packed_tile(tiles_ptr + slot * 8)
        if b < 0:
            return
        item, row, col = 0, h.to(tl.int64) * size_q + first_q, h.to(tl.int64) * size_k + first_k
        padded_row = h.to(tl.int64) * (row_blocks * ROW_BLOCK) + first_q
    span = (len_q, len_k, window_left, window_right)
    offs_n = n0 + tl.arange(0, BLOCK_N)
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
    if SCORE_MOD != "" or MASK_MOD != "":
        program = (captured_ptr, captured_sizes, None, b, h, size_q - 1, size_k - 1)
    rules = (scale, softcap, slope, program)
    k = load_tile(k_head, n0, len_k, BLOCK_N, BLOCK_D, D, False, True)  # [N, D]
    mass = tl.zeros([BLOCK_N], tl.float32)
    ends = query_tile_range(n0, span, BLOCK_M, BLOCK_N, True)
    for m0 in tl.range(ends[0], ends[3], BLOCK_M):
        offs_m = m0 + tl.arange(0, BLOCK_M)
        q_tile = load_tile(q_head, m0, len_q, BLOCK_M, BLOCK_D, D, False, True)  # [M, D]
        lse = tl.load(lse_ptr + row + offs_m, mask=offs_m < len_q, other=NEG_INF)
        lse = tl.where(lse == NEG_INF, float("inf"), lse if NATURAL else lse * LOG2E)
        rest = None
        if rest_ptr is not None:
            rest = tl.load(rest_ptr + padded_row + offs_m, mask=offs_m < len_q, other=0.0)[None, :]
        bias_tile = load_matrix(bias, offs_m, offs_n, span, True, True)
        mask_tile = load_matrix(mask, offs_m, offs_n, span, True, True)
        qk = tl.dot(k, q_tile.T, input_precision=PRECISION)  # [N, M]
        s, _, _ = scores(
            qk, offs_m, offs_n, span, rules, bias_tile, mask_tile, SCORE_MOD, MASK_MOD, NATURAL, True, True, True, True, True)  # fmt: skip
        mass += tl.sum(probabilities(s, lse[None, :], rest, (unit, unit_exact), NATURAL), 1)
    tl.store(mass_ptr + col + offs_n, tl.where(offs_n < len_k, mass, 0.0), mask=offs_n < rows_k)


def launch_key_mass(call: Launch, t: Operands, lse: Tensor, mass: Tensor) -> None:
    """Fill ``mass`` (B, Hq, Sk)."""
    if mass.numel() == 0:
        return
    rest = lse_rest_of(call, t, lse)
    config = call.config(DKDV)
    if call.repeat(key_mass, (lse, rest, mass), config):
        return
    align = alignment(t.q, t.k)
    tiles = key_tiles(call, config.block_n)
    call.run(
        key_mass,
        tiles.count * call.heads,
        t.q,
        t.k,
        lse,
        rest,
        mass,
        *strides(t.q, align),
        *strides(t.k, align),
        **call.rule_arguments,
        **tiles.arguments(),
        **call.constants(config, align, False),
        row_blocks=call.rows_padded // configs.ROW_BLOCK,
    )
