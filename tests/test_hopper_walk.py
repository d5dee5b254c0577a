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

_FIELDS = "batch_head row rows_end origin shift keys_end last_block blocks"
_Tile = namedtuple("_Tile", _FIELDS)
_GL = types.SimpleNamespace(
    minimum=min, maximum=max, where=lambda condition, a, b: a if condition else b, load=lambda pair: pair[0][pair[1]]
)


class _Pointer:
    def __init__(self, values):
        self.values = values

    def __add__(self, offset):
        return self.values, offset


def _python(name):
    """The function of `walk` without its compiler: the same body over Python integers."""
    body = getattr(walk, name).fn
    return types.FunctionType(body.__code__, {**vars(walk), "gl": _GL, "Tile": _Tile, "divide": lambda a, b: a // b, **_FOUND}, name)


_FOUND: dict = {}
for _name in ("split_head", "find_tile", "plain_blocks", "needs_mask"):
    _FOUND[_name] = _python(_name)


def _problem(batch, heads, seqlen_q, seqlen_k, variant, left, right, lengths_q, lengths_k, head_group):
    row_blocks = -(-seqlen_q // variant.block_m)
    return types.SimpleNamespace(
        lengths_q_ptr=_Pointer(lengths_q),
        lengths_k_ptr=_Pointer(lengths_k),
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        heads=heads,
        row_blocks=row_blocks,
        batch_heads=batch * heads,
        tiles=row_blocks * batch * heads,
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
    for _ in range(12):
        batch, heads = draw.randint(1, 2), draw.randint(1, 3)
        seqlen_q, seqlen_k = draw.choice([1, 63, 64, 130, 400]), draw.choice([1, 64, 127, 300, 513])
        lengths_q = [draw.choice([0, 1, seqlen_q // 2, seqlen_q, seqlen_q + 9]) if with_lengths else seqlen_q for _ in range(batch)]
        lengths_k = [draw.choice([0, 1, seqlen_k // 2, seqlen_k, -3]) if with_lengths else seqlen_k for _ in range(batch)]
        variant = Variant(TILES[tile], "bf16", 64, 1, 64, right=right >= 0, left=left >= 0, lengths_q=with_lengths, lengths_k=with_lengths)
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
            first, end = t.last_block - t.blocks + 1, t.last_block + 1
            if with_lengths and t.row >= len_q:
                continue
            for warpgroup in range(variant.warpgroups):
                row = t.row + 64 * warpgroup
                plain_first, plain_end = _FOUND["plain_blocks"](variant, p, t, row)
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


def test_hidden_keys_on_the_left_are_never_loaded():
    variant = Variant(TILES["128"], "bf16", 128, 1, 128, right=True, left=True)
    p = _problem(1, 1, 64, 3000, variant, 5, 5, [64], [3000], 1)
    t = _FOUND["find_tile"](variant, p, 0)
    assert t.origin == 3000 - 64 - 5 and t.blocks == 1
