"""docs/transforms.md: every row of its table names a test that exists, and says what that test shows."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "transforms.md").read_text()
ROWS = [line.strip("|").split("|") for line in PAGE.splitlines() if line.startswith("|") and "::" in line]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip())
def test_each_row_names_its_test(row: list[str]) -> None:
    _, outcome, tested = (cell.strip() for cell in row)
    match = re.fullmatch(r"`(test_\w+\.py)::(test_\w+)`", tested)
    assert match, tested
    tree = ast.parse((TESTS / match[1]).read_text())
    found = {node.name: ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert match[2] in found
    assert outcome.startswith(("works", "raises"))
    assert ("pytest.raises" in found[match[2]]) or outcome.startswith("works")


def test_the_table_is_long_enough_to_be_the_table() -> None:
    assert len(ROWS) > 15
