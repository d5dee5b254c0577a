"""Rows of results: what every row carries, where rows are kept, and which sources they belong to."""

from __future__ import annotations

import hashlib
import json
import platform
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from .predict import Prediction

Row = dict[str, Any]
# What decides the numbers: the algorithms, their predictions and sizes. Printing, drawing and this file do not.
MEASURED_SOURCES = ("softmax_rows", "standard", "fa1", "fa2", "split_dim", "block_sparse", "traffic", "predict", "sweeps", "algorithms")


def source_hash(package: Path | None = None) -> str:
    """SHA-256 over the sources that decide what the lab measures, kernels included."""
    package = package or Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted([package / f"{name}.py" for name in MEASURED_SOURCES] + list((package / "triton").glob("*.py"))):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def common(device: str) -> Row:
    """Keys that are the same for every row of one process."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    return {
        "run_id": uuid.uuid4().hex[:12],
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if device == "cuda" else processor(),
        "torch": torch.__version__,
        "triton": triton_version,
        "source_hash": source_hash(),
    }


def predicted(prediction: Prediction, l2_bytes: int) -> Row:
    """The keys of a prediction."""
    return {
        "predicted_bytes": prediction.bytes(),
        "predicted_loads": prediction.bytes("load"),
        "predicted_stores": prediction.bytes("store"),
        "predicted_device_bytes": prediction.device_bytes(l2_bytes),
        "l2_bytes": l2_bytes,
        "flops": prediction.flops,
        "exponentials": prediction.exponentials,
        "predicted_extra_bytes": prediction.extra_bytes,
        "on_chip_bytes": prediction.on_chip_bytes,
    }


def write(rows: Iterable[Row], path: Path) -> None:
    """Appends rows to a file of JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def read(path: Path) -> list[Row]:
    """The rows of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def processor() -> str:
    """A name for the CPU of this machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
