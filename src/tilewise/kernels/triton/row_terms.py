"""What the backward pass needs to know of each query: two numbers. Run once, before the kernels that walk tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl

from .launch import LOG2E as HOST_LOG2E
from .launch import RUNTIME, Launch, alignment, contiguous, strides
from .lse_rest import lse_rest_of
from .tiles import LOG2E, NEG_INF, head_of, load_tile, used_length

if TYPE_CHECKING:
    from torch import Tensor

    from ...plan import Operands, Saved

BLOCK_M = 64


class RowTerms(NamedTuple):
    """What each query keeps for the backward pass: (B, Hq, Sq) in float32, Sq padded to ROW_BLOCK."""

    lse: Tensor
    rest: Tensor | None
    delta: Tensor


@triton.jit(do_not_specialize=RUNTIME)
def row_terms(
    out_ptr, do_ptr, lse_ptr, rest_ptr, dlse_ptr, delta_ptr, row_lse_ptr, sink_ptr, sink_partial_ptr, seqused_q_ptr,
    stride_ob: tl.int64, stride_oh: tl.int64, stride_os: tl.int64, stride_od,
    stride_dob: tl.int64, stride_doh: tl.int64, stride_dos: tl.int64, stride_dod,
    stride_dlse_b: tl.int64, stride_dlse_h: tl.int64, stride_dlse_m: tl.int64,
    heads, size_q, row_tiles, lse_scale,
    ALIGN: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """delta = sum(out * dout) - dlse, and the LSE as `probabilities` wants it, both neutral for queries that see nothing: those of no
    packed sequence are among them, so that this kernel need not know where sequences start.

    A sink's logit gains -exp(sink - lse) * delta from each query: it is a key whose value, and so whose dP, is zero.
    """
    tile, bh = tl.program_id(0) % row_tiles, tl.program_id(0) // row_tiles
    b, h, m0 = bh // heads, bh % heads, tile * BLOCK_M
    len_q = used_length(seqused_q_ptr, b, size_q)
    offs_m = m0 + tl.arange(0, BLOCK_M)
    inside = offs_m < len_q
    at = (b, h, None)
    out_head = (head_of(out_ptr, at, stride_ob, stride_oh, stride_os, ALIGN, False), stride_os * ALIGN, stride_od, at)
    do_head = (head_of(do_ptr, at, stride_dob, stride_doh, stride_dos, ALIGN, False), stride_dos * ALIGN, stride_dod, at)
    o = load_tile(out_head, m0, len_q, BLOCK_M, BLOCK_DV, DV, False, True).to(tl.float32)
    do = load_tile(do_head, m0, len_q, BLOCK_M, BLOCK_DV, DV, False, True).to(tl.float32)
    lse = tl.load(lse_ptr + bh.to(tl.int64) * size_q + offs_m, mask=inside, other=NEG_INF)
    delta = tl.sum(o * do, 1)  # [M]
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + (b * stride_dlse_b + h * stride_dlse_h + offs_m * stride_dlse_m), mask=inside, other=0.0)
    empty = lse == NEG_INF
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # of the padded results
    delta = tl.where(empty, 0.0, delta)
    if sink_ptr is not None:
        exponent = (tl.load(sink_ptr + h).to(tl.float32) - lse) * LOG2E
        if rest_ptr is not None:
            exponent -= tl.load(rest_ptr + rows)
        weight = tl.where(empty, 0.0, tl.exp2(exponent))
        tl.store(sink_partial_ptr + tl.program_id(0), -tl.sum(weight * delta, 0))
    tl.store(delta_ptr + rows, delta)
    tl.store(row_lse_ptr + rows, tl.where(empty, float("inf"), lse * lse_scale))


def row_terms_of(call: Launch, t: Operands, saved: Saved, dout: Tensor, dlse: Tensor | None, dsink: Tensor | None) -> RowTerms:
    """Launch `row_terms` and finish the sink's gradient."""
    rest = lse_rest_of(call, t, saved.lse)
    row_tiles = call.rows_padded // BLOCK_M
    row_lse, delta = (saved.lse.new_empty(call.batch, call.heads, row_tiles * BLOCK_M) for _ in range(2))
    partial = None if dsink is None else saved.lse.new_empty(call.batch, call.heads, row_tiles)
    if not call.repeat(row_terms, (saved.out, dout, saved.lse, rest, dlse, delta, row_lse, partial)):
        align = alignment(saved.out, dout)
        dlse_strides = (0, 0, 0) if dlse is None else dlse.stride()
        call.run(row_terms, row_tiles * call.batch * call.heads,
            saved.out, dout, saved.lse, rest, dlse, delta, row_lse,
            None if dsink is None else contiguous(t.sink), partial, call.seqused_q,
            *strides(saved.out, align), *strides(dout, align), *dlse_strides,
            call.heads, call.size_q, row_tiles, 1.0 if call.natural else HOST_LOG2E,
            ALIGN=align, DV=call.dv, BLOCK_DV=call.block_dv, BLOCK_M=BLOCK_M, num_warps=4, num_stages=1,
        )  # fmt: skip
    if dsink is not None and partial is not None:
        dsink.copy_(partial.sum((0, 2)))
    return RowTerms(row_lse, rest, delta)
