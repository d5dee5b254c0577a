"""The fingerprint that ties a measurement to the kernels it was made with."""

from __future__ import annotations

import hashlib
from pathlib import Path


def kernel_source_hash(package: Path | None = None) -> str:
    """SHA-256 over every Python file below `kernels/`, path and content, in the order of their paths.

    Args:
        package: the folder that holds `kernels/`; the installed tilewise by default.
    """
    package = package or Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.glob("kernels/**/*.py"), key=lambda p: p.relative_to(package).as_posix()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()
