"""Time attention with an additive bias under other tiles: ``python scripts/bias_tiles.py``, on a GPU.

Prints milliseconds and TFLOP/s of the forward pass and of forward and backward with the gradient of the bias, (1, 16, 2048, 2048) at head
dim 64, for the table's tiles and for each candidate in their place.
"""

from __future__ import annotations

import itertools

import torch
from triton.testing import do_bench

from tilewise import attention
from tilewise.kernels.triton import configs
from tilewise.kernels.triton.configs import DKDV, DQ, FORWARD, Config

CANDIDATES = {
    FORWARD: [(128, 64, 8, 2), (128, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (128, 128, 8, 2), (64, 64, 4, 2)],
    DKDV: [(64, 128, 8, 2), (64, 64, 4, 2), (64, 64, 8, 2), (32, 128, 8, 2), (128, 64, 8, 2)],
    DQ: [(128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 8, 2), (128, 32, 8, 2), (128, 128, 8, 2)],
}


def main() -> None:
    shape, heads, size, dim = (1, 2048, 16, 64), 16, 2048, 64
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    bias = torch.randn(1, heads, size, size, device="cuda", dtype=torch.bfloat16).requires_grad_()
    dout = torch.randn_like(q)
    work = 4.0 * heads * size * size * dim

    def forward() -> torch.Tensor:
        return attention(q, k, v, bias=bias, backend="triton")

    def both() -> None:
        torch.autograd.grad(forward(), (q, k, v, bias), dout)

    def report(name: str) -> None:
        try:
            fwd, total = do_bench(forward), do_bench(both)
        except Exception as error:  # a candidate may not compile
            print(f"{name}: {type(error).__name__}", flush=True)
            return
        print(f"{name}: fwd {fwd:.3f} ms {work / fwd / 1e9:.0f} TFLOP/s, fwd+bwd {total:.3f} ms {3.5 * work / total / 1e9:.0f}", flush=True)

    report("table")
    original = configs.choose
    for purpose, (tiles, tma) in itertools.chain(*([(p, x) for x in itertools.product(c, (True, False))] for p, c in CANDIDATES.items())):
        changed = Config(*tiles, tma)

        def choose(arch, limit, bits, wanted, *rest, purpose=purpose, changed=changed):
            return changed if wanted == purpose else original(arch, limit, bits, wanted, *rest)

        from tilewise.kernels.triton import launch, recipes

        launch.choose = choose
        recipes.Launcher.recipes.clear()
        report(f"{purpose} {tiles} {'descriptors' if tma else 'pointers'}")


if __name__ == "__main__":
    main()
