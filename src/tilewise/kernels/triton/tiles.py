"""The steps of attention on one tile, each a short function: what the loops of `forward_pass` and `backward_pass` are written in.

Tiles are [M, N] (queries by keys) or, TRANSPOSED, where a kernel accumulates over queries, [N, M]. A tile is CUT where a window or a
length may hide pairs of it, MASKED where anything may.

Optional features arrive as None, which Triton folds away at compile time; related arguments travel as one tuple (None: feature off):

    source  (ref, row_stride, dim_stride, at)     one head of one batch item: a pointer to it, or with TMA a descriptor of the whole tensor
    at      (item, h, first)                      which one; `first`: the row where a packed sequence starts, else None
    span    (len_q, len_k, window_left, window_right)
    mask    (ptr, row_stride, col_stride)         likewise bias; see `matrix_of`
    rules   (scale, softcap, slope, program)      program: see `programs`; its texts are SCORE_MOD, MASK_MOD and SCORE_GRAD
    base2   (unit, unit_exact)                    what turns raw scores into base-2 exponents, see `to_log2`
    drop    (seed, threshold, b, h)

Scores are RAW (`q·k`, the scale folded into the exponential's multiply-add) or NATURAL (`scale·q·k` with softcap, ALiBi and bias added).
"""

import triton
import triton.language as tl

from . import configs
from .programs import LOG2E, run_program, tanh

LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
NEG_INF: tl.constexpr = tl.constexpr(float("-inf"))
HUGE: tl.constexpr = tl.constexpr(float(2**27))
ROW_BLOCK: tl.constexpr = tl.constexpr(configs.ROW_BLOCK)


# ---- memory


@triton.jit
def head_of(ref, at, stride_b, stride_h, stride_s, ALIGN: tl.constexpr, TMA: tl.constexpr):
    """Where one head starts, or one packed sequence in it; a descriptor takes that place with every tile instead."""
    start = ref
    if not TMA:
        start = ref + (at[0] * stride_b + at[1] * stride_h) * ALIGN
        if at[2] is not None:
            start += at[2] * (stride_s * ALIGN)
    return start


@triton.jit
def tile_pointers(source, row0, ROWS: tl.constexpr, COLS: tl.constexpr, FRUGAL: tl.constexpr = False):
    """[ROWS, COLS]. FRUGAL: from the number of each row at once. Offsets in a tile, two registers for each of its rows that a thread reads,
    are the same in every tile, and a compiler keeps them."""
    ptr, row_stride, dim_stride = source[0], source[1], source[2]
    offs_d = tl.arange(0, COLS)
    if dim_stride is not None:
        offs_d = offs_d.to(tl.int64) * dim_stride
    if FRUGAL:
        pointers = ptr + ((row0 + tl.arange(0, ROWS))[:, None] * row_stride + offs_d[None, :])
    else:
        offs = tl.arange(0, ROWS)[:, None] * row_stride + offs_d[None, :]
        pointers = ptr + row0 * row_stride + offs
    return pointers  # strides are 64-bit, and so is what they multiply


@triton.jit
def load_tile(
    source, row0, row_end, ROWS: tl.constexpr, COLS: tl.constexpr, DIM: tl.constexpr, TMA: tl.constexpr, GUARD: tl.constexpr,
    FRUGAL: tl.constexpr = False,
):  # fmt: skip
    """Rows [row0, row0 + ROWS) of a head, padded with zeros from DIM to COLS: [ROWS, COLS]. GUARD: some may lie past row_end.

    A descriptor zeroes what lies past the tensor, not past row_end: see `hide_rows`.
    """
    if TMA:
        item, h, first = source[3]
        if first is not None:
            row0 += first
        tile = source[0].load([item, h, row0, 0]).reshape(ROWS, COLS)
    elif GUARD:
        inside = (row0 + tl.arange(0, ROWS) < row_end)[:, None] & (tl.arange(0, COLS) < DIM)[None, :]
        tile = tl.load(tile_pointers(source, row0, ROWS, COLS, FRUGAL), mask=inside, other=0.0)
    elif DIM < COLS:
        tile = tl.load(tile_pointers(source, row0, ROWS, COLS, FRUGAL), mask=(tl.arange(0, COLS) < DIM)[None, :], other=0.0)
    else:
        tile = tl.load(tile_pointers(source, row0, ROWS, COLS, FRUGAL))
    return tile


@triton.jit
def store_tile(source, tile, row0, row_end, ROWS: tl.constexpr, COLS: tl.constexpr, DIM: tl.constexpr):
    inside = (row0 + tl.arange(0, ROWS) < row_end)[:, None] & (tl.arange(0, COLS) < DIM)[None, :]
    tl.store(tile_pointers(source, row0, ROWS, COLS), tile.to(source[0].dtype.element_ty), mask=inside)


@triton.jit
def other_variant(nonfinite_ptr, HIDE: tl.constexpr):
    """Whether the flag of `finite` leaves the work to the launch with the other HIDE."""
    other = False
    if nonfinite_ptr is not None:
        other = (tl.load(nonfinite_ptr) != 0) != HIDE
    return other


@triton.jit
def hide_rows(tile, seen, AXIS: tl.constexpr):
    """Zero the rows of a K, V, Q or dO tile that nothing in this tile of scores sees: 0 times what they hold could be NaN.

    A reduction over the tile, and the operand goes through registers: only where HIDE, which `finite` decides, says that it is needed.
    """
    return tl.where((tl.max(seen.to(tl.int32), AXIS) > 0)[:, None], tile, tl.zeros_like(tile))


@triton.jit
def used_length(seqused_ptr, b, size):
    length = size
    if seqused_ptr is not None:
        length = tl.minimum(tl.maximum(tl.load(seqused_ptr + b), 0), size)
    return length


@triton.jit
def load_rows(pointers, offs_m, len_q, other, PACKED: tl.constexpr):
    """A number of each query, [M]. A dense row is padded to whole tiles; past a packed sequence lie the numbers of its neighbour."""
    return tl.load(pointers, mask=offs_m < len_q, other=other) if PACKED else tl.load(pointers)


@triton.jit
def packed_tile(record_ptr):
    """What `packed.schedule` says of a tile: its sequence (-1: there is none), first row, and the first row, rows and real rows that the
    sequence has of queries and of keys."""
    first_q, rows_q, len_q = tl.load(record_ptr + 2), tl.load(record_ptr + 3), tl.load(record_ptr + 4)
    first_k, rows_k, len_k = tl.load(record_ptr + 5), tl.load(record_ptr + 6), tl.load(record_ptr + 7)
    return tl.load(record_ptr), tl.load(record_ptr + 1), first_q, rows_q, len_q, first_k, rows_k, len_k


@triton.jit
def matrix_of(ptr, b, h, stride_b, stride_h, stride_m, stride_n, ALIGN: tl.constexpr):
    """A bias or mask at one batch item and head. As for heads, outer strides count ALIGN elements: rows are then read 16 bytes at once."""
    return ptr + (b * stride_b + h * stride_h) * ALIGN, stride_m * ALIGN, 1 if stride_n is None else stride_n


@triton.jit
def load_matrix(matrix, offs_m, offs_n, span, TRANSPOSED: tl.constexpr, CUT: tl.constexpr):
    """A tile of a bias or mask, 0 outside, or None: read along its rows either way round, [M, N] or [N, M]. CUT: keys may lie outside, and
    every element needs a check of its own.

    Called before the product whose scores it meets: the compiler settles a conflict of register layouts in favour of what comes last,
    and a softmax in the layout of the load would exchange every row between all lanes.
    """
    tile = None
    if matrix is not None:
        tile = tl.load(matrix_pointers(matrix, offs_m, offs_n), mask=inside_matrix(offs_m, offs_n, span, CUT), other=0)
        tile = tile.T if TRANSPOSED else tile
    return tile


@triton.jit
def inside_matrix(offs_m, offs_n, span, CUT: tl.constexpr):
    inside = (offs_m < span[0])[:, None]
    return inside & (offs_n < span[1])[None, :] if CUT else inside


@triton.jit
def matrix_pointers(matrix, offs_m, offs_n):
    ptr, stride_m, stride_n = matrix
    return ptr + (offs_m[:, None] * stride_m + offs_n[None, :] * stride_n)


# ---- which tiles are visited, and which need a mask


@triton.jit
def key_tile_range(m0, span, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Keys that queries [m0, m0 + BLOCK_M) see, as the ends of three stretches of tiles: those that a window's left end may cut, those
    neither cuts, those that its right end or the length may cut."""
    len_q, len_k, window_left, window_right = span
    first = m0 + len_k - len_q  # positions of the first and the last query
    last = tl.minimum(m0 + BLOCK_M, len_q) - 1 + len_k - len_q
    lo, full_lo, hi, full_hi = 0, 0, len_k, len_k
    if window_right is not None:
        hi = tl.minimum(hi, last + window_right + 1)
        full_hi = tl.minimum(full_hi, first + window_right + 1)
    if window_left is not None:
        lo = tl.maximum(first - window_left, 0) // BLOCK_N * BLOCK_N
        full_lo = tl.cdiv(tl.maximum(tl.minimum(last - window_left, hi), 0), BLOCK_N) * BLOCK_N
    hi = tl.where(m0 < len_q, hi, lo)
    full_hi = tl.maximum(tl.maximum(tl.minimum(full_hi, hi), 0) // BLOCK_N * BLOCK_N, full_lo)
    return lo, full_lo, full_hi, hi


@triton.jit
def query_tile_range(n0, span, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr):
    """Queries that see keys [n0, n0 + BLOCK_N), as `key_tile_range`, with the stretch that the right end cuts first. TAIL: the last
    one is walked; without it queries past the length are harmless, being loaded as zeros with an LSE of +inf."""
    len_q, len_k, window_left, window_right = span
    first = n0 - (len_k - len_q)  # queries that stand at the first and the last key
    last = tl.minimum(n0 + BLOCK_N, len_k) - 1 - (len_k - len_q)
    lo, full_lo, hi, full_hi = 0, 0, len_q, len_q
    if window_right is not None:
        lo = tl.minimum(tl.maximum(first - window_right, 0), len_q) // BLOCK_M * BLOCK_M
        full_lo = tl.cdiv(tl.minimum(tl.maximum(last - window_right, 0), len_q), BLOCK_M) * BLOCK_M
    if window_left is not None:
        hi = tl.minimum(hi, last + window_left + 1)
        full_hi = tl.minimum(full_hi, first + window_left + 1)
    hi = tl.where(n0 < len_k, hi, lo)
    full_hi = tl.maximum(tl.maximum(tl.minimum(full_hi, hi), 0) // BLOCK_M * BLOCK_M, full_lo) if TAIL else hi
    return lo, full_lo, full_hi, hi


# ---- scores


@triton.jit
def visible(
    offs_m, offs_n, span, mask_tile, CHECK_ROWS: tl.constexpr, CHECK_COLS: tl.constexpr, TRANSPOSED: tl.constexpr, CUT: tl.constexpr
):  # fmt: skip
    len_q, len_k, window_left, window_right = span
    rows, cols = index_tiles(offs_m, offs_n, TRANSPOSED)
    seen = (rows < len_q) | (not CHECK_ROWS)
    if CHECK_COLS and CUT:
        seen &= cols < len_k
    if window_left is not None and CUT:
        seen &= cols >= rows + (len_k - len_q - window_left)
    if window_right is not None and CUT:
        seen &= cols <= rows + (len_k - len_q + window_right)
    if mask_tile is not None:
        seen &= mask_tile != 0
    return seen


@triton.jit
def scores(
    qk, offs_m, offs_n, span, rules, bias_tile, mask_tile, SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr,
    NATURAL: tl.constexpr, CHECK_ROWS: tl.constexpr, CHECK_COLS: tl.constexpr, TRANSPOSED: tl.constexpr, CUT: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Scores with -inf where hidden; also the softcapped products before anything was added, for the derivative of the cap, and the
    scores that the score function got, for its own."""
    scale, softcap, slope, program = rules
    s = qk * scale if NATURAL else qk
    if softcap is not None:
        s = softcap * tanh(s / softcap)
    capped = s
    if slope is not None:
        s -= slope * distances(offs_m, offs_n, span, TRANSPOSED)
    if MASKED:
        seen = visible(offs_m, offs_n, span, mask_tile, CHECK_ROWS, CHECK_COLS, TRANSPOSED, CUT)
        if bias_tile is not None:
            seen &= bias_tile != NEG_INF
            s += bias_tile.to(tl.float32)
    raw = s
    if SCORE_MOD != "":
        s = run_program(SCORE_MOD, program, raw, None, offs_m, offs_n, span, TRANSPOSED)
    if MASKED:
        if MASK_MOD != "":
            seen &= run_program(MASK_MOD, program, None, None, offs_m, offs_n, span, TRANSPOSED)
        s = tl.where(seen, s, NEG_INF)
    return s, capped, raw


@triton.jit
def index_tiles(offs_m, offs_n, TRANSPOSED: tl.constexpr):
    """Query and key indices that broadcast to a tile, [M, N] or [N, M]."""
    rows = offs_m[None, :] if TRANSPOSED else offs_m[:, None]
    cols = offs_n[:, None] if TRANSPOSED else offs_n[None, :]
    return rows, cols


@triton.jit
def distances(offs_m, offs_n, span, TRANSPOSED: tl.constexpr):
    """|p - j|: how far each key is from its query's position, for ALiBi."""
    rows, cols = index_tiles(offs_m, offs_n, TRANSPOSED)
    return tl.abs(rows + (span[1] - span[0]) - cols).to(tl.float32)


# ---- softmax


@triton.jit
def to_log2(score, base2):
    """Raw scores as base-2 exponents. Past 2^27, where rounding the maximum would shift all exponents of its row by more than an
    exponential can hold, a power of two not below the unit stands in for it: that product is exact, and keys whose scores differ
    at all differ there by so much that only those equal to the maximum count."""
    unit, unit_exact = base2
    return tl.where(tl.abs(score * unit) > HUGE, score * unit_exact, score * unit)


@triton.jit
def online_exponents(m, s, base2, NATURAL: tl.constexpr, MASKED: tl.constexpr):
    """The running maximum with this tile in it, the tile's base-2 exponents relative to it, and what scales older sums: m, x, alpha.

    RAW: m counts base-2 exponents, and one multiply-add serves each weight. NATURAL: m is a score and is subtracted before the change
    of base, so that the largest finite scores survive. Rows that have seen nothing keep m = -inf without an (-inf) - (-inf).
    """
    top = tl.max(s, 1)
    m_new = tl.maximum(m, top if NATURAL else to_log2(top, base2))
    origin = tl.where(m_new == NEG_INF, 0.0, m_new) if MASKED else m_new
    if NATURAL:
        x = (s - origin[:, None]) * LOG2E
        alpha = tl.exp2((m - origin) * LOG2E)
    else:
        unit = tl.where(tl.abs(m_new) > HUGE, base2[1], base2[0])
        x = s * unit[:, None] - origin[:, None]
        alpha = tl.exp2(m - origin)
    return m_new, x, alpha


@triton.jit
def online_softmax_update(m, s, base2, NATURAL: tl.constexpr, MASKED: tl.constexpr):
    """`online_exponents` with the tile's weights in place of their exponents: m, p, alpha."""
    m, x, alpha = online_exponents(m, s, base2, NATURAL, MASKED)
    return m, tl.exp2(x), alpha


@triton.jit
def online_entropy_update(spread, l, p, x, alpha):
    """The running sum of p log2(p) over weights p = 2^x relative to the maximum, which this tile scaled by alpha; `l` is still the older
    sum of p. A weight of 0 counts as 0 whatever its exponent."""
    older = tl.where(alpha == 0.0, 0.0, alpha * (spread + l * tl.log2(alpha)))
    return older + tl.sum(tl.where(p == 0.0, 0.0, p * x), 1)


@triton.jit
def entropy_of(spread, l, sink_log2):
    """-sum p ln p over the keys, from the sum of 2^x log2(2^x) over all that joined the denominator `l`; a sink, whose exponent is
    `sink_log2`, joined it and is not a key. 0 for a row that sees nothing."""
    total = l * tl.log2(l) - spread
    if sink_log2 is not None:
        weight = tl.exp2(sink_log2)
        total -= tl.where(weight == 0.0, 0.0, weight * (tl.log2(l) - sink_log2))
    return tl.where(l == 0.0, 0.0, total / l * LN2)


@triton.jit
def largest_of(top, l, inside):
    """The largest score of a tile of queries. tl.max overlooks NaN, but a row whose denominator is NaN saw one or an infinite score."""
    top = tl.max(tl.where(inside, top, NEG_INF), 0)
    broken = tl.max((inside & (l != l)).to(tl.int32), 0)
    return tl.where((broken > 0) & (top < float("inf")), float("nan"), top)


@triton.jit
def log_sum_exp(m, l, base2, NATURAL: tl.constexpr):
    """The natural logarithm of the denominator, -inf where it is 0."""
    exponent = m if NATURAL else tl.where(tl.abs(m) > HUGE, m * (base2[0] / base2[1]), m)
    lse = exponent + tl.log(l) if NATURAL else (exponent + tl.log2(l)) * LN2
    return tl.where(l == 0.0, NEG_INF, lse)


@triton.jit
def dropout_keep(offs_m, n0, BLOCK_N: tl.constexpr, drop):
    """[M, N], True where the weight survives. Four neighbouring keys share one Philox call; n0 is a multiple of 4."""
    seed, threshold, b, h = drop
    quad = n0 // 4 + tl.arange(0, BLOCK_N // 4)
    w0, w1, w2, w3 = tl.philox(seed, quad[None, :], offs_m[:, None], h, b)  # [M, N / 4] each
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(offs_m.shape[0], BLOCK_N)
    return words >= threshold.to(tl.uint32)


# ---- gradients


@triton.jit
def probabilities(s, lse, rest, base2, NATURAL: tl.constexpr):
    """Softmax from its saved denominator. `lse` is natural for NATURAL scores, with its `rest` in base 2 or None (see `lse_rest`), and
    base 2 for RAW ones; +inf for rows without keys."""
    exponent = (s - lse) * LOG2E if NATURAL else s * base2[0] - lse
    if rest is not None:
        exponent -= rest
    return tl.exp2(exponent)


@triton.jit
def score_gradient(p, dp, delta, MASKED: tl.constexpr):
    """Of scores, from the gradient dp of the probabilities. Hidden pairs have p = 0, and whatever their dp holds must not count."""
    ds = p * (dp - delta)
    if MASKED:
        ds = tl.where(p == 0.0, 0.0, ds)
    return ds


@triton.jit
def program_gradient(ds, raw, offs_m, offs_n, span, rules, SCORE_GRAD: tl.constexpr, TRANSPOSED: tl.constexpr):
    """From the gradient of the scores to that of what the score function got. Hidden pairs have 0, and keep it whatever was there."""
    if SCORE_GRAD != "":
        ds = run_program(SCORE_GRAD, rules[3], raw, ds, offs_m, offs_n, span, TRANSPOSED)
    return ds


@triton.jit
def product_gradient(ds, capped, rules):
    """From the gradient of the scores to that of `scale·q·k`: back through the softcap."""
    softcap = rules[1]
    if softcap is not None:
        ratio = capped / softcap
        ds = tl.where(ds == 0.0, 0.0, ds * (1.0 - ratio * ratio))  # the products of hidden pairs may be NaN
    return ds


@triton.jit
def tile_gradient(
    q, do, lse, rest, delta, k_tile, v_tile, offs_m, offs_n, n0, span, rules, bias, mask, base2, drop, keep_scale,
    SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr, SCORE_GRAD: tl.constexpr,
    BLOCK_N: tl.constexpr, NATURAL: tl.constexpr, CHECK_ROWS: tl.constexpr, PRECISION: tl.constexpr, CUT: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """The gradient of one tile of scores, [M, N]; also the scores, -inf where hidden, and what the softcap made of the products."""
    bias_tile = load_matrix(bias, offs_m, offs_n, span, False, CUT)
    mask_tile = load_matrix(mask, offs_m, offs_n, span, False, CUT)
    qk = tl.dot(q, k_tile.T, input_precision=PRECISION)
    s, capped, raw = scores(
        qk, offs_m, offs_n, span, rules, bias_tile, mask_tile, SCORE_MOD, MASK_MOD, NATURAL, CHECK_ROWS, True, False, CUT,
        MASKED)  # fmt: skip
    if rest is not None:
        rest = rest[:, None]
    p = probabilities(s, lse[:, None], rest, base2, NATURAL)
    dp = tl.dot(do, v_tile.T, input_precision=PRECISION)
    if drop is not None:
        dp = tl.where(dropout_keep(offs_m, n0, BLOCK_N, drop), dp * keep_scale, 0.0)
    ds = score_gradient(p, dp, delta[:, None], MASKED)
    return program_gradient(ds, raw, offs_m, offs_n, span, rules, SCORE_GRAD, False), s, capped
