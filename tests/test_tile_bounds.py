"""Interval arithmetic over programs: never against what the pairs of a tile show, and strong enough for the functions that people write."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tilewise import masks, tile_bounds, tile_status
from tilewise.score_mod import Program
from tilewise.tile_status import PARTIAL, UNKNOWN, Grid

from .test_block_mask import rules_for

IDS = torch.arange(200) // 25
PER_ITEM = torch.stack([IDS, torch.arange(200) // 40]).int()
BITS = torch.arange(200) % 50 < 25

# Each with the least share of its uniform tiles that the intervals must tell.
FUNCTIONS: dict[str, tuple[Callable, float]] = {
    "window": (lambda b, h, q, k: (q >= k) & (q - k < 64), 1.0),
    "window and stripes": (lambda b, h, q, k: (q >= k) & ((q - k < 64) | (k % 40 < 8)), 1.0),
    "picture": (lambda b, h, q, k: ((q // 10 - k // 10).abs() <= 1) & ((q % 10 - k % 10).abs() <= 1), 0.9),
    "documents": (lambda b, h, q, k: (IDS[q] == IDS[k]) & (q >= k), 1.0),
    "documents of items": (lambda b, h, q, k: (PER_ITEM[b, q] == PER_ITEM[b, k]) & (q >= k), 1.0),
    "lengths": (lambda b, h, q, k: PER_ITEM[b, q] * 20 >= k, 0.9),
    "heads": (lambda b, h, q, k: (q - k + 7 * h + 3 * b) % 40 < 20, 0.5),
    "selected": (lambda b, h, q, k: torch.where(q < 50, k, -k * 3) > torch.maximum(q - 20, k * 0 + 5), 0.9),
    "truths": (lambda b, h, q, k: ((q > 30) ^ (k >= 60)) == ((q > 20) + (k > 30).int() >= 1), 0.5),
    "negated": (lambda b, h, q, k: ~((q - k) < -5) & (q != k + 70), 0.9),
    "bits": (lambda b, h, q, k: BITS[k] & (q >= k), 0.4),
    "out of range": (lambda b, h, q, k: IDS[:60][q] + 1 > 1, 0.0),
    "relative": (lambda b, h, q, k: IDS[q - k] == 0, 0.0),
    "floating": (lambda b, h, q, k: (q - k).float() / 3 < 5.5, 0.0),
    "shifted": (lambda b, h, q, k: (q >> 3) + (k << 1) > 40, 0.0),
    "overflowing": (lambda b, h, q, k: (q * 2654435761 * k * 8234523453453) % 7 > k % 3, 0.0),
    "loaded and overflowing": (lambda b, h, q, k: (IDS * 2**58)[q] * k > 3, 0.0),
    "largest": (lambda b, h, q, k: q < 2**63 - 1, 0.0),
}


def compare(rule: masks.Mask, sizes: tuple[int, int], blocks: tuple[int, int], least: float) -> None:
    grid = Grid(*sizes, *blocks, *rule.implied_window())
    text, captured = rule.program(*sizes)
    unknown = torch.full((2, 3, grid.rows, grid.width), UNKNOWN, dtype=torch.uint8)
    exact = tile_status._evaluate_unknown(text, captured, unknown, grid)
    found = tile_bounds.narrowed(Program.parse(text), captured, unknown, grid)
    told = found != UNKNOWN
    assert found.dtype == torch.uint8 and torch.equal(found[told], exact[told])
    assert told.sum() >= least * (exact != PARTIAL).sum()
    given = torch.where(torch.rand(exact.shape) < 0.5, exact, UNKNOWN)
    assert torch.equal(tile_bounds.narrowed(Program.parse(text), captured, given, grid)[given != UNKNOWN], exact[given != UNKNOWN])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    function, least = FUNCTIONS[name]
    compare(masks.Custom(function), (200, 200), (16, 16), least)
    compare(masks.Custom(function), (150, 90), (32, 16), 0.0)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", "uint32", "uint64", "float32"])
def test_numbers_of_documents_in_other_dtypes(dtype: str) -> None:
    ids = IDS.to(getattr(torch, dtype))
    compare(masks.Custom(lambda b, h, q, k: ids[q] == ids[k]), (200, 200), (16, 16), 1.0 if dtype in ("uint8", "int16") else 0.0)


@pytest.mark.parametrize("sizes", [(100, 75), (1, 70)], ids=str)
def test_rules(sizes: tuple[int, int]) -> None:
    for rule in rules_for(*sizes).values():
        compare(rule, sizes, (16, 32), 0.0)


def test_many_tiles_are_looked_at_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_bounds, "TOGETHER", 100)
    compare(masks.Causal() & masks.Custom(FUNCTIONS["documents"][0]), (200, 200), (16, 16), 0.9)
    compare(masks.Custom(FUNCTIONS["window"][0]) & masks.SlidingWindow(90, 3), (200, 200), (16, 16), 0.9)
