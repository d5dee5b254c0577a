"""The walk over tiles of the Hopper kernel, run as plain Python: every query row once, every visible key, no key that nobody sees."""

from __future__ import annotations

import itertools
import random
import types
from collections import namedtuple

import pytest

pytest.importorskip("triton")

from tilewise.kernels.hopper import walk
from tilewise.kernels.hopper.configs import TILES, Variant
from tilewise.kernels.triton import tiles as portable_tiles

_FIELDS = "batch_head part row first_row rows_end rows_stop origin shift keys_end last_block blocks"
_Tile = namedtuple("_Tile", _FIELDS)
_GL = types.SimpleNamespace(
    int64=int,
    minimum=min,
    maximum=max,
    where=lambda condition, a, b: a if condition else b,
    load=lambda at, mask=True, other=0: at.values[at.at] if mask else other,
)


class _Pointer:
    def __init__(self, values, at=0):
        self.values, self.at = values, at

    def __add__(self, offset):
        return _Pointer(self.values, self.at + int(offset))


class _Int(int):
    """What a device integer can do beyond one of Python's."""

    def to(self, kind):
        return self

    def __add__(self, other):
        return _Int(int(self) + int(other))

    def __mul__(self, other):
        return _Int(int(self) * int(other))

    __radd__, __rmul__ = __add__, __mul__


def _python(name):
    """The function of `walk` without its compiler: the same body over Python integers."""
    body = getattr(walk, name).fn
    stand_ins = {"gl": _GL, "Tile": _Tile, "divide": lambda a, b: a // b, "uniform": lambda x: x}
    return types.FunctionType(body.__code__, {**vars(walk), **stand_ins, **_FOUND}, name)


_FOUND: dict = {}
_NAMES = (
    "heads_of_tiles",
    "own_row",
    "split_head",
    "item_and_head",
    "first_head_of",
    "place",
    "packed_tile",
    "list_record",
    "listed_tile",
    "lists_of",
    "listed_block",
    "ranged_tile",
)
for _name in (*_NAMES, "find_tile", "query_coordinates", "key_coordinates", "plain_blocks", "needs_mask"):
    _FOUND[_name] = _python(_name)


def _problem(batch, heads, seqlen_q, seqlen_k, variant, left, right, lengths_q, lengths_k, head_group, parts=1):
    row_blocks = -(-seqlen_q // variant.block_m)
    return types.SimpleNamespace(
        lengths_q_ptr=_Pointer(lengths_q),
        lengths_k_ptr=_Pointer(lengths_k),
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        heads=heads,
        row_blocks=row_blocks,
        batch_heads=batch * heads,
        tiles=row_blocks * batch * heads * parts,
        parts=parts,
        group=1,
        head_group=head_group,
        window_left=left,
        window_right=right,
    )


def _visible(i, j, left, right, length_q, length_k):
    p = i + length_k - length_q
    return i < length_q and j < length_k and (left < 0 or j >= p - left) and (right < 0 or j <= p + right)


@pytest.mark.parametrize("left, right", list(itertools.product((-1, 0, 150), (-1, 0, 90))))
@pytest.mark.parametrize("with_lengths", [False, True])
@pytest.mark.parametrize("tile", ["64 long", "256"])
def test_walk_covers_what_is_visible(left, right, with_lengths, tile):
    draw = random.Random(f"{left} {right} {with_lengths} {tile}")
    for turn in range(12):
        batch, heads = draw.randint(1, 2), draw.randint(1, 3)
        seqlen_q, seqlen_k = draw.choice([1, 63, 64, 130, 400]), draw.choice([1, 64, 127, 300, 513])
        lengths_q = [draw.choice([0, 1, seqlen_q // 2, seqlen_q, seqlen_q + 9]) if with_lengths else seqlen_q for _ in range(batch)]
        lengths_k = [draw.choice([0, 1, seqlen_k // 2, seqlen_k, -3]) if with_lengths else seqlen_k for _ in range(batch)]
        rules = {"right": right >= 0, "left": left >= 0, "lengths_q": with_lengths, "lengths_k": with_lengths, "dropout": turn % 2 == 1}
        variant = Variant(TILES[tile], "bf16", 64, 1, 64, **rules)
        p = _problem(batch, heads, seqlen_q, seqlen_k, variant, left, right, lengths_q, lengths_k, draw.choice([1, 2, 4]))
        done = set()
        for number in range(p.tiles):
            t = _FOUND["find_tile"](variant, p, number)
            b, h = divmod(t.batch_head, heads)
            len_q, len_k = min(max(lengths_q[b], 0), seqlen_q), min(max(lengths_k[b], 0), seqlen_k)
            assert (b, h, t.row) not in done
            done.add((b, h, t.row))
            assert t.blocks >= 1 and t.last_block - t.blocks + 1 >= 0
            assert t.rows_end == len_q
            assert t.first_row == 0 and (t.origin % 4 == 0 or not variant.dropout)
            first, end = t.last_block - t.blocks + 1, t.last_block + 1
            if with_lengths and t.row >= len_q:
                continue
            for warpgroup in range(variant.warpgroups):
                row = t.row + 64 * warpgroup
                plain_first, plain_end = _FOUND["plain_blocks"](variant, p, t, row)
                for block in range(first, end):
                    # Masked at the edges only: just where some row does not see some key.
                    start, stop = block * variant.block_n, (block + 1) * variant.block_n
                    whole = stop <= t.keys_end and (right < 0 or stop - 1 <= row + t.shift + right)
                    whole = whole and (left < 0 or start >= row + 63 + t.shift - left)
                    assert _FOUND["needs_mask"](variant, block, plain_first, plain_end) == (not whole), (number, block, t)
                for i in range(row, min(row + 64, seqlen_q), 9):
                    seen = {j for j in range(seqlen_k) if _visible(i, j, left, right, len_q, len_k)}
                    found = set()
                    for block in range(first, end):
                        masked = _FOUND["needs_mask"](variant, block, plain_first, plain_end)
                        for x in range(block * variant.block_n, (block + 1) * variant.block_n):
                            ok = x < t.keys_end
                            if variant.right:
                                ok = ok and x < i + t.shift + p.window_right + 1
                            if variant.left:
                                ok = ok and x >= i + t.shift - p.window_left
                            # An unmasked block counts every column, so that it must be visible entirely.
                            if ok or not masked:
                                found.add(x + t.origin)
                    if i < len_q:
                        assert found == seen, (number, i, t)
        assert len(done) == p.tiles


def _seen_by(variant, p, t, warpgroup, i):
    """The keys that row i counts in the blocks that a tile visits. A block without a mask counts every column: all must be visible."""
    plain_first, plain_end = _FOUND["plain_blocks"](variant, p, t, t.row + 64 * warpgroup)
    for block in range(t.last_block, t.last_block - t.blocks, -1):
        masked = _FOUND["needs_mask"](variant, block, plain_first, plain_end)
        for x in range(block * variant.block_n, (block + 1) * variant.block_n):
            ok = x < t.keys_end and (not variant.right or x < i + t.shift + p.window_right + 1)
            if not masked or (ok and (not variant.left or x >= i + t.shift - p.window_left)):
                yield x + t.origin


@pytest.mark.parametrize("left, right", [(-1, -1), (-1, 0), (-1, 90), (150, 90), (0, 0), (150, -1)])
@pytest.mark.parametrize("with_lengths", [False, True])
def test_parts_of_a_tile_cover_what_is_visible_once(left, right, with_lengths):
    draw = random.Random(f"{left} {right} {with_lengths}")
    for tile, parts in itertools.product(("128", "256"), (2, 3, 5, 16)):
        batch, heads = draw.randint(1, 2), draw.randint(1, 3)
        seqlen_q, seqlen_k = draw.choice([1, 63, 130, 300]), draw.choice([1, 64, 300, 513, 1100])
        lengths_q = [draw.choice([0, 1, seqlen_q // 2, seqlen_q]) if with_lengths else seqlen_q for _ in range(batch)]
        lengths_k = [draw.choice([0, 1, seqlen_k // 2, seqlen_k, -3]) if with_lengths else seqlen_k for _ in range(batch)]
        rules = {"right": right >= 0, "left": left >= 0, "lengths_q": with_lengths, "lengths_k": with_lengths}
        variant = Variant(TILES[tile], "bf16", 64, 1, 64, parts=True, **rules)
        p = _problem(batch, heads, seqlen_q, seqlen_k, variant, left, right, lengths_q, lengths_k, draw.choice([1, 2, 4]), parts)
        tiles: dict = {}
        for number in range(p.tiles):
            t = _FOUND["find_tile"](variant, p, number)
            assert t.blocks >= 1 and t.last_block - t.blocks + 1 >= 0 and 0 <= t.part < parts
            tiles.setdefault((*divmod(t.batch_head, heads), t.row), []).append(t)
        assert all([t.part for t in found] == list(range(parts)) for found in tiles.values())
        assert len(tiles) == batch * heads * p.row_blocks
        for (b, _, row), found in tiles.items():
            len_q, len_k = min(max(lengths_q[b], 0), seqlen_q), min(max(lengths_k[b], 0), seqlen_k)
            at_work = [t for t in found if t.keys_end > 0]
            visited = [block for t in at_work for block in range(t.last_block, t.last_block - t.blocks, -1)]
            assert visited == sorted(set(visited), reverse=True), "a block twice, or not from right to left"
            assert max((t.blocks for t in at_work), default=0) <= -(-len(visited) // parts)
            for t in found:
                assert t.keys_end > 0 or (t.blocks, t.last_block) == (1, 0)
            for i in range(row, min(row + variant.block_m, len_q), 17):
                counted = [j for t in found for j in _seen_by(variant, p, t, (i - row) // 64, i)]
                assert len(counted) == len(set(counted))
                assert set(counted) == {j for j in range(seqlen_k) if _visible(i, j, left, right, len_q, len_k)}


@pytest.mark.parametrize("parts", [1, 3])
def test_long_tiles_come_first(parts):
    variant = Variant(TILES["128"], "bf16", 128, 1, 128, right=True, parts=parts > 1)
    p = _problem(1, 2, 1024, 1024, variant, -1, 0, [1024], [1024], 2, parts)
    tiles = [_FOUND["find_tile"](variant, p, number) for number in range(p.tiles)]
    assert [t.row for t in tiles] == sorted((t.row for t in tiles), reverse=True)
    lengths = [sum(t.blocks for t in tiles[number : number + parts] if t.keys_end > 0) for number in range(0, p.tiles, parts)]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] == 8 and lengths[-1] == 1


_TL = types.SimpleNamespace(minimum=min, maximum=max, where=_GL.where, cdiv=lambda a, b: -(-a // b))
_portable_range = types.FunctionType(portable_tiles.key_tile_range.fn.__code__, {"tl": _TL}, "key_tile_range")


def _keys(i, left, right, length_q, length_k):
    p = i + length_k - length_q
    return range(max(p - left, 0) if left >= 0 else 0, min(p + right + 1, length_k) if right >= 0 else length_k)


@pytest.mark.parametrize("left, right", list(itertools.product((-1, 0, 150, 700), (-1, 0, 90))))
@pytest.mark.parametrize("tile", ["128", "256"])
def test_the_portable_kernels_walk_over_the_same_keys(left, right, tile):
    """Their tile ranges are code of their own. A grid that begins at the first key, not at the first that a window shows, holds the same
    keys in other blocks, so that what agrees is where the first and the last visible key of a tile lie: in the first and the last block."""
    draw = random.Random(f"{left} {right} {tile}")
    variant = Variant(TILES[tile], "bf16", 64, 1, 64, right=right >= 0, left=left >= 0, lengths_q=True, lengths_k=True)
    for _ in range(60):
        seqlen_q, seqlen_k = draw.choice([1, 64, 130, 700]), draw.choice([1, 64, 513, 1100])
        len_q, len_k = draw.choice([1, seqlen_q // 2, seqlen_q]), draw.choice([0, seqlen_k // 2, seqlen_k])
        p = _problem(1, 1, seqlen_q, seqlen_k, variant, left, right, [len_q], [len_k], 1)
        for number in range(p.tiles):
            t = _FOUND["find_tile"](variant, p, number)
            span = len_q, len_k, None if left < 0 else left, None if right < 0 else right
            lo, _, _, hi = _portable_range(t.row, span, variant.block_m, variant.block_n)
            seen = [_keys(i, left, right, len_q, len_k) for i in range(t.row, min(t.row + variant.block_m, len_q))]
            firsts, lasts = [keys.start for keys in seen if keys], [keys.stop - 1 for keys in seen if keys]
            first_start, last_start = t.origin + (t.last_block - t.blocks + 1) * variant.block_n, t.origin + t.last_block * variant.block_n
            if not firsts:
                assert hi <= lo and (t.keys_end == 0 or t.row + variant.block_m > len_q), (span, t)
                continue
            assert lo <= min(firsts) < lo + variant.block_n
            assert max(lasts) == hi - 1
            assert first_start <= min(firsts) < first_start + variant.block_n
            if t.row + variant.block_m <= len_q:  # else rows beyond the length may see one block more
                assert last_start <= max(lasts) < last_start + variant.block_n
            else:
                assert max(lasts) < last_start + variant.block_n
            if left < 0:
                assert first_start == lo == 0


@pytest.mark.parametrize("right", [-1, 0])
@pytest.mark.parametrize("tile", ["64 bias", "128 matrix"])
@pytest.mark.parametrize("batch, heads, side_by_side", [(3, 4, 3), (3, 4, 1), (1, 5, 1)])
def test_items_that_share_a_bias_are_neighbours(tile, right, batch, heads, side_by_side):
    """Every tile once; where items stand side by side, all that meet a head's bias come before those that meet the next one's."""
    variant = Variant(TILES[tile], "bf16", 64, 1, 64, right=right >= 0, scale_first=True, bias="tma")
    p = _problem(batch, heads, 300, 300, variant, -1, right, [300] * batch, [300] * batch, side_by_side)
    p.side_by_side = side_by_side
    tiles = [_FOUND["find_tile"](variant, p, number) for number in range(p.tiles)]
    assert sorted((t.batch_head, t.row) for t in tiles) == [(i, row) for i in range(batch * heads) for row in range(0, 300, 128)]
    order = [divmod(t.batch_head, heads) for t in tiles]
    met = [head for _, head in order] if side_by_side > 1 else order
    assert met == sorted(met)


def test_hidden_keys_on_the_left_are_never_loaded():
    variant = Variant(TILES["128"], "bf16", 128, 1, 128, right=True, left=True)
    p = _problem(1, 1, 64, 3000, variant, 5, 5, [64], [3000], 1)
    t = _FOUND["find_tile"](variant, p, 0)
    assert t.origin == 3000 - 64 - 5 and t.blocks == 1


def _records(lengths_q, lengths_k, used_q, used_k, block, spare):
    """What `packed.schedule` writes, with rows of no sequence behind the last one."""
    found, first_q, first_k = [], 0, 0
    for b, (rows_q, rows_k) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        real_q, real_k = min(used_q[b], rows_q), min(used_k[b], rows_k)
        found += [(real_k, (b, row, first_q, rows_q, real_q, first_k, rows_k, real_k)) for row in reversed(range(0, rows_q, block))]
        first_q, first_k = first_q + rows_q, first_k + rows_k
    found.sort(key=lambda pair: -pair[0])
    tiles = [record for _, record in found] + [(0, row, first_q, spare, 0, 0, 0, 0) for row in range(0, spare, block)]
    return tiles, first_q + spare, first_k


@pytest.mark.parametrize("left, right", [(-1, -1), (-1, 0), (150, 90), (0, 0)])
@pytest.mark.parametrize("group, shared", [(2, 1), (2, 2), (4, 4), (7, 8), (32, 16)])
def test_packed_walk_covers_what_is_visible_in_the_sequence(group, shared, left, right):
    draw = random.Random(f"{left} {right}")
    rules = {"right": right >= 0, "left": left >= 0, "packed": True, "lengths_q": True, "lengths_k": True}
    variant = Variant(TILES["128"], "bf16", 128, 1, 128, heads=shared, **rules)
    for _ in range(6 if shared == 1 else 2):
        heads, sequences, shares = 2 * group, draw.randint(1, 4), 2 * -(-group // shared)
        lengths_q, lengths_k = ([draw.choice([0, 1, 100, 128, 300]) for _ in range(sequences)] for _ in range(2))
        used_q, used_k = ([draw.choice([0, n // 2, n, n]) for n in lengths] for lengths in (lengths_q, lengths_k))
        tiles, total_q, total_k = _records(lengths_q, lengths_k, used_q, used_k, variant.queries, draw.choice([0, 5, 130]))
        p = _problem(1, heads, total_q, total_k, variant, left, right, [], [], draw.choice([1, 2, 4]))
        p.records_ptr = _Pointer([x for record in tiles for x in record])
        p.row_blocks, p.tiles, p.group = len(tiles), len(tiles) * shares, group
        written = []
        for number in range(p.tiles):
            t = _FOUND["find_tile"](variant, p, number)
            sequence, head = divmod(t.batch_head, heads)
            assert head % group % shared == 0
            end = min(t.row + variant.queries, t.rows_stop)
            written += [(h, i) for h in range(head, min(head + shared, head - head % group + group)) for i in range(t.row, end)]
            first_q, first_k = sum(lengths_q[:sequence]), sum(lengths_k[:sequence])
            assert t.blocks >= 1
            for i in range(t.row, end, 7):
                real = i < t.rows_end
                assert real == (i - first_q < used_q[sequence] and i < sum(lengths_q))
                found = set()
                for block in range(t.last_block - t.blocks + 1, t.last_block + 1):
                    batch, key_head, start, _ = _FOUND["key_coordinates"](variant, p, t, block, 0)
                    assert (batch, key_head) == (0, head // group)
                    for x in range(variant.block_n):
                        at = block * variant.block_n + x
                        ok = at < t.keys_end and (right < 0 or at < i + t.shift + right + 1) and (left < 0 or at >= i + t.shift - left)
                        found |= {start + x - first_k} if ok else set()
                if real:
                    lengths = used_q[sequence], used_k[sequence]
                    assert found == {j for j in range(lengths_k[sequence]) if _visible(i - first_q, j, left, right, *lengths)}
        assert sorted(written) == [(head, i) for head in range(heads) for i in range(total_q)]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("block_n", [128, 256])
def test_listed_walk_visits_what_stands_in_the_lists(shared, block_n):
    draw = random.Random(f"{shared} {block_n}")
    variant = Variant(TILES["128"], "bf16", 128, 1, 128, listed=True, log2_list=block_n // 256)
    batch, heads, seqlen_q, seqlen_k = 2, 3, 500, 1400
    p = _problem(batch, heads, seqlen_q, seqlen_k, variant, -1, -1, [], [], 2)
    columns, owners = -(-seqlen_k // block_n), 1 if shared else heads
    p.list_batch, p.list_head, p.partial_width, p.full_width = 0 if shared else owners, 0 if shared else 1, 2, columns
    partial, full, records, expected = [], [], [], {}
    for owner in range(1 if shared else batch * heads):
        rows = draw.sample(range(p.row_blocks), p.row_blocks)
        for row in rows:
            lists = sorted(draw.sample(range(columns), draw.randint(0, 2))), sorted(draw.sample(range(columns), draw.randint(0, columns)))
            records += [row, len(lists[0]), len(lists[1]), _Int(len(partial) // p.partial_width)]
            partial += lists[0] + [-1] * (p.partial_width - len(lists[0]))
            full += lists[1] + [-1] * (p.full_width - len(lists[1]))
            expected[owner, row] = [entry * (block_n // 128) + x for entry in lists[0] + lists[1] for x in range(block_n // 128)]
    p.records_ptr, p.partial_ptr, p.full_ptr = map(_Pointer, (records, partial, full))
    done = set()
    for number in range(p.tiles):
        t = _FOUND["find_tile"](variant, p, number)
        done.add((t.batch_head, t.row))
        lists = _FOUND["lists_of"](variant, p, number)
        assert _FOUND["listed_block"](variant, lists, t.blocks + 1) <= 1  # read ahead: nothing outside the lists
        visited = [_FOUND["listed_block"](variant, lists, j) for j in range(t.blocks)]
        want = expected[0 if shared else t.batch_head, t.row // variant.block_m]
        assert visited == (want or [0])
        assert t.keys_end == (seqlen_k if want else 0) and t.rows_stop == seqlen_q and t.origin == 0
    assert len(done) == p.tiles
