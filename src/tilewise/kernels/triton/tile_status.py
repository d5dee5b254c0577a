"""What a rule's program shows in each tile of the score matrix: one program a tile, and none of the pairs is ever written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from .launch import RUNTIME, as_bytes, run
from .programs import run_program

if TYPE_CHECKING:
    from torch import Tensor

UNKNOWN: tl.constexpr = tl.constexpr(3)
STEP = 32  # queries looked at together: a block of 256 by 256 at once would spill


@triton.jit(do_not_specialize=[*RUNTIME, "rows", "width"])
def tile_status(
    status_ptr, base_ptr, captured_ptr, captured_sizes, heads, rows, width, size_q, size_k,
    PROGRAM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Replaces UNKNOWN by 0, 1 or 2: empty, partial, full."""
    tile = tl.program_id(0).to(tl.int64)
    if tl.load(status_ptr + tile) == UNKNOWN:
        place, row = (tile % width).to(tl.int32), tile // width
        m, bh = (row % rows).to(tl.int32), (row // rows).to(tl.int32)
        offs_n = (tl.load(base_ptr + m) + place) * BLOCK_N + tl.arange(0, BLOCK_N)
        program = (captured_ptr, captured_sizes, None, bh // heads, bh % heads, size_q - 1, size_k - 1)
        some, every = tl.zeros([STEP, BLOCK_N], tl.int1), tl.full([STEP, BLOCK_N], 1, tl.int1)
        for start in tl.range(0, BLOCK_M, STEP):
            offs_m = m * BLOCK_M + start + tl.arange(0, STEP)
            exists = (offs_m < size_q)[:, None] & (offs_n < size_k)[None, :]
            seen = exists & run_program(PROGRAM, program, None, None, offs_m, offs_n, (size_q, size_k), False)
            some |= seen
            every &= seen | ~exists
        any_seen = tl.max(tl.max(some.to(tl.int32), 1), 0)
        all_seen = tl.min(tl.min(every.to(tl.int32), 1), 0)
        tl.store(status_ptr + tile, any_seen + all_seen * any_seen)


def evaluate(
    text: str, captured: list[Tensor], status: Tensor, base: Tensor, size_q: int, size_k: int, block_m: int, block_n: int
) -> Tensor:
    """The status (B, H, rows, width), uint8, with every unknown tile looked at; ``base`` (rows,) is the first block of keys of a row."""
    from .emission import encoded, facts, forward_text, sizes

    batch, heads, rows, width = status.shape
    result = status.clone()
    known = tuple(map(facts, captured))
    run(
        tile_status,
        result.numel(),
        status_ptr=result,
        base_ptr=base.int(),
        captured_ptr=tuple(as_bytes(x) for x in captured) or None,
        captured_sizes=tuple(encoded(x) for x in captured) or None,
        heads=heads,
        rows=rows,
        width=width,
        size_q=size_q,
        size_k=size_k,
        PROGRAM=forward_text(text, known, sizes(batch, heads, size_q, size_k, False)),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        STEP=min(STEP, block_m),
        num_warps=4,
    )
    return result
