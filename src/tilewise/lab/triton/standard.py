# mypy: disable-error-code="no-untyped-def"
"""Standard attention in three launches, S and P in device memory. Counted twin: `tilewise.lab.standard`."""

import torch
import triton
import triton.language as tl

from .softmax_rows import softmax_rows
from .tiles import load_tile, scores, store_tile


@triton.jit
def scores_kernel(q_ptr, k_ptr, s_ptr, scale, n, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    head = tl.program_id(2)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    q = load_tile(q_ptr, head, rows, n, D)  # (BLOCK_M, D)
    k = load_tile(k_ptr, head, cols, n, D)  # (BLOCK_N, D)
    s = scores(q, k, scale, cols, n)  # (BLOCK_M, BLOCK_N)
    tl.store(s_ptr + _square(head, rows, cols, n), s.to(s_ptr.dtype.element_ty), mask=(rows[:, None] < n) & (cols[None, :] < n))


@triton.jit
def weighted_sum_kernel(p_ptr, v_ptr, o_ptr, n, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    head = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    for start in range(0, n, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        inside = (rows[:, None] < n) & (cols[None, :] < n)
        p = tl.load(p_ptr + _square(head, rows, cols, n), mask=inside, other=0.0, cache_modifier=".cg")  # (BLOCK_M, BLOCK_N)
        v = load_tile(v_ptr, head, cols, n, D)  # (BLOCK_N, D)
        acc = tl.dot(p, v, acc, input_precision="ieee")
    store_tile(o_ptr, acc, head, rows, n, D)


@triton.jit
def _square(head, rows, cols, n):
    """Offsets of a tile of a (heads, N, N) tensor."""
    return (head.to(tl.int64) * n + rows[:, None]) * n + cols[None, :]


def forward(q, k, v, scale, block_m=128, block_n=64):
    """o for contiguous (heads, N, D) tensors, D a power of two; N x N scratch in the input dtype."""
    heads, n, d = q.shape
    s = torch.empty(heads, n, n, dtype=q.dtype, device=q.device)
    p, o = torch.empty_like(s), torch.empty_like(q)
    tiles_m, tiles_n = triton.cdiv(n, block_m), triton.cdiv(n, block_n)
    sizes = {"D": d, "BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": 4}
    scores_kernel[(tiles_n, tiles_m, heads)](q, k, s, scale, n, **sizes)
    softmax_rows(s.view(heads * n, n), p.view(heads * n, n), passes=1)
    weighted_sum_kernel[(tiles_m, heads)](p, v, o, n, **sizes)
    return o
