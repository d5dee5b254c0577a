"""What each tile of the score matrix shows, from a rule's program or from the ranges of keys that queries see: no pair is ever written.

Status is kept for a band: `width` blocks of keys for each block of queries, from `band_start` on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from .launch import RUNTIME, as_bytes, run
from .programs import run_program

if TYPE_CHECKING:
    from torch import Tensor

    from ...tile_status import Grid

UNKNOWN: tl.constexpr = tl.constexpr(3)
STEP = 16  # queries looked at together: more take more registers and hide no more latency
GROUP = 8  # tiles of a program: most are known already, and a program that finds nothing to do costs as much as a launch of one
CHUNK = 32  # blocks of keys looked at together


@triton.jit
def band_start(block, others, width, shift, BLOCK: tl.constexpr, OTHER: tl.constexpr):
    """The first of the ``width`` blocks of keys in the band of a block of queries, which starts ``shift`` keys left of its first query."""
    return tl.minimum(tl.maximum(block * BLOCK - shift, 0) // OTHER, others - width)


@triton.jit
def seen_pairs(
    program, m, first, size_q, size_k,
    PROGRAM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """How many pairs of block m of queries and the keys from ``first`` on the program shows; RAGGED: some lie beyond a length."""
    offs_n = first + tl.arange(0, BLOCK_N)
    count = tl.zeros([STEP, BLOCK_N], tl.int32)
    for start in tl.range(0, BLOCK_M, STEP):
        offs_m = m * BLOCK_M + start + tl.arange(0, STEP)
        seen = run_program(PROGRAM, program, None, None, offs_m, offs_n, (size_q, size_k), False)
        if RAGGED:
            seen &= (offs_m < size_q)[:, None] & (offs_n < size_k)[None, :]
        count += seen.to(tl.int32)
    return tl.sum(tl.sum(count, 1), 0)


@triton.jit(do_not_specialize=[*RUNTIME, "tiles", "rows", "columns", "width", "shift"])
def tile_status(
    status_ptr, found_ptr, captured_ptr, captured_sizes, tiles, heads, rows, columns, width, shift, size_q, size_k,
    PROGRAM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Copies the status of GROUP tiles, with 0, 1 or 2 (empty, partial, full) in the place of UNKNOWN."""
    for tile in tl.range(tl.program_id(0).to(tl.int64) * GROUP, tl.minimum((tl.program_id(0).to(tl.int64) + 1) * GROUP, tiles)):
        status = tl.load(status_ptr + tile)
        if status == UNKNOWN:
            place, row = (tile % width).to(tl.int32), tile // width
            m, bh = (row % rows).to(tl.int32), (row // rows).to(tl.int32)
            first = (band_start(m, columns, width, shift, BLOCK_M, BLOCK_N) + place) * BLOCK_N
            program = (captured_ptr, captured_sizes, None, bh // heads, bh % heads, size_q - 1, size_k - 1)
            exist_m, exist_n = tl.minimum(BLOCK_M, size_q - m * BLOCK_M), tl.minimum(BLOCK_N, size_k - first)
            if exist_m * exist_n == BLOCK_M * BLOCK_N:
                seen = seen_pairs(program, m, first, size_q, size_k, PROGRAM, BLOCK_M, BLOCK_N, STEP, False)
            else:
                seen = seen_pairs(program, m, first, size_q, size_k, PROGRAM, BLOCK_M, BLOCK_N, STEP, True)
            status = tl.where(seen == 0, 0, tl.where(seen == exist_m * exist_n, 2, 1)).to(tl.uint8)
        tl.store(found_ptr + tile, status)


@triton.jit(do_not_specialize=["stride_start", "stride_stop", "rows", "columns", "width", "shift", "size_q", "size_k"])
def range_status(
    status_ptr, start_ptr, stop_ptr, stride_start, stride_stop, rows, columns, width, shift, size_q, size_k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The status of CHUNK tiles of one block of queries, each of which sees the keys from ``start`` to before ``stop``."""
    chunks = tl.cdiv(width, CHUNK)
    program = tl.program_id(0)
    chunk, row = program % chunks, (program // chunks).to(tl.int64)
    m, b = (row % rows).to(tl.int32), row // rows
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    first = (band_start(m, columns, width, shift, BLOCK_M, BLOCK_N) + place) * BLOCK_N  # [CHUNK]
    after = tl.minimum(first + BLOCK_N, size_k)
    offs_m = m * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = offs_m < size_q
    start = tl.load(start_ptr + b * stride_start + offs_m, mask=exists, other=0)
    stop = tl.load(stop_ptr + b * stride_stop + offs_m, mask=exists, other=0)
    start = tl.minimum(tl.maximum(start, 0), size_k).to(tl.int32)[:, None]  # [BLOCK_M, 1]
    stop = tl.minimum(tl.maximum(stop, 0), size_k).to(tl.int32)[:, None]
    seen = tl.maximum(start, first[None, :]) < tl.minimum(stop, after[None, :])  # [BLOCK_M, CHUNK]
    whole = (start <= first[None, :]) & (stop >= after[None, :]) | ~exists[:, None]
    status = tl.max(seen.to(tl.int32), 0) + tl.min((seen & whole | ~exists[:, None]).to(tl.int32), 0)
    tl.store(status_ptr + row * width + place, status.to(tl.uint8), mask=place < width)


def evaluate(text: str, captured: list[Tensor], status: Tensor, grid: Grid) -> Tensor:
    """The status (B, H, rows, width), uint8, with every unknown tile looked at."""
    import torch

    from .emission import encoded, facts, forward_text, sizes

    batch, heads, rows, width = status.shape
    found = torch.empty_like(status)
    known = tuple(map(facts, captured))
    run(
        tile_status,
        -(-found.numel() // GROUP),
        status_ptr=status,
        found_ptr=found,
        captured_ptr=tuple(as_bytes(x) for x in captured) or None,
        captured_sizes=tuple(encoded(x) for x in captured) or None,
        tiles=found.numel(),
        heads=heads,
        rows=rows,
        columns=grid.columns,
        width=width,
        shift=grid.shift,
        size_q=grid.seqlen_q,
        size_k=grid.seqlen_k,
        PROGRAM=forward_text(text, known, sizes(batch, heads, grid.seqlen_q, grid.seqlen_k, False)),
        BLOCK_M=grid.block_m,
        BLOCK_N=grid.block_n,
        STEP=min(STEP, grid.block_m),
        GROUP=GROUP,
        num_warps=4,
    )
    return found


def of_ranges(start: Tensor, stop: Tensor, grid: Grid) -> Tensor:
    """The status (B, 1, rows, width), uint8, where query i of item b sees the keys from start[b, i] to before stop[b, i], int64."""
    import torch

    start, stop = (x if x.stride(1) == 1 else x.contiguous() for x in (start, stop))
    status = torch.empty(start.shape[0], 1, grid.rows, grid.width, dtype=torch.uint8, device=start.device)
    if not status.numel():
        return status
    run(
        range_status,
        start.shape[0] * grid.rows * -(-grid.width // CHUNK),
        status_ptr=status,
        start_ptr=start,
        stop_ptr=stop,
        stride_start=start.stride(0),
        stride_stop=stop.stride(0),
        rows=grid.rows,
        columns=grid.columns,
        width=grid.width,
        shift=grid.shift,
        size_q=grid.seqlen_q,
        size_k=grid.seqlen_k,
        BLOCK_M=grid.block_m,
        BLOCK_N=grid.block_n,
        CHUNK=CHUNK,
        num_warps=8,
    )
    return status
