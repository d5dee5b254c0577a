"""Committed results belong to the sources beside them: a warning while one works, an error in a release check (`make release-check`)."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from statistics import geometric_mean, median

import pytest

from tilewise.bench.report import ratio
from tilewise.bench.source_hash import kernel_source_hash
from tilewise.lab import results as lab

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


class StaleResults(UserWarning):
    """A figure or table shows what other sources measured."""


def shown() -> dict[str, set[str]]:
    """By results file, where its numbers are shown: in the README's tables, in pictures, on the pages that name it."""
    spec = importlib.util.spec_from_file_location("readme_tables", ROOT / "scripts" / "readme_tables.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    found = {path.name: set(tables.shown().get(path.name, ())) for path in RESULTS.glob("*.json*")}
    for page in sorted((ROOT / "docs").glob("*.md")):
        for name in re.findall(r"`([\w.-]+\.jsonl?)`", page.read_text()):
            found[name].add(f"docs/{page.name}")
    for name in found:
        if name.startswith("lab-"):
            found[name].add("docs/lab.md")  # its figures and tables are drawn from all of them
    found["demo.json"].add("README.md")  # docs/figures/memory.svg
    return found


def stale(folder: Path, shown: dict[str, set[str]]) -> list[str]:
    """For each results file that a figure, table or page shows and that other sources measured: where, and what to rerun.

    What nothing shows is history and may be as it is.
    """
    found = []
    for path in sorted(folder.glob("*.json*")):
        if not shown.get(path.name):
            continue
        rows = [json.loads(path.read_text())] if path.suffix == ".json" else lab.read(path)
        wanted, rerun = _source(path, rows)
        hashes = {row.get("source_hash") or "unknown" for row in rows}
        if hashes != {wanted}:
            by, where = ", ".join(sorted(one[:12] for one in hashes)), ", ".join(sorted(shown[path.name]))
            found.append(f"{path.name} (in {where}) was measured with sources {by}, those beside it are {wanted[:12]}: rerun {rerun}")
    return found


def _source(path: Path, rows: list[dict]) -> tuple[str, str]:
    """The hash that the rows of a file should have, and what measures them anew."""
    if path.name.startswith("lab-"):
        on_gpu = any("roofline_ms" in row and row.get("ms") for row in rows)
        counts = "`python -m tilewise.lab --device cpu --out` and `python -m tilewise.lab.resources --out`"
        return lab.source_hash(), "scripts/lab_gpu.sh on that device" if on_gpu else counts
    if path.name == "demo.json":
        return kernel_source_hash(rows[0].get("device_type", "cuda")), "`tilewise demo` on that device"
    if path.suffix == ".json":
        return kernel_source_hash(rows[0].get("device_type", "cuda")), f"it by {rows[0]['tool']}" if "tool" in rows[
            0
        ] else "scripts/masks_gpu.py on that device"
    if rows[-1].get("threads") is not None:
        return kernel_source_hash("cpu"), "`tilewise bench --device cpu` there"
    return kernel_source_hash(), "`make gpu` on that device"


def report(messages: list[str]) -> None:
    """Fails in a release check, warns otherwise."""
    if messages and os.environ.get("TILEWISE_RELEASE_CHECK"):
        pytest.fail("\n".join(messages))
    for message in messages:
        warnings.warn(message, StaleResults, stacklevel=2)


def test_results_belong_to_these_sources() -> None:
    report(stale(RESULTS, shown()))


def test_every_results_file_is_shown_or_said_to_be_history() -> None:
    """And the page of the benchmark names the sources of each that a GPU measured."""
    named = set(re.findall(r"^\| `([\w.-]+)` \|", (RESULTS.parent / "README.md").read_text(), re.MULTILINE))
    for name, where in shown().items():
        assert where or name in named, f"{name}: nothing shows it"
        assert name in named or "h200" not in name, f"{name}: benchmarks/README.md does not say its sources"


def test_what_shows_a_file_is_found() -> None:
    """One of each kind: a table, pictures, and pages that quote rows."""
    where = shown()
    memory = [name for name, places in where.items() if "docs/figures/bench-memory-*.svg" in places]
    speed = [name for name, places in where.items() if "docs/figures/bench-speed-fwd-*.svg" in places]
    assert len(memory) == len(speed) == 1 and "README.md" in where[speed[0]]
    assert any("docs/kvcache.md" in places for places in where.values())
    for name, page in (("masks", "masks"), ("parts", "hopper-forward"), ("counters", "hopper-backward")):
        assert f"docs/{page}.md" in where[f"{name}-h200.json"]
    assert where["demo.json"] == {"README.md", "docs/demo.md"}


def write(path: Path, *rows: dict) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_stale_files_are_named_with_what_to_rerun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, other = {"source_hash": kernel_source_hash()}, {"source_hash": "0" * 64}
    where = {name: {"a page"} for name in ("a-new.jsonl", "lab-cpu.jsonl", "b.jsonl", "lab-gpu.jsonl", "demo.json", "counters.json")}
    write(tmp_path / "a-old.jsonl", other | {"device": "a", "date": "2026-01-01"})  # history: nothing shows it
    write(tmp_path / "a-new.jsonl", here | {"device": "a", "date": "2026-02-01"})
    write(tmp_path / "lab-cpu.jsonl", {"source_hash": lab.source_hash()})
    assert stale(tmp_path, where) == []
    write(tmp_path / "b.jsonl", here | {"device": "b"}, other | {"device": "b"})
    write(tmp_path / "lab-gpu.jsonl", other | {"roofline_ms": 1.0, "ms": 2.0})
    (tmp_path / "demo.json").write_text("{}")
    write(tmp_path / "counters.json", other | {"tool": "ncu, one launch a cell"})
    messages = stale(tmp_path, where)
    assert [message.split()[0] for message in messages] == ["b.jsonl", "counters.json", "demo.json", "lab-gpu.jsonl"]
    assert "make gpu" in messages[0] and "(in a page)" in messages[0] and "rerun it by ncu" in messages[1]
    assert "sources unknown" in messages[2] and "scripts/lab_gpu.sh" in messages[3]
    monkeypatch.delenv("TILEWISE_RELEASE_CHECK", raising=False)
    with pytest.warns(StaleResults, match="rerun"):
        report(messages)
    monkeypatch.setenv("TILEWISE_RELEASE_CHECK", "1")
    with pytest.raises(pytest.fail.Exception, match=r"b\.jsonl \(in a page\) was measured with sources 000000000000"):
        report(messages)


def test_cache_page_shows_the_committed_measurements() -> None:
    """docs/kvcache.md: useful bytes a second, time against both peers, and what pages cost, from the file that it names."""
    page = (ROOT / "docs" / "kvcache.md").read_text()
    (name,) = re.findall(r"`(nvidia-h200-[\w-]+\.jsonl)`", page)
    rows = lab.read(RESULTS / name)
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
    """docs/hopper-*.md: both runs of the 18 cells, of two cells only one, TFLOP/s of all and the medians of the rounds' ratios, from
    their results file."""
    page = (ROOT / "docs" / f"hopper-{name}.md").read_text()
    found: dict[str, dict[str, list[dict]]] = {}
    file = "nvidia-h200-2026-12-01T06.jsonl"
    assert f"`{file}`" in page
    rows = [row for row in lab.read(RESULTS / file) if (row["case"], row["pass"]) == ("paper", {"forward": "fwd", "backward": "bwd"}[name])]
    beside = {row["run_id"] for row in rows if row["provider"] == "fa4"}  # further runs are of other contestants
    for row in rows:
        if row["run_id"] in beside:
            found.setdefault(row["label"], {}).setdefault(row["provider"], []).append(row)
    assert len(found) == 18 and len(beside) == 2

    def both(values: Iterable[float], form: str) -> str:
        return ", ".join(format(value, form) for value in values)

    for label, cell in found.items():
        dim, mask, length = label.split("-")
        ours, cudnn = cell["tilewise"], cell["sdpa_cudnn"]
        best = [min((cell[peer][run] for peer in peers), key=lambda row: row["ms"]) for run in range(len(ours))]
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


@pytest.mark.parametrize(
    ("name", "pass_", "peers"), [("forward", "fwd", ("sdpa_cudnn", "fa3", "fa4")), ("backward", "bwd", ("sdpa_cudnn", "fa4"))]
)
def test_hopper_pages_sum_up_the_committed_measurements(name: str, pass_: str, peers: tuple[str, ...]) -> None:
    """docs/hopper-*.md: what the text says of the best peer over the cells, and of the calls beside them."""
    text = " ".join((ROOT / "docs" / f"hopper-{name}.md").read_text().split())
    rows = [row for row in lab.read(RESULTS / "nvidia-h200-2026-12-01T06.jsonl") if row["pass"] == pass_ and row["status"] == "ok"]
    cells: dict[tuple[str, str, str], dict[str, dict]] = {}
    for row in rows:
        cells.setdefault((row["run_id"], row["case"], row["label"]), {})[row["provider"]] = row
    best: dict[str, list[float]] = {}
    for (run, case, _), cell in cells.items():
        if case == "paper" and {"tilewise", *peers} <= cell.keys():
            best.setdefault(run, []).append(ratio(cell["tilewise"], min((cell[peer] for peer in peers), key=lambda row: row["ms"])))
    assert [len(values) for values in best.values()] == [16, 18]
    assert "Geometric mean against the best peer {:.3f} and {:.3f}".format(*map(geometric_mean, best.values())) in text
    (gqa,) = (cell for (_, case, _), cell in cells.items() if case == "gqa")
    (window,) = (cell for (_, case, _), cell in cells.items() if case == "window")
    peer = {"fwd": ("fa3", "FlashAttention-3"), "bwd": ("fa4", "FlashAttention-4")}[pass_]
    assert f"causal, {gqa['tilewise']['tflops']:.0f} ({ratio(gqa['tilewise'], gqa[peer[0]]):.2f} of {peer[1]}" in text
    assert f"a window of 1,024 over 16k {window['tilewise']['tflops']:.0f} (" in text


def measured(page: str) -> tuple[str, dict[tuple[str, str, str, str], dict]]:
    """A page as one line, and the rows of the newest results file that it names, by case, label, pass and provider."""
    text = (ROOT / "docs" / page).read_text()
    file = max(re.findall(r"`(nvidia-h200-[\w-]+\.jsonl)`", text))
    rows = [row for row in lab.read(RESULTS / file) if row["status"] == "ok"]
    return " ".join(text.split()), {(row["case"], row["label"], row["pass"], row["provider"]): row for row in rows}


def test_masks_page_shows_the_committed_measurements() -> None:
    """docs/masks.md: random blocks beside both peers that take them, a window, documents."""
    text, rows = measured("masks.md")

    def speed(case: str, label: str, pass_: str, provider: str) -> str:
        return format(rows[case, label, pass_, provider]["tflops"], ".0f")

    for label in ("6", "11", "26", "50", "dense"):
        name = f"d128-{label}-16384"
        cells = [speed("blocks", name, "fwd", provider) for provider in ("tilewise", "fa4", "flex")]
        cells += [speed("blocks", name, "bwd", provider) for provider in ("tilewise", "flex")]
        density = rows["blocks", name, "fwd", "tilewise"]["density"]
        assert f"| {density:.0%} | {' | '.join(cells)} |".replace("%", " %") in text
    window = [[speed("window", "d128-1024-of-16384", pass_, x) for pass_ in ("fwd", "bwd")] for x in ("tilewise", "flex", "fa4")]
    (ours, flex, fa4) = window
    shown = f"{ours[0]} forward and {ours[1]} backward, FlexAttention {flex[0]} and {flex[1]}, FlashAttention-4 {fa4[0]} and {fa4[1]}"
    assert shown in text, shown
    three = {
        (provider, pass_): "{}, {} and {}".format(*(speed("documents", f"d128-{n}-16384", pass_, provider) for n in (4, 16, 64)))
        for provider in ("tilewise", "flex")
        for pass_ in ("fwd", "bwd")
    }
    shown = f"{three['tilewise', 'fwd']} forward and {three['tilewise', 'bwd']} backward, FlexAttention {three['flex', 'fwd']}, and "
    assert shown + three["flex", "bwd"] in text, shown


def test_varlen_page_shows_the_committed_measurements() -> None:
    text, rows = measured("varlen.md")
    row = {(pass_, x): rows["varlen", "d128-16-documents", pass_, x] for pass_ in ("fwd", "bwd") for x in ("tilewise", "fa4", "flex")}
    fa3 = rows["varlen", "d128-16-documents", "fwd", "fa3"]
    speed = {key: format(one["tflops"], ".0f") for key, one in row.items()}
    of_3, of_4 = ratio(row["fwd", "tilewise"], fa3), ratio(row["bwd", "tilewise"], row["bwd", "fa4"])
    shown = f"forward {speed['fwd', 'tilewise']}, FlashAttention-3 {fa3['tflops']:.0f} ({of_3:.2f} of its speed by the rounds), "
    shown += f"FlashAttention-4 {speed['fwd', 'fa4']}, FlexAttention {speed['fwd', 'flex']}; backward {speed['bwd', 'tilewise']}, "
    shown += f"FlashAttention-4 {speed['bwd', 'fa4']} ({of_4:.2f}), FlexAttention {speed['bwd', 'flex']}."
    assert shown in text, shown
    step = {x: rows["serving", "8-prompts-64-decodes", "fwd", x] for x in ("tilewise", "fa3")}
    assert f"{step['tilewise']['ms']:.2f} ms ({ratio(step['tilewise'], step['fa3']):.2f} of FlashAttention-3)" in text


def test_cache_page_shows_the_committed_times_of_new_queries() -> None:
    text, rows = measured("kvcache.md")

    def times(items: int, provider: str) -> list[str]:
        return [format(1e3 * rows["speculative", f"{items}x32k-{n}", "fwd", provider]["ms"], ".0f") for n in (1, 4, 16, 64)]

    (one, one_fa3), (four, four_fa3) = ([times(items, x) for x in ("tilewise", "fa3")] for items in (1, 4))
    shown = "one sequence {}, {}, {} and {} µs ".format(*one) + "(FlashAttention-3 {}, {}, {}, {}), ".format(*one_fa3)
    shown += "four {}, {}, {} and {} µs ".format(*four) + "({}, {}, {}, {}).".format(*four_fa3)
    assert shown in text, shown


def test_forward_page_shows_the_committed_bias() -> None:
    text = " ".join((ROOT / "docs" / "hopper-forward.md").read_text().split())
    us = {row["call"]: row["us"] for row in json.loads((RESULTS / "bias-h200.json").read_text())["rows"]}
    ours, flex = us["ours d64"], us["flex d64"]
    assert f"{ours:.0f} µs, FlexAttention {flex:.0f} in the same process, {flex / ours:.2f} times" in text
    others = (us[f"ours {call}"] for call in ("d64, float32 bias", "d64, mask", "d128"))
    assert "with a float32 bias {:.0f} µs, with a mask of that shape {:.0f}, at head dim 128 {:.0f} µs".format(*others) in text


@pytest.mark.parametrize(("name", "pass_", "products"), [("forward", "fwd", 2), ("backward", "bwd", 5)])
def test_hopper_pages_show_the_committed_counters(name: str, pass_: str, products: int) -> None:
    """docs/hopper-*.md: how far each cell is from the bounds, from the counters as the profiler gave them."""
    page = (ROOT / "docs" / f"hopper-{name}.md").read_text()
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
    page = (ROOT / "docs" / "hopper-forward.md").read_text()
    for call in json.loads((RESULTS / "parts-h200.json").read_text())["calls"]:
        counts = {"heads": call["heads_in_a_tile"], "parts": call["parts"]}
        cut = ", ".join(f"{count} {what}" for what, count in counts.items() if count > 1)
        heads, size = f"{call['heads']}/{call['kv_heads']}", f"{call['seqlen_q']:,} × {call['seqlen_k']:,}"
        shape = f"{call['batch']}, {heads}, {size}, {call['head_dim']}, {'causal' if call['causal'] else 'full'}"
        ours, merge, whole = call["kernel_us"], call["merge_us"], call["whole_us"]
        line = f"| {shape} | {cut} | {ours:.0f} + {merge:.0f} | {whole:,.0f} | {whole / (ours + merge):.1f} |"
        assert line in page, line
