"""The tables of docs/migration.md: every argument that they send a reader to exists, and none of flash-attn's is left out."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import tilewise
from tilewise import masks
from tilewise.compat import flash_attn, flash_attn_interface

from .test_compat_flash_attn import UPSTREAM

PAGE = (Path(__file__).parents[1] / "docs" / "migration.md").read_text(encoding="utf-8")
FUNCTIONS = (tilewise.attention, tilewise.attention_varlen, tilewise.attention_with_kvcache, tilewise.merge)
ARGUMENTS = {name for function in FUNCTIONS for name in inspect.signature(function).parameters}
OF_FUNCTIONS = {"q_idx", "kv_idx"}  # arguments of the reader's own score and mask functions
NAMES = ARGUMENTS | OF_FUNCTIONS | set(tilewise.__all__) | {"cu_seqlens", "aux.lse", "auto", "tilewise.explain"}


class Row(NamedTuple):
    section: str
    theirs: str
    ours: str


def rows() -> Iterator[Row]:
    """The rows of the tables from other libraries, of three columns each."""
    section = ""
    for line in PAGE.splitlines():
        if line.startswith("## "):
            section = line[3:]
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("|") and section.startswith("From ") and not line.startswith("|---") and cells[1].strip() != "tilewise":
            yield Row(section, cells[0], cells[1])


def spans(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def unknown(code: str) -> list[str]:
    """What tilewise does not have of the names in a piece of code, read as the arguments of a call."""
    call = ast.parse(f"call({code})", mode="eval").body
    assert isinstance(call, ast.Call)
    missing = [keyword.arg for keyword in call.keywords if keyword.arg not in ARGUMENTS]
    for node in ast.walk(call):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("masks.") and hasattr(masks, node.func.attr):
            known = inspect.signature(getattr(masks, node.func.attr)).parameters
            missing += [keyword.arg for keyword in node.keywords if keyword.arg not in known]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in tilewise.__all__:
            missing += [] if hasattr(getattr(tilewise, node.value.id), node.attr) else [ast.unparse(node)]
    missing += [ast.unparse(x) for x in call.args if isinstance(x, (ast.Name, ast.Attribute)) and ast.unparse(x) not in NAMES]
    for x in call.args:
        if isinstance(x, ast.Call) and isinstance(x.func, ast.Name) and x.func.id not in NAMES:
            missing.append(x.func.id)
    return missing


ROWS = list(rows())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.section[5:]}-{row.theirs[:30]}")
def test_what_a_row_sends_to_exists(row: Row) -> None:
    ours = spans(row.ours)
    if re.match(r"same($| names)", row.ours):  # then it is the other library's name, which is ours too
        ours = [re.sub(r"=\(.*\)", "", span) for span in spans(row.theirs)]
        assert ours
    for code in ours:
        assert unknown(code) == [], f"docs/migration.md: {code}"


def test_every_section_has_its_table() -> None:
    assert {row.section for row in ROWS} >= {"From flash-attn", "From scaled_dot_product_attention", "From FlexAttention", "From xFormers"}
    assert len(ROWS) > 40


def test_a_name_that_does_not_exist_is_found() -> None:
    assert unknown("softmax_scales") == ["softmax_scales"]
    assert unknown("mask=masks.Causal(aligned=1), biass=b") == ["biass", "aligned"]
    assert unknown("mask=masks.Casual()") == ["masks.Casual"]


def test_every_argument_of_flash_attn_is_on_the_page() -> None:
    words = {word for row in ROWS if row.section == "From flash-attn" for code in spans(row.theirs) for word in re.findall(r"\w+", code)}
    for module in (flash_attn, flash_attn_interface):
        for name, given in UPSTREAM[module].items():
            if name != "get_scheduler_metadata":  # what it returns is of no use here
                theirs = set(inspect.signature(eval(f"lambda {given}: None")).parameters)
                assert theirs <= words, f"{name}: {sorted(theirs - words)}"
