"""`python -m tilewise.lab`."""

import sys

from .run import command

if __name__ == "__main__":
    sys.exit(command())
