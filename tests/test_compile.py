"""The kernels compile, without a GPU, for every architecture that the tables name; registers and shared memory stay within bounds."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).parent.parent / "scripts" / "compile_all.py"
spec = importlib.util.spec_from_file_location("compile_all", SCRIPT)
compile_all = importlib.util.module_from_spec(spec)
sys.modules["compile_all"] = compile_all
spec.loader.exec_module(compile_all)

from tilewise.kernels.triton import configs  # noqa: E402

STALE = "benchmarks/compiled.json is not of these sources: run python scripts/compile_all.py"


def compile_in_a_process(case, **options) -> dict:
    """In a fresh process: Triton's interpreter, if another test chose it, rules out compiling."""
    os.environ.pop("TRITON_INTERPRET", None)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(run_case, SCRIPT, case, options).result()


def run_case(script: Path, case, options: dict) -> dict:
    return compile_all.compile_case(case, **options)


def spills_are_banned(row: dict) -> bool:
    return row["dtype"] != "fp32" and row["head_dim"] <= 128 and row["features"] != "everything"


@pytest.mark.parametrize("case", list(compile_all.sample()), ids=lambda c: f"{c.target}-{c.kernel}-{c.head_dim}-{c.features}")
def test_sample_compiles_within_bounds(case):
    row = compile_in_a_process(case)
    assert row["shared"] <= configs.SHARED_LIMIT[case.target]
    if spills_are_banned(row):
        assert row["spilled"] == 0


def test_hot_kernels_of_sm90_use_its_tensor_cores_and_tma():
    text = compile_in_a_process(compile_all.Case("attention_forward", "sm90", 128, "bf16", "causal"), keep=True)["asm"]["ptx"]
    assert "wgmma.mma_async" in text
    assert "cp.async.bulk.tensor" in text


@pytest.fixture(scope="module")
def table() -> dict:
    return json.loads(compile_all.TABLE.read_text())


def test_table_is_of_these_sources(table):
    assert table["source_hash"] == compile_all.source_hash(), STALE


def test_table_covers_every_target_and_kernel(table):
    found = {(row["target"], row["kernel"]) for row in table["rows"]}
    assert found == {(target, kernel) for target in compile_all.TARGETS for kernel in compile_all.KERNELS}


def test_no_spills_where_they_are_banned(table):
    assert [row for row in table["rows"] if spills_are_banned(row) and row["spilled"]] == []


def test_shared_memory_is_within_the_device(table):
    assert [row for row in table["rows"] if row["shared"] > configs.SHARED_LIMIT[row["target"]]] == []


def test_estimated_shared_memory_covers_what_is_taken(table):
    """The estimate decides at run time whether a config fits; it must not promise less than the compiler takes."""
    for row in table["rows"]:
        if row["kernel"] in compile_all.PURPOSE:
            case = compile_all.Case(**{name: row[name] for name in ("kernel", "target", "head_dim", "dtype", "features")})
            assert row["shared"] <= compile_all.estimated_shared(case, configs), row


@pytest.mark.parametrize("arch", [arch for arch in configs.SHARED_LIMIT if arch != "interpreter"])
@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("purpose", [configs.FORWARD, configs.DKDV, configs.DQ, configs.DBIAS])
def test_a_config_fits_for_every_head_dim(arch, bits, purpose):
    """Also half as much shared memory as the architecture has leaves something to choose."""
    for dim in (16, 32, 64, 128, 256):
        for limit in (configs.SHARED_LIMIT[arch], configs.SHARED_LIMIT[arch] // 2):
            config = configs.choose(arch, limit, bits, purpose, frozenset(), dim, dim)
            assert configs.shared_bytes(config, bits, purpose, dim, dim) <= limit
            assert config.block_m <= configs.ROW_BLOCK and configs.ROW_BLOCK % config.block_m == 0
