"""Draws the pictures of docs/masks.md and writes its tables: each rule, its one line, the shares of pairs and of tiles that it shows, and
what scripts/masks_gpu.py measured of it and of building masks.

python scripts/mask_gallery.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tilewise import BlockMask, masks

ROOT = Path(__file__).parents[1]
PAGE, FIGURES = ROOT / "docs" / "masks.md", ROOT / "docs" / "figures"
RESULTS, DENSITY = (ROOT / "benchmarks" / "results" / name for name in ("masks-h200.json", "density-cpu.json"))
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


def table(measured: list[dict[str, Any]]) -> str:
    """The gallery as a table: the shares and speeds of the measured entries, at their size; without any, the shares at `MEASURED`."""
    rows = {row["name"]: row for row in measured}
    caption = f"The shares are those at n = {MEASURED:,}"
    if rows:
        one = next(iter(rows.values()))
        caption = f"Shares and speeds are those at n = {one['keys']:,} with {one['heads']} heads of {one['head_dim']}, bf16"
    caption += f": of pairs, and of tiles of {BLOCK} × {BLOCK},\nwhich is what attention with a `BlockMask` computes instead of everything."
    if rows:
        caption += "\nSpeeds are those relative to attention without a mask by its fastest kernel, in the same process."
    lines = [f"{caption} `w` is the width of a picture, √n.\n"]
    lines += ["| | rule | pairs | tiles |" + (" forward | backward |" if rows else ""), "|---|---|---|---|" + ("---|---|" if rows else "")]
    for entry in ENTRIES:
        row = rows[entry.name] if rows else computed(entry)
        picture = f"![{entry.name}](figures/{file_of(entry)})"
        line = entry.line.replace("|", "\\|")
        cells = [picture, f"{entry.name}<br>`{line}`", f"{row['pairs']:.1%}", f"{row['tiles']:.1%}"]
        if rows:
            cells += [f"{row[f'dense_{name}_ms'] / row[f'{name}_ms']:.2f} ×" if f"{name}_ms" in row else "" for name in ("fwd", "bwd")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def computed(entry: Entry) -> dict[str, float]:
    """The shares of pairs and of tiles."""
    queries, rule = round(entry.queries * MEASURED), rule_of(entry, MEASURED)
    return {"pairs": rule.density(queries, MEASURED), "tiles": BlockMask(rule, queries, MEASURED, block_size=BLOCK).density()}


def building(measured: list[dict[str, Any]]) -> str:
    """The time of building, FlexAttention's where it builds the same lists, and the memory at the peak where all rows have it."""
    flex = {row["name"]: f"{row['ms']:.1f} ms" for row in measured if row["provider"] == "flex" and row["same_lists"]}
    ours = [row for row in measured if row["provider"] == "tilewise"]
    columns = {
        "mask": [row["name"] for row in ours],
        "ready after": [f"{row['ms']:.2f} ms" for row in ours],
        "of it host": [f"{row['host_ms']:.2f} ms" for row in ours],
    }
    if all("peak_bytes" in row for row in ours):
        columns["memory at the peak, lists included"] = [f"{row['peak_bytes'] / 2**20:.1f} MiB" for row in ours]
    columns["compiled `create_block_mask`"] = [flex.get(row["name"], "") for row in ours]
    lines = [columns, ["---"] * len(columns), *zip(*columns.values(), strict=True)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def densities(measured: list[dict[str, Any]]) -> str:
    """Seconds on a CPU by the share of visible blocks, and over the seconds of all blocks times that share."""
    groups: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in measured:
        groups.setdefault((row["heads"], row["threads"]), []).append(row)
    columns = {"visible blocks": [f"{row['density']:.1%}" for row in next(iter(groups.values()))]}
    for (heads, threads), rows in groups.items():
        all_of_it = rows[0]["seconds"]
        title = f"{heads} head{'s' * (heads > 1)}, {threads} core{'s' * (threads > 1)}"
        columns[f"{title}: seconds"] = [f"{row['seconds']:.2f}" for row in rows]
        columns["of proportional" + " " * (len(columns) // 2 - 1)] = [f"{row['seconds'] / all_of_it / row['density']:.2f}" for row in rows]
    lines = [columns, ["---"] * len(columns), *zip(*columns.values(), strict=True)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def page(text: str) -> str:
    """The page with its tables made anew."""
    results, density = json.loads(RESULTS.read_text()), json.loads(DENSITY.read_text())
    made_anew = {"gallery": table(results.get("gallery", [])), "building": building(results["building"])}
    for name, made in (made_anew | {"density": densities(density["rows"])}).items():
        begin, end = f"<!-- {name}: begin -->\n", f"\n<!-- {name}: end -->"
        text = text[: text.index(begin) + len(begin)] + made + text[text.index(end) :]
    return text


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
