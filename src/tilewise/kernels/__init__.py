"""The computations behind the ops, one module or package a backend. Each offers ``forward`` and ``backward`` over `plan.Operands`."""
