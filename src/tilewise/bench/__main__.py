"""`python -m tilewise.bench [run|plot|tune] ...`; without a verb it runs the benchmark."""

import sys


def main() -> int:
    verb = sys.argv[1] if len(sys.argv) > 1 else "run"
    rest = sys.argv[2:] if verb in ("run", "plot", "tune", "child") else sys.argv[1:]
    if verb == "plot":
        from .plot import main as entry
    elif verb == "tune":
        from .tune import main as entry
    elif verb == "child":
        from .child import main as entry
    else:
        from .run import main as entry
    return entry(rest)


if __name__ == "__main__":
    sys.exit(main())
