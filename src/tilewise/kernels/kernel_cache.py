"""Where Triton keeps compiled kernels, when the folder that it would use cannot be written."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
import warnings


@functools.cache
def prepare() -> None:
    """Lets Triton compile although its cache folder is missing for good or read-only; called once, before the first kernel.

    A folder that can be made and written is left alone. Otherwise kernels go to a temporary folder for as long as the process lives, and
    those that the read-only folder holds, as in a container image, are still found. One warning says so.
    """
    from triton import knobs

    folder = knobs.cache.dir
    problem = _why_not_writable(folder)
    if problem is None:
        return
    temporary = tempfile.mkdtemp(prefix="tilewise-triton-")
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    if os.path.isdir(folder):
        for entry in os.scandir(folder):
            os.symlink(entry.path, os.path.join(temporary, entry.name))
    knobs.cache.dir = temporary
    warnings.warn(
        f"Triton's cache folder {folder} cannot be written ({problem}): kernels compiled now are kept in {temporary} and lost when this "
        "process ends. Set TRITON_CACHE_DIR to a writable folder to compile them once.",
        stacklevel=2,
    )


def _why_not_writable(folder: str) -> str | None:
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or type(error).__name__
