"""Numbers on the GPU: hard inputs against float64 and FlashAttention-2, the TF32 switch, and values that must not be seen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tilewise import attention, reference, repeats

from .common import calling, compare, differentiates, qkv, randn

NAN, INF = float("nan"), float("inf")


def hard_inputs(kind: str, dim: int, seqlen: int) -> dict[str, Tensor]:
    """Inputs on which low precision shows: wide scores, a few large channels, one key that takes most of the weight."""
    inputs = qkv(2, seqlen, seqlen, heads=4, kv_heads=4, head_dim=dim)
    if kind == "large logits":
        inputs["q"], inputs["k"] = inputs["q"] * 8, inputs["k"] * 8
    elif kind == "outlier channels":
        for name in ("q", "k", "v"):
            inputs[name][..., ::21] *= 20
    elif kind == "outlier tokens":
        for name in ("q", "k", "v"):
            inputs[name][:, ::97] *= 30
    elif kind == "attention sink":
        inputs["k"][:, 0] *= 12
        inputs["v"][:, 0] *= 0.01
    return inputs


HARD = [(64, 1024, kind) for kind in ("normal", "large logits", "outlier channels", "outlier tokens", "attention sink")]
HARD += [(dim, seqlen, kind) for dim, seqlen in ((64, 3200), (128, 1024), (256, 1024)) for kind in ("normal", "outlier channels")]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dim, seqlen, kind", HARD, ids=str)
def test_errors_are_no_larger_than_flash_attention_2s(backend, dim, seqlen, kind, causal):
    """At head dim 64 also with 3,200 tokens, which the Hopper kernels give to three consumers.

    The portable kernels' gradients get more: dq was 2.3 % less exact than FlashAttention-2's where few channels hold most of it (head dim
    128, outlier channels, full), for a reason that was not found.
    """
    inputs, dout = hard_inputs(kind, dim, seqlen), randn(2, seqlen, 4, dim)

    def fa2(q, k, v):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal).transpose(1, 2)

    def ours(q, k, v):
        return attention(q, k, v, causal=causal, backend=backend, deterministic=False)

    def exact(q, k, v):
        return reference.attention(q, k, v, causal=causal)[0]

    def results(call, widen: bool, backward: bool) -> list[Tensor]:
        leaves = [x.double() if widen else x.clone() for x in inputs.values()]
        leaves = [x.requires_grad_(backward) for x in leaves]
        out = call(*leaves)
        grads = torch.autograd.grad(out, leaves, dout.to(out.dtype)) if backward else ()
        return [out.detach(), *grads]

    backward = differentiates(backend)
    right = results(exact, True, backward)
    errors = [
        [float((mine.double() - truth).norm() / truth.norm()) for mine, truth in zip(results(call, False, backward), right, strict=True)]
        for call in (ours, fa2)
    ]
    for name, mine, theirs in zip(("out", "dq", "dk", "dv"), *errors, strict=False):
        limit = (1.02 if name == "out" or backend == "hopper" else 1.05) * theirs + 1e-5
        assert mine <= limit, f"{name}: relative error {mine:.3e}, FlashAttention-2 has {theirs:.3e}"


@pytest.fixture
def float32_settings():
    """Whatever a test sets about float32 products is undone: the legacy call sets both switches."""
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("switch", ["new", "legacy"])
def test_float32_products_follow_torchs_setting(float32_settings, switch):
    inputs = qkv(1, 512, 512, dtype=torch.float32)
    dout = randn(1, 512, 4, 64, dtype=torch.float32)

    def allow(tf32: bool) -> None:
        if switch == "new":
            torch.backends.cuda.matmul.fp32_precision = "tf32" if tf32 else "ieee"
        else:
            torch.set_float32_matmul_precision("high" if tf32 else "highest")

    def errors(forward: bool, backward: bool) -> list[float]:
        leaves = [x.clone().requires_grad_() for x in inputs.values()]
        exact = [x.double().requires_grad_() for x in inputs.values()]
        truth = reference.attention(*exact)[0]
        allow(forward)
        out = attention(*leaves, backend="triton")
        allow(backward)
        mine = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
        right = [truth.detach(), *torch.autograd.grad(truth, exact, dout.double())]
        return [float((a.double() - b).norm() / b.norm()) for a, b in zip(mine, right, strict=True)]

    strict, fast = errors(False, False), errors(True, True)
    assert max(strict) < 3e-6, strict
    assert all(1e-5 < error < 5e-3 for error in fast), fast
    assert max(errors(False, True)) < 3e-6, "the choice of the forward pass holds in backward"


HIDING = {
    "key lengths": (dict(seqused_k=torch.tensor([40, 40], dtype=torch.int32)), slice(40, None)),
    "mask of keys": (dict(mask=torch.arange(128).view(1, 1, 1, 128) < 40), slice(40, None)),
    "window": (dict(window_size=(20, 0)), slice(0, 44)),  # the first of 64 queries stands at 64 and sees 44 to 64
}


@pytest.mark.parametrize("poison", [NAN, INF], ids=["nan", "inf"])
@pytest.mark.parametrize("how", HIDING)
def test_a_key_that_nobody_sees_reaches_nothing(backend, how, poison):
    options, hidden = HIDING[how]
    options = {name: x.to(device="cuda") if isinstance(x, Tensor) else x for name, x in options.items()}
    clean, dout, dlse = qkv(2, 64, 128), randn(2, 64, 4, 64), randn(2, 4, 64, dtype=torch.float32)
    spoiled = {name: x.clone() for name, x in clean.items()}
    for name in ("k", "v"):
        spoiled[name][:, hidden] = poison

    def results(inputs):
        leaves = {name: x.requires_grad_(differentiates(backend)) for name, x in inputs.items()}
        out, lse = calling(backend)(**leaves, **options)
        grads = torch.autograd.grad([out, lse], list(leaves.values()), [dout, dlse]) if differentiates(backend) else ()
        return [out.detach(), lse.detach(), *grads]

    expected = results(clean)
    for got, want in zip(results(spoiled), expected, strict=True):
        assert torch.isfinite(got).all()
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    if differentiates(backend):
        for grad in results(spoiled)[3:]:
            assert torch.all(grad[:, hidden] == 0)


def test_values_hidden_from_a_tile_stay_hidden_whether_or_not_it_is_asked_first(monkeypatch):
    """A NaN in q, k, v or dout goes where it does when every tile clears what it hides, and finite calls have the same bits."""
    from tilewise.kernels.triton import finite

    def results(spoiled, least):
        monkeypatch.setattr(finite, "LEAST_WORK", least)
        repeats.forget()  # a recorded call has asked, or not, for good
        torch.manual_seed(3)
        given = {**qkv(1, 200, 300), "dout": randn(1, 200, 4, 64)}
        if spoiled:
            given[spoiled][0, 37, 1, 5] = NAN
        dout = given.pop("dout")
        leaves = {name: x.requires_grad_() for name, x in given.items()}
        out, _ = calling("triton")(**leaves, mask=(torch.rand(200, 300, device="cuda") < 0.2))
        return [out.detach(), *torch.autograd.grad(out, list(leaves.values()), dout)]

    for spoiled in ("", "q", "k", "v", "dout"):
        for got, want in zip(results(spoiled, 0), results(spoiled, 1 << 60), strict=True):
            assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))
            assert torch.isfinite(got).any() and (spoiled or torch.isfinite(got).all())


def test_a_query_beyond_its_length_reaches_nothing(backend):
    lengths = torch.tensor([40, 64], dtype=torch.int32, device="cuda")
    clean, dout = qkv(2, 64, 128), randn(2, 64, 4, 64)

    def results(inputs, dout):
        leaves = {name: x.requires_grad_(differentiates(backend)) for name, x in inputs.items()}
        out, _ = calling(backend)(**leaves, seqused_q=lengths, causal=True)
        grads = torch.autograd.grad(out, list(leaves.values()), dout) if differentiates(backend) else ()
        return [out.detach(), *grads]

    expected = results({name: x.clone() for name, x in clean.items()}, dout)
    clean["q"][0, 40:] = NAN
    dout[0, 40:] = NAN
    for got, want in zip(results(clean, dout), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert torch.all(expected[0][0, 40:] == 0)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_nan_that_is_seen_shows(backend, name):
    inputs = qkv(1, 200, 200, heads=1, kv_heads=1)
    inputs[name][0, 100, 0, 3] = NAN
    out, _ = calling(backend)(**inputs, causal=True)
    assert torch.isnan(out[0, 100]).any()
    if name != "v":  # the value of a key that a neighbour in the tile sees may meet a probability of 0
        assert torch.isfinite(out[0, :100]).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_equal_huge_inputs_give_themselves(backend, dtype):
    x = torch.full((1, 1, 1, 64), 133_120.0, dtype=dtype, device="cuda")
    assert torch.equal(calling(backend)(q=x, k=x, v=x)[0], x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_scores_far_below_any_sentinel_are_shift_invariant(backend, dtype):
    """All logits about -6e4, none masked: a uniform average, and the LSE says where it stands."""
    q = torch.full((1, 3, 1, 64), -86.0, dtype=dtype, device="cuda")
    k = torch.full((1, 16, 1, 64), 86.0, dtype=dtype, device="cuda")
    v = randn(1, 16, 1, 64, dtype=dtype)
    out, lse = calling(backend)(q=q, k=k, v=v)
    torch.testing.assert_close(out[0, 0, 0].float(), v[0, :, 0].float().mean(0), rtol=1e-2, atol=4e-3)
    torch.testing.assert_close(lse[0, 0, 0].item(), -86.0 * 86 * 8 + torch.tensor(16.0).log().item(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("far", [40.0, 86.0])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_gradients_where_all_scores_are_far_below_zero(backend, dim, far):
    """One more channel moves all scores of a row down alike, by 100 to 924, where exp of the LSE is 0 in float32: the same gradients."""
    inputs, dout = qkv(1, 200, 300, head_dim=dim), randn(1, 200, 4, dim)
    inputs["q"][..., 0] = inputs["k"][..., 0] = 0

    def results(shift):
        moved = {name: x.clone() for name, x in inputs.items()}
        moved["q"][..., 0], moved["k"][..., 0] = -shift, shift
        leaves = {name: x.requires_grad_(differentiates(backend)) for name, x in moved.items()}
        out, lse = calling(backend)(**leaves)
        grads = torch.autograd.grad(out, list(leaves.values()), dout) if differentiates(backend) else ()
        return [out.detach(), *(grad[..., 1:] for grad in grads)], lse.detach()

    (here, lse), (below, low) = results(0.0), results(far)
    torch.testing.assert_close(low, lse - far * far * dim**-0.5, rtol=1e-5, atol=0)
    for got, expected in zip(below, here, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)


def test_very_negative_biases_are_not_masks(backend):
    """Finite, however low: they count. The same row of -inf does not."""
    values = torch.tensor([0.0, -1e4, -3e38], device="cuda")
    bias = values[torch.randint(3, (1, 1, 64, 64), device="cuda")].bfloat16()
    compare({**qkv(1, 64, 64, heads=1, kv_heads=1), "bias": bias}, backend)
    low = torch.full((1, 1, 64, 64), torch.finfo(torch.bfloat16).min, dtype=torch.bfloat16, device="cuda")
    inputs = qkv(1, 64, 64, heads=1, kv_heads=1)
    out, lse = calling(backend)(**inputs, bias=low)
    assert torch.isfinite(out).all() and torch.isfinite(lse).all() and (out != 0).any()
    out, lse = calling(backend)(**inputs, bias=torch.full_like(low, -INF))
    assert torch.all(out == 0) and torch.all(lse == -INF)
