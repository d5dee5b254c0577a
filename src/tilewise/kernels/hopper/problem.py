"""One call as the Hopper forward kernel's warps hold it: its scalars and pointers."""

from .barriers import uniform
from .gluon_api import aggregate, constexpr_function, gl, jit
from .matrices import Matrix
from .walk import heads_of_tiles


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
    records_ptr: gl.tensor  # of packed sequences and of lists: what each tile is, see `packed_tile` and `listed_tile`
    partial_ptr: gl.tensor  # of lists: the blocks of keys that a mask cuts, and those that it leaves whole
    full_ptr: gl.tensor
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
    partial_width: gl.tensor  # of lists: entries from one block of queries to the next
    full_width: gl.tensor
    list_batch: gl.tensor  # of lists: heads from one batch item to the next, and from one head to the next, 0 where they share
    list_head: gl.tensor
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
    seed_ptr: gl.tensor  # of dropout
    drop_below: gl.tensor  # words of the generator, unsigned
    keep_scale: gl.tensor  # of what is kept
    parts: gl.tensor  # that the blocks of a tile are cut into
    found_ptr: gl.tensor  # of bias and mask tensors: a word of each CTA, see `guard`
    repairs: gl.tensor  # 1 in the launch that reads the copy of V, else 0
    side_by_side: gl.tensor  # batch items whose tiles of the same queries and head are neighbours

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
        records_ptr,
        partial_ptr,
        full_ptr,
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
        partial_width,
        full_width,
        list_batch,
        list_head,
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
        seed_ptr,
        drop_below,
        keep_scale,
        parts,
        found_ptr,
        repairs,
        side_by_side,
    ):
        self.lse_ptr = lse_ptr
        self.out_ptr = out_ptr
        self.counter_ptr = counter_ptr
        self.lengths_q_ptr = lengths_q_ptr
        self.lengths_k_ptr = lengths_k_ptr
        self.slopes_ptr = slopes_ptr
        self.sink_ptr = sink_ptr
        self.records_ptr = records_ptr
        self.partial_ptr = partial_ptr
        self.full_ptr = full_ptr
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
        self.partial_width = partial_width
        self.full_width = full_width
        self.list_batch = list_batch
        self.list_head = list_head
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
        self.seed_ptr = seed_ptr
        self.drop_below = drop_below
        self.keep_scale = keep_scale
        self.parts = parts
        self.found_ptr = found_ptr
        self.repairs = repairs
        self.side_by_side = side_by_side


@jit
def in_every_warp(C: gl.constexpr, p):
    """The problem as a worker warp should hold it: the integers that steer loops and addresses marked warp-uniform."""
    row_blocks, tiles, batch_heads = uniform(p.row_blocks), uniform(p.tiles), uniform(p.batch_heads)
    if C.packed:
        # Only the device knows how many tiles there are of those that there is room for.
        row_blocks = uniform(gl.load(p.records_ptr + row_blocks * 8))
        tile_heads, _ = heads_of_tiles(C, p)
        tiles = row_blocks * tile_heads
    return Problem(
        p.lse_ptr,
        p.out_ptr,
        p.counter_ptr,
        p.lengths_q_ptr,
        p.lengths_k_ptr,
        p.slopes_ptr,
        p.sink_ptr,
        p.records_ptr,
        p.partial_ptr,
        p.full_ptr,
        p.scale,
        p.exp_scale,
        p.softcap,
        uniform(p.seqlen_q),
        uniform(p.seqlen_k),
        uniform(p.heads),
        uniform(p.group),
        row_blocks,
        batch_heads,
        tiles,
        p.partial_width,
        p.full_width,
        uniform(p.list_batch),
        uniform(p.list_head),
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
        p.seed_ptr,
        p.drop_below,
        p.keep_scale,
        uniform(p.parts),
        p.found_ptr,
        uniform(p.repairs),
        uniform(p.side_by_side),
    )
