"""The end of a tile in the Hopper forward kernel: the denominator, and O and LSE on their way to memory, or the state of one part."""

from .barriers import pinned
from .gluon_api import constexpr_function, fence_async_shared, gl, jit, tma_store
from .guard import mark_unless_finite
from .online_softmax import LN_2, LOG2_E, exponent_line, is_huge
from .walk import columns, divide, item_and_head, own_heads, queries, query_coordinates, split_head


@jit
def denominator(C: gl.constexpr, p, tile, m_i, l_i, WARPGROUP: gl.constexpr):
    """(factor of the accumulator, LSE), both [64]. A row that saw no key gets factor 0 and LSE -inf, or the sink's logit."""
    if C.sink:
        layout: gl.constexpr = m_i.type.layout
        _, head = split_head(p, tile.batch_head)
        head = own_heads(C, p, head, layout, WARPGROUP)
        sink_log2 = gl.load(p.sink_ptr + head).to(gl.float32) * LOG2_E
        m_log2 = m_i * p.exp_scale
        if C.bias != "":
            m_log2 = gl.where(is_huge(m_log2), gl.minimum(m_log2, 3e38), m_log2)
        top = gl.maximum(m_log2, sink_log2)
        shift = gl.where(top == float("-inf"), 0.0, top)
        weight = gl.exp2(m_log2 - shift)
        total = l_i * weight + gl.exp2(sink_log2 - shift)
        factor = weight / total
        lse = (shift + gl.log2(total)) * LN_2
    elif C.bias != "":
        factor = 1.0 / l_i
        m_log2 = m_i * p.exp_scale
        lse = gl.where(is_huge(m_log2), m_i + gl.log2(l_i) * LN_2, (m_log2 + gl.log2(l_i)) * LN_2)
    else:
        factor = 1.0 / l_i
        lse = (m_i * p.exp_scale + gl.log2(l_i)) * LN_2
    if C.dropout:
        factor = factor * p.keep_scale
    return gl.where(l_i == 0.0, 0.0, factor), lse


@jit
def state(C: gl.constexpr, p, tile, m_i, l_i, WARPGROUP: gl.constexpr):
    """(factor of the accumulator, m, l), all [64]: what a part of a tile's keys leaves for `merge_parts`, m in base 2 and as the exponents
    were computed, see `exponent_line`. Where a row saw no key, m is -inf and the factor 0. A sink is a key of the first part.
    """
    _, m_log2 = exponent_line(C, p, m_i)
    m_log2 = gl.where(l_i == 0.0, float("-inf"), m_log2)
    factor = gl.where(l_i == 0.0, 0.0, 1.0)
    if C.sink:
        layout: gl.constexpr = m_i.type.layout
        _, head = split_head(p, tile.batch_head)
        head = own_heads(C, p, head, layout, WARPGROUP)
        sink = gl.load(p.sink_ptr + head).to(gl.float32)
        _, sink_log2 = exponent_line(C, p, sink * (LOG2_E / p.exp_scale))
        sink_log2 = gl.where((tile.part == 0) & (sink > float("-inf")), sink_log2, float("-inf"))
        top = gl.maximum(m_log2, sink_log2)
        shift = gl.where(top == float("-inf"), 0.0, top)
        factor = gl.exp2(m_log2 - shift)
        l_i = l_i * factor + gl.exp2(sink_log2 - shift)
        m_log2 = top
    if C.dropout:
        factor = factor * p.keep_scale
    return factor, m_log2, l_i


@jit
def write_out(C: gl.constexpr, p, desc, mem, tile, row, acc, WARPGROUP: gl.constexpr):
    """O [64, dim_v] to memory; the copy by TMA is still under way at the return."""
    if C.store_tma:
        # TMA clips what lies past the tensor; rows past a packed sequence are another's.
        if C.packed:
            whole = row + C.own_queries <= tile.rows_stop
            if C.heads > 1:
                whole = whole & (C.own_heads * (WARPGROUP + 1) <= heads_left(p, tile.batch_head))
            if whole:
                store_by_tma(C, p, desc, mem, tile, acc, WARPGROUP)
            else:
                store_rows(C, p, tile, row, acc, WARPGROUP)
        else:
            store_by_tma(C, p, desc, mem, tile, acc, WARPGROUP)
    else:
        store_rows(C, p, tile, row, acc, WARPGROUP)


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
def store_rows(C: gl.constexpr, p, tile, row, acc, WARPGROUP: gl.constexpr):
    """From registers, those rows that are this sequence's and this group's."""
    DIM_V: gl.constexpr = C.dim_v
    layout: gl.constexpr = acc.type.layout
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    rows = row + queries(C, row_layout)
    cols = gl.arange(0, DIM_V, layout=gl.SliceLayout(0, layout))
    batch, head = item_and_head(C, p, tile)
    head_offset = batch.to(gl.int64) * p.stride_out_b + head.to(gl.int64) * p.stride_out_h
    row_offset = rows.to(gl.int64) * p.stride_out_s
    written = rows < tile.rows_stop
    if C.heads > 1:
        later = later_heads(C, row_layout, WARPGROUP)
        row_offset += later.to(gl.int64) * p.stride_out_h
        written = written & (later < heads_left(p, tile.batch_head))
    offsets = row_offset[:, None] + cols[None, :]
    visible = written[:, None] & (cols < p.dim_v)[None, :]
    gl.store(p.out_ptr + head_offset + offsets, acc.to(p.out_ptr.dtype.element_ty), mask=visible)


@constexpr_function
def out_slot(C, warpgroup):
    """Which O tile a warp group writes: its own, or one that lies inside its own part of Q's buffer."""
    if C.own_out_buffer:
        return warpgroup
    mine = C.chunks * C.q_bytes
    return -(-warpgroup * mine // C.out_bytes)


@jit
def heads_left(p, batch_head):
    """How many heads of its group there are from `batch_head` on: a tile may have room for more."""
    return p.group - (batch_head - divide(batch_head, p.group) * p.group)


@jit
def later_heads(C: gl.constexpr, layout: gl.constexpr, WARPGROUP: gl.constexpr):
    """[64], how many heads behind the tile's first one the head of each row is."""
    return (gl.arange(0, 64, layout=layout) >> C.log2_own_queries) + C.own_heads * WARPGROUP


@jit
def rows_of_part(C: gl.constexpr, p, batch_head, stop, layout: gl.constexpr, WARPGROUP: gl.constexpr):
    """[64], how far the workspace's row of each row is from that of the tile's first head and the warp group's first query, and whether
    there is such a query, `stop` of which follow: a tile may have more rows than the sequence, and more heads than the group."""
    ours = queries(C, layout)
    written = ours < stop
    if C.heads > 1:
        later = later_heads(C, layout, WARPGROUP)
        ours = ours + later.to(gl.int64) * p.seqlen_q
        written = written & (later < heads_left(p, batch_head))
    return ours, written


@jit
def write_part(C: gl.constexpr, p, tile, row, acc, m, l, WARPGROUP: gl.constexpr):
    """The accumulator [64, dim_v], m and l of one part into the workspace, (parts, B, H, Sq, Dv) and twice (parts, B, H, Sq).

    What addresses are made of is pinned: computed before the loop over key blocks they would be spilled.
    """
    DIM_V: gl.constexpr = C.dim_v
    layout: gl.constexpr = acc.type.layout
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    state_layout: gl.constexpr = m.type.layout
    row, part, batch_head = pinned(row), pinned(tile.part), pinned(tile.batch_head)
    all_rows = p.batch_heads.to(gl.int64) * p.seqlen_q
    first = part * all_rows + batch_head.to(gl.int64) * p.seqlen_q + row  # of the workspace's rows
    ours, written = rows_of_part(C, p, batch_head, tile.rows_stop - row, row_layout, WARPGROUP)
    constant, lane = columns(layout, DIM_V)
    at = p.out_ptr + first * p.dim_v + (ours * p.dim_v)[:, None] + lane + constant
    gl.store(at, acc, mask=written[:, None] & (constant < p.dim_v - lane))
    ours, written = rows_of_part(C, p, batch_head, tile.rows_stop - row, state_layout, WARPGROUP)
    at_state = p.lse_ptr + first + ours
    gl.store(at_state, m, mask=written)
    gl.store(at_state + p.parts * all_rows, gl.where(m == float("-inf"), 0.0, l), mask=written)


@jit
def epilogue(C: gl.constexpr, p, desc, mem, tile, row, acc, m_i, l_i, WARPGROUP: gl.constexpr):
    """Divide by the denominator and write O and LSE; of a part, the accumulator as it is, and m and l."""
    row_layout: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    state_layout: gl.constexpr = m_i.type.layout
    if C.parts:
        factor, lse, l_i = state(C, p, tile, m_i, l_i, WARPGROUP)  # m takes the way of the LSE
    else:
        factor, lse = denominator(C, p, tile, m_i, l_i, WARPGROUP)
    rows = row + queries(C, state_layout)
    rows_o = row + queries(C, row_layout)
    factor = gl.convert_layout(factor, row_layout)
    if C.lengths_q:
        lse = gl.where(rows < tile.rows_end, lse, float("-inf"))
        factor = gl.where(rows_o < tile.rows_end, factor, 0.0)
    out = acc
    if not C.parts or C.sink or C.dropout:  # a part without either leaves its accumulator as it is, and where that is empty nobody reads it
        out = acc * factor[:, None]
        if C.may_be_empty or C.lengths_q:
            out = gl.where((factor == 0.0)[:, None], 0.0, out)  # the accumulator may hold NaN there
    if C.guarded:
        mark_unless_finite(out, p.found_ptr)
    if C.parts:
        write_part(C, p, tile, row, out, lse, l_i, WARPGROUP)
    else:
        write_out(C, p, desc, mem, tile, row, out, WARPGROUP)
        batch_head = tile.batch_head
        if C.packed:
            _, batch_head = split_head(p, batch_head)
        at = p.lse_ptr + batch_head.to(gl.int64) * p.seqlen_q + rows
        written = rows < tile.rows_stop
        if C.heads > 1:
            later = later_heads(C, state_layout, WARPGROUP)
            at += later.to(gl.int64) * p.seqlen_q
            written = written & (later < heads_left(p, batch_head))
        gl.store(at, lse, mask=written)
