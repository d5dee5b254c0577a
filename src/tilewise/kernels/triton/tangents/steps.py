"""The steps on one tile that the tangents of both passes share: how products, scores, probabilities and gradients of scores move.

As in `tiles`, what is None is folded away: an operand that stands still costs no product. Scores are NATURAL. a, ta, b and tb are the
factors of a tile of products a b^T and how they move; numbers of each query (see `rows`) come as they broadcast to the tile; and besides
the tuples of `tiles` there is

    array   (ptr, stride_b, stride_h, stride_m, stride_n)   a bias or mask, or how a bias moves; of heads, with strides of s and d
"""

import triton
import triton.language as tl

from ..tiles import NEG_INF, distances, dropout_keep, load_tile, matrix_of, probabilities, scores, tile_pointers

# Arguments that only these kernels have, on whose values nothing compiled depends.
OWN = [f"stride_{x}{dim}" for x in ("tq", "tk", "tv", "to", "tdo", "tdq", "tdk", "tdv") for dim in "bhsd"]
OWN += [*(f"stride_tbias_{dim}" for dim in "bhmn"), "stride_tslopes_b", "stride_tslopes_h"]


@triton.jit
def matrix_at(array, b, h, ALIGN: tl.constexpr):
    """A bias, its tangent or a mask at one batch item and head, as `load_matrix` takes it, or None."""
    ptr, stride_b, stride_h, stride_m, stride_n = array
    matrix = None
    if ptr is not None:
        matrix = matrix_of(ptr, b, h, stride_b, stride_h, stride_m, stride_n, ALIGN)
    return matrix


@triton.jit
def slope_at(ptr, b, h, stride_b, stride_h):
    return tl.load(ptr + b * stride_b + h * stride_h).to(tl.float32)


@triton.jit
def load_moving(
    source, row0, row_end, ROWS: tl.constexpr, COLS: tl.constexpr, DIM: tl.constexpr, GUARD: tl.constexpr, FRUGAL: tl.constexpr
):
    """`load_tile` of what may not be there: the start of its source is then None."""
    tile = None
    if source[0] is not None:
        tile = load_tile(source, row0, row_end, ROWS, COLS, DIM, False, GUARD, FRUGAL)
    return tile


@triton.jit
def load_seen(
    source, row0, row_end, seen, ROWS: tl.constexpr, COLS: tl.constexpr, DIM: tl.constexpr, FRUGAL: tl.constexpr
):  # fmt: skip
    """Rows that something in this tile of scores sees, and zeros for the others: 0 times what those hold could be NaN. [ROWS, COLS]

    Read again, where `hide_rows` would keep the tile in registers until the scores are known: with their tangents they are four.
    """
    visible = (tl.max(seen.to(tl.int32), 0) > 0) & (row0 + tl.arange(0, ROWS) < row_end)
    inside = visible[:, None] & (tl.arange(0, COLS) < DIM)[None, :]
    return tl.load(tile_pointers(source, row0, ROWS, COLS, FRUGAL), mask=inside, other=0.0)


@triton.jit
def product_tangent(a, ta, b, tb, like, PRECISION: tl.constexpr):
    """How the products move, in the shape of `like`."""
    total = tl.zeros_like(like)
    if ta is not None and b is not None:
        total = tl.dot(ta, b.T, total, input_precision=PRECISION)
    if tb is not None and a is not None:
        total = tl.dot(a, tb.T, total, input_precision=PRECISION)
    return total


@triton.jit
def moving_scores(
    a, ta, b, tb, lse, rest, offs_m, offs_n, span, rules, bias_tile, mask_tile, tbias_tile, tslope,
    SANITIZE: tl.constexpr, CHECK_COLS: tl.constexpr, TRANSPOSED: tl.constexpr, CUT: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores, -inf where hidden; their probabilities; how scores move, before the mask; and for the second derivative of the softcap how
    the scaled products move, and the capped products."""
    scale, softcap, _, _ = rules
    qk = tl.dot(a, b.T, input_precision=PRECISION)
    s, capped, _ = scores(
        qk, offs_m, offs_n, span, rules, bias_tile, mask_tile, "", "", True, SANITIZE, CHECK_COLS, TRANSPOSED, CUT, MASKED)  # fmt: skip
    p = probabilities(s, lse, rest, None, True)
    traw = product_tangent(a, ta, b, tb, s, PRECISION) * scale
    ts = traw
    if softcap is not None:
        ratio = capped / softcap
        ts *= 1.0 - ratio * ratio
    if tbias_tile is not None:
        ts += tbias_tile.to(tl.float32)
    if tslope is not None:
        ts -= tslope * distances(offs_m, offs_n, span, TRANSPOSED)
    return s, p, ts, traw, capped


@triton.jit
def kept_pairs(offs_m, n0, BLOCK_N: tl.constexpr, drop, TRANSPOSED: tl.constexpr):
    """Where dropout leaves a probability, or None without dropout."""
    keep = None
    if drop is not None:
        keep = dropout_keep(offs_m, n0, BLOCK_N, drop)
        keep = keep.T if TRANSPOSED else keep
    return keep


@triton.jit
def drop_pairs(x, keep):
    """0 in place of what dropout drops. Its factor comes with the sums."""
    return x if keep is None else tl.where(keep, x, 0.0)


@triton.jit
def moving_probability_gradients(a, ta, b, tb, keep, keep_scale, like, PRECISION: tl.constexpr):
    """dP, from the gradients that reach the output and the values, and how it moves."""
    dp = tl.zeros_like(like)
    if a is not None and b is not None:
        dp = tl.dot(a, b.T, input_precision=PRECISION)
    tdp = product_tangent(a, ta, b, tb, like, PRECISION)
    if keep is not None:
        dp, tdp = drop_pairs(dp, keep) * keep_scale, drop_pairs(tdp, keep) * keep_scale
    return dp, tdp


@triton.jit
def moving_score_gradients(s, p, ts, dp, tdp, tlse, delta, tdelta, MASKED: tl.constexpr):
    """How the probabilities move, dS, and how it moves. All are 0 in hidden pairs, whatever was computed there."""
    tp = p * (ts - tlse)
    dp -= delta
    ds = p * dp
    tds = tp * dp + p * (tdp - tdelta)
    if MASKED:
        seen = s != NEG_INF
        tp, ds, tds = tl.where(seen, tp, 0.0), tl.where(seen, ds, 0.0), tl.where(seen, tds, 0.0)
    return tp, ds, tds


@triton.jit
def moving_product_gradients(s, ds, tds, traw, capped, rules, MASKED: tl.constexpr):
    """Back through the softcap: ds (1 - tanh^2), whose tangent takes that of tanh, (1 - tanh^2) traw / softcap."""
    softcap = rules[1]
    if softcap is not None:
        ratio = capped / softcap
        slope = 1.0 - ratio * ratio
        tds = (tds - ratio * traw * ds * (2.0 / softcap)) * slope
        ds *= slope
        if MASKED:  # the products of hidden pairs may be NaN
            seen = s != NEG_INF
            ds, tds = tl.where(seen, ds, 0.0), tl.where(seen, tds, 0.0)
    return ds, tds
