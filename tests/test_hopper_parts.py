"""Calls with few tiles, cut along the keys: which are, into how many parts, and that these add up."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from tilewise import explain
from tilewise.kernels import hopper
from tilewise.kernels.hopper import parts
from tilewise.plan import Operands, Request, Rules, Target

H200 = Target("cuda", (9, 0), "NVIDIA H200")


def test_merge_in_the_interpreter() -> None:
    tests = Path(__file__).with_name("hopper_parts_interpreted.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", str(tests), "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tests.parent.parent)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]


def call(batch: int, heads: int, seqlen_q: int, seqlen_k: int, head_dim: int = 128, **rules: int) -> tuple[Operands, Rules]:
    sizes = ((batch, heads, seqlen, head_dim) for seqlen in (seqlen_q, seqlen_k, seqlen_k))
    return Operands(*(torch.empty(size, dtype=torch.bfloat16, device="meta") for size in sizes)), Rules(0.1, **rules)


@pytest.mark.parametrize(
    "cut, arguments",
    [
        (True, (1, 8, 128, 65_536)),
        (True, (1, 16, 512, 8192)),
        (True, (1, 1, 4096, 4096)),
        (False, (1, 16, 1024, 8192)),  # as many tiles as nearly fill the machine
        (False, (4, 16, 4096, 4096)),
        (False, (1, 4, 128, 512)),  # too short for a merge
    ],
)
def test_which_calls_are_cut(cut: bool, arguments: tuple[int, ...]) -> None:
    t, r = call(*arguments)
    count = parts.parts_of(t, r, parts.MULTIPROCESSORS)
    assert (count > 1) == cut == ("parts" in hopper.describe(t, r, Request(), H200))
    rows = t.q.shape[0] * t.q.shape[1] * t.q.shape[2]
    assert hopper.workspace_bytes(t, r, Request(), H200) == cut * 4 * count * rows * (128 + 2)


def test_a_window_leaves_nothing_to_cut() -> None:
    assert parts.parts_of(*call(1, 8, 128, 65_536), 132) > 1
    assert parts.parts_of(*call(1, 8, 128, 65_536, window_left=500, window_right=0), 132) == 1


@pytest.mark.parametrize("name", ["bias", "mask", "cu_seqlens_q"])
def test_what_is_never_cut(name: str) -> None:
    t, r = call(1, 8, 128, 65_536)
    tensor = torch.empty(1, 1, 1, 65_536, dtype=torch.bool if name == "mask" else torch.bfloat16, device="meta")
    assert parts.parts_of(replace(t, **{name: tensor}), r, 132) == 1


@pytest.mark.parametrize("blocks", [1, 7, 64, 512, 4096])
def test_choice_is_bounded_and_pays(blocks: int) -> None:
    for tiles in range(1, 140):
        count = parts.choose(tiles, blocks, 132)
        assert 1 <= count <= min(parts.MOST, blocks)
        assert count == 1 or tiles < 132
        # Every part has a block, so that none is empty where tiles are equally long.
        assert (count - 1) * -(-blocks // count) < blocks or count == 1


def test_explain_states_the_workspace() -> None:
    q = torch.empty(1, 128, 8, 128, dtype=torch.bfloat16, device="meta")
    k = torch.empty(1, 65_536, 8, 128, dtype=torch.bfloat16, device="meta")
    found = explain(q, k, k, device="NVIDIA H200")
    assert found.backend == "hopper" and "16 parts" in found.tiles
    assert found.extra_bytes == 8 * 128 * 4 * (1 + 16 * 130)
