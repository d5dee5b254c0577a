"""Writes the generated parts of README.md: the support table from the code, the measured results and the figures from benchmarks/results.

python scripts/readme_tables.py            rewrite README.md (and the figures, where matplotlib is installed)
python scripts/readme_tables.py --check    change nothing; exit status 1 if README.md is stale
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tilewise import cost, plan

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
DEMO_RESULTS = RESULTS / "demo.json"
FIGURES = ROOT / "docs" / "figures"
Row = dict[str, Any]

# ---------------------------------------------------------------------------------------------------------------- support table

DTYPES = {"16-bit": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


def targets() -> dict[str, plan.Target]:
    """The devices of the table, as `plan` sees them."""
    found = {"CPU": plan.Target("cpu")}
    for title, name in {
        "NVIDIA Ampere, Ada (A100)": "NVIDIA A100",
        "NVIDIA Hopper (H200)": "NVIDIA H200",
        "NVIDIA Blackwell (B200)": "NVIDIA B200",
        "AMD CDNA 3 (MI300X)": "AMD Instinct MI300X",
    }.items():
        device = cost.device_named(name)
        assert device is not None, name
        found[title] = plan.Target("cuda", device.capability, device.name, hip=device.hip, shared_memory=device.shared_memory)
    return found | {"other torch devices": plan.Target("mps")}


def features(dtype: torch.dtype) -> dict[str, tuple[plan.Operands, plan.Rules, plan.Request]]:
    """One small call per feature: what `plan` needs to choose a backend, on meta tensors."""

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    accumulator = plan.accumulator_dtype(dtype)
    q, kv, wide = tensor(2, 8, 256, 64), tensor(2, 8, 256, 64), tensor(2, 8, 256, 128)
    heads, lengths = tensor(8, dtype=accumulator), tensor(2, dtype=torch.int32)
    plain = plan.Operands(q, kv, kv)
    offsets, row = tensor(3, dtype=torch.int32), tensor(1, 8, 512, 64)
    packed = plan.Operands(row, row, row, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    rules, request = plan.Rules(softmax_scale=0.125), plan.Request()
    causal = replace(rules, window_right=0)
    grouped = tensor(2, 2, 256, 64)
    return {
        "full, causal": (plain, causal, request),
        "sliding window": (plain, replace(causal, window_left=63), request),
        "grouped heads (GQA, MQA)": (plan.Operands(q, grouped, grouped), causal, request),
        "Dv ≠ D": (plan.Operands(q, kv, wide), causal, request),
        "lengths per item (`seqused_*`)": (replace(plain, seqused_q=lengths, seqused_k=lengths), causal, request),
        "packed sequences (`attention_varlen`)": (packed, causal, request),
        "softcap": (plain, replace(causal, softcap=20.0), request),
        "ALiBi": (replace(plain, alibi_slopes=heads[None]), causal, request),
        "learnable sink": (replace(plain, sink=heads), causal, request),
        "boolean mask tensor": (replace(plain, mask=tensor(2, 1, 256, 256, dtype=torch.bool)), rules, request),
        "mask rules other than windows": (plain, replace(rules, mask_mod="q_idx >= kv_idx"), request),
        "score functions": (plain, replace(causal, score_mod="score * 2.0"), request),
        "additive bias": (replace(plain, bias=tensor(1, 8, 256, 256)), rules, request),
        "dropout": (plain, replace(causal, dropout_p=0.1), request),
        "gradient of the LSE": (plain, causal, replace(request, dlse=True)),
        "max_logits, key_mass, entropy": (plain, causal, replace(request, aux=frozenset({"max_logits", "key_mass", "entropy"}))),
        "head dim above 256": (plan.Operands(*(tensor(2, 8, 256, 320) for _ in range(3))), causal, request),
    }


def chosen(t: plan.Operands, r: plan.Rules, request: plan.Request, target: plan.Target) -> str:
    """The backend that `auto` takes."""
    return plan.select(t, r, request=request, target=target, warn=False).backend


def cell(t: plan.Operands, r: plan.Rules, request: plan.Request, target: plan.Target) -> str:
    forward = chosen(t, r, replace(request, dlse=False), target)
    backward = chosen(t, r, replace(request, backward=True), target)
    return forward if forward == backward else f"{forward} / {backward}"


def support_table() -> str:
    """Rows are features; a cell names the backend of `backend="auto"`, forward / backward where they differ. Devices and dtypes that are
    served alike share a column."""
    columns: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for device, target in targets().items():
        for title, dtype in DTYPES.items():
            if target.type == "mps" and dtype == torch.float64:
                continue  # most devices beside CPUs and GPUs have no float64
            cells = tuple(cell(*call, target) for call in features(dtype).values())
            columns.setdefault(cells, {}).setdefault(device, []).append(title)
    heads = ["<br>".join(f"{device}: {', '.join(dtypes)}" for device, dtypes in served.items()) for served in columns.values()]
    rows = [[name, *(cells[index] for cells in columns)] for index, name in enumerate(features(torch.float32))]
    return markdown(["", *heads], rows)


# ------------------------------------------------------------------------------------------------------------- measured results


def read_files(folder: Path = RESULTS) -> list[list[Row]]:
    """The rows of each results file that has any, by name; each row with the name as its `file`."""
    files = []
    for path in sorted(folder.glob("*.jsonl")):
        files.append([json.loads(line) | {"file": path.name} for line in path.read_text().splitlines() if line])
    return [rows for rows in files if rows]


def load_rows(folder: Path = RESULTS) -> list[Row]:
    """All benchmark rows of the results files, oldest run first: files are sorted by the date of their first row, then by name. Each row
    says in `file` where it stands."""
    ordered = sorted(read_files(folder), key=lambda rows: rows[0].get("date") or "")
    return [row for rows in ordered for row in rows if "provider" in row]


def table_rows(rows: list[Row]) -> list[list[Row]]:
    """What the tables show, one list each: of every device and pass the newest run of the paper grid (or of the CPU cases), of those that
    measured a peer and at least half of what any did."""
    tables = []
    for case in ("paper", "cpu"):
        for device in dict.fromkeys(row["device"] for row in rows):
            mine = [row for row in rows if row["device"] == device and row["case"] == case]
            newest: dict[str, str] = {}
            for pass_ in {row["pass"] for row in mine}:
                cells: dict[str, set[str]] = {}
                for row in mine:
                    if row["pass"] == pass_ and row["provider"] != "tilewise":
                        cells.setdefault(row["run_id"], set()).add(f"{problem_name(row)}, {row['seqlen']}")
                wide = [run for run, labels in cells.items() if 2 * len(labels) >= max(map(len, cells.values()))]
                if wide:
                    newest[pass_] = wide[-1]
            if newest:
                tables.append([row for row in mine if row["run_id"] == newest.get(row["pass"])])
    return tables


def results_section(rows: list[Row]) -> str:
    """The tables of the newest runs: speeds of every provider, and who was fastest."""
    parts = [device_section(table) for table in table_rows(rows)]
    return (
        "\n\n".join(parts) if parts else "Nothing has been measured yet: `make gpu` writes the results that this section is generated from."
    )


def device_section(rows: list[Row]) -> str:
    """One run as a table: the longest sequence of each problem, TFLOP/s (or ms on a CPU) per provider, the fastest in bold."""
    first = rows[0]
    unit, key = ("TFLOP/s", "tflops") if first["case"] == "paper" else ("ms", "ms")
    longest = max(row["seqlen"] for row in rows)
    rows = [row for row in rows if row["seqlen"] == longest]
    shapes = list(dict.fromkeys(problem_name(row).rsplit(",", 1)[0] for row in rows))
    rows.sort(key=lambda row: (shapes.index(problem_name(row).rsplit(",", 1)[0]), ("fwd", "bwd", "fwd+bwd").index(row["pass"])))
    providers = list(dict.fromkeys(column_name(row) for row in rows))
    providers.sort(key=lambda name: not name.startswith("tilewise"))
    table = []
    for problem in dict.fromkeys(problem_name(row) for row in rows):
        mine = {column_name(row): row for row in rows if problem_name(row) == problem}
        speeds = {name: row[key] for name, row in mine.items() if row["status"] == "ok" and row[key] is not None}
        best = None if not speeds else (max if key == "tflops" else min)(speeds, key=lambda name: speeds[name])
        table.append([problem, *(value_text(mine.get(name), key, bold=name == best) for name in providers), lead(speeds, key)])
    versions = ", ".join(f"{name} {first[name]}" for name in ("torch", "triton") if first.get(name))
    sources = {row["pass"]: row.get("source_hash", "unknown")[:12] for row in rows}
    if len({*sources.values()}) == 1:
        kernels = f"kernels `{sources[first['pass']]}`"
    else:
        kernels = ", ".join(f"{pass_} with kernels `{hash_}`" for pass_, hash_ in sources.items())
    files = ", ".join(dict.fromkeys(f"`{row['file']}`" for row in rows))
    head = f"**{first['device']}**, N = {longest:,}, {first['dtype']}, {unit}, {versions}, {first['date']}, {kernels}, {files}"
    return f"{head}\n\n{markdown(['', *providers, 'tilewise against the best peer'], table)}"


def column_name(row: Row) -> str:
    return f"tilewise, {row['backend']}" if row["provider"] == "tilewise" and row.get("backend") else row["provider"]


def problem_name(row: Row) -> str:
    if row["case"] == "paper":
        return f"d{row['head_dim']} {'causal' if row['causal'] else 'full'}, {row['pass']}"
    return f"{row['label']}, {row['pass']}"


def value_text(row: Row | None, key: str, *, bold: bool) -> str:
    if row is None:
        return "–"
    if row["status"] != "ok" or row[key] is None:
        return {"oom": "out of memory", "wrong": "wrong result", "unsupported": "not served"}.get(row["status"], "not timed")
    text = f"{row[key]:.0f}" if row[key] >= 100 else f"{row[key]:.3g}"
    return f"**{text}**" if bold else text


def lead(speeds: dict[str, float], key: str) -> str:
    """How many times as fast as the fastest peer tilewise's fastest backend is; below 1 it is slower."""
    ours = [value for name, value in speeds.items() if name.startswith("tilewise")]
    peers = [value for name, value in speeds.items() if not name.startswith("tilewise")]
    if not ours or not peers:
        return "–"
    ratio = max(ours) / max(peers) if key == "tflops" else min(peers) / min(ours)
    return f"{ratio:.2f}"


# -------------------------------------------------------------------------------------------------------------------- the README


def markdown(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def fill(text: str, name: str, body: str) -> str:
    """Replace what stands between `<!-- NAME: begin -->` and `<!-- NAME: end -->`."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = text.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n{body}\n{end}{after}"


def render(text: str) -> str:
    """README.md with its generated parts written anew."""
    return fill(fill(text, "support", support_table()), "results", results_section(load_rows()))


def figure_rows() -> list[Row]:
    """What the benchmark's pictures show: the newest results file of a GPU; of what it leaves out, the newest that has it."""
    files = [rows for rows in read_files() if any(row.get("case") == "paper" for row in rows)]
    shown: list[Row] = []
    for rows in reversed(sorted(files, key=lambda rows: rows[-1].get("date") or "")):
        cases = {(row["device"], row["case"], row["pass"]) for row in shown}
        shown += [row for row in rows if (row["device"], row["case"], row["pass"]) not in cases]
    return shown


def shown() -> dict[str, set[str]]:
    """By results file, what shows its rows: the tables of README.md, and the pictures of the benchmark that are there."""
    found: dict[str, set[str]] = {}
    for row in (row for table in table_rows(load_rows()) for row in table):
        found.setdefault(row["file"], set()).add("README.md")
    for row in figure_rows():
        pictures = {
            f"bench-speed-{row['pass'].replace('+', '-')}": row["case"] in ("paper", "lengths"),
            "bench-ratio": row["case"] == "paper",
            "bench-memory": row["kind"] == "memory" and row["pass"] == "fwd+bwd",
            "bench-density": row.get("density") is not None,
        }
        there = {f"docs/figures/{name}-*.svg" for name, drawn in pictures.items() if drawn and list(FIGURES.glob(f"{name}-*.svg"))}
        found.setdefault(row["file"], set()).update(there)
    return found


def draw_figures() -> None:
    """Draw docs/figures/memory.* from the committed demo results and docs/figures/bench-* from the newest benchmark, where there are some
    and matplotlib is installed."""
    try:
        from tilewise.bench import plot as bench_plot
        from tilewise.demo import plot
    except ImportError:
        return
    if DEMO_RESULTS.exists():
        plot.draw(json.loads(DEMO_RESULTS.read_text()), FIGURES)
    for old in FIGURES.glob("bench-*.svg"):
        old.unlink()
    bench_plot.draw(figure_rows(), FIGURES, prefix="bench-")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    text = README.read_text()
    fresh = render(text)
    if options.check:
        if fresh != text:
            print("README.md is stale: run `make tables`", file=sys.stderr)
        return int(fresh != text)
    README.write_text(fresh)
    draw_figures()
    return 0


if __name__ == "__main__":
    sys.exit(main())
