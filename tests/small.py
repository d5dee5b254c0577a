"""Small inputs and the common parameters of the contract's tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tilewise import attention

from .helpers import make_inputs

BACKENDS = ["tiled", "auto", "reference"]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
NEG_INF = float("-inf")
I32 = torch.int32
EVERY_AUX = ("lse", "max_logits", "key_mass", "entropy")

every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def qkv(
    b: int = 2, sq: int = 5, sk: int = 7, hq: int = 2, hk: int = 2, d: int = 8, dv: int | None = None, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (b, sq, hq, d), (b, sk, hk, d), (b, sk, hk, dv or d)
    q, k, v = (torch.randn(shape).to(dtype).requires_grad_() for shape in shapes)
    return q, k, v


def seen_keys(sq: int, sk: int, backend: str = "tiled", batch: int = 1, dtype: torch.dtype = torch.float32, **options: Any) -> Tensor:
    """Which keys each query sees, (B, Sq, Sk): with equal scores and V the identity the output is the matrix of probabilities."""
    q, k = torch.zeros(batch, sq, 1, 8, dtype=dtype), torch.zeros(batch, sk, 1, 8, dtype=dtype)
    v = torch.eye(sk, dtype=dtype).view(1, sk, 1, sk).expand(batch, sk, 1, sk)
    out = attention(q, k, v, backend=backend, **options)
    return (out[:, :, 0] > 0).int()


def leaves_of(*tensors: Tensor | None) -> list[Tensor]:
    return [x for x in tensors if x is not None and x.requires_grad]


def double(**changes: Any) -> dict[str, Tensor]:
    return {name: x.double() for name, x in make_inputs(**{"batch": 2, "seqlen_q": 5, "seqlen_k": 7, "head_dim": 4, **changes}).items()}


def relative(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return score - 0.125 * (i - j)


class Block(torch.nn.Module):
    """A small transformer block."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm = torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(width, 64), torch.nn.GELU(), torch.nn.Linear(64, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.out(attention(q, k, v, causal=True).flatten(2))
        return x + self.mlp(x)
