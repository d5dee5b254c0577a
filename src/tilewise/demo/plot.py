"""The demo's figure: memory and time of attention against context length, on logarithmic axes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

# Two colours of the Okabe-Ito palette, told apart in every common form of colour blindness and in grey; the marker differs as well.
STYLE: dict[str, dict[str, Any]] = {"eager": {"color": "#D55E00", "marker": "s"}, "tilewise": {"color": "#0072B2", "marker": "o"}}
INK, MUTED, PAPER = "#1f2328", "#6e7781", "#ffffff"
UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def draw(results: dict[str, Any], folder: Path) -> list[Path]:
    """Write `memory.png` and `memory.svg` into `folder` from the results of `run`; return their paths.

    Lengths at which eager attention did not fit stand at their predicted memory, hollow and joined by a dashed line. The figure brings
    its own light background, so that it reads the same on a dark page.
    """
    scaling = results["scaling"]
    figure = Figure(figsize=(10.5, 4.6), facecolor=PAPER, layout="constrained")
    memory, seconds = figure.subplots(1, 2)
    _draw_memory(memory, scaling)
    _draw_time(seconds, scaling)
    where = results["device"] if results["device_type"] == "cuda" else f"CPU, {results['threads']} thread{'s' * (results['threads'] > 1)}"
    figure.suptitle(
        f"Causal attention, forward + backward: {scaling['heads']} heads of {scaling['head_dim']}, {scaling['dtype']}, {where}",
        color=INK,
        fontsize=11,
    )
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "memory.png", folder / "memory.svg"]
    with matplotlib.rc_context({"svg.hashsalt": "tilewise"}):  # the same numbers give the same file
        figure.savefig(paths[0], dpi=160)
        figure.savefig(paths[1], metadata={"Date": None})
    return paths


def _draw_memory(axes: Axes, scaling: dict[str, Any]) -> None:
    for provider, style in STYLE.items():
        points = [point for point in scaling["points"] if point["provider"] == provider]
        ran = [(point["seqlen"], point["peak_bytes"]) for point in points if point["status"] == "ok"]
        missed = [(point["seqlen"], point["predicted_bytes"]) for point in points if point["status"] != "ok"]
        missed = [point for point in missed if point[1] is not None]
        if ran:
            axes.plot(*zip(*ran, strict=True), **style, linewidth=2, markersize=6)
            text = "unfused attention: N²" if provider == "eager" else "tilewise: N"
            _label(axes, ran, text, style["color"], above=provider == "eager")
        if missed:
            axes.plot(*zip(*(ran[-1:] + missed), strict=True), color=style["color"], linestyle=(0, (4, 3)), linewidth=1.6)
            axes.plot(*zip(*missed, strict=True), **style, linestyle="none", markersize=7, markerfacecolor=PAPER, markeredgewidth=1.6)
            axes.annotate(
                "did not fit: predicted",
                missed[-1],
                xytext=(-10, 0),
                textcoords="offset points",
                ha="right",
                va="center",
                color=style["color"],
                fontsize=9,
            )
    limit = scaling["memory_limit"]
    axes.axhline(limit, color=MUTED, linewidth=1.2, linestyle=":")
    _frame(axes, scaling, "peak memory beyond the inputs", lambda value, _: human_bytes(value))
    axes.annotate(
        f"memory limit, {human_bytes(limit)}",
        (0.02, limit),
        xycoords=("axes fraction", "data"),
        xytext=(0, 4),
        textcoords="offset points",
        color=MUTED,
        fontsize=9,
    )


def _draw_time(axes: Axes, scaling: dict[str, Any]) -> None:
    for provider, style in STYLE.items():
        ran = [(point["seqlen"], point["seconds"]) for point in scaling["points"] if point["provider"] == provider and point["seconds"]]
        if ran:
            axes.plot(*zip(*ran, strict=True), **style, linewidth=2, markersize=6)
            name = "unfused attention" if provider == "eager" else "tilewise"
            _label(axes, ran, name, style["color"], above=provider == "eager")
    _frame(axes, scaling, "time", lambda value, _: human_seconds(value))


def _label(axes: Axes, points: list[tuple[float, float]], text: str, color: str, *, above: bool) -> None:
    """Name a line at the middle of its points, on the side where the other line is not."""
    anchor = points[len(points) // 2]
    offset, align = ((-8, 6), ("right", "bottom")) if above else ((8, -6), ("left", "top"))
    axes.annotate(text, anchor, xytext=offset, textcoords="offset points", ha=align[0], va=align[1], color=color, fontsize=10)


def _frame(axes: Axes, scaling: dict[str, Any], title: str, format_value: Any) -> None:
    lengths = sorted({point["seqlen"] for point in scaling["points"]})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [human_length(length) for length in lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(lengths[0] / 1.5, lengths[-1] * 1.5)
    axes.yaxis.set_major_formatter(FuncFormatter(format_value))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.margins(y=0.12)
    axes.set_title(title, color=INK, fontsize=10, loc="left")
    axes.set_xlabel("context length N", color=INK)
    axes.tick_params(colors=INK, which="both")
    axes.grid(color="#d0d7de", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_facecolor(PAPER)
    for name, spine in axes.spines.items():
        spine.set_visible(name in ("left", "bottom"))
        spine.set_color(MUTED)


def human_length(length: int) -> str:
    """
    >>> human_length(512), human_length(131072)
    ('512', '128k')
    """
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else str(length)


def human_bytes(count: float) -> str:
    """
    >>> human_bytes(13_400_000_000), human_bytes(2e9), human_bytes(640_000)
    ('13.4 GB', '2 GB', '640 kB')
    """
    scale, unit = next(((scale, unit) for scale, unit in UNITS if count >= scale), (1.0, "B"))
    return f"{count / scale:.3g} {unit}"


def human_seconds(seconds: float) -> str:
    """
    >>> human_seconds(2.0), human_seconds(0.0031), human_seconds(42e-6)
    ('2 s', '3.1 ms', '42 µs')
    """
    scale, unit = next(((scale, unit) for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")) if seconds >= scale), (1e-9, "ns"))
    return f"{seconds / scale:.3g} {unit}"
