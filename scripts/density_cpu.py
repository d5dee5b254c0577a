"""Measures how the time of block-sparse attention falls with the share of visible blocks on a CPU, forward and backward.

python scripts/density_cpu.py OUT.json

Random blocks of 128 x 128 over 8,192 tokens, head dim 64, float32, beside a list of all blocks, in turns; docs/masks.md is made from the
file by scripts/mask_gallery.py. Each mask's output is first compared with float64 on some rows.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewise import BlockMask, attention, masks
from tilewise.bench.source_hash import kernel_source_hash

TOKENS, HEAD_DIM, BLOCK, ROUNDS = 8192, 64, 128, 7
SHARES = (1.0, 0.5, 0.25, 0.13, 0.06)
LIMIT = 1e-5  # of the relative error in float32


def block_bits(share: float) -> Tensor:
    """Every block with the same probability, and those on the diagonal, so that each query sees a key."""
    count = TOKENS // BLOCK
    bits = torch.rand(count, count, generator=torch.Generator().manual_seed(0)) < share
    return bits | torch.eye(count, dtype=torch.bool)


def error(bits: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> float:
    """The relative error of every 97th row of the last head."""
    rows = torch.arange(0, TOKENS, 97)
    last = [x[0, :, -1].detach().double() for x in (q, k, v)]
    seen = bits[rows // BLOCK].repeat_interleave(BLOCK, 1)
    scores = (last[0][rows] @ last[1].T) * HEAD_DIM**-0.5
    expected = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ last[2]
    return float((out[0, rows, -1].detach().double() - expected).norm() / expected.norm())


def measure(heads: int, threads: int) -> list[dict[str, Any]]:
    """One row a share: the least seconds of both passes over the rounds."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    q, k, v = given = [torch.randn(1, TOKENS, heads, HEAD_DIM, requires_grad=True) for _ in range(3)]
    dout = torch.randn(1, TOKENS, heads, HEAD_DIM)
    rows = []
    for share in SHARES:
        bits = block_bits(share)
        mask = BlockMask(masks.Blocks(bits[None, None], BLOCK), TOKENS)
        found = error(bits, q, k, v, attention(q, k, v, mask=mask))
        density = bits.double().mean().item()
        rows.append({"heads": heads, "threads": threads, "density": density, "error": found, "seconds": [], "mask": mask})
    for turn in range(ROUNDS):
        for row in rows[:: 1 if turn % 2 else -1]:
            start = time.perf_counter()
            torch.autograd.grad(attention(q, k, v, mask=row["mask"]), given, dout)
            row["seconds"].append(time.perf_counter() - start)
    return [{**row, "seconds": min(row["seconds"]), "mask": f"blocks of {BLOCK}"} for row in rows]


def main() -> int:
    cores = torch.get_num_threads()
    rows = [row for heads, threads in ((1, 1), (8, cores), (1, cores)) for row in measure(heads, threads)]
    for row in rows:
        print(row)
    facts = {"tool": "scripts/density_cpu.py", "device": platform.processor() or platform.machine(), "device_type": "cpu", "cores": cores}
    facts |= {"torch": torch.__version__, "source_hash": kernel_source_hash("cpu"), "tokens": TOKENS, "rounds": ROUNDS, "rows": rows}
    Path(sys.argv[1]).write_text(json.dumps(facts, indent=1) + "\n")
    return any(not row["error"] <= LIMIT for row in rows)


if __name__ == "__main__":
    sys.exit(main())
