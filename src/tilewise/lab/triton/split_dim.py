# mypy: disable-error-code="no-untyped-def"
"""`fa2.forward` with the head dimension cut into pieces, one program a query tile and piece. Counted twin: `tilewise.lab.split_dim`."""

import torch
import triton
import triton.language as tl

from .fa2 import online_update
from .tiles import store_state


@triton.jit
def load_piece(ptr, head, rows, start, n, d, PIECE: tl.constexpr):
    """Rows of one head, columns `start` to `start + PIECE`; zero outside (n, d)."""
    dims = start + tl.arange(0, PIECE)
    offs = (head.to(tl.int64) * n + rows[:, None]) * d + dims[None, :]
    return tl.load(ptr + offs, mask=(rows[:, None] < n) & (dims[None, :] < d), other=0.0, cache_modifier=".cg")


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, scale, n, d, PIECE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    piece = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = tl.program_id(2)
    acc = tl.zeros([BLOCK_M, PIECE], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    for start_n in range(0, n, BLOCK_N):
        cols = start_n + tl.arange(0, BLOCK_N)
        s = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, d, PIECE):
            q = load_piece(q_ptr, head, rows, start, n, d, PIECE)  # (BLOCK_M, PIECE)
            k = load_piece(k_ptr, head, cols, start, n, d, PIECE)  # (BLOCK_N, PIECE)
            s = tl.dot(q, tl.trans(k), s, input_precision="ieee")
        s = tl.where(cols[None, :] < n, s * scale, float("-inf"))
        v = load_piece(v_ptr, head, cols, piece * PIECE, n, d, PIECE)
        acc, m, l = online_update(acc, m, l, s, v)
    dims = piece * PIECE + tl.arange(0, PIECE)
    offs = (head.to(tl.int64) * n + rows[:, None]) * d + dims[None, :]
    tl.store(o_ptr + offs, (acc / l[:, None]).to(o_ptr.dtype.element_ty), mask=(rows[:, None] < n) & (dims[None, :] < d))
    if piece == 0:
        store_state(lse_ptr, m + tl.log(l), head, rows, n)


def forward(q, k, v, scale, piece=128, block_m=128, block_n=64):
    """o, lse (float32) for contiguous (heads, N, D) tensors of any D; `piece` is a power of two."""
    heads, n, d = q.shape
    o, lse = torch.empty_like(q), torch.empty(heads, n, dtype=torch.float32, device=q.device)
    grid = (triton.cdiv(d, piece), triton.cdiv(n, block_m), heads)
    sizes = {"PIECE": piece, "BLOCK_M": block_m, "BLOCK_N": block_n}
    forward_kernel[grid](q, k, v, o, lse, scale, n, d, **sizes, num_warps=8, num_stages=2)
    return o, lse
