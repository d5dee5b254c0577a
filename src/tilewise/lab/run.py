"""`tilewise lab`: every step of the road on this machine, prediction beside measurement.

Without a GPU the counted twins run, and every tile they move is compared with the closed form of `predict`. On a CUDA device the kernels
run (`lab.measured`): time and memory are measured, bytes too where the profiler may read the counters.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ..cost import device_named
from . import claims, results, trace
from .algorithms import Inputs, Results
from .predict import L2_BYTES, theorem_elements
from .results import Row
from .sweeps import Point, cpu_points
from .traffic import DeviceMemory

SEQLENS = (256, 512, 1024)
HEAD_DIMS = (32, 64)
ROOFLINE_DEVICE = "NVIDIA H200"
BUDGET_S = {"cpu": 90.0, "cuda": 400.0}


def run_lab(
    seqlens: tuple[int, ...] = SEQLENS,
    head_dims: tuple[int, ...] = HEAD_DIMS,
    *,
    budget_s: float = 90.0,
    on_row: Callable[[Row], None] | None = None,
) -> list[Row]:
    """Counts the bytes of every step on the CPU and returns a row for each; stops before `budget_s` seconds are spent.

    A row has the keys of its `sweeps.Point`, those of `results.predicted`, `counted_bytes`, `counted_loads`, `counted_stores`,
    `counted_extra_bytes`, `error` (the largest absolute difference from float64), `seconds` of the counted run and `status`: "ok", or
    "wrong" where the result is not that of attention. The first rows are the experiments of `claims` and the steps of
    `trace`.

    >>> rows = run_lab((64,), (16,), budget_s=30)
    >>> all(row["counted_bytes"] == row["predicted_bytes"] for row in rows if row["experiment"] == "bytes")
    True
    """
    begin, rows, shared = time.monotonic(), [], results.common("cpu")

    def add(row: Row) -> None:
        rows.append(row)
        if on_row is not None:
            on_row(row)

    for claim in claims.ALL:
        finding = claim()
        add(shared | {"experiment": "claim", "claim": finding.name, "said": finding.said, "found": finding.found,
                      "holds": finding.holds, "numbers": finding.numbers, "status": "ok"})  # fmt: skip
    for row in trace.rows():
        add(shared | row)
    for point in cpu_points(seqlens, head_dims):
        if time.monotonic() - begin > 0.85 * budget_s:
            break
        add(shared | count(point))
    return rows


def count(point: Point) -> Row:
    """One point on the CPU: predicted, counted, checked."""
    step, inputs = point.found(), point.inputs(torch.float32, "cpu")
    prediction = step.predict(inputs.case(), 1)
    memory = DeviceMemory()
    if step.count is None:
        call = step.launch(inputs)
        call()  # the first call pays for imports and plans
        begin = time.perf_counter()
        got = call()
    else:
        begin = time.perf_counter()
        got = step.count(memory, inputs)
    seconds = time.perf_counter() - begin
    errors = error(got, exact(inputs, point.algorithm))
    roofline = device_named(ROOFLINE_DEVICE)
    assert roofline is not None
    counted = {
        "counted_bytes": memory.bytes(),
        "counted_loads": memory.bytes("load"),
        "counted_stores": memory.bytes("store"),
        "counted_extra_bytes": memory.peak_scratch_bytes,
    }
    return {
        **point.row(),
        "dtype": "float32",
        **results.predicted(prediction, L2_BYTES),
        **(counted if step.count is not None else dict.fromkeys(counted)),
        "theorem_elements": theorem_elements(point.n, point.d, max(1, prediction.on_chip_bytes // 4)),
        "roofline_device": ROOFLINE_DEVICE,
        "roofline_ms": prediction.seconds(roofline, "float32", L2_BYTES) * 1e3,
        "seconds": seconds,
        "error": errors,
        "status": "ok" if errors < 1e-4 else "wrong",
    }


def exact(inputs: Inputs, algorithm: str, heads: int | None = None) -> Results:
    """The float64 answer of the specification for the first `heads` heads: o, lse, gradients, or the softmax of the rows."""
    from .. import reference

    q, k, v, do = (getattr(inputs, name)[:heads].double() for name in ("q", "k", "v", "do"))
    if algorithm.startswith("softmax"):
        return {"y": torch.softmax(q, -1)}
    mask = None
    if algorithm == "block_sparse":
        n, tiles = q.shape[1], inputs.tiles
        mask = inputs.tile_mask().repeat_interleave(tiles.block_m, 0).repeat_interleave(tiles.block_n, 1)[:n, :n].to(q.device)
        mask = mask[None, None]
    leaves = [x[None].clone().requires_grad_() for x in (q, k, v)]
    o, lse = reference.attention(*leaves, mask=mask, layout="bhsd")
    grads = torch.autograd.grad(o, leaves, do[None])
    return {"o": o[0].detach(), "lse": lse[0].detach()} | {name: g[0] for name, g in zip(("dq", "dk", "dv"), grads, strict=True)}


def error(got: Results, want: Results) -> float:
    """The largest absolute difference over the results that both have."""
    return max(difference(got[name], want[name]) for name in got if name in want)


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest absolute difference; equal infinities do not differ."""
    got = got[: want.shape[0]].double()
    return torch.where(got == want, 0.0, (got - want).abs()).max().item()


def exponent(rows: Iterable[Row], key: str) -> float:
    """The least-squares slope of log(`key`) over log(seqlen): 2 where memory grows with N^2, 1 with N.

    >>> round(exponent([{"seqlen": n, "bytes": 3 * n**2} for n in (64, 128, 256)], "bytes"), 6)
    2.0
    """
    points = [(math.log(row["seqlen"]), math.log(row[key])) for row in rows if row.get(key)]
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


# ---------------------------------------------------------------------------------------------------------------- printing


def table(rows: list[Row], experiment: str) -> Any:
    """A rich table of one experiment, prediction beside measurement."""
    from rich.table import Table

    chosen = [row for row in rows if row["experiment"] == experiment]
    out = Table(title=TITLES[experiment], title_justify="left", title_style="bold")
    if experiment == "claim":
        for heading in ("claim", "said", "found"):
            out.add_column(heading, overflow="fold")
        for row in chosen:
            out.add_row(row["claim"], row["said"], row["found"])
        return out
    columns = [name for name in ("algorithm", "pass", "seqlen", "head_dim", "tiles", "density") if name in _used(chosen)]
    for heading in columns:
        out.add_column(heading, justify="left" if heading == "algorithm" else "right")
    if experiment == "production":
        for heading in ("least bytes", "extra", "H200 roofline ms", "ms here", "error"):
            out.add_column(heading, justify="right")
        for row in chosen:
            amounts = (size(row["predicted_bytes"]), size(row["predicted_extra_bytes"]), f"{row['roofline_ms']:.4f}")
            out.add_row(*(_cell(row, name) for name in columns), *amounts, f"{row['seconds'] * 1e3:.2f}", f"{row['error']:.0e}")
        return out
    for heading in ("predicted", "counted", "with L2", "extra predicted", "extra counted", "H200 roofline ms", "error"):
        out.add_column(heading, justify="right")
    for row in chosen:
        cells = [_cell(row, name) for name in columns]
        counted = size(row["counted_bytes"])
        if row["counted_bytes"] != row["predicted_bytes"]:
            counted = f"[red]{counted}[/red]"
        out.add_row(
            *cells, size(row["predicted_bytes"]), counted, size(row["predicted_device_bytes"]), size(row["predicted_extra_bytes"]),
            size(row["counted_extra_bytes"]), f"{row['roofline_ms']:.4f}", f"{row['error']:.0e}",
        )  # fmt: skip
    return out


def gpu_table(rows: list[Row], experiment: str) -> Any:
    """As `table`, of rows that a GPU was measured for. Bytes are there where the profiler could count them: those asked of L2 beside the
    prediction without a cache, those of device memory beside the prediction behind one."""
    from rich.table import Table

    chosen = [row for row in rows if row["experiment"] == experiment]
    out = Table(title=GPU_TITLES[experiment], title_justify="left", title_style="bold")
    columns = [name for name in ("algorithm", "pass", "seqlen", "head_dim", "tiles", "density") if name in _used(chosen)]
    for heading in columns:
        out.add_column(heading, justify="left" if heading == "algorithm" else "right")
    kinds: list[tuple[str, str, Callable[[float], str]]]
    if experiment == "memory":
        kinds = [("extra predicted", "predicted_extra_bytes", size), ("extra measured", "measured_extra_bytes", size)]
    else:
        kinds = [("predicted", "predicted_bytes", size), ("L2", "measured_l2_bytes", size), ("/ predicted", "l2_ratio", _ratio)]
        kinds += [("with L2", "predicted_device_bytes", size), ("device", "measured_device_bytes", size)]
        kinds += [("/ predicted", "device_ratio", _ratio), ("roofline ms", "roofline_ms", _milliseconds), ("ms", "ms", _milliseconds)]
        kinds += [("TFLOP/s", "tflops", "{:.0f}".format), ("error", "error", "{:.0e}".format)]
    kinds = [kind for kind in kinds if any(row.get(kind[1]) is not None for row in chosen)]
    for label, *_ in kinds:
        out.add_column(label, justify="right")
    for row in chosen:
        cells = [show(row[key]) if row.get(key) is not None else "" for _, key, show in kinds]
        if row["status"] != "ok":
            cells[-1] = f"[red]{row['status']}[/red]"
        out.add_row(*(_cell(row, name) for name in columns), *cells)
    return out


TITLES = {
    "claim": "Said, and found",
    "softmax": "Softmax over rows (seqlen rows of length head_dim)",
    "bytes": "Bytes between chip and device memory: predicted, and counted tile by tile",
    "production": "tilewise.attention on the same inputs",
    "density": "Block-sparse: traffic falls with the density",
    "theorem": "FlashAttention-1 with the paper's tiles: traffic falls with the memory on chip",
    "tiles": "Bytes against tile size",
}
GPU_TITLES = {
    "softmax": TITLES["softmax"],
    "bytes": "Bytes and time: predicted, and measured",
    "production": TITLES["production"],
    "density": TITLES["density"],
    "tiles": "Bytes and time against tile size",
    "headdim": "Head dimensions",
    "memory": "Memory beside inputs and results, by torch's allocator",
}


def _ratio(value: float) -> str:
    return f"{value:.2f}"


def _milliseconds(value: float) -> str:
    return f"{value:.3f}"


def _used(rows: list[Row]) -> set[str]:
    names = {"algorithm", "seqlen", "head_dim"}
    names |= {name for name in ("pass", "density") if len({row[name] for row in rows}) > 1}
    return names | ({"tiles"} if len({_cell(row, "tiles") for row in rows}) > 1 else set())


def _cell(row: Row, name: str) -> str:
    if name == "tiles":
        return f"{row['block_m']}x{row['block_n']}"
    return f"{row[name]:g}" if isinstance(row[name], float) else str(row[name])


def size(count: float) -> str:
    """Bytes for people.

    >>> size(0), size(1500), size(3 * 2**20)
    ('0', '1.5 KiB', '3.0 MiB')
    """
    for unit in ("", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.1f} {unit}" if unit else f"{count:.0f}"
        count /= 1024
    raise AssertionError


def chosen_device(device: str) -> str:
    """The device that "auto" means: a CUDA device that Triton can compile for, if there is one. Raises where the named one is not there."""
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device is {device!r}; it must be auto, cpu or cuda")
    missing = None if torch.cuda.is_available() else f"torch {torch.__version__} sees no CUDA device"
    if missing is None and find_spec("triton") is None:
        missing = "Triton is not installed"
    if device == "cuda" and missing:
        raise ValueError(f"device is 'cuda', but {missing}; --device cpu counts the bytes of every tile instead")
    return "cpu" if device == "cpu" or missing else "cuda"


def main(
    seqlens: tuple[int, ...] = SEQLENS,
    head_dims: tuple[int, ...] = HEAD_DIMS,
    *,
    device: str = "cpu",
    budget_s: float | None = None,
    out: Path | None = None,
    trace_to: Path | None = None,
    as_json: bool = False,
) -> int:
    """Runs the lab and prints its tables; the body of `tilewise lab`.

    Args:
        seqlens: lengths of the counted runs, which are those on the CPU.
        head_dims: head dimensions of the counted runs.
        device: "cpu" counts bytes, "cuda" measures the kernels, "auto" measures where there is a CUDA device.
        budget_s: seconds after which nothing new is started; None is 90 on the CPU and 400 on a CUDA device.
        out: a file that the rows are appended to as JSON lines.
        trace_to: draw one small case step by step into this HTML file instead.
        as_json: print the rows as JSON lines instead of tables.

    Returns:
        0; 1 where a result was wrong, a count differed from its prediction or nothing could be measured; 2 where the device is not there.
    """
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=150)  # a pipe or a file has no width of its own, and numbers must not be cut
    if trace_to is not None:
        console.print(f"open in a browser: {trace.write_trace(trace_to)}")
        return 0
    try:
        device = chosen_device(device)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    budget_s = BUDGET_S[device] if budget_s is None else budget_s
    if device == "cuda":
        return _measure(console, budget_s, out, as_json)
    rows = _with_progress(console, seqlens, head_dims, budget_s, quiet=as_json)
    if out is not None:
        results.write(rows, out)
    if as_json:
        for row in rows:
            print(json.dumps(row))
    else:
        for experiment in TITLES:
            if any(row["experiment"] == experiment for row in rows):
                console.print(table(rows, experiment))
        for line in closing(rows):
            console.print(line)
    differs = any(row["counted_bytes"] != row["predicted_bytes"] for row in counted_rows(rows))
    return int(differs or any(row["status"] != "ok" for row in rows))


def _measure(console: Any, budget_s: float, out: Path | None, as_json: bool) -> int:
    """The lab on a CUDA device: runs `measured`, and prints its rows."""
    from rich.progress import Progress

    from . import measured

    said: list[str] = []
    with tempfile.TemporaryDirectory() as folder, Progress(console=console, transient=True, disable=as_json) as progress:
        task = progress.add_task("running kernels", total=measured.ROWS)
        file = out or Path(folder, "rows.jsonl")
        rows = measured.run(file, budget_s, say=said.append, on_rows=lambda done: progress.update(task, completed=done))
    if as_json:
        for row in rows:
            print(json.dumps(row))
    else:
        for experiment in GPU_TITLES:
            if any(row["experiment"] == experiment for row in rows):
                console.print(gpu_table(rows, experiment))
        for line in [*said, *measured_closing(rows)]:
            console.print(line, highlight=False)
    return int(not rows or any(row["status"] == "wrong" for row in rows))


def measured_closing(rows: list[Row]) -> list[str]:
    """Sentences that sum up what a GPU measured."""
    checked = [row for row in rows if row.get("error") is not None]
    wrong = sum(row["status"] == "wrong" for row in checked)
    lines = [f"{len(checked) - wrong} of {len(checked)} results were as close to float64 as unfused attention in the same dtype."]
    ratios = [row["device_ratio"] for row in rows if row.get("device_ratio") and row["algorithm"] != "tilewise"]
    if ratios:
        near = sum(abs(ratio - 1) <= 0.15 for ratio in ratios)
        lines.append(f"{near} of {len(ratios)} counts of device memory are within 15 % of their prediction.")
    for name in ("standard", "fa1", "fa2", "tilewise"):
        own = [row for row in rows if (row["experiment"], row.get("algorithm"), row.get("pass")) == ("memory", name, "fwd")]
        own = [row for row in own if row.get("measured_extra_bytes")]
        if len(own) > 1:
            lines.append(f"extra memory of {name} grows as N^{exponent(own, 'measured_extra_bytes'):.2f}")
    return lines


def counted_rows(rows: list[Row]) -> list[Row]:
    """The rows whose bytes were counted tile by tile."""
    return [row for row in rows if row.get("counted_bytes") is not None]


def closing(rows: list[Row]) -> list[str]:
    """Sentences that sum the tables up: how many counts agree, and how memory grows with N."""
    counted = counted_rows(rows)
    equal = sum(row["counted_bytes"] == row["predicted_bytes"] for row in counted)
    lines = [f"{equal} of {len(counted)} counts equal their prediction; every result was compared with float64 attention."]
    for name in ("standard", "fa1", "fa2"):
        own = [row for row in counted if (row["experiment"], row["algorithm"], row["pass"]) == ("bytes", name, "fwd")]
        own = [row for row in own if row["head_dim"] == own[0]["head_dim"]]
        if len({row["seqlen"] for row in own}) > 1:
            lines.append(f"extra memory of {name} grows as N^{exponent(own, 'counted_extra_bytes'):.2f}")
    return lines


def _with_progress(console: Any, seqlens: tuple[int, ...], head_dims: tuple[int, ...], budget_s: float, quiet: bool) -> list[Row]:
    from rich.progress import Progress

    if quiet:
        return run_lab(seqlens, head_dims, budget_s=budget_s)
    with Progress(console=console, transient=True) as progress:
        points = len(list(cpu_points(seqlens, head_dims))) + len(claims.ALL) + 2
        task = progress.add_task("counting tiles", total=points)
        return run_lab(seqlens, head_dims, budget_s=budget_s, on_row=lambda row: progress.advance(task))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def command(arguments: list[str] | None = None) -> int:
    """`python -m tilewise.lab`: the same as `tilewise lab`, without the command-line library."""
    parser = argparse.ArgumentParser(prog="tilewise lab", description=__doc__)
    parser.add_argument("--seqlens", type=_numbers, help="of the runs on the CPU")
    parser.add_argument("--head-dims", type=_numbers, help="of the runs on the CPU")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--budget", type=float)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    if given.seqlens or given.head_dims:
        if given.device == "cuda":
            parser.error("--seqlens and --head-dims are those of the runs on the CPU, whose bytes are counted: add --device cpu")
        given.device = "cpu"
    return main(
        given.seqlens or SEQLENS,
        given.head_dims or HEAD_DIMS,
        device=given.device,
        budget_s=given.budget,
        out=given.out,
        trace_to=given.trace,
        as_json=given.json,
    )
