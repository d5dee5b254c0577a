# mypy: disable-error-code="no-untyped-def"
"""Two small kernels that the lab measures a GPU with."""

import triton
import triton.language as tl


@triton.jit
def lab_marker_kernel(x_ptr):
    """Does next to nothing: its grid size is a number that a profile shows between the kernels of two points."""
    tl.store(x_ptr, 0.0)


@triton.jit
def read_again_kernel(x_ptr, sums_ptr, n, times, BLOCK: tl.constexpr):
    """Every program adds up all n numbers `times` times, past the first-level cache: the speed of L2 where n fits in it."""
    total = tl.zeros([BLOCK], tl.float32)
    first = tl.program_id(0) * BLOCK
    for _ in range(0, times):
        for start in range(0, n, BLOCK):
            offs = (first + start + tl.arange(0, BLOCK)) % n
            total += tl.load(x_ptr + offs, cache_modifier=".cg")
    tl.store(sums_ptr + tl.program_id(0), tl.sum(total, 0))
