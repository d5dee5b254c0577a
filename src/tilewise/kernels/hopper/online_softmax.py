"""From products to probabilities in the Hopper kernels: scale, softcap, ALiBi, bias and mask on a tile of scores, and the online softmax.

A consumer holds a tile S [64, block_n] in the layout of the wgmma accumulator. The running maximum m and sum l follow Milakov and
Gimelshein 2018 as FlashAttention uses them (Dao et al. 2022, algorithm 1), in base 2.
"""

from .barriers import arrive_behind_reads, phase_of, stage_of, wait
from .gluon_api import gl, jit
from .matrices import add_bias_as_told, load_matrix
from .walk import columns, queries, split_head

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)


@jit
def reciprocal(x):
    """1 / x within an ulp, 0 for infinity: one instruction where a division is ten."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@jit
def matrices(C: gl.constexpr, p, mem, base, tile, block, row, count, layout: gl.constexpr, WARPGROUP: gl.constexpr):
    """(bias, mask) of the scores of one block, as they are stored. Read before the wait for the scores, whose product hides it."""
    BIAS: gl.constexpr = C.bias
    MASK: gl.constexpr = C.mask
    BLOCK_N: gl.constexpr = C.block_n
    bias, mask = 0, 0
    stage = 0
    if C.matrix_stages:
        stage = stage_of(count, C.matrix_stages)
        wait(base + 8 * (C.matrix_full + stage), phase_of(count, C.matrix_stages))
    slot = stage * C.warpgroups + WARPGROUP
    batch, head = split_head(p, tile.batch_head)
    rows = (row + gl.arange(0, 64, layout=gl.SliceLayout(1, layout)))[:, None]
    keys = (tile.origin + block * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout)))[None, :]
    if BIAS == "tma":
        bias = mem.bias.index(slot).reshape([64, BLOCK_N]).load(layout)
    elif BIAS != "":
        bias = load_matrix(BIAS, p.bias, batch, head, rows, p.seqlen_q, keys, p.seqlen_k)
    if MASK == "tma":
        mask = mem.mask.index(slot).reshape([64, BLOCK_N]).load(layout)
    elif MASK != "":
        mask = load_matrix(MASK, p.mask, batch, head, rows, p.seqlen_q, keys, p.seqlen_k)
    return bias, mask


@jit
def release_matrices(C: gl.constexpr, base, count):
    """Behind their use. The producer's fence orders these reads before the next copy into the buffer."""
    if C.matrix_stages:
        arrive_behind_reads(base + 8 * (C.matrix_empty + stage_of(count, C.matrix_stages)))


@jit
def score(C: gl.constexpr, p, tile, block, row, slope, bias, mask, s):
    """The rules between QK^T and softmax, on one block. s [64, block_n] comes as the plain product."""
    if C.scale_first:
        s = s * p.scale
    if C.softcap:
        # tanh x = 1 - 2 / (1 + e^2x), with 2 log2(e) / softcap inside p.scale: PTX's own tanh.approx is good for 11 bits only
        s = p.softcap - 2.0 * p.softcap * reciprocal(1.0 + gl.exp2(s))
    if C.alibi:
        layout: gl.constexpr = s.type.layout
        row_layout: gl.constexpr = gl.SliceLayout(1, layout)
        constant, lane = columns(layout, C.block_n)
        rows = queries(C, row_layout)[:, None]
        position = (rows + (row + tile.shift - block * C.block_n) - lane).to(gl.float32)
        s = s - slope * gl.abs(position - constant.to(gl.float32))
    if C.bias != "":
        s = add_bias_as_told(C, s, bias, p.repairs)  # what is NaN in the first launch is looked after in the one that repairs
    if C.mask != "":
        s = gl.where(mask != 0, s, float("-inf"))
    return s


@jit
def partial_row_sums(x):
    """[64, n] -> [64, 4], one column for each lane of a quad: no shuffle until the tile ends."""
    n: gl.constexpr = x.shape[1]
    return gl.sum(gl.sum(gl.reshape(x, [64, n // 8, 4, 2]), 3), 1)


@jit
def row_maxima(x):
    """[64, n] -> [64]. Pairs first: two short chains of maxima are there for ptxas to interleave, not one long one."""
    n: gl.constexpr = x.shape[1]
    partial = gl.max(gl.max(gl.reshape(x, [64, n // 8, 4, 2]), 3), 1)
    return gl.convert_layout(gl.max(partial, 1), gl.SliceLayout(1, x.type.layout))


@jit
def halves(x):
    """[64, n] -> its left and its right [64, n / 2], in the registers where they are."""
    n: gl.constexpr = x.shape[1]
    return gl.split(gl.permute(gl.reshape(x, [64, 2, n // 2]), (0, 2, 1)))


@jit
def joined(left, right):
    """What `halves` took apart."""
    n: gl.constexpr = left.shape[1]
    return gl.reshape(gl.permute(gl.join(left, right), (0, 2, 1)), [64, 2 * n])


@jit
def exponent_line(C: gl.constexpr, p, m_i):
    """(unit, offset), both [64]: s * unit - offset is the power of 2 by which a score lies below the maximum of its row.

    It is exactly 0 where s = m_i, and -inf where a row has seen nothing. A multiply-add for each score. Past 2^27 the rounded product
    m_i * exp_scale would shift a whole row by more than an exponential can hold; there a power of two not below exp_scale stands in for it,
    whose product is exact: scores that differ at all differ by so much that only those equal to the maximum count. A bias may be as large
    as float32 allows: far out 1 takes the place of the power, and nothing overflows.
    """
    bits = p.exp_scale.to(gl.int32, bitcast=True)
    power_of_two = ((bits + 0x7FFFFF) & 0x7F800000).to(gl.float32, bitcast=True)
    if C.bias != "":
        power_of_two = gl.where(gl.maximum(m_i, -m_i) > 1e19, 1.0, power_of_two)
    offset = m_i * p.exp_scale
    huge = is_huge(offset)
    unit = gl.where(huge, power_of_two, p.exp_scale)
    offset = gl.where(huge, m_i * power_of_two, offset)
    if C.may_be_empty:
        offset = gl.where(m_i == float("-inf"), 0.0, offset)
    return unit, offset


@jit
def is_huge(offset):
    return gl.maximum(offset, -offset) > 134217728.0


@jit
def probabilities(s, unit, offset):
    """exp2(s * unit - offset) for scores [64, n] in any layout."""
    row: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    return gl.exp2(s * gl.convert_layout(unit, row)[:, None] - gl.convert_layout(offset, row)[:, None])


@jit
def first_softmax(C: gl.constexpr, p, s):
    """m_i [64], l_i [64, 4] and P [64, block_n] of a row's first block."""
    m_i = row_maxima(s)
    unit, offset = exponent_line(C, p, m_i)
    probability = probabilities(s, unit, offset)
    return m_i, partial_row_sums(probability), probability


@jit
def new_maximum(C: gl.constexpr, p, s, m_i):
    """m_i after one block more, and the factor alpha that what was summed up so far still needs.

    Where the maximum stays, alpha is exactly 1, and `rescale` skips its products if it stays in all rows that a warp takes together. The
    maximum is always the true one, so that the largest probability is exactly 1: letting it lag behind would skip more, and round that one
    too.
    """
    m_block = row_maxima(s)
    grows = m_block > m_i
    change = (m_i - m_block) * p.exp_scale
    if C.bias != "":
        # A bias may be far larger than what its values differ by: as in the exponents, products are rounded before they are subtracted.
        offset = m_block * p.exp_scale
        change = gl.where(is_huge(offset), change, m_i * p.exp_scale - offset)
    return gl.where(grows, m_block, m_i), gl.exp2(gl.where(grows, change, 0.0))


@jit
def add_sums(l_i, alpha, block_sum):
    """l_i [64, 4] after one block more."""
    layout: gl.constexpr = l_i.type.layout
    return l_i * gl.convert_layout(alpha, gl.SliceLayout(1, layout))[:, None] + gl.convert_layout(block_sum, layout)
