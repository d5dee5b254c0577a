"""Public reports of faults in other attention libraries, as inputs to this one: gradients, dropout, compilation, dtypes.

The number of the report is in the test's id. Each test covers neighbours too: dtypes, the output, the LSE and every gradient.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewise import attention, reference

from .comparing import compare
from .helpers import make_inputs
from .reports import I32, LOW_DTYPES, NEG_INF, as_view, both_backends, dtypes, report

# ----------------------------------------------------------------- G. gradients

OPTIONS: dict[str, Any] = {
    "causal": True,
    "window_size": (20, 3),
    "mask": torch.rand(2, 1, 33, 40, generator=torch.Generator().manual_seed(0)) < 0.8,
    "bias": torch.randn(4, 33, 40, generator=torch.Generator().manual_seed(1)),
    "softcap": 2.0,
    "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625]),
    "learnable_sink": torch.tensor([0.0, 1.0, -1.0, 2.0]),
    "score_mod": lambda s, b, h, i, j: s + 0.125 * (j - i),
    "dropout_p": 0.25,
    "seqused_k": torch.tensor([40, 21], dtype=I32),
    "softmax_scale": 0.5,
}


@report(97)
@pytest.mark.parametrize("name", OPTIONS)
def test_what_forward_takes_is_in_backward(report: str, name: str, small_tiles: None) -> None:
    """Each option alone: it changes every gradient, and to the right value."""
    x = make_inputs(2, 33, 40, heads=4, kv_heads=2, head_dim=16, dtype=torch.float64)
    x = {key: t.double() for key, t in x.items()}
    value = OPTIONS[name]
    option = {name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value}
    if name == "dropout_p":
        option["dropout_seed"] = 11
    dout = torch.randn(2, 33, 4, 16, dtype=torch.float64)
    plain = compare(x, "tiled", dout=dout, with_lse=False)
    changed = compare({**x, **option}, "tiled", dout=dout, with_lse=False)
    for gradient in ("dq", "dk", "dv"):
        assert not torch.allclose(plain[gradient], changed[gradient]), f"{gradient} ignores {name}"


@report(98)
@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
def test_a_mask_equal_to_causal_has_its_gradients(report: str, dtype: torch.dtype, small_tiles: None) -> None:
    x = make_inputs(1, 64, heads=2, head_dim=64, dtype=dtype)
    as_mask = compare({**x, "mask": torch.ones(64, 64).tril().bool()}, "tiled")
    causal = compare({**x, "causal": True}, "tiled")
    for name, value in causal.items():
        torch.testing.assert_close(as_mask[name], value, msg=lambda text, name=name: f"{name}: {text}")


@report(100, 158)
@both_backends
@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
def test_causal_false_is_not_causal(report: str, dtype: torch.dtype, backend: str) -> None:
    x = make_inputs(1, 128, heads=2, head_dim=64, dtype=dtype)
    compare({**x, "causal": False}, backend)
    mask = torch.rand(128, 128) < 0.9
    compare({**x, "causal": False, "mask": mask}, backend)
    both = compare({**x, "causal": True, "mask": mask}, backend)
    torch.testing.assert_close(both["out"], attention(**x, mask=mask & torch.ones(128, 128).tril().bool(), backend=backend))


@report(101)
@both_backends
@pytest.mark.parametrize("subset", range(1, 2**5))
def test_every_subset_of_inputs_that_need_a_gradient(report: str, subset: int, backend: str) -> None:
    x = {name: t.double() for name, t in make_inputs(1, 8, heads=2, head_dim=8).items()}
    x |= {"bias": torch.randn(1, 1, 8, 8).double(), "learnable_sink": torch.randn(2).double()}
    needed = [name for bit, name in enumerate(x) if subset >> bit & 1]
    weight = torch.randn(1, 8, 2, 8).double()

    def run(chosen: str) -> tuple[Tensor, ...]:
        leaves = {name: t.detach().clone().requires_grad_(name in needed) for name, t in x.items()}
        out = attention(**leaves, causal=True, backend=chosen)
        return torch.autograd.grad(out, [leaves[name] for name in needed], weight)

    for name, a, b in zip(needed, run(backend), run("reference"), strict=True):
        torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name} of {needed}: {text}")


@report(103)
@both_backends
@dtypes
@pytest.mark.parametrize("loss", ["lse", "both"])
def test_the_lse_has_its_gradient(report: str, loss: str, dtype: torch.dtype, backend: str) -> None:
    x = make_inputs(1, 9, 11, heads=2, head_dim=8, dtype=dtype)
    dout = torch.zeros(1, 9, 2, 8, dtype=dtype) if loss == "lse" else None
    compare({**x, "learnable_sink": torch.randn(2).to(dtype)}, backend, dout=dout)


@report(103)
@both_backends
def test_the_gradient_of_the_lse_alone(report: str, backend: str) -> None:
    """Nothing reaches out, so its cotangent is absent; v has a gradient of zero or none."""
    leaves = [t.double().requires_grad_() for t in make_inputs(1, 9, 11, heads=2, head_dim=8).values()]
    _, aux = attention(*leaves, backend=backend, return_aux="lse")
    dq, dk, dv = torch.autograd.grad(aux.lse.sum(), leaves, allow_unused=True)
    p = (torch.einsum("bihd,bjhd->bhij", leaves[0], leaves[1]) / math.sqrt(8)).softmax(-1)
    torch.testing.assert_close(dq, torch.einsum("bhij,bjhd->bihd", p, leaves[1]) / math.sqrt(8))
    torch.testing.assert_close(dk, torch.einsum("bhij,bihd->bjhd", p, leaves[0]) / math.sqrt(8))
    assert dv is None or (dv == 0).all()


@report(104)
@both_backends
@dtypes
def test_the_output_times_its_denominator(report: str, dtype: torch.dtype, backend: str) -> None:
    """out * exp(lse) is the unnormalised sum, whose gradient has no softmax in it."""
    q, k, v = (t.mul(0.3).requires_grad_() for t in make_inputs(1, 130, heads=1, head_dim=8, dtype=dtype).values())
    out, aux = attention(q, k, v, causal=True, backend=backend, return_aux="lse")
    grads = torch.autograd.grad((out * aux.lse.exp().transpose(1, 2)[..., None]).sum(), (q, k, v))
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    weights = (torch.einsum("bihd,bjhd->bhij", *wide[:2]) / math.sqrt(8)).exp().tril()
    expected = torch.autograd.grad(torch.einsum("bhij,bjhd->bihd", weights, wide[2]).sum(), wide)
    for a, b in zip(grads, expected, strict=True):
        assert (a - b).abs().max() <= 40 * torch.finfo(dtype).eps * b.abs().max()


@report(106)
@both_backends
@pytest.mark.parametrize("dim", [60, 64])
def test_function_transforms(report: str, dim: int, backend: str) -> None:
    x = {name: t.double() for name, t in make_inputs(3, 5, 7, heads=2, head_dim=dim).items()}

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, causal=True, backend=backend).sin().sum()

    leaves = [t.detach().requires_grad_() for t in x.values()]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    for a, b in zip(torch.func.grad(loss, argnums=(0, 1, 2))(*x.values()), expected, strict=True):
        torch.testing.assert_close(a, b)
    single = torch.func.vmap(torch.func.grad(lambda q, k, v: loss(q[None], k[None], v[None]), argnums=(0, 1, 2)))(*x.values())
    for a, b in zip(single, expected, strict=True):
        torch.testing.assert_close(a, b)


BIAS_SHAPES = [
    (),
    (1,),
    (9,),
    (7, 1),
    (7, 9),
    (2, 1, 1),
    (1, 1, 1, 9),
    (1, 1, 7, 1),
    (3, 1, 7, 9),
    (3, 2, 1, 1),
    (1, 2, 7, 9),
    (3, 2, 7, 9),
]


@report(107)
@both_backends
@dtypes
@pytest.mark.parametrize("shape", BIAS_SHAPES, ids=str)
def test_bias_gradient_of_every_broadcast_shape(report: str, shape: tuple[int, ...], dtype: torch.dtype, backend: str) -> None:
    x = make_inputs(3, 7, 9, heads=2, head_dim=8, dtype=dtype)
    bias = torch.randn(shape).to(dtype).requires_grad_()
    weight, weight_lse = torch.randn(3, 7, 2, 8).to(dtype), torch.randn(3, 2, 7)
    out, aux = attention(**x, bias=bias, causal=True, backend=backend, return_aux="lse")
    (grad,) = torch.autograd.grad([out, aux.lse], bias, [weight, weight_lse.to(aux.lse.dtype)])
    wide = bias.detach().double().requires_grad_()
    out, lse = reference.attention(**{name: t.double() for name, t in x.items()}, bias=wide, causal=True)
    seen = lse.isfinite()
    (expected,) = torch.autograd.grad((out * weight).sum() + (lse * weight_lse)[seen].sum(), wide)
    assert grad.shape == shape and grad.dtype == dtype
    terms = 3 * 2 * 7 * 9 // max(1, math.prod(shape))
    assert (grad - expected).abs().max() <= (4 + math.sqrt(terms)) * torch.finfo(dtype).eps * max(1.0, expected.abs().max().item())


@report(109)
@both_backends
@dtypes
@pytest.mark.parametrize("via", ["mask", "bias"])
def test_keys_that_nobody_sees_have_exactly_no_gradient(report: str, via: str, dtype: torch.dtype, backend: str) -> None:
    x = make_inputs(1, 40, 70, heads=2, head_dim=8, dtype=dtype)
    visible = torch.rand(40, 70) < 0.5
    visible[:, [0, 3, 69]] = False
    visible[:, 16:40] = False
    bias = torch.zeros(40, 70, dtype=dtype).masked_fill(~visible, NEG_INF)
    got = compare({**x, **({"mask": visible} if via == "mask" else {"bias": bias})}, backend)
    unseen = ~visible.any(0)
    assert (got["dk"][:, unseen] == 0).all() and (got["dv"][:, unseen] == 0).all()


@report(110)
@dtypes
@pytest.mark.parametrize("size", [33, 70])
def test_score_function_causal_and_ragged_tiles(report: str, size: int, dtype: torch.dtype, small_tiles: None) -> None:
    """Rows and columns past the end of a tile are hidden before the exponential, however large the score function makes them."""
    x = make_inputs(1, size, heads=2, head_dim=8, dtype=dtype)
    compare({**x, "causal": True, "score_mod": lambda s, b, h, i, j: s + (i - j)}, "tiled")


@report(112)
@both_backends
def test_calls_share_no_state(report: str, backend: str) -> None:
    large = make_inputs(1, 150, heads=2, head_dim=8)
    attention(**large, mask=torch.rand(150, 150) < 0.5, backend=backend)
    small = make_inputs(1, 71, heads=2, head_dim=8)
    compare({**small, "mask": torch.rand(71, 71) < 0.5}, backend)
    first = [t.requires_grad_() for t in large.values()]
    out_first = attention(*first, causal=True, backend=backend)
    attention(**small, backend=backend)
    out_first.sum().backward()
    again = [t.detach().requires_grad_() for t in first]
    attention(*again, causal=True, backend=backend).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(first, again, strict=True))


@report(113)
@both_backends
@dtypes
@pytest.mark.parametrize("causal", [False, True])
def test_the_sink_has_its_gradient(report: str, causal: bool, dtype: torch.dtype, backend: str) -> None:
    x = make_inputs(2, 9, 7, heads=4, kv_heads=2, head_dim=8, dtype=dtype)
    sink = torch.randn(4).to(dtype).requires_grad_()
    weight = torch.randn(2, 9, 4, 8).to(dtype)
    (grad,) = torch.autograd.grad(attention(**x, learnable_sink=sink, causal=causal, backend=backend), sink, weight)
    wide = sink.detach().double().requires_grad_()
    out, _ = reference.attention(**{name: t.double() for name, t in x.items()}, learnable_sink=wide, causal=causal)
    (expected,) = torch.autograd.grad(out, wide, weight.double())
    assert (expected.abs() > 1e-3).all()
    assert (grad - expected).abs().max() <= 8 * torch.finfo(dtype).eps * max(1.0, expected.abs().max().item())


# ----------------------------------------------------------------- J. dropout


@report(131)
@pytest.mark.parametrize("seed", [3, 2**32 + 3, 2**63 - 1])
def test_forward_and_backward_drop_the_same(report: str, seed: int, small_tiles: None) -> None:
    """With V the identity the output is the dropped P; dV from an identity cotangent is its transpose."""
    size = 40
    q, k = (torch.randn(2, size, 2, 8, dtype=torch.float64) for _ in range(2))
    v = torch.eye(size, dtype=torch.float64).view(1, size, 1, size).repeat(2, 1, 2, 1).requires_grad_()
    out = attention(q, k, v, dropout_p=0.5, dropout_seed=seed, backend="tiled")
    (dv,) = torch.autograd.grad(out, v, v.detach())
    torch.testing.assert_close(dv, out.permute(0, 3, 2, 1))
    assert 0.4 < (out == 0).double().mean() < 0.6


@report(133)
@both_backends
def test_dropout_has_an_unbiased_mean(report: str, backend: str) -> None:
    x = make_inputs(1, 4, 16, heads=2, head_dim=4)
    plain = attention(**x, backend=backend)
    assert torch.equal(attention(**x, dropout_p=0.0, backend=backend), plain)
    runs = torch.stack([attention(**x, dropout_p=0.2, dropout_seed=seed, backend=backend) for seed in range(200)])
    standard_error = runs.std(0) / math.sqrt(200)
    assert ((runs.mean(0) - plain).abs() <= 5 * standard_error).all()
    for p in (-0.1, 1.0, 1.5):
        with pytest.raises(ValueError, match="dropout_p"):
            attention(**x, dropout_p=p)


# ----------------------------------------------------------------- K. compilation and transforms


@report(137, 71)
@both_backends
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("transposed", range(8))
def test_fakes_have_the_real_strides(report: str, transposed: int, layout: str, backend: str) -> None:
    """Each combination of layouts of q, k and v; the output, the LSE and each gradient."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = make_inputs(2, 5, 7, heads=4, kv_heads=2, head_dim=8, head_dim_v=6, layout=layout, dtype=torch.bfloat16)
    x = {name: as_view(t, "transposed") if transposed >> n & 1 else t for n, (name, t) in enumerate(x.items())}

    def run(given: dict[str, Tensor]) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in given.values()]
        out, aux = attention(*leaves, causal=True, layout=layout, backend=backend, return_aux=("lse", "max_logits", "key_mass", "entropy"))
        return [out, *aux, *torch.autograd.grad([out, aux.lse], leaves, [torch.ones_like(out), torch.ones_like(aux.lse)])]

    real = run(x)
    with FakeTensorMode() as mode:
        fake = run({name: mode.from_tensor(t) for name, t in x.items()})
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)


@report(139)
@pytest.mark.parametrize("size", [7, 9])
def test_a_mask_for_another_length_raises(report: str, size: int) -> None:
    with pytest.raises(ValueError, match="mask"):
        attention(**make_inputs(1, 8, heads=1), mask=torch.ones(size, size, dtype=torch.bool))


# ----------------------------------------------------------------- L. memory, messages, dtypes


@report(145, 148)
@both_backends
@pytest.mark.parametrize("what", ["plain", "padding_mask", "causal_bias"])
def test_no_matrix_of_scores_exists(report: str, what: str, backend: str) -> None:
    """No single tensor of the size of the score matrix is made, and no broadcast mask or bias is expanded, forward or backward."""
    size, heads = 1501, 2

    x = make_inputs(1, size, heads=heads, head_dim=8)
    options: dict[str, Any] = {}
    if what == "padding_mask":
        options = {"mask": (torch.arange(size) < size - 100).view(1, 1, 1, size)}
    if what == "causal_bias":
        options = {"bias": torch.randn(size), "causal": True}
    leaves = [t.requires_grad_() for t in x.values()]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        attention(*leaves, **options, backend=backend).sum().backward()
    largest = max((event.cpu_memory_usage for event in profile.events()), default=0)
    assert 0 < largest < heads * size * size * 4 / 2, f"one operator allocated {largest / 2**20:.1f} MiB"


@report(154)
@both_backends
def test_float32_inputs_are_served_and_autocast_casts_all_three(report: str, backend: str) -> None:
    x = make_inputs(1, 9, heads=2, head_dim=8)
    assert attention(**x, backend=backend).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(**x, backend=backend)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, attention(**{name: t.bfloat16() for name, t in x.items()}, backend=backend))


@report(155)
@both_backends
def test_mixed_dtypes_under_autocast(report: str, backend: str) -> None:
    x = make_inputs(1, 9, heads=2, head_dim=8)
    x["v"] = x["v"].bfloat16()
    leaves = {name: t.requires_grad_() for name, t in x.items()}
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(**leaves, backend=backend)
    out.sum().backward()
    assert out.dtype == torch.bfloat16 and [t.grad.dtype for t in leaves.values()] == [torch.float32, torch.float32, torch.bfloat16]
    with pytest.raises(TypeError, match=r"float32.*float32.*bfloat16"):
        attention(**x, backend=backend)


@report(157)
@both_backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_bias_of_another_dtype(report: str, dtype: torch.dtype, backend: str) -> None:
    x = make_inputs(1, 9, heads=2, head_dim=8)
    bias = torch.randn(9, 9).to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(**x, bias=bias, backend=backend)
    expected, _ = reference.attention(**x, bias=bias)
    torch.testing.assert_close(out.double(), expected, rtol=3e-2, atol=3e-2)
    (grad,) = torch.autograd.grad(out.float().square().sum(), bias)
    assert grad.dtype == dtype and grad.isfinite().all() and (grad != 0).any()


@report(160)
@both_backends
@dtypes
def test_the_lse_is_a_natural_logarithm(report: str, dtype: torch.dtype, backend: str) -> None:
    x = make_inputs(2, 9, 11, heads=2, head_dim=8, dtype=dtype)
    _, aux = attention(**x, backend=backend, return_aux="lse")
    scores = torch.einsum("bihd,bjhd->bhij", x["q"].double(), x["k"].double()) / math.sqrt(8)
    assert aux.lse.shape == (2, 2, 9) and aux.lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(aux.lse.double(), torch.logsumexp(scores, -1), rtol=1e-5, atol=1e-5)


@report(121)
def test_deterministic_backward_repeats_bit_for_bit(report: str) -> None:
    packed = torch.randn(2, 70, 3, 4, 16)
    options = dict(causal=True, deterministic=True, backend="tiled")

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        return torch.autograd.grad(attention(*leaves, **options).square().sum(), leaves)

    first = run(*packed.unbind(2))
    for _ in range(10):
        assert all(torch.equal(a, b) for a, b in zip(first, run(*packed.unbind(2)), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first, run(*(t.contiguous() for t in packed.unbind(2))), strict=True))


@report(128)
def test_devices_that_differ_are_named(report: str) -> None:
    x = make_inputs(1, 8, heads=1)
    with pytest.raises(ValueError, match=r"mask.*meta.*cpu"):
        attention(**x, mask=torch.ones(8, 8, dtype=torch.bool, device="meta"))
