"""Reading a cache: queries of all heads of a group in one tile, the keys of an item split over programs, the parts merged.

A few queries leave the tensor cores idle and want every byte of the cache once. So the rows of a tile are query tokens times the query
heads that share a kv head (token-major), which reads each key once for all of them, and the keys are split so that the programs fill the
device even at batch size 1: Flash-Decoding (Dao et al. 2023). Each part leaves its maximum m, denominator l and accumulator, unnormalised
and in float32; `merge.merge_parts` adds them up by the rule of the online softmax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from ..launch import run
from ..tiles import LOG2E, NEG_INF, hide_rows, log_sum_exp, online_softmax_update
from .launch import CacheLaunch, captured, on_device, vectors
from .merge import MERGED_AT_ONCE, merge_parts
from .tiles import cache_scores, clamped, item_and_row, load_keys, load_turned, places, queries_of

if TYPE_CHECKING:
    from torch import Tensor

    from ....kvcache.call import CacheOperands, CacheRules

RUNTIME = [f"stride_{x}{dim}" for x in ("q", "k", "v") for dim in "bsh"] + [f"stride_mask_{dim}" for dim in "bhmn"]
RUNTIME += ["stride_table", "stride_slopes", "stride_k_scale", "stride_v_scale", "kv_heads", "group", "size_q", "total", "items"]
RUNTIME += ["row_tiles", "slots", "rows", "least_rows", "most_rows"]
RUNTIME += ["splits", "appended", "capacity", "pages", "positions", "window_left", "window_right"]
RUNTIME += ["captured_sizes"]  # whose elements see to that themselves: `emission.encoded`


@triton.jit
def attend(
    acc, l, m, q, q_rest, k, v, table, start, stop, bounds, position, window, rules, mask, base2, pages,
    MASK_MOD: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr, VALUES_IN_KEYS: tl.constexpr, NATURAL: tl.constexpr, PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Walk the key tiles of [start, stop), a multiple of BLOCK_N at both ends. MASKED: rows of a tile may see different keys, or it
    reaches beyond `bounds`, outside which no row of this program sees anything."""
    lo, hi = bounds
    for n0 in tl.range(start, stop, BLOCK_N):
        offs_n = n0 + tl.arange(0, BLOCK_N)
        inside = (offs_n >= lo) & (offs_n < hi)
        page, slot = places(table, n0, offs_n, inside, pages, PAGE_SIZE, BLOCK_N)
        k_tile = load_keys(k, page, slot, inside, 0, MAIN, D, MASKED).to(q.dtype)  # [N, MAIN]
        mask_tile = None
        if mask is not None:
            mask_rows, stride_n = mask
            mask_tile = tl.load(mask_rows[:, None] + (offs_n * stride_n)[None, :], mask=inside[None, :], other=0)
        qk = tl.dot(q, k_tile.T, input_precision=PRECISION)  # [M, N]
        if REST > 0:
            k_rest = load_keys(k, page, slot, inside, MAIN, REST, D, MASKED).to(q.dtype)  # [N, REST]
            qk = tl.dot(q_rest, k_rest.T, qk, input_precision=PRECISION)
        s = cache_scores(qk, position, offs_n, inside, window, rules, mask_tile, MASK_MOD, NATURAL, MASKED)
        m, p, alpha = online_softmax_update(m, s, base2, NATURAL, MASKED)
        l = l * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        v_tile = k_tile
        if not VALUES_IN_KEYS:
            v_tile = load_keys(v, page, slot, inside, 0, BLOCK_DV, DV, MASKED).to(q.dtype)  # [N, DV]
        if mask is not None or MASK_MOD != "":  # between the bounds windows hide no key from all rows; a mask can
            v_tile = hide_rows(v_tile, s != NEG_INF, 0)
        acc = tl.dot(p.to(q.dtype), v_tile, acc, input_precision=PRECISION)  # [M, DV]
    return acc, l, m


@triton.jit
def key_range(first, last, stored, padding, window, BLOCK_N: tl.constexpr):
    """Keys that rows at positions [first, last] see: [lo, hi), and [full_lo, full_hi), which every row sees."""
    window_left, window_right = window
    lo, hi, full_lo, full_hi = padding, stored, padding, stored
    if window_left is not None:
        lo, full_lo = tl.maximum(lo, first - window_left), tl.maximum(full_lo, last - window_left)
    if window_right is not None:
        hi, full_hi = tl.minimum(hi, last + window_right + 1), tl.minimum(full_hi, first + window_right + 1)
    return lo, hi, full_lo, full_hi


@triton.jit
def part_of(lo, hi, split, splits, PART: tl.constexpr, LEAST: tl.constexpr, BLOCK_N: tl.constexpr):
    """The keys [start, stop) of one part, in whole tiles. PART > 0: parts are PART tiles that end at its multiples, counted from the first
    that is seen; else all have as many tiles, at least LEAST, and the last ones may be empty."""
    first, last = lo // BLOCK_N, tl.cdiv(hi, BLOCK_N)
    if PART > 0:
        start = (first // PART + split) * PART
        stop = tl.minimum(start + PART, last)
        start = tl.maximum(start, first)
    else:
        size = tl.maximum(tl.cdiv(last - first, splits), LEAST)
        start = first + split * size
        stop = tl.minimum(start + size, last)
    return start * BLOCK_N, tl.maximum(start, stop) * BLOCK_N


@triton.jit(do_not_specialize=RUNTIME)
def attention_cached(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, work_ptr, lengths_ptr, table_ptr, index_ptr, padding_ptr, offsets_ptr, cos_ptr, sin_ptr,
    mask_ptr, slopes_ptr, sink_ptr, k_scale_ptr, v_scale_ptr,
    stride_qb: tl.int64, stride_qs: tl.int64, stride_qh: tl.int64, stride_qd,
    stride_kb: tl.int64, stride_ks: tl.int64, stride_kh: tl.int64, stride_kd,
    stride_vb: tl.int64, stride_vs: tl.int64, stride_vh: tl.int64, stride_vd,
    stride_mask_b: tl.int64, stride_mask_h: tl.int64, stride_mask_m: tl.int64, stride_mask_n: tl.int64,
    stride_table: tl.int64, stride_slopes, stride_k_scale, stride_v_scale,
    kv_heads, group, size_q, total, items, row_tiles, slots, rows, least_rows, most_rows, splits, appended, capacity, pages, positions,
    scale, unit, unit_exact, softcap, window_left, window_right, captured_ptr, captured_sizes, MASK_MOD: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SEARCH: tl.constexpr, PART: tl.constexpr, LEAST: tl.constexpr, PAGE_SIZE: tl.constexpr,
    ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, VALUES_IN_KEYS: tl.constexpr, ALIGN: tl.constexpr, NATURAL: tl.constexpr,
    PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()  # the merge may be set up as soon as all programs run; it waits until they have ended
    # Row tiles that read the same keys are neighbours, so that these come from L2; then kv heads, which lie beside each other in memory.
    program = tl.program_id(0)
    tile, program = program % row_tiles, program // row_tiles
    hk, program = program % kv_heads, program // kv_heads
    split, b = program % splits, program // splits
    slot = (b * row_tiles + tile) * kv_heads + hk
    heads = kv_heads * group

    # Where the queries of this item are and how many, where they stand, which keys it has.
    b, m0 = item_and_row(offsets_ptr, b, tile, items, group, BLOCK_M, SEARCH)
    q_first, len_q = queries_of(offsets_ptr, b, size_q, group, least_rows, most_rows)
    q_start = q_ptr + (b * stride_qb if offsets_ptr is None else q_first * stride_qs) * ALIGN
    len_k, padding = capacity, 0
    if lengths_ptr is not None:
        len_k = tl.minimum(tl.maximum(tl.load(lengths_ptr + b), 0), capacity)
    if padding_ptr is not None:
        padding = tl.minimum(tl.maximum(tl.load(padding_ptr + b), 0), capacity)
    len_k += appended
    shift = len_k - len_q
    row = tl.arange(0, BLOCK_M)
    token = (m0 + row) // group
    h = hk * group + (m0 + row) % group
    position = token + shift  # [M]
    in_use = token < len_q
    window = (window_left, window_right)
    last_token = tl.minimum((m0 + BLOCK_M - 1) // group, len_q - 1)
    lo, hi, full_lo, full_hi = key_range(m0 // group + shift, last_token + shift, tl.minimum(len_k, capacity), padding, window, BLOCK_N)
    hi = tl.where(m0 < len_q * group, hi, lo)
    start, stop = part_of(lo, hi, split, splits, PART, LEAST, BLOCK_N)

    cache_row, table = b.to(tl.int64), None
    if table_ptr is not None:
        cache_row, table = tl.zeros([], tl.int64), table_ptr + b * stride_table
    elif index_ptr is not None:
        cache_row = clamped(tl.load(index_ptr + b), pages).to(tl.int64)
    k = (k_ptr + (cache_row * stride_kb + hk * stride_kh) * ALIGN, stride_kb * ALIGN, stride_ks * ALIGN, stride_kd)
    v = (v_ptr + (cache_row * stride_vb + hk * stride_vh) * ALIGN, stride_vb * ALIGN, stride_vs * ALIGN, stride_vd)
    turn, mask, slope, program_of_mask = None, None, None, None
    if cos_ptr is not None:
        turn = (cos_ptr, sin_ptr, positions)
    if mask_ptr is not None:
        mask_token = tl.minimum(token, size_q - 1)
        mask = (mask_ptr + b * stride_mask_b + h * stride_mask_h + mask_token * stride_mask_m, stride_mask_n)
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + b * stride_slopes + h).to(tl.float32)  # [M]
    if k_scale_ptr is not None:
        scale = scale * tl.load(k_scale_ptr + b * stride_k_scale + hk)
    if MASK_MOD != "":  # rows that belong to no query stand further on: their position must stay where the program may read
        program_of_mask = (captured_ptr, captured_sizes, None, b, h[:, None], capacity + tl.maximum(size_q, appended), capacity - 1)
    rules = (scale, softcap, slope, program_of_mask)
    base2 = (unit, unit_exact)

    m = tl.full([BLOCK_M], NEG_INF, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    if sink_ptr is not None:  # a key without a value: the state of the first part after having seen it alone
        sink = tl.load(sink_ptr + h).to(tl.float32)
        m = tl.where(split == 0, sink if NATURAL else sink * LOG2E, m)
        l = tl.where(m > NEG_INF, 1.0, l)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    q_rows = q_start + (token * stride_qs + h * stride_qh) * ALIGN
    q = load_turned(q_rows, in_use, stride_qd, position, turn, 0, MAIN, D, ROTARY, INTERLEAVED)  # [M, MAIN]
    q_rest = q
    if REST > 0:
        q_rest = load_turned(q_rows, in_use, stride_qd, position, turn, MAIN, REST, D, ROTARY, INTERLEAVED)  # [M, REST]

    full_lo = tl.minimum(tl.maximum(tl.cdiv(full_lo, BLOCK_N) * BLOCK_N, start), stop)
    full_hi = tl.minimum(tl.maximum(full_hi // BLOCK_N * BLOCK_N, full_lo), stop)
    DENSE: tl.constexpr = mask_ptr is not None or MASK_MOD != ""
    if DENSE:
        full_lo, full_hi = start, start
    for stretch in tl.static_range(3):
        if stretch == 2 or (not DENSE and (stretch == 1 or window_left is not None or padding_ptr is not None)):
            part_start = start if stretch == 0 else (full_lo if stretch == 1 else full_hi)
            part_stop = full_lo if stretch == 0 else (full_hi if stretch == 1 else stop)
            acc, l, m = attend(
                acc, l, m, q, q_rest, k, v, table, part_start, part_stop, (lo, hi), position, window, rules, mask, base2, pages,
                MASK_MOD, D, DV, MAIN, REST, BLOCK_DV, BLOCK_N, PAGE_SIZE, VALUES_IN_KEYS, NATURAL, PRECISION, stretch != 1)  # fmt: skip

    if v_scale_ptr is not None:
        acc = acc * tl.load(v_scale_ptr + b * stride_v_scale + hk)
    out_rows = (q_first + token) * heads + h
    offs_d = tl.arange(0, BLOCK_DV)
    if work_ptr is None:
        out = acc / tl.where(l == 0.0, 1.0, l)[:, None]
        tl.store(out_ptr + out_rows[:, None] * DV + offs_d[None, :], out, mask=in_use[:, None] & (offs_d < DV)[None, :])
        lse_rows = h.to(tl.int64) * total + q_first + token
        if offsets_ptr is None:
            lse_rows = (b * heads + h).to(tl.int64) * size_q + token
        tl.store(lse_ptr + lse_rows, log_sum_exp(m, l, base2, NATURAL), mask=in_use)
    else:
        all_rows = slots.to(tl.int64) * rows
        part_rows = split * all_rows + slot.to(tl.int64) * rows + row
        states = work_ptr + splits * all_rows * DV
        tl.store(states + part_rows, m, mask=in_use)
        tl.store(states + splits * all_rows + part_rows, l, mask=in_use)
        if (start < stop) | (split == 0):  # the first part may hold a sink and no key
            tl.store(work_ptr + part_rows[:, None] * DV + offs_d[None, :], acc, mask=in_use[:, None] & (offs_d < DV)[None, :])


def attention(t: CacheOperands, r: CacheRules, out: Tensor, lse: Tensor, calls: tuple[CacheLaunch, ...]) -> None:
    """Fill out (B, Sq, Hq, Dv) and lse (B, Hq, Sq); packed: (1, total, Hq, Dv) and (Hq, total), 0 and -inf outside the offsets."""
    if t.cu_seqlens_q is not None:
        out.zero_()
        lse.fill_(float("-inf"))
        if t.batch == 0:
            return
    small, read = vectors(t), captured(t)
    with on_device(out.device):
        for call in calls:
            work = None
            if call.splits > 1:
                work = torch.empty(call.splits * call.slots * call.rows * (out.shape[3] + 2), dtype=torch.float32, device=out.device)
            run(
                attention_cached, call.slots * call.splits, t.q, t.k_cache, t.v_cache, out, lse, work, *small, *call.strides,
                *call.rows_and_heads, call.splits, r.appended, call.capacity, *call.numbers, *read, **call.constants,
            )  # fmt: skip
            if work is not None:
                run(
                    merge_parts, call.slots * call.rows, work, out, lse, t.cu_seqlens_q, *call.rows_and_heads, call.splits, call.unit,
                    call.unit_exact, BLOCK_S=MERGED_AT_ONCE, num_warps=4, **call.merge_options, **call.shared_constants,
                )  # fmt: skip
