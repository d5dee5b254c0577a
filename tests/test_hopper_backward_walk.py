"""The walk of the Hopper backward kernel, run as plain Python: every visible pair once, masks where needed, a complete order."""

from __future__ import annotations

import itertools
import random
import types
from collections import defaultdict, namedtuple

import pytest

pytest.importorskip("triton")

from tilewise.kernels.hopper import backward_walk, walk
from tilewise.kernels.hopper.backward_configs import TILES, BackwardVariant

from .test_hopper_walk import _GL, _Int, _Pointer, _visible

_FIELDS = "batch sequence head_k block key keys_end rows_end shift last_block blocks first_q first_k rows_k first_block record_ptr"
_Tile = namedtuple("_Tile", _FIELDS)
_FOUND: dict = {}
_NAMES = ("find_keys", "seen_rows", "seen_keys", "plain_blocks", "first_key_block", "is_cut", "row_of", "lists_of", "blocks_of_head")
_NAMES += ("outer_visits", "inner_visits", "visited", "bias_place", "key_coordinates", "key_sums_place")
for _name in (*_NAMES, "listed_block"):
    _body = getattr(walk if _name == "listed_block" else backward_walk, _name).fn
    _globals = {
        **vars(backward_walk),
        "gl": _GL,
        "blocks_of_head": lambda c, tile, g: _FOUND["blocks_of_head"](c, tile, g),
        "KeyTile": _Tile,
        "divide": lambda a, b: a // b,
        "uniform": lambda x: x,
    }
    _FOUND[_name] = types.FunctionType(_body.__code__, _globals, _name)


def _cases(count):
    rng = random.Random(1)
    for number in range(count):
        batch, heads_k = rng.randint(1, 3), rng.randint(1, 3)
        seqlen_q, seqlen_k = rng.choice([1, 7, 128, 200, 513]), rng.choice([1, 60, 128, 300, 640])
        left, right = rng.choice([-1, 0, 5, 100, 400]), rng.choice([-1, 0, 3, 90])
        lengths_q = [rng.randint(0, seqlen_q) for _ in range(batch)] if number % 3 == 0 else None
        lengths_k = [rng.randint(0, seqlen_k) for _ in range(batch)] if number % 4 < 2 else None
        yield batch, heads_k, seqlen_q, seqlen_k, left, right, lengths_q, lengths_k, rng.choice([1, 2, 5])


@pytest.mark.parametrize("tile", ["64", "128", "256"])
def test_every_visible_pair_is_visited_once_and_in_order(tile):
    for batch, heads_k, seqlen_q, seqlen_k, left, right, lengths_q, lengths_k, head_group in _cases(60):
        c = BackwardVariant(
            TILES[tile], "bf16", 64, 64, right >= 0, left >= 0, lengths_q=lengths_q is not None, lengths_k=lengths_k is not None
        )
        m, n = c.block_m, c.block_n
        p = types.SimpleNamespace(
            lengths_q_ptr=_Pointer(lengths_q), lengths_k_ptr=_Pointer(lengths_k), seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_k=heads_k,
            records_ptr=None, head_group=head_group, batch_heads=batch * heads_k, row_blocks=-(-seqlen_q // 128) * 128 // m,
            key_tiles=-(-seqlen_k // n), window_left=left, window_right=right,
        )  # fmt: skip
        key_blocks = -(-seqlen_k // n)
        tiles, turns, launched = set(), defaultdict(list), {}
        for number in range(key_blocks * batch * heads_k):
            t = _FOUND["find_keys"](c, p, number)
            tiles.add((t.batch, t.head_k, t.block))
            launched[t.batch, t.head_k, t.block] = number
            length_q = seqlen_q if lengths_q is None else lengths_q[t.batch]
            length_k = seqlen_k if lengths_k is None else lengths_k[t.batch]
            visited = range(t.last_block, t.last_block - t.blocks, -1)
            plain_first, plain_end = _FOUND["plain_blocks"](c, p, t)
            rows, keys = _FOUND["seen_rows"](c, p, t), _FOUND["seen_keys"](c, p, t)
            for block in range(p.row_blocks):
                pairs = [
                    (i, j) for i in range(block * m, min(block * m + m, length_q), 9) for j in range(t.key, min(t.key + n, seqlen_k), 7)
                ]
                seen = [_visible(i, j, left, right, length_q, length_k) for i, j in pairs]
                assert block in visited or not any(seen)
                if block not in visited:
                    continue
                if not _FOUND["is_cut"](block, plain_first, plain_end):
                    assert all(seen)
                for (i, j), one in zip(pairs, seen, strict=True):
                    assert not one or (rows[0] <= i < rows[1] and keys[0] <= j < keys[1])
                turn = t.block - _FOUND["first_key_block"](c, p, t, block)
                turns[t.batch, t.head_k, block].append((turn, launched[t.batch, t.head_k, t.block]))
        assert len(tiles) == key_blocks * batch * heads_k
        for taken in turns.values():
            # No turn is missing, and each waits only for CTAs that were launched before it.
            assert [turn for turn, _ in taken] == list(range(len(taken)))
            assert [number for _, number in taken] == sorted(number for _, number in taken)


@pytest.mark.parametrize("tile", ["64", "128"])
def test_hidden_rows_and_keys_are_exactly_those_that_nothing_sees(tile):
    for batch, heads_k, seqlen_q, seqlen_k, left, right, lengths_q, lengths_k, _ in _cases(40):
        c = BackwardVariant(
            TILES[tile], "bf16", 64, 64, right >= 0, left >= 0, lengths_q=lengths_q is not None, lengths_k=lengths_k is not None
        )
        p = types.SimpleNamespace(
            lengths_q_ptr=_Pointer(lengths_q), lengths_k_ptr=_Pointer(lengths_k), seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_k=heads_k,
            records_ptr=None, head_group=1, batch_heads=batch * heads_k, row_blocks=-(-seqlen_q // 128) * 128 // c.block_m,
            key_tiles=-(-seqlen_k // c.block_n), window_left=left, window_right=right,
        )  # fmt: skip
        t = _FOUND["find_keys"](c, p, 0)
        length_q = seqlen_q if lengths_q is None else lengths_q[0]
        length_k = seqlen_k if lengths_k is None else lengths_k[0]
        if length_q == 0 or length_k == 0:
            continue
        rows, keys = _FOUND["seen_rows"](c, p, t), _FOUND["seen_keys"](c, p, t)
        for i in {0, length_q - 1, rows[0] - 1, rows[0], rows[1] - 1} & set(range(length_q)):
            sees = any(_visible(i, j, left, right, length_q, length_k) for j in range(length_k))
            assert sees == (rows[0] <= i < rows[1])
        for j in {0, length_k - 1, keys[0] - 1, keys[0], keys[1] - 1} & set(range(length_k)):
            seen = any(_visible(i, j, left, right, length_q, length_k) for i in range(length_q))
            assert seen == (keys[0] <= j < keys[1])


@pytest.mark.parametrize("tile, terms", [("64", {}), ("128", {"alibi": True, "grouped": True}), ("256", {})], ids=["64", "alibi", "256"])
def test_tiles_apart_are_those_of_calls_without_groups(tile, terms):
    """Each tile of keys once for every query head, in the order of as many key heads, with the keys and sums of the shared head."""
    batch, heads_k, sharing, seqlen_q, seqlen_k = 2, 3, 4, 300, 640
    c = BackwardVariant(TILES[tile], "bf16", 64, 64, right=True, apart=True, **terms)
    key_tiles, heads = -(-seqlen_k // c.block_n), heads_k * sharing
    p = types.SimpleNamespace(
        seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_k=heads, group=1, sharing=sharing, records_ptr=None, key_sums_ptr=0, head_group=5,
        batch_heads=batch * heads, row_blocks=-(-seqlen_q // 128) * 128 // c.block_m, key_tiles=_Int(key_tiles), window_left=-1,
        window_right=0,
    )  # fmt: skip
    alone = BackwardVariant(TILES[tile], "bf16", 64, 64, right=True, **terms)
    visits, sums = [], defaultdict(list)
    for number in range(key_tiles * batch * heads):
        t = _FOUND["find_keys"](c, p, number)
        assert t == _FOUND["find_keys"](alone, p, number)
        for outer in range(_FOUND["outer_visits"](c, p, t)):
            for inner in range(_FOUND["inner_visits"](c, p, t, outer)):
                head, block = _FOUND["visited"](c, p, t, outer, inner)
                visits.append((t.batch, head, t.block, block))
        assert _FOUND["key_coordinates"](c, p, t) == (t.batch, t.head_k // sharing, t.key, 0)
        sums[_FOUND["key_sums_place"](c, p, t)].append((t.batch, t.head_k // sharing, t.block))
    first_rows = [max(0, block * c.block_n - (seqlen_k - seqlen_q)) for block in range(key_tiles)]
    assert sorted(visits) == [
        (b, head, key_block, block)
        for b, head, key_block in itertools.product(range(batch), range(heads), range(key_tiles))
        for block in range(first_rows[key_block] // c.block_m, -(-seqlen_q // c.block_m))
    ]
    assert sorted(sums) == [number * c.key_numbers for number in range(batch * heads_k * key_tiles)]
    assert all(len(owners) == sharing and len(set(owners)) == 1 for owners in sums.values())
    assert len({owners[0] for owners in sums.values()}) == len(sums)


@pytest.mark.parametrize("heads_first", [True, False])
def test_items_that_share_a_bias_follow_one_another(heads_first):
    """Two launches, of the first item and of the rest, visit every tile once; a tile of keys goes to all items before the next one's."""
    batch, heads_k, seqlen_k, group = 3, 4, 640, 1 if heads_first else 2
    c = BackwardVariant(TILES["64 featured"], "bf16", 64, 64, bias="tma", bias_gradient="added", heads_first=heads_first)
    key_tiles, row_blocks, size = -(-seqlen_k // c.block_n), 4, c.block_m * c.block_n
    items, others = (batch, heads_k) if heads_first else (heads_k, batch)
    per_head = key_tiles * row_blocks * size
    strides = (0, per_head) if heads_first else (per_head, 0)
    sums = types.SimpleNamespace(ptr=0, stride_b=strides[0], stride_h=strides[1], stride_m=row_blocks)
    places, tiles = defaultdict(int), set()
    for first_item, share in ((0, 1), (1, items - 1)):
        p = types.SimpleNamespace(
            lengths_q_ptr=None, lengths_k_ptr=None, seqlen_q=200, seqlen_k=seqlen_k, heads_k=heads_k, records_ptr=None, head_group=share,
            batch_heads=share * others, row_blocks=row_blocks, key_tiles=key_tiles, window_left=-1, window_right=-1, items=share,
            first_item=first_item, group=group, dbias=sums,
        )  # fmt: skip
        found = [_FOUND["find_keys"](c, p, number) for number in range(key_tiles * share * others)]
        tiles |= {(t.batch, t.head_k, t.block) for t in found}
        for start in range(0, len(found), share):  # a section is one of the others
            same = {(t.head_k if heads_first else t.batch, t.block) for t in found[start : start + share]}
            assert len(same) == 1
        for t in found:
            for g, block in itertools.product(range(group), range(t.last_block + 1)):
                places[_FOUND["bias_place"](c, p, _as_numbers(t), _Int(t.head_k * group + g), block)] += 1
    assert len(tiles) == batch * heads_k * key_tiles
    assert len(places) == others * key_tiles * row_blocks and set(places.values()) == {items * group}
    assert all(place % size == 0 and 0 <= place < others * per_head for place in places)


def _as_numbers(tile):
    return tile._replace(batch=_Int(tile.batch), block=_Int(tile.block))


def _packed_cases(count):
    rng = random.Random(2)
    for _ in range(count):
        lengths = [[rng.choice([0, 1, 60, 64, 128, 200, 333]) for _ in range(rng.randint(1, 5))] for _ in range(2)]
        rows_q, rows_k = (side[: min(map(len, lengths))] for side in lengths)
        used = [[rng.randint(0, n) if rng.random() < 0.3 else n for n in side] for side in (rows_q, rows_k)]
        yield rows_q, rows_k, *used, rng.choice([-1, 0, 100]), rng.choice([-1, 0, 3]), rng.randint(0, 9), rng.randint(1, 3)


@pytest.mark.parametrize("tile", ["64", "128", "256"])
def test_every_visible_pair_of_packed_sequences_is_visited_once_and_in_order(tile):
    for rows_q, rows_k, used_q, used_k, left, right, before, heads_k in _packed_cases(15):
        c = BackwardVariant(TILES[tile], "bf16", 64, 64, right >= 0, left >= 0, packed=True)
        m, n = c.block_m, c.block_n
        first_q, first_k = ([before + sum(rows[:b]) for b in range(len(rows))] for rows in (rows_q, rows_k))
        records, slots = [], (before + sum(rows_k)) // n + len(rows_k) + 2
        for b in sorted(range(len(rows_q)), key=lambda b, used_q=used_q: -used_q[b]):
            for key in range(0, rows_k[b], n):
                records += [b, key, first_q[b], rows_q[b], used_q[b], first_k[b], rows_k[b], used_k[b]]
        records += [-1, n, 0, 0, 0, 0, 0, 0] * (slots - len(records) // 8)
        p = types.SimpleNamespace(
            records_ptr=_Pointer(records), seqlen_q=before + sum(rows_q), seqlen_k=before + sum(rows_k), heads_k=heads_k, group=1,
            head_group=2, batch_heads=heads_k, row_blocks=(before + sum(rows_q)) // m + len(rows_q), key_tiles=slots, window_left=left,
            window_right=right,
        )  # fmt: skip
        owners, pairs, turns = {}, defaultdict(int), defaultdict(list)
        for number in range(slots * heads_k):
            t = _FOUND["find_keys"](c, p, number)
            plain_first, plain_end = _FOUND["plain_blocks"](c, p, t)
            for block in range(t.last_block, t.last_block - t.blocks, -1):
                row = _FOUND["row_of"](c, p, t, t.head_k, block)
                assert 0 <= row < heads_k * p.row_blocks * m
                assert owners.setdefault(row, (t.sequence, t.head_k, block)) == (t.sequence, t.head_k, block)
                turns[row].append(t.block - _FOUND["first_key_block"](c, p, t, block))
                for i in range(block * m, min(block * m + m, used_q[t.sequence]), 9):
                    for j in range(t.key, min(t.key + n, t.keys_end), 7):
                        if _visible(i, j, left, right, used_q[t.sequence], used_k[t.sequence]):
                            pairs[t.sequence, t.head_k, t.first_q + i, t.first_k + j] += 1
                        else:
                            assert _FOUND["is_cut"](block, plain_first, plain_end)
        assert all(taken == list(range(len(taken))) for taken in turns.values())
        want = {
            (b, h, first_q[b] + i, first_k[b] + j): 1
            for b in range(len(rows_q))
            for h in range(heads_k)
            for start in range(0, used_q[b], m)
            for i in range(start, min(start + m, used_q[b]), 9)
            for key in range(0, used_k[b], n)
            for j in range(key, min(key + n, used_k[b]), 7)
            if _visible(i, j, left, right, used_q[b], used_k[b])
        }
        assert pairs == want


@pytest.mark.parametrize("tile, block_m, causal", [("128", 128, False), ("128", 128, True), ("64", 256, False), ("256", 128, True)])
def test_listed_walk_visits_what_stands_in_the_lists(tile, block_m, causal):
    """Every query head's own blocks once, in the order of its lists, and each row of dQ leads back to its block."""
    draw = random.Random(f"{tile} {block_m}")
    batch, heads_k, group = 2, 2, 2
    c = BackwardVariant(TILES[tile], "bf16", 64, 64, right=causal, listed=True, log2_list=(block_m // TILES[tile].block_m).bit_length() - 1)
    m, n = c.block_m, c.block_n
    seqlen_q, seqlen_k = 500, 884  # 3 * 128 apart
    rows, tiles = -(-seqlen_q // block_m), -(-seqlen_k // n)
    partial, full, records, expected = [], [], [], {}
    for b, head_k in itertools.product(range(batch), range(heads_k)):
        for number in draw.sample(range(tiles), tiles):
            seen = range(max(0, number * n // 128 - 3) if causal else 0, rows)
            fields = []
            for g in range(group):
                chosen = [sorted(draw.sample(seen, draw.randint(0, len(seen)))) for _ in range(2)]
                fields += [len(chosen[0]), len(chosen[1]), len(partial), len(full)]
                partial, full = partial + chosen[0], full + chosen[1]
                expected[b, head_k * group + g, number] = [
                    entry * (block_m // m) + x for entry in chosen[0] + chosen[1] for x in range(block_m // m)
                ]
            records += [_Int(number), sum(fields[0::4]) + sum(fields[1::4]), *fields]
    p = types.SimpleNamespace(
        records_ptr=_Pointer(records), partial_ptr=_Pointer(partial), full_ptr=_Pointer(full), seqlen_q=seqlen_q, seqlen_k=seqlen_k,
        heads_k=heads_k, group=group, head_group=3, batch_heads=batch * heads_k, row_blocks=rows * block_m // m, key_tiles=_Int(tiles),
        window_left=-1, window_right=0 if causal else -1,
    )  # fmt: skip
    found = {}
    for number in range(tiles * batch * heads_k):
        t = _FOUND["find_keys"](c, p, number)
        plain_first, plain_end = _FOUND["plain_blocks"](c, p, t)
        total = 0
        for g in range(group):
            head, blocks = t.head_k * group + g, _FOUND["blocks_of_head"](c, t, g)
            lists = _FOUND["lists_of"](p, t, g)
            visited = [_FOUND["listed_block"](c, lists, j) for j in range(blocks)]
            assert _FOUND["listed_block"](c, lists, blocks) <= 1  # read ahead: nothing outside the lists
            found[t.batch, head, t.block] = visited
            total += blocks
            first_row = _FOUND["row_of"](c, p, t, head, 0)
            for block in visited:
                row = _FOUND["row_of"](c, p, t, head, block)
                assert first_row <= row < first_row + p.row_blocks * m and (row - first_row) >> c.log2_block_m == block
                pairs = [(i, j) for i in range(block * m, min(block * m + m, seqlen_q), 9) for j in range(t.key, t.key + n, 7)]
                seen = [_visible(i, j, -1, p.window_right, seqlen_q, seqlen_k) for i, j in pairs]
                assert _FOUND["is_cut"](block, plain_first, plain_end) or all(seen)
        assert t.blocks == total and t.key == t.block * n
    assert found == expected
