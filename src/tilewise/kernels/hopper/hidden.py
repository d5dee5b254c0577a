"""Copies of tensors in which what nobody sees is finite: for calls whose bias or mask may hide any key from every query.

The attention kernels multiply what is hidden by a probability of 0, which a NaN or an infinity survives. Where they must not meet one runs
this kernel: it copies a tensor of O(N D), and only where a row of it is not finite does it look into the bias and the mask for somebody who
sees that row. The backward kernels read such copies always, the forward kernel only where it was found to need one (`guard`).
Strides come in units of ALIGN elements, so that the compiler knows how wide it may read; an inner stride of 1 comes as None.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from ..triton.launch import alignment, as_bytes, broadcast_strides, strides
from ..triton.recipes import Launcher
from . import configs

if TYPE_CHECKING:
    from torch import Tensor

    from ...plan import Operands, Rules

ROWS = 64  # of a program
WORDS: tl.constexpr = tl.constexpr(configs.MOST_PROGRAMS)
MET: tl.constexpr = tl.constexpr(16)  # of those that may see them, looked at together: more would take the registers of further programs
_RUNTIME = ["heads", "shared", "readers", "size", "size_q", "size_k", "window_left", "window_right", "words"]
_RUNTIME += ["stride_x_b", "stride_x_h", "stride_x_s", *(f"stride_{x}_{dim}" for x in ("bias", "mask") for dim in "bhmn")]


@triton.jit(do_not_specialize=_RUNTIME)
def copy_finite(
    x_ptr, copy_ptr, found_ptr, bias_ptr, mask_ptr, lengths_q_ptr, lengths_k_ptr,
    stride_x_b: tl.int64, stride_x_h: tl.int64, stride_x_s: tl.int64, stride_x_d,
    stride_bias_b: tl.int64, stride_bias_h: tl.int64, stride_bias_m: tl.int64, stride_bias_n: tl.int64,
    stride_mask_b: tl.int64, stride_mask_h: tl.int64, stride_mask_m: tl.int64, stride_mask_n: tl.int64,
    heads, shared, readers, size, size_q, size_k, window_left, window_right, words,
    KEYS: tl.constexpr, ALIGN: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The copy has `heads` heads: `shared` of them have one head of x, and each is read by `readers` query heads. KEYS: rows are keys.

    With `found_ptr`: if none of its words is 1, nobody is going to read the copy.
    """
    if found_ptr is not None:
        offs_words = tl.arange(0, WORDS)
        if tl.max(tl.load(found_ptr + offs_words, mask=offs_words < words, other=0), 0) == 0:
            return
    tiles = tl.cdiv(size, ROWS)
    tile, head = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    b, h = (head // heads).to(tl.int64), head % heads
    offs = tile * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)[None, :]
    inside = (offs < size)[:, None] & (columns < DIM)
    source = x_ptr + (b * stride_x_b + (h // shared) * stride_x_h + offs.to(tl.int64)[:, None] * stride_x_s) * ALIGN
    target = copy_ptr + (head.to(tl.int64) * size + offs)[:, None] * DIM + columns
    x = tl.load(source + columns * (1 if stride_x_d is None else stride_x_d), mask=inside, other=0.0)
    tl.store(target, x, mask=inside)  # nothing waits for the answer, nor keeps the rows in registers until then
    wild = tl.max((tl.abs(x.to(tl.float32)) < float("inf")).to(tl.int32) ^ 1, 1)  # [ROWS]
    if tl.max(wild, 0) > 0:
        length_q, length_k = size_q, size_k
        if lengths_q_ptr is not None:
            length_q = tl.minimum(tl.maximum(tl.load(lengths_q_ptr + b), 0), size_q)
        if lengths_k_ptr is not None:
            length_k = tl.minimum(tl.maximum(tl.load(lengths_k_ptr + b), 0), size_k)
        others = tl.cdiv(size_q if KEYS else size_k, MET)
        seen = tl.zeros([ROWS], tl.int32)
        for i in range(readers * others):
            reader = h * readers + i // others
            met = i % others * MET + tl.arange(0, MET)
            rows, keys = (met[None, :], offs[:, None]) if KEYS else (offs[:, None], met[None, :])
            position = rows + (length_k - length_q)
            pair = (rows < length_q) & (keys < length_k) & (keys >= position - window_left) & (keys <= position + window_right)
            rows, keys = rows.to(tl.int64), keys.to(tl.int64)
            if bias_ptr is not None:
                at = bias_ptr + b * stride_bias_b + reader * stride_bias_h + rows * stride_bias_m + keys * stride_bias_n
                pair &= tl.load(at, mask=pair, other=float("-inf")).to(tl.float32) != float("-inf")
            if mask_ptr is not None:
                at = mask_ptr + b * stride_mask_b + reader * stride_mask_h + rows * stride_mask_m + keys * stride_mask_n
                pair &= tl.load(at, mask=pair, other=0) != 0
            seen = tl.maximum(seen, tl.max(pair.to(tl.int32), 1))
        tl.store(target, tl.zeros_like(x), mask=inside & ((wild > 0) & (seen == 0))[:, None])


def finite_copy(x: Tensor, t: Operands, r: Rules, *, keys: bool, heads: int, found: Tensor | None = None) -> Tensor:
    """A contiguous copy of x (B, H, S, D) with `heads` heads, a multiple of H; rows that are not finite and that nobody sees are 0.

    `keys`: its rows are keys, and all query heads of the call share its heads evenly; else they are queries. `found`: int32, on whose
    account it is made; where all of them are 0 it is left empty.
    """
    batch, heads_x, size, dim = x.shape
    _, heads_q, size_q, _ = t.q.shape
    size_k = t.k.shape[2]
    copy = x.new_empty(batch, heads, size, dim)
    lengths = [None if n is None else n.contiguous() for n in (t.seqused_q, t.seqused_k)]
    furthest = size_q + size_k  # a window beyond it hides nothing; keeps positions inside int32
    windows = [furthest if w < 0 else min(w, furthest) for w in (r.window_left, r.window_right)]
    rules = (heads, heads_q, size_q, size_k, *windows, keys)
    call = Launcher((x, t.bias, t.mask, *lengths), rules if x.is_cuda else None)
    if not call.repeat(copy_finite, (copy, found)):
        align = alignment(x)
        call.run(
            copy_finite, batch * heads * triton.cdiv(size, ROWS),
            x, copy, found, t.bias, as_bytes(t.mask), *lengths,
            *strides(x, align), *broadcast_strides(t.bias), *broadcast_strides(t.mask),
            heads, heads // heads_x, heads_q // heads, size, size_q, size_k, *windows, 0 if found is None else found.numel(),
            KEYS=keys, ALIGN=align, DIM=dim, COLUMNS=triton.next_power_of_2(dim), ROWS=ROWS, num_warps=4,
        )  # fmt: skip
    return copy
