"""Dropout of the Hopper kernels without a GPU: the PTX that draws, run in NumPy, against `kernels.philox`; which calls they take."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tilewise import plan
from tilewise.kernels import hopper
from tilewise.kernels.hopper import launch
from tilewise.kernels.hopper.dropout import OF_KEYS, OF_ROWS, OF_SHARED_KEYS
from tilewise.kernels.philox import keep_mask
from tilewise.plan import Operands, Request, Rules

from .test_hopper_choice import BITS, H200, listed, masks, meta, packed

WORD = np.uint64(0xFFFFFFFF)


def lop3(x: np.ndarray, y: np.ndarray, z: np.ndarray, table: np.ndarray) -> np.ndarray:
    value = np.zeros_like(x)
    for row in range(8):
        if int(table[0]) >> row & 1:
            value |= np.bitwise_and.reduce([v if row >> n & 1 else ~v & WORD for v, n in ((x, 2), (y, 1), (z, 0))])
    return value


def add_floats(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.add(*(v.astype(np.uint32).view(np.float32) for v in (x, y))).view(np.uint32).astype(np.uint64)


# On 32-bit values in unsigned 64-bit integers, one a thread.
OPERATIONS: dict[str, Any] = {
    "mov.b32": lambda x: x,
    "mul.wide.u32": lambda x, y: x * y,
    "mad.lo.u32": lambda x, y, z: x * y + z & WORD,
    "add.u32": lambda x, y: x + y & WORD,
    "and.b32": lambda x, y: x & y,
    "shl.b32": lambda x, y: x << y & WORD,
    "shr.u32": lambda x, y: x >> y,
    "lop3.b32": lop3,
    "prmt.b32": lambda x, y, how: np.where(how == 0x5410, x & np.uint64(0xFFFF) | (y & np.uint64(0xFFFF)) << np.uint64(16), 0),
    "add.f32": add_floats,
    "setp.ge.u32": lambda x, y: (x >= y).astype(np.uint64),
    "setp.ne.u32": lambda x, y: (x != y).astype(np.uint64),
    "selp.b32": lambda x, y, p: np.where(p != 0, x, y),
    "shfl.sync.bfly.b32": lambda x, lane, clamp, members: x[np.arange(len(x)) ^ int(lane[0])],
}


def run_ptx(text: str, operands: list[np.ndarray]) -> np.ndarray:
    """$0 of straight-line PTX, for all threads of some warps at once."""
    registers = {f"${i + 1}": x.astype(np.uint64) for i, x in enumerate(operands)}

    def read(name: str) -> np.ndarray:
        if name in registers:
            return registers[name]
        return np.full_like(registers["$1"], int(name[2:], 16) if name.startswith("0f") else int(name, 0))

    for line in text.strip("{} ").split(";"):
        guard, operation, names = re.fullmatch(r"\s*(@p )?([a-z0-9_.]*) ?(.*)", line).groups()
        result, *sources = re.findall(r"[\w$.]+", names) or [""]
        if operation == "mov.b64":
            registers[result], registers[sources[0]] = read(sources[1]) & WORD, read(sources[1]) >> np.uint64(32)
        elif operation not in ("", ".reg"):
            value = OPERATIONS[operation](*map(read, sources))
            registers[result] = np.where(registers["p"] != 0, value, registers[result]) if guard else value
    return registers["$0"]


@pytest.mark.parametrize("which", ["S", "transposed S", "shared transposed S"])
@pytest.mark.parametrize("seed, dropout_p", [(0x1234_5678_9ABC_DEF0, 0.3), (-7, 0.1), (5, 0.99), (1 << 62, 1e-12)])
def test_every_thread_draws_the_bits_of_what_it_holds(seed: int, dropout_p: float, which: str) -> None:
    text, warps, values = {"S": (OF_ROWS, 4, 32), "transposed S": (OF_KEYS, 8, 32), "shared transposed S": (OF_SHARED_KEYS, 4, 16)}[which]
    transposed, thread = which != "S", np.arange(128 if which == "S" else 256)
    query, key, batch, head = 4096 + 64 * 7, 128 * 5 + 4, 3, 11
    t = Operands(*[torch.empty(0)] * 3, dropout_seed=torch.tensor(seed))
    _, threshold, _ = launch.dropout_arguments(t, Rules(1, dropout_p=dropout_p), 0)
    assert -(1 << 31) <= threshold < 1 << 31
    uniform = (seed, seed >> 32, threshold, query, key // 4, head, batch)
    bits = run_ptx(text.value, [*(np.full(len(thread), x & 0xFFFFFFFF, np.uint64) for x in uniform), thread])
    # wgmma's layout: a warp has 16 rows, a thread two of each eight columns, in rows that are 8 apart.
    value = np.arange(values)
    rows = (16 * (thread // 32 % warps) + thread % 32 // 4)[:, None] + 8 * (value >> 1 & 1)
    columns = (2 * (thread % 4) + 32 * (thread // (32 * warps)))[:, None] + (value & 1) + 8 * (value >> 2)
    at = (torch.tensor(x).view(1, 1, 1, 1) for x in (batch, head))
    queries = torch.arange(query, query + 64).view(1, 1, -1, 1)
    keep = keep_mask(torch.tensor(seed), dropout_p, *at, queries, key, key + 128)[0, 0].numpy()
    want = keep[columns, rows] if transposed else keep[rows, columns]
    assert np.array_equal(bits[:, None] >> value.astype(np.uint64) & np.uint64(1), want)


BACKWARD = Request(backward=True, needs=frozenset("qkv"))


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("request_", [Request(), BACKWARD], ids=["forward", "backward"])
def test_dropout_is_drawn_in_both_passes(dim: int, request_: Request) -> None:
    for t, r in ((Operands(*[meta(head_dim=dim)] * 3), Rules(0.1, window_left=100)), packed()):
        assert plan.select(t, replace(r, dropout_p=0.1), request=request_, target=H200).backend == "hopper"


def test_dropout_declined() -> None:
    t, r = packed()
    assert "packed sequences at a left window" in hopper.why_not(t, replace(r, dropout_p=0.1, window_left=9), Request(), H200)
    t, r = listed(masks.Blocks(BITS, 128))
    assert "listed blocks" in hopper.why_not(t, replace(r, dropout_p=0.1), Request(), H200)


@pytest.mark.parametrize("seqlen_q, copied", [(1024, False), (924, False), (920, True)])
def test_values_before_the_first_window_are_copied(seqlen_q: int, copied: bool) -> None:
    """A tile may start up to three keys before the first that a query sees: V is read from a copy that is finite there."""
    t, r = Operands(meta(seqlen_q), meta(), meta()), Rules(0.1, window_left=100, dropout_p=0.1)
    assert hopper.values_are_copied(t, r) == copied == ("V is copied" in hopper.describe(t, r, Request(), H200))
    assert hopper.workspace_bytes(t, r, Request(), H200) == copied * t.v.numel() * 2
    assert not hopper.values_are_copied(t, replace(r, dropout_p=0.0))
