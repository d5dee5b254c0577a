"""The cache kernels without a GPU: right in Triton's interpreter, and compiled for other machines within bounds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parent.parent
OLDEST = ROOT / ".venv36" / "bin" / "python"
SCRIPT = ROOT / "scripts" / "compile_cache.py"

from tilewise.kernels.triton import configs as dense  # noqa: E402
from tilewise.kernels.triton.cache import configs  # noqa: E402


def test_kernels_in_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    tests = Path(__file__).with_name("interpreted_cache.py")
    command = [sys.executable, "-m", "pytest", str(tests), "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]


def compiled(python: Path | str, *arguments: str) -> list[dict]:
    """Rows of the compile script, which runs apart: Triton's interpreter, if a test chose it, rules out compiling."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [str(python), str(SCRIPT), "--sample", "--jobs", "1", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def check(rows: list[dict]) -> None:
    for row in rows:
        assert row["shared"] <= dense.SHARED_LIMIT[row["target"]], row
        assert row["spilled"] == 0, row


def test_a_sample_compiles_for_every_target_without_spills() -> None:
    rows = compiled(sys.executable)
    check(rows)
    assert {row["target"] for row in rows} == {"sm80", "sm90", "sm100", "sm120", "gfx942"}
    decoding = [row for row in rows if row["target"] == "sm90" and row["kernel"] == "attention_cached" and row["rows"] <= 16]
    sm90 = [row for row in decoding if row["features"] != "alone"]
    assert len(decoding) == len(sm90) + 1
    # Two programs beside each other on a multiprocessor of an H200, and a merge: 228 KB of shared memory, 65,536 registers.
    assert all(2 * (row["shared"] + 1024) <= 228 * 1024 and 2 * 128 * row["registers"] <= 65536 - 4 * 128 * 32 for row in sm90)


@pytest.mark.skipif(not OLDEST.exists(), reason="no environment with Triton 3.6 alone: `make test` creates .venv36")
def test_the_oldest_triton_compiles_the_sample_of_sm90() -> None:
    rows = compiled(OLDEST, "--target", "sm90")
    assert {row["triton"] for row in rows} == {"3.6.0"}
    check(rows)


@pytest.mark.parametrize("arch", [arch for arch in dense.SHARED_LIMIT if arch != "interpreter"])
@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("rows", [1, 33, 4096])
def test_a_config_fits_for_every_head_dim(arch: str, bits: int, rows: int) -> None:
    for dim in (16, 64, 128, 256):
        for paged in (False, True):
            config = configs.choose(arch, dense.SHARED_LIMIT[arch], bits, bits, rows, dim, dim, False, paged)
            assert config is not None and config.block_m >= 16 and config.block_n >= 16


def test_a_program_that_has_a_multiprocessor_to_itself_reads_further_ahead() -> None:
    """And needs no split: 16 sequences of 8 kv heads on the 132 multiprocessors of an H200."""
    assert configs.one_each(128, 132) and configs.one_each(132, 132) and not (configs.one_each(133, 132) or configs.one_each(112, 132))
    beside, alone = (configs.choose("sm90", 232_448, 16, 16, 8, 128, 128, False, False, alone) for alone in (False, True))
    assert beside is not None and alone is not None
    assert (beside.block_n, beside.num_stages, beside.per_multiprocessor) == (64, 3, 2)
    assert (alone.block_n, alone.num_stages, alone.per_multiprocessor) == (128, 4, 1)
    for arch, rows in (("sm90", 32), ("sm80", 8), ("gfx942", 8)):  # no row for that: keys are split as ever
        limit = dense.SHARED_LIMIT[arch]
        assert configs.choose(arch, limit, 16, 16, rows, 128, 128, False, False, True) == configs.choose(
            arch, limit, 16, 16, rows, 128, 128, False, False
        )
    assert configs.choose_splits(128, 128, 4, 132 * alone.per_multiprocessor) == 1
    assert configs.choose_splits(32, 1024, 4, 132 * beside.per_multiprocessor) == 8


def test_splits_fill_the_device_and_no_more() -> None:
    for programs in (1, 8, 32, 128, 500):
        for tiles in (1, 16, 128, 2048):
            splits = configs.choose_splits(programs, tiles, 4, 396)
            assert 1 <= splits <= max(1, tiles // 4)
            assert splits == 1 or programs * splits <= 2 * 396
    assert configs.choose_splits(8, 2048, 4, 396) * 8 > 0.9 * 396
