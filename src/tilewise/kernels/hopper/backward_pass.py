"""The Hopper backward kernel: five products a tile on wgmma, fed by TMA, one function a warp role.

A CTA owns `block_n` keys of one key head. It keeps K and V in shared memory and dK and dV in registers, and walks the query blocks that
see its keys, over all query heads that read them, or over one of these where each has tiles of its own (`apart`): dK and dV of such tiles
are added up in memory. Scores are recomputed transposed, S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T feed dV and dK as register
operands; only dS passes through shared memory, for dQ = dS K, which leaves by TMA as float32 additions to memory. The split of the work
is FlashAttention-3's (Shah et al. 2024, appendix B.2, after Dao 2023); `docs/hopper-backward.md` draws who waits for whom.

Barriers (shared memory), with the one who arrives and the one who waits:

| barrier | arrives | waits |
|---|---|---|
| q_full, do_full | TMA: Q, its LSE, what meets it of a bias or mask; dO, its delta; K and V with the first | both computing warp groups |
| q_empty, do_empty | each warp group, behind the wgmma wait that ends the reading | loading warp |
| dq_full | each computing warp: its share of a part of dQ is written | the adding warp whose turn it is |
| dq_empty | that adding warp: TMA has read it | both computing warp groups |
"""

from .backward_configs import WARPS
from .backward_transfers import Buffers, Descriptors, add_queries, load_tiles, row_slot
from .backward_walk import (
    BackwardProblem,
    bias_place,
    distances,
    find_keys,
    hide,
    inner_visits,
    is_cut,
    key_coordinates,
    key_sums_place,
    outer_visits,
    plain_blocks,
    row_of,
    seen_keys,
    seen_rows,
    slope_place,
    visited,
)
from .barriers import (
    add_in_memory,
    arrive,
    arrive_each_warp,
    first_rows,
    left_number,
    phase_of,
    settled,
    shared_address,
    stage_of,
    thread_in_warpgroup,
    thread_in_warpgroups,
    wait,
)
from .dropout import drawing_of_keys, keep_bits_of_keys, kept
from .gluon_api import (
    BarrierLayout,
    barrier_init,
    block_barrier,
    fence_async_shared,
    gl,
    jit,
    tma_reduce_add,
    tma_store,
    tma_store_wait,
    warp_specialize,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .matrices import Matrix, add_bias, load_matrix
from .online_softmax import LOG2_E, reciprocal

NUM_WARPS = gl.constexpr(WARPS)


@jit
def clear_outside(tile, first, end):
    """Zero the rows of a tile in shared memory that are not in [first, end): what nobody sees may be NaN, and 0 * NaN is NaN.

    The other warps may read the tile after the next `fence_async_shared` and `block_barrier`.
    """
    ROWS: gl.constexpr = tile.shape[0]
    COLUMNS: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [NUM_WARPS, 1], [1, 0])
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))[:, None]
    x = tile.load(layout)
    tile.store(gl.where((rows >= first) & (rows < end), x, gl.zeros_like(x)))


@jit
def clear_hidden_keys(C: gl.constexpr, p, mem, tile):
    first, end = seen_keys(C, p, tile)
    if (tile.key < first) | (tile.key + C.block_n > end):
        clear_outside(mem.k.reshape([C.block_n, C.dim]), first - tile.key, end - tile.key)
        clear_outside(mem.v.reshape([C.block_n, C.dim_v]), first - tile.key, end - tile.key)
        fence_async_shared()
        block_barrier()


@jit
def clear_hidden_rows(C: gl.constexpr, p, q, do, do_full, do_phase, tile, block):
    """Where there are any, dO must have come as well; else S need not wait for it."""
    first, end = seen_rows(C, p, tile)
    row = block * C.block_m
    if (row < first) | (row + C.block_m > end):
        wait(do_full, do_phase)
        clear_outside(q, first - row, end - row)
        clear_outside(do, first - row, end - row)
        fence_async_shared()
        block_barrier()


@jit
def partial_sums(C: gl.constexpr, x):
    """[block_n, block_m] -> [block_n, warp groups along the columns, 4]: what each thread can add up alone."""
    SPLIT: gl.constexpr = 2 // C.tile.key_groups
    BLOCK_N: gl.constexpr = C.block_n
    PAIRS: gl.constexpr = C.block_m // SPLIT // 8
    return gl.sum(gl.sum(gl.reshape(x, [BLOCK_N, SPLIT, PAIRS, 4, 2]), 4), 2)


@jit
def by_lanes(C: gl.constexpr, part):
    """A part of dQ [block_m, dq_columns] as lines of 32 numbers in the order [warp group, 8 columns, warp, lane, 4 values of a thread]:
    each lane writes 16 bytes beside its neighbour's. As rows and columns, pairs of rows would meet in the same banks.
    """
    SPLIT: gl.constexpr = 2 // C.tile.dq_rows
    x = gl.reshape(part, [4 * C.tile.dq_rows, 2, 8, SPLIT, C.dq_columns // SPLIT // 8, 4, 2])
    return gl.reshape(gl.permute(x, (3, 4, 0, 2, 5, 1, 6)), [C.dq_box[0], C.dq_box[1]])


@jit
def hand_over(C: gl.constexpr, mem, base, number, part):
    """Put a part of dQ [block_m, dq_columns] where the adding warps take it. `number` counts the parts of this CTA."""
    wait(base + 8 * C.dq_empty, (number & 1) ^ 1)
    mem.dq.store(by_lanes(C, part) if C.lanes else part)
    arrive_each_warp(base + 8 * (C.dq_full + (number & 1)))


@jit
def halves(C: gl.constexpr, dq):
    """The two parts of dQ [block_m, 256]: each has the first or the second half of every warp group's columns, so that no register
    changes its thread; `finish_queries` puts the columns in order again.
    """
    BLOCK_M: gl.constexpr = C.block_m
    first, second = gl.split(gl.permute(gl.reshape(dq, [BLOCK_M, 2, 2, 64]), (0, 1, 3, 2)))
    return gl.reshape(first, [BLOCK_M, 128]), gl.reshape(second, [BLOCK_M, 128])


@jit
def matrices(C: gl.constexpr, p, mem, tile, head, block, stage, layout: gl.constexpr):
    """(bias, mask) of the scores of one query block, transposed as they are, [block_n, block_m] or what broadcasts to it."""
    BIAS: gl.constexpr = C.bias
    MASK: gl.constexpr = C.mask
    BLOCK_M: gl.constexpr = C.block_m
    BLOCK_N: gl.constexpr = C.block_n
    bias, mask = 0, 0
    keys = (tile.key + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, layout)))[:, None]
    rows = (block * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, layout)))[None, :]
    if BIAS == "tma":
        bias = mem.bias.index(stage).reshape([BLOCK_M, BLOCK_N]).permute((1, 0)).load(layout)
    elif BIAS != "":
        bias = load_matrix(BIAS, p.bias, tile.batch, head, rows, p.seqlen_q, keys, p.seqlen_k)
    if MASK == "tma":
        mask = mem.mask.index(stage).reshape([BLOCK_M, BLOCK_N]).permute((1, 0)).load(layout)
    elif MASK != "":
        mask = load_matrix(MASK, p.mask, tile.batch, head, rows, p.seqlen_q, keys, p.seqlen_k)
    return bias, mask


@jit
def add_to_bias(C: gl.constexpr, p, tile, head, block, ds):
    """Add the gradients of a block of scores, float32 [block_n, block_m], to those of the bias; see `backward_bias`."""
    store = gl.where(head == tile.head_k * p.group, p.stores, 0)
    add_in_memory(ds, bias_place(C, p, tile, head, block), store)


@jit
def add_block(
    C: gl.constexpr, p, mem, base, thread, tile, head, block, slope, plain_first, plain_end, drawing, count, dk, dv, rest, dslope
):
    """What one query block adds to dK, dV and dslope, and its dQ. `count` numbers the query blocks of this CTA; `rest` is the second part
    of dQ of the block before, where it leaves in two: it waits for the first to be gone under this block's first products.
    """
    BLOCK_M: gl.constexpr = C.block_m
    BLOCK_N: gl.constexpr = C.block_n
    DIM: gl.constexpr = C.dim
    DIM_V: gl.constexpr = C.dim_v
    DQ_ROWS: gl.constexpr = C.tile.dq_rows
    GROUPS: gl.constexpr = C.tile.key_groups
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4 * GROUPS, 2 // GROUPS], [16, BLOCK_M * GROUPS // 2, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4 * DQ_ROWS, 2 // DQ_ROWS], [16, DIM * DQ_ROWS // 2, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, dv.type.layout, 2)
    ds_layout: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    dtype: gl.constexpr = mem.k.dtype
    stage = stage_of(count, C.stages)
    phase = phase_of(count, C.stages)
    do_stage = stage_of(count, C.do_stages)
    do_phase = phase_of(count, C.do_stages)
    q = mem.q.index(stage).reshape([BLOCK_M, DIM])
    do = mem.do.index(do_stage).reshape([BLOCK_M, DIM_V])
    k = mem.k.reshape([BLOCK_N, DIM])
    v = mem.v.reshape([BLOCK_N, DIM_V])

    wait(base + 8 * (C.q_full + stage), phase)
    if C.listed:
        block = (left_number(row_slot(C, base, count)) - row_of(C, p, tile, head, 0)) >> C.log2_block_m
    if C.hidden_rows:
        clear_hidden_rows(C, p, q, do, base + 8 * (C.do_full + do_stage), do_phase, tile, block)
    bias, mask = matrices(C, p, mem, tile, head, block, stage, s_layout)
    zero_s = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout=s_layout)
    s_future = warpgroup_mma(k, q.permute((1, 0)), zero_s, use_acc=False, is_async=True)
    lse = mem.lse.index(stage).load(row_layout)
    wait(base + 8 * (C.do_full + do_stage), do_phase)
    zero_dp = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout=s_layout)
    dp_future = warpgroup_mma(v, do.permute((1, 0)), zero_dp, use_acc=False, is_async=True)
    if C.dq_parts == 2:  # noqa: SIM102 (a constant branch around one on the device)
        if count > 0:
            hand_over(C, mem, base, 1, rest)
    bits = 0
    if C.dropout:
        bits = keep_bits_of_keys(C, p, drawing, block, thread_in_warpgroups(block))
        wait(base + 8 * (C.q_full + stage), phase)
    s = warpgroup_mma_wait(1, deps=[s_future])  # [block_n, block_m]
    if C.softcap:
        # tanh x = 1 - 2 / (1 + e^2x), with 2 log2(e) / softcap inside p.scale; its derivative is 4 r (1 - r) of the same quotient
        r = reciprocal(1.0 + gl.exp2(s * p.scale))
        s = p.softcap - 2.0 * p.softcap * r
    if C.bias != "":
        # As the forward pass rounded them: a bias may be so large that the last bit of a score decides. LSE is natural here.
        if not C.softcap:
            s = s * p.scale
        if C.alibi:
            s = s - slope * distances(C, tile, block, s_layout)
        s = add_bias(s, bias)
        exponent = (s - lse[None, :]) * p.exp_scale - mem.lse_rest.index(stage).load(row_layout)[None, :]
    else:
        exponent = s * p.exp_scale - lse[None, :]
        if C.alibi:
            exponent = exponent - slope * distances(C, tile, block, s_layout)
    if C.early_delta:  # among the exponentials, which leave issue slots
        delta = mem.delta.index(do_stage).load(row_layout)
    prob = gl.exp2(exponent)
    if C.mask != "":
        prob = gl.where(mask != 0, prob, 0.0)
    if is_cut(block, plain_first, plain_end):
        prob = hide(C, p, tile, block, prob)
    # Long complete: it is here for its basic-block edge, without which ptxas puts the wait for dP above the exponentials.
    wait(base + 8 * (C.q_full + stage), phase)
    if not C.early_delta:
        delta = mem.delta.index(do_stage).load(row_layout)
    prob_kept = prob
    if C.dropout:
        prob_kept = kept(prob, bits, 8)
    if C.tile.early_dv:
        prob_16 = gl.convert_layout(prob_kept.to(dtype), p_layout)
        dp = warpgroup_mma_wait(0, deps=[dp_future])
        dv_future = warpgroup_mma(prob_16, do, dv, is_async=True)
    else:
        dp = warpgroup_mma_wait(0, deps=[dp_future])
    if C.dropout:
        dp = kept(dp, bits, 8) * p.keep_scale
    ds = prob * (dp - delta[None, :])
    if C.bias_gradient == "added":
        add_to_bias(C, p, tile, head, block, ds)
        # Another edge: without it ptxas keeps the numbers until the warp groups have met.
        wait(base + 8 * (C.q_full + stage), phase)
    if C.slope_gradient:
        dslope -= partial_sums(C, ds * distances(C, tile, block, s_layout))
    if C.softcap:
        ds = ds * (4.0 * r - 4.0 * r * r)
    ds = ds.to(dtype)
    if C.bias_gradient == "stored":
        wait(base + 8 * C.dq_empty, (count & 1) ^ 1)  # dS of the block before has left with its dQ
    mem.ds.store(ds)
    zero_dq = gl.zeros([BLOCK_M, DIM], gl.float32, layout=dq_layout)
    if C.share_p:
        mem.p.store(prob_kept.to(dtype))
        fence_async_shared()
        block_barrier()
        dv_future = warpgroup_mma(mem.p, do, dv, is_async=True)
        dq_future = warpgroup_mma(mem.ds.permute((1, 0)), k, zero_dq, use_acc=False, is_async=True)
        dk_future = warpgroup_mma(mem.ds, q, dk, is_async=True)
        dv = warpgroup_mma_wait(2, deps=[dv_future])
        arrive(base + 8 * (C.do_empty + do_stage), thread)
        dq = warpgroup_mma_wait(1, deps=[dq_future])
    else:
        if not C.tile.early_dv:
            prob_16 = gl.convert_layout(prob_kept.to(dtype), p_layout)
            dv_future = warpgroup_mma(prob_16, do, dv, is_async=True)
        fence_async_shared()
        block_barrier()
        dq_future = warpgroup_mma(mem.ds.permute((1, 0)), k, zero_dq, use_acc=False, is_async=True)
        dv, prob_16 = warpgroup_mma_wait(1, deps=[dv_future, prob_16])
        arrive(base + 8 * (C.do_empty + do_stage), thread)
        ds_16 = gl.convert_layout(ds, ds_layout)
        dk_future = warpgroup_mma(ds_16, q, dk, is_async=True)
        dq = warpgroup_mma_wait(1, deps=[dq_future])
    if C.dq_parts == 1:
        hand_over(C, mem, base, count, dq)
    else:
        first, rest = halves(C, dq)
        hand_over(C, mem, base, 0, first)
        rest = settled(rest)
    if C.share_p:
        dk = warpgroup_mma_wait(0, deps=[dk_future])
    else:
        dk, ds_16 = warpgroup_mma_wait(0, deps=[dk_future, ds_16])
    arrive(base + 8 * (C.q_empty + stage), thread)
    return dk, dv, rest, dslope


@jit
def store_keys(C: gl.constexpr, p, desc, mem, tile, dk, dv):
    """dK and dV leave in their own dtype. All products must be done in every warp: K and V make room for them."""
    BLOCK_N: gl.constexpr = C.block_n
    DIM: gl.constexpr = C.dim
    DIM_V: gl.constexpr = C.dim_v
    block_barrier()
    dk = dk * p.out_scale
    if C.dropout:
        dv = dv * p.keep_scale
    if C.packed:
        # The rows of the next sequence: a NaN in this one's queries may have reached them.
        dk = first_rows(dk, tile.rows_k - tile.key, 4 * C.tile.key_groups)
        dv = first_rows(dv, tile.rows_k - tile.key, 4 * C.tile.key_groups)
    mem.v.reshape([BLOCK_N, DIM_V]).store(dv.to(mem.v.dtype))
    mem.k.reshape([BLOCK_N, DIM]).store(dk.to(mem.k.dtype))
    fence_async_shared()
    if (not C.packed) or tile.key + BLOCK_N <= tile.rows_k:
        tma_store(desc.dv, key_coordinates(C, p, tile), mem.v)
        tma_store(desc.dk, key_coordinates(C, p, tile), mem.k)
    else:
        # The box also covers keys of the next sequence, which other CTAs write: to these 0 is added, in memory and so at any time.
        tma_reduce_add(desc.dv, key_coordinates(C, p, tile), mem.v)
        tma_reduce_add(desc.dk, key_coordinates(C, p, tile), mem.k)
    tma_store_wait(0)


@jit
def add_keys(C: gl.constexpr, p, tile, dk, dv):
    """Add dK and dV to those of the other query heads that share the keys, unscaled; `backward_rows.finish_keys` follows."""
    if tile.blocks > 0:
        place = key_sums_place(C, p, tile)
        add_in_memory(dk, place, tile.blocks * 0)
        add_in_memory(dv, place + C.block_n * C.dim, tile.blocks * 0)


@jit
def compute(C: gl.constexpr, A: gl.constexpr, p, desc, mem):
    """Both warp groups: each has its half of the keys, or of the columns, of S, dP, dK and dV, and its part of every block of dQ."""
    BLOCK_M: gl.constexpr = C.block_m
    BLOCK_N: gl.constexpr = C.block_n
    DIM: gl.constexpr = C.dim
    DIM_V: gl.constexpr = C.dim_v
    base = shared_address(A, p.seqlen_q)
    thread = thread_in_warpgroup(p.seqlen_q)
    tile = find_keys(C, p, gl.program_id(0))
    plain_first, plain_end = plain_blocks(C, p, tile)
    GROUPS: gl.constexpr = C.tile.key_groups
    WARPS_PER_CTA: gl.constexpr = [4 * GROUPS, 2 // GROUPS]
    dk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], WARPS_PER_CTA, [16, DIM * GROUPS // 2, 16])
    dv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], WARPS_PER_CTA, [16, DIM_V * GROUPS // 2, 16])
    dk = gl.zeros([BLOCK_N, DIM], gl.float32, layout=dk_layout)
    dv = gl.zeros([BLOCK_N, DIM_V], gl.float32, layout=dv_layout)
    if C.hidden_keys and tile.blocks > 0:
        wait(base + 8 * C.q_full, 0)
        wait(base + 8 * C.do_full, 0)
        clear_hidden_keys(C, p, mem, tile)
    rest = 0
    if C.dq_parts == 2:
        dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, DIM // 2, 16])
        _, rest = halves(C, gl.zeros([BLOCK_M, DIM], gl.float32, layout=dq_layout))
    count = 0
    for outer in range(outer_visits(C, p, tile)):
        slope = 0.0  # in base 2 where the LSE is
        dslope = 0
        head = tile.head_k * p.group + outer  # of all visits of this loop, unless heads are inside
        if C.slope_gradient:
            s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], WARPS_PER_CTA, [16, BLOCK_M * GROUPS // 2, 16])
            dslope = partial_sums(C, gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout=s_layout))
        if C.alibi:
            slope = gl.load(p.slopes_ptr + tile.sequence * p.stride_slopes + head).to(gl.float32) * (1.0 if C.bias != "" else LOG2_E)
        drawing = 0
        if C.dropout:
            drawing = drawing_of_keys(p, tile, head)
        for inner in range(inner_visits(C, p, tile, outer)):
            head, block = visited(C, p, tile, outer, inner)
            dk, dv, rest, dslope = add_block(
                C, p, mem, base, thread, tile, head, block, slope, plain_first, plain_end, drawing, count, dk, dv, rest, dslope
            )
            count += 1
        if C.slope_gradient:
            total = gl.sum(gl.sum(gl.sum(dslope, 2), 1), 0)
            if (not C.packed) or tile.key < tile.keys_end:
                gl.store(slope_place(C, p, tile, head), total)
    if C.dq_parts == 2:  # noqa: SIM102 (a constant branch around one on the device)
        if count > 0:
            hand_over(C, mem, base, 1, rest)
    if C.apart:
        add_keys(C, p, tile, dk, dv)
    else:
        store_keys(C, p, desc, mem, tile, dk, dv)


# ------------------------------------------------------------------------------------------------------------------- kernel


@jit(
    do_not_specialize=[
        "scale",
        "exp_scale",
        "softcap",
        "out_scale",
        "seqlen_q",
        "seqlen_k",
        "heads_k",
        "group",
        "head_group",
        "batch_heads",
        "row_blocks",
        "key_tiles",
        "window_left",
        "window_right",
        "stride_slopes",
        "stride_bias_b",
        "stride_bias_h",
        "stride_bias_m",
        "stride_dbias_b",
        "stride_dbias_h",
        "items",
        "first_item",
        "stores",
        "stride_mask_b",
        "stride_mask_h",
        "stride_mask_m",
        "drop_below",
        "keep_scale",
        "sharing",
    ],
    do_not_specialize_on_alignment=[
        "lengths_q_ptr",
        "lengths_k_ptr",
        "slopes_ptr",
        "dslopes_ptr",
        "turns_ptr",
        "records_ptr",
        "partial_ptr",
        "full_ptr",
        "bias_ptr",
        "dbias_ptr",
        "mask_ptr",
        "seed_ptr",
        "key_sums_ptr",
    ],
)
def attention_backward(
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    lse_desc,
    delta_desc,
    dq_desc,
    dk_desc,
    dv_desc,
    lengths_q_ptr,
    lengths_k_ptr,
    slopes_ptr,
    dslopes_ptr,
    turns_ptr,
    records_ptr,
    scale,
    exp_scale,
    softcap,
    out_scale,
    seqlen_q,
    seqlen_k,
    heads_k,
    group,
    head_group,
    batch_heads,
    row_blocks,
    key_tiles,
    window_left,
    window_right,
    stride_slopes,
    lse_rest_desc,
    bias_desc,
    bias_ptr,
    stride_bias_b,
    stride_bias_h,
    stride_bias_m,
    dbias_desc,
    dbias_ptr,
    stride_dbias_b,
    stride_dbias_h,
    items,
    first_item,
    stores,
    mask_desc,
    mask_ptr,
    stride_mask_b,
    stride_mask_h,
    stride_mask_m,
    partial_ptr,
    full_ptr,
    seed_ptr,
    drop_below,
    keep_scale,
    sharing,
    key_sums_ptr,
    C: gl.constexpr,
    A: gl.constexpr,
):
    """Grid: key tiles, for each key head of the batch, or for each query head where tiles are apart. C is the `BackwardVariant`, A where
    the barriers lie in shared memory.
    """
    STAGES: gl.constexpr = C.stages
    DO_STAGES: gl.constexpr = C.do_stages
    BLOCK_M: gl.constexpr = C.block_m
    BLOCK_N: gl.constexpr = C.block_n
    DIM: gl.constexpr = C.dim
    DIM_V: gl.constexpr = C.dim_v
    BARRIERS: gl.constexpr = C.barrier_words
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], q_desc.dtype)
    k = gl.allocate_shared_memory(k_desc.dtype, [1, 1, BLOCK_N, DIM], k_desc.layout)
    v = gl.allocate_shared_memory(v_desc.dtype, [1, 1, BLOCK_N, DIM_V], v_desc.layout)
    q = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, BLOCK_M, DIM], q_desc.layout)
    do = gl.allocate_shared_memory(do_desc.dtype, [DO_STAGES, 1, 1, BLOCK_M, DIM_V], do_desc.layout)
    lse = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], lse_desc.layout)
    delta = gl.allocate_shared_memory(gl.float32, [DO_STAGES, BLOCK_M], delta_desc.layout)
    lse_rest, bias, mask = lse, q, q
    rest_rows, bias_tiles, mask_tiles = lse_desc, q_desc, q_desc
    if C.bias != "":
        lse_rest = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], lse_desc.layout)
        rest_rows = lse_rest_desc
    if C.bias == "tma":
        bias = gl.allocate_shared_memory(bias_desc.dtype, [STAGES, 1, 1, BLOCK_M, BLOCK_N], bias_desc.layout)
        bias_tiles = bias_desc
    if C.mask == "tma":
        mask = gl.allocate_shared_memory(mask_desc.dtype, [STAGES, 1, 1, BLOCK_M, BLOCK_N], mask_desc.layout)
        mask_tiles = mask_desc
    dbias, dbias_tiles = q, q_desc
    if C.bias_gradient == "stored":
        dbias = gl.allocate_shared_memory(q_desc.dtype, [1, 1, BLOCK_M, BLOCK_N], dbias_desc.layout)
        dbias_tiles = dbias_desc
        ds = dbias.reshape([BLOCK_M, BLOCK_N]).permute((1, 0))
    else:
        ds = gl.allocate_shared_memory(q_desc.dtype, [BLOCK_N, BLOCK_M], ds_layout)
    if C.share_p:  # noqa: SIM108
        prob = gl.allocate_shared_memory(q_desc.dtype, [BLOCK_N, BLOCK_M], ds_layout)
    else:
        prob = ds
    dq = gl.allocate_shared_memory(gl.float32, [C.dq_box[0], C.dq_box[1]], dq_desc.layout)
    barriers = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], BarrierLayout())
    for s in gl.static_range(STAGES):
        barrier_init(barriers.index(C.q_full + s), count=1)
        barrier_init(barriers.index(C.q_empty + s), count=2)
    for s in gl.static_range(DO_STAGES):
        barrier_init(barriers.index(C.do_full + s), count=1)
        barrier_init(barriers.index(C.do_empty + s), count=2)
    barrier_init(barriers.index(C.dq_full), count=NUM_WARPS)
    barrier_init(barriers.index(C.dq_full + 1), count=NUM_WARPS)
    barrier_init(barriers.index(C.dq_empty), count=1)
    fence_async_shared()
    desc = Descriptors(
        q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dq_desc, dk_desc, dv_desc, rest_rows, bias_tiles, mask_tiles, dbias_tiles
    )
    mem = Buffers(q, do, lse, lse_rest, bias, mask, delta, k, v, prob, ds, dq, dbias, barriers)
    p = BackwardProblem(
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
        Matrix(bias_ptr, stride_bias_b, stride_bias_h, stride_bias_m),
        Matrix(dbias_ptr, stride_dbias_b, stride_dbias_h, row_blocks),
        items,
        first_item,
        stores,
        Matrix(mask_ptr, stride_mask_b, stride_mask_h, stride_mask_m),
        seed_ptr,
        drop_below,
        keep_scale,
    )
    warp_specialize(
        [
            (compute, (C, A, p, desc, mem)),
            (load_tiles, (C, A, p, desc, mem)),
            (add_queries, (C, A, p, desc, mem, 0)),
            (add_queries, (C, A, p, desc, mem, 1)),
        ],
        [1, 1, 1],
        [C.tile.worker_registers, C.tile.worker_registers, C.tile.worker_registers],
    )
