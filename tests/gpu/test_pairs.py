"""Every pair of features together in some call of moderate size, as a covering array: see `tests.cases`, whose calls are small."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ..cases import Choice, covering_array
from .common import DTYPES, compare, qkv, randn

FACTORS: dict[str, list[str]] = {
    "dims": ["64", "128", "72 and 40"],
    "dtype": ["bf16", "fp16"],
    "lengths": ["square", "more keys", "more queries", "few queries"],
    "heads": ["own", "shared"],
    "position": ["none", "causal", "window", "left"],
    "lengths used": ["none", "both"],
    "tensor": ["none", "bias", "bias of keys", "mask", "bias and mask"],
    "scores": ["plain", "softcap", "alibi", "negative scale"],
    "sink": ["none", "finite"],
    "dropout": ["none", "drop"],
    "layout": ["bshd", "bhsd"],
    "order": ["any", "fixed"],
}
CALLS = covering_array(FACTORS)
DIMS = {"64": (64, 64), "128": (128, 128), "72 and 40": (72, 40)}
LENGTHS = {"square": (384, 384), "more keys": (200, 517), "more queries": (517, 200), "few queries": (20, 1500)}


def aligned(x: Tensor) -> Tensor:
    """x in rows that TMA can read: they start at multiples of 16 bytes."""
    wide = torch.zeros(*x.shape[:-1], -(-x.shape[-1] // 16) * 16, dtype=x.dtype, device=x.device)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def built(choice: Choice) -> dict[str, Any]:
    """The arguments of one call, four query heads over two batch items. What a tensor hides is the same for all heads."""
    (dim, dim_v), (seqlen_q, seqlen_k), dtype = DIMS[choice["dims"]], LENGTHS[choice["lengths"]], DTYPES[choice["dtype"]]
    inputs = qkv(2, seqlen_q, seqlen_k, 4, 4 if choice["heads"] == "own" else 2, dim, dim_v, dtype)
    if choice["layout"] == "bhsd":
        inputs = {name: x.transpose(1, 2).contiguous() for name, x in inputs.items()}
    arguments: dict[str, Any] = {**inputs, "layout": choice["layout"]}
    arguments |= {
        "none": {},
        "causal": {"causal": True},
        "window": {"window_size": (100, 30)},
        "left": {"window_size": (64, -1)},
    }[choice["position"]]
    if choice["lengths used"] == "both":
        arguments["seqused_q"] = torch.tensor([seqlen_q, seqlen_q // 3], dtype=torch.int32, device="cuda")
        arguments["seqused_k"] = torch.tensor([seqlen_k // 2, seqlen_k - 5], dtype=torch.int32, device="cuda")
    if "bias" in choice["tensor"]:
        shape = (2, 1, 1, seqlen_k) if choice["tensor"] == "bias of keys" else (2, 1, seqlen_q, seqlen_k)
        arguments["bias"] = aligned(randn(*shape, dtype=dtype))
    if "mask" in choice["tensor"]:
        arguments["mask"] = aligned(torch.rand(2, 1, seqlen_q, seqlen_k, device="cuda") < 0.7)
    arguments |= {
        "plain": lambda: {},
        "softcap": lambda: {"softcap": 3.0},
        "alibi": lambda: {"alibi_slopes": randn(4, dtype=torch.float32).abs() * 0.1},
        "negative scale": lambda: {"softmax_scale": -0.1},
    }[choice["scores"]]()
    if choice["sink"] == "finite":
        arguments["learnable_sink"] = randn(4, dtype=torch.float32)
    if choice["dropout"] == "drop":
        arguments |= {"dropout_p": 0.3, "dropout_seed": 0x1234_5678_9ABC_DEF0}
    return arguments


@pytest.mark.parametrize("choice", CALLS, ids=lambda choice: "-".join(choice.values()))
def test_every_pair_of_features(backend: str, choice: Choice) -> None:
    """Nothing here is refused: both passes are those of the backend that is named."""
    compare(built(choice), backend, deterministic=choice["order"] == "fixed", served=True)
