"""The demo's progress bar and tables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from tilewise.demo.plot import human_bytes, human_length, human_seconds
from tilewise.demo.run import Progress as Listener
from tilewise.demo.training import NOISE_FACTOR


@contextmanager
def progress_bar(console: Console) -> Iterator[Listener]:
    """A listener for `run` that draws one bar a stage on `console`."""
    columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bars:
        tasks: dict[str, TaskID] = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)

        yield progress


def show(results: dict[str, Any], files: list[Path], console: Console) -> None:
    """Print both loss curves and whether they agree, the table of contexts, and where the files are."""
    _show_training(results["training"], console)
    _show_scaling(results["scaling"], console)
    console.print("written: " + ", ".join(str(path) for path in files), markup=False, highlight=False)


def _show_training(training: dict[str, Any], console: Console) -> None:
    losses = training["losses"]
    _title(
        f"Loss of a {training['parameters']:,}-parameter byte-level GPT on Python's own source (tilewise backend: {training['backend']})",
        console,
    )
    table = Table()
    for column in ("step", "unfused", "tilewise", "gap", "tolerance"):
        table.add_column(column, justify="right")
    last = training["steps"] - 1
    stride = max(1, training["steps"] // 10)
    for step in [*range(0, last, stride), last]:
        table.add_row(
            str(step),
            f"{losses['eager'][step]:.5f}",
            f"{losses['tilewise'][step]:.5f}",
            f"{training['gaps'][step]:.1e}",
            f"{training['tolerances'][step]:.1e}",
        )
    console.print(table)
    console.print(
        f"tolerance: the largest gap so far between the unfused model and itself summing in another order, times {NOISE_FACTOR:.0f}",
        style="dim",
        highlight=False,
    )
    verdict = "agree at every step" if training["agree"] else "DISAGREE: this is a bug, please report it"
    seconds = training["seconds"]
    console.print(
        f"The two curves {verdict}. Training took {seconds['eager']:.1f} s unfused and {seconds['tilewise']:.1f} s with tilewise.\n",
        highlight=False,
    )


def _show_scaling(scaling: dict[str, Any], console: Console) -> None:
    _title(
        f"One causal attention, forward + backward: {scaling['heads']} heads of {scaling['head_dim']}, {scaling['dtype']} "
        f"(tilewise backend: {scaling['backend']})",
        console,
    )
    table = Table()
    for column in ("context", "unfused memory", "tilewise memory", "unfused time", "tilewise time"):
        table.add_column(column, justify="right")
    points = {(point["seqlen"], point["provider"]): point for point in scaling["points"]}
    for length in sorted({length for length, _ in points}):
        eager, ours = points.get((length, "eager")), points.get((length, "tilewise"))
        table.add_row(human_length(length), _memory(eager), _memory(ours), _time(eager), _time(ours))
    console.print(table)
    console.print(
        "memory: the most that torch's allocator held beyond the inputs; in parentheses: predicted, over the limit of "
        + human_bytes(scaling["memory_limit"]),
        style="dim",
        highlight=False,
    )


def _title(text: str, console: Console) -> None:
    console.print(text, style="bold", markup=False, highlight=False)


def _memory(point: dict[str, Any] | None) -> str:
    if point is None:
        return "not run"
    if point["status"] == "ok":
        return human_bytes(point["peak_bytes"])
    return f"({human_bytes(point['predicted_bytes'])})" if point["predicted_bytes"] else "out of memory"


def _time(point: dict[str, Any] | None) -> str:
    return human_seconds(point["seconds"]) if point and point["seconds"] else "-"
