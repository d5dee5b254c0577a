"""Dropout in the Hopper kernels: which probabilities of a tile a thread keeps, as bits of a register or two.

The meaning is that of `kernels.philox`: four neighbouring keys of one query share a call of Philox4x32-10 (Salmon et al. 2011, section 3.3)
and take a word each. In wgmma's layout no thread holds such four: it has two, of each of two rows, and its neighbour has the others; or,
of a transposed tile, one, and three other threads have the rest. So each thread makes an equal share of the calls that it and the threads
beside it need, packs one bit a word, and the threads swap bits: of 64 x 64 scores a thread makes eight calls and swaps one register.

The text of the calls is straight-line PTX in which no value is computed twice: what depends on the head, the query or the keys alone is
shared by the calls that have it in common. Its registers are its own, dead when the bits are there.
"""

from ..philox import MULTIPLIERS, ROUNDS, WEYL
from .gluon_api import aggregate, constexpr_function, gl, jit
from .walk import split_head


class _Text:
    """PTX in which each value is computed once, however often it is asked for."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.known: dict[tuple[str, ...], str] = {}

    def new(self, kind: str = "r") -> str:
        self.lines.append("")
        return f"{kind}{len(self.lines)}"

    def value(self, operation: str, *operands: object) -> str:
        """The register of an operation on registers and numbers."""
        key = (operation, *map(str, operands))
        if key not in self.known:
            name = self.known[key] = self.new()
            self.lines[-1] = f"{operation} {name}, {', '.join(key[1:])};"
        return self.known[key]

    def product(self, x: str, factor: int) -> tuple[str, str]:
        """(high, low) word of a 32 x 32 product."""
        key = ("product", x, str(factor))
        if key not in self.known:
            wide = self.new("d")
            self.lines[-1] = f"mul.wide.u32 {wide}, {x}, {factor};"
            low, high = self.new(), self.new()
            self.lines[-1] = f"mov.b64 {{{low}, {high}}}, {wide};"
            self.known[key] = f"{high} {low}"
        high, low = self.known[key].split()
        return high, low

    def exclusive_or(self, *operands: str) -> str:
        return self.value("lop3.b32", *operands, "0x96")

    def words(self, counters: list[tuple[str, str, str, str]], keys: tuple[str, str]) -> list[tuple[str, str, str, str]]:
        """The four words of each counter, round by round for all of them; ptxas chooses how many are under way at once."""
        for n in range(ROUNDS):
            if n:
                keys = self.value("add.u32", keys[0], WEYL[0]), self.value("add.u32", keys[1], WEYL[1])
            for i, (c0, c1, c2, c3) in enumerate(counters):
                high0, low0 = self.product(c0, MULTIPLIERS[0])
                high1, low1 = self.product(c2, MULTIPLIERS[1])
                counters[i] = self.exclusive_or(high1, c1, keys[0]), low1, self.exclusive_or(high0, c3, keys[1]), low0
        return counters

    def swap(self, bits: str, thread: str, lane: int, shift: int) -> str:
        """Between threads whose numbers differ in the bit `lane`: the one where it is 0 gives the bits in places that contain `shift`, and
        gets for them those in the other places.
        """
        low = sum(1 << i for i in range(32) if not i & shift)
        upper = self.value("and.b32", thread, lane)
        self.lines.append(f"setp.ne.u32 p, {upper}, 0;")
        given = self.value("selp.b32", self.value("shl.b32", bits, shift), self.value("shr.u32", bits, shift), "p")
        taken = self.value("shfl.sync.bfly.b32", given, lane, 31, "0xffffffff")
        kept = self.value("selp.b32", ~low & 0xFFFFFFFF, low, "p")
        return self.value("lop3.b32", bits, taken, kept, "0xe4")

    def finish(self, bits: str) -> str:
        size = len(self.lines) + 1
        return f"{{ .reg .pred p; .reg .b32 r<{size}>; .reg .b64 d<{size}>; {' '.join(filter(None, self.lines))} mov.b32 $0, {bits}; }}"


def bits_text(transposed: bool, warps: int, columns: int = 64) -> str:
    """PTX of the bits of a thread, half as many as `columns`: bit n is that of the n-th value which it holds of a tile in wgmma's layout.
    Each of `warps` warps has 16 rows of it; further warps have further columns.

    Operands: the bits; the seed's low and high word; the threshold; the first query and the first four keys of the tile, counted in fours;
    query head and batch item; the number of the thread.
    """
    low, high, threshold, query, quad, head, batch, thread = (f"${i}" for i in range(1, 9))
    text = _Text()
    lane = text.value("and.b32", thread, 31)
    warp = text.value("and.b32", text.value("shr.u32", thread, 5), warps - 1)
    if transposed:
        # Rows are keys: of four, and of both columns and both rows 8 apart, each of four threads takes one kind.
        kind = text.value("and.b32", text.value("shr.u32", lane, 2), 3)
        quad = text.value("mad.lo.u32", warp, 4, quad)
        quad = text.value("mad.lo.u32", text.value("shr.u32", kind, 1), 2, quad)
        quad = text.value("add.u32", quad, text.value("shr.u32", lane, 4))
        query = text.value("mad.lo.u32", text.value("and.b32", lane, 3), 2, query)
        query = text.value("add.u32", query, text.value("and.b32", kind, 1))
        query = text.value("mad.lo.u32", text.value("shr.u32", thread, 4 + warps.bit_length()), columns, query)
        calls = [(quad, text.value("add.u32", query, 8 * k), [4 * k + n for n in range(4)]) for k in range(columns // 8)]
    else:
        # Rows are queries: of two neighbours one takes the even groups of eight columns, the other the odd ones.
        query = text.value("mad.lo.u32", warp, 16, query)
        query = text.value("add.u32", query, text.value("shr.u32", lane, 2))
        quad = text.value("mad.lo.u32", text.value("and.b32", lane, 1), 2, quad)
        quad = text.value("add.u32", quad, text.value("and.b32", text.value("shr.u32", lane, 1), 1))
        calls = [
            (text.value("add.u32", quad, 4 * m), text.value("add.u32", query, 8 * x), [8 * m + 2 * x + (0, 1, 4, 5)[n] for n in range(4)])
            for m in range(columns // 16)
            for x in range(2)
        ]
    # Bits are packed by additions of powers of two to floats, exact in 23 bits: the unit for logic is the busiest one.
    halves = [text.new() for _ in range(2)]
    text.lines.extend(f"mov.b32 {half}, 0x4b000000;" for half in halves)  # 2^23
    drawn_words = text.words([(quad, query, head, batch) for quad, query, _ in calls], (low, high))
    for words, (_, _, places) in zip(drawn_words, calls, strict=True):
        for word, place in zip(words, places, strict=True):
            half, power = halves[place // 16], f"0f{(127 + place % 16) << 23:08x}"
            text.lines.append(f"setp.ge.u32 p, {word}, {threshold}; @p add.f32 {half}, {half}, {power};")
    bits = text.value("prmt.b32", *halves, "0x5410")
    for step in ((4, 1), (8, 2)) if transposed else ((1, 4),):
        bits = text.swap(bits, thread, *step)
    return text.finish(bits)


OF_ROWS = gl.constexpr(bits_text(False, 4))  # S of a warp group of the forward kernel
OF_KEYS = gl.constexpr(bits_text(True, 8))  # S^T of both warp groups of the backward kernel
OF_SHARED_KEYS = gl.constexpr(bits_text(True, 4, 32))  # where each has half of the columns


@constexpr_function
def _selection_text(n):
    text = "{ .reg .pred p; .reg .b32 t; "
    for i in range(n):
        text += f"and.b32 t, ${(2 + i // 32) * n}, {1 << i % 32}; setp.ne.b32 p, t, 0; selp.f32 ${i}, ${i}, 0f00000000, p; "
    return text + "}"


@constexpr_function
def _selection_operands(n):
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["r"] * (2 * n))


@aggregate
class Drawing:
    """What the bits of a tile's rows have in common."""

    low: gl.tensor  # of the seed
    high: gl.tensor
    query: gl.tensor  # the first, counted as the contract counts
    key: gl.tensor  # that block 0 starts with
    batch: gl.tensor
    head: gl.tensor

    @constexpr_function
    def __init__(self, low, high, query, key, batch, head):
        self.low = low
        self.high = high
        self.query = query
        self.key = key
        self.batch = batch
        self.head = head


@jit
def drawing_of_rows(C: gl.constexpr, p, tile, row):
    """For `keep_bits` of the 64 rows from `row` on of a tile of the forward kernel."""
    seed = gl.load(p.seed_ptr)
    batch, head = split_head(p, tile.batch_head)
    key = tile.origin
    if C.packed:
        key = key * 0  # no window on the left: a sequence starts with its first key
    return Drawing(seed.to(gl.int32), (seed >> 32).to(gl.int32), row - tile.first_row, key, batch, head)


@jit
def drawn(drawing, threshold, query, quad, thread, TEXT: gl.constexpr):
    """32 bits a thread; what is drawn stays above the next `wait`: threads have swapped by then."""
    return gl.inline_asm_elementwise(
        TEXT,
        "=r,r,r,r,r,r,r,r,r",
        [drawing.low, drawing.high, threshold, query, quad, drawing.head, drawing.batch, thread],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def keep_bits(C: gl.constexpr, p, drawing, block, thread):
    """Two int32, bit n set where the thread keeps the n-th probability that it holds of a block of keys, bit n - 32 of the second."""
    quad = (drawing.key + block * C.block_n) >> 2
    first = drawn(drawing, p.drop_below, drawing.query, quad, thread, OF_ROWS)
    second = first
    if C.block_n == 128:
        second = drawn(drawing, p.drop_below, drawing.query, quad + 16, thread, OF_ROWS)
    return first, second


@jit
def drawing_of_keys(p, tile, head):
    """For `keep_bits_of_keys` of the keys of a tile of the backward kernel and the queries of a head."""
    seed = gl.load(p.seed_ptr)
    return Drawing(seed.to(gl.int32), (seed >> 32).to(gl.int32), tile.key * 0, tile.key, tile.sequence, head)


@jit
def keep_bits_of_keys(C: gl.constexpr, p, drawing, block, thread):
    """As `keep_bits`, of a transposed tile, [128, 64] or, where P is shared, [64, 64]."""
    text: gl.constexpr = OF_SHARED_KEYS if C.share_p else OF_KEYS
    bits = drawn(drawing, p.drop_below, block * C.block_m, drawing.key >> 2, thread, text)
    return bits, bits


@jit
def kept(x, bits, WARPS: gl.constexpr):
    """x in wgmma's layout, 0 where its bit is not set."""
    first, second = bits
    n: gl.constexpr = x.shape[0] * x.shape[1] // (32 * WARPS)
    text: gl.constexpr = _selection_text(n)
    operands: gl.constexpr = _selection_operands(n)
    return gl.inline_asm_elementwise(text, operands, [x, first, second], dtype=gl.float32, is_pure=True, pack=n)
