"""Bias and mask tensors in the Hopper kernels: how a consumer gets the part that meets its scores, and what it does to them.

A matrix is broadcast to (B, Hq, Sq, Sk), and its form is known at compile time:

    ""      there is none
    "tma"   full in queries and keys; the producer copies tiles of it to shared memory beside those of K
    "full"  likewise, but what TMA cannot address (float32 is too large for the shared memory that is left): straight to registers
    "rows"  one value a query
    "keys"  one value a key
    "one"   one value a head
"""

from .gluon_api import aggregate, constexpr_function, gl, jit


@aggregate
class Matrix:
    """A bias or mask. Strides are in elements, 0 where the matrix is broadcast; its columns are adjacent."""

    ptr: gl.tensor
    stride_b: gl.tensor
    stride_h: gl.tensor
    stride_m: gl.tensor

    @constexpr_function
    def __init__(self, ptr, stride_b, stride_h, stride_m):
        self.ptr = ptr
        self.stride_b = stride_b
        self.stride_h = stride_h
        self.stride_m = stride_m


@jit
def broadcast_coordinate(index, stride):
    """Where TMA finds batch item or head `index` of a matrix: 0 in a dimension that is broadcast."""
    return gl.where(stride == 0, 0, index)


@jit
def load_matrix(FORM: gl.constexpr, x, batch, head, rows, rows_end, keys, keys_end):
    """The values of a head at indices of queries and keys that broadcast to a tile, [M, 1] and [1, N] or the other way round; one value of
    a dimension in which the matrix is broadcast. 0 past the ends."""
    start = x.ptr + (batch.to(gl.int64) * x.stride_b + head.to(gl.int64) * x.stride_h)
    if FORM == "full":
        values = gl.load(start + (rows.to(gl.int64) * x.stride_m + keys), mask=(rows < rows_end) & (keys < keys_end), other=0)
    elif FORM == "rows":
        values = gl.load(start + rows.to(gl.int64) * x.stride_m, mask=rows < rows_end, other=0)
    elif FORM == "keys":
        values = gl.load(start + keys, mask=keys < keys_end, other=0)
    else:
        values = gl.load(start)
    return values


@jit
def add_bias(s, bias):
    """s + bias, and -inf wherever the bias says so, whatever the product was: what is hidden there may be NaN."""
    bias = bias.to(gl.float32)
    return gl.where(bias == float("-inf"), float("-inf"), s + bias)


@constexpr_function
def _hide_text(n, minus_infinity):
    # Operands: n results, n tied inputs, the bias in n / 2 registers, two values in each, and the condition, n times.
    text = "{ .reg .pred p, q; .reg .b16 low, high; "
    text += f"setp.ne.s32 p, ${2 * n + n // 2}, 0; @!p bra.uni SKIP; "
    for i in range(n):
        text += f"mov.b32 {{low, high}}, ${2 * n + i // 2}; setp.eq.b16 q, {('low', 'high')[i % 2]}, {minus_infinity}; "
        text += f"selp.f32 ${i}, 0fFF800000, ${i}, q; "
    return text + "SKIP: }"


@constexpr_function
def _hide_operands(n):
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["r"] * (n // 2) + ["r"] * n)


@jit
def add_bias_as_told(C: gl.constexpr, s, bias, selects):
    """`add_bias` of scores [64, n]; where the int32 `selects` is 0, a product hidden by a bias of 16 bits may be a NaN, which stays one.

    A branch in PTX: of one in the language the compiler makes selections, three instructions for two scores. The values of a float32 bias
    are so many registers that they are better used up one by one.
    """
    if C.bias_dtype == "fp32":
        s = add_bias(s, bias)
    else:
        n: gl.constexpr = s.shape[0] * s.shape[1] // 128
        text: gl.constexpr = _hide_text(n, "0xFF80" if C.bias_dtype == "bf16" else "0xFC00")
        operands: gl.constexpr = _hide_operands(n)
        s = s + bias.to(gl.float32)
        s = gl.inline_asm_elementwise(text, operands, [s, bias, selects], dtype=gl.float32, is_pure=False, pack=n)
    return s
