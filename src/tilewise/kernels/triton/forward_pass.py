"""The forward pass: one program a tile of queries, which walks the keys it can see and never holds more than a tile of scores.

The order of the loops and the single division at the end are FlashAttention-2's (Dao 2023, arXiv:2307.08691, section 3.1); the running
maximum is the online softmax of Milakov and Gimelshein (2018, arXiv:1805.02867).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from .block_lists import listed_end, listed_start, lists_of, ordered_tile
from .configs import FORWARD, Config
from .finite import nonfinite_flag, worth_a_flag
from .key_mass import launch_key_mass
from .launch import RUNTIME, Arguments, Launch, alignment, contiguous, describable, source, strides
from .packed import query_tile_count, query_tiles
from .tiles import (
    LOG2E,
    NEG_INF,
    dropout_keep,
    entropy_of,
    head_of,
    hide_rows,
    key_tile_range,
    largest_of,
    load_matrix,
    load_tile,
    log_sum_exp,
    matrix_of,
    online_entropy_update,
    online_exponents,
    other_variant,
    packed_tile,
    scores,
    store_tile,
    used_length,
)

if TYPE_CHECKING:
    from torch import Tensor

    from ...plan import Operands, Outputs, Rules


@triton.jit
def attend(
    acc, l, m, top, spread, q, k, v, offs_m, lo, hi, span, rules, bias, mask, base2, drop, listed,
    SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr, DENSE: tl.constexpr, LIST_N: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
    WANT_TOP: tl.constexpr, WANT_ENTROPY: tl.constexpr, TMA: tl.constexpr, NATURAL: tl.constexpr, SANITIZE: tl.constexpr,
    HIDE: tl.constexpr, PRECISION: tl.constexpr, FRUGAL: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Walk the key tiles of [lo, hi). A block list, a page table or a packed sequence changes where a tile starts: only `n0`."""
    MASKED: tl.constexpr = CUT or DENSE
    RULED: tl.constexpr = CUT or LIST_N == 0  # blocks that the mask leaves whole need not be told
    len_k = span[1]
    for at in tl.range(lo, hi, BLOCK_N, disable_licm=FRUGAL):
        n0 = at if LIST_N == 0 else listed_start(listed, at, LIST_N, CUT)
        offs_n = n0 + tl.arange(0, BLOCK_N)
        k_tile = load_tile(k, n0, len_k, BLOCK_N, BLOCK_D, D, TMA, CUT, FRUGAL)  # [N, D]
        bias_tile = load_matrix(bias, offs_m, offs_n, span, False, CUT)
        mask_tile = load_matrix(mask if RULED else None, offs_m, offs_n, span, False, CUT)
        qk = tl.dot(q, k_tile.T, input_precision=PRECISION)  # [M, N]
        s, _, _ = scores(
            qk, offs_m, offs_n, span, rules, bias_tile, mask_tile, SCORE_MOD, MASK_MOD if RULED else "", NATURAL, SANITIZE, True, False,
            CUT, MASKED)  # fmt: skip
        m, x, alpha = online_exponents(m, s, base2, NATURAL, MASKED)
        p = tl.exp2(x)
        if WANT_TOP:
            top = tl.maximum(top, tl.max(s, 1))
        if WANT_ENTROPY:
            spread = online_entropy_update(spread, l, p, x, alpha)
        l = l * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        if drop is not None:
            p = tl.where(dropout_keep(offs_m, n0, BLOCK_N, drop), p, 0.0)
        v_tile = load_tile(v, n0, len_k, BLOCK_N, BLOCK_DV, DV, TMA, CUT, FRUGAL)  # [N, DV]
        if MASKED and HIDE:
            v_tile = hide_rows(v_tile, s != NEG_INF, 0)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)  # [M, DV]
    return acc, l, m, top, spread


@triton.jit(do_not_specialize=RUNTIME)
def attention_forward(
    q_ref, k_ref, v_ref, out_ptr, lse_ptr, largest_ptr, entropy_ptr,
    stride_qb: tl.int64, stride_qh: tl.int64, stride_qs: tl.int64, stride_qd,
    stride_kb: tl.int64, stride_kh: tl.int64, stride_ks: tl.int64, stride_kd,
    stride_vb: tl.int64, stride_vh: tl.int64, stride_vs: tl.int64, stride_vd,
    stride_ob: tl.int64, stride_oh: tl.int64, stride_os: tl.int64, stride_od,
    bias_ptr, stride_bias_b: tl.int64, stride_bias_h: tl.int64, stride_bias_m: tl.int64, stride_bias_n,
    mask_ptr, stride_mask_b: tl.int64, stride_mask_h: tl.int64, stride_mask_m: tl.int64, stride_mask_n,
    slopes_ptr, stride_slopes_b, stride_slopes_h, sink_ptr, seqused_q_ptr, seqused_k_ptr, seed_ptr,
    heads, group, size_q, size_k, scale, unit, unit_exact, softcap, window_left, window_right,
    dropout_threshold: tl.int64, keep_scale, tiles_ptr, slots, captured_ptr, captured_sizes, lists_ptr, list_sizes, nonfinite_ptr,
    SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr, LIST_M: tl.constexpr, LIST_N: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BIAS_ALIGN: tl.constexpr, MASK_ALIGN: tl.constexpr, ALIGN: tl.constexpr, TMA: tl.constexpr, NATURAL: tl.constexpr,
    SANITIZE: tl.constexpr, HIDE: tl.constexpr, DENSE: tl.constexpr, PRECISION: tl.constexpr, FRUGAL: tl.constexpr,
):  # fmt: skip
    if other_variant(nonfinite_ptr, HIDE):
        return
    # A one-dimensional grid has no 65,535 limit. Tiles of one head are neighbours, so that they share its keys in L2; under a causal
    # mask the longest come first.
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
    out_head = (head_of(out_ptr, at_q, stride_ob, stride_oh, stride_os, ALIGN, False), stride_os * ALIGN, stride_od, at_q)
    bias, mask = None, None
    if bias_ptr is not None:
        bias = matrix_of(bias_ptr, b, h, stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n, BIAS_ALIGN)
    if mask_ptr is not None:
        mask = matrix_of(mask_ptr, b, h, stride_mask_b, stride_mask_h, stride_mask_m, stride_mask_n, MASK_ALIGN)
    slope, drop, program = None, None, None
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + b * stride_slopes_b + h * stride_slopes_h).to(tl.float32)
    if seed_ptr is not None:
        drop = (tl.load(seed_ptr), dropout_threshold, b, h)
    if SCORE_MOD != "" or MASK_MOD != "":
        program = (captured_ptr, captured_sizes, None, b, h, size_q - 1, size_k - 1)
    rules = (scale, softcap, slope, program)
    base2 = (unit, unit_exact)

    m = tl.full([BLOCK_M], NEG_INF, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    if sink_ptr is not None:  # a key without a value: the state after having seen it alone
        sink = tl.load(sink_ptr + h).to(tl.float32)
        m = tl.zeros_like(m) + (sink if NATURAL else sink * LOG2E)
        l = tl.where(m > NEG_INF, 1.0, l)
    top = tl.full([BLOCK_M], NEG_INF, tl.float32)
    spread = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    q = load_tile(q_head, m0, len_q, BLOCK_M, BLOCK_D, D, TMA, True)  # [M, D]

    lo, full_lo, full_hi, hi = key_tile_range(m0, span, BLOCK_M, BLOCK_N)
    starts, stops, listed = (lo, full_lo, full_hi), (full_lo, full_hi, hi), None
    if LIST_N > 0:
        listed = lists_of(lists_ptr, list_sizes, b, h, m0 // LIST_M, full_lo, full_hi, LIST_N)
        starts, stops = (0, 0, 0), (0, listed_end(listed, m0 < len_q, LIST_N, False), listed_end(listed, m0 < len_q, LIST_N, True))
    for part in tl.static_range(3):
        if part > 0 or (window_left is not None and LIST_N == 0):
            acc, l, m, top, spread = attend(
                acc, l, m, top, spread, q, k_head, v_head, offs_m, starts[part], stops[part], span, rules, bias, mask, base2, drop, listed,
                SCORE_MOD, MASK_MOD, DENSE, LIST_N, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N,
                largest_ptr is not None, entropy_ptr is not None, TMA, NATURAL, SANITIZE, HIDE, PRECISION, FRUGAL,
                part != 1)  # fmt: skip

    inside = offs_m < len_q
    out = acc * (keep_scale / tl.where(l == 0.0, 1.0, l))[:, None]
    out = tl.where(inside[:, None], out, 0.0)
    lse = tl.where(inside, log_sum_exp(m, l, base2, NATURAL), NEG_INF)
    store_tile(out_head, out, m0, rows_q, BLOCK_M, BLOCK_DV, DV)
    row = head.to(tl.int64) * size_q
    if first_q is not None:
        row += first_q
    tl.store(lse_ptr + row + offs_m, lse, mask=offs_m < rows_q)
    if largest_ptr is not None:
        tl.store(largest_ptr + tl.program_id(0), largest_of(top if NATURAL else top * scale, l, inside))
    if entropy_ptr is not None:
        sink_log2 = None
        if sink_ptr is not None:
            sink_log2 = (tl.load(sink_ptr + h).to(tl.float32) - m) * LOG2E if NATURAL else tl.load(sink_ptr + h).to(tl.float32) * LOG2E - m
        tl.store(entropy_ptr + row + offs_m, tl.where(inside, entropy_of(spread, l, sink_log2), 0.0), mask=offs_m < rows_q)


def forward(t: Operands, r: Rules, out: Outputs) -> None:
    """Fill ``out.out`` (B, Hq, Sq, Dv), ``out.lse`` (B, Hq, Sq) and the auxiliary outputs that are asked for, see `plan.Outputs`, on the
    current stream of the tensors' device."""
    if out.lse.numel() == 0:
        if out.max_logits is not None:
            out.max_logits.fill_(float("-inf"))
        if out.key_mass is not None:
            out.key_mass.zero_()
        return
    call = Launch(t, r)
    config = call.config(FORWARD, *(["aux"] if out.max_logits is not None or out.entropy is not None else []))
    largest = None
    with call.device_guard():
        if out.max_logits is not None:  # of each program, of which some have no tile
            largest = out.lse.new_full((call.batch, call.heads, query_tile_count(call, config.block_m) // call.batch), float("-inf"))
        flag = nonfinite_flag(t.v) if worth_a_flag(call) else None
        further = (out.out, out.lse, largest, out.entropy)
        call.run_tiles(attention_forward, further, config, flag, lambda: forward_arguments(call, t, out, largest, config))
        if out.max_logits is not None and largest is not None:
            out.max_logits.copy_(largest.amax((0, 2)))
        if out.key_mass is not None:
            launch_key_mass(call, t, out.lse, out.key_mass)


def forward_arguments(call: Launch, t: Operands, out: Outputs, largest: Tensor | None, config: Config) -> Arguments:
    tma = config.descriptors and describable(t.q, t.k, t.v)
    align = alignment(t.q, t.k, t.v, out.out)
    tiles = query_tiles(call, config.block_m)
    given = (
        source(t.q, config.block_m, call.block_d, tma),
        source(t.k, config.block_n, call.block_d, tma),
        source(t.v, config.block_n, call.block_dv, tma),
        out.out,
        out.lse,
        largest,
        out.entropy,
        *strides(t.q, align),
        *strides(t.k, align),
        *strides(t.v, align),
        *strides(out.out, align),
    )
    named = {
        **call.rule_arguments,
        **tiles.arguments(),
        **call.key_lists(config),
        "sink_ptr": contiguous(t.sink),
        **call.constants(config, align, tma),
        "FRUGAL": config.frugal,
    }
    return Arguments(tiles.count * call.heads, given, named)
