"""The computations behind the ops, one module or package a backend. Each offers ``forward`` and ``backward`` over `plan.Operands`."""

import time

FIRST_IMPORT = time.time()  # of any kernel: what is read from a source that is older is what was imported
