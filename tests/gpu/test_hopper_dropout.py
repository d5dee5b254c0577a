"""Dropout of the Hopper kernels: the very bits of the specification, forward and backward, and every feature beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tilewise import attention
from tilewise.kernels.philox import keep_mask

from ..packed import build, check
from .common import BACKENDS, compare, qkv, randn, watched
from .test_varlen import TILES

pytestmark = pytest.mark.skipif("hopper" not in BACKENDS, reason="needs a Hopper GPU")
SEED = 0x1234_5678_9ABC_DEF0


@pytest.fixture
def served() -> Iterator[list[str]]:
    with watched() as passes:
        yield passes


@pytest.mark.parametrize("dropout_p, seed", [(0.3, SEED), (0.1, -7), (0.97, 1 << 40)])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_very_bits(served: list[str], dim: int, dropout_p: float, seed: int) -> None:
    """Scores of 0 make all probabilities equal. Columns of the identity as V show those of `dim` keys, as dout those of `dim` queries."""
    batch, heads, seqlen_q, seqlen_k = 2, 3, 400, 700
    q, k = (torch.zeros(batch, n, heads, dim, dtype=torch.bfloat16, device="cuda") for n in (seqlen_q, seqlen_k))
    b, h, i = (torch.arange(n, device="cuda").view(shape) for n, shape in ((2, (-1, 1, 1, 1)), (3, (-1, 1, 1)), (seqlen_q, (-1, 1))))
    keep = keep_mask(torch.tensor(seed, device="cuda"), dropout_p, b, h, i, 0, seqlen_k)

    def identity(rows: int, first: int) -> torch.Tensor:
        x = torch.zeros(batch, rows, heads, dim, dtype=torch.bfloat16, device="cuda")
        at = torch.arange(first, min(first + dim, rows), device="cuda")
        x[:, at, :, at - first] = 1
        return x

    for first in range(0, seqlen_k, dim):
        v = identity(seqlen_k, first)
        out = attention(q, k, v, dropout_p=dropout_p, dropout_seed=seed, backend="hopper", deterministic=False)
        shown = keep[..., first : first + dim]
        assert torch.equal(out.transpose(1, 2)[..., : shown.shape[3]] != 0, shown)
    v.requires_grad_()
    q.requires_grad_()
    for first in range(0, seqlen_q, dim):
        out = attention(q, k, v, dropout_p=dropout_p, dropout_seed=seed, backend="hopper", deterministic=False)
        _, dv = torch.autograd.grad(out, (q, v), identity(seqlen_q, first))
        shown = keep[:, :, first : first + dim].mT
        assert torch.equal(dv.transpose(1, 2)[..., : shown.shape[3]] != 0, shown)
    assert served.count("hopper backward") == len(range(0, seqlen_q, dim))


def lengths(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


FEATURES: dict[str, Any] = {
    "plain": lambda: {},
    "causal": lambda: dict(causal=True),
    "window": lambda: dict(window_size=(100, 30)),
    "window that leaves early keys": lambda: dict(window_size=(101, 0)),
    "softcap, sink": lambda: dict(softcap=2.0, learnable_sink=randn(4, dtype=torch.float32)),
    "negative scale, causal": lambda: dict(softmax_scale=-0.2, causal=True),
    "alibi": lambda: dict(alibi_slopes=randn(4, dtype=torch.float32).abs() * 0.1, causal=True),
    "lengths, causal": lambda: dict(seqused_q=lengths(200, 333), seqused_k=lengths(517, 64), causal=True),
    "lengths, window": lambda: dict(seqused_q=lengths(333, 50), seqused_k=lengths(100, 517), window_size=(37, 20)),
    "bias": lambda: dict(bias=randn(2, 1, 333, 520)[..., :517]),
    "mask, causal": lambda: dict(mask=torch.rand(2, 1, 333, 517, device="cuda") < 0.7, causal=True),
}


@pytest.mark.parametrize(
    "dims, deterministic", [((64, 64), False), ((128, 128), True), ((72, 40), False), ((192, 128), True), ((256, 256), False)], ids=str
)
@pytest.mark.parametrize("name", FEATURES)
def test_beside_every_feature(name: str, dims: tuple[int, int], deterministic: bool) -> None:
    inputs = qkv(head_dim=dims[0], head_dim_v=dims[1], dtype=torch.float16 if dims == (64, 64) else torch.bfloat16)
    compare({**inputs, **FEATURES[name](), "dropout_p": 0.25, "dropout_seed": SEED}, "hopper", deterministic=deterministic)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("rules", [{}, {"causal": False}, {"causal": False, "window_size": (-1, 5)}], ids=str)
def test_packed_sequences(served: list[str], rules: dict[str, Any], dims: tuple[int, int]) -> None:
    check({**build("dropout", torch.bfloat16, "cuda", TILES, dims), **rules}, "hopper", deterministic=True)
    assert set(served) == {"hopper forward", "hopper backward"}


def test_hidden_values_before_the_first_window(served: list[str]) -> None:
    """Tiles start at multiples of four keys; what lies between there and the first window may be NaN."""
    inputs, options = qkv(1, 100, 300), dict(window_size=(51, 0), dropout_p=0.2, dropout_seed=3, backend="hopper")
    clean = attention(**inputs, **options)
    inputs["k"][:, :149] = inputs["v"][:, :149] = float("nan")
    torch.testing.assert_close(attention(**inputs, **options), clean, rtol=0, atol=0)
    assert served == ["hopper forward"] * 2
