"""The oldest Triton that is claimed compiles the Hopper kernels too, and to machine code of which the same holds: the GPU machines that
bring their own torch often have it."""

from __future__ import annotations

import os
import pickle
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from . import test_hopper_backward_compile as backward
from . import test_hopper_compile as forward

ROOT = Path(__file__).parents[1]
OLDEST = ROOT / ".venv36" / "bin" / "python"
FORWARD = ("d128 causal", "d64 full, three consumers", "d64 bias")
BACKWARD = ("d128 causal", "d64 full, ordered", "d256 causal", "d128 causal, tiles apart")


@pytest.mark.skipif(not OLDEST.exists(), reason="no environment with Triton 3.6 alone: `make test` creates .venv36")
@pytest.mark.parametrize(
    "kind, names, sample, check",
    [("forward", FORWARD, forward.SAMPLE, forward.check_compiled), ("backward", BACKWARD, backward.SAMPLE, backward.check_compiled)],
    ids=["forward", "backward"],
)
def test_sample(kind: str, names: tuple[str, ...], sample: dict[str, Any], check: Callable[..., None]) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PYTHONPATH")}
    given = pickle.dumps([(kind, sample[name]) for name in names])
    done = subprocess.run([OLDEST, ROOT / "tests" / "hopper_compiled.py"], input=given, capture_output=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    for name, (version, *compiled) in zip(names, pickle.loads(done.stdout), strict=True):
        assert version == "3.6.0"
        check(name, sample[name], *compiled)
