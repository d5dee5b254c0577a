"""Compiles Hopper kernels with the Triton of the interpreter that runs this, which needs no torch: the oldest one has an environment of
its own. Reads pickled ("forward" or "backward", variant) pairs from stdin; writes what `test_hopper_compile` looks at, pickled, to stdout.
"""

from __future__ import annotations

import pickle
import sys
import types
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src" / "tilewise"


def without_torch() -> None:
    """The packages around the kernels, without their `__init__`, which imports torch."""
    for name in ("tilewise", "tilewise.kernels", "tilewise.kernels.triton", "tilewise.kernels.hopper"):
        package = types.ModuleType(name)
        package.__path__ = [str(SOURCES.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package


def main() -> None:
    without_torch()
    sys.modules["torch"] = types.ModuleType("torch")  # named by `kernels.philox`, of which the kernels take constants alone
    sys.modules["torch"].Tensor = None
    import triton

    from tilewise.kernels.hopper.backward_compiling import compile_backward
    from tilewise.kernels.hopper.compiling import compile_forward
    from tilewise.kernels.hopper.gluon_api import machine_code

    del sys.modules["torch"]  # Triton must not take it for the real one
    found = []
    for kind, variant in pickle.load(sys.stdin.buffer):
        if kind == "forward":
            kernel, where = compile_forward(variant, variant.dtype if variant.store_tma else "fp32", "fp32", "fp32")
        else:
            kernel, where = compile_backward(variant, "fp32")
        found.append((triton.__version__, where, kernel.metadata.shared, *machine_code(kernel.asm["ptx"])))
    sys.stdout.buffer.write(pickle.dumps(found))


if __name__ == "__main__":
    main()
