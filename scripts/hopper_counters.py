"""How far the Hopper kernels are from the bounds of the device: the profiler's counters of one launch of each cell of the paper grid.

python scripts/hopper_counters.py OUT.json     on a Hopper GPU, where `ncu` may read its counters; as benchmarks/results/counters-h200.json
                                               scripts/hopper_tables.py writes it into the pages
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path

import torch

from tilewise import attention
from tilewise.bench.cases import Case, select
from tilewise.bench.provider import Inputs
from tilewise.bench.source_hash import kernel_source_hash
from tilewise.lab.measured import profiler
from tilewise.lab.profile import kernels

METRICS = {
    "cycles": "sm__cycles_elapsed.max",
    "cycles_active": "sm__cycles_active.avg",
    "mufu_percent": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "shared_percent": "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",
    "issue_percent": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "l2_bytes": "lts__t_bytes.sum",
    "dram_bytes": "dram__bytes.sum",
    "nanoseconds": "gpu__time_duration.sum",
}
KERNELS = {"fwd": "attention_forward", "bwd": "attention_backward"}
FLAGS = ["--csv", "--print-units", "base", "--profile-from-start", "off", "--clock-control", "none", "--cache-control", "all"]


def cells() -> list[tuple[str, Case]]:
    found = select("paper", "cuda")
    return [(pass_, case) for pass_ in KERNELS for case in sorted(found, key=lambda case: (case.head_dim, case.causal, case.seqlen_q))]


def launch() -> None:
    """Every cell once between the profiler's marks, behind a call of its own that compiles it."""
    runtime = torch.cuda.cudart()
    for pass_, case in cells():
        inputs = Inputs.make(case)
        leaves = [x.requires_grad_(pass_ == "bwd") for x in (inputs.q, inputs.k, inputs.v)]
        for profiled in (False, True):
            if profiled and pass_ == "fwd":
                runtime.cudaProfilerStart()
            out = attention(*leaves, causal=case.causal, backend="hopper")
            if profiled and pass_ == "bwd":
                torch.cuda.synchronize()
                runtime.cudaProfilerStart()
            if pass_ == "bwd":
                torch.autograd.grad(out, leaves, inputs.dout)
            torch.cuda.synchronize()
        runtime.cudaProfilerStop()


def main(arguments: list[str]) -> int:
    if arguments == ["launch"]:
        launch()
        return 0
    ncu = profiler()
    if ncu is None:
        print("no ncu on this machine")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder, "counters.csv")
        only = ["--kernel-name", f"regex:{'|'.join(KERNELS.values())}"]
        command = [
            ncu,
            *FLAGS,
            *only,
            "--log-file",
            str(table),
            "--metrics",
            ",".join(METRICS.values()),
            sys.executable,
            __file__,
            "launch",
        ]
        subprocess.run(command, check=True)
        counted = list(kernels(table.read_text()))
    expected = cells()
    if [name for name, _, _ in counted] != [KERNELS[pass_] for pass_, _ in expected]:
        print(f"{len(counted)} launches were profiled, and {len(expected)} were meant: {[name for name, _, _ in counted]}")
        return 1
    version = subprocess.run([ncu, "--version"], capture_output=True, text=True, check=True).stdout.split("Version ")[-1].split()[0]
    result = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": __import__("triton").__version__,
        "source_hash": kernel_source_hash(),
        "tool": f"scripts/hopper_counters.py, ncu {version}, one launch a cell, --clock-control none, caches flushed before",
        "metrics": METRICS,
        "cells": [
            {"pass": pass_, "label": case.label} | {key: round(metrics[metric], 2) for key, metric in METRICS.items()}
            for (pass_, case), (_, _, metrics) in zip(expected, counted, strict=True)
        ],
    }
    Path(arguments[0]).write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
