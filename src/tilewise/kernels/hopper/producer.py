"""The producer of the Hopper forward kernel: one warp that streams tiles of Q, K and V, and of a bias or mask, into shared memory."""

from .barriers import draw_tile, fence_reads, leave_number, phase_of, publish, retire, shared_address, stage_of, wait
from .gluon_api import aggregate, constexpr_function, descriptor_type, expect_bytes, gl, jit, memdesc_type, tma_load
from .matrices import broadcast_coordinate
from .problem import in_every_warp
from .walk import find_tile, key_coordinates, listed_block, lists_of, query_coordinates, split_head


@aggregate
class Buffers:
    """Shared memory of a CTA. Every tile keeps its descriptor's rank 4; `reshape` drops the unit dimensions."""

    q: memdesc_type  # [warpgroups * q_stages * chunks, 1, own_heads, own_queries, chunk]
    k: memdesc_type  # [stages * chunks, 1, 1, block_n, chunk]
    v: memdesc_type  # [stages, 1, 1, block_n, dim_v]
    o: memdesc_type  # [.., 1, own_heads, own_queries, dim_v]
    bias: memdesc_type  # [matrix_stages * warpgroups, 1, 1, 64, block_n], where TMA brings it
    mask: memdesc_type  # likewise
    barriers: memdesc_type

    @constexpr_function
    def __init__(self, q, k, v, o, bias, mask, barriers):
        self.q = q
        self.k = k
        self.v = v
        self.o = o
        self.bias = bias
        self.mask = mask
        self.barriers = barriers


@aggregate
class Descriptors:
    q: descriptor_type
    k: descriptor_type
    v: descriptor_type
    o: descriptor_type
    bias: descriptor_type
    mask: descriptor_type

    @constexpr_function
    def __init__(self, q, k, v, o, bias, mask):
        self.q = q
        self.k = k
        self.v = v
        self.o = o
        self.bias = bias
        self.mask = mask


@jit
def load_queries(C: gl.constexpr, p, desc, mem, base, tile, count):
    WARPGROUPS: gl.constexpr = C.warpgroups
    CHUNKS: gl.constexpr = C.chunks
    stage = stage_of(count, C.q_stages)
    phase = phase_of(count, C.q_stages)
    for w in gl.static_range(WARPGROUPS):
        slot = w * C.q_stages + stage
        wait(base + 8 * (C.q_empty + slot), phase ^ 1)
        full = mem.barriers.index(C.q_full + slot)
        expect_bytes(full, C.q_bytes * C.chunks)
        for c in gl.static_range(CHUNKS):
            batch, head, row, column = query_coordinates(C, p, tile, w, c * C.chunk)
            tma_load(desc.q, [batch, head, row, column], full, mem.q.index(slot * C.chunks + c))


@jit
def load_keys(C: gl.constexpr, p, desc, mem, base, tile, block, count):
    CHUNKS: gl.constexpr = C.chunks
    stage = stage_of(count, C.stages)
    wait(base + 8 * (C.k_empty + stage), phase_of(count, C.stages) ^ 1)
    if C.listed:
        leave_number(base + 8 * (C.block_slot + stage_of(count, 2 * C.stages)), block)
    full = mem.barriers.index(C.k_full + stage)
    expect_bytes(full, C.k_bytes * C.chunks)
    for c in gl.static_range(CHUNKS):
        batch, head, row, column = key_coordinates(C, p, tile, block, c * C.chunk)
        tma_load(desc.k, [batch, head, row, column], full, mem.k.index(stage * C.chunks + c))


@jit
def load_values(C: gl.constexpr, p, desc, mem, base, tile, block, count):
    stage = stage_of(count, C.stages)
    wait(base + 8 * (C.v_empty + stage), phase_of(count, C.stages) ^ 1)
    full = mem.barriers.index(C.v_full + stage)
    expect_bytes(full, C.v_bytes)
    batch, head, row, column = key_coordinates(C, p, tile, block, 0)
    if C.values_a_head:
        _, own_head = split_head(p, tile.batch_head)
        head = gl.where(p.repairs == 0, head, own_head)
    tma_load(desc.v, [batch, head, row, column], full, mem.v.index(stage))


@jit
def load_matrix_tiles(C: gl.constexpr, p, desc, mem, base, tile, block, count):
    """The tiles of a bias and a mask tensor that meet a block of keys, those of all consumers at once."""
    WARPGROUPS: gl.constexpr = C.warpgroups
    stage = stage_of(count, C.matrix_stages)
    wait(base + 8 * (C.matrix_empty + stage), phase_of(count, C.matrix_stages) ^ 1)
    fence_reads(base)
    full = mem.barriers.index(C.matrix_full + stage)
    expect_bytes(full, C.matrix_bytes * C.warpgroups)
    batch, head = split_head(p, tile.batch_head)
    key = tile.origin + block * C.block_n
    for w in gl.static_range(WARPGROUPS):
        slot = stage * C.warpgroups + w
        row = tile.row + 64 * w
        if C.bias == "tma":
            at = [broadcast_coordinate(batch, p.bias.stride_b), broadcast_coordinate(head, p.bias.stride_h), row, key]
            tma_load(desc.bias, at, full, mem.bias.index(slot))
        if C.mask == "tma":
            at = [broadcast_coordinate(batch, p.mask.stride_b), broadcast_coordinate(head, p.mask.stride_h), row, key]
            tma_load(desc.mask, at, full, mem.mask.index(slot))


@jit
def producer(C: gl.constexpr, A: gl.constexpr, p, desc, mem):
    """One warp: draws tiles from the counter, tells the consumers, and keeps K one block ahead of V."""
    if C.packed:
        p = in_every_warp(C, p)
    programs = gl.num_programs(0)
    base = shared_address(A.barriers, p.seqlen_q)
    loaded = 0
    done = 0
    number = gl.program_id(0)
    while number < p.tiles:
        tile = find_tile(C, p, number)
        this = number
        number = draw_tile(p.counter_ptr, done) + programs
        if C.tile.cross_tile:
            load_queries(C, p, desc, mem, base, tile, done)
        block = tile.last_block
        next_block = block - 1
        if C.listed:
            # Read one block ahead: the answer comes while TMA waits for a free buffer.
            lists = lists_of(C, p, this)
            block, next_block = listed_block(C, lists, 0), listed_block(C, lists, 1)
        load_keys(C, p, desc, mem, base, tile, block, loaded)
        if not C.tile.cross_tile:  # O of the tile before leaves through Q's buffer: K need not wait for that
            load_queries(C, p, desc, mem, base, tile, done)
        if C.matrix_stages:
            load_matrix_tiles(C, p, desc, mem, base, tile, block, loaded)
        slot = done & 1
        wait(base + 8 * (C.next_empty + slot), ((done >> 1) & 1) ^ 1)
        publish(base + 8 * (C.next_slot + slot), base + 8 * (C.next_full + slot), number)
        for j in range(tile.blocks - 1):
            load_keys(C, p, desc, mem, base, tile, next_block, loaded + 1)
            load_values(C, p, desc, mem, base, tile, block, loaded)
            if C.matrix_stages:
                load_matrix_tiles(C, p, desc, mem, base, tile, next_block, loaded + 1)
            block = next_block
            next_block = listed_block(C, lists, j + 2) if C.listed else block - 1
            loaded += 1
        load_values(C, p, desc, mem, base, tile, block, loaded)
        loaded += 1
        done += 1
    retire(p.counter_ptr, done, programs - 1)
