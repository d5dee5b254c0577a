"""Traced score and mask functions as tile expressions: the instructions of a program, applied to the indices and scores of one tile.

A kernel is compiled for the text of its programs (see `emission`), a compile-time constant: no source code is generated, and equal
programs share a compiled kernel. Values keep the shape they have, so what depends on the head alone is computed once, not M x N times.

    program  (captured, sizes, gradients, b, h, last_q, last_k)   pointers, `emission.encoded` sizes and strides, gradient buffers or None
"""

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
ENCODED: tl.constexpr = tl.constexpr(1 << 62)  # see `emission.encoded`


@triton.constexpr_function
def count(PROGRAM):
    return PROGRAM.count("\n") + 1


@triton.constexpr_function
def word(PROGRAM, i, n):
    """The n-th word of line i: the operation, the kind of its result, then its operands."""
    return PROGRAM.split("\n")[i].split(" ")[n]


@triton.constexpr_function
def number(PROGRAM, i, n):
    return int(PROGRAM.split("\n")[i].split(" ")[n + 2])


@triton.constexpr_function
def operands(PROGRAM, i):
    return len(PROGRAM.split("\n")[i].split(" ")) - 2


@triton.constexpr_function
def is_leaf(PROGRAM, i):
    return word(PROGRAM, i, 0) in ("score", "grad", "b", "h", "q_idx", "kv_idx", "p", "const", "load", "scatter", "spread")


@triton.constexpr_function
def flag(PROGRAM, i, name):
    """Whether a load or scatter has a flag, see `emission`."""
    return name in PROGRAM.split("\n")[i].split(" ")[3].split(",")


@triton.constexpr_function
def constant(PROGRAM, i):
    _, kind, value = PROGRAM.split("\n")[i].split(" ")
    return float(value) if kind == "f" else bool(int(value)) if kind == "b" else int(value)


@triton.constexpr_function
def exponent(PROGRAM, i):
    return float(PROGRAM.split("\n")[i].split(" ")[3])


@triton.constexpr_function
def whole(x):
    """x as an integer, None where it is none."""
    return int(x) if x == int(x) else None


@triton.constexpr_function
def bit(x, n):
    return abs(x) >> n & 1


@triton.constexpr_function
def bits(x):
    return abs(x).bit_length()


@triton.jit
def run_program(PROGRAM: tl.constexpr, program, score, grad, offs_m, offs_n, span, TRANSPOSED: tl.constexpr):
    """The value of a program's last instruction on a tile of queries and keys; broadcasts to it. `grad`: see `score_mod.Derivative`.

    Indices past the last query or key, which ragged tiles have, are those of the last one: what they read is hidden, but must exist.
    """
    rows, cols = tl.minimum(offs_m, program[5]), tl.minimum(offs_n, program[6])
    rows = rows[None, :] if TRANSPOSED else rows[:, None]
    cols = cols[:, None] if TRANSPOSED else cols[None, :]
    values = ()
    for i in tl.static_range(count(PROGRAM)):
        x = leaf(PROGRAM, i, values, program, score, grad, rows, cols, span) if is_leaf(PROGRAM, i) else apply(PROGRAM, i, values)
        values = values + (x,)  # type: ignore[assignment]  # noqa: RUF005
    return values[count(PROGRAM) - 1]


@triton.jit
def leaf(PROGRAM: tl.constexpr, i: tl.constexpr, values, program, score, grad, rows, cols, span):
    """What an instruction takes from outside the program, or brings there."""
    OP: tl.constexpr = word(PROGRAM, i, 0)
    if OP == "score":
        x = score
    elif OP == "grad":
        x = grad
    elif OP == "b":
        x = program[3]
    elif OP == "h":
        x = program[4]
    elif OP == "q_idx":
        x = rows
    elif OP == "kv_idx":
        x = cols
    elif OP == "p":
        x = rows + (span[1] - span[0])
    elif OP == "const":
        x = constant(PROGRAM, i)
    elif OP == "load":
        x = load_element(PROGRAM, i, values, program)
    elif OP == "scatter":
        x = scatter_gradient(PROGRAM, i, values, program)
    else:
        tl.static_assert(OP == "spread", "no such operation")
        x = values[number(PROGRAM, i, 0)] + tl.zeros_like(score)
    return x


# ---- captured tensors


@triton.jit
def decoded(x, NARROW_OFFSETS: tl.constexpr):
    size = (x - ENCODED) >> 1
    return size.to(tl.int32) if NARROW_OFFSETS else size


@triton.jit
def load_element(PROGRAM: tl.constexpr, i: tl.constexpr, values, program):
    """``load kind slot flags indices...``. Negative indices count from the end; outside the tensor lie NaN, 0 and False."""
    SLOT: tl.constexpr = number(PROGRAM, i, 0)
    KIND: tl.constexpr = word(PROGRAM, i, 1)
    RANK: tl.constexpr = operands(PROGRAM, i) - 2
    ptr, sizes = program[0][SLOT], program[1][SLOT]
    offset, inside = 0, True
    for d in tl.static_range(RANK):
        index = values[number(PROGRAM, i, d + 2)]
        if not flag(PROGRAM, i, "inside"):
            index += tl.full([], 0, tl.int32)  # a tensor also where the program has a number
            size = decoded(sizes[2 * d], False)
            index = tl.where(index < 0, index + size, index)
            inside = inside & (index >= 0) & (index < size)
        if d == RANK - 1 and flag(PROGRAM, i, "adjacent"):
            offset = offset + index
        else:
            offset = offset + index * decoded(sizes[2 * d + 1], flag(PROGRAM, i, "narrow"))
    x = tl.load(ptr + offset) if RANK == 0 or flag(PROGRAM, i, "inside") else tl.load(ptr + offset, mask=inside, other=0)
    if KIND == "f":
        x = x.to(tl.float32)
        if RANK > 0 and not flag(PROGRAM, i, "inside"):
            x = tl.where(inside, x, float("nan"))
    elif KIND == "b":
        x = x != 0
    elif KIND == "l":
        x = x.to(tl.int64)
    else:
        x = x.to(tl.int32)
    return x


@triton.jit
def scatter_gradient(PROGRAM: tl.constexpr, i: tl.constexpr, values, program):
    """``scatter f slot flags gradient indices...``: add a tile's gradient to the elements that were read, in the order of arrival."""
    SLOT: tl.constexpr = number(PROGRAM, i, 0)
    RANK: tl.constexpr = operands(PROGRAM, i) - 3
    ptr, sizes = program[2][SLOT], program[1][SLOT]
    gradient = values[number(PROGRAM, i, 2)]
    if flag(PROGRAM, i, "sum_rows"):
        gradient = tl.sum(gradient, 0, keep_dims=True)
    if flag(PROGRAM, i, "sum_cols"):
        gradient = tl.sum(gradient, 1, keep_dims=True)
    offset, inside = tl.zeros(gradient.shape, tl.int64), tl.full(gradient.shape, 1, tl.int1)
    for d in tl.static_range(RANK):
        index, size = values[number(PROGRAM, i, d + 3)] + tl.full([], 0, tl.int32), decoded(sizes[2 * d], False)
        index = tl.where(index < 0, index + size, index)
        inside = inside & (index >= 0) & (index < size)
        offset = offset * size + index
    tl.atomic_add(ptr + offset, gradient, mask=inside & (gradient != 0.0), sem="relaxed")
    return 0


# ---- arithmetic


@triton.jit
def apply(PROGRAM: tl.constexpr, i: tl.constexpr, values):
    """An operation on earlier values."""
    OP: tl.constexpr = word(PROGRAM, i, 0)
    KIND: tl.constexpr = word(PROGRAM, i, 1)
    x = values[number(PROGRAM, i, 0)]
    if KIND == "l":  # the result may not fit 32 bits
        x += tl.full([], 0, tl.int64)
    # One operand, or one and a number.
    if OP == "neg":
        x = -x
    elif OP == "abs":
        x = tl.abs(x)
    elif OP == "not":
        x = ~x
    elif OP == "float":
        x = x.to(tl.float32)
    elif OP == "int":
        x = x if KIND == "l" else x.to(tl.int32)
    elif OP == "shifted":
        x = x >> number(PROGRAM, i, 1)
    elif OP == "masked":
        x = x & number(PROGRAM, i, 1)
    elif OP == "pow":
        x = power(x, exponent(PROGRAM, i))
    elif OP == "exp":
        x = tl.exp(x)
    elif OP == "exp2":
        x = tl.exp2(x)
    elif OP == "log":
        x = tl.log(x)
    elif OP == "log2":
        x = tl.log2(x)
    elif OP == "sqrt":
        x = tl.sqrt_rn(x)
    elif OP == "rsqrt":
        x = tl.rsqrt(x)
    elif OP == "tanh":
        x = tanh(x)
    elif OP == "sigmoid":
        x = 1.0 / (1.0 + tl.exp(-x))
    elif OP == "sin":
        x = tl.sin(x)
    elif OP == "cos":
        x = tl.cos(x)
    elif OP == "erf":
        x = tl.erf(x)
    elif OP == "floor":
        x = tl.floor(x)
    elif OP == "ceil":
        x = tl.ceil(x)
    elif OP == "where":
        x = tl.where(x, values[number(PROGRAM, i, 1)], values[number(PROGRAM, i, 2)])
    else:
        y = values[number(PROGRAM, i, 1)]
        if OP == "add":
            x = x + y
        elif OP == "sub":
            x = x - y
        elif OP == "mul":
            x = x * y
        elif OP == "div":  # correctly rounded: programs take the floor of quotients
            x = tl.div_rn(x, y)
        elif OP == "chain":
            x = tl.where(x == 0.0, x, x * y)
        elif OP == "quotient":  # of integers that are not negative
            x = x // y
        elif OP == "rest":
            x = x % y
        elif OP == "floordiv":
            x = x // y - ((x % y != 0) & ((x < 0) != (y < 0))).to(tl.int32)
        elif OP == "mod":
            rest = x % y
            x = rest + tl.where((rest != 0) & ((rest < 0) != (y < 0)), y, 0)
        elif OP == "min":
            x = tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)
        elif OP == "max":
            x = tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)
        elif OP == "lt":
            x = x < y
        elif OP == "le":
            x = x <= y
        elif OP == "gt":
            x = x > y
        elif OP == "ge":
            x = x >= y
        elif OP == "eq":
            x = x == y
        elif OP == "ne":
            x = x != y
        elif OP == "and":
            x = x & y
        elif OP == "or":
            x = x | y
        elif OP == "xor":
            x = x ^ y
        elif OP == "lshift":
            x = x << y
        else:
            tl.static_assert(OP == "rshift", "no such operation")
            x = x >> y
    return x


@triton.jit
def power(x, EXPONENT: tl.constexpr):
    """x to a constant: products for whole and half exponents, which also have the sign of a negative x."""
    if whole(2.0 * EXPONENT) is None:
        result = tl.exp2(EXPONENT * tl.log2(x))
    else:
        HALF: tl.constexpr = whole(EXPONENT) is None
        N: tl.constexpr = whole(2.0 * EXPONENT) if HALF else whole(EXPONENT)
        square = tl.sqrt_rn(x) if HALF else x
        result = tl.full([], 1.0, tl.float32)
        for n in tl.static_range(bits(N)):
            if bit(N, n):
                result = result * square
            square = square * square
        if EXPONENT < 0:
            result = 1.0 / result
    return result


@triton.jit
def tanh(x):
    """Within 2 ulp everywhere: a polynomial where 1 - 2 / (e^2x + 1) would cancel. Portable, unlike the vendors' libraries."""
    z = x * x
    small = x + x * z * (-0.3333333 + z * (0.13332924 + z * (-0.05387514 + z * (0.02111621 - z * 0.00627639))))
    large = 1.0 - 2.0 / (tl.exp2(tl.abs(x) * (2.0 * LOG2E)) + 1.0)
    return tl.where(tl.abs(x) < 0.6, small, tl.where(x < 0, -large, large))
