"""Every entry of the gallery in docs/masks.md: its shares are those of the page, and it means the same as the reference everywhere."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tilewise import BlockMask

from .comparing import compare
from .helpers import make_inputs

ROOT = Path(__file__).parents[1]


def load() -> Any:
    spec = importlib.util.spec_from_file_location("mask_gallery", ROOT / "scripts" / "mask_gallery.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gallery = load()


@pytest.mark.parametrize("entry", gallery.ENTRIES, ids=lambda entry: entry.name)
def test_entry(entry: Any) -> None:
    n = 96
    queries, rule = round(n * entry.queries), gallery.rule_of(entry, n)
    rule.verify(queries, n)
    mask = BlockMask(rule, queries, n, block_size=16)
    mask.verify()
    compare({**make_inputs(1, queries, n, heads=2, head_dim=8, dtype=torch.float32), "mask": mask})
    assert (ROOT / "docs" / "figures" / gallery.file_of(entry)).exists()


def test_measured_speeds_stand_beside_their_entries() -> None:
    """Shares and speeds of a measured entry are those of the results file; what failed its check has no speed."""
    row = {"status": "ok", "pairs": 0.25, "tiles": 0.5, "fwd_ms": 2.0, "bwd_ms": 4.0, "dense_fwd_ms": 3.0, "dense_bwd_ms": 10.0}
    row |= {"keys": 4096, "heads": 16, "head_dim": 128}
    wrong = {key: x for key, x in row.items() if not key.endswith("_ms")} | {"status": "wrong"}
    measured = [(wrong if entry.name == "window" else row) | {"name": entry.name} for entry in gallery.ENTRIES]
    caption, table = gallery.table(measured).split("\n\n")
    lines = table.splitlines()
    assert "n = 4,096 with 16 heads of 128" in caption
    assert lines[2].endswith("| 25.0% | 50.0% | 1.50 × | 2.50 × |")
    window = next(line for line in lines if line.startswith("| ![window]"))
    assert window.endswith("| 25.0% | 50.0% |  |  |")
    assert len({line.count(" | ") for line in lines[2:]}) == 1


@pytest.mark.parametrize("more", [{}, {"peak_bytes": 3 << 20}], ids=["times", "memory too"])
def test_building_has_the_columns_that_were_measured(more: dict[str, int]) -> None:
    row = {"ms": 1.25, "host_ms": 0.5, "same_lists": True} | more
    names = [("causal", "tilewise"), ("function", "tilewise"), ("function", "flex")]
    lines = gallery.building([row | {"name": name, "provider": provider} for name, provider in names]).splitlines()
    assert lines[2].startswith("| causal | 1.25 ms | 0.50 ms |") and lines[3].endswith(" 1.2 ms |") and len(lines) == 4
    assert {line.count("|") for line in lines} == {6 if more else 5}


def test_the_page_is_up_to_date() -> None:
    text = gallery.PAGE.read_text()
    assert gallery.page(text) == text, "run scripts/mask_gallery.py"
    shown = set(re.findall(r"figures/(mask-[\w-]+\.svg)", text))
    assert shown == {path.name for path in (ROOT / "docs" / "figures").glob("mask-*")}
