"""The `tilewise` command. `doctor` works with torch alone; the other commands need the `demo` extra and say so."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tilewise import doctor


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (default: the process's own) and return its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["doctor"]:
        return doctor.main(given[1:])
    try:
        from tilewise.commands import app
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        if package not in ("typer", "rich"):
            raise
        print(
            f"The tilewise command line needs {package}: install it with `pip install 'tilewise[demo]'` "
            "(`tilewise doctor` works without it).",
            file=sys.stderr,
        )
        return 1
    try:
        app(given, prog_name="tilewise")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    return 0
