"""Draws the pictures of docs/masks.md and writes its table: each rule, its one line, and the shares of pairs and of tiles that it shows.

python scripts/mask_gallery.py
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import torch

from tilewise import BlockMask, masks

ROOT = Path(__file__).parents[1]
PAGE, FIGURES = ROOT / "docs" / "masks.md", ROOT / "docs" / "figures"
DRAWN, MEASURED, BLOCK = 48, 2048, 128


class Entry(NamedTuple):
    """One rule of the gallery: its name and the line that makes it, for `n` queries and `n` keys unless it says otherwise."""

    name: str
    line: str
    queries: float = 1.0  # as a share of the keys


ENTRIES = (
    Entry("causal", "Causal()"),
    Entry("causal, new tokens after a prefix", "Causal()", 0.5),
    Entry("top-left causal", 'Causal(align="top_left")', 0.5),
    Entry("window", "SlidingWindow(n // 8, 0)"),
    Entry("window to both sides", "SlidingWindow(n // 12, n // 12)"),
    Entry("sinks and window", "(FirstKeys(4) | SlidingWindow(n // 8, 0)) & Causal()"),
    Entry("chunks", "Chunked(n // 4)"),
    Entry("chunked causal", "Causal() & Chunked(n // 4)"),
    Entry("dilated", "Dilated(4, n // 2)"),
    Entry("prefix", "PrefixLM(torch.tensor([n // 4]))"),
    Entry("spans", "PrefixLM(spans=torch.tensor([[[n // 8, n // 3], [n // 2, 3 * n // 4]]]))"),
    Entry("documents", "Document.from_cu_seqlens(torch.tensor([0, n // 4, n // 3, 3 * n // 4, n]), n)"),
    Entry("packed causal", "Causal() & Document.from_cu_seqlens(torch.tensor([0, n // 4, n // 3, 3 * n // 4, n]), n)"),
    Entry("blocks", "Blocks(torch.rand(1, 1, 6, 6) < 0.4, -(-n // 6))"),
    Entry("padding", "Dense((torch.arange(n) < 3 * n // 4))"),
    Entry("neighbourhood in a picture", "Custom(lambda b, h, q, k: ((q // w - k // w).abs() <= 1) & ((q % w - k % w).abs() <= 1))"),
    Entry("not causal", "~Causal()"),
)


def rule_of(entry: Entry, n: int) -> masks.Mask:
    """The entry's rule at n keys."""
    torch.manual_seed(1)
    names = {name: getattr(masks, name) for name in masks.__all__} | {"torch": torch, "n": n, "w": round(n**0.5)}
    return eval(entry.line, names)


def file_of(entry: Entry) -> str:
    return f"mask-{re.sub('[^a-z]+', '-', entry.name)}.svg"


def table() -> str:
    """The gallery as a table."""
    lines = ["| | rule | pairs | tiles |", "|---|---|---|---|"]
    for entry in ENTRIES:
        queries, rule = round(entry.queries * MEASURED), rule_of(entry, MEASURED)
        tiles = BlockMask(rule, queries, MEASURED, block_size=BLOCK).density()
        picture = f"![{entry.name}](figures/{file_of(entry)})"
        line = entry.line.replace("|", "\\|")
        lines.append(f"| {picture} | {entry.name}<br>`{line}` | {rule.density(queries, MEASURED):.1%} | {tiles:.1%} |")
    return "\n".join(lines)


def page(text: str) -> str:
    """The page with its table made anew."""
    begin, end = "<!-- gallery: begin -->\n", "\n<!-- gallery: end -->"
    return text[: text.index(begin) + len(begin)] + table() + text[text.index(end) :]


def draw() -> None:
    """Every picture, without its title: the table has the words."""
    from matplotlib import pyplot

    with pyplot.rc_context({"svg.hashsalt": "tilewise", "font.size": 8}):
        for entry in ENTRIES:
            queries, rule = round(entry.queries * DRAWN), rule_of(entry, DRAWN)
            figure, axes = pyplot.subplots(figsize=(1.6, 0.35 + 1.25 * max(entry.queries, 0.4)), layout="constrained")
            rule.plot(queries, DRAWN, ax=axes)
            axes.set(title="", xticks=[], yticks=[])
            figure.savefig(FIGURES / file_of(entry), metadata={"Date": None})
            pyplot.close(figure)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
    draw()
