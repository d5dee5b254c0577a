"""The reference against the element-by-element oracle: every feature, every pair of features, output, LSE and gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tilewise import reference

from . import cases, oracle

ALL = [*cases.SINGLES, *cases.CHOICES]
IDS = [cases.name(choice) for choice in ALL]


def ask_oracle(call: cases.Call) -> oracle.Answer:
    """The oracle's answer for a call, whatever its layout and strides."""
    options: dict[str, Any] = {
        key: value.numpy() if isinstance(value, Tensor) else value for key, value in call.options.items() if key != "layout"
    }
    if (fn := options.get("score_mod")) is not None:
        options["score_mod"] = lambda s, *indices: fn(torch.tensor(s, dtype=torch.float64), *map(torch.tensor, indices)).item()
    swap = call.options.get("layout") == "bhsd"
    q, k, v = ((x.transpose(1, 2) if swap else x).numpy() for x in (call.q, call.k, call.v))
    return oracle.attention(q, k, v, **options)


def reference_in_bshd(call: cases.Call) -> tuple[Tensor, Tensor]:
    out, lse = reference.attention(call.q, call.k, call.v, **call.options)
    return out.transpose(1, 2) if call.options.get("layout") == "bhsd" else out, lse


def test_philox_known_answers() -> None:
    """The three vectors that the authors of Random123 publish for philox4x32-10."""
    full = 0xFFFFFFFF
    assert oracle.philox_4x32_10((0,) * 4, (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert oracle.philox_4x32_10((full,) * 4, (full, full)) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    pi = oracle.philox_4x32_10((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0))
    assert pi == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


def test_choices_cover_every_pair() -> None:
    assert set().union(*map(cases.pairs_of, cases.CHOICES)) == cases.all_pairs(cases.FACTORS)


@pytest.mark.parametrize("choice", ALL, ids=IDS)
def test_out_and_lse(choice: cases.Choice) -> None:
    call = cases.build(choice, tiny=True)
    expected = ask_oracle(call)
    out, lse = reference_in_bshd(call)
    assert out.dtype == lse.dtype == torch.float64
    np.testing.assert_allclose(out.numpy(), expected.out, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(lse.numpy(), expected.lse, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("choice", ALL, ids=IDS)
def test_auxiliary_outputs(choice: cases.Choice) -> None:
    call = cases.build(choice, tiny=True)
    expected = ask_oracle(call)
    result = reference.attention_full(call.q, call.k, call.v, **call.options)
    for name in ("max_logits", "key_mass", "entropy"):
        np.testing.assert_allclose(getattr(result, name), getattr(expected, name), rtol=1e-10, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("choice", ALL, ids=IDS)
def test_gradients_along_a_direction(choice: cases.Choice) -> None:
    """Autograd through the reference equals a difference quotient of the oracle, for each tensor alone."""
    call = cases.build(choice, tiny=True)
    generator = torch.Generator().manual_seed(1)

    def normal(shape: torch.Size | tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    answer = ask_oracle(call)
    weight_out, weight_lse = normal(answer.out.shape), normal(answer.lse.shape)
    finite = np.isfinite(answer.lse)

    def oracle_loss(changed: cases.Call) -> float:
        answer = ask_oracle(changed)
        return float((answer.out * weight_out.numpy()).sum() + (answer.lse * weight_lse.numpy())[finite].sum())

    leaves = call.map(lambda _, x: x.detach().clone().requires_grad_())
    out, lse = reference_in_bshd(leaves)
    loss = (out * weight_out).sum() + (lse * weight_lse)[torch.from_numpy(finite)].sum()
    tensors = leaves.differentiable()
    gradients = dict(zip(tensors, torch.autograd.grad(loss, list(tensors.values())), strict=True))
    step = 1e-6
    for name, gradient in gradients.items():
        assert gradient.isfinite().all(), name
        direction = normal(gradient.shape)

        def moved(by: float, name: str = name, direction: Tensor = direction) -> cases.Call:
            return call.map(lambda other, x: x + by * direction if other == name else x)

        slope = (oracle_loss(moved(step)) - oracle_loss(moved(-step))) / (2 * step)
        assert slope == pytest.approx((gradient * direction).nan_to_num().sum().item(), rel=2e-6, abs=2e-7), name


def test_gradients_element_by_element() -> None:
    """Every single element of every gradient, for the call with the most terms."""
    choice = cases.OFF | {"lengths": "more_keys", "heads": "gqa", "position": "causal_window", "bias": "full", "softcap": "tight"}
    choice |= {"alibi": "per_head", "sink": "finite", "dropout": "drop", "seqused": "both", "score_mod": "smooth"}
    call = cases.build(choice, tiny=True)
    leaves = call.map(lambda _, x: x.detach().clone().requires_grad_())
    out, lse = reference_in_bshd(leaves)
    seen = lse.detach().isfinite()
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
    tensors = leaves.differentiable()
    gradients = torch.autograd.grad((out * weight).sum() + lse[seen].cos().sum(), list(tensors.values()))
    for name, gradient in zip(tensors, gradients, strict=True):

        def loss(x: oracle.Array, name: str = name) -> float:
            answer = ask_oracle(call.map(lambda other, old: torch.from_numpy(x) if other == name else old))
            return float((answer.out * weight.numpy()).sum() + np.cos(answer.lse[seen.numpy()]).sum())

        expected = oracle.numeric_gradient(loss, tensors[name].detach().numpy().copy())
        np.testing.assert_allclose(gradient.numpy(), expected, rtol=1e-6, atol=1e-8, err_msg=name)


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, 2**32, -1, -(2**63), 2**63 - 1])
def test_dropout_keeps_what_philox_says(seed: int) -> None:
    """With V the identity the output is the matrix of kept probabilities."""
    size = 9
    q = k = torch.zeros(2, size, 3, 2, dtype=torch.float64)
    v = torch.eye(size, dtype=torch.float64).view(1, size, 1, size).expand(2, size, 3, size)
    out, _ = reference.attention(q, k, v, dropout_p=0.4, dropout_seed=seed)
    expected = [
        [[[oracle.is_kept(seed, 0.4, b, h, i, j) / (0.6 * size) for j in range(size)] for h in range(3)] for i in range(size)]
        for b in range(2)
    ]
    np.testing.assert_allclose(out.numpy(), np.asarray(expected), rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_inputs_are_computed_wide(dtype: torch.dtype) -> None:
    """The reference widens first: what it returns for 16-bit inputs is the float32 or float64 answer for those values."""
    call = cases.build(cases.OFF, tiny=True, dtype=dtype)
    wide = cases.build(cases.OFF, tiny=True, dtype=dtype).map(lambda _, x: x.double())
    out, lse = reference_in_bshd(call)
    expected = ask_oracle(wide)
    np.testing.assert_allclose(lse.double().numpy(), expected.lse, rtol=1e-6)
    np.testing.assert_allclose(out.double().numpy(), expected.out, atol=2 * torch.finfo(dtype).eps * np.abs(expected.out).max())


def test_empty_row_reports_the_sink() -> None:
    q, k, v = torch.randn(1, 5, 2, 4, dtype=torch.float64), *torch.randn(2, 1, 2, 2, 4, dtype=torch.float64)
    out, lse = reference.attention(q, k, v, causal=True, learnable_sink=torch.tensor([0.25, -math.inf], dtype=torch.float64))
    assert (out[:, :3] == 0).all()
    assert (lse[:, 0, :3] == 0.25).all()
    assert (lse[:, 1, :3] == -math.inf).all()


def test_no_heads_at_all() -> None:
    x = torch.randn(2, 5, 0, 8)
    full = reference.attention_full(x, x, x, causal=True, alibi_slopes=torch.rand(0), learnable_sink=torch.rand(0))
    assert [tuple(y.shape) for y in full] == [(2, 5, 0, 8), (2, 0, 5), (0,), (2, 0, 5), (2, 0, 5)]
