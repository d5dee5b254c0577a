"""The steps of reading a cache, each a short function: where keys live, rotary embeddings, scores of packed query heads."""

import triton
import triton.language as tl

from ..programs import run_program, tanh
from ..tiles import NEG_INF


@triton.jit
def clamped(x, size):
    """An index from the device, forced into [0, size): no value may cause an access outside a buffer."""
    return tl.minimum(tl.maximum(x, 0), size - 1)


# ---- which queries a program has


@triton.jit
def first_slot(offsets_ptr, b, group, BLOCK_M: tl.constexpr):
    """Where the row tiles of item b begin among those of all packed items: early enough for every one before it to have a tile begun."""
    return tl.load(offsets_ptr + b) * group // BLOCK_M + b


@triton.jit
def item_and_row(offsets_ptr, b, tile, items, group, BLOCK_M: tl.constexpr, SEARCH: tl.constexpr):
    """The item of a row tile and the tile's first row in it. SEARCH: the tiles of all items stand in one line, and halving finds whose
    this one is; a tile past its item's rows has nothing to do."""
    m0 = tile * BLOCK_M
    if SEARCH:
        b, count = tile * 0, items
        while count > 1:
            half = count // 2
            later = first_slot(offsets_ptr, b + half, group, BLOCK_M) <= tile
            b, count = tl.where(later, b + half, b), tl.where(later, count - half, half)
        m0 = (tile - first_slot(offsets_ptr, b, group, BLOCK_M)) * BLOCK_M
    return b, m0


@triton.jit
def queries_of(offsets_ptr, b, size_q, group, least_rows, most_rows):
    """The first query of item b and how many there are: none where a launch for tiles of another height has them."""
    first, count = b.to(tl.int64) * size_q, size_q
    if offsets_ptr is not None:
        begin = tl.load(offsets_ptr + b)
        length = tl.load(offsets_ptr + b + 1) - begin
        first, count = begin.to(tl.int64), tl.where((length * group > least_rows) & (length * group <= most_rows), length, 0)
    return first, count


# ---- memory


@triton.jit
def columns(FIRST: tl.constexpr, COLS: tl.constexpr, dim_stride):
    offs_d = FIRST + tl.arange(0, COLS)
    return offs_d if dim_stride is None else offs_d.to(tl.int64) * dim_stride


@triton.jit
def places(table, n0, offs_n, inside, pages, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """(page, slot) of keys `offs_n`, 64-bit. A page that holds the whole tile is one number; it is 0 where there are no pages."""
    if PAGE_SIZE == 0:
        page, slot = tl.zeros([], tl.int64), offs_n.to(tl.int64)
    elif PAGE_SIZE % BLOCK_N == 0:
        page = clamped(tl.load(table + n0 // PAGE_SIZE), pages).to(tl.int64)
        slot = (n0 % PAGE_SIZE + tl.arange(0, BLOCK_N)).to(tl.int64)
    else:
        page = clamped(tl.load(table + offs_n // PAGE_SIZE, mask=inside, other=0), pages).to(tl.int64)
        slot = (offs_n % PAGE_SIZE).to(tl.int64)
    return page, slot


@triton.jit
def load_keys(cache, page, slot, inside, FIRST: tl.constexpr, COLS: tl.constexpr, DIM: tl.constexpr, GUARD: tl.constexpr):
    """Dims [FIRST, FIRST + COLS) of keys or values, [N, COLS]: 0 past DIM and, with GUARD, where not `inside`."""
    start, stride_row, stride_slot, dim_stride = cache
    pointers = start + (page * stride_row + slot * stride_slot)[:, None] + columns(FIRST, COLS, dim_stride)[None, :]
    if GUARD:
        tile = tl.load(pointers, mask=inside[:, None] & (FIRST + tl.arange(0, COLS) < DIM)[None, :], other=0.0)
    elif FIRST + COLS > DIM:
        tile = tl.load(pointers, mask=(FIRST + tl.arange(0, COLS) < DIM)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def load_turned(
    rows, inside, dim_stride, position, turn,
    FIRST: tl.constexpr, COLS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Dims [FIRST, FIRST + COLS) of rows, [R, COLS], the first ROTARY of all dims turned by the angles of each row's position (Su et al.
    2021, "RoFormer"). `rows` are pointers, `turn` is (cos, sin, positions) or None. The partner of each dim is loaded, not exchanged."""
    offs_d = FIRST + tl.arange(0, COLS)
    x = tl.load(rows[:, None] + columns(FIRST, COLS, dim_stride)[None, :], mask=inside[:, None] & (offs_d < DIM)[None, :], other=0.0)
    if turn is not None:
        HALF: tl.constexpr = ROTARY // 2
        cos_ptr, sin_ptr, positions = turn
        if INTERLEAVED:
            first, angle = offs_d % 2 == 0, offs_d // 2
            partner = tl.where(first, offs_d + 1, offs_d - 1)
        else:
            first, angle = offs_d < HALF, offs_d % HALF
            partner = tl.where(first, offs_d + HALF, offs_d - HALF)
        turning = inside[:, None] & (offs_d < ROTARY)[None, :]
        partner = partner if dim_stride is None else partner.to(tl.int64) * dim_stride
        y = tl.load(rows[:, None] + partner[None, :], mask=turning, other=0.0).to(tl.float32)
        at = clamped(position, positions).to(tl.int64)[:, None] * HALF + angle[None, :]
        cos = tl.load(cos_ptr + at, mask=turning, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + at, mask=turning, other=0.0).to(tl.float32)
        x = (x.to(tl.float32) * cos + tl.where(first[None, :], -y, y) * sin).to(x.dtype)
    return x


@triton.jit
def cache_scores(
    qk, position, offs_n, inside, window, rules, mask_tile, MASK_MOD: tl.constexpr, NATURAL: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Scores [M, N] of rows that stand at `position` [M], -inf where hidden. `rules` is (scale, softcap, slope [M], program)."""
    scale, softcap, slope, program = rules
    s = qk * scale if NATURAL else qk
    if softcap is not None:
        s = softcap * tanh(s / softcap)
    if slope is not None:
        s -= slope[:, None] * tl.abs(position[:, None] - offs_n[None, :]).to(tl.float32)
    if MASKED:
        window_left, window_right = window
        seen = inside[None, :]
        if window_left is not None:
            seen = seen & (offs_n[None, :] >= position[:, None] - window_left)
        if window_right is not None:
            seen = seen & (offs_n[None, :] <= position[:, None] + window_right)
        if mask_tile is not None:
            seen = seen & (mask_tile != 0)
        if MASK_MOD != "":
            seen = seen & run_program(MASK_MOD, program, None, None, position, offs_n, (0, 0), False)
        s = tl.where(seen, s, NEG_INF)
    return s
