# mypy: disable-error-code="no-untyped-def"
"""FlashAttention over the tiles that a list names. Counted twin: `tilewise.lab.block_sparse`."""

import torch
import triton
import triton.language as tl

from .fa2 import online_update, warps
from .tiles import load_tile, scores, store_state, store_tile


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, counts_ptr, indices_ptr, scale, n, tiles_n,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    head = tl.program_id(1)
    rows = number * BLOCK_M + tl.arange(0, BLOCK_M)
    q = load_tile(q_ptr, head, rows, n, D)  # (BLOCK_M, D)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    for position in range(0, tl.load(counts_ptr + number)):
        cols = tl.load(indices_ptr + number * tiles_n + position) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = load_tile(k_ptr, head, cols, n, D)  # (BLOCK_N, D)
        v = load_tile(v_ptr, head, cols, n, D)
        acc, m, l = online_update(acc, m, l, scores(q, k, scale, cols, n), v)
    empty = l == 0.0
    store_tile(o_ptr, acc / tl.where(empty, 1.0, l)[:, None], head, rows, n, D)
    store_state(lse_ptr, tl.where(empty, float("-inf"), m + tl.log(tl.where(empty, 1.0, l))), head, rows, n)


def forward(q, k, v, counts, indices, scale, block_m=128, block_n=64):
    """o, lse over the tiles listed by `tilewise.lab.block_sparse.tile_lists`, on the device of q."""
    heads, n, d = q.shape
    o, lse = torch.empty_like(q), torch.empty(heads, n, dtype=torch.float32, device=q.device)
    sizes = {"D": d, "BLOCK_M": block_m, "BLOCK_N": block_n}
    forward_kernel[(triton.cdiv(n, block_m), heads)](
        q, k, v, o, lse, counts, indices, scale, n, indices.shape[1], **sizes, num_warps=warps(block_m, d), num_stages=2
    )  # fmt: skip
    return o, lse
