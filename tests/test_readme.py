"""README.md: its code runs, its generated parts are what the code and the committed results say."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def tables() -> Any:
    spec = importlib.util.spec_from_file_location("readme_tables", ROOT / "scripts" / "readme_tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", README, re.DOTALL), ids=["training", "inference"])
def test_code_blocks_run_and_are_short(block: str) -> None:
    exec(compile(block, "README.md", "exec"), {})
    assert len([line for line in block.splitlines() if line]) <= 10


def test_first_paragraph_is_five_lines() -> None:
    assert len(README.split("\n\n")[1].splitlines()) == 5


@pytest.mark.parametrize("link", re.findall(r"(?:\]\(|src=\"|srcset=\")([^)\"]+)", README))
def test_linked_files_exist(link: str) -> None:
    assert (ROOT / link).exists()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the table is that of a machine with Triton")
def test_generated_parts_are_fresh(tables: Any) -> None:
    assert tables.render(README) == README, "run `make tables`"


def test_pictures_show_the_newest_results(tables: Any) -> None:
    plot = pytest.importorskip("tilewise.bench.plot", reason="pictures are drawn with matplotlib")
    drawn = sorted((ROOT / "docs" / "figures").glob("bench-*.svg"))
    assert drawn
    for path in drawn:
        assert f"<dc:title>{plot.fingerprint(tables.figure_rows())}</dc:title>" in path.read_text(), f"{path.name}: run `make tables`"


def test_support_table_names_a_backend_for_every_feature(tables: Any) -> None:
    lines = tables.support_table().splitlines()
    columns = lines[0].count("|") - 1
    assert len(lines) == 2 + len(tables.features(tables.torch.float32))
    for line in lines[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert len(cells) == columns
        assert all(re.fullmatch(r"(hopper|triton|torch|tiled)( / (hopper|triton|torch|tiled))?", cell) for cell in cells[1:])


def row(provider: str, tflops: float | None, **changed: Any) -> dict[str, Any]:
    return {
        "run_id": "b", "case": "paper", "head_dim": 128, "seqlen": 16384, "causal": True, "dtype": "bf16", "pass": "fwd",
        "provider": provider, "backend": None, "tflops": tflops, "ms": 1.0, "status": "ok",
        "device": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0",
        "date": "2026-01-02", "file": "rows.jsonl",
    } | changed  # fmt: skip


def test_results_show_the_newest_run_the_winner_and_the_losses(tables: Any) -> None:
    rows = [
        row("tilewise", 900.0, run_id="a"),
        row("tilewise", 480.0, backend="triton"),
        row("sdpa_flash", 360.0),
        row("fa3", 600.0),
        row("eager", None, status="oom"),
        row("sdpa_cudnn", None, status="wrong"),
        row("tilewise", 350.0, backend="triton", **{"pass": "bwd"}),
        row("sdpa_flash", 300.0, **{"pass": "bwd"}),
        row("tilewise", 100.0, backend="triton", seqlen=4096),
    ]
    text = tables.results_section(rows)
    forward = next(line for line in text.splitlines() if "d128 causal, fwd" in line)
    backward = next(line for line in text.splitlines() if "d128 causal, bwd" in line)
    assert "**600**" in forward and "480" in forward and "0.80" in forward
    assert "out of memory" in forward and "wrong result" in forward
    assert "**350**" in backward and "1.17" in backward and "–" in backward
    assert "900" not in text and "NVIDIA H200" in text and "16,384" in text


def test_nothing_measured_is_said(tables: Any) -> None:
    assert tables.results_section([]).startswith("Nothing has been measured yet")
