# mypy: disable-error-code="no-untyped-def"
"""Softmax over rows, one program a row: three passes, two, one. Counted twin: `tilewise.lab.softmax_rows`."""

import triton
import triton.language as tl


@triton.jit
def three_pass_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * n
    m = float("-inf")
    for start in range(0, n, BLOCK):
        m = tl.maximum(m, tl.max(_load(x_ptr, row, start, n, BLOCK), 0))
    l = 0.0
    for start in range(0, n, BLOCK):
        l += tl.sum(tl.exp(_load(x_ptr, row, start, n, BLOCK) - m), 0)
    for start in range(0, n, BLOCK):
        _store(y_ptr, tl.exp(_load(x_ptr, row, start, n, BLOCK) - m) / l, row, start, n, BLOCK)


@triton.jit
def two_pass_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * n
    m = float("-inf")
    l = 0.0
    for start in range(0, n, BLOCK):
        x = _load(x_ptr, row, start, n, BLOCK)
        m_new = tl.maximum(m, tl.max(x, 0))
        l = l * tl.exp(m - m_new) + tl.sum(tl.exp(x - m_new), 0)
        m = m_new
    for start in range(0, n, BLOCK):
        _store(y_ptr, tl.exp(_load(x_ptr, row, start, n, BLOCK) - m) / l, row, start, n, BLOCK)


@triton.jit
def one_pass_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """BLOCK holds the whole row."""
    row = tl.program_id(0).to(tl.int64) * n
    x = _load(x_ptr, row, 0, n, BLOCK)
    p = tl.exp(x - tl.max(x, 0))
    _store(y_ptr, p / tl.sum(p, 0), row, 0, n, BLOCK)


@triton.jit
def _load(ptr, row, start, n, BLOCK: tl.constexpr):
    cols = start + tl.arange(0, BLOCK)
    return tl.load(ptr + row + cols, mask=cols < n, other=float("-inf"), cache_modifier=".cg").to(tl.float32)


@triton.jit
def _store(ptr, value, row, start, n, BLOCK: tl.constexpr):
    cols = start + tl.arange(0, BLOCK)
    tl.store(ptr + row + cols, value.to(ptr.dtype.element_ty), mask=cols < n)


def softmax_rows(x, y, passes, block=1024):
    """y = softmax of the rows of x (rows, N), both contiguous, with 3, 2 or 1 reads of x."""
    rows, n = x.shape
    if passes == 1:
        block = triton.next_power_of_2(n)
        one_pass_kernel[(rows,)](x, y, n, BLOCK=block, num_warps=min(16, max(4, block // 1024)))
    else:
        kernel = three_pass_kernel if passes == 3 else two_pass_kernel
        kernel[(rows,)](x, y, n, BLOCK=block, num_warps=4)
