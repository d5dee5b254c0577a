"""The Hopper forward kernel: FlashAttention's online softmax on wgmma, fed by TMA, one function a warp role.

A CTA is persistent. One producer warp streams Q, K and V tiles into shared memory; each consumer warp group keeps 64 query rows in
registers and walks the key blocks from right to left. The method is FlashAttention-3's (Shah et al. 2024, sections 3.1 and 3.2: warp
specialisation, ping-pong, overlap of softmax and matrix products) with FlashAttention-4's conditional rescaling; `docs/hopper-forward.md`
draws who waits for whom.

Barriers (shared memory), with the one who arrives and the one who waits:

| barrier | arrives | waits |
|---|---|---|
| q_full | TMA | consumer: before the first QK of a tile |
| q_empty | consumer, after the last QK of a tile (without `cross_tile`: after O has left Q's buffer) | producer |
| k_full, v_full | TMA; of lists, the block's number was written before | every consumer |
| k_empty, v_empty | every consumer, behind the wgmma wait that ends the reading | producer |
| next_full | producer: the next tile's number is written | every consumer warp |
| next_empty | every consumer warp: it is read | producer |
"""

from .barriers import (
    arrive,
    arrive_if,
    clear_rows,
    collect,
    draw_tile,
    leave_number,
    left_number,
    pass_turn,
    phase_of,
    publish,
    rescale,
    retire,
    shared_address,
    stage_of,
    take_turn,
    thread_in_warpgroup,
    wait,
    wait_behind,
)
from .gluon_api import (
    BarrierLayout,
    aggregate,
    barrier_init,
    barrier_invalidate,
    constexpr_function,
    descriptor_type,
    expect_bytes,
    fence_async_shared,
    gl,
    jit,
    memdesc_type,
    reinterpret,
    tma_load,
    tma_store,
    tma_store_wait,
    warp_specialize,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .walk import (
    Problem,
    columns,
    find_tile,
    in_every_warp,
    item_and_head,
    key_coordinates,
    listed_block,
    lists_of,
    mask_scores,
    needs_mask,
    plain_blocks,
    query_coordinates,
    split_head,
)

# An arrival count that only the marker of the V tiles has, by which the launcher finds them in the PTX.
V_MARK = gl.constexpr(29_789)
LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)


@aggregate
class Buffers:
    """Shared memory of a CTA. Every tile keeps its descriptor's rank 4; `reshape` drops the unit dimensions."""

    q: memdesc_type  # [warpgroups * q_stages * chunks, 1, 1, 64, chunk]
    k: memdesc_type  # [stages * chunks, 1, 1, block_n, chunk]
    v: memdesc_type  # [stages, 1, 1, block_n, dim_v]
    o: memdesc_type  # [.., 1, 1, 64, dim_v]
    barriers: memdesc_type

    @constexpr_function
    def __init__(self, q, k, v, o, barriers):
        self.q = q
        self.k = k
        self.v = v
        self.o = o
        self.barriers = barriers


@aggregate
class Descriptors:
    q: descriptor_type
    k: descriptor_type
    v: descriptor_type
    o: descriptor_type

    @constexpr_function
    def __init__(self, q, k, v, o):
        self.q = q
        self.k = k
        self.v = v
        self.o = o


# ---------------------------------------------------------------------------------------------------------------- producer


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
    tma_load(desc.v, [batch, head, row, column], full, mem.v.index(stage))


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
        load_queries(C, p, desc, mem, base, tile, done)
        block = tile.last_block
        next_block = block - 1
        if C.listed:
            # Read one block ahead: the answer comes while TMA waits for a free buffer.
            lists = lists_of(C, p, this)
            block, next_block = listed_block(C, lists, 0), listed_block(C, lists, 1)
        load_keys(C, p, desc, mem, base, tile, block, loaded)
        slot = done & 1
        wait(base + 8 * (C.next_empty + slot), ((done >> 1) & 1) ^ 1)
        publish(base + 8 * (C.next_slot + slot), base + 8 * (C.next_full + slot), number)
        for j in range(tile.blocks - 1):
            load_keys(C, p, desc, mem, base, tile, next_block, loaded + 1)
            load_values(C, p, desc, mem, base, tile, block, loaded)
            block = next_block
            next_block = listed_block(C, lists, j + 2) if C.listed else block - 1
            loaded += 1
        load_values(C, p, desc, mem, base, tile, block, loaded)
        loaded += 1
        done += 1
    retire(p.counter_ptr, done, programs - 1)


# ---------------------------------------------------------------------------------------------------------------- consumer


@jit
def query_key(C: gl.constexpr, mem, q_slot, k_stage):
    """Issue S = Q K^T for one block; S [64, block_n] is there after a wait."""
    CHUNKS: gl.constexpr = C.chunks
    CHUNK: gl.constexpr = C.chunk
    BLOCK_N: gl.constexpr = C.block_n
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    s = gl.zeros([64, BLOCK_N], gl.float32, layout=layout)
    for c in gl.static_range(CHUNKS):
        q = mem.q.index(q_slot * CHUNKS + c).reshape([64, CHUNK])
        k = mem.k.index(k_stage * CHUNKS + c).reshape([BLOCK_N, CHUNK])
        s = warpgroup_mma(q, k.permute((1, 0)), s, use_acc=c > 0, is_async=True)
    return s


@jit
def probability_value(C: gl.constexpr, mem, p, v_stage, acc):
    """Issue acc += P V for one block."""
    BLOCK_N: gl.constexpr = C.block_n
    DIM_V: gl.constexpr = C.dim_v
    return warpgroup_mma(p, mem.v.index(v_stage).reshape([BLOCK_N, DIM_V]), acc, is_async=True)


@jit
def reciprocal(x):
    """1 / x within an ulp, 0 for infinity: one instruction where a division is ten."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@jit
def score(C: gl.constexpr, p, tile, block, row, slope, s):
    """The rules between QK^T and softmax, on one block. s [64, block_n] comes as the plain product."""
    if C.scale_first:
        s = s * p.scale
    if C.softcap:
        # tanh x = 1 - 2 / (1 + e^2x), with 2 log2(e) / softcap inside p.scale: PTX's own tanh.approx is good for 11 bits only
        s = p.softcap - 2.0 * p.softcap * reciprocal(1.0 + gl.exp2(s))
    if C.alibi:
        layout: gl.constexpr = s.type.layout
        constant, lane = columns(layout, C.block_n)
        rows = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))[:, None]
        position = (rows + (row + tile.shift - block * C.block_n) - lane).to(gl.float32)
        s = s - slope * gl.abs(position - constant.to(gl.float32))
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
def exponents(C: gl.constexpr, p, s, m_i):
    """Scores as exponents of 2 below the maximum of their row: exactly 0 where s = m_i, and -inf where a row has seen nothing.

    A multiply-add each. Past 2^27 the rounded product m_i * exp_scale would shift a whole row by more than an exponential can hold; there a
    power of two not below exp_scale stands in for it, whose product is exact: scores that differ at all differ by so much that only those
    equal to the maximum count.
    """
    bits = p.exp_scale.to(gl.int32, bitcast=True)
    power_of_two = ((bits + 0x7FFFFF) & 0x7F800000).to(gl.float32, bitcast=True)
    offset = m_i * p.exp_scale
    huge = gl.maximum(offset, -offset) > 134217728.0
    unit = gl.where(huge, power_of_two, p.exp_scale)
    offset = gl.where(huge, m_i * power_of_two, offset)
    if C.may_be_empty:
        offset = gl.where(m_i == float("-inf"), 0.0, offset)
    return s * unit[:, None] - offset[:, None]


@jit
def first_softmax(C: gl.constexpr, p, s):
    """m_i [64], l_i [64, 4] and P [64, block_n] of a row's first block."""
    m_i = row_maxima(s)
    probability = gl.exp2(exponents(C, p, s, m_i))
    return m_i, partial_row_sums(probability), probability


@jit
def online_softmax_update(C: gl.constexpr, p, s, m_i, l_i):
    """One block more: new m_i and l_i, P, and the factor alpha that the accumulator still needs.

    Where the maximum stays, alpha is exactly 1, and `rescale` skips its products if it stays in every row of a warp. The maximum is always
    the true one, so that the largest probability is exactly 1: letting it lag behind would skip more, and round that one too.
    """
    m_block = row_maxima(s)
    grows = m_block > m_i
    alpha = gl.exp2(gl.where(grows, (m_i - m_block) * p.exp_scale, 0.0))
    m_i = gl.where(grows, m_block, m_i)
    probability = gl.exp2(exponents(C, p, s, m_i))
    block_sum = partial_row_sums(probability)
    l_i = l_i * gl.convert_layout(alpha, gl.SliceLayout(1, block_sum.type.layout))[:, None] + block_sum
    return m_i, l_i, probability, alpha


@jit
def clear_values(C: gl.constexpr, A: gl.constexpr, tile, block, v_stage, thread, WARPGROUP: gl.constexpr):
    """Zero the V rows of keys beyond the length, before P (0 there) meets them: 0 * NaN is NaN."""
    end = tile.keys_end - block * C.block_n
    if end < C.block_n:
        address = shared_address(A.values, v_stage) + v_stage * C.v_bytes
        clear_rows(address, end, thread, C.v_bytes, C.block_n, C.v_swizzle, 12 + WARPGROUP)


@jit
def attend_block(
    C: gl.constexpr,
    p,
    mem,
    base,
    thread,
    tile,
    row,
    slope,
    plain_first,
    plain_end,
    q_slot,
    count,
    block,
    acc,
    prob,
    m_i,
    l_i,
    WARPGROUP: gl.constexpr,
):
    """QK and softmax of `block`, and PV of the block before it, whose P is `prob`. `count` numbers the key blocks of this CTA."""
    next_group: gl.constexpr = (WARPGROUP + 1) % C.warpgroups
    v_stage = stage_of(count, C.stages)
    k_stage = stage_of(count + 1, C.stages)
    phase = phase_of(count + 1, C.stages)
    wait(base + 8 * (C.k_full + k_stage), phase)
    if C.listed:
        block = left_number(base + 8 * (C.block_slot + stage_of(count + 1, 2 * C.stages)))
    if C.tile.ping_pong:
        take_turn(8 + WARPGROUP, 256, count)
    if C.tile.overlap:
        s_future = query_key(C, mem, q_slot, k_stage)
        acc_future = probability_value(C, mem, prob, v_stage, acc)
    else:
        acc_future = probability_value(C, mem, prob, v_stage, acc)
        s_future = query_key(C, mem, q_slot, k_stage)
    if C.tile.ping_pong:
        pass_turn(8 + next_group, 256, count)
    if C.tile.overlap:
        s = warpgroup_mma_wait(1, deps=[s_future])
        arrive(base + 8 * (C.k_empty + k_stage), thread)
    else:
        s, acc, prob = warpgroup_mma_wait(0, deps=[s_future, acc_future, prob])
        arrive(base + 8 * (C.k_empty + k_stage), thread)
        arrive(base + 8 * (C.v_empty + v_stage), thread)
    s = score(C, p, tile, block, row, slope, s)
    if C.positional:  # noqa: SIM102 (a constant branch around one on the device)
        if needs_mask(C, block, plain_first, plain_end):
            s = mask_scores(C, p, tile, block, row, s)
    m_i, l_i, next_prob, alpha = online_softmax_update(C, p, s, m_i, l_i)
    # This wait, for the V tile of the *next* product, is here for its basic-block edge behind the exponentials: without it ptxas puts
    # the wait for the running product above them, and nothing overlaps.
    wait_behind(base + 8 * (C.v_full + k_stage), phase, l_i)
    if C.tile.overlap:
        acc, prob, next_prob = warpgroup_mma_wait(0, deps=[acc_future, prob, next_prob])
        arrive(base + 8 * (C.v_empty + v_stage), thread)
    acc = rescale(acc, alpha)
    return acc, gl.convert_layout(next_prob.to(mem.v.dtype), prob.type.layout), m_i, l_i


@jit
def denominator(C: gl.constexpr, p, tile, m_i, l_i):
    """(factor of the accumulator, LSE), both [64]. A row that saw no key gets factor 0 and LSE -inf, or the sink's logit."""
    if C.sink:
        _, head = split_head(p, tile.batch_head)
        sink_log2 = gl.load(p.sink_ptr + head).to(gl.float32) * LOG2_E
        m_log2 = m_i * p.exp_scale
        top = gl.maximum(m_log2, sink_log2)
        shift = gl.where(top == float("-inf"), 0.0, top)
        weight = gl.exp2(m_log2 - shift)
        total = l_i * weight + gl.exp2(sink_log2 - shift)
        factor = weight / total
        lse = (shift + gl.log2(total)) * LN_2
    else:
        factor = 1.0 / l_i
        lse = (m_i * p.exp_scale + gl.log2(l_i)) * LN_2
    return gl.where(l_i == 0.0, 0.0, factor), lse


@jit
def write_out(C: gl.constexpr, p, desc, mem, tile, row, acc, WARPGROUP: gl.constexpr):
    """O [64, dim_v] to memory; the copy by TMA is still under way at the return."""
    if C.store_tma:
        # TMA clips what lies past the tensor; rows past a packed sequence are another's.
        if C.packed:
            if row + 64 <= tile.rows_stop:
                store_by_tma(C, p, desc, mem, tile, acc, WARPGROUP)
            else:
                store_rows(C, p, tile, row, acc)
        else:
            store_by_tma(C, p, desc, mem, tile, acc, WARPGROUP)
    else:
        store_rows(C, p, tile, row, acc)


@jit
def store_by_tma(C: gl.constexpr, p, desc, mem, tile, acc, WARPGROUP: gl.constexpr):
    DIM_V: gl.constexpr = C.dim_v
    slot: gl.constexpr = out_slot(C, WARPGROUP)
    o_smem = mem.o.index(slot)
    o_smem.reshape([64, DIM_V]).store(acc.to(mem.o.dtype))
    fence_async_shared()
    batch, head, first, column = query_coordinates(C, p, tile, WARPGROUP, 0)
    tma_store(desc.o, [batch, head, first, column], o_smem)


@jit
def store_rows(C: gl.constexpr, p, tile, row, acc):
    """From registers, those rows that are this sequence's."""
    DIM_V: gl.constexpr = C.dim_v
    layout: gl.constexpr = acc.type.layout
    rows = row + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    cols = gl.arange(0, DIM_V, layout=gl.SliceLayout(0, layout))
    batch, head = item_and_head(C, p, tile)
    head_offset = batch.to(gl.int64) * p.stride_out_b + head.to(gl.int64) * p.stride_out_h
    offsets = (rows.to(gl.int64) * p.stride_out_s)[:, None] + cols[None, :]
    visible = (rows < tile.rows_stop)[:, None] & (cols < p.dim_v)[None, :]
    gl.store(p.out_ptr + head_offset + offsets, acc.to(p.out_ptr.dtype.element_ty), mask=visible)


@constexpr_function
def out_slot(C, warpgroup):
    """Which O tile a warp group writes: its own, or one that lies inside its own part of Q's buffer."""
    if C.own_out_buffer:
        return warpgroup
    mine = C.chunks * C.q_bytes
    return -(-warpgroup * mine // C.out_bytes)


@jit
def epilogue(C: gl.constexpr, p, desc, mem, tile, row, acc, m_i, l_i, WARPGROUP: gl.constexpr):
    """Divide by the denominator and write O and LSE."""
    row_layout: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    factor, lse = denominator(C, p, tile, m_i, l_i)
    rows = row + gl.arange(0, 64, layout=m_i.type.layout)
    rows_o = row + gl.arange(0, 64, layout=row_layout)
    factor = gl.convert_layout(factor, row_layout)
    if C.lengths_q:
        lse = gl.where(rows < tile.rows_end, lse, float("-inf"))
        factor = gl.where(rows_o < tile.rows_end, factor, 0.0)
    out = acc * factor[:, None]
    if C.may_be_empty or C.lengths_q:
        out = gl.where((factor == 0.0)[:, None], 0.0, out)  # the accumulator may hold NaN there
    write_out(C, p, desc, mem, tile, row, out, WARPGROUP)
    batch_head = tile.batch_head
    if C.packed:
        _, batch_head = split_head(p, batch_head)
    gl.store(p.lse_ptr + batch_head.to(gl.int64) * p.seqlen_q + rows, lse, mask=rows < tile.rows_stop)


@jit
def consumer(C: gl.constexpr, A: gl.constexpr, p, desc, mem, WARPGROUP: gl.constexpr):
    """One warp group: 64 rows of every tile of this CTA."""
    BLOCK_N: gl.constexpr = C.block_n
    DIM_V: gl.constexpr = C.dim_v
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM_V, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    next_group: gl.constexpr = (WARPGROUP + 1) % C.warpgroups
    p = in_every_warp(C, p)
    base = shared_address(A.barriers, p.seqlen_q)
    thread = thread_in_warpgroup(p.seqlen_q)
    count = 0  # key blocks done
    done = 0  # tiles done
    number = gl.program_id(0)
    if C.tile.ping_pong and C.warpgroups - 1 == WARPGROUP:
        pass_turn(8, 256, p.seqlen_q)
    if C.packed:
        if number < p.tiles:  # there may be fewer tiles than CTAs
            wait(base + 8 * (C.q_full + WARPGROUP * C.q_stages), 0)
            wait(base + 8 * C.k_full, 0)
    else:
        wait(base + 8 * (C.q_full + WARPGROUP * C.q_stages), 0)
        wait(base + 8 * C.k_full, 0)
    s = warpgroup_mma_wait(0, deps=[query_key(C, mem, WARPGROUP * C.q_stages, 0)])
    arrive(base + 8 * C.k_empty, thread)
    while number < p.tiles:
        tile = find_tile(C, p, number)
        row = tile.row + 64 * WARPGROUP
        q_slot = WARPGROUP * C.q_stages + stage_of(done, C.q_stages)
        slope = 0.0
        if C.alibi:
            batch, head = split_head(p, tile.batch_head)
            slope = gl.load(p.slopes_ptr + batch * p.stride_slopes + head).to(gl.float32)
        # The scores of the first block were computed at the end of the tile before.
        block = tile.last_block
        if C.listed:
            block = left_number(base + 8 * (C.block_slot + stage_of(count, 2 * C.stages)))
        s = score(C, p, tile, block, row, slope, s)
        plain_first, plain_end = plain_blocks(C, p, tile, row)
        if needs_mask(C, block, plain_first, plain_end):
            s = mask_scores(C, p, tile, block, row, s)
        m_i, l_i, prob = first_softmax(C, p, s)
        prob = gl.convert_layout(prob.to(mem.v.dtype), p_layout)
        acc = gl.zeros([64, DIM_V], gl.float32, layout=o_layout)
        wait(base + 8 * (C.v_full + stage_of(count, C.stages)), phase_of(count, C.stages))
        if C.lengths_k:
            clear_values(C, A, tile, tile.last_block, stage_of(count, C.stages), thread, WARPGROUP)
        for j in range(tile.blocks - 1):
            acc, prob, m_i, l_i = attend_block(
                C,
                p,
                mem,
                base,
                thread,
                tile,
                row,
                slope,
                plain_first,
                plain_end,
                q_slot,
                count,
                tile.last_block - 1 - j,
                acc,
                prob,
                m_i,
                l_i,
                WARPGROUP,
            )
            count += 1

        slot = done & 1
        wait(base + 8 * (C.next_full + slot), (done >> 1) & 1)
        number = collect(base + 8 * (C.next_slot + slot), base + 8 * (C.next_empty + slot))
        more = number < p.tiles
        v_stage = stage_of(count, C.stages)
        count += 1
        done += 1
        k_stage = stage_of(count, C.stages)
        next_q_slot = WARPGROUP * C.q_stages + stage_of(done, C.q_stages)
        if C.tile.cross_tile:
            # The last PV of this tile, then the first QK of the next one; the epilogue runs under it. Without a next tile the product is
            # of stale shared memory and nobody reads it: a branch around an asynchronous wgmma would serialise it.
            arrive(base + 8 * (C.q_empty + q_slot), thread)
            if C.tile.ping_pong:
                take_turn(8 + WARPGROUP, 256, count)
            acc_future = probability_value(C, mem, prob, v_stage, acc)
            if more:
                wait(base + 8 * (C.q_full + next_q_slot), phase_of(done, C.q_stages))
                wait(base + 8 * (C.k_full + k_stage), phase_of(count, C.stages))
            s_future = query_key(C, mem, next_q_slot, k_stage)
            if C.tile.ping_pong:
                pass_turn(8 + next_group, 256, count)
            l_row = gl.convert_layout(gl.sum(l_i, 1), row_layout)
            acc, prob = warpgroup_mma_wait(C.chunks, deps=[acc_future, prob])
            arrive(base + 8 * (C.v_empty + v_stage), thread)
            tma_store_wait(0)  # O's buffer is free again
            epilogue(C, p, desc, mem, tile, row, acc, m_i, l_row, WARPGROUP)
            s = warpgroup_mma_wait(0, deps=[s_future])
            arrive_if(base + 8 * (C.k_empty + k_stage), thread, more.to(gl.int32))
        else:
            acc_future = probability_value(C, mem, prob, v_stage, acc)
            l_row = gl.convert_layout(gl.sum(l_i, 1), row_layout)
            acc, prob = warpgroup_mma_wait(0, deps=[acc_future, prob])
            arrive(base + 8 * (C.v_empty + v_stage), thread)
            epilogue(C, p, desc, mem, tile, row, acc, m_i, l_row, WARPGROUP)
            tma_store_wait(0)  # O has left Q's buffer
            arrive(base + 8 * (C.q_empty + q_slot), thread)
            if more:
                wait(base + 8 * (C.q_full + next_q_slot), phase_of(done, C.q_stages))
                wait(base + 8 * (C.k_full + k_stage), phase_of(count, C.stages))
            s = warpgroup_mma_wait(0, deps=[query_key(C, mem, next_q_slot, k_stage)])
            arrive_if(base + 8 * (C.k_empty + k_stage), thread, more.to(gl.int32))
    tma_store_wait(0)


# ------------------------------------------------------------------------------------------------------------------ kernel


@jit(
    do_not_specialize=[
        "scale",
        "exp_scale",
        "softcap",
        "seqlen_q",
        "seqlen_k",
        "heads",
        "group",
        "row_blocks",
        "batch_heads",
        "tiles",
        "partial_width",
        "full_width",
        "list_batch",
        "list_head",
        "head_group",
        "window_left",
        "window_right",
        "stride_slopes",
        "dim_v",
        "stride_out_b",
        "stride_out_h",
        "stride_out_s",
    ],
    do_not_specialize_on_alignment=[
        "out_ptr",
        "lengths_q_ptr",
        "lengths_k_ptr",
        "slopes_ptr",
        "sink_ptr",
        "records_ptr",
        "partial_ptr",
        "full_ptr",
    ],
)
def attention_forward(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
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
    C: gl.constexpr,
    A: gl.constexpr,
):
    """Grid: one persistent CTA an SM. C is the `Variant`, A the `Addresses` of what raw PTX touches in shared memory."""
    STAGES: gl.constexpr = C.stages
    CHUNK: gl.constexpr = C.chunk
    BLOCK_N: gl.constexpr = C.block_n
    DIM_V: gl.constexpr = C.dim_v
    Q_TILES: gl.constexpr = C.warpgroups * C.q_stages * C.chunks
    K_TILES: gl.constexpr = C.stages * C.chunks
    O_TILES: gl.constexpr = C.warpgroups if C.own_out_buffer else C.warpgroups * C.chunks * C.q_bytes // C.out_bytes
    BARRIERS: gl.constexpr = C.barrier_words
    q = gl.allocate_shared_memory(q_desc.dtype, [Q_TILES, 1, 1, 64, CHUNK], q_desc.layout)
    k = gl.allocate_shared_memory(k_desc.dtype, [K_TILES, 1, 1, BLOCK_N, CHUNK], k_desc.layout)
    v = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, BLOCK_N, DIM_V], v_desc.layout)
    if C.own_out_buffer:
        o = gl.allocate_shared_memory(o_desc.dtype, [O_TILES, 1, 1, 64, DIM_V], o_desc.layout)
    elif C.store_tma:
        o = reinterpret(q, o_desc.dtype, [O_TILES, 1, 1, 64, DIM_V], o_desc.layout)
    else:
        o = q
    barriers = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], BarrierLayout())
    for w in gl.static_range(C.warpgroups * C.q_stages):
        barrier_init(barriers.index(C.q_full + w), count=1)
        barrier_init(barriers.index(C.q_empty + w), count=1)
    for s in gl.static_range(STAGES):
        barrier_init(barriers.index(C.k_full + s), count=1)
        barrier_init(barriers.index(C.k_empty + s), count=C.warpgroups)
        barrier_init(barriers.index(C.v_full + s), count=1)
        barrier_init(barriers.index(C.v_empty + s), count=C.warpgroups)
    for s in gl.static_range(2):
        barrier_init(barriers.index(C.next_full + s), count=1)
        barrier_init(barriers.index(C.next_empty + s), count=4 * C.warpgroups)
    if C.lengths_k:
        mark = reinterpret(v.index(0), gl.int64, [1], BarrierLayout())
        barrier_init(mark, count=V_MARK)
        barrier_invalidate(mark)
    fence_async_shared()
    desc = Descriptors(q_desc, k_desc, v_desc, o_desc)
    mem = Buffers(q, k, v, o, barriers)
    p = Problem(
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
    )
    if C.warpgroups == 2:
        warp_specialize(
            [
                (consumer, (C, A, p, desc, mem, 0)),
                (consumer, (C, A, p, desc, mem, 1)),
                (producer, (C, A, p, desc, mem)),
            ],
            [4, 1],
            [C.tile.consumer_registers, C.tile.producer_registers],
        )
    else:
        warp_specialize(
            [
                (consumer, (C, A, p, desc, mem, 0)),
                (consumer, (C, A, p, desc, mem, 1)),
                (consumer, (C, A, p, desc, mem, 2)),
                (producer, (C, A, p, desc, mem)),
            ],
            [4, 4, 1],
            [C.tile.consumer_registers, C.tile.consumer_registers, C.tile.producer_registers],
        )
