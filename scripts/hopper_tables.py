"""Writes the tables of docs/hopper-forward.md and docs/hopper-backward.md from committed results, and prints their summaries.

python scripts/hopper_tables.py                  the newest results file that holds two runs of the paper grid, and counters-h200.json
python scripts/hopper_tables.py RESULTS.jsonl    that file
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from tilewise.bench.report import ratio
from tilewise.lab.results import read

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
COUNTERS = RESULTS / "counters-h200.json"
Row = dict[str, Any]
PAGES = {  # pass, peers, matrix products, of which the page tells
    "forward": ("fwd", ("sdpa_cudnn", "fa3", "fa4"), 2),
    "backward": ("bwd", ("sdpa_cudnn", "fa4"), 5),
}
CELLS = [(dim, mask, length) for dim in (64, 128, 256) for mask in ("full", "causal") for length in (1024, 4096, 16384)]


def runs_of(rows: Iterable[Row], pass_: str) -> list[dict[str, dict[str, Row]]]:
    """For each run beside all peers of the pass that has most of the cells: by cell, each provider's row."""
    peers = next(given for name, given, _ in PAGES.values() if name == pass_)
    runs: dict[str, dict[str, dict[str, Row]]] = {}
    for row in rows:
        if row["case"] == "paper" and row["pass"] == pass_ and row["status"] == "ok":
            runs.setdefault(row["run_id"], {}).setdefault(row["label"], {})[row["provider"]] = row
    whole = ({label: cell for label, cell in cells.items() if {"tilewise", *peers} <= cell.keys()} for cells in runs.values())
    return [cells for cells in whole if len(cells) > len(CELLS) // 2]


def cells_table(runs: list[dict[str, dict[str, Row]]], peers: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """The rows of the 18 cells, in each all runs that have it, and a summary of each run."""
    lines, summaries = [], []
    against: list[dict[str, list[float]]] = [{"best": [], "cudnn": [], "small": []} for _ in runs]
    for dim, mask, length in CELLS:
        label = f"d{dim}-{mask}-{length}"
        found = [run[label] for run in runs if label in run]
        speeds = [", ".join(f"{cell[name]['tflops']:.0f}" for cell in found) for name in ("tilewise", *peers)]
        cudnn = [ratio(cell["tilewise"], cell["sdpa_cudnn"]) for cell in found]
        best = [ratio(cell["tilewise"], min((cell[peer] for peer in peers), key=lambda row: row["ms"])) for cell in found]
        records = [record for record, run in zip(against, runs, strict=True) if label in run]
        for record, of_best, of_cudnn in zip(records, best, cudnn, strict=True):
            record["best"].append(of_best)
            record["cudnn"].append(of_cudnn)
            record["small"] += [of_best] * (dim < 256)
        ratios = [", ".join(f"{x:.2f}" for x in values) for values in (cudnn, best)]
        lines.append(f"| d{dim} {mask}, {length // 1024}k | {' | '.join(speeds + ratios)} |")
    for record in against:
        mean, small = geometric_mean(record["best"]), geometric_mean(record["small"])
        least = f"least {min(record['best']):.3f}; cuDNN least {min(record['cudnn']):.3f}; d64 and d128 alone {small:.3f}"
        summaries.append(f"{len(record['best'])} cells, best peer: geometric mean {mean:.3f}, {least}")
    return lines, summaries


def counters_table(pass_: str, products: int) -> list[str]:
    """How far each cell is from the bounds, from the profiler's counters."""
    lines = []
    cells = {cell["label"]: cell for cell in json.loads(COUNTERS.read_text())["cells"] if cell["pass"] == pass_}
    for dim, mask, length in CELLS:
        cell = cells[f"d{dim}-{mask}-{length}"]
        operations = products * 2 * 16_384 * length * 2048 / (2 if mask == "causal" else 1)
        cycles, seconds = cell["cycles"], cell["nanoseconds"] / 1e9
        percents = [100 * operations / (132 * 4096 * cycles), *(cell[f"{unit}_percent"] for unit in ("mufu", "shared", "issue"))]
        idle = 100 * (1 - cell["cycles_active"] / cycles)
        ends = [f"{cycles / seconds / 1e9:.2f}", f"{cell['l2_bytes'] / seconds / 1e12:.1f}", f"{idle:.0f}"]
        lines.append(f"| d{dim} {mask}, {length // 1024}k | {' | '.join([*(f'{x:.0f}' for x in percents), *ends])} |")
    return lines


def replaced(text: str, header: str, lines: list[str]) -> str:
    """`text` with other rows in the table whose header begins so."""
    given = text.split("\n")
    first = next(i for i, line in enumerate(given) if line.startswith(header)) + 2
    last = next(i for i in range(first, len(given) + 1) if i == len(given) or not given[i].startswith("|"))
    return "\n".join([*given[:first], *lines, *given[last:]])


def newest() -> Path:
    """The results file of the last two runs of the whole grid, by date and name."""
    files = [path for path in RESULTS.glob("nvidia-h200-*.jsonl") if all(len(runs_of(read(path), p)) > 1 for p in ("fwd", "bwd"))]
    return max(files, key=lambda path: (read(path)[-1]["date"], path.name))


def main(arguments: list[str]) -> int:
    path = Path(arguments[0]) if arguments else newest()
    rows = read(path)
    print(path.name)
    for name, (pass_, peers, products) in PAGES.items():
        page = ROOT / "docs" / f"hopper-{name}.md"
        lines, summaries = cells_table(runs_of(rows, pass_), peers)
        text = replaced(page.read_text(), f"| {name} | ours |", lines)
        page.write_text(replaced(text, f"| {name} | tensor |", counters_table(pass_, products)))
        print(name, *summaries, sep="\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
