"""Handing calls to torch's own CPU kernel: which calls, with what meaning, and what happens to values that it would lose."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tilewise import attention, reference
from tilewise.kernels import torch_cpu
from tilewise.plan import Operands, Request, Rules, Target, select

from .comparing import compare

CPU = Target("cpu")


def operands(seqlen_q: int = 64, seqlen_k: int = 64, heads: int = 2, dim: int = 8, dtype=torch.float32, **more: Any) -> Operands:
    q, k, v = (torch.randn(1, n, h, dim).to(dtype).transpose(1, 2) for n, h in ((seqlen_q, heads), (seqlen_k, 2), (seqlen_k, 2)))
    return Operands(**{"q": q, "k": k, "v": v, **more})


SERVED = {
    "full": (operands(), Rules(0.3), Request()),
    "causal": (operands(), Rules(0.3, window_right=0), Request()),
    "more-keys": (operands(5, 64), Rules(0.3), Request()),
    "one-query": (operands(1, 64), Rules(0.3), Request()),
    "gqa": (operands(heads=6), Rules(0.3), Request(backward=True)),
    "negative-scale": (operands(), Rules(-0.3, window_right=0), Request(backward=True)),
    "bf16": (operands(dtype=torch.bfloat16), Rules(0.3), Request()),
    "fp16": (operands(dtype=torch.float16), Rules(0.3, window_right=0), Request()),
}
DECLINED = {
    "bias": (operands(bias=torch.zeros(1, 1, 1, 64)), Rules(0.3), Request()),
    "mask": (operands(mask=torch.ones(1, 1, 1, 64, dtype=torch.bool)), Rules(0.3), Request()),
    "mask function": (operands(), Rules(0.3, mask_mod="q_idx >= kv_idx"), Request()),
    "score function": (operands(), Rules(0.3, score_mod="score"), Request()),
    "ALiBi": (operands(alibi_slopes=torch.zeros(1, 2)), Rules(0.3), Request()),
    "sink": (operands(sink=torch.zeros(2)), Rules(0.3), Request()),
    "lengths": (operands(seqused_k=torch.tensor([64], dtype=torch.int32)), Rules(0.3), Request()),
    "softcap": (operands(), Rules(0.3, softcap=1.0), Request()),
    "dropout": (operands(dropout_seed=torch.tensor(1)), Rules(0.3, dropout_p=0.1), Request()),
    "window": (operands(), Rules(0.3, window_left=4, window_right=0), Request()),
    "not as many as the keys": (operands(32, 64), Rules(0.3, window_right=0), Request()),
    "auxiliary": (operands(), Rules(0.3), Request(aux=frozenset(("entropy",)))),
    "gradient of the LSE": (operands(), Rules(0.3), Request(backward=True, dlse=True)),
    "head dim": (operands(v=torch.zeros(1, 2, 64, 5)), Rules(0.3), Request()),
    "empty": (operands(0), Rules(0.3), Request()),
    "fewer than 32": (operands(1, 31), Rules(0.3), Request()),
    "stride": (operands(q=torch.zeros(1, 2, 64, 16)[..., ::2]), Rules(0.3), Request()),
    "float64": (operands(dtype=torch.float64), Rules(0.3), Request()),
    "scale of 0": (operands(dtype=torch.bfloat16), Rules(0.0, window_right=0), Request()),
    "output of": (operands(dtype=torch.bfloat16), Rules(0.3), Request(out_dtype=torch.float32)),
    "gradients in": (operands(dtype=torch.bfloat16), Rules(0.3), Request(backward=True)),
}


@pytest.mark.parametrize("name", SERVED)
def test_plain_calls_are_handed_over(name: str) -> None:
    t, r, request = SERVED[name]
    assert torch_cpu.why_not(t, r, request, CPU) is None
    assert select(t, r, request=request, target=CPU).backend == "torch"


@pytest.mark.parametrize("name", DECLINED)
def test_what_it_cannot_do_is_named(name: str) -> None:
    t, r, request = DECLINED[name]
    assert name in (torch_cpu.why_not(t, r, request, CPU) or "")
    assert select(t, r, request=request, target=CPU).backend == "tiled"


def test_it_is_for_cpus() -> None:
    assert "cuda" in (torch_cpu.why_not(operands(), Rules(0.3), Request(), Target("cuda")) or "")


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((2, 67, 67, 4, 4, 16), {}),
        ((1, 130, 130, 4, 2, 24), {"causal": True}),
        ((1, 40, 130, 6, 1, 8), {"softmax_scale": 0.5}),
        ((1, 67, 67, 2, 2, 16), {"causal": True, "softmax_scale": -0.3}),
        ((1, 67, 67, 2, 2, 16), {"causal": True, "softmax_scale": 0.0}),
    ],
    ids=str,
)
def test_the_same_answers(sizes: tuple[int, ...], options: dict[str, Any], dtype: torch.dtype, layout: str) -> None:
    batch, seqlen_q, seqlen_k, heads, kv_heads, dim = sizes

    def make(seqlen: int, count: int) -> torch.Tensor:
        return torch.randn(*((batch, seqlen, count) if layout == "bshd" else (batch, count, seqlen)), dim).to(dtype)

    q, k, v = make(seqlen_q, heads), make(seqlen_k, kv_heads), make(seqlen_k, kv_heads)
    compare({"q": q, "k": k, "v": v, "layout": layout, **options}, with_lse=False)


@pytest.mark.parametrize("dout", ["expanded", "inner stride 2", "transposed"])
def test_any_strides_of_dout(dout: str) -> None:
    q, k, v = torch.randn(3, 1, 40, 2, 8).unbind(0)
    given = {
        "expanded": torch.ones(()).expand(1, 40, 2, 8),
        "inner stride 2": torch.randn(1, 40, 2, 16)[..., ::2],
        "transposed": torch.randn(1, 2, 40, 8).transpose(1, 2),
    }[dout]
    compare({"q": q, "k": k, "v": v}, dout=given, with_lse=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("seqlen", [5, 32, 64, 200])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_visible_value_that_is_not_finite_shows(name: str, seqlen: int, value: float, dtype: torch.dtype) -> None:
    tensors = {x: torch.randn(1, seqlen, 2, 8).to(dtype) for x in "qkv"}
    tensors[name][0, seqlen // 2, 1, 3] = value
    expected = reference.attention(**tensors)[0].isfinite()
    for x in tensors.values():
        x.requires_grad_()
    out = attention(**tensors)
    assert torch.equal(out.isfinite(), expected)
    out.sum().backward()
    if not expected.all():
        assert not all(x.grad.isfinite().all() for x in tensors.values())
