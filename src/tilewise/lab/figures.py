"""The pictures of `docs/lab.md`, each drawn from rows of a results file and from nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from . import results
from .results import Row
from .run import exponent

# Colours that stay apart for the colour-blind (Okabe and Ito); each step also has a marker of its own.
STYLE = {
    "standard": ("#7F6FBF", "*", "standard, S and P stored"),
    "fa1": ("#0072B2", "s", "FlashAttention-1 order"),
    "fa2": ("#D55E00", "o", "FlashAttention-2 order"),
    "split_dim": ("#009E73", "D", "FlashAttention-2 order, D cut"),
    "block_sparse": ("#CC79A7", "P", "block-sparse"),
    "softmax_3": ("#7F6FBF", "*", "safe, 3 passes"),
    "softmax_2": ("#0072B2", "s", "online, 2 passes"),
    "softmax_1": ("#D55E00", "o", "row on chip, 1 pass"),
    "tilewise": ("#000000", "^", "tilewise.attention"),
}
MIB = 2**20


def draw(paths: Iterable[Path], folder: Path) -> list[Path]:
    """Draws every picture that the rows of these files allow into `folder` as SVG and returns the files."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.hashsalt": "tilewise", "svg.fonttype": "path", "font.size": 10, "axes.grid": True, "grid.color": "#dddddd"}
    rows = [row for path in paths for row in results.read(path)]
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name, picture in PICTURES.items():
        figure = picture(plt, rows)
        if figure is None:
            continue
        path = folder / f"lab-{name}.svg"
        figure.savefig(path, facecolor="white", bbox_inches="tight", metadata={"Date": None})
        plt.close(figure)
        made.append(path)
    return made


def of(rows: list[Row], experiment: str, **keys: Any) -> list[Row]:
    """The rows of one experiment that have these keys and hold a result."""
    return [row for row in rows if row["experiment"] == experiment and all(row.get(key) == value for key, value in keys.items())]


def bytes_and_memory(plt: Any, rows: list[Row]) -> Any:
    """Traffic and extra memory against N: lines are predicted, markers counted."""
    chosen = [row for row in of(rows, "bytes") if row.get("counted_bytes")]
    if not chosen:
        return None
    d = max(row["head_dim"] for row in chosen)
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name in ("standard", "fa1", "fa2"):
        own = of(chosen, "bytes", algorithm=name, head_dim=d, **{"pass": "fwd"})
        colour, marker, label = STYLE[name]
        n = [row["seqlen"] for row in own]
        for axis, what in zip(axes, ("bytes", "extra_bytes"), strict=True):
            shown = label if what == "bytes" else f"{label}: N^{exponent(own, 'counted_extra_bytes'):.2f}"
            axis.plot(n, [row[f"predicted_{what}"] / MIB for row in own], color=colour, label=shown)
            axis.plot(n, [row[f"counted_{what}"] / MIB for row in own], marker, color=colour, markersize=8)
    for axis, title in zip(axes, ("moved between chip and device memory", "memory beside inputs and output"), strict=True):
        _log_axes(axis, sorted({row["seqlen"] for row in chosen}), "N")
        axis.set(title=f"{title}, d = {d}", ylabel="MiB a head (float32)")
        axis.legend(frameon=False)
    figure.supxlabel("lines: predicted; markers: counted", fontsize=9)
    return figure


def tile_size(plt: Any, rows: list[Row]) -> Any:
    """Traffic against tile size, counted on a CPU; and time, where a GPU was measured."""
    counted = [row for row in of(rows, "tiles") if row.get("counted_bytes")]
    timed = [row for row in of(rows, "tiles") if row.get("ms")]
    if not counted:
        return None
    figure, axes = plt.subplots(1, 1 + bool(timed), figsize=(5 + 5 * bool(timed), 4), layout="constrained", squeeze=False)
    for name in ("fa1", "fa2"):
        colour, marker, label = STYLE[name]
        own = of(counted, "tiles", algorithm=name)
        axes[0, 0].plot([r["block_m"] for r in own], [r["predicted_bytes"] / MIB for r in own], color=colour, label=label)
        axes[0, 0].plot([r["block_m"] for r in own], [r["counted_bytes"] / MIB for r in own], marker, color=colour, markersize=8)
        if timed:
            own = of(timed, "tiles", algorithm=name)
            axes[0, 1].plot([r["block_m"] for r in own], [r["ms"] for r in own], color=colour, marker=marker, label=label)
    titles = [(counted, "MiB a head (float32)", "moved"), (timed, "ms", f"time, {timed[0]['device']}" if timed else "")]
    for axis, (own, unit, what) in zip(axes[0], titles, strict=False):
        _log_axes(axis, sorted({row["block_m"] for row in own}), "rows and columns of a tile")
        axis.set(title=f"{what}, N = {own[0]['seqlen']}, d = {own[0]['head_dim']}", ylabel=unit)
        axis.legend(frameon=False)
    return figure


def density(plt: Any, rows: list[Row]) -> Any:
    """Block-sparse traffic (and, from a GPU, time) against the density of the mask, relative to a full mask."""
    counted = [row for row in of(rows, "density") if row.get("counted_bytes")]
    if not counted:
        return None
    figure, axis = plt.subplots(figsize=(5, 4), layout="constrained")
    colour, marker, _ = STYLE["block_sparse"]
    full = max(counted, key=lambda row: row["density"])
    x = [row["density"] for row in counted]
    axis.plot(x, [row["predicted_bytes"] / full["predicted_bytes"] for row in counted], color=colour, label="bytes predicted")
    axis.plot(x, [row["counted_bytes"] / full["counted_bytes"] for row in counted], marker, color=colour, label="bytes counted")
    timed = [row for row in of(rows, "density") if row.get("ms")]
    if timed:
        longest, device = max(timed, key=lambda row: row["density"])["ms"], f"{timed[0]['device']}, N = {timed[0]['seqlen']}"
        x, y = [row["density"] for row in timed], [row["ms"] / longest for row in timed]
        axis.plot(x, y, "s-", color="#0072B2", label=f"time, {device}")
    axis.plot([0, 1], [0, 1], "--", color="#888888", label="proportional")
    axis.set(xlabel="density of the block mask", ylabel="share of the full mask")
    axis.set_title(f"block-sparse, N = {full['seqlen']}, d = {full['head_dim']}")
    axis.legend(frameon=False)
    return figure


def loop_orders(plt: Any, rows: list[Row]) -> Any:
    """Which tile is on chip at each step of both orders, and which cross the border."""
    own = of(rows, "trace")
    if not own:
        return None
    tensors = ("Q", "K", "V", "O", "m", "l")
    tiles = own[0]["seqlen"] // own[0]["block_m"]
    colours = {"on chip": "#d9d9d9", "loaded": "#56b4e9", "stored": "#e69f00", "loaded and stored": "#009e73"}
    figure, axes = plt.subplots(2, 1, figsize=(10, 9), layout="constrained", sharex=True)
    for axis, row in zip(axes, own, strict=True):
        for number, step in enumerate(row["steps"]):
            at_work = {name: step["k_tile"] if name in "KV" else step["q_tile"] for name in tensors}
            cells = {(name, tile): "on chip" for name, tile in at_work.items()} | {(name, tile): how for name, tile, how in step["moved"]}
            for (name, tile), how in cells.items():
                y = tensors.index(name) * (tiles + 1) + tile
                axis.add_patch(plt.Rectangle((number + 0.54, y - 0.46), 0.92, 0.92, color=colours[how]))
        places = [(name, tile) for name in tensors for tile in range(tiles)]
        axis.set_yticks([tensors.index(name) * (tiles + 1) + tile for name, tile in places], [f"{name}{tile}" for name, tile in places])
        axis.tick_params(axis="y", labelsize=7)
        axis.set(xlim=(0.4, len(row["steps"]) + 0.6), ylim=(len(tensors) * (tiles + 1) - 1, -1), xticks=range(1, len(row["steps"]) + 1))
        axis.set_title(f"{STYLE[row['algorithm']][2]}: {row['steps'][-1]['bytes']:,} bytes in all")
        axis.grid(visible=False)
    axes[1].set_xlabel("step")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
    figure.legend(handles, colours, loc="outside lower center", ncols=4, frameon=False)
    return figure


def head_dim(plt: Any, rows: list[Row]) -> Any:
    """Shared memory and registers of the forward kernel against the head dimension; crosses do not fit or spill."""
    chosen = [row for row in of(rows, "headdim") if row.get("shared_bytes")]
    if not chosen:
        return None
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    palette = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#7F6FBF")
    dims = sorted({row["head_dim"] for row in chosen})
    sizes = sorted({(row["block_m"], row["block_n"]) for row in of(chosen, "headdim", algorithm="fa2")}, reverse=True)
    lines = [(f"tiles {m}x{n}", colour, of(chosen, "headdim", algorithm="fa2", block_m=m, block_n=n))
             for (m, n), colour in zip(sizes, palette, strict=False)]  # fmt: skip
    lines.append(("64x64, D in pieces of 128", "#000000", of(chosen, "headdim", algorithm="split_dim")))
    for label, colour, own in lines:
        own = sorted(own, key=lambda row: row["head_dim"])
        for axis, value in zip(axes, (_shared_kib, _registers), strict=True):
            axis.plot([row["head_dim"] for row in own], [value(row) for row in own], color=colour, label=label)
            for row in own:
                good = row["fits"] and not row["spill_bytes"]
                axis.plot(row["head_dim"], value(row), "o" if good else "X", color=colour, markersize=6 if good else 9)
    axes[0].axhline(chosen[0]["shared_limit"] / 1024, color="#888888", linestyle="--")
    axes[1].axhline(255, color="#888888", linestyle="--")
    for axis, title, unit in zip(axes, ("shared memory of a block", "registers of a thread"), ("KiB", ""), strict=True):
        _log_axes(axis, dims, "head dimension")
        axis.set_yscale("linear")
        axis.set(title=title, ylabel=unit)
    axes[0].legend(frameon=False, fontsize=8)
    figure.supxlabel("dashed: the device's limit; crosses: does not fit, or spills registers to device memory", fontsize=9)
    return figure


def measured_traffic(plt: Any, rows: list[Row]) -> Any:
    """Bytes by the GPU's counters over the predicted ones: requests to L2, and device memory behind it."""
    chosen = [row for row in of(rows, "bytes") if row.get("device_ratio")]
    if not chosen:
        return None
    figure, axes = plt.subplots(1, 2, figsize=(12, 4), layout="constrained", sharey=True)
    for axis, key, title in zip(axes, ("l2_ratio", "device_ratio"), ("requests to L2", "device memory"), strict=True):
        for name in ("standard", "fa1", "fa2"):
            for pass_, line in (("fwd", "-"), ("bwd", ":")):
                for d, fill in ((64, "full"), (128, "none")):
                    own = [row for row in of(chosen, "bytes", algorithm=name, head_dim=d, **{"pass": pass_}) if row.get(key)]
                    if not own:
                        continue
                    colour, marker, label = STYLE[name]
                    x, y = [row["seqlen"] for row in own], [row[key] for row in own]
                    axis.plot(x, y, line, marker=marker, fillstyle=fill, color=colour, label=f"{label}, {pass_}, d = {d}")
        axis.axhspan(0.85, 1.15, color="#eeeeee")
        _log_axes(axis, sorted({row["seqlen"] for row in chosen}), "N")
        axis.set_yscale("linear")
        axis.set(title=title, ylabel="measured / predicted")
    handles, labels = axes[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=8)
    return figure


def speed(plt: Any, rows: list[Row]) -> Any:
    """Time over the roofline of every step of the road, on the GPU that was measured."""
    chosen = [row for row in of(rows, "bytes") + of(rows, "production") if row.get("ms") and row["pass"] == "fwd"]
    if not chosen:
        return None
    dims = sorted({row["head_dim"] for row in chosen})
    figure, axes = plt.subplots(1, len(dims), figsize=(5 * len(dims), 4), layout="constrained", squeeze=False)
    for axis, d in zip(axes[0], dims, strict=True):
        for name in ("standard", "fa1", "fa2", "tilewise"):
            own = [row for row in chosen if (row["algorithm"], row["head_dim"]) == (name, d)]
            colour, marker, label = STYLE[name]
            axis.plot([row["seqlen"] for row in own], [row["tflops"] for row in own], color=colour, marker=marker, label=label)
        _log_axes(axis, sorted({row["seqlen"] for row in chosen}), "N")
        axis.set_yscale("linear")
        axis.set(title=f"forward, d = {d}, {chosen[0]['device']}", ylabel="TFLOP/s")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)  # off the lines
    return figure


def _shared_kib(row: Row) -> float:
    return row["shared_bytes"] / 1024


def _registers(row: Row) -> float:
    return row["registers"]


def _log_axes(axis: Any, ticks: list[int], label: str) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.minorticks_off()
    axis.set_xlabel(label)


PICTURES: dict[str, Callable[[Any, list[Row]], Any]] = {
    "bytes": bytes_and_memory,
    "loops": loop_orders,
    "tiles": tile_size,
    "density": density,
    "headdim": head_dim,
    "traffic": measured_traffic,
    "speed": speed,
}
