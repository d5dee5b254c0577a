"""The fingerprint that ties a measurement to the kernels it was made with."""

from __future__ import annotations

import hashlib
from pathlib import Path


def kernel_source_hash(device: str = "cuda", package: Path | None = None) -> str:
    """SHA-256 over the Python files that run on a device, path and content, in the order of their paths.

    Args:
        device: "cpu" for the files directly in `kernels/`, which no GPU kernel is among; anything else for all below it.
        package: the folder that holds `kernels/`; the installed tilewise by default.
    """
    package = package or Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted(
        package.glob("kernels/*.py" if device == "cpu" else "kernels/**/*.py"), key=lambda p: p.relative_to(package).as_posix()
    ):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()
