"""`python -m tilewise`: the command line."""

import sys

from tilewise.cli import main

sys.exit(main())
