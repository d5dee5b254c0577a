"""Dropout of the Hopper kernels without a GPU: the PTX that draws, run by a few lines of NumPy, against `kernels.philox`; which calls they take."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tilewise import plan
from tilewise.kernels import hopper
from tilewise.kernels.hopper import backward_launch, launch
from tilewise.kernels.hopper.dropout import OF_KEYS, OF_ROWS, OF_SHARED_KEYS
from tilewise.kernels.philox import keep_mask
from tilewise.plan import Operands, Request, Rules, Target

H200 = Target("cuda", (9, 0), "NVIDIA H200")


def run_ptx(text: str, operands: list[np.ndarray]) -> np.ndarray:
    """$0 of the straight-line PTX `text`, for all threads of some warps at once. Registers are unsigned 64-bit, which hold 32-bit values."""
    registers: dict[str, np.ndarray] = {f"${i + 1}": x.astype(np.uint64) for i, x in enumerate(operands)}
    word = np.uint64(0xFFFFFFFF)

    def read(name: str) -> np.ndarray:
        if name in registers:
            return registers[name]
        value = int(name[2:], 16) if name.startswith("0f") else int(name, 0)
        return np.full_like(registers["$1"], value)

    def floats(name: str) -> np.ndarray:
        return read(name).astype(np.uint32).view(np.float32)

    for line in text.strip("{} ").split(";"):
        found = re.match(r"\s*(@p )?([a-z0-9_.]+) (.*)", line)
        if found is None or found[2] == ".reg":
            continue
        guard, operation, names = found[1], found[2], re.findall(r"[\w$.]+", found[3])
        result, *sources = names
        if operation == "mov.b64":
            low, high, wide = names
            registers[low], registers[high] = read(wide) & word, read(wide) >> np.uint64(32)
            continue
        x, y, *more = sources if len(sources) > 1 else [*sources, "0"]
        if operation == "lop3.b32":
            z, table = read(more[0]), int(more[1], 0)
            value = np.zeros_like(read(x))
            for row in range(8):
                if table >> row & 1:
                    value |= np.bitwise_and.reduce([v if row >> n & 1 else ~v & word for v, n in ((read(x), 2), (read(y), 1), (z, 0))])
        elif operation == "shfl.sync.bfly.b32":
            assert more == ["31", "0xffffffff"]
            value = read(x)[np.arange(len(read(x))) ^ int(y)]
        elif operation == "selp.b32":
            value = np.where(registers[more[0]].astype(bool), read(x), read(y))
        elif operation == "prmt.b32":
            assert more == ["0x5410"]
            value = (read(x) & np.uint64(0xFFFF)) | (read(y) & np.uint64(0xFFFF)) << np.uint64(16)
        elif operation == "add.f32":
            value = (floats(x) + floats(y)).view(np.uint32).astype(np.uint64)
        else:
            value = {
                "mov.b32": lambda: read(x),
                "mul.wide.u32": lambda: read(x) * read(y),
                "mad.lo.u32": lambda: (read(x) * read(y) + read(more[0])) & word,
                "add.u32": lambda: (read(x) + read(y)) & word,
                "and.b32": lambda: read(x) & read(y),
                "shl.b32": lambda: read(x) << read(y) & word,
                "shr.u32": lambda: read(x) >> read(y),
                "setp.ge.u32": lambda: (read(x) >= read(y)).astype(np.uint64),
                "setp.ne.u32": lambda: (read(x) != read(y)).astype(np.uint64),
            }[operation]()
        registers[result] = np.where(registers["p"].astype(bool), value, registers[result]) if guard else value
    return registers["$0"]


@pytest.mark.parametrize("which", ["S", "transposed S", "shared transposed S"])
@pytest.mark.parametrize("seed, dropout_p", [(0x1234_5678_9ABC_DEF0, 0.3), (-7, 0.1), (5, 0.99), (1 << 62, 1e-12)])
def test_every_thread_draws_the_bits_of_what_it_holds(seed, dropout_p, which):
    text, warps, values = {"S": (OF_ROWS, 4, 32), "transposed S": (OF_KEYS, 8, 32), "shared transposed S": (OF_SHARED_KEYS, 4, 16)}[which]
    transposed, threads = which != "S", 128 if which == "S" else 256
    query, key, batch, head = 4096 + 64 * 7, 128 * 5 + 4, 3, 11
    _, threshold, _ = launch.dropout_arguments(Operands(*[torch.empty(0)] * 3, dropout_seed=torch.tensor(seed)), Rules(1, dropout_p=dropout_p), 0)
    thread = np.arange(threads)
    uniform = (seed, seed >> 32, threshold, query, key // 4, head, batch)
    bits = run_ptx(text.value, [*(np.full(threads, x & 0xFFFFFFFF, np.uint64) for x in uniform), thread])
    # wgmma's layout: a warp has 16 rows, a thread two of each eight columns, in rows that are 8 apart.
    value = np.arange(values)
    rows = (16 * (thread // 32 % warps) + thread % 32 // 4)[:, None] + 8 * (value >> 1 & 1)
    columns = 2 * (thread % 4)[:, None] + (value & 1) + 8 * (value >> 2) + 32 * (thread // (32 * warps))[:, None]
    size_q, size_k = (64, 128) if transposed else (64, 64)
    at = (torch.tensor(x).view(1, 1, 1, 1) for x in (batch, head))
    keep = keep_mask(torch.tensor(seed), dropout_p, *at, torch.arange(query, query + size_q).view(1, 1, -1, 1), key, key + size_k)[0, 0].numpy()
    want = keep[columns, rows] if transposed else keep[rows, columns]
    assert np.array_equal(bits[:, None] >> value.astype(np.uint64) & np.uint64(1), want)
