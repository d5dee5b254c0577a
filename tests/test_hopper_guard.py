"""Calls with a bias or mask on Hopper GPUs: V is read as it is, and only O that is not finite is computed again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from tilewise.kernels.hopper import launch
from tilewise.plan import Operands


def test_launches_in_the_interpreter() -> None:
    tests = Path(__file__).with_name("hopper_guard_interpreted.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", str(tests), "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tests.parent.parent)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]


@pytest.mark.parametrize(
    "name, shape, items",
    [
        ("bias", (1, 4, 256, 256), 3),
        ("bias", (3, 4, 256, 256), 1),
        ("bias", (1, 1, 256, 256), 1),  # all tiles read the same
        ("bias", (1, 4, 1, 256), 1),  # small
        ("mask", (1, 4, 256, 256), 3),
    ],
)
def test_items_that_share_a_tensor_stand_side_by_side(name: str, shape: tuple[int, ...], items: int) -> None:
    q = torch.empty(3, 4, 256, 64, dtype=torch.bfloat16, device="meta")
    tensor = torch.empty(shape, dtype=torch.bool if name == "mask" else torch.bfloat16, device="meta")
    assert launch.items_side_by_side(Operands(q, q, q, **{name: tensor})) == items
    if shape[0] == 1 and shape[2] > 1:  # broadcast by its strides
        assert launch.items_side_by_side(Operands(q, q, q, **{name: tensor.expand(3, *shape[1:])})) == items
