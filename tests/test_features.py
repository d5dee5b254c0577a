"""Every feature, and every pair of features, on the paths that run without a GPU: output, LSE and each gradient against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilewise import attention, reference
from tilewise.kernels import tiled

from . import cases
from .comparing import compare

ALL = [*cases.SINGLES, *cases.CHOICES]
IDS = [cases.name(choice) for choice in ALL]
EVERY_AUX = ("lse", "max_logits", "key_mass", "entropy")


def arguments_of(call: cases.Call) -> dict[str, Any]:
    return {"q": call.q, "k": call.k, "v": call.v, **call.options}


def check(choice: cases.Choice, dtype: torch.dtype, backend: str, seed: int = 0) -> None:
    compare(arguments_of(cases.build(choice, dtype=dtype, seed=seed)), backend)


@pytest.mark.parametrize("choice", ALL, ids=IDS)
def test_float64_is_exact(choice: cases.Choice, small_tiles: None) -> None:
    """Every single feature and every pair, over many small tiles, in float64: nothing hides behind a tolerance."""
    check(choice, torch.float64, "tiled")


@pytest.mark.parametrize("choice", ALL, ids=IDS)
def test_auto_in_float32(choice: cases.Choice) -> None:
    """What a user on a CPU gets, torch's own fused kernel included where it serves the call."""
    check(choice, torch.float32, "auto")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("choice", cases.CHOICES[::2], ids=cases.name)
def test_tolerance_in_low_precision(choice: cases.Choice, dtype: torch.dtype, small_tiles: None) -> None:
    check(choice, dtype, "tiled", seed=2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("choice", cases.SINGLES, ids=cases.name)
def test_each_feature_in_low_precision(choice: cases.Choice, dtype: torch.dtype) -> None:
    check(choice, dtype, "auto", seed=3)


@pytest.mark.parametrize("choice", ALL, ids=IDS)
def test_auxiliary_outputs_and_their_gradients(choice: cases.Choice, small_tiles: None) -> None:
    """lse, entropy, key_mass and out together, each with a cotangent of its own."""
    call = cases.build(choice)
    ours, theirs = (call.map(lambda _, x: x.detach().clone().requires_grad_()) for _ in range(2))
    out, aux = attention(**arguments_of(ours), backend="tiled", return_aux=EVERY_AUX)
    exact = reference.attention_full(**arguments_of(theirs))
    torch.testing.assert_close(out, exact.out, rtol=1e-9, atol=1e-10)
    for name in EVERY_AUX:
        torch.testing.assert_close(getattr(aux, name), getattr(exact, name), rtol=1e-9, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")

    generator = torch.Generator().manual_seed(1)
    outputs = {"out": out, "lse": aux.lse, "key_mass": aux.key_mass, "entropy": aux.entropy}
    cotangents = {name: torch.randn(x.shape, generator=generator, dtype=x.dtype) for name, x in outputs.items()}
    tensors = ours.differentiable()
    got = torch.autograd.grad(list(outputs.values()), list(tensors.values()), list(cotangents.values()), allow_unused=True)
    finite = exact.lse.isfinite()
    loss = sum((getattr(exact, name) * cotangents[name]).sum() for name in ("out", "key_mass", "entropy"))
    loss = loss + (torch.where(finite, exact.lse, 0.0) * cotangents["lse"]).sum()
    want = torch.autograd.grad(loss, list(theirs.differentiable().values()), allow_unused=True)
    for name, a, b in zip(tensors, got, want, strict=True):
        a, b = (torch.zeros_like(tensors[name]) if x is None else x for x in (a, b))
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9, msg=lambda text, name=name: f"d{name}: {text}")


@pytest.mark.parametrize("size", [(255, 513), (256, 512), (257, 511), (300, 1100)], ids=str)
@pytest.mark.parametrize("position", ["none", "causal", "causal_window"])
def test_the_tiles_that_users_get(size: tuple[int, int], position: str) -> None:
    """Lengths around the real tile sizes, which the small-tile tests do not run."""
    options: dict[str, Any] = {"none": {}, "causal": {"causal": True}, "causal_window": {"causal": True, "window_size": (100, 50)}}[
        position
    ]
    q = torch.randn(1, size[0], 2, 8)
    k, v = torch.randn(2, 1, size[1], 1, 8).unbind(0)
    bias = torch.randn(2, 1, size[1])
    arguments = dict(q=q, k=k, v=v, bias=bias, softcap=3.0, **options)
    compare(arguments, "tiled")


@pytest.mark.parametrize("tile", [(4, 7), (16, 64), (64, 16), (1024, 1024)], ids=str)
def test_tile_size_changes_nothing(tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same answer from every tiling, dropout's pattern included."""
    choice = cases.OFF | {"lengths": "more_keys", "heads": "gqa", "position": "causal_window", "seqused": "both", "bias": "full"}
    choice |= {"dropout": "drop", "mask": "per_head", "alibi": "per_batch", "sink": "finite"}
    monkeypatch.setattr(tiled, "CPU_TILES", tiled.TileSizes(block_m=tile[0], block_n=tile[1], scores=1))
    check(choice, torch.float64, "tiled")


def test_gradients_are_summed_in_the_accumulator_dtype() -> None:
    """Gradients of a shared bias and of a sink over thousands of rows keep float32 accuracy before the last rounding."""
    rows = 4096
    q, k = torch.zeros(1, rows, 1, 8, dtype=torch.bfloat16), torch.zeros(1, 2, 1, 8, dtype=torch.bfloat16)
    v = torch.tensor([1.0, 0.0], dtype=torch.bfloat16).view(1, 2, 1, 1)
    bias = torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    attention(q, k, v, bias=bias, backend="tiled").sum().backward()
    # Each row adds P(1 - P) = 0.25 to the first key's bias and takes it from the second's.
    torch.testing.assert_close(bias.grad, torch.tensor([rows / 4, -rows / 4], dtype=torch.bfloat16))
