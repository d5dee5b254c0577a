"""Public reports of faults in other attention libraries, as inputs to this one: large biases, softcap, precision, the softmax scale.

The number of the report is in the test's id.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tilewise import UnsupportedAttention, attention

from .comparing import compare
from .helpers import make_inputs
from .reports import LOW_DTYPES, both_backends, dtypes, report


@report(20)
@both_backends
@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_very_large_negative_biases(report: str, bias_dtype: torch.dtype, dtype: torch.dtype, backend: str) -> None:
    """The bias is widened before it is added: a key at -1e4 vanishes beside one at 0, and one at -3e38 does not become -inf."""
    x = make_inputs(1, 64, heads=1, head_dim=64, dtype=dtype)
    levels = torch.tensor([0.0, -1e4, -3e38]).to(bias_dtype)
    bias = levels[torch.randint(0, 3, (1, 1, 64, 64))]
    bias[:, :, 7] = levels[2]  # a row with nothing higher: all its keys weigh the same but for their scores' rounding
    got = compare({**x, "bias": bias}, backend, with_lse=False)
    mean = x["v"].float().mean(1)
    torch.testing.assert_close(got["out"][:, 7].float(), mean, rtol=0, atol=4 * torch.finfo(dtype).eps)


def double_inputs(dtype: torch.dtype, size_q: int, size_k: int, dim: int, scale: float = 1.0) -> dict[str, Tensor]:
    return make_inputs(1, size_q, size_k, heads=2, head_dim=dim, dtype=dtype, scale=scale)


@report(22)
@both_backends
@dtypes
def test_softcap_is_the_cap_times_the_tanh(report: str, dtype: torch.dtype, backend: str) -> None:
    x = double_inputs(dtype, 64, 64, 64, scale=16.0)
    compare({**x, "softcap": 15.0}, backend)  # gradients included: dS carries 1 - tanh^2
    q, k, v = (t.double().transpose(1, 2) for t in x.values())
    capped = 15.0 * torch.tanh(q @ k.mT / 8.0 / 15.0)
    assert (q @ k.mT / 8.0).abs().max() > 30 > 15 >= capped.abs().max()
    out = attention(*x.values(), softcap=15.0, backend=backend)
    torch.testing.assert_close(out.double(), (capped.softmax(-1) @ v).transpose(1, 2), rtol=0.1, atol=16 * torch.finfo(dtype).eps)


@report(23)
@both_backends
@pytest.mark.parametrize("lengths", [False, True], ids=["dense", "lengths"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_softcap_with_causal_and_unequal_lengths(report: str, dtype: torch.dtype, lengths: bool, backend: str) -> None:
    x = double_inputs(dtype, 128, 217, 16, scale=8.0)
    used = torch.tensor([101], dtype=torch.int32)
    compare({**x, "causal": True, "softcap": 15.0} | ({"seqused_q": used, "seqused_k": 2 * used} if lengths else {}), backend)


@report(25)
@both_backends
@pytest.mark.parametrize("kept", [580, 590])
def test_a_long_masked_tail_costs_no_precision(report: str, kept: int, backend: str) -> None:
    """No worse than twice the error of the same keys sliced off and attended to without a mask, in the same dtype."""
    x = {name: 5 * t for name, t in make_inputs(1, 1, 1000, heads=1, head_dim=64, dtype=torch.bfloat16).items()}
    q, k, v = x.values()
    masked = attention(q, k, v, mask=torch.arange(1000) < kept, backend=backend)
    sliced = [t.transpose(1, 2) for t in (q, k[:, :kept], v[:, :kept])]
    exact = functional.scaled_dot_product_attention(*(t.double() for t in sliced)).transpose(1, 2)
    s = sliced[0] @ sliced[1].mT * 0.125
    unfused = (s.softmax(-1) @ sliced[2]).transpose(1, 2)
    error, allowed = ((t.double() - exact).abs().max() for t in (masked, unfused))
    assert error <= 2 * allowed + torch.finfo(torch.bfloat16).eps * exact.abs().max() / 2


@report(26)
@both_backends
def test_errors_follow_the_dtype(report: str, backend: str) -> None:
    """bfloat16 is eight times as coarse as float16; each is held to the unfused error of its own dtype."""
    wide = make_inputs(2, 256, heads=2, head_dim=64)
    errors = {}
    for dtype in (torch.float16, torch.bfloat16):
        x = {name: t.to(dtype) for name, t in wide.items()}
        compare(x, backend)
        exact = attention(*(t.double() for t in x.values()), backend="tiled")
        errors[dtype] = (attention(*x.values(), backend=backend).double() - exact).abs().max().item()
    assert 2 < errors[torch.bfloat16] / errors[torch.float16] < 32


@report(28)
@pytest.mark.parametrize("how", ["inputs", "descale"])
def test_fp8_is_refused_before_anything_runs(report: str, how: str) -> None:
    x = torch.ones(1, 2, 1, 16)
    with pytest.raises((TypeError, UnsupportedAttention), match=r"float8|fp8"):
        if how == "inputs":
            attention(*(x.to(torch.float8_e4m3fn) for _ in range(3)))
        else:
            attention(x, x, x, q_descale=torch.ones(1, 1))


@report(29)
@both_backends
@pytest.mark.parametrize("causal", [False, True])
def test_float32_is_as_good_as_float32(report: str, causal: bool, backend: str) -> None:
    """Forward and backward; with TF32 allowed and forbidden on a device that has it in tests/gpu/test_precision.py."""
    x = make_inputs(1, 128, heads=2, head_dim=64)
    compare({**x, "causal": causal}, backend)
    exact = attention(*(t.double() for t in x.values()), causal=causal, backend="tiled")
    assert (attention(*x.values(), causal=causal, backend=backend) - exact).abs().max() <= 2e-6


@report(31)
@both_backends
@dtypes
@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_negative_and_zero_scale(report: str, scale: float, dtype: torch.dtype, backend: str) -> None:
    x = make_inputs(1, 8, heads=1, head_dim=16, dtype=dtype)
    got = compare({**x, "softmax_scale": scale}, backend)
    if scale == 0.0:
        mean = x["v"].double().mean(1, keepdim=True).expand(1, 8, 1, 16)
        torch.testing.assert_close(got["out"].double(), mean, rtol=0, atol=4 * torch.finfo(dtype).eps)
        assert (got["dq"] == 0).all() and (got["dk"] == 0).all()


@report(32)
@both_backends
@dtypes
@pytest.mark.parametrize("scale", [-1.0, 0.0])
@pytest.mark.parametrize("hide", ["causal", "mask", "bias"])
def test_the_mask_comes_after_the_scale(report: str, hide: str, scale: float, dtype: torch.dtype, backend: str) -> None:
    x = make_inputs(1, 16, heads=1, head_dim=16, dtype=dtype)
    below = torch.ones(16, 16, dtype=torch.bool).tril()
    how: dict[str, Any] = {
        "causal": {"causal": True},
        "mask": {"mask": below},
        "bias": {"bias": torch.zeros(16, 16, dtype=dtype).masked_fill(~below, float("-inf"))},
    }[hide]
    got = compare({**x, **how, "softmax_scale": scale}, backend)
    assert torch.equal(got["out"][:, 0], x["v"][:, 0])  # the first query sees the first key alone
