"""The walk of the Hopper backward kernel: which keys a CTA owns, which query blocks see them, where those lie, and what is masked.

All roles of a CTA call the same functions, so they agree without talking to each other. Query blocks are visited from the last to the
first: CTAs of neighbouring keys, which start one after the other, then reach a query block in the order of their keys, each a little later
than the one before, and adding dQ in that order costs little.
"""

from .barriers import uniform
from .gluon_api import aggregate, constexpr_function, gl, jit
from .matrices import Matrix
from .walk import columns, divide


@aggregate
class BackwardProblem:
    """Scalars and pointers of one call."""

    lengths_q_ptr: gl.tensor
    lengths_k_ptr: gl.tensor
    slopes_ptr: gl.tensor
    dslopes_ptr: (
        gl.tensor
    )  # float32 (B * Hq, key_tiles): what each tile of keys adds to the gradient of its slope; packed: see `slope_place`
    turns_ptr: gl.tensor  # int32 (B * Hq, row_blocks), zeros: how many key blocks have told that they were added to each block of dQ
    records_ptr: gl.tensor  # of packed sequences int32 (key_tiles, 8): whose the tiles are, where they lie; of lists see `list_records`
    partial_ptr: gl.tensor  # of lists: the blocks of queries that a mask cuts, and those that it leaves whole
    full_ptr: gl.tensor
    scale: gl.tensor  # of q.k, where it is applied before the exponential
    exp_scale: gl.tensor  # turns a score into the exponent of 2
    softcap: gl.tensor
    out_scale: gl.tensor  # of dK
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    heads_k: gl.tensor  # key heads; where tiles are apart, every query head counts as one
    group: gl.tensor  # query heads a key head serves; 1 where tiles are apart
    sharing: gl.tensor  # where tiles are apart: query heads that share keys
    key_sums_ptr: gl.tensor  # float32: see `key_sums_place`
    head_group: gl.tensor  # key heads that are worked on together
    batch_heads: gl.tensor  # key heads of the batch
    row_blocks: gl.tensor  # blocks of dQ, LSE and delta of one head, which are padded to whole blocks
    key_tiles: gl.tensor  # tiles of keys of one head
    window_left: gl.tensor
    window_right: gl.tensor
    stride_slopes: gl.tensor
    bias: Matrix
    dbias: Matrix  # float32 tiles of scores, one beside the other: see `bias_place`
    items: gl.tensor  # of the batch where `heads_first`, else key heads: those that follow one another, from `first_item` on
    first_item: gl.tensor
    stores: gl.tensor  # 1: the gradient of a bias is stored, not added to what is there
    mask: Matrix
    seed_ptr: gl.tensor  # of dropout
    drop_below: gl.tensor  # words of the generator, unsigned
    keep_scale: gl.tensor  # of what is kept

    @constexpr_function
    def __init__(
        self,
        lengths_q_ptr,
        lengths_k_ptr,
        slopes_ptr,
        dslopes_ptr,
        turns_ptr,
        records_ptr,
        partial_ptr,
        full_ptr,
        scale,
        exp_scale,
        softcap,
        out_scale,
        seqlen_q,
        seqlen_k,
        heads_k,
        group,
        sharing,
        key_sums_ptr,
        head_group,
        batch_heads,
        row_blocks,
        key_tiles,
        window_left,
        window_right,
        stride_slopes,
        bias,
        dbias,
        items,
        first_item,
        stores,
        mask,
        seed_ptr,
        drop_below,
        keep_scale,
    ):
        self.lengths_q_ptr = lengths_q_ptr
        self.lengths_k_ptr = lengths_k_ptr
        self.slopes_ptr = slopes_ptr
        self.dslopes_ptr = dslopes_ptr
        self.turns_ptr = turns_ptr
        self.records_ptr = records_ptr
        self.partial_ptr = partial_ptr
        self.full_ptr = full_ptr
        self.scale = scale
        self.exp_scale = exp_scale
        self.softcap = softcap
        self.out_scale = out_scale
        self.seqlen_q = seqlen_q
        self.seqlen_k = seqlen_k
        self.heads_k = heads_k
        self.group = group
        self.sharing = sharing
        self.key_sums_ptr = key_sums_ptr
        self.head_group = head_group
        self.batch_heads = batch_heads
        self.row_blocks = row_blocks
        self.key_tiles = key_tiles
        self.window_left = window_left
        self.window_right = window_right
        self.stride_slopes = stride_slopes
        self.bias = bias
        self.dbias = dbias
        self.items = items
        self.first_item = first_item
        self.stores = stores
        self.mask = mask
        self.seed_ptr = seed_ptr
        self.drop_below = drop_below
        self.keep_scale = keep_scale


@aggregate
class KeyTile:
    """`block_n` keys of one key head, for all query heads that share it or for one of them, and the query blocks that see them, from
    `last_block` down. Keys, queries and blocks are counted inside a sequence; those of packed ones start at `first_k`, `first_q` and
    `first_block` of the whole row, those of a batch item at 0. Where query blocks stand in lists, each query head has its own
    (`listed_blocks`), and `blocks` are those of all that share the keys.
    """

    batch: gl.tensor  # 0 for packed sequences, which are one item
    sequence: gl.tensor  # what has slopes of its own: the batch item or the packed sequence
    head_k: gl.tensor  # where tiles are apart, the query head; see `BackwardProblem`
    block: gl.tensor
    key: gl.tensor  # the first one
    keys_end: gl.tensor  # keys from here on are masked
    rows_end: gl.tensor  # the query length
    shift: gl.tensor  # query row i stands at position i + shift
    last_block: gl.tensor
    blocks: gl.tensor
    first_q: gl.tensor
    first_k: gl.tensor
    rows_k: gl.tensor  # keys of the sequence, also those beyond its length
    first_block: gl.tensor  # in LSE, delta and the accumulator of dQ
    record_ptr: gl.tensor  # of lists: what `list_records.ranked_keys` says of the tile

    @constexpr_function
    def __init__(
        self,
        batch,
        sequence,
        head_k,
        block,
        key,
        keys_end,
        rows_end,
        shift,
        last_block,
        blocks,
        first_q,
        first_k,
        rows_k,
        first_block,
        record_ptr,
    ):
        self.batch = batch
        self.sequence = sequence
        self.head_k = head_k
        self.block = block
        self.key = key
        self.keys_end = keys_end
        self.rows_end = rows_end
        self.shift = shift
        self.last_block = last_block
        self.blocks = blocks
        self.first_q = first_q
        self.first_k = first_k
        self.rows_k = rows_k
        self.first_block = first_block
        self.record_ptr = record_ptr


@jit
def find_keys(C: gl.constexpr, p, number):
    """The `number`-th tile of keys. Inside a group of heads the first keys of all come first: they are the longest under a causal mask, and
    a CTA then follows the one whose additions to dQ it waits for at a distance. Tiles of packed sequences come as `triton.packed.schedule`
    ordered them, those of one sequence by rising keys; tiles with lists by falling cost. What a bias or mask says to several batch items is
    read, and added up, while it is in the L2 cache: there the items of one head come one after the other.
    """
    section_size = p.key_tiles * p.head_group
    section = divide(number, section_size)
    inside = number - section * section_size
    first_head = section * p.head_group
    section_heads = gl.minimum(p.head_group, p.batch_heads - first_head)
    block = divide(inside, section_heads)
    batch_head = first_head + (inside - block * section_heads)
    if C.heads_first:
        head_k = divide(batch_head, p.items)
        batch = p.first_item + (batch_head - head_k * p.items)
    elif C.bias_gradient == "added":
        batch = divide(batch_head, p.items)
        head_k = p.first_item + (batch_head - batch * p.items)
    else:
        batch = divide(batch_head, p.heads_k)
        head_k = batch_head - batch * p.heads_k
    sequence = batch
    length_q = p.seqlen_q
    length_k = p.seqlen_k
    first_q = batch * 0
    first_k = first_q
    first_block = first_q
    rows_k = p.seqlen_k
    record_ptr = p.records_ptr
    if C.lengths_q:
        length_q = gl.minimum(gl.maximum(gl.load(p.lengths_q_ptr + batch), 0), p.seqlen_q)
    if C.lengths_k:
        length_k = gl.minimum(gl.maximum(gl.load(p.lengths_k_ptr + batch), 0), p.seqlen_k)
    if C.packed:
        record_ptr = record_ptr + block * 8
        sequence = gl.maximum(uniform(gl.load(record_ptr)), 0)  # -1: a program too many, whose lengths are 0
        block = uniform(gl.load(record_ptr + 1)) >> C.log2_block_n
        first_q = uniform(gl.load(record_ptr + 2))
        length_q = uniform(gl.load(record_ptr + 4))
        first_k = uniform(gl.load(record_ptr + 5))
        rows_k = uniform(gl.load(record_ptr + 6))
        length_k = uniform(gl.load(record_ptr + 7))
        first_block = (first_q >> C.log2_block_m) + sequence  # leaves each sequence room for the block that its end shares with the next
    if C.listed:
        record_ptr = record_ptr + (batch_head * p.key_tiles + block).to(gl.int64) * (2 + 4 * p.group)
        block = uniform(gl.load(record_ptr))
    shift = length_k - length_q
    key = block * C.block_n
    begin = length_q * 0
    end = length_q
    if C.right:
        begin = gl.maximum(begin, key - shift - p.window_right)
    if C.left:
        end = gl.minimum(end, gl.minimum(key + C.block_n, length_k) - shift + p.window_left)
    last_block = (end - 1) >> C.log2_block_m
    empty = (end <= begin) | (key >= length_k)
    blocks = gl.where(empty, 0, last_block - (begin >> C.log2_block_m) + 1)
    if C.listed:
        blocks = uniform(gl.load(record_ptr + 1)) << C.log2_list
    return KeyTile(
        batch,
        sequence,
        head_k,
        block,
        key,
        length_k,
        length_q,
        shift,
        last_block,
        blocks,
        first_q,
        first_k,
        rows_k,
        first_block,
        record_ptr,
    )


@jit
def lists_of(p, tile, g):
    """The partial and the full list of a tile, and their lengths, for the g-th of the query heads that share its keys."""
    field_ptr = tile.record_ptr + (2 + 4 * g)
    return p.partial_ptr + gl.load(field_ptr + 2), p.full_ptr + gl.load(field_ptr + 3), gl.load(field_ptr), gl.load(field_ptr + 1)


@jit
def blocks_of_head(C: gl.constexpr, tile, g):
    """How many query blocks of the g-th query head see a tile."""
    blocks = tile.blocks
    if C.listed:
        field_ptr = tile.record_ptr + (2 + 4 * g)
        blocks = uniform(gl.load(field_ptr) + gl.load(field_ptr + 1)) << C.log2_list
    return blocks


@jit
def outer_visits(C: gl.constexpr, p, tile):
    """The visits of a tile are two loops: over blocks and the heads of each, or over heads and the blocks of each."""
    return tile.blocks if C.heads_inside else p.group if C.grouped else 1


@jit
def inner_visits(C: gl.constexpr, p, tile, outer):
    """How often the inner loop runs in the outer-th turn of the outer one."""
    return p.group if C.heads_inside else blocks_of_head(C, tile, outer)


@jit
def visited(C: gl.constexpr, p, tile, outer, inner):
    """(query head, block of queries) of a visit."""
    g, j = outer, inner
    if C.heads_inside:
        g, j = inner, outer
    return tile.head_k * p.group + g, tile.last_block - j


@jit
def row_of(C: gl.constexpr, p, tile, head, block):
    """Where a query block starts in LSE, delta and the accumulator of dQ."""
    return ((tile.batch * p.heads_k * p.group + head) * p.row_blocks + tile.first_block + block) * C.block_m


@jit
def query_coordinates(C: gl.constexpr, tile, head, block):
    """Where a query block starts in Q and dO, as (batch, head, row, column)."""
    return tile.batch, head, tile.first_q + block * C.block_m, 0


@jit
def key_coordinates(C: gl.constexpr, p, tile):
    """Where the keys start in K, V, dK and dV, as (batch, head, row, column)."""
    head_k = tile.head_k
    if C.apart:
        head_k = divide(head_k, p.sharing)
    return tile.batch, head_k, tile.first_k + tile.key, 0


@jit
def key_sums_place(C: gl.constexpr, p, tile):
    """Where dK of all query heads that share the keys of a tile is added up, as the threads hold it (`barriers.add_in_memory`); dV's
    sums follow.
    """
    owner = divide(tile.batch * p.heads_k + tile.head_k, p.sharing)  # of all key heads of the batch
    return p.key_sums_ptr + (owner * p.key_tiles + tile.block).to(gl.int64) * C.key_numbers


@jit
def slope_place(C: gl.constexpr, p, tile, head):
    """Where a tile writes its share of the gradient of a slope: those of packed sequences at their first key, in a row as long as all keys,
    which is summed by sequence.
    """
    query_head = tile.batch * p.heads_k * p.group + head
    if C.packed:
        row, place = p.seqlen_k, tile.first_k + tile.key
    else:
        row, place = (p.seqlen_k + C.block_n - 1) >> C.log2_block_n, tile.block
    return p.dslopes_ptr + query_head.to(gl.int64) * row + place


@jit
def bias_place(C: gl.constexpr, p, tile, head, block):
    """Where the gradients of a block of scores are added up: the blocks of a tile of keys lie together, in the head of the bias."""
    place = (tile.block * p.dbias.stride_m + block).to(gl.int64) * (C.block_m * C.block_n)
    return p.dbias.ptr + (tile.batch.to(gl.int64) * p.dbias.stride_b + head.to(gl.int64) * p.dbias.stride_h + place)


@jit
def seen_rows(C: gl.constexpr, p, tile):
    """[first, end) of the queries that see any key at all."""
    first = tile.shift * 0
    end = tile.rows_end
    if C.right:
        first = gl.maximum(first, -tile.shift - p.window_right)
    return first, gl.where(tile.keys_end > 0, end, first)


@jit
def seen_keys(C: gl.constexpr, p, tile):
    """[first, end) of the keys that any query sees."""
    first = tile.shift * 0
    if C.left:
        first = gl.maximum(first, tile.shift - p.window_left)
    return first, tile.keys_end


@jit
def plain_blocks(C: gl.constexpr, p, tile):
    """[first, end) of the query blocks of which every row sees every key of the tile: no mask there."""
    first = tile.shift * 0
    end = p.row_blocks
    if C.right:
        first = (tile.key + C.block_n - 1 - tile.shift - p.window_right + C.block_m - 1) >> C.log2_block_m
    if C.left:
        end = gl.minimum(end, (tile.key - tile.shift + p.window_left + 1) >> C.log2_block_m)
    return first, gl.where(tile.key + C.block_n > tile.keys_end, first, end)


@jit
def first_key_block(C: gl.constexpr, p, tile, block):
    """The first key block that adds to a block of dQ. Those that do are neighbours."""
    first = block * 0
    if C.left:
        first = gl.maximum(block * C.block_m + tile.shift - p.window_left, 0) >> C.log2_block_n
    return first


@jit
def hide(C: gl.constexpr, p, tile, block, prob):
    """0 where a query does not see a key. prob [block_n, block_m] are the probabilities of query block `block`, transposed."""
    layout: gl.constexpr = prob.type.layout
    constant, lane = columns(layout, C.block_m)
    keys = tile.key + gl.arange(0, C.block_n, layout=gl.SliceLayout(1, layout))[:, None]
    prob = gl.where(keys < tile.keys_end, prob, 0.0)
    position = keys - (tile.shift + block * C.block_m)  # of the query of the block that stands at the key
    if C.right:
        prob = gl.where(constant >= position - p.window_right - lane, prob, 0.0)
    if C.left:
        prob = gl.where(constant <= position + p.window_left - lane, prob, 0.0)
    return prob


@jit
def distances(C: gl.constexpr, tile, block, layout: gl.constexpr):
    """|p - j| [block_n, block_m] in float32, for ALiBi."""
    constant, lane = columns(layout, C.block_m)
    keys = tile.key + gl.arange(0, C.block_n, layout=gl.SliceLayout(1, layout))[:, None]
    position = (keys - (tile.shift + block * C.block_m) - lane).to(gl.float32)
    return gl.abs(position - constant.to(gl.float32))


@jit
def is_cut(block, plain_first, plain_end):
    """Whether some row of a query block misses some key of the tile."""
    return (block < plain_first) | (block >= plain_end)
