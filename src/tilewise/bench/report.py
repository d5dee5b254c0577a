"""What a run says while it goes on, and the tables it ends with."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterable
from typing import Any

from .cases import CASES
from .provider import DETERMINISTIC

Row = dict[str, Any]


def provider_label(row: Row) -> str:
    """The provider's name, ours with its backend.

    >>> provider_label({"provider": "tilewise", "backend": "triton"})
    'tilewise[triton]'
    """
    return f"{row['provider']}[{row['backend']}]" if row["provider"] == "tilewise" and row.get("backend") else row["provider"]


def ratio(ours: Row, peer: Row) -> float:
    """Our speed over the peer's: the median over the rounds that both ran."""
    pairs = list(zip(ours["ms_rounds"], peer["ms_rounds"], strict=False))
    return statistics.median(theirs / mine for mine, theirs in pairs)


class Reporter:
    """Progress on a terminal through rich, else one plain line a measurement. `quiet` says nothing at all."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self._progress: Any = None
        self._task: Any = None

    def open(self, common: Row, providers: list[str], missing: dict[str, str], cases: int, budget: float | None) -> None:
        if self.quiet:
            return
        if sys.stdout.isatty():
            try:
                from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

                columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
                self._progress = Progress(*columns)
                self._task = self._progress.add_task("", total=cases)
                self._progress.start()
            except ImportError:
                self._progress = None
        self.say(f"{common['device']}, torch {common['torch']}, triton {common['triton']}, kernels {common['source_hash'][:12]}")
        self.say(f"ceilings now: products {rate(common['ceiling_tflops'])} TFLOP/s, copy {rate(common['ceiling_tbps'])} TB/s")
        self.say(f"{cases} cases, budget {f'{budget:.0f} s' if budget else 'none'}, providers: {', '.join(providers)}")
        for name, why in missing.items():
            self.say(f"  without {name}: {why}")

    def say(self, text: str) -> None:
        if self.quiet:
            return
        if self._progress is not None:
            self._progress.console.print(text, highlight=False, markup=False)
        else:
            print(text, flush=True)

    def start(self, what: str, left: float) -> None:
        if self._progress is not None:
            ending = "" if left == math.inf else f", {max(0, left):.0f} s left"
            self._progress.update(self._task, description=what + ending)

    def advance(self) -> None:
        if self._progress is not None:
            self._progress.advance(self._task)

    def row(self, row: Row) -> None:
        self.say(line(row))

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()


def line(row: Row) -> str:
    """One measurement in one line."""
    head = f"{row['case']}/{row['label']} {row['pass']:7} {provider_label(row):18}"
    if row["status"] != "ok":
        predicted = f", predicted {size(row['predicted_bytes'])}" if row["status"] == "oom" and row["predicted_bytes"] else ""
        return f"{head} {row['status']}{predicted}: {(row['reason'] or '')[:120]}"
    parts = []
    if row["ms"] is not None:
        parts.append(f"{row['ms']:9.3f} ms [{row['ms_q1'] or row['ms']:.3f}, {row['ms_q3'] or row['ms']:.3f}]")
    if row["tflops"] is not None:
        parts.append(f"{rate(row['tflops']):>7} TFLOP/s")
    if row.get("cache"):
        parts.append(f"{row['cache']}, then {row['ms_warm']:.1f} ms")
    if row["peak_bytes"] is not None:
        parts.append(f"peak {size(row['peak_bytes'])}")
    if row["error"] is not None:
        parts.append(f"error {row['error']:.1e}")
    if row["clocks_mhz"] is not None:
        parts.append(f"{row['clocks_mhz']:.0f} MHz {row['power_w']:.0f} W")
    return f"{head} {'  '.join(parts)}"


def rate(tera: float) -> str:
    """A rate for people: a decimal from ten up, three below.

    >>> rate(491.23), rate(0.0712)
    ('491.2', '0.071')
    """
    return f"{tera:.1f}" if tera >= 10 else f"{tera:.3f}"


def size(count: float) -> str:
    """Bytes for people.

    >>> size(1_500_000_000)
    '1.50 GB'
    """
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count:.0f} B"


def cells(rows: Iterable[Row]) -> dict[tuple[str, str, str], list[Row]]:
    """Rows by (case, label, pass), in the order they came."""
    grouped: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        grouped.setdefault((row["case"], row["label"], row["pass"]), []).append(row)
    return grouped


def closing_tables(rows: list[Row]) -> str:
    """Short tables: ours against the best peer and FlashAttention-2 in each cell, what an order costs, what failed, and the promises."""
    return "\n".join([*_speed_table(rows), *_order_table(rows), *_failures(rows), *_bar_table(rows)])


def _timed(group: list[Row]) -> tuple[list[Row], list[Row]]:
    timed = [row for row in group if row["ms_rounds"]]
    return [r for r in timed if r["provider"] == "tilewise"], [r for r in timed if r["provider"] != "tilewise"]


def _beside(mine: Row, peer: Row | None) -> str:
    return "-" if peer is None else f"{ratio(mine, peer):.2f}"


def _speed_table(rows: list[Row]) -> list[str]:
    lines = [f"\n{'case':36} {'pass':7} {'ours':18} {'ms':>9} {'TFLOP/s':>8} {'x FA2':>6} {'x cuDNN':>7} {'x best':>6}  best peer"]
    against_best: dict[tuple[str, str, str], list[float]] = {}
    for (case, label, pass_), group in cells(rows).items():
        ours, peers = _timed(group)
        by_name = {peer["provider"]: peer for peer in peers}
        for mine in ours:
            best = min(peers, key=lambda row: row["ms"], default=None)
            speed = "-" if mine["tflops"] is None else rate(mine["tflops"])
            text = f"{case + '/' + label:36} {pass_:7} {provider_label(mine):18} {mine['ms']:9.3f} {speed:>8} "
            text += f"{_beside(mine, by_name.get('sdpa_flash')):>6} {_beside(mine, by_name.get('sdpa_cudnn')):>7} "
            text += f"{_beside(mine, best):>6}  {best['provider'] if best else ''}"
            if best:
                against = ratio(mine, best)
                text += "  <- slower" if against < 0.99 else ""
                against_best.setdefault((case, pass_, provider_label(mine)), []).append(against)
            lines.append(text)
    for (case, pass_, label), ratios in against_best.items():
        if len(ratios) > 1:
            mean = statistics.geometric_mean(ratios)
            counted = f"{len(ratios):3} cells: x best peer {mean:.3f} (geometric mean), least {min(ratios):.2f}"
            lines.append(f"{case:12} {pass_:7} {label:18} {counted}")
    return lines if len(lines) > 1 else []


def _order_table(rows: list[Row]) -> list[str]:
    """Our speed with `deterministic=True` over that without, in each cell that has both, by head dim and pass."""
    found: dict[tuple[str, int, str], list[float]] = {}
    for (case, _, pass_), group in cells(rows).items():
        ours, _ = _timed(group)
        by_order = {(row["backend"] or "").endswith(DETERMINISTIC): row for row in reversed(ours)}
        plain, ordered = by_order.get(False), by_order.get(True)
        if plain and ordered:
            found.setdefault((case, plain["head_dim"], pass_), []).append(ratio(ordered, plain))
    lines = []
    for (case, dim, pass_), ratios in found.items():
        mean = statistics.geometric_mean(ratios)
        lines.append(f"{case:12} d{dim:<4} {pass_:7} {len(ratios):3} cells: {mean:.3f} (geometric mean), least {min(ratios):.3f}")
    return ["\ndeterministic over default:", *lines] if lines else []


def _failures(rows: list[Row]) -> list[str]:
    failed = [row for row in rows if row["status"] == "wrong" or (row["provider"] == "tilewise" and row["status"] != "ok")]
    return [f"\n{len(failed)} results of ours missing, or wrong whoever made them:", *map(line, failed)] if failed else []


def _bar_table(rows: list[Row]) -> list[str]:
    """Promises made by the cases, each with what was measured. Within 1 % of the bar passes."""
    known = {(case.group, case.label): case for case in CASES}
    lines = []
    for (group_name, label, pass_), group in cells(rows).items():
        case = known.get((group_name, label))
        if case is None:
            continue
        ours, peers = _timed(group)
        for bar in case.bars:
            peer = next((row for row in peers if row["provider"] == bar.peer), None)
            if peer is None or bar.pass_ != pass_:
                continue
            for mine in ours:
                measured = ratio(mine, peer)
                verdict = "pass" if measured >= 0.99 * bar.ratio else "MISS"
                what = f"{provider_label(mine)} / {bar.peer}"
                lines.append(f"{case.id:32} {pass_:7} {what:30} {measured:6.3f} of {bar.ratio:.3f} {verdict} ({mine['rounds']} rounds)")
                if case.kind == "step" and mine["peak_bytes"] and peer["peak_bytes"]:
                    verdict = "pass" if mine["peak_bytes"] <= peer["peak_bytes"] else "MISS"
                    peaks = f"{size(mine['peak_bytes'])} of {size(peer['peak_bytes'])}"
                    lines.append(f"{case.id:32} {pass_:7} {what + ' memory':30} {peaks} {verdict}")
        if case.peak_limit:
            for mine in group:
                if mine["provider"] == "tilewise" and mine["peak_bytes"] is not None:
                    verdict = "pass" if mine["peak_bytes"] <= case.peak_limit else "MISS"
                    peak, limit = size(mine["peak_bytes"]), size(case.peak_limit)
                    lines.append(f"{case.id:32} {pass_:7} {provider_label(mine) + ' extra memory':30} {peak} of {limit} {verdict}")
    return ["\npromises:", *lines] if lines else []
