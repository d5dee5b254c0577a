"""Committed results belong to the sources beside them: a warning while one works, an error in a release check (`make release-check`)."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from statistics import median

import pytest

from tilewise.bench.source_hash import kernel_source_hash
from tilewise.lab import results as lab

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


class StaleResults(UserWarning):
    """A figure or table shows what other sources measured."""


def stale(folder: Path) -> list[str]:
    """For each results file that a figure or table is drawn from and that other sources measured: which, and what to rerun.

    The README and `tilewise plot` show the newest run of a device; older files beside it are history and may be as they are.
    """
    found, newest = [], {}
    for path in sorted(folder.glob("*.jsonl")):
        rows = lab.read(path)
        if path.name.startswith("lab-"):
            rerun = "scripts/lab_gpu.sh on that device" if any("roofline_ms" in row and row.get("ms") for row in rows) else None
            found += _stale(
                path, rows, lab.source_hash(), rerun or "`python -m tilewise.lab --out` and `python -m tilewise.lab.resources --out`"
            )
        elif rows:
            device, date = rows[-1]["device"], rows[-1].get("date") or ""
            newest[device] = max(newest.get(device, ("", path, rows)), (date, path, rows), key=lambda one: (one[0], one[1].name))
    for _, path, rows in newest.values():
        on_cpu = rows[-1].get("threads") is not None
        rerun = "`tilewise bench --device cpu` there" if on_cpu else "`make gpu` on that device"
        found += _stale(path, rows, kernel_source_hash("cpu" if on_cpu else "cuda"), rerun)
    demo = folder / "demo.json"
    if demo.exists():
        shown = json.loads(demo.read_text())
        found += _stale(demo, [shown], kernel_source_hash(shown.get("device_type", "cuda")), "`tilewise demo` on that device")
    return found


def _stale(path: Path, rows: list[dict], wanted: str, rerun: str) -> list[str]:
    hashes = {row.get("source_hash") or "unknown" for row in rows}
    if hashes == {wanted}:
        return []
    by = ", ".join(sorted(one[:12] for one in hashes))
    return [f"{path.name} was measured with sources {by}, those beside it are {wanted[:12]}: rerun {rerun}"]


def report(messages: list[str]) -> None:
    """Fails in a release check, warns otherwise."""
    if messages and os.environ.get("TILEWISE_RELEASE_CHECK"):
        pytest.fail("\n".join(messages))
    for message in messages:
        warnings.warn(message, StaleResults, stacklevel=2)


def test_results_belong_to_these_sources() -> None:
    report(stale(RESULTS))


def write(path: Path, *rows: dict) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_stale_files_are_named_with_what_to_rerun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, other = {"source_hash": kernel_source_hash()}, {"source_hash": "0" * 64}
    write(tmp_path / "a-old.jsonl", other | {"device": "a", "date": "2026-01-01"})  # history: a newer run of the device follows
    write(tmp_path / "a-new.jsonl", here | {"device": "a", "date": "2026-02-01"})
    write(tmp_path / "lab-cpu.jsonl", {"source_hash": lab.source_hash()})
    assert stale(tmp_path) == []
    write(tmp_path / "b.jsonl", here | {"device": "b"}, other | {"device": "b"})
    write(tmp_path / "lab-gpu.jsonl", other | {"roofline_ms": 1.0, "ms": 2.0})
    (tmp_path / "demo.json").write_text("{}")
    messages = stale(tmp_path)
    assert [message.split()[0] for message in messages] == ["lab-gpu.jsonl", "b.jsonl", "demo.json"]
    assert "scripts/lab_gpu.sh" in messages[0] and "make gpu" in messages[1] and "sources unknown" in messages[2]
    monkeypatch.delenv("TILEWISE_RELEASE_CHECK", raising=False)
    with pytest.warns(StaleResults, match="rerun"):
        report(messages)
    monkeypatch.setenv("TILEWISE_RELEASE_CHECK", "1")
    with pytest.raises(pytest.fail.Exception, match=r"b\.jsonl was measured with sources 000000000000"):
        report(messages)


def test_cache_page_shows_the_committed_measurements() -> None:
    """docs/kvcache.md: useful bytes a second, time against both peers, and what pages cost, from the newest results file."""
    page = (RESULTS.parent.parent / "docs" / "kvcache.md").read_text()
    rows = [json.loads(line) for line in (RESULTS / "nvidia-h200-2026-11-29.jsonl").read_text().splitlines()]
    ms: dict[tuple[str, str, str], float] = {}
    rate: dict[str, float] = {}
    for row in rows:
        if row["case"] in ("decode", "paged") and row["status"] == "ok":
            ms.setdefault((row["case"], row["label"], row["provider"]), row["ms"])
            if (row["case"], row["provider"]) == ("decode", "tilewise"):
                rate.setdefault(row["label"], row["tbps"])
    assert rate
    for label, speed in rate.items():
        ours = ms["decode", label, "tilewise"]
        cudnn, fa3 = (ms["decode", label, peer] / ours for peer in ("sdpa_cudnn", "fa3"))
        paged = 100 * (ms["paged", label, "tilewise"] / ours - 1)
        line = f"| {label.replace('x', ' × ')} | {speed:.2f} | {cudnn:.2f} | {fa3:.2f} | {paged:.1f} % slower |"
        assert line in page, line


@pytest.mark.parametrize(("name", "peers"), [("forward", ("sdpa_cudnn", "fa3", "fa4")), ("backward", ("sdpa_cudnn", "fa4"))])
def test_hopper_pages_show_the_committed_measurements(name: str, peers: tuple[str, ...]) -> None:
    """docs/hopper-*.md: both runs of the 18 cells, TFLOP/s of all and the medians of the rounds' ratios, from their results file."""
    page = (RESULTS.parent.parent / "docs" / f"hopper-{name}.md").read_text()
    found: dict[str, dict[str, list[dict]]] = {}
    for line in (RESULTS / "nvidia-h200-2026-11-30T15.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["case"] == "paper" and row["pass"] == {"forward": "fwd", "backward": "bwd"}[name]:
            found.setdefault(row["label"], {}).setdefault(row["provider"], []).append(row)
    assert len(found) == 18

    def both(values: Iterable[float], form: str) -> str:
        return ", ".join(format(value, form) for value in values)

    for label, cell in found.items():
        dim, mask, length = label.split("-")
        ours, cudnn = cell["tilewise"], cell["sdpa_cudnn"]
        best = [min((cell[peer][run] for peer in peers), key=lambda row: row["ms"]) for run in range(2)]
        speeds = [both((row["tflops"] for row in cell[provider]), ".0f") for provider in ("tilewise", *peers)]
        ratios = [
            both(
                (
                    median(y / x for x, y in zip(mine["ms_rounds"], theirs["ms_rounds"], strict=True))
                    for mine, theirs in zip(ours, rows, strict=True)
                ),
                ".2f",
            )
            for rows in (cudnn, best)
        ]
        line = f"| {dim} {mask}, {int(length) // 1024}k | {' | '.join(speeds + ratios)} |"
        assert line in page, line


@pytest.mark.parametrize(("name", "pass_", "products"), [("forward", "fwd", 2), ("backward", "bwd", 5)])
def test_hopper_pages_show_the_committed_counters(name: str, pass_: str, products: int) -> None:
    """docs/hopper-*.md: how far each cell is from the bounds, from the counters as the profiler gave them."""
    page = (RESULTS.parent.parent / "docs" / f"hopper-{name}.md").read_text()
    cells = [cell for cell in json.loads((RESULTS / "counters-h200.json").read_text())["cells"] if cell["pass"] == pass_]
    assert len(cells) == 18
    for cell in cells:
        dim, mask, length = cell["label"].split("-")
        operations = products * 2 * 16_384 * int(length) * 2048 / (2 if mask == "causal" else 1)
        cycles, seconds = cell["cycles"], cell["nanoseconds"] / 1e9
        percents = [100 * operations / (132 * 4096 * cycles), *(cell[f"{unit}_percent"] for unit in ("mufu", "shared", "issue"))]
        ends = f"{cycles / seconds / 1e9:.2f} | {cell['l2_bytes'] / seconds / 1e12:.1f} | {100 * (1 - cell['cycles_active'] / cycles):.0f}"
        line = f"| {dim} {mask}, {int(length) // 1024}k | {' | '.join(format(x, '.0f') for x in percents)} | {ends} |"
        assert line in page, line


def test_forward_page_shows_the_committed_cuts() -> None:
    """docs/hopper-forward.md: how calls with few tiles are cut, and what that takes beside whole tiles."""
    page = (RESULTS.parent.parent / "docs" / "hopper-forward.md").read_text()
    for call in json.loads((RESULTS / "parts-h200.json").read_text())["calls"]:
        counts = {"heads": call["heads_in_a_tile"], "parts": call["parts"]}
        cut = ", ".join(f"{count} {what}" for what, count in counts.items() if count > 1)
        heads, size = f"{call['heads']}/{call['kv_heads']}", f"{call['seqlen_q']:,} × {call['seqlen_k']:,}"
        shape = f"{call['batch']}, {heads}, {size}, {call['head_dim']}, {'causal' if call['causal'] else 'full'}"
        ours, merge, whole = call["kernel_us"], call["merge_us"], call["whole_us"]
        line = f"| {shape} | {cut} | {ours:.0f} + {merge:.0f} | {whole:,.0f} | {whole / (ours + merge):.1f} |"
        assert line in page, line
