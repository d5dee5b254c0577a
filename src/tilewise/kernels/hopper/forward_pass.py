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
| matrix_full | TMA: tiles of a bias or mask | every consumer |
| matrix_empty | every consumer warp: it is in registers | producer |
"""

from .barriers import (
    arrive,
    arrive_if,
    clear_rows,
    collect,
    end_warps,
    launch_dependents,
    left_number,
    pass_turn,
    phase_of,
    rescale,
    shared_address,
    stage_of,
    take_turn,
    thread_in_warpgroup,
    wait,
    wait_behind,
)
from .dropout import drawing_of_rows, keep_bits, kept
from .epilogue import epilogue
from .gluon_api import (
    BarrierLayout,
    barrier_init,
    barrier_invalidate,
    fence_async_shared,
    gl,
    jit,
    reinterpret,
    tma_store_wait,
    warp_specialize,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .guard import tiles_to_do
from .matrices import Matrix
from .online_softmax import (
    add_sums,
    exponent_line,
    first_softmax,
    halves,
    joined,
    matrices,
    new_maximum,
    partial_row_sums,
    probabilities,
    release_matrices,
    score,
)
from .problem import Problem, in_every_warp
from .producer import Buffers, Descriptors, producer
from .walk import (
    find_tile,
    mask_scores,
    needs_mask,
    own_heads,
    own_row,
    plain_blocks,
    split_head,
)

# An arrival count that only the marker of the V tiles has, by which the launcher finds them in the PTX.
V_MARK = gl.constexpr(29_789)


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
    drawing,
    q_slot,
    count,
    block,
    acc,
    prob,
    m_i,
    l_i,
    alpha,
    WARPGROUP: gl.constexpr,
):
    """QK and softmax of `block`, and PV of the block before it, whose P is `prob` and for which acc still has to be multiplied by alpha.

    `count` numbers the key blocks of this CTA. QK is issued before that multiplication and runs under it.
    """
    next_group: gl.constexpr = (WARPGROUP + 1) % C.warpgroups
    v_stage = stage_of(count, C.stages)
    k_stage = stage_of(count + 1, C.stages)
    phase = phase_of(count + 1, C.stages)
    bits = 0
    if C.dropout:
        # Under the products of the other warp group, for it is drawn outside the turn: behind its own ptxas would put it among them.
        bits = keep_bits(C, p, drawing, block, thread)
    wait(base + 8 * (C.k_full + k_stage), phase)
    if C.listed:
        block = left_number(base + 8 * (C.block_slot + stage_of(count + 1, 2 * C.stages)))
    BLOCK_N: gl.constexpr = C.block_n
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    bias, mask = matrices(C, p, mem, base, tile, block, row, count + 1, layout, WARPGROUP)
    take_turn(8 + WARPGROUP, 256, count)
    s_future = query_key(C, mem, q_slot, k_stage)
    acc_future = probability_value(C, mem, prob, v_stage, rescale(acc, alpha))
    pass_turn(8 + next_group, 256, count)
    s = warpgroup_mma_wait(1, deps=[s_future])
    arrive(base + 8 * (C.k_empty + k_stage), thread)
    s = score(C, p, tile, block, row, slope, bias, mask, s)
    release_matrices(C, base, count + 1)
    if C.positional:  # noqa: SIM102 (a constant branch around one on the device)
        if needs_mask(C, block, plain_first, plain_end):
            s = mask_scores(C, p, tile, block, row, s)
    m_i, alpha = new_maximum(C, p, s, m_i)
    unit, offset = exponent_line(C, p, m_i)
    # The wait for the V tile of the *next* product is here for its basic-block edge behind exponentials: without it ptxas puts the wait for
    # the running product above them, and nothing overlaps. Half a block of them is enough: by then that product is done, and the left half
    # of P is converted between the exponentials of the right one.
    v_full = base + 8 * (C.v_full + k_stage)
    if C.split:
        s_left, s_right = halves(s)
        left = probabilities(s_left, unit, offset)
        block_sum = partial_row_sums(left)
        wait_behind(v_full, phase, block_sum)
        acc, prob, left, s_right = warpgroup_mma_wait(0, deps=[acc_future, prob, left, s_right])
        arrive(base + 8 * (C.v_empty + v_stage), thread)
        right = probabilities(s_right, unit, offset)
        l_i = add_sums(l_i, alpha, block_sum + partial_row_sums(right))
        next_prob = joined(left.to(mem.v.dtype), right.to(mem.v.dtype))
    else:
        next_prob = probabilities(s, unit, offset)
        l_i = add_sums(l_i, alpha, partial_row_sums(next_prob))
        if C.dropout:
            next_prob = kept(next_prob, bits, 4)
        wait_behind(v_full, phase, l_i)
        acc, prob, next_prob = warpgroup_mma_wait(0, deps=[acc_future, prob, next_prob])
        arrive(base + 8 * (C.v_empty + v_stage), thread)
        next_prob = next_prob.to(mem.v.dtype)
    return acc, gl.convert_layout(next_prob, prob.type.layout), m_i, l_i, alpha


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
    if C.warpgroups - 1 == WARPGROUP:
        pass_turn(8, 256, p.seqlen_q)
    if C.may_be_idle:
        if number < p.tiles:
            wait(base + 8 * (C.q_full + WARPGROUP * C.q_stages), 0)
            wait(base + 8 * C.k_full, 0)
    else:
        wait(base + 8 * (C.q_full + WARPGROUP * C.q_stages), 0)
        wait(base + 8 * C.k_full, 0)
    s = warpgroup_mma_wait(0, deps=[query_key(C, mem, WARPGROUP * C.q_stages, 0)])
    arrive(base + 8 * C.k_empty, thread)
    while number < p.tiles:
        tile = find_tile(C, p, number)
        row = own_row(C, tile, WARPGROUP)
        q_slot = WARPGROUP * C.q_stages + stage_of(done, C.q_stages)
        slope = 0.0
        if C.alibi:
            batch, head = split_head(p, tile.batch_head)
            head = own_heads(C, p, head, row_layout, WARPGROUP)
            slope = gl.load(p.slopes_ptr + batch * p.stride_slopes + head).to(gl.float32)
            if C.heads > 1:
                slope = slope[:, None]
        drawing = 0
        if C.dropout:
            drawing = drawing_of_rows(C, p, tile, row)
        # The scores of the first block were computed at the end of the tile before.
        block = tile.last_block
        if C.listed:
            block = left_number(base + 8 * (C.block_slot + stage_of(count, 2 * C.stages)))
        bias, mask = matrices(C, p, mem, base, tile, block, row, count, s_layout, WARPGROUP)
        s = score(C, p, tile, block, row, slope, bias, mask, s)
        release_matrices(C, base, count)
        plain_first, plain_end = plain_blocks(C, p, tile, row)
        if needs_mask(C, block, plain_first, plain_end):
            s = mask_scores(C, p, tile, block, row, s)
        m_i, l_i, prob = first_softmax(C, p, s)
        if C.dropout:
            prob = kept(prob, keep_bits(C, p, drawing, block, thread), 4)
        prob = gl.convert_layout(prob.to(mem.v.dtype), p_layout)
        acc = gl.zeros([64, DIM_V], gl.float32, layout=o_layout)
        alpha = gl.full([64], 1.0, gl.float32, layout=row_layout)
        wait(base + 8 * (C.v_full + stage_of(count, C.stages)), phase_of(count, C.stages))
        if C.lengths_k:
            clear_values(C, A, tile, tile.last_block, stage_of(count, C.stages), thread, WARPGROUP)
        for j in range(tile.blocks - 1):
            acc, prob, m_i, l_i, alpha = attend_block(
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
                drawing,
                q_slot,
                count,
                tile.last_block - 1 - j,
                acc,
                prob,
                m_i,
                l_i,
                alpha,
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
            take_turn(8 + WARPGROUP, 256, count)
            acc_future = probability_value(C, mem, prob, v_stage, rescale(acc, alpha))
            if more:
                wait(base + 8 * (C.q_full + next_q_slot), phase_of(done, C.q_stages))
                wait(base + 8 * (C.k_full + k_stage), phase_of(count, C.stages))
            s_future = query_key(C, mem, next_q_slot, k_stage)
            pass_turn(8 + next_group, 256, count)
            l_row = gl.convert_layout(gl.sum(l_i, 1), row_layout)
            acc, prob = warpgroup_mma_wait(C.chunks, deps=[acc_future, prob])
            arrive(base + 8 * (C.v_empty + v_stage), thread)
            tma_store_wait(0)  # O's buffer is free again
            epilogue(C, p, desc, mem, tile, row, acc, m_i, l_row, WARPGROUP)
            s = warpgroup_mma_wait(0, deps=[s_future])
            arrive_if(base + 8 * (C.k_empty + k_stage), thread, more.to(gl.int32))
        else:
            acc_future = probability_value(C, mem, prob, v_stage, rescale(acc, alpha))
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
    if WARPGROUP > 0:  # the first one is not a worker: it releases the others
        end_warps(p.seqlen_q)


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
        "stride_bias_b",
        "stride_bias_h",
        "stride_bias_m",
        "stride_mask_b",
        "stride_mask_h",
        "stride_mask_m",
        "drop_below",
        "keep_scale",
        "parts",
        "repairs",
        "side_by_side",
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
        "bias_ptr",
        "mask_ptr",
        "seed_ptr",
        "found_ptr",
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
    bias_desc,
    bias_ptr,
    stride_bias_b,
    stride_bias_h,
    stride_bias_m,
    mask_desc,
    mask_ptr,
    stride_mask_b,
    stride_mask_h,
    stride_mask_m,
    seed_ptr,
    drop_below,
    keep_scale,
    parts,
    found_ptr,
    repairs,
    side_by_side,
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
    if C.parts:
        launch_dependents(tiles)  # the merge
    OWN_HEADS: gl.constexpr = C.own_heads
    OWN_QUERIES: gl.constexpr = C.own_queries
    q = gl.allocate_shared_memory(q_desc.dtype, [Q_TILES, 1, OWN_HEADS, OWN_QUERIES, CHUNK], q_desc.layout)
    k = gl.allocate_shared_memory(k_desc.dtype, [K_TILES, 1, 1, BLOCK_N, CHUNK], k_desc.layout)
    v = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, BLOCK_N, DIM_V], v_desc.layout)
    if C.own_out_buffer:
        o = gl.allocate_shared_memory(o_desc.dtype, [O_TILES, 1, OWN_HEADS, OWN_QUERIES, DIM_V], o_desc.layout)
    elif C.store_tma:
        o = reinterpret(q, o_desc.dtype, [O_TILES, 1, OWN_HEADS, OWN_QUERIES, DIM_V], o_desc.layout)
    else:
        o = q
    bias, mask = q, q
    bias_tiles, mask_tiles = v_desc, v_desc
    MATRIX_TILES: gl.constexpr = C.matrix_stages * C.warpgroups
    if C.bias == "tma":
        bias = gl.allocate_shared_memory(bias_desc.dtype, [MATRIX_TILES, 1, 1, 64, BLOCK_N], bias_desc.layout)
        bias_tiles = bias_desc
    if C.mask == "tma":
        mask = gl.allocate_shared_memory(mask_desc.dtype, [MATRIX_TILES, 1, 1, 64, BLOCK_N], mask_desc.layout)
        mask_tiles = mask_desc
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
    MATRIX_STAGES: gl.constexpr = C.matrix_stages
    for s in gl.static_range(MATRIX_STAGES):
        barrier_init(barriers.index(C.matrix_full + s), count=1)
        barrier_init(barriers.index(C.matrix_empty + s), count=4 * C.warpgroups)
    if C.lengths_k:
        mark = reinterpret(v.index(0), gl.int64, [1], BarrierLayout())
        barrier_init(mark, count=V_MARK)
        barrier_invalidate(mark)
    fence_async_shared()
    if C.guarded:
        tiles = tiles_to_do(found_ptr, repairs, tiles)
    desc = Descriptors(q_desc, k_desc, v_desc, o_desc, bias_tiles, mask_tiles)
    mem = Buffers(q, k, v, o, bias, mask, barriers)
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
        Matrix(bias_ptr, stride_bias_b, stride_bias_h, stride_bias_m),
        Matrix(mask_ptr, stride_mask_b, stride_mask_h, stride_mask_m),
        seed_ptr,
        drop_below,
        keep_scale,
        parts,
        found_ptr,
        repairs,
        side_by_side,
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
