"""Whether hidden values could show at all. A probability of 0 cancels every finite number, but 0 times NaN or infinity is NaN.

Kernels that walk tiles can hide what nobody sees, with `hide_rows`, at a quarter to a third of their time, and nearly no call holds any
but finite numbers. So this kernel reads once what they multiply zeros with, and leaves a flag on the device that they read as they start:
the host waits for nothing, and a captured graph asks anew on every replay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from .configs import padded
from .launch import RUNTIME, Launch, alignment, strides
from .recipes import Launcher, run
from .tiles import head_of, load_tile

if TYPE_CHECKING:
    from torch import Tensor

ROWS = 64  # of a program
# Multiply-adds of a pass from which on asking pays, 0.3 ms of an H200: what it saves of less is no more than the launches cost its host.
LEAST_WORK = 1 << 34


@triton.jit(do_not_specialize=RUNTIME)
def find_nonfinite(
    x_ptr, nonfinite_ptr, stride_xb: tl.int64, stride_xh: tl.int64, stride_xs: tl.int64, stride_xd, heads, size, row_tiles,
    ALIGN: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Set the flag if a tile of rows holds a NaN or an infinity. All who set it write the same, so that none has to wait."""
    tile, bh = tl.program_id(0) % row_tiles, tl.program_id(0) // row_tiles
    at = (bh // heads, bh % heads, None)
    x_head = (head_of(x_ptr, at, stride_xb, stride_xh, stride_xs, ALIGN, False), stride_xs * ALIGN, stride_xd, at)
    x = load_tile(x_head, tile * BLOCK_M, size, BLOCK_M, BLOCK_D, D, False, True).to(tl.float32)  # [M, D]
    bad = 1 - (tl.abs(x) < float("inf")).to(tl.int32)
    worst = tl.max(tl.max(bad, 1), 0)
    tl.store(nonfinite_ptr, worst, mask=worst > 0)


@triton.jit
def clear_flag(nonfinite_ptr):
    tl.store(nonfinite_ptr, 0)


def nonfinite_flag(*tensors: Tensor) -> Tensor:
    """int32 (1,) beside the tensors (B, H, S, D), on their device's current stream: 1 if one of them holds a NaN or an infinity, else 0."""
    import torch

    flag = tensors[0].new_empty(1, dtype=torch.int32)
    run(clear_flag, 1, flag, num_warps=1)  # a launch like all others, so that a pass that comes again can be played (`kernels.replay`)
    for x in tensors:
        if x.numel() == 0:
            continue
        call = Launcher((x,), () if x.is_cuda else None)
        if call.repeat(find_nonfinite, (flag,)):
            continue
        batch, heads, size, d = x.shape
        align, row_tiles = alignment(x), triton.cdiv(size, ROWS)
        call.run(
            find_nonfinite, row_tiles * batch * heads, x, flag, *strides(x, align), heads, size, row_tiles,
            ALIGN=align, D=d, BLOCK_D=padded(d), BLOCK_M=ROWS, num_warps=4, num_stages=1,
        )  # fmt: skip
    return flag


def worth_a_flag(call: Launch) -> bool:
    """Whether a call hides values in so many tiles, and has so much work, that it had better know whether they matter.

    Lengths, packed sequences and lists hide some in the last tiles of a walk only.
    """
    t = call.t
    windowed = call.r.window_left >= 0 and t.blocks is None and t.cu_seqlens_q is None
    if not (call.sanitize and (call.dense or windowed)):
        return False
    left, right = call.r.window_left, call.r.window_right
    keys = call.size_k // max(call.sequences or 1, 1)
    if left >= 0 and right >= 0:
        keys = min(keys, left + right + 1)
    return call.batch * call.heads * call.size_q * keys * (call.d + call.dv) >= LEAST_WORK
