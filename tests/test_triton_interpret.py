"""Runs the tests of `interpreted`, which need processes of their own, in slices that can run side by side."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SLICES = 6
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


@pytest.mark.parametrize("index", range(SLICES))
def test_kernels_in_the_interpreter(index: int) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "TILEWISE_SLICE": f"{index}/{SLICES}", "OMP_NUM_THREADS": "1"}
    tests = Path(__file__).with_name("interpreted.py")
    command = [sys.executable, "-m", "pytest", str(tests), "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tests.parent.parent)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
