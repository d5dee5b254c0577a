"""The loading and adding warps of the Hopper backward kernel, run as plain Python threads beside a stand-in for those that compute."""

from __future__ import annotations

import itertools
import random
import threading
import types
from collections import Counter, defaultdict
from typing import Any

import pytest

pytest.importorskip("triton")

from tilewise.kernels.hopper import backward_transfers
from tilewise.kernels.hopper.backward_configs import TILES, BackwardVariant

from .test_hopper_backward_walk import _FOUND
from .test_hopper_walk import _GL

PATIENCE = 20.0  # seconds, in which no barrier can fail to complete unless the roles wait for each other


class Barriers:
    """Shared-memory barriers: arrivals and bytes still to come, and the phase under way."""

    def __init__(self, counts: dict[int, int]) -> None:
        self.counts, self.left = counts, dict(counts)
        self.bytes: dict[int, int] = defaultdict(int)
        self.phase: dict[int, int] = defaultdict(int)
        self.changed = threading.Condition()

    def change(self, number: int, arrivals: int = 0, more_bytes: int = 0) -> None:
        with self.changed:
            self.left[number] -= arrivals
            self.bytes[number] += more_bytes
            assert self.left[number] >= 0, f"barrier {number} has too many arrivals"
            if self.left[number] == 0 and self.bytes[number] == 0:
                self.left[number] = self.counts[number]
                self.phase[number] ^= 1
                self.changed.notify_all()

    def wait(self, address: int, parity: int) -> None:
        with self.changed:
            done = self.changed.wait_for(lambda: self.phase[address // 8] != parity, PATIENCE)
        assert done, f"nobody completes phase {parity} of barrier {address // 8}"


class Buffer:
    """A tile in shared memory: what it holds."""

    content: Any = None


class Turns(dict[int, int]):
    """How many have told about each block of dQ. CTAs run one after the other here, so nobody has to wait for one that was launched before
    it: who would has waited for a later one."""

    def waited_for(self, block: int, turn: int) -> None:
        assert self.get(block, 0) == turn, f"block {block} waits for turn {turn}, which a later CTA gives"

    def give(self, block: int, _: int) -> None:
        self[block] = self.get(block, 0) + 1


def simulate(c: BackwardVariant, p: types.SimpleNamespace, program: int, turns: Turns) -> list[list[tuple]]:
    """Run one CTA; returns the tiles of dQ that each adding warp added or stored, in its order."""
    counts = {c.q_full + s: 1 for s in range(c.stages)} | {c.q_empty + s: 2 for s in range(c.stages)}
    counts |= {c.do_full + s: 1 for s in range(c.do_stages)} | {c.do_empty + s: 2 for s in range(c.do_stages)}
    counts |= {c.dq_full: 8, c.dq_full + 1: 8, c.dq_empty: 1}
    assert len(counts) == c.row_slot, "numbers of barriers overlap"
    bars = Barriers(counts)

    def ring(size: int) -> types.SimpleNamespace:
        tiles = [Buffer() for _ in range(size)]
        return types.SimpleNamespace(index=lambda slot: tiles[slot], tiles=tiles)

    rings = {name: ring(size) for name, size in zip(("q", "lse"), (c.stages,) * 2, strict=True)}
    rings |= {name: ring(c.do_stages) for name in ("do", "delta")}
    mem = types.SimpleNamespace(**rings, k=Buffer(), v=Buffer(), dq=Buffer(), barriers=types.SimpleNamespace(index=lambda number: number))
    size = {"q": c.q_bytes, "do": c.do_bytes, "k": c.k_bytes, "v": c.v_bytes, "lse": c.row_bytes, "delta": c.row_bytes}
    desc = types.SimpleNamespace(**{name: (name, n) for name, n in size.items()}, dq="dq")
    added: list[list[tuple]] = [[], []]
    mine = threading.local()

    def tma_load(source, at, barrier, buffer):
        buffer.content = tuple(at)
        bars.change(barrier, more_bytes=-source[1])

    def tma_reduce_add(_, at, buffer):
        assert not c.order or tuple(at) in p.stored, "added to what nobody has cleared or stored"
        added[mine.warp].append((tuple(at), buffer.content))

    def tma_store(_, at, buffer):
        assert c.order and tuple(at) not in p.stored
        p.stored.add(tuple(at))
        added[mine.warp].append((tuple(at), buffer.content))

    scope = {
        **vars(backward_transfers),
        **{name: _FOUND[name] for name in ("find_keys", "row_of", "first_key_block", "outer_visits", "inner_visits", "visited")},
        "key_coordinates": _FOUND["key_coordinates"],
        "gl": types.SimpleNamespace(**{**vars(_GL), "program_id": lambda _: program}),
        "shared_address": lambda *_: 0,
        "phase_of": lambda count, stages: count // stages & 1,
        "stage_of": lambda count, stages: count % stages,
        "wait": bars.wait,
        "expect_bytes": lambda barrier, n: bars.change(barrier, arrivals=1, more_bytes=n),
        "tma_load": tma_load,
        "tma_reduce_add": tma_reduce_add,
        "tma_store": tma_store,
        "await_turn": turns.waited_for,
        "give_turn": turns.give,
        "tma_store_wait": lambda _: None,
        "arrive_each_warp": lambda address: bars.change(address // 8, arrivals=1),
        "query_coordinates": lambda c, tile, head, block: ("rows", tile.batch, head, block),
    }
    for name in ("load_tiles", "dq_coordinates", "add_queries"):
        scope[name] = types.FunctionType(getattr(backward_transfers, name).fn.__code__, scope, name)

    def compute() -> None:
        """What `backward_pass.compute` waits for and gives back, in its order."""
        tile = _FOUND["find_keys"](c, p, program)
        keys = (tile.batch, tile.head_k // p.sharing, tile.key, 0)
        for count, (head, block) in enumerate(visits(c, p, tile)):
            row = _FOUND["row_of"](c, p, tile, head, block)
            stage, do_stage = count % c.stages, count % c.do_stages
            bars.wait(8 * (c.q_full + stage), count // c.stages & 1)
            assert mem.k.content == keys  # S
            bars.wait(8 * (c.do_full + do_stage), count // c.do_stages & 1)
            rows = ("rows", tile.batch, head, block)
            assert (mem.q.tiles[stage].content, mem.do.tiles[do_stage].content) == (rows, rows)
            assert (mem.lse.tiles[stage].content, mem.delta.tiles[do_stage].content) == ((row,), (row,))
            assert mem.v.content == keys  # dP
            bars.change(c.do_empty + do_stage, arrivals=2)
            bars.wait(8 * c.dq_empty, count & 1 ^ 1)
            mem.dq.content = rows
            bars.change(c.dq_full + (count & 1), arrivals=8)
            bars.change(c.q_empty + stage, arrivals=2)

    failed: list[BaseException] = []

    def role(run, *arguments) -> None:
        try:
            run(*arguments)
        except BaseException as error:
            failed.append(error)

    def add(warp: int) -> None:
        mine.warp = warp
        scope["add_queries"](c, 0, p, desc, mem, warp)

    threads = [
        threading.Thread(target=role, args=one) for one in ((scope["load_tiles"], c, 0, p, desc, mem), (compute,), (add, 0), (add, 1))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return added


def visits(c: BackwardVariant, p: types.SimpleNamespace, tile: Any) -> list[tuple[int, int]]:
    """(query head, block) of a tile: the blocks from the last one back, of each head or for all heads at once."""
    heads, blocks = [tile.head_k * p.group + g for g in range(p.group)], [tile.last_block - j for j in range(tile.blocks)]
    if c.heads_inside:
        return [(head, block) for block in blocks for head in heads]
    return list(itertools.product(heads, blocks))


@pytest.mark.parametrize(
    "tile, terms",
    [("64", {}), ("128", {}), ("128", {"alibi": True}), ("64", {"apart": True}), ("128", {"apart": True, "alibi": True})],
    ids=["d64", "d128", "heads apart", "tiles apart", "tiles apart, a loop over one head"],
)
@pytest.mark.parametrize("order", ["", "first", "all"])
def test_roles_agree_over_all_visits_of_a_tile(tile, terms, order):
    """And with an order the first tile that visits a block of queries stores its dQ, before any other adds to it."""
    rng = random.Random(3)
    for group, seqlen_q, _ in itertools.product((1, 2, 3), (1, 200, 513), range(2)):
        batch, heads_k, seqlen_k, right = rng.randint(2, 3), rng.randint(1, 3), rng.choice([60, 300, 640]), rng.choice([-1, 0, 90])
        sharing = group if terms.get("apart") else 1
        heads_k, group = heads_k * sharing, group // sharing
        grouped = group > 1 or (sharing > 1 and "alibi" in terms)
        c = BackwardVariant(TILES[tile], "bf16", 128 if tile == "128" else 64, 64, right=right >= 0, grouped=grouped, order=order, **terms)
        assert c.heads_inside == (grouped and not terms)
        key_tiles = -(-seqlen_k // c.block_n)
        p = types.SimpleNamespace(
            seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_k=heads_k, group=group, sharing=sharing, records_ptr=None,
            head_group=rng.choice([1, 2, 5]), batch_heads=batch * heads_k, row_blocks=-(-seqlen_q // 128) * 128 // c.block_m,
            key_tiles=key_tiles, window_left=-1, window_right=right, turns_ptr=0, stored=set(),
        )  # fmt: skip
        turns, adders = Turns(), Counter()
        for program in range(key_tiles * batch * heads_k):
            first, second = simulate(c, p, program, turns)
            adders.update(at for at, _ in first + second)
            tile_of_keys = _FOUND["find_keys"](c, p, program)
            expected = []
            for head, block in visits(c, p, tile_of_keys):
                row = _FOUND["row_of"](c, p, tile_of_keys, head, block)
                at = (row * (c.dim // 32), 0) if c.lanes else (row, 0)
                expected.append((at, ("rows", tile_of_keys.batch, head, block)))
            assert (first, second) == (expected[::2], expected[1::2])
        told = {"": [], "first": [1] * len(adders), "all": sorted(adders.values())}
        assert sorted(turns.values()) == told[order]
