# mypy: disable-error-code="no-untyped-def"
"""FlashAttention with the outer loop over Q, one program a query tile. Counted twin: `tilewise.lab.fa2`."""

import torch
import triton
import triton.language as tl

from .tiles import load_state, load_tile, scores, store_state, store_tile


@triton.jit
def online_update(acc, m, l, s, v):
    """The state (acc, m, l) of a query tile after one more tile of scores (BLOCK_M, BLOCK_N) and values (BLOCK_N, D)."""
    m_new = tl.maximum(m, tl.max(s, 1))
    rescale = tl.exp(m - m_new)
    p = tl.exp(s - m_new[:, None])
    acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return acc, m_new, l * rescale + tl.sum(p, 1)


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, scale, n, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    head = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    q = load_tile(q_ptr, head, rows, n, D)  # (BLOCK_M, D)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, n, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        k = load_tile(k_ptr, head, cols, n, D)  # (BLOCK_N, D)
        v = load_tile(v_ptr, head, cols, n, D)
        acc, m, l = online_update(acc, m, l, scores(q, k, scale, cols, n), v)
    store_tile(o_ptr, acc / l[:, None], head, rows, n, D)
    store_state(lse_ptr, m + tl.log(l), head, rows, n)


@triton.jit
def delta_kernel(o_ptr, do_ptr, delta_ptr, n, D: tl.constexpr, BLOCK_M: tl.constexpr):
    head = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    o = load_tile(o_ptr, head, rows, n, D).to(tl.float32)
    do = load_tile(do_ptr, head, rows, n, D).to(tl.float32)
    store_state(delta_ptr, tl.sum(o * do, 1), head, rows, n)


@triton.jit
def recompute(q, k, v, do, lse, delta, scale, cols, n):
    """P and dS (BLOCK_M, BLOCK_N), from what a tile of queries and one of keys hold."""
    p = tl.exp(scores(q, k, scale, cols, n) - lse[:, None])
    return p, p * (tl.dot(do, tl.trans(v), input_precision="ieee") - delta[:, None])


@triton.jit
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, scale, n,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = load_tile(k_ptr, head, cols, n, D)  # (BLOCK_N, D)
    v = load_tile(v_ptr, head, cols, n, D)
    dk = tl.zeros([BLOCK_N, D], tl.float32)
    dv = tl.zeros([BLOCK_N, D], tl.float32)
    for start in range(0, n, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        q = load_tile(q_ptr, head, rows, n, D)  # (BLOCK_M, D)
        do = load_tile(do_ptr, head, rows, n, D)
        lse = load_state(lse_ptr, head, rows, n)
        delta = load_state(delta_ptr, head, rows, n)
        p, ds = recompute(q, k, v, do, lse, delta, scale, cols, n)
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision="ieee")
        dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision="ieee")
    store_tile(dk_ptr, dk * scale, head, cols, n, D)
    store_tile(dv_ptr, dv, head, cols, n, D)


@triton.jit
def dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, scale, n,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    q = load_tile(q_ptr, head, rows, n, D)  # (BLOCK_M, D)
    do = load_tile(do_ptr, head, rows, n, D)
    lse = load_state(lse_ptr, head, rows, n)
    delta = load_state(delta_ptr, head, rows, n)
    dq = tl.zeros([BLOCK_M, D], tl.float32)
    for start in range(0, n, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        k = load_tile(k_ptr, head, cols, n, D)  # (BLOCK_N, D)
        v = load_tile(v_ptr, head, cols, n, D)
        _, ds = recompute(q, k, v, do, lse, delta, scale, cols, n)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    store_tile(dq_ptr, dq * scale, head, rows, n, D)


def forward(q, k, v, scale, block_m=128, block_n=64):
    """o, lse (float32) for contiguous (heads, N, D) tensors, D a power of two."""
    heads, n, d = q.shape
    o, lse = torch.empty_like(q), torch.empty(heads, n, dtype=torch.float32, device=q.device)
    sizes = {"D": d, "BLOCK_M": block_m, "BLOCK_N": block_n}
    forward_kernel[(triton.cdiv(n, block_m), heads)](q, k, v, o, lse, scale, n, **sizes, num_warps=warps(block_m, d), num_stages=2)
    return o, lse


def warps(block_m, d):
    """Eight warps share the accumulator from 128 x 128 elements on, four a smaller one."""
    return 8 if block_m * d >= 128 * 128 else 4


def backward(q, k, v, o, lse, do, scale, block_m=64, block_n=64):
    """dq, dk, dv in the input dtype."""
    heads, n, d = q.shape
    delta = torch.empty_like(lse)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    tiles_m, tiles_n = triton.cdiv(n, block_m), triton.cdiv(n, block_n)
    sizes = {"D": d, "BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": 8, "num_stages": 1}
    delta_kernel[(tiles_m, heads)](o, do, delta, n, D=d, BLOCK_M=block_m, num_warps=4)
    dkdv_kernel[(tiles_n, heads)](q, k, v, do, lse, delta, dk, dv, scale, n, **sizes)
    dq_kernel[(tiles_m, heads)](q, k, v, do, lse, delta, dq, scale, n, **sizes)
    return dq, dk, dv
