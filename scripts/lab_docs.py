"""Rewrites what is generated in docs/lab.md from committed results files: tables, figures, and the notebook made from the page.

python -m tilewise.lab --device cpu --out benchmarks/results/lab-cpu.jsonl # counts, a minute on a CPU (start from an empty file)
python -m tilewise.lab.resources --out benchmarks/results/lab-cpu.jsonl    # head dimensions, needs Triton
python scripts/lab_docs.py
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from tilewise.lab import figures, results
from tilewise.lab.predict import traffic_over_compute
from tilewise.lab.results import Row
from tilewise.lab.run import exponent, size

ROOT = Path(__file__).parents[1]
PAGE, NOTEBOOK = ROOT / "docs" / "lab.md", ROOT / "docs" / "lab.ipynb"


def files() -> list[Path]:
    """The lab's results files."""
    return sorted((ROOT / "benchmarks" / "results").glob("lab-*.jsonl"))


def page(text: str, rows: list[Row]) -> str:
    """The page with its generated parts made from these rows."""

    def part(match: re.Match[str]) -> str:
        body = PARTS[match[1]](rows)
        return f"<!-- generated: {match[1]} -->\n{body}{'' if body.endswith(chr(10)) or not body else chr(10)}<!-- end -->"

    return re.sub(r"<!-- generated: (\w+) -->\n.*?<!-- end -->", part, text, flags=re.DOTALL)


def notebook(text: str) -> str:
    """The page as an executable notebook, without outputs."""
    import jupytext
    import nbformat

    made = jupytext.reads(text, fmt="md")
    for number, cell in enumerate(made.cells):
        cell["id"] = f"cell-{number}"  # random ids would change the file every time
    made.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return nbformat.writes(made) + "\n"


# ------------------------------------------------------------------------------------------------------------- generated parts


def table(headings: list[str], lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (headings, ["---"] * len(headings), *lines)) + "\n"


def hierarchy(rows: list[Row]) -> str:
    found = figures.of(rows, "hierarchy")
    if not found:
        return ""
    row = found[-1]
    return f"Measured on {row['device']}:\n\n" + table(
        ["", "size", "speed"],
        [
            ["registers", f"{size(row['register_bytes_per_sm'])} × {row['multiprocessors']}", ""],
            ["shared memory", f"{size(row['shared_bytes_per_block'])} a block × {row['multiprocessors']}", ""],
            ["L2", size(row["l2_bytes"]), f"{row['l2_read_bytes_per_s'] / 1e12:.1f} TB/s, read"],
            ["device memory", size(row["device_bytes"]), f"{row['copy_bytes_per_s'] / 1e12:.2f} TB/s, copy"],
            ["bf16 products", "", f"{row['matmul_flops_per_s'] / 1e12:.0f} TFLOP/s"],
        ],
    )


def byte_table(rows: list[Row]) -> str:
    counted = [row for row in figures.of(rows, "bytes") if row.get("counted_bytes") is not None]
    if not counted:
        return ""
    n, d = max(row["seqlen"] for row in counted), max(row["head_dim"] for row in counted)
    lines = [
        [
            figures.STYLE[row["algorithm"]][2] + (" (full mask)" if row["algorithm"] == "block_sparse" else ""),
            {"fwd": "forward", "bwd": "backward"}[row["pass"]],
            *(size(row[key]) for key in ("predicted_bytes", "counted_bytes", "predicted_device_bytes")),
            *(size(row[key]) for key in ("predicted_extra_bytes", "counted_extra_bytes")),
            f"{row['flops'] / 1e6:.0f}",
            f"{row['exponentials'] / 1e6:.2f}",
        ]
        for row in counted
        if (row["seqlen"], row["head_dim"]) == (n, d)
    ]
    headings = ["step", "pass", "predicted", "counted", "behind L2", "extra predicted", "extra counted", "MFLOP", "M exponentials"]
    all_counted = [row for row in rows if row.get("counted_bytes") is not None]
    equal = sum(row["counted_bytes"] == row["predicted_bytes"] for row in all_counted)
    note = f"One head of N = {n}, d = {d} in float32, tiles of {counted[-1]['block_m']}. "
    return table(headings, lines) + f"\n{note}Over all sizes and steps {equal} of {len(all_counted)} counts equal their prediction.\n"


def theorem(rows: list[Row]) -> str:
    lines = []
    for row in figures.of(rows, "theorem"):
        on_chip = 4 * row["head_dim"] * row["block_n"]
        scaled = row["counted_bytes"] / 4 * on_chip / (row["seqlen"] * row["head_dim"]) ** 2
        lines.append([f"{on_chip:,}", f"{row['block_m']} × {row['block_n']}", size(row["counted_bytes"]), f"{scaled:.2f}"])
    head = (
        "The first paper's tiles (Algorithm 1, line 1) for M numbers on chip; the last column would be constant if Θ were an equality:\n\n"
    )
    return head + table(["M", "tiles", "counted", "accesses · M / N²d²"], lines) if lines else ""


def head_dims(rows: list[Row]) -> str:
    lines = []
    for row in sorted(figures.of(rows, "headdim"), key=lambda row: (row["head_dim"], row["algorithm"], -row["block_m"], -row["block_n"])):
        if "shared_bytes" not in row or (row["block_m"], row["block_n"]) in ((128, 64), (16, 16)):  # the figure has them
            continue
        spilled = f", spills {row['spill_bytes']:,} bytes a thread" if row["spill_bytes"] else ""
        verdict = ("fits" if row["fits"] else "does not fit") + spilled
        name = "d cut" if row["algorithm"] == "split_dim" else "whole d"
        cells = [
            str(row["head_dim"]),
            name,
            f"{row['block_m']} × {row['block_n']}",
            size(row["shared_bytes"]),
            str(row["registers"]),
            verdict,
        ]
        lines.append(cells)
    if not lines:
        return ""
    limit = next(row["shared_limit"] for row in rows if "shared_limit" in row)
    note = f"\nbf16, compiled for Hopper; a block may use {size(limit)} of shared memory.\n"
    return table(["d", "kernel", "tiles", "shared memory", "registers", ""], lines) + note


def claim(rows: list[Row]) -> str:
    lines = [[row["claim"], row["said"], row["found"]] for row in figures.of(rows, "claim")]
    return table(["", "said", "found"], lines) if lines else ""


def measured(rows: list[Row], experiment: str, varied: dict[str, Callable[[Row], str]]) -> str:
    """A sweep by a GPU's own counters: bytes asked of L2 and moved behind it, each over its prediction; time over the roofline."""
    lines = []
    for row in sorted(figures.of(rows, experiment), key=lambda row: row["algorithm"]):
        if "ms" not in row:
            continue
        cells = [figures.STYLE[row["algorithm"]][2], *(show(row) for show in varied.values())]
        if row["status"] != "ok":
            lines.append([*cells, "does not fit", *[""] * 5])
            continue
        pairs = [
            cell
            for kind, key in (("l2", "predicted_bytes"), ("device", "predicted_device_bytes"))
            for cell in (size(row[key]), f"{row[f'{kind}_ratio']:.2f}" if row.get(f"{kind}_ratio") else "")
        ]
        lines.append([*cells, *pairs, f"{row['ms']:.3f}", f"{row['roofline_ms']:.3f}"])
    if not lines:
        return ""
    first = next(row for row in figures.of(rows, experiment) if row.get("ms"))
    fixed = [f"N = {first['seqlen']}", *([] if "d" in varied else [f"d = {first['head_dim']}"]), first["dtype"], first["device"]]
    headings = ["step", *varied, "predicted", "L2 measured / predicted", "behind L2", "device measured / predicted", "ms", "roofline ms"]
    return f"{', '.join(fixed)}:\n\n" + table(headings, lines)


def _tiles(row: Row) -> str:
    return f"{row['block_m']} × {row['block_n']}"


def tile_sweep(rows: list[Row]) -> str:
    return measured(rows, "tiles", {"tiles": _tiles})


def density_sweep(rows: list[Row]) -> str:
    return measured(rows, "density", {"density": lambda row: f"{row['density']:g}"})


def head_dim_sweep(rows: list[Row]) -> str:
    return measured(rows, "headdim", {"d": lambda row: str(row["head_dim"]), "tiles": _tiles})


def gpu(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        if row["experiment"] not in ("bytes", "production", "softmax") or not row.get("ms"):
            continue
        # What the library asks L2 for depends on tiles that its table chooses: only traffic behind the cache is predicted for it.
        keys = ("l2_ratio" if row["algorithm"] != "tilewise" else "", "device_ratio")
        ratio = [f"{row[key]:.2f}" if row.get(key) else "" for key in keys]
        shape = [str(row["seqlen"]), str(row["head_dim"])]
        name = figures.STYLE[row["algorithm"]][2]
        lines.append(
            [name, row["pass"], *shape, size(row["predicted_device_bytes"]), *ratio, f"{row['ms']:.3f}", f"{row['roofline_ms']:.3f}"]
        )
    if not lines:
        return ""
    pictures = [f"![{name}](figures/lab-{name}.svg)" for name in ("traffic", "speed") if (ROOT / f"docs/figures/lab-{name}.svg").exists()]
    device = next(row["device"] for row in rows if row.get("ms"))
    headings = [
        "step",
        "pass",
        "N",
        "d",
        "predicted behind L2",
        "L2 measured / predicted",
        "device measured / predicted",
        "ms",
        "roofline ms",
    ]
    found = "\n".join(filter(None, (traffic_over_products(rows), memory_exponents(rows))))
    parts = ["\n".join(pictures), found, f"{device}, bf16; for softmax N rows of length d:", table(headings, lines)]
    return "\n\n".join(filter(None, parts))


def traffic_over_products(rows: list[Row]) -> str:
    """Measured time of standard attention over that of its products alone, beside the ratio of traffic to products."""
    memories = figures.of(rows, "hierarchy")
    standard = [row for row in figures.of(rows, "bytes", algorithm="standard") if row.get("ms")]
    if not memories or not standard:
        return ""
    bandwidth, matmul = memories[-1]["copy_bytes_per_s"], memories[-1]["matmul_flops_per_s"]
    said = []
    for d in sorted({row["head_dim"] for row in standard}):
        row = max((row for row in standard if row["head_dim"] == d), key=lambda row: row["seqlen"])
        measured = row["ms"] / 1e3 * matmul / row["flops"]
        said.append(f"{measured:.1f} at d = {d} (predicted from four passes: {traffic_over_compute(d, bandwidth, matmul, passes=4):.1f})")
    return f"Standard attention takes longer than its products at full speed by a factor of {', '.join(said)}."


def memory_exponents(rows: list[Row]) -> str:
    said = []
    for name in ("standard", "fa1", "fa2", "tilewise"):
        own = figures.of(rows, "memory", algorithm=name, **{"pass": "fwd"})
        if len(own) > 1:
            said.append(f"N^{exponent(own, 'measured_extra_bytes'):.2f} ({figures.STYLE[name][2]})")
    return f"Extra memory by torch's allocator grows as {', '.join(said)}." if said else ""


PARTS: dict[str, Callable[[list[Row]], str]] = {
    "hierarchy": hierarchy,
    "bytes": byte_table,
    "theorem": theorem,
    "headdim": head_dims,
    "tiles": tile_sweep,
    "density": density_sweep,
    "widths": head_dim_sweep,
    "claim": claim,
    "gpu": gpu,
}


def main() -> None:
    figures.draw(files(), ROOT / "docs" / "figures")
    rows = [row for path in files() for row in results.read(path)]
    text = page(PAGE.read_text(), rows)
    PAGE.write_text(text)
    NOTEBOOK.write_text(notebook(text))


if __name__ == "__main__":
    main()
