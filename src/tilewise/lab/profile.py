"""The bytes that a GPU really moves, by its own counters.

`launch` runs points once between markers, and `probe` next to nothing, which shows in seconds whether the counters may be read at all.
Both are meant to be started by the profiler. `lab.measured` does that, in parts, so that a run that is cut short keeps the parts before it.
`merge` reads what the profiler wrote and adds the sums of each point to the rows of `lab.gpu`.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from .gpu import DTYPE
from .results import Row
from .sweeps import Point, gpu_points

MARKER = "lab_marker_kernel"
SECTOR = 32  # bytes
# What the profiler is asked for, and what each becomes: (key, factor). A device that lacks one can do without it.
METRICS = {
    "dram__bytes_read.sum": ("measured_device_loads", 1),
    "dram__bytes_write.sum": ("measured_device_stores", 1),
    "lts__t_sectors_srcunit_tex_op_read.sum": ("measured_l2_loads", SECTOR),
    "lts__t_sectors_srcunit_tex_op_write.sum": ("measured_l2_stores", SECTOR),
    "lts__t_bytes.sum": ("measured_l2_all_bytes", 1),
    "gpu__time_duration.sum": ("profiled_ns", 1),
}
FALLBACK_METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum", "lts__t_bytes.sum", "gpu__time_duration.sum")


def part_of(part: str) -> list[tuple[int, Point]]:
    """The numbered points of a part, "1/4" for the first quarter; their numbers count over all parts.

    >>> sum(len(part_of(f"{index}/4")) for index in (1, 2, 3, 4)) == len(part_of("1/1"))
    True
    >>> part_of("2/4")[0][0] == part_of("1/4")[-1][0] + 1
    True
    """
    index, parts = (int(number) for number in part.split("/"))
    points = list(enumerate(gpu_points(), start=1))
    return points[len(points) * (index - 1) // parts : len(points) * index // parts]


def probe() -> None:
    """One marker under the profiler."""
    from .triton.probes import lab_marker_kernel

    scratch = torch.zeros(1, device="cuda")
    torch.cuda.cudart().cudaProfilerStart()
    lab_marker_kernel[(1,)](scratch)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def launch(plan: Path, part: str, budget_s: float) -> None:
    """Runs every point of a part once under the profiler, a marker before each, and writes which marker stands for which point."""
    from .triton.probes import lab_marker_kernel

    begin, runtime = time.monotonic(), torch.cuda.cudart()
    scratch, planned = torch.zeros(1, device="cuda"), []
    lab_marker_kernel[(1,)](scratch)
    for number, point in part_of(part):
        if time.monotonic() - begin > budget_s:
            print(f"budget of {budget_s:.0f} s spent before point {number}")
            break
        try:
            call = point.found().launch(point.inputs(DTYPE, "cuda"))
            call()  # compiled before it is profiled
        except Exception as refusal:  # `lab.gpu` reports what does not launch
            print(f"{point}: {type(refusal).__name__}", flush=True)
            continue
        torch.cuda.synchronize()
        runtime.cudaProfilerStart()
        lab_marker_kernel[(number,)](scratch)
        call()
        torch.cuda.synchronize()
        runtime.cudaProfilerStop()
        planned.append({"marker": number, **asdict(point)})
        plan.write_text(json.dumps(planned))
        del call
        torch.cuda.empty_cache()


def kernels(text: str) -> Iterator[tuple[str, int, dict[str, float]]]:
    """(name, first grid dimension, metrics in base units) of every profiled kernel, in order, from the profiler's CSV.

    >>> lines = ['==PROF== Connected', '"ID","Kernel Name","Grid Size","Metric Name","Metric Unit","Metric Value"']
    >>> lines += ['"0","a","(7, 1, 1)","dram__bytes_read.sum","byte","1,024"']
    >>> list(kernels("\\n".join(lines)))
    [('a', 7, {'dram__bytes_read.sum': 1024.0})]
    """
    lines = text.splitlines()
    start = next((index for index, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise ValueError("the profiler's file holds no table: it says " + " / ".join(lines[-3:]))
    found: dict[int, tuple[str, int, dict[str, float]]] = {}
    for row in csv.DictReader(io.StringIO("\n".join(line for line in lines[start:] if line.startswith('"')))):
        grid = re.match(r"\(?(\d+)", row["Grid Size"].replace(" ", ""))
        assert grid is not None, row
        metrics = found.setdefault(int(row["ID"]), (row["Kernel Name"], int(grid[1]), {}))[2]
        value = row["Metric Value"].replace(",", "")
        if re.fullmatch(r"[\d.]+(e[+-]?\d+)?", value):  # "n/a" where the device has no such counter
            metrics[row["Metric Name"]] = float(value)
    for number in sorted(found):
        yield found[number]


def sums(text: str) -> dict[int, Row]:
    """By marker, the measured keys summed over the kernels that followed it, and their number."""
    totals: dict[int, Row] = {}
    current: Row | None = None
    for name, grid, metrics in kernels(text):
        if name.startswith(MARKER):
            current = totals[grid] = defaultdict(float, kernels=0)
        elif current is not None:
            current["kernels"] += 1
            for metric, value in metrics.items():
                if metric in METRICS:
                    key, factor = METRICS[metric]
                    current[key] += value * factor
    return {marker: dict(row) for marker, row in totals.items()}


def merge(csv_texts: Iterable[str], plan: list[Row], rows: list[Row]) -> list[Row]:
    """The rows with measured bytes beside the predicted ones; rows of points that were not profiled stay as they are."""
    measured = {marker: total for text in csv_texts for marker, total in sums(text).items()}
    by_point = {}
    for planned in plan:
        fields = dict(planned)
        total = measured.get(fields.pop("marker"))
        if total is not None:
            by_point[json.dumps(Point(**fields).row(), sort_keys=True)] = total
    merged = []
    for row in rows:
        point_keys = {key: row.get(key) for key in Point("", "", "", 0, 0, 0, 0, 0).row()}
        extra = by_point.get(json.dumps(point_keys, sort_keys=True), {})
        merged.append(row | extra | _ratios(row, extra))
    return merged


def _ratios(row: Row, measured: Row) -> Row:
    """Measured over predicted: requests to L2 against the bytes without a cache, device memory against those with one."""
    ratios: Row = {}
    if "measured_l2_loads" in measured:
        measured_l2 = measured["measured_l2_loads"] + measured.get("measured_l2_stores", 0.0)
        ratios |= {"measured_l2_bytes": measured_l2, "l2_ratio": measured_l2 / row["predicted_bytes"]}
    if "measured_device_loads" in measured:
        device_bytes = measured["measured_device_loads"] + measured.get("measured_device_stores", 0.0)
        ratios |= {"measured_device_bytes": device_bytes, "device_ratio": device_bytes / row["predicted_device_bytes"]}
    return ratios


def report(rows: list[Row]) -> str:
    """A short table: predicted and measured bytes of every profiled point."""
    lines = [
        f"{'experiment':10s} {'algorithm':12s} pass {'heads':>6s} {'N':>6s} {'d':>5s} {'tiles':>8s} {'dens':>6s} "
        f"{'L2 GB':>8s} {'ratio':>6s} {'DRAM GB':>8s} {'ratio':>6s} {'ms':>8s}"
    ]
    for row in rows:
        if "device_ratio" not in row:
            continue
        cells = f"{row['experiment']:10s} {row['algorithm']:12s} {row['pass']:4s} "
        cells += f"{row['heads']:6d} {row['seqlen']:6d} {row['head_dim']:5d} "
        cells += f"{row['block_m']}x{row['block_n']}".rjust(8) + f" {row['density']:6.3f} "
        cells += f"{row.get('measured_l2_bytes', 0) / 1e9:8.3f} {row.get('l2_ratio', 0):6.3f} "
        cells += f"{row['measured_device_bytes'] / 1e9:8.3f} {row['device_ratio']:6.3f} {row.get('ms') or 0:8.3f}"
        lines.append(cells)
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tilewise.lab.profile", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("probe", help="launch next to nothing, to see whether the profiler may read the counters")
    started = commands.add_parser("launch", help="run the points of a part once, to be profiled")
    started.add_argument("--plan", type=Path, required=True)
    started.add_argument("--part", default="1/1", help="which of how many")
    started.add_argument("--budget", type=float, default=180.0)
    given = parser.parse_args(arguments)
    if given.command == "probe":
        probe()
    else:
        launch(given.plan, given.part, given.budget)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
