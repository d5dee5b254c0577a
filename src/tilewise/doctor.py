"""`tilewise doctor`: what this machine has, what tilewise can run on it, and how to get what is missing. Needs torch alone."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

import tilewise
from tilewise import plan
from tilewise.versions import OLDEST_TORCH, OLDEST_TRITON, dotted, installed, release

# Packages that an extra of tilewise brings, and what works only with them.
OPTIONAL = {
    "typer": ("demo", "the commands other than doctor"),
    "rich": ("demo", "progress bars and tables"),
    "matplotlib": ("demo", "the demo's figure"),
    "transformers": ("transformers", 'attn_implementation="tilewise"'),
}


@dataclass(frozen=True)
class DeviceReport:
    """One device that torch can use: `serves` is the backend that a plain call gets, `backends` maps each to "" or why it cannot run."""

    device: str
    name: str
    detail: str
    serves: str
    backends: dict[str, str]


@dataclass(frozen=True)
class Missing:
    """Something that is not here: what works only with it, and how to get it."""

    what: str
    why: str
    how: str


@dataclass(frozen=True)
class Report:
    """All that `examine` found. `versions` maps a package to its version, "" where it is absent."""

    versions: dict[str, str]
    system: str
    devices: list[DeviceReport]
    missing: list[Missing]

    @property
    def usable(self) -> bool:
        return release(self.versions["torch"]) >= OLDEST_TORCH


def examine() -> Report:
    """Look at this machine. Runs no kernel and imports no Triton."""
    versions = {
        "tilewise": tilewise.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": installed("triton"),
        **{name: installed(name) for name in OPTIONAL},
    }
    devices = [_examine_device(torch.device(name)) for name in _device_names()]
    return Report(versions, f"{platform.system()} {platform.machine()}", devices, _find_missing(versions, devices))


def _device_names() -> list[str]:
    names = ["cpu"]
    names += [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    names += [f"xpu:{index}" for index in range(torch.xpu.device_count())]
    if torch.backends.mps.is_available():
        names.append("mps")
    return names


def _examine_device(device: torch.device) -> DeviceReport:
    # A plain bfloat16 self-attention: what most calls look like.
    q = torch.empty(1, 1, 128, 64, dtype=torch.bfloat16, device="meta")
    operands, rules = plan.Operands(q, q, q), plan.Rules(softmax_scale=0.125)
    target = plan.target_of(device)
    backends = {"reference": "", "tiled": ""}
    for backend in ("triton", "hopper"):
        backends[backend] = plan.why_not(backend, operands, rules, plan.Request(), target) or ""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return DeviceReport(
            str(device),
            properties.name,
            f"compute capability {properties.major}.{properties.minor}, {properties.total_memory / 1e9:.0f} GB",
            _serves(operands, rules, target),
            backends,
        )
    name = platform.processor() or platform.machine() if device.type == "cpu" else device.type
    detail = f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    return DeviceReport(str(device), name, detail, _serves(operands, rules, target), backends)


def _serves(operands: plan.Operands, rules: plan.Rules, target: plan.Target) -> str:
    # On a GPU `select` warns when nothing better than `tiled` serves; here that is a finding, not a surprise.
    order = ("hopper", "triton") if target.type in ("cuda", "xpu") else ()
    for backend in order:
        if plan.why_not(backend, operands, rules, plan.Request(), target) is None:
            return backend
    return "tiled" if order else plan.select(operands, rules, target=target, warn=False).backend


def _find_missing(versions: dict[str, str], devices: list[DeviceReport]) -> list[Missing]:
    found = []
    on_gpu = any(device.device.startswith(("cuda", "xpu")) for device in devices)
    if release(versions["torch"]) < OLDEST_TORCH:
        found.append(
            Missing(f"torch {dotted(OLDEST_TORCH)} or newer", f"this is {versions['torch']}", "pip install --upgrade 'torch>=2.11'")
        )
    if not on_gpu:
        if torch.version.cuda or torch.version.hip:
            found.append(
                Missing(
                    "a visible GPU",
                    f"torch is built for one ({torch.__version__}) but sees none",
                    "check the driver and CUDA_VISIBLE_DEVICES",
                )
            )
        elif shutil.which("nvidia-smi") or shutil.which("rocm-smi"):
            found.append(
                Missing("a torch built for the GPU", "the machine has a GPU driver, but this torch is built for the CPU", "see pytorch.org")
            )
    if not versions["triton"] or release(versions["triton"]) < OLDEST_TRITON:
        state = f"this is {versions['triton']}" if versions["triton"] else "absent"
        need = "the triton and hopper backends need it" if on_gpu else "it matters on a GPU only; on this machine nothing is lost"
        how = (
            "pip install --upgrade 'triton>=3.6'"
            if platform.system() == "Linux"
            else "Triton has packages for Linux; elsewhere tilewise works without it"
        )
        found.append(Missing(f"triton {dotted(OLDEST_TRITON)} or newer", f"{state}; {need}", how))
    for name, (extra, purpose) in OPTIONAL.items():
        if not versions[name]:
            found.append(Missing(name, f"needed for {purpose}", f"pip install 'tilewise[{extra}]'"))
    return found


def main(arguments: Sequence[str]) -> int:
    """The command: print the report, as JSON with --json. Returns 0 where tilewise can run, 1 where it cannot."""
    parser = argparse.ArgumentParser(prog="tilewise doctor", description="What tilewise can run on this machine, and what is missing.")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args(list(arguments))
    report = examine()
    if options.json:
        print(json.dumps({**asdict(report), "usable": report.usable}, indent=2))
    else:
        _print(report)
    return 0 if report.usable else 1


def _tables(report: Report) -> list[tuple[str, list[str], list[list[str]]]]:
    """The report as tables: title, column names, rows."""
    versions = [[name, version or "absent"] for name, version in report.versions.items()] + [["system", report.system]]
    backends = [
        [device.device, name, "serves plain calls" if name == device.serves else "can run" if not reason else f"no: {reason}"]
        for device in report.devices
        for name, reason in (device.backends | ({device.serves: ""} if device.serves not in device.backends else {})).items()
    ]
    devices = [[device.device, device.name, device.detail] for device in report.devices]
    missing = [[item.what, item.why, item.how] for item in report.missing]
    tables = [
        ("Versions", ["what", "version"], versions),
        ("Devices", ["device", "name", "detail"], devices),
        ("Backends", ["device", "backend", "state"], backends),
    ]
    return [*tables, ("Missing", ["what", "why it matters", "how to get it"], missing)] if missing else tables


def _print(report: Report) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        _print_plain(report)
        return
    console = Console()
    for title, columns, rows in _tables(report):
        table = Table(title=title, title_justify="left", title_style="bold")
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table, markup=False)


def _print_plain(report: Report) -> None:
    for title, columns, rows in _tables(report):
        widths = [max(len(row[index]) for row in [columns, *rows]) for index in range(len(columns))]
        print(f"\n{title}")
        for row in rows:
            print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
