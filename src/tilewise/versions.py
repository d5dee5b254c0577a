"""Which releases of torch and Triton tilewise is made for, and a sentence where this environment has others."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import warnings

import torch

OLDEST_TORCH = (2, 11)
OLDEST_TRITON = (3, 6)
# What the tests have run on. Newer releases are not warned of: most work, and users could do nothing about a warning but go back.
NEWEST_TESTED_TORCH = (2, 13)
NEWEST_TESTED_TRITON = (3, 9)


def release(version: str) -> tuple[int, int]:
    """Major and minor number.

    >>> release("2.13.0+cpu")
    (2, 13)
    """
    major, minor = version.split(".")[:2]
    return int(major), int("".join(character for character in minor if character.isdigit()) or 0)


def dotted(numbers: tuple[int, int]) -> str:
    """
    >>> dotted((3, 6))
    '3.6'
    """
    return ".".join(map(str, numbers))


def installed(name: str) -> str:
    """The version of an importable package, "" where it cannot be imported; the package itself is not imported."""
    try:
        if importlib.util.find_spec(name) is None:
            return ""
        return importlib.metadata.version(name)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return ""


def complaint(torch_version: str, triton_version: str) -> str:
    """What is wrong with a pair of versions, in one sentence; "" where it is supported. No Triton ("") is: the tiled path needs none.

    >>> complaint("2.13.0", "3.9.0")
    ''
    """
    too_old = []
    if release(torch_version) < OLDEST_TORCH:
        too_old.append(f"torch {torch_version}")
    if triton_version and release(triton_version) < OLDEST_TRITON:
        too_old.append(f"Triton {triton_version}")
    if not too_old:
        return ""
    return (
        f"tilewise supports torch {dotted(OLDEST_TORCH)} or newer (tested to {dotted(NEWEST_TESTED_TORCH)}) with Triton "
        f"{dotted(OLDEST_TRITON)} or newer (tested to {dotted(NEWEST_TESTED_TRITON)}), but this environment has "
        f"{' and '.join(too_old)}: upgrade with pip install --upgrade 'torch>={dotted(OLDEST_TORCH)}', which brings its own Triton."
    )


def check() -> None:
    """Warns once, at import, of an unsupported pair. Triton is not imported for it."""
    problem = complaint(torch.__version__, installed("triton"))
    if problem:
        warnings.warn(problem, stacklevel=3)
