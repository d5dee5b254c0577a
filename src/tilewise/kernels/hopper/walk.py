"""The walk over tiles: which query rows a CTA takes next, which key blocks they see, and where those lie in memory.

The producer and the consumers call the same functions, so they agree without talking to each other. The kernel knows tiles and key
blocks only through this file: another way of finding them (a packed-sequence map, a page table, a block list) is another body here.
"""

from .barriers import pinned, uniform
from .gluon_api import aggregate, constexpr_function, gl, jit
from .matrices import Matrix


@aggregate
class Problem:
    """Scalars and pointers of one call."""

    lse_ptr: gl.tensor
    out_ptr: gl.tensor
    counter_ptr: gl.tensor
    lengths_q_ptr: gl.tensor
    lengths_k_ptr: gl.tensor
    slopes_ptr: gl.tensor
    sink_ptr: gl.tensor
    scale: gl.tensor  # of q.k, where it is applied before the maximum
    exp_scale: gl.tensor  # turns a score into the exponent of 2
    softcap: gl.tensor
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    heads: gl.tensor
    group: gl.tensor  # query heads a key head serves
    row_blocks: gl.tensor
    batch_heads: gl.tensor
    tiles: gl.tensor
    head_group: gl.tensor  # heads whose K and V share the L2 cache
    window_left: gl.tensor
    window_right: gl.tensor
    stride_slopes: gl.tensor
    dim_v: gl.tensor
    stride_out_b: gl.tensor
    stride_out_h: gl.tensor
    stride_out_s: gl.tensor
    bias: Matrix
    mask: Matrix

    @constexpr_function
    def __init__(
        self,
        lse_ptr,
        out_ptr,
        counter_ptr,
        lengths_q_ptr,
        lengths_k_ptr,
        slopes_ptr,
        sink_ptr,
        scale,
        exp_scale,
        softcap,
        seqlen_q,
        seqlen_k,
        heads,
        group,
        row_blocks,
        batch_heads,
        tiles,
        head_group,
        window_left,
        window_right,
        stride_slopes,
        dim_v,
        stride_out_b,
        stride_out_h,
        stride_out_s,
        bias,
        mask,
    ):
        self.lse_ptr = lse_ptr
        self.out_ptr = out_ptr
        self.counter_ptr = counter_ptr
        self.lengths_q_ptr = lengths_q_ptr
        self.lengths_k_ptr = lengths_k_ptr
        self.slopes_ptr = slopes_ptr
        self.sink_ptr = sink_ptr
        self.scale = scale
        self.exp_scale = exp_scale
        self.softcap = softcap
        self.seqlen_q = seqlen_q
        self.seqlen_k = seqlen_k
        self.heads = heads
        self.group = group
        self.row_blocks = row_blocks
        self.batch_heads = batch_heads
        self.tiles = tiles
        self.head_group = head_group
        self.window_left = window_left
        self.window_right = window_right
        self.stride_slopes = stride_slopes
        self.dim_v = dim_v
        self.stride_out_b = stride_out_b
        self.stride_out_h = stride_out_h
        self.stride_out_s = stride_out_s
        self.bias = bias
        self.mask = mask


@jit
def in_every_warp(p):
    """The problem as a worker warp should hold it: the integers that steer loops and addresses marked warp-uniform."""
    return Problem(
        p.lse_ptr,
        p.out_ptr,
        p.counter_ptr,
        p.lengths_q_ptr,
        p.lengths_k_ptr,
        p.slopes_ptr,
        p.sink_ptr,
        p.scale,
        p.exp_scale,
        p.softcap,
        uniform(p.seqlen_q),
        uniform(p.seqlen_k),
        uniform(p.heads),
        uniform(p.group),
        uniform(p.row_blocks),
        uniform(p.batch_heads),
        uniform(p.tiles),
        uniform(p.head_group),
        uniform(p.window_left),
        uniform(p.window_right),
        p.stride_slopes,
        p.dim_v,
        p.stride_out_b,
        p.stride_out_h,
        p.stride_out_s,
        p.bias,
        p.mask,
    )


@aggregate
class Tile:
    """`block_m` query rows of one head, and the key blocks they visit, from `last_block` down."""

    batch_head: gl.tensor
    row: gl.tensor  # first query row
    rows_end: gl.tensor  # rows from here on are beyond the query length: their output is 0
    origin: gl.tensor  # the first key that some query sees; blocks and positions count from it
    shift: gl.tensor  # query row i stands at position i + shift
    keys_end: gl.tensor  # keys from here on are masked
    last_block: gl.tensor
    blocks: gl.tensor  # at least 1: the pipeline has no empty tile, a masked block takes its place

    @constexpr_function
    def __init__(self, batch_head, row, rows_end, origin, shift, keys_end, last_block, blocks):
        self.batch_head = batch_head
        self.row = row
        self.rows_end = rows_end
        self.origin = origin
        self.shift = shift
        self.keys_end = keys_end
        self.last_block = last_block
        self.blocks = blocks


@jit
def divide(a, b):
    """a // b of numbers that are not negative: unsigned division takes fewer of the producer's 24 registers."""
    return (a.to(gl.uint32) // b.to(gl.uint32)).to(gl.int32)


@jit
def split_head(p, batch_head):
    """(batch item, query head). Where it is needed, not in `Tile`: two registers less through the loop over key blocks."""
    batch = divide(batch_head, p.heads)
    return batch, batch_head - batch * p.heads


@jit
def find_tile(C: gl.constexpr, p, number):
    """The `number`-th tile. Where rows differ in length, long ones come first inside a group of heads whose K and V fit into L2."""
    if C.longest_first:
        section_size = p.row_blocks * p.head_group
        section = divide(number, section_size)
        inside = number - section * section_size
        first_head = section * p.head_group
        section_heads = gl.minimum(p.head_group, p.batch_heads - first_head)
        step = divide(inside, section_heads)
        row_block = p.row_blocks - 1 - step
        batch_head = first_head + (inside - step * section_heads)
    else:
        batch_head = divide(number, p.row_blocks)
        row_block = number - batch_head * p.row_blocks
    batch, _ = split_head(p, batch_head)
    length_q = p.seqlen_q
    length_k = p.seqlen_k
    if C.lengths_q:
        length_q = gl.minimum(gl.maximum(gl.load(p.lengths_q_ptr + batch), 0), p.seqlen_q)
    if C.lengths_k:
        length_k = gl.minimum(gl.maximum(gl.load(p.lengths_k_ptr + batch), 0), p.seqlen_k)
    row = row_block * C.block_m
    shift = length_k - length_q
    origin = length_k * 0
    if C.left:
        # Keys that are too far left for every query are never loaded: hidden V rows would meet P as 0 * NaN.
        origin = gl.maximum(shift - p.window_left, 0)
        if C.matrix_stages:
            origin = origin & -16  # TMA starts reading a row of a bias or mask at multiples of 16 bytes; `copy_finite` clears such values
        shift = shift - origin
        length_k = length_k - origin
    end = length_k
    begin = origin * 0
    if C.right:
        end = gl.minimum(end, row + C.block_m + shift + p.window_right)
    if C.left:
        begin = gl.maximum(begin, row + shift - p.window_left)
    first_block = begin >> C.log2_block_n
    last_block = (end - 1) >> C.log2_block_n
    blocks = last_block - first_block + 1
    keys_end = length_k
    if C.may_be_empty or C.lengths_q:
        empty = end <= begin
        if C.lengths_q:
            empty = empty | (row >= length_q)
        blocks = gl.where(empty, 1, blocks)
        last_block = gl.where(empty, 0, last_block)
        keys_end = gl.where(empty, 0, length_k)
    return Tile(batch_head, row, length_q, origin, shift, keys_end, last_block, blocks)


@jit
def query_coordinates(C: gl.constexpr, p, tile, warpgroup: gl.constexpr, column: gl.constexpr):
    """Where a warp group's rows start in Q and O, as (batch, head, row, column)."""
    batch, head = split_head(p, tile.batch_head)
    return batch, head, tile.row + 64 * warpgroup, column


@jit
def key_coordinates(C: gl.constexpr, p, tile, block, column: gl.constexpr):
    """Where a block of keys starts in K and V, as (batch, head, row, column)."""
    batch, head = split_head(p, tile.batch_head)
    return batch, divide(head, p.group), tile.origin + block * C.block_n, column


@jit
def plain_blocks(C: gl.constexpr, p, tile, row):
    """[first, end) of the blocks of which every one of the 64 rows from `row` on sees every key: no mask there."""
    first = tile.keys_end * 0
    end = tile.keys_end
    if C.right:
        end = gl.minimum(end, row + tile.shift + p.window_right + 1)
    if C.left:
        first = (row + 63 + tile.shift - p.window_left + C.block_n - 1) >> C.log2_block_n
    return first, end >> C.log2_block_n


@jit
def needs_mask(C: gl.constexpr, block, plain_first, plain_end):
    cut = block >= plain_end
    if C.left:
        cut = cut | (block < plain_first)
    return cut


@jit
def columns(layout: gl.constexpr, n: gl.constexpr):
    """0..n-1 as (constant, lane) summands [1, n] of wgmma's layout, where a lane of a quad holds columns 2 * lane, + 1, + 8, ...

    What is compared with a constant needs no register for it: the lane's part is taken to the other side, once a row.
    """
    cols = gl.arange(0, n, layout=gl.SliceLayout(0, layout))
    return (cols & -7)[None, :], (cols & 6)[None, :]


@jit
def mask_scores(C: gl.constexpr, p, tile, block, row, s):
    """-inf for what a row does not see. s [64, block_n] are the scores of the rows from `row` on."""
    layout: gl.constexpr = s.type.layout
    constant, lane = columns(layout, C.block_n)
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))[:, None]
    start = block * C.block_n
    end = pinned(tile.keys_end - start)
    if C.right:
        end = gl.minimum(rows + (row + tile.shift + p.window_right + 1 - start), end)
    s = gl.where(constant < end - lane, s, float("-inf"))
    if C.left:
        begin = rows + (row + tile.shift - p.window_left - start)
        s = gl.where(constant >= begin - lane, s, float("-inf"))
    return s
