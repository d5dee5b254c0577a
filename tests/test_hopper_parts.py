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


def call(batch: int, heads: int, seqlen_q: int, seqlen_k: int, heads_k: int = 0, **rules: float) -> tuple[Operands, Rules]:
    sizes = ((batch, h or heads, seqlen, 128) for h, seqlen in ((0, seqlen_q), (heads_k, seqlen_k), (heads_k, seqlen_k)))
    return Operands(*(torch.empty(size, dtype=torch.bfloat16, device="meta") for size in sizes)), Rules(0.1, **rules)


@pytest.mark.parametrize(
    "parts_, heads, arguments",
    [
        (16, 1, (1, 8, 128, 65_536)),
        (2, 1, (1, 16, 512, 8192)),
        (4, 1, (1, 1, 4096, 4096)),
        (1, 1, (1, 16, 1024, 8192)),  # as many tiles as nearly fill the machine
        (1, 1, (4, 16, 4096, 4096)),
        (1, 1, (1, 4, 128, 512)),  # too short for a merge
        (32, 8, (1, 32, 16, 32_768, 4)),
        (1, 8, (64, 32, 4, 8192, 4)),  # the machine is full, and does an eighth of the work
        (1, 1, (64, 32, 128, 8192, 4)),  # a head fills its tiles
        (1, 1, (1, 0, 128, 8192)),
        (1, 1, (1, 8, 0, 8192)),
        (1, 1, (1, 8, 128, 0)),
    ],
)
def test_which_calls_are_cut(parts_: int, heads: int, arguments: tuple[int, ...]) -> None:
    t, r = call(*arguments)
    found = parts.cut_of(t, r, parts.MULTIPROCESSORS)
    assert found[:2] == (parts_, heads)
    said = hopper.describe(t, r, Request(), H200)
    assert ("parts" in said) == (parts_ > 1) and ("heads in each" in said) == (heads > 1)
    rows = t.q.shape[0] * t.q.shape[1] * t.q.shape[2]
    assert hopper.workspace_bytes(t, r, Request(), H200) == found.merged * 4 * parts_ * rows * (128 + 2)


def test_a_window_leaves_nothing_to_cut() -> None:
    assert parts.cut_of(*call(1, 8, 128, 65_536), 132).parts > 1
    assert parts.cut_of(*call(1, 8, 128, 65_536, window_left=500, window_right=0), 132) == parts.Cut()


def test_dropout_keeps_heads_apart() -> None:
    assert parts.cut_of(*call(1, 32, 16, 32_768, 4), 132).heads == 8
    assert parts.cut_of(*call(1, 32, 16, 32_768, 4, dropout_p=0.1), 132).heads == 1


@pytest.mark.parametrize(
    "group, total_q, dropout, heads", [(4, 300, 0, 4), (7, 300, 0, 8), (1, 300, 0, 1), (4, 900, 0, 1), (4, 300, 0.1, 1)]
)
def test_packed_sequences_share_tiles_where_queries_are_fewer_than_keys(group: int, total_q: int, dropout: float, heads: int) -> None:
    t, r = call(1, 2 * group, total_q, 900, 2, dropout_p=dropout)
    cu = torch.empty(3, dtype=torch.int32, device="meta")
    cut = parts.cut_of(replace(t, cu_seqlens_q=cu, cu_seqlens_k=cu), r, 132)
    assert (cut.parts, cut.heads, cut.merged) == (1, heads, False)


@pytest.mark.parametrize("name", ["bias", "mask", "cu_seqlens_q"])
def test_what_is_never_cut(name: str) -> None:
    t, r = call(1, 8, 128, 65_536)
    tensor = torch.empty(1, 1, 1, 65_536, dtype=torch.bool if name == "mask" else torch.bfloat16, device="meta")
    assert parts.cut_of(replace(t, **{name: tensor}), r, 132)[:2] == (1, 1)


@pytest.mark.parametrize("blocks", [1, 7, 64, 512, 4096])
def test_no_part_is_empty_where_tiles_are_equally_long(blocks: int) -> None:
    for heads in range(1, 140):
        count = parts.choose(128, 128, heads, 1, blocks, 132).parts
        assert 1 <= count <= min(parts.MOST_PARTS, blocks)
        assert (count - 1) * -(-blocks // count) < blocks


def test_explain_states_the_workspace() -> None:
    q = torch.empty(1, 128, 8, 128, dtype=torch.bfloat16, device="meta")
    k = torch.empty(1, 65_536, 8, 128, dtype=torch.bfloat16, device="meta")
    found = explain(q, k, k, device="NVIDIA H200")
    assert found.backend == "hopper" and "16 parts" in found.tiles
    assert found.extra_bytes == 8 * 128 * 4 * (1 + 16 * 130)
