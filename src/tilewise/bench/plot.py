"""Pictures of a results file: speed and memory against length, speed-up against the density of a block mask, and the ratio to the best
peer in every cell."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from .report import provider_label, ratio

Row = dict[str, Any]

# Colours that stay apart for the colour-blind (Okabe and Ito), on white as on near-black; each provider also has its own marker.
STYLE: dict[str, tuple[str, str, str]] = {
    "tilewise": ("#D55E00", "o", "tilewise"),
    "tilewise[hopper]": ("#D55E00", "o", "tilewise (Hopper)"),
    "tilewise[triton]": ("#E69F00", "^", "tilewise (Triton)"),
    "tilewise[hopper deterministic]": ("#8A3A00", "d", "tilewise (Hopper, deterministic)"),
    "tilewise[triton deterministic]": ("#9C6E00", "d", "tilewise (Triton, deterministic)"),
    "tilewise[tiled]": ("#D55E00", "o", "tilewise (tiled)"),
    "tilewise[torch]": ("#E69F00", "^", "tilewise (torch)"),
    "fa4": ("#0072B2", "s", "FlashAttention-4"),
    "fa3": ("#56B4E9", "D", "FlashAttention-3"),
    "fa2": ("#8C8C8C", "v", "FlashAttention-2"),
    "sdpa_flash": ("#8C8C8C", "v", "FlashAttention-2 (SDPA)"),
    "sdpa_cudnn": ("#009E73", "P", "cuDNN (SDPA)"),
    "sdpa_efficient": ("#A0785A", "<", "memory-efficient (SDPA)"),
    "sdpa_math": ("#B0B000", ">", "math (SDPA)"),
    "flex": ("#CC79A7", "X", "FlexAttention"),
    "eager": ("#7F6FBF", "*", "unfused"),
    "xformers": ("#5D8A3A", "h", "xFormers"),
    "flashinfer": ("#4C6A8A", "p", "FlashInfer"),
}
THEMES = {
    "light": {"text": "#1b1b1b", "back": "#ffffff", "grid": "#d9d9d9", "muted": "#5c5c5c"},
    "dark": {"text": "#e8e8e8", "back": "#14171c", "grid": "#3a3f47", "muted": "#a8a8a8"},
}
PASS_NAMES = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "forward + backward"}


def read(paths: Iterable[Path]) -> list[Row]:
    """The rows of results files, in order; each says in `file` where it stands."""
    return [json.loads(line) | {"file": path.name} for path in paths for line in path.read_text().splitlines() if line.strip()]


def latest(rows: Iterable[Row]) -> list[Row]:
    """For each cell and provider the last row that came: a rerun replaces what it repeats, but a run of ours alone no row that was measured
    beside a peer."""
    rows = list(rows)
    with_peers = {(row.get("run_id"), row["case"]) for row in rows if row["provider"] != "tilewise"}
    kept: dict[tuple[Any, ...], Row] = {}
    for row in sorted(rows, key=lambda row: (row.get("run_id"), row["case"]) in with_peers):
        kept[(row["device"], row["case"], row["label"], row["pass"], provider_label(row), row.get("cache"))] = row
    chosen = {id(row) for row in kept.values()}
    return [row for row in rows if id(row) in chosen]


def speed(rows: list[Row], pass_: str, theme: str = "light") -> Figure | None:
    """TFLOP/s against length for the paper grid, one panel a head dim and mask; None where no such row exists."""
    chosen = [r for r in rows if r["case"] in ("paper", "lengths") and r["pass"] == pass_ and r["tflops"] is not None]
    if not chosen:
        return None
    dims = sorted({r["head_dim"] for r in chosen})
    figure, axes = _panels(2, len(dims), theme, share_y=True)
    ceiling = max(r["ceiling_tflops"] for r in chosen)
    top = 1.08 * max(ceiling, *(r["tflops"] for r in chosen))
    for row_of_axes, causal in zip(axes, (False, True), strict=True):
        for axis, dim in zip(row_of_axes, dims, strict=True):
            panel = [r for r in chosen if r["head_dim"] == dim and r["causal"] == causal]
            for label in _order(panel):
                points = sorted((r["seqlen"], r["tflops"]) for r in panel if provider_label(r) == label)
                _line(axis, label, points)
            axis.axhline(ceiling, color=THEMES[theme]["muted"], linewidth=1, linestyle=(0, (1, 2)))
            axis.set_title(f"head dim {dim}, {'causal' if causal else 'full'}", fontsize=10)
            _length_axis(axis, [r["seqlen"] for r in chosen])
            axis.set_ylim(0, top)
    # At its power limit a device sets the clock by what a kernel draws: one that draws less than the product may pass it.
    note = f"{_origin(chosen)}\ndotted: two bf16 matrices of 8192 × 8192 multiplied in the same process, {ceiling:.0f} TFLOP/s"
    note += " at the clock that their power allows; no bound for what draws less"
    _finish(figure, axes, theme, "sequence length", "TFLOP/s", f"Attention {PASS_NAMES[pass_]}", note)
    return figure


def memory(rows: list[Row], pass_: str = "fwd+bwd", theme: str = "light") -> Figure | None:
    """Peak memory of a call against length; lengths that ran out of memory are dashed, at the memory they would have needed."""
    chosen = [r for r in rows if r["kind"] == "memory" and r["pass"] == pass_ and r["status"] in ("ok", "oom")]
    chosen = [r for r in chosen if r["peak_bytes"] is not None or r["status"] == "oom"]
    if not chosen:
        return None
    figure, axes = _panels(1, 1, theme, width=7.0, height=4.6)
    axis = axes[0][0]
    for label in _order(chosen):
        mine = sorted((r for r in chosen if provider_label(r) == label), key=lambda r: r["seqlen"])
        measured = [(r["seqlen"], r["peak_bytes"] / 1e9) for r in mine if r["status"] == "ok"]
        _line(axis, label, measured)
        out = [(r["seqlen"], r["predicted_bytes"] / 1e9) for r in mine if r["status"] == "oom"]
        if out:
            colour, marker, _ = _style(label)
            path = measured[-1:] + out
            axis.plot(*zip(*path, strict=True), color=colour, linestyle="--", linewidth=1.5, zorder=2)
            axis.plot(*zip(*out, strict=True), color=colour, linestyle="none", marker=marker, markerfacecolor="none", zorder=3)
    axis.set_yscale("log")
    axis.margins(y=0.12)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    _length_axis(axis, [r["seqlen"] for r in chosen])
    shape = f"{chosen[0]['heads']} heads of {chosen[0]['head_dim']}, {chosen[0]['dtype']}"
    note = _origin(chosen)
    if any(r["status"] == "oom" for r in chosen):
        note += "\ndashed, hollow: out of memory, drawn at the memory it would need"
    _finish(figure, axes, theme, "sequence length", "GB above the inputs", f"Peak memory, {PASS_NAMES[pass_]}, {shape}", note)
    return figure


def density(rows: list[Row], theme: str = "light") -> Figure | None:
    """Speed-up of block-sparse calls over the fastest dense call of the same problem, against the share of tiles that the mask keeps.

    Rows with a `density` key are drawn, a line of panels for each problem and a panel for each pass; a density of 1 is the dense call.
    Where our line crosses 1 is the break-even point: below that density leaving tiles out pays, whoever serves the dense call.
    """
    grouped: dict[tuple[Any, ...], dict[str, list[Row]]] = {}
    for row in rows:
        if row.get("density") is not None and row["status"] == "ok" and row["ms"]:
            problem = tuple(row[key] for key in ("head_dim", "seqlen", "heads", "dtype"))
            grouped.setdefault(problem, {}).setdefault(row["pass"], []).append(row)
    for passes in grouped.values():
        for pass_ in [p for p, found in passes.items() if not {1} < {r["density"] for r in found}]:
            del passes[pass_]
    problems = sorted(problem for problem, passes in grouped.items() if passes)
    columns = [p for p in PASS_NAMES if any(p in grouped[problem] for problem in problems)]
    if not columns:
        return None
    figure, axes = _panels(len(problems), len(columns), theme, width=1.6 + 4.6 * len(columns), height=1.6 + 3.3 * len(problems))
    for problem, line_of_axes in zip(problems, axes, strict=True):
        for axis, pass_ in zip(line_of_axes, columns, strict=True):
            if pass_ in grouped[problem]:
                _density_panel(axis, grouped[problem][pass_], theme)
                axis.set_title(f"head dim {problem[0]}, N = {problem[1]}, {axis.get_title()}", fontsize=10)
            else:
                axis.set_visible(False)
    drawn = [r for problem in problems for found in grouped[problem].values() for r in found]
    _finish(figure, axes, theme, "share of tiles kept", "over the fastest dense call", "Block-sparse attention", _origin(drawn))
    return figure


def _density_panel(axis: Axes, rows: list[Row], theme: str) -> None:
    muted = THEMES[theme]["muted"]
    dense, least = min(r["ms"] for r in rows if r["density"] == 1), min(r["density"] for r in rows)
    axis.plot([least, 1], [1 / least, 1], color=muted, linewidth=1.2, linestyle=(0, (4, 3)), label="ideal: 1 / density")
    axis.axhline(1, color=muted, linewidth=1)
    title = PASS_NAMES[rows[0]["pass"]]
    for label in _order(rows):
        points = sorted((r["density"], dense / r["ms"]) for r in rows if provider_label(r) == label)
        _line(axis, label, points)
        even = break_even(points) if label.startswith("tilewise") else None
        if even is not None:
            axis.plot([even], [1], marker="|", markersize=20, markeredgewidth=2, color=THEMES[theme]["text"], zorder=4)
            title += f"\n{_style(label)[2]} breaks even at {even:.0%}"
    axis.set_title(title)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.margins(y=0.12)
    axis.xaxis.set_major_locator(FixedLocator(sorted({r["density"] for r in rows})))
    for one in (axis.xaxis, axis.yaxis):
        one.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}%"))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))


def break_even(points: list[tuple[float, float]]) -> float | None:
    """The largest density from which down to the least all speed-ups exceed 1, between the points on logarithmic axes.

    None where not even the least density pays, 1.0 where all do.

    >>> break_even([(0.25, 2.0), (1.0, 0.5)])
    0.5
    >>> break_even([(0.25, 0.9), (1.0, 0.5)]) is None
    True
    """
    points = sorted(points)
    if points[0][1] <= 1:
        return None
    for (x, above), (next_x, below) in itertools.pairwise(points):
        if below <= 1:
            share = math.log(above) / math.log(above / below)
            return math.exp(math.log(x) + share * math.log(next_x / x))
    return points[-1][0]


def heat_map(rows: list[Row], theme: str = "light", case: str = "paper") -> Figure | None:
    """Our speed over the best peer's of the same run in every cell of a group: blue where we are faster, orange where slower, the number in
    each."""
    grouped: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if row["case"] == case and row.get("ms_rounds"):
            grouped.setdefault((row["label"], row["pass"], row.get("run_id", "")), []).append(row)
    cells: dict[tuple[str, tuple[str, str]], tuple[Row, Row]] = {}  # by label and column: ours and the best peer
    for (label, pass_, _), group in grouped.items():
        best = min((r for r in group if r["provider"] != "tilewise"), key=lambda r: r["ms"], default=None)
        if best is not None:
            cells |= {(label, (provider_label(r), pass_)): (r, best) for r in group if r["provider"] == "tilewise"}
    if not cells:
        return None
    columns = sorted({column for _, column in cells}, key=lambda c: (_order_of(c[0]), list(PASS_NAMES).index(c[1])))
    labels = sorted({label for label, _ in cells}, key=_natural)
    figure, axes = _panels(1, 1, theme, width=2.6 + 1.5 * len(columns), height=1.9 + 0.32 * len(labels))
    axis = axes[0][0]
    for (label, column), (mine, best) in cells.items():
        x, y, value = columns.index(column), labels.index(label), ratio(mine, best)
        axis.add_patch(plt.Rectangle((x - 0.49, y - 0.47), 0.98, 0.94, color=_diverging(value)))
        text = f"{value:.2f}  {_style(best['provider'])[2].split(' (')[0].replace('FlashAttention-', 'FA')}"
        axis.text(x, y, text, ha="center", va="center", fontsize=9, color="#10141a")
    axis.set_xlim(-0.5, len(columns) - 0.5)
    axis.set_ylim(len(labels) - 0.5, -0.5)
    axis.set_xticks(range(len(columns)), [f"{PASS_NAMES[p]}\n{_style(name)[2]}" for name, p in columns], fontsize=9)
    axis.set_yticks(range(len(labels)), labels, fontsize=9)
    axis.xaxis.tick_top()
    axis.tick_params(length=0)
    _colours(figure, axes, theme)
    for spine in axis.spines.values():
        spine.set_visible(False)
    kept = [row for pair in cells.values() for row in pair]
    title = "\n".join(["Speed over the best peer's, named in each cell", *textwrap.wrap(_origin(kept), 52)])
    axis.set_title(title, fontsize=11, color=THEMES[theme]["text"], pad=10)
    figure.tight_layout()
    return figure


def fingerprint(rows: Iterable[Row]) -> str:
    """What stands in a picture's title field: which rows it shows."""
    digest = hashlib.sha256(json.dumps(latest(rows), sort_keys=True).encode())
    return f"rows {digest.hexdigest()[:16]}"


def draw(rows: list[Row], folder: Path, themes: Iterable[str] = ("light", "dark"), suffix: str = "svg", prefix: str = "") -> list[Path]:
    """Draws every picture that the rows allow, in each theme, and returns the files: PREFIX NAME-THEME.SUFFIX.

    The `fingerprint` of the rows is each picture's title in its metadata, so that a test can tell whether a picture shows these rows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = latest(rows)
    about = {"Title": fingerprint(rows)} | ({"Date": None} if suffix == "svg" else {})
    written: list[Path] = []
    for theme in themes:
        pictures: dict[str, Figure | None] = {
            **{f"speed-{pass_.replace('+', '-')}": speed(rows, pass_, theme) for pass_ in PASS_NAMES},
            "memory": memory(rows, theme=theme),
            "density": density(rows, theme),
            "ratio": heat_map(rows, theme),
        }
        for name, figure in pictures.items():
            if figure is None:
                continue
            path = folder / f"{prefix}{name}-{theme}.{suffix}"
            with matplotlib.rc_context({"svg.hashsalt": "tilewise"}):  # the same rows give the same file
                figure.savefig(path, facecolor=figure.get_facecolor(), dpi=150, metadata=about)
            plt.close(figure)
            written.append(path)
    return written


# ------------------------------------------------------------------------------------------------------------------------ parts


def _style(label: str) -> tuple[str, str, str]:
    return STYLE.get(label) or STYLE.get(label.split("[")[0]) or ("#777777", ".", label)


def _order(rows: Iterable[Row]) -> list[str]:
    """Providers in the order of STYLE, so that colours and legends agree between panels."""
    return sorted({provider_label(r) for r in rows}, key=_order_of)


def _order_of(label: str) -> tuple[int, str]:
    known = list(STYLE)
    return known.index(label) if label in known else len(known), label


def _natural(label: str) -> list[Any]:
    return [(0, int(part)) if part.isdigit() else (1, part) for part in label.replace("d", "-", 1).split("-") if part]


def _panels(rows: int, columns: int, theme: str, share_y: bool = False, width: float = 0, height: float = 0) -> tuple[Figure, Any]:
    size = (width or 1.2 + 3.4 * columns, height or 1.4 + 2.7 * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, sharey=share_y)
    figure.patch.set_facecolor(THEMES[theme]["back"])
    return figure, axes


def _line(axis: Axes, label: str, points: list[tuple[float, float]]) -> None:
    if not points:
        return
    colour, marker, name = _style(label)
    ours = label.startswith("tilewise")
    x, y = zip(*points, strict=True)
    # Ours is wider and below, so that a peer on the same curve leaves both in sight.
    width, points_wide, order = (3.2, 9, 2) if ours else (1.5, 5, 3)
    axis.plot(x, y, color=colour, marker=marker, markersize=points_wide, linewidth=width, label=name, zorder=order)


def _length_axis(axis: Axes, lengths: Iterable[int]) -> None:
    """A logarithmic axis whose ticks are the lengths themselves, 1024 as 1k."""
    axis.set_xscale("log", base=2)
    ticks = sorted(set(lengths))
    axis.xaxis.set_major_locator(FixedLocator(ticks))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1024:g}k" if value >= 1024 else f"{value:g}"))


def _colours(figure: Figure, axes: Any, theme: str) -> None:
    colour = THEMES[theme]
    for axis in axes.flat:
        axis.set_facecolor(colour["back"])
        axis.tick_params(colors=colour["muted"], labelcolor=colour["text"], labelsize=9)
        axis.xaxis.label.set_color(colour["text"])
        axis.yaxis.label.set_color(colour["text"])
        axis.title.set_color(colour["text"])
        for spine in axis.spines.values():
            spine.set_color(colour["grid"])
        for text in axis.texts:
            if text.get_color() == "black":
                text.set_color(colour["text"])


def _finish(figure: Figure, axes: Any, theme: str, x_label: str, y_label: str, title: str, note: str) -> None:
    colour = THEMES[theme]
    _colours(figure, axes, theme)
    for axis in axes.flat:
        axis.grid(color=colour["grid"], linewidth=0.6)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[-1]:
        axis.set_xlabel(x_label)
    for axis in axes[:, 0]:
        axis.set_ylabel(y_label)
    named: dict[str, Any] = {}
    for axis in axes.flat:
        for handle, name in zip(*axis.get_legend_handles_labels(), strict=True):
            named.setdefault(name, handle)
    columns = min(len(named), 4 if figure.get_figwidth() > 8 else 3)
    lines = -(-len(named) // max(columns, 1))
    inches = figure.get_figheight()
    figure.text(0.5, 1 - 0.1 / inches, title, color=colour["text"], fontsize=12, ha="center", va="top")
    figure.text(0.5, 1 - 0.36 / inches, note, color=colour["muted"], fontsize=9, ha="center", va="top")
    legend = figure.legend(named.values(), named.keys(), loc="lower center", ncols=max(columns, 1), frameon=False, fontsize=9)
    for text in legend.get_texts():
        text.set_color(colour["text"])
    figure.tight_layout(rect=(0, (0.1 + 0.22 * lines) / inches, 1, 1 - (0.42 + 0.16 * len(note.splitlines())) / inches))


def _diverging(value: float) -> tuple[float, float, float]:
    """From orange (half as fast) over near-white (equal) to blue (twice as fast): dark text stays legible on all of it."""
    low, middle, high = (0.96, 0.60, 0.33), (0.95, 0.95, 0.93), (0.45, 0.70, 0.92)
    share = max(-1.0, min(1.0, (value - 1) / 0.5 if value > 1 else (value - 1) / 0.3))
    end = high if share > 0 else low
    r, g, b = (m + (e - m) * abs(share) for m, e in zip(middle, end, strict=True))
    return r, g, b


def _origin(rows: list[Row]) -> str:
    """Device and versions of the rows, the start of their kernels' hash, and the files they stand in."""
    devices = sorted({r["device"] for r in rows})
    torches = sorted({r["torch"] for r in rows})
    hashes = sorted({r["source_hash"][:8] for r in rows})
    files = sorted({r["file"] for r in rows if "file" in r})
    return ", ".join([*devices, f"torch {', '.join(torches)}", f"kernels {', '.join(hashes)}", *files])


def main(arguments: list[str] | None = None) -> int:
    """Entry point of `python -m tilewise.bench plot`; returns the exit status."""
    p = argparse.ArgumentParser("tilewise plot", description="Draw a results file.")
    p.add_argument("results", type=Path, nargs="+", help="results files, JSON lines")
    p.add_argument("--out", type=Path, default=Path("site/figures"), help="folder for the pictures")
    p.add_argument("--format", default="svg", choices=["svg", "png"])
    p.add_argument("--theme", default="both", choices=["both", "light", "dark"])
    p.add_argument("--json", action="store_true", help="print the files written as a JSON list")
    args = p.parse_args(arguments)
    themes = ("light", "dark") if args.theme == "both" else (args.theme,)
    written = draw(read(args.results), args.out, themes, args.format)
    if args.json:
        print(json.dumps([str(path) for path in written]))
    else:
        print("\n".join(map(str, written)) if written else "no row of these files can be drawn")
    return 0 if written else 1
