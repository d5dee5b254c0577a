"""`python -m tilewise.bench [run|plot|tune] ...`; without a verb it runs the benchmark."""

import importlib
import sys

VERBS = ("run", "plot", "tune", "child")


def main() -> int:
    verb, rest = (sys.argv[1], sys.argv[2:]) if sys.argv[1:2] and sys.argv[1] in VERBS else ("run", sys.argv[1:])
    status: int = importlib.import_module(f".{verb}", __package__).main(rest)
    return status


if __name__ == "__main__":
    sys.exit(main())
