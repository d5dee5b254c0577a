"""Runs the tests of `hopper_backward_interpreted`, which need a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_small_kernels_in_the_interpreter() -> None:
    tests = Path(__file__).with_name("hopper_backward_interpreted.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", str(tests), "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tests.parent.parent)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
