# mypy: disable-error-code="no-untyped-def"
"""Named tile accesses of the lab's kernels, over contiguous (heads, N, D) tensors.

Tiles are loaded past the first-level cache (`.cg`), so that what the L2 cache is asked for is what the loops say and no more.
"""

import triton
import triton.language as tl


@triton.jit
def load_tile(ptr, head, rows, n, D: tl.constexpr):
    """Rows of one head, (ROWS, D); zero past row n."""
    dims = tl.arange(0, D)
    offs = head.to(tl.int64) * n * D + rows[:, None].to(tl.int64) * D + dims[None, :]
    return tl.load(ptr + offs, mask=rows[:, None] < n, other=0.0, cache_modifier=".cg")


@triton.jit
def store_tile(ptr, value, head, rows, n, D: tl.constexpr):
    """Writes rows of one head, rounded to the tensor's dtype."""
    dims = tl.arange(0, D)
    offs = head.to(tl.int64) * n * D + rows[:, None].to(tl.int64) * D + dims[None, :]
    tl.store(ptr + offs, value.to(ptr.dtype.element_ty), mask=rows[:, None] < n)


@triton.jit
def load_state(ptr, head, rows, n):
    """A number a row of one head, (ROWS,); zero past row n."""
    return tl.load(ptr + head.to(tl.int64) * n + rows, mask=rows < n, other=0.0, cache_modifier=".cg")


@triton.jit
def store_state(ptr, value, head, rows, n):
    tl.store(ptr + head.to(tl.int64) * n + rows, value, mask=rows < n)


@triton.jit
def scores(q, k, scale, cols, n):
    """S = scale Q K^T (ROWS, COLS) in float32, -inf past key n."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    return tl.where(cols[None, :] < n, s, float("-inf"))
