"""Adding up the parts of a split softmax: one program a query and head."""

from __future__ import annotations

import triton
import triton.language as tl

from ..tiles import LOG2E, NEG_INF, log_sum_exp
from .tiles import item_and_row, queries_of

MERGED_AT_ONCE = 32


RUNTIME = ["kv_heads", "group", "size_q", "total", "items", "row_tiles", "slots", "rows", "least_rows", "most_rows", "splits"]


@triton.jit(do_not_specialize=RUNTIME)
def merge_parts(
    work_ptr, out_ptr, lse_ptr, offsets_ptr, kv_heads, group, size_q, total, items, row_tiles, slots, rows, least_rows, most_rows, splits,
    unit, unit_exact,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, SEARCH: tl.constexpr, BLOCK_S: tl.constexpr, NATURAL: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out = sum_s e^(m_s - m) acc_s / l with l = sum_s e^(m_s - m) l_s and m = max_s m_s (Milakov & Gimelshein 2018, section 3.1).

    Parts are added BLOCK_S at a time in their own order: the sum does not depend on how many empty ones follow. An empty part has l = 0,
    and its accumulator was never written; it is read all the same and not used, so that no load waits for another, which is most of what
    a merge takes. DEPENDENT: it was launched before the parts were there.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    slot, r = tl.program_id(0) // rows, tl.program_id(0) % rows
    hk, tile, b = slot % kv_heads, slot // kv_heads % row_tiles, slot // kv_heads // row_tiles
    b, m0 = item_and_row(offsets_ptr, b, tile, items, group, BLOCK_M, SEARCH)
    first, count = queries_of(offsets_ptr, b, size_q, group, least_rows, most_rows)
    token, h, heads = (m0 + r) // group, hk * group + (m0 + r) % group, kv_heads * group
    parts = tl.where(token < count, splits, 0)  # where there is no query, no part has written
    all_rows = slots.to(tl.int64) * rows
    row = tl.program_id(0).to(tl.int64)
    states = work_ptr + splits * all_rows * DV + row
    offs_d = tl.arange(0, BLOCK_DV)

    m = tl.full([], NEG_INF, tl.float32)
    l = tl.zeros([], tl.float32)
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for s0 in tl.range(0, parts, BLOCK_S):
        offs_s = s0 + tl.arange(0, BLOCK_S)
        there = offs_s < splits
        m_s = tl.load(states + offs_s * all_rows, mask=there, other=NEG_INF)
        l_s = tl.load(states + (splits + offs_s) * all_rows, mask=there, other=0.0)
        here = there[:, None] & (offs_d < DV)[None, :]
        part = tl.load(work_ptr + (offs_s * all_rows + row)[:, None] * DV + offs_d[None, :], mask=here, other=0.0)  # [S, DV]
        latest = tl.maximum(m, tl.max(m_s, 0))
        origin = tl.where(latest == NEG_INF, 0.0, latest)
        weight = tl.exp2((m_s - origin) * LOG2E if NATURAL else m_s - origin)
        weight = tl.where(l_s != 0.0, weight, 0.0)
        alpha = tl.exp2((m - origin) * LOG2E if NATURAL else m - origin)
        l = l * alpha + tl.sum(weight * l_s, 0)
        acc = acc * alpha + tl.sum(tl.where((l_s != 0.0)[:, None], part, 0.0) * weight[:, None], 0)
        m = latest

    out_row = (first + token) * heads + h
    lse_row = h.to(tl.int64) * total + first + token
    if offsets_ptr is None:
        lse_row = (b * heads + h).to(tl.int64) * size_q + token
    if token < count:
        tl.store(out_ptr + out_row * DV + offs_d, acc / tl.where(l == 0.0, 1.0, l), mask=offs_d < DV)
        tl.store(lse_ptr + lse_row, log_sum_exp(m, l, (unit, unit_exact), NATURAL))
