"""The walk over tiles: which query rows a CTA takes next, which key blocks they see, and where those lie in memory.

The producer and the consumers call the same functions, so they agree without talking to each other. The kernel knows tiles and key
blocks only through this file: another way of finding them (a packed-sequence map, a page table, a block list) is another body here.
"""

from .barriers import pinned, uniform
from .gluon_api import aggregate, constexpr_function, gl, jit


@aggregate
class Tile:
    """`queries` query rows of one head, or of `heads` heads from `batch_head` on, and the key blocks they visit, from `last_block` down."""

    batch_head: gl.tensor
    part: gl.tensor  # of the blocks that the rows see: which of `Problem.parts`
    row: gl.tensor  # first query row
    first_row: gl.tensor  # of the sequence
    rows_end: gl.tensor  # rows from here on are beyond the query length: their output is 0
    rows_stop: gl.tensor  # rows from here on are not of this sequence: they are not written
    origin: gl.tensor  # the first key that some query sees; blocks and positions count from it
    shift: gl.tensor  # query row i stands at position i + shift
    keys_end: gl.tensor  # keys from here on are masked
    last_block: gl.tensor
    blocks: gl.tensor  # at least 1: the pipeline has no empty tile, a masked block takes its place

    @constexpr_function
    def __init__(self, batch_head, part, row, first_row, rows_end, rows_stop, origin, shift, keys_end, last_block, blocks):
        self.batch_head = batch_head
        self.part = part
        self.row = row
        self.first_row = first_row
        self.rows_end = rows_end
        self.rows_stop = rows_stop
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
def item_and_head(C: gl.constexpr, p, tile):
    """Where the tensors hold a tile's head: packed sequences all lie in the first batch item."""
    batch, head = split_head(p, tile.batch_head)
    if C.packed:
        batch = batch * 0
    return batch, head


@jit
def own_row(C: gl.constexpr, tile, WARPGROUP: gl.constexpr):
    """The query of a warp group's first row."""
    return tile.row if C.heads > 1 else tile.row + 64 * WARPGROUP


@jit
def queries(C: gl.constexpr, layout: gl.constexpr):
    """[64], how far the query of each row is from the first one's."""
    rows = gl.arange(0, 64, layout=layout)
    return rows & (C.own_queries - 1) if C.heads > 1 else rows


@jit
def own_heads(C: gl.constexpr, p, head, layout: gl.constexpr, WARPGROUP: gl.constexpr):
    """The query head of a warp group's rows, one or [64], in a tile whose first head is `head`; rows of no head have the last one's."""
    if C.heads > 1:
        head = head + C.own_heads * WARPGROUP + (gl.arange(0, 64, layout=layout) >> C.log2_own_queries)
        head = gl.minimum(head, p.heads - 1)
    return head


@jit
def heads_of_tiles(C: gl.constexpr, p):
    """How many tiles meet the same queries of all heads and batch items, and how many of them share K and V."""
    heads, shared = p.batch_heads, p.group
    if C.heads > 1:
        shared = (p.group + C.heads - 1) >> C.log2_heads
        heads = divide(p.batch_heads, p.group) * shared
    return heads, shared


@jit
def first_head_of(C: gl.constexpr, p, tile_head):
    """The first head, of a batch item or of all of them, of the `tile_head`-th tile that meets the same queries."""
    if C.heads > 1:
        _, shared = heads_of_tiles(C, p)
        owner = divide(tile_head, shared)
        tile_head = owner * p.group + (tile_head - owner * shared) * C.heads
    return tile_head


@jit
def packed_tile(p, slot):
    """What `kernels.triton.packed.schedule` says of a tile: its sequence (-1: there is none), first row, and the first row, rows and real
    rows that the sequence has of queries, and the first and the number of its real keys."""
    record_ptr = p.records_ptr + slot * 8
    sequence, row = uniform(gl.load(record_ptr)), uniform(gl.load(record_ptr + 1))
    first_q, rows_q, length_q = uniform(gl.load(record_ptr + 2)), uniform(gl.load(record_ptr + 3)), uniform(gl.load(record_ptr + 4))
    first_k, length_k = uniform(gl.load(record_ptr + 5)), uniform(gl.load(record_ptr + 7))
    return gl.maximum(sequence, 0), row, first_q, rows_q, length_q, first_k, length_k


@jit
def place(C: gl.constexpr, p, number):
    """(row block, head of a batch item) of the `number`-th tile. Where rows differ in length, long ones come first inside a group of heads
    whose K and V fit into L2."""
    if C.longest_first or C.ranked:
        section_size = p.row_blocks * p.head_group
        section = divide(number, section_size)
        inside = number - section * section_size
        first_head = section * p.head_group
        batch_heads, _ = heads_of_tiles(C, p)
        section_heads = gl.minimum(p.head_group, batch_heads - first_head)
        step = divide(inside, section_heads)
        row_block = step if C.ranked else p.row_blocks - 1 - step
        batch_head = first_head + (inside - step * section_heads)
    else:
        batch_head = divide(number, p.row_blocks)
        row_block = number - batch_head * p.row_blocks
    return row_block, batch_head


@jit
def list_record(C: gl.constexpr, p, number):
    """Where `list_records.ranked` says of a tile: its number by rows, entries of its partial and full list, and the row of these lists."""
    rank, batch_head = place(C, p, number)
    batch, head = split_head(p, batch_head)
    return p.records_ptr + ((batch * p.list_batch + head * p.list_head) * p.row_blocks + rank) * 4, batch_head


@jit
def listed_tile(C: gl.constexpr, p, number):
    """A tile whose blocks stand in lists: consumers take their numbers from the producer (`listed_block`), one by one."""
    record_ptr, batch_head = list_record(C, p, number)
    row = uniform(gl.load(record_ptr)) * C.block_m
    entries = uniform(gl.load(record_ptr + 1) + gl.load(record_ptr + 2))
    none = row * 0
    blocks = gl.where(entries == 0, 1, entries << C.log2_list)
    keys_end = gl.where(entries == 0, 0, p.seqlen_k)
    return Tile(batch_head, none, row, none, p.seqlen_q, p.seqlen_q, none, p.seqlen_k - p.seqlen_q, keys_end, none, blocks)


@jit
def lists_of(C: gl.constexpr, p, number):
    """The partial and the full list of a tile, and their lengths."""
    record_ptr, _ = list_record(C, p, number)
    list_row = gl.load(record_ptr + 3).to(gl.int64)
    partial_ptr, full_ptr = p.partial_ptr + list_row * p.partial_width, p.full_ptr + list_row * p.full_width
    return partial_ptr, full_ptr, gl.load(record_ptr + 1), gl.load(record_ptr + 2)


@jit
def listed_block(C: gl.constexpr, lists, j):
    """The j-th block of keys that a tile visits: those of its partial list, then those of its full one. Past the end nothing is read."""
    partial_ptr, full_ptr, num_partial, num_full = lists
    entry = j >> C.log2_list
    entry_ptr = gl.where(entry < num_partial, partial_ptr + entry, full_ptr + (entry - num_partial))
    start = gl.load(entry_ptr, mask=entry < num_partial + num_full, other=0)
    return (start << C.log2_list) + (j - (entry << C.log2_list))


@jit
def find_tile(C: gl.constexpr, p, number):
    """The `number`-th tile."""
    return listed_tile(C, p, number) if C.listed else ranged_tile(C, p, number)


@jit
def ranged_tile(C: gl.constexpr, p, number):
    """A tile whose blocks are all those of a range, or a part of them."""
    part = number * 0
    if C.parts:
        # Parts of a tile are neighbours: they run side by side, and long tiles still come first.
        part = number - divide(number, p.parts) * p.parts
        number = divide(number, p.parts)
    row_block, batch_head = place(C, p, number)
    if C.guarded:
        # Items that share a bias or mask read the same tile of it at about the same time, all but the first out of the L2 cache.
        head = divide(batch_head, p.side_by_side)
        batch_head = (batch_head - head * p.side_by_side) * p.heads + head
    if C.packed:
        # Rows count from the start of the tensor, so that positions are all that knows of sequences; keys count from the sequence's first.
        sequence, row, first_q, rows_q, length_q, first_k, length_k = packed_tile(p, row_block)
        batch_head = sequence * p.heads + first_head_of(C, p, batch_head)
        shift = length_k - length_q - first_q
        row = row + first_q
        first_row = first_q
        rows_end = first_q + length_q
        rows_stop = first_q + rows_q
        first_position = length_k - length_q
    else:
        batch_head = first_head_of(C, p, batch_head)
        batch, _ = split_head(p, batch_head)
        length_q = p.seqlen_q
        length_k = p.seqlen_k
        if C.lengths_q:
            length_q = gl.minimum(gl.maximum(gl.load(p.lengths_q_ptr + batch), 0), p.seqlen_q)
        if C.lengths_k:
            length_k = gl.minimum(gl.maximum(gl.load(p.lengths_k_ptr + batch), 0), p.seqlen_k)
        row = row_block * C.queries
        first_row = batch * 0
        shift = length_k - length_q
        rows_end = length_q
        rows_stop = p.seqlen_q
        first_position = shift
    origin = length_k * 0
    if C.left:
        # Keys that are too far left for every query are never loaded: hidden V rows would meet P as 0 * NaN.
        origin = gl.maximum(first_position - p.window_left, 0)
        if C.matrix_stages:
            origin = origin & -16  # TMA starts reading a row of a bias or mask at multiples of 16 bytes; `copy_finite` clears such values
        if C.dropout:
            origin = origin & -4  # four keys share a call of the generator
        shift = shift - origin
        length_k = length_k - origin
    end = length_k
    begin = origin * 0
    if C.right:
        end = gl.minimum(end, row + C.queries + shift + p.window_right)
    if C.left:
        begin = gl.maximum(begin, row + shift - p.window_left)
    first_block = begin >> C.log2_block_n
    last_block = (end - 1) >> C.log2_block_n
    blocks = last_block - first_block + 1
    keys_end = length_k
    empty = end <= begin
    if C.parts:
        share = divide(gl.maximum(blocks, 0) + p.parts - 1, p.parts)
        last_block = last_block - part * share
        blocks = gl.minimum(blocks - part * share, share)
        empty = empty | (blocks <= 0)
    if C.may_be_empty or C.lengths_q:
        if C.lengths_q:
            empty = empty | (row >= rows_end)
        blocks = gl.where(empty, 1, blocks)
        last_block = gl.where(empty, 0, last_block)
        keys_end = gl.where(empty, 0, length_k)
    if C.packed:
        origin = origin + first_k
    return Tile(batch_head, part, row, first_row, rows_end, rows_stop, origin, shift, keys_end, last_block, blocks)


@jit
def query_coordinates(C: gl.constexpr, p, tile, warpgroup: gl.constexpr, column: gl.constexpr):
    """Where a warp group's rows start in Q and O, as (batch, head, row, column)."""
    batch, head = item_and_head(C, p, tile)
    if C.heads > 1:
        head = head + C.own_heads * warpgroup
    return batch, head, own_row(C, tile, warpgroup), column


@jit
def key_coordinates(C: gl.constexpr, p, tile, block, column: gl.constexpr):
    """Where a block of keys starts in K and V, as (batch, head, row, column)."""
    batch, head = item_and_head(C, p, tile)
    return batch, divide(head, p.group), tile.origin + block * C.block_n, column


@jit
def plain_blocks(C: gl.constexpr, p, tile, row):
    """[first, end) of the blocks of which every row of a warp group, whose first query is `row`, sees every key: no mask there."""
    first = tile.keys_end * 0
    end = tile.keys_end
    if C.right:
        end = gl.minimum(end, row + tile.shift + p.window_right + 1)
    if C.left:
        first = (row + C.own_queries - 1 + tile.shift - p.window_left + C.block_n - 1) >> C.log2_block_n
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
    """-inf for what a row does not see. s [64, block_n] are the scores of a warp group whose first query is `row`."""
    layout: gl.constexpr = s.type.layout
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    constant, lane = columns(layout, C.block_n)
    rows = queries(C, row_layout)[:, None]
    start = block * C.block_n
    end = pinned(tile.keys_end - start)
    if C.right:
        end = gl.minimum(rows + (row + tile.shift + p.window_right + 1 - start), end)
    s = gl.where(constant < end - lane, s, float("-inf"))
    if C.left:
        begin = rows + (row + tile.shift - p.window_left - start)
        s = gl.where(constant >= begin - lane, s, float("-inf"))
    return s
