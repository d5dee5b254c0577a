"""Every kernel of the lab in Triton's interpreter, which must be switched on before Triton is imported: a process of its own.

Prints a JSON object: for each "algorithm pass dtype", result names with their largest difference from float64, and that of the counted
twin, which computes the same in float32.
"""

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

from tilewise.lab import algorithms
from tilewise.lab.algorithms import Inputs
from tilewise.lab.run import difference, exact
from tilewise.lab.traffic import DeviceMemory, Tiles

CASES = (
    ("float32", Inputs.random(2, 50, 16, Tiles(16, 32), density=0.5, piece=16)),  # ragged in both tile sizes
    ("float16", Inputs.random(1, 32, 32, Tiles(32, 16), dtype=torch.float16, density=0.5, piece=16)),
)


def main() -> None:
    report = {}
    for dtype, inputs in CASES:
        for step in algorithms.SOFTMAX + algorithms.ATTENTION:
            got, twin = step.launch(inputs)(), step.count(DeviceMemory(), inputs)
            if "m" in got:
                got["lse"] = got["m"] + torch.log(got["l"])
            want = exact(inputs, step.name)
            report[f"{step.name} {step.pass_} {dtype}"] = {
                name: (difference(got[name], want[name]), difference(twin[name], want[name])) for name in twin
            }
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
