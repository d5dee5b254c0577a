"""The lab on a CUDA device: times, accuracy and memory of every kernel (`gpu`), then the bytes they move by its own counters (`profile`).

    python -m tilewise.lab.measured --out FILE --budget SECONDS

`tilewise lab` does the same and prints tables; this needs torch and Triton alone. Each half is a process of its own, the second in
parts under the profiler: one that hangs or breaks the device is ended, and loses its own rows alone. Where there is no `ncu`, or it may not
read the counters, bytes stay predicted.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from . import profile, results
from .results import Row
from .sweeps import gpu_points, memory_points

PARTS = 4  # of the profile: each is a process of its own whose table is kept
TIMED_SHARE = 0.55  # of the budget; the rest is the profiler's
LEAST_FOR_PROFILE, LEAST_FOR_PART = 60, 20  # seconds
NCU_FOLDERS = ("/usr/local/cuda*/bin", "/opt/nvidia/nsight-compute*/**", "/usr/lib/nsight-compute*/**")
ROWS = 1 + len(list(gpu_points())) + len(list(memory_points()))  # of a whole run: the memory hierarchy, then every point


def run(
    out: Path,
    budget_s: float,
    *,
    parts: int = PARTS,
    say: Callable[[str], None] = print,
    on_rows: Callable[[int], None] = lambda rows: None,
    python: Sequence[str] = (sys.executable,),
) -> list[Row]:
    """Appends every row to `out` when it is measured, adds the bytes part by part, and returns the rows of this run.

    What the processes print goes to the file beside `out` that ends in .log. `say` is told in words what was left out and why, `on_rows`
    how many rows are there.
    """
    begin = time.monotonic()
    before = results.read(out) if out.exists() else []
    log = out.with_suffix(".log")
    out.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("")

    def left() -> float:
        return budget_s - (time.monotonic() - begin)

    def count() -> None:
        if out.exists():
            on_rows(out.read_text().count("\n") - len(before))

    share = TIMED_SHARE * budget_s
    status = ended([*python, "-m", "tilewise.lab.gpu", "--out", str(out), "--budget", f"{share:.0f}"], share + 10, log, count)
    said = log.read_text().splitlines()
    timed = results.read(out)[len(before) :] if out.exists() else []
    for line in [line for line in said if line.startswith("budget of")]:
        say(line)
    if status:
        say(f"measuring ended with exit status {status}: " + " / ".join(said[-3:])[:300])
    if not timed:
        return []
    rows, whole = timed, out.with_suffix(".part")
    with tempfile.TemporaryDirectory() as folder:
        for rows in profiled(timed, Path(folder), left, parts, log, say, python):
            whole.unlink(missing_ok=True)
            results.write([*before, *rows], whole)
            whole.replace(out)
    return rows


def profiled(
    rows: list[Row],
    folder: Path,
    left: Callable[[], float],
    parts: int,
    log: Path,
    say: Callable[[str], None],
    python: Sequence[str],
) -> Iterator[list[Row]]:
    """All rows, with the bytes that the profiler has counted so far, after each of its parts; says in words where it counted none."""
    ncu = profiler()
    if ncu is None:
        say("no ncu on this machine: bytes are predicted only")
        return
    if left() < LEAST_FOR_PROFILE:
        say(f"{left():.0f} s left, too little for a profile: bytes are predicted only")
        return

    def start(table: Path, metrics: Sequence[str], limit: float, *what: str) -> str:
        """The profiler's table, or "": what it wrote instead is in the file."""
        table.unlink(missing_ok=True)
        flags = ["--clock-control", "none", "--profile-from-start", "off", "--print-units", "base", "--csv"]
        command = [ncu, *flags, "--log-file", str(table), "--metrics", ",".join(metrics), *python, "-m", "tilewise.lab.profile", *what]
        ended(command, limit, log)
        text = table.read_text() if table.exists() else ""
        return text if '\n"ID"' in f"\n{text}" else ""

    probed, metrics = folder / "probe.csv", None
    for asked in (tuple(profile.METRICS), profile.FALLBACK_METRICS):
        if start(probed, asked, 45, "probe"):
            metrics = asked
            break
        if "ERR_NVGPUCTRPERM" in (probed.read_text() if probed.exists() else "") + log.read_text():
            say("ncu may not read the GPU's counters here (ERR_NVGPUCTRPERM): bytes are predicted only")
            return
    if metrics is None:
        say("the profiler gave no table, so bytes are predicted only; it says: " + last_words(probed, log))
        return
    texts, plan = [], []
    for part in range(1, parts + 1):
        share = (left() - 10) / (parts - part + 1)
        if share < LEAST_FOR_PART:
            say(f"budget spent before part {part} of {parts} of the profile")
            break
        table, planned = folder / f"{part}.csv", folder / f"{part}.json"
        # A process takes seconds to start and to write its table.
        what = ("launch", "--plan", str(planned), "--part", f"{part}/{parts}", "--budget", f"{0.7 * share:.0f}")
        text = start(table, metrics, share + 8, *what)
        if text and planned.exists():
            texts.append(text)
            plan += json.loads(planned.read_text())
            yield profile.merge(texts, plan, rows)
            say(f"part {part} of {parts} profiled")
        else:
            say(f"part {part} of {parts} of the profile gave no table: {last_words(table, log)}")


def profiler() -> str | None:
    """NVIDIA's Nsight Compute: in the PATH, or where its installers put it."""
    found = [path for pattern in NCU_FOLDERS for path in glob.glob(f"{pattern}/ncu", recursive=True) if os.access(path, os.X_OK)]
    return shutil.which("ncu") or (max(found) if found else None)


def last_words(*paths: Path) -> str:
    lines = [line for path in paths if path.exists() for line in path.read_text().splitlines()[-2:]]
    return " / ".join(lines)[:300]


def ended(command: Sequence[str], limit: float, log: Path, meanwhile: Callable[[], None] = lambda: None) -> int:
    """The exit status of a program whose words are appended to `log`; 124 where it was ended after `limit` seconds, with all it started."""
    with log.open("a") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            deadline = time.monotonic() + limit
            while time.monotonic() < deadline:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(0.3)
                meanwhile()
            return 124
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            meanwhile()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tilewise.lab.measured", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=400.0)
    parser.add_argument("--parts", type=int, default=PARTS, help="of the profile")
    given = parser.parse_args(arguments)
    rows = run(given.out, given.budget, parts=given.parts)
    if not rows:
        print(f"nothing was measured; {given.out.with_suffix('.log')} says why")
        return 1
    print(profile.report(rows))
    bad = [row for row in rows if row["status"] == "wrong"]
    print(f"{len(rows)} rows in {given.out}, {len(bad)} of them wrong")
    return int(bool(bad))


if __name__ == "__main__":
    raise SystemExit(main())
