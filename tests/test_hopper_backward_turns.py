"""The loading and adding warps of the Hopper backward kernel, run as plain Python threads beside a stand-in for those that compute."""

from __future__ import annotations

import itertools
import random
import threading
import time
import types
from collections import defaultdict
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


def simulate(c: BackwardVariant, p: types.SimpleNamespace, program: int) -> list[list[tuple]]:
    """Run one CTA; returns the tiles of dQ that each adding warp added, in its order."""
    counts = {c.k_full + s: 1 for s in range(c.key_stages)} | {c.v_full + s: 1 for s in range(c.key_stages)}
    counts |= {c.keys_empty + s: 1 for s in range(c.key_stages)} if c.turns else {}
    counts |= {c.q_full + s: 1 for s in range(c.stages)} | {c.q_empty + s: 2 for s in range(c.stages)}
    counts |= {c.do_full + s: 1 for s in range(c.do_stages)} | {c.do_empty + s: 2 for s in range(c.do_stages)}
    counts |= {c.dq_full: 8, c.dq_full + 1: 8, c.dq_empty: 1}
    assert len(counts) == c.row_slot, "numbers of barriers overlap"
    bars = Barriers(counts)

    def ring(size: int) -> types.SimpleNamespace:
        tiles = [Buffer() for _ in range(size)]
        return types.SimpleNamespace(index=lambda slot: tiles[slot], tiles=tiles)

    rings = {name: ring(size) for name, size in zip(("q", "lse"), (c.stages,) * 2, strict=True)}
    rings |= {name: ring(c.do_stages) for name in ("do", "delta")} | {name: ring(c.key_stages) for name in "kv"}
    mem = types.SimpleNamespace(**rings, dq=Buffer(), barriers=types.SimpleNamespace(index=lambda number: number))
    size = {"q": c.q_bytes, "do": c.do_bytes, "k": c.k_bytes, "v": c.v_bytes, "lse": c.row_bytes, "delta": c.row_bytes}
    desc = types.SimpleNamespace(**{name: (name, n) for name, n in size.items()}, dq="dq")
    added: list[list[tuple]] = [[], []]
    mine = threading.local()

    def tma_load(source, at, barrier, buffer):
        buffer.content = tuple(at)
        bars.change(barrier, more_bytes=-source[1])

    def tma_reduce_add(_, at, buffer):
        added[mine.warp].append((tuple(at), buffer.content))

    scope = {
        **vars(backward_transfers),
        **{name: _FOUND[name] for name in ("find_keys", "blocks_of_head", "row_of", "first_key_block")},
        "gl": types.SimpleNamespace(**{**vars(_GL), "program_id": lambda _: program}),
        "shared_address": lambda *_: 0,
        "phase_of": lambda count, stages: count // stages & 1,
        "stage_of": lambda count, stages: count % stages,
        "wait": bars.wait,
        "expect_bytes": lambda barrier, n: bars.change(barrier, arrivals=1, more_bytes=n),
        "tma_load": tma_load,
        "tma_reduce_add": tma_reduce_add,
        "tma_store_wait": lambda _: None,
        "arrive_each_warp": lambda address: bars.change(address // 8, arrivals=1),
        "query_coordinates": lambda c, tile, head, block: ("rows", tile.batch, head, block),
        "key_coordinates": lambda _, tile: ("keys", tile.batch, tile.head_k, tile.block),
    }
    for name in ("load_tile", "load_tiles", "dq_coordinates", "add_tile", "add_queries"):
        scope[name] = types.FunctionType(getattr(backward_transfers, name).fn.__code__, scope, name)

    def compute() -> None:
        """What `backward_pass.compute` waits for and gives back, in its order."""
        count = 0
        for turn, number in enumerate(range(program, p.all_tiles, p.programs)):
            tile, slot, phase = _FOUND["find_keys"](c, p, number), turn % c.key_stages, turn // c.key_stages & 1
            keys = ("keys", tile.batch, tile.head_k, tile.block)
            bars.wait(8 * (c.k_full + slot), phase)
            bars.wait(8 * (c.v_full + slot), phase)
            for g, j in itertools.product(range(p.group), range(tile.blocks)):
                head, block = tile.head_k * p.group + g, tile.last_block - j
                row = _FOUND["row_of"](c, p, tile, head, block)
                stage, do_stage = count % c.stages, count % c.do_stages
                bars.wait(8 * (c.q_full + stage), count // c.stages & 1)
                bars.wait(8 * (c.do_full + do_stage), count // c.do_stages & 1)
                rows = ("rows", tile.batch, head, block)
                assert (mem.q.tiles[stage].content, mem.do.tiles[do_stage].content) == (rows, rows)
                assert (mem.lse.tiles[stage].content, mem.delta.tiles[do_stage].content) == ((row,), (row,))
                assert mem.k.tiles[slot].content == mem.v.tiles[slot].content == keys
                bars.change(c.do_empty + do_stage, arrivals=2)
                bars.wait(8 * c.dq_empty, count & 1 ^ 1)
                mem.dq.content = rows
                bars.change(c.dq_full + (count & 1), arrivals=8)
                bars.change(c.q_empty + stage, arrivals=2)
                count += 1
            time.sleep(0.001)  # whoever does not wait overwrites
            assert mem.k.tiles[slot].content == mem.v.tiles[slot].content == keys  # dK and dV leave through them
            if c.turns:
                bars.change(c.keys_empty + slot, arrivals=1)

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


@pytest.mark.parametrize("tile", ["64 in turns", "64", "128"])
def test_roles_agree_over_all_tiles_of_a_cta(tile):
    rng = random.Random(3)
    for group, seqlen_q, most in itertools.product((1, 3), (1, 200, 513), (1, 2, 5)):
        batch, heads_k, seqlen_k, right = rng.randint(2, 3), rng.randint(1, 3), rng.choice([60, 300, 640]), rng.choice([-1, 0, 90])
        c = BackwardVariant(TILES[tile], "bf16", TILES[tile].block_n if tile == "128" else 64, 64, right=right >= 0)
        key_tiles = -(-seqlen_k // c.block_n)
        all_tiles = key_tiles * batch * heads_k
        programs = min(all_tiles, most) if c.turns else all_tiles
        p = types.SimpleNamespace(
            seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_k=heads_k, group=group, records_ptr=None, head_group=rng.choice([1, 2, 5]),
            batch_heads=batch * heads_k, row_blocks=-(-seqlen_q // 128) * 128 // c.block_m, key_tiles=key_tiles, all_tiles=all_tiles,
            programs=programs, window_left=-1, window_right=right,
        )  # fmt: skip
        seen = []
        for program in range(programs):
            first, second = simulate(c, p, program)
            assert 0 <= len(first) - len(second) <= 1, "the warps take turns"
            seen += first + second
        expected = []
        for number in range(all_tiles):
            t = _FOUND["find_keys"](c, p, number)
            for g, j in itertools.product(range(group), range(t.blocks)):
                head, block = t.head_k * group + g, t.last_block - j
                line = _FOUND["row_of"](c, p, t, head, block) * (c.dim // 32)
                expected.append(((line, 0), ("rows", t.batch, head, block)))
        assert sorted(seen) == sorted(expected)
