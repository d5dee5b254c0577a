"""The warps of the Hopper backward kernel that move tiles: one loads them into shared memory, two add dQ to memory."""

from .backward_walk import (
    find_keys,
    first_key_block,
    inner_visits,
    key_coordinates,
    lists_of,
    outer_visits,
    query_coordinates,
    row_of,
    visited,
)
from .barriers import (
    arrive_each_warp,
    await_turn,
    give_turn,
    leave_number,
    left_number,
    phase_of,
    shared_address,
    stage_of,
    wait,
)
from .gluon_api import (
    aggregate,
    constexpr_function,
    descriptor_type,
    expect_bytes,
    gl,
    jit,
    memdesc_type,
    tma_load,
    tma_reduce_add,
    tma_store,
    tma_store_wait,
)
from .matrices import broadcast_coordinate
from .walk import listed_block


@aggregate
class Buffers:
    """Shared memory of a CTA. Tiles keep their descriptor's rank; `reshape` drops the unit dimensions."""

    q: memdesc_type  # [stages, 1, 1, block_m, dim]
    do: memdesc_type  # [stages, 1, 1, block_m, dim_v]
    lse: memdesc_type  # [stages, block_m]
    lse_rest: memdesc_type  # [stages, block_m], with a bias
    bias: memdesc_type  # [stages, 1, 1, block_m, block_n], where TMA brings it
    mask: memdesc_type  # likewise
    delta: memdesc_type  # [stages, block_m]
    k: memdesc_type  # [1, 1, block_n, dim]
    v: memdesc_type  # [1, 1, block_n, dim_v]
    p: memdesc_type  # [block_n, block_m], where the warp groups share it; else dS
    ds: memdesc_type  # [block_n, block_m]
    dq: memdesc_type  # dq_box, float32
    dbias: memdesc_type  # [1, 1, block_m, block_n]: dS as it lies in the gradient of a bias, where it is stored
    barriers: memdesc_type

    @constexpr_function
    def __init__(self, q, do, lse, lse_rest, bias, mask, delta, k, v, p, ds, dq, dbias, barriers):
        self.q = q
        self.do = do
        self.lse = lse
        self.lse_rest = lse_rest
        self.bias = bias
        self.mask = mask
        self.delta = delta
        self.k = k
        self.v = v
        self.p = p
        self.ds = ds
        self.dq = dq
        self.dbias = dbias
        self.barriers = barriers


@aggregate
class Descriptors:
    q: descriptor_type
    k: descriptor_type
    v: descriptor_type
    do: descriptor_type
    lse: descriptor_type  # all rows of all heads, each head padded to whole blocks
    delta: descriptor_type
    dq: descriptor_type  # likewise, float32, as rows or as lines of 32 numbers
    dk: descriptor_type
    dv: descriptor_type
    lse_rest: descriptor_type
    bias: descriptor_type
    mask: descriptor_type
    dbias: descriptor_type

    @constexpr_function
    def __init__(self, q, k, v, do, lse, delta, dq, dk, dv, lse_rest, bias, mask, dbias):
        self.q = q
        self.k = k
        self.v = v
        self.do = do
        self.lse = lse
        self.delta = delta
        self.dq = dq
        self.dk = dk
        self.dv = dv
        self.lse_rest = lse_rest
        self.bias = bias
        self.mask = mask
        self.dbias = dbias


@jit
def matrix_coordinates(x, tile, head, row):
    """Where the part of a bias or mask that meets a tile of scores starts, for TMA."""
    return [broadcast_coordinate(tile.batch, x.stride_b), broadcast_coordinate(head, x.stride_h), row, tile.key]


@jit
def row_slot(C: gl.constexpr, base, count):
    """Where the loading warp leaves the row at which dQ of the count-th block starts.

    It is written behind the return of the Q buffer of block count - stages, and so over the row of count - 2 * stages. A warp group gives
    a buffer back behind its part of that block's dQ, which it puts where that of the block before has been taken from. So both it and the
    adding warps have by then read all rows up to that of count - stages - 1.
    """
    return base + 8 * (C.row_slot + stage_of(count, 2 * C.stages))


@jit
def load_tiles(C: gl.constexpr, A: gl.constexpr, p, desc, mem):
    """One warp: Q with its LSE and dO with its delta, block after block; K and V come with the first ones, so that S waits for no V."""
    base = shared_address(A, p.seqlen_q)
    tile = find_keys(C, p, gl.program_id(0))
    count = 0
    for outer in range(outer_visits(C, p, tile)):
        if C.listed:
            # Read one block ahead: the answer comes while TMA waits for a free buffer.
            lists = lists_of(p, tile, outer)
            next_block = listed_block(C, lists, 0)
        for inner in range(inner_visits(C, p, tile, outer)):
            head, block = visited(C, p, tile, outer, inner)
            if C.listed:
                block = next_block
                next_block = listed_block(C, lists, inner + 1)
            row = row_of(C, p, tile, head, block)
            stage = stage_of(count, C.stages)
            wait(base + 8 * (C.q_empty + stage), phase_of(count, C.stages) ^ 1)
            if C.listed:
                leave_number(row_slot(C, base, count), row)
            q_full = mem.barriers.index(C.q_full + stage)
            if count == 0:
                expect_bytes(q_full, C.q_stage_bytes + C.k_bytes)
                tma_load(desc.k, key_coordinates(C, p, tile), q_full, mem.k)
            else:
                expect_bytes(q_full, C.q_stage_bytes)
            tma_load(desc.q, query_coordinates(C, tile, head, block), q_full, mem.q.index(stage))
            tma_load(desc.lse, [row], q_full, mem.lse.index(stage))
            if C.bias != "":
                tma_load(desc.lse_rest, [row], q_full, mem.lse_rest.index(stage))
            if C.bias == "tma":
                at = matrix_coordinates(p.bias, tile, head, block * C.block_m)
                tma_load(desc.bias, at, q_full, mem.bias.index(stage))
            if C.mask == "tma":
                at = matrix_coordinates(p.mask, tile, head, block * C.block_m)
                tma_load(desc.mask, at, q_full, mem.mask.index(stage))
            do_stage = stage_of(count, C.do_stages)
            wait(base + 8 * (C.do_empty + do_stage), phase_of(count, C.do_stages) ^ 1)
            do_full = mem.barriers.index(C.do_full + do_stage)
            if count == 0:
                expect_bytes(do_full, C.do_bytes + C.row_bytes + C.v_bytes)
                tma_load(desc.v, key_coordinates(C, p, tile), do_full, mem.v)
            else:
                expect_bytes(do_full, C.do_bytes + C.row_bytes)
            tma_load(desc.do, query_coordinates(C, tile, head, block), do_full, mem.do.index(do_stage))
            tma_load(desc.delta, [row], do_full, mem.delta.index(do_stage))
            count += 1


@jit
def dq_coordinates(C: gl.constexpr, row, part):
    """Where a part of the block of dQ that starts at this row lies in its accumulator, for TMA."""
    at = [row, part * C.dq_columns]
    if C.lanes:
        at = [row * (C.dim // 32) + part * C.dq_box[0], 0]
    return at


@jit
def store_bias_gradient(C: gl.constexpr, desc, mem, tile, head, block):
    """The gradient of a block of scores, which lies in shared memory until dQ's buffer is given back."""
    tma_store(desc.dbias, [tile.batch, head, block * C.block_m, tile.key], mem.dbias)


@jit
def add_queries(C: gl.constexpr, A: gl.constexpr, p, desc, mem, WARP: gl.constexpr):
    """One of two warps, which take the parts of dQ in turn: adds them to memory, where `ordered` only when all key blocks before this one
    have added theirs. One warp alone would be too slow there: an addition, its completion and the news of it take longer than a block. In
    the order "first" the others wait for the first one alone, which is ahead of them but where they started beside it.
    """
    PARTS: gl.constexpr = C.dq_parts
    base = shared_address(A, p.seqlen_q)
    tile = find_keys(C, p, gl.program_id(0))
    last = (tile.blocks if C.listed else p.group * tile.blocks) * PARTS
    count = WARP
    outer, inner = 0, WARP // PARTS
    while count < last:
        part = (count & 1) if PARTS == 2 else 0
        if not C.listed:
            if C.grouped:
                visits = inner_visits(C, p, tile, outer)
                while inner >= visits:
                    inner -= visits
                    outer += 1
            head, block = visited(C, p, tile, outer, inner)
            row = row_of(C, p, tile, head, block)
        if C.order != "":
            turn = tile.block - first_key_block(C, p, tile, block)
            if C.order == "first":
                turn = gl.minimum(turn, 1)
            turn_ptr = p.turns_ptr + (row >> C.log2_block_m) * PARTS + part
            await_turn(turn_ptr, turn)
            wait(base + 8 * (C.dq_full + WARP), (count >> 1) & 1)
            if C.bias_gradient == "stored":
                store_bias_gradient(C, desc, mem, tile, head, block)
            if turn == 0:
                tma_store(desc.dq, dq_coordinates(C, row, part), mem.dq)
            else:
                tma_reduce_add(desc.dq, dq_coordinates(C, row, part), mem.dq)
        else:
            wait(base + 8 * (C.dq_full + WARP), (count >> 1) & 1)
            if C.listed:
                row = left_number(row_slot(C, base, count // PARTS))
            if C.bias_gradient == "stored":
                store_bias_gradient(C, desc, mem, tile, head, block)
            tma_reduce_add(desc.dq, dq_coordinates(C, row, part), mem.dq)
        tma_store_wait(0)
        arrive_each_warp(base + 8 * C.dq_empty)
        if C.order == "all":
            give_turn(turn_ptr, count)
        if C.order == "first":  # noqa: SIM102 (a constant branch around one on the device)
            if turn == 0:
                give_turn(turn_ptr, count)
        count += 2
        inner += 2 // PARTS
