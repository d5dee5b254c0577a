# mypy: disable-error-code="no-untyped-def"
"""FlashAttention with the outer loop over K and V, one program a head. Counted twin: `tilewise.lab.fa1`.

A program reads state that it wrote itself, so each pass over the queries ends with a barrier: it makes the stores of every thread of the
program visible to the others. The inner loops are not pipelined, for the same reason.
"""

import torch
import triton
import triton.language as tl

from .tiles import load_state, load_tile, scores, store_state, store_tile


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, m_ptr, l_ptr, scale, n, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    head = tl.program_id(0)
    for start_n in range(0, n, BLOCK_N):
        cols = start_n + tl.arange(0, BLOCK_N)
        k = load_tile(k_ptr, head, cols, n, D)  # (BLOCK_N, D)
        v = load_tile(v_ptr, head, cols, n, D)
        for start_m in range(0, n, BLOCK_M):
            rows = start_m + tl.arange(0, BLOCK_M)
            q = load_tile(q_ptr, head, rows, n, D)  # (BLOCK_M, D)
            o = load_tile(o_ptr, head, rows, n, D)  # (BLOCK_M, D) float32
            m = load_state(m_ptr, head, rows, n)  # (BLOCK_M,)
            l = load_state(l_ptr, head, rows, n)
            s = scores(q, k, scale, cols, n)  # (BLOCK_M, BLOCK_N)
            m_block = tl.max(s, 1)
            p = tl.exp(s - m_block[:, None])
            m_new = tl.maximum(m, m_block)
            l_old = l * tl.exp(m - m_new)
            weight = tl.exp(m_block - m_new)
            l_new = l_old + weight * tl.sum(p, 1)
            pv = tl.dot(p.to(v.dtype), v, input_precision="ieee")
            o = (l_old[:, None] * o + weight[:, None] * pv) / l_new[:, None]
            store_tile(o_ptr, o, head, rows, n, D)
            store_state(m_ptr, m_new, head, rows, n)
            store_state(l_ptr, l_new, head, rows, n)
        tl.debug_barrier()


@triton.jit
def backward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, m_ptr, l_ptr, do_ptr, dq_ptr, dk_ptr, dv_ptr, scale, n,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    for start_n in range(0, n, BLOCK_N):
        cols = start_n + tl.arange(0, BLOCK_N)
        k = load_tile(k_ptr, head, cols, n, D)  # (BLOCK_N, D)
        v = load_tile(v_ptr, head, cols, n, D)
        dk = tl.zeros([BLOCK_N, D], tl.float32)
        dv = tl.zeros([BLOCK_N, D], tl.float32)
        for start_m in range(0, n, BLOCK_M):
            rows = start_m + tl.arange(0, BLOCK_M)
            q = load_tile(q_ptr, head, rows, n, D)  # (BLOCK_M, D)
            o = load_tile(o_ptr, head, rows, n, D)
            do = load_tile(do_ptr, head, rows, n, D)
            dq = load_tile(dq_ptr, head, rows, n, D)  # float32
            m = load_state(m_ptr, head, rows, n)
            l = tl.where(rows < n, load_state(l_ptr, head, rows, n), 1.0)  # rows past N must not divide by 0
            p = tl.exp(scores(q, k, scale, cols, n) - m[:, None]) / l[:, None]  # (BLOCK_M, BLOCK_N)
            delta = tl.sum(do.to(tl.float32) * o, 1)
            ds = p * (tl.dot(do, tl.trans(v), input_precision="ieee") - delta[:, None])
            dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision="ieee")
            dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision="ieee")
            dq += tl.dot(ds.to(k.dtype), k, input_precision="ieee") * scale
            store_tile(dq_ptr, dq, head, rows, n, D)
        store_tile(dk_ptr, dk * scale, head, cols, n, D)
        store_tile(dv_ptr, dv, head, cols, n, D)
        tl.debug_barrier()


def forward(q, k, v, scale, block_m=64, block_n=64):
    """o, m, l for contiguous (heads, N, D) tensors, D a power of two; o and the state are float32."""
    heads, n, d = q.shape
    o = torch.zeros(heads, n, d, dtype=torch.float32, device=q.device)
    m = torch.full((heads, n), float("-inf"), dtype=torch.float32, device=q.device)
    l = torch.zeros(heads, n, dtype=torch.float32, device=q.device)
    forward_kernel[(heads,)](q, k, v, o, m, l, scale, n, D=d, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=4, num_stages=1)
    return o, m, l


def backward(q, k, v, o, m, l, do, scale, block_m=64, block_n=64):
    """dq (float32), dk, dv."""
    heads, n, d = q.shape
    dq = torch.zeros(heads, n, d, dtype=torch.float32, device=q.device)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    backward_kernel[(heads,)](
        q, k, v, o, m, l, do, dq, dk, dv, scale, n, D=d, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=8, num_stages=1
    )  # fmt: skip
    return dq, dk, dv
