"""`python -m tilewise.demo OUT`: the demo with torch alone, without tables or a figure; writes OUT/results.json."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from tilewise.demo.run import Settings, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tilewise.demo", description=__doc__)
    parser.add_argument("out", type=Path, help="folder for results.json")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    results = run(Settings.for_device(options.device))
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "results.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(f"the loss curves {'agree' if results['training']['agree'] else 'DISAGREE'}; written: {path}")
    return 0 if results["training"]["agree"] else 1


if __name__ == "__main__":
    sys.exit(main())
