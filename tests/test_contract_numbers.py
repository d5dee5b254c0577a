"""The sharp points of the contract: precision, derivatives, auxiliary outputs, dropout, determinism, ground (rules 7 to 13)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tilewise import attention

from . import oracle
from .small import EVERY_AUX, I32, NEG_INF, every_backend, every_dtype, qkv

# ----------------------------------------------------------------------------------------------------------- 7. precision


@pytest.fixture
def float32_switches() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision = "none"
    torch.backends.fp32_precision = "none"


def _new(value: str) -> Callable[[], None]:
    return lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", value)


def _legacy(value: bool) -> Callable[[], None]:
    return lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", value)


def _both(first: Callable[[], Any], second: Callable[[], Any]) -> Callable[[], None]:
    def run() -> None:
        first()
        second()

    return run


SWITCHES: dict[str, tuple[Callable[[], Any], bool]] = {
    "untouched": (lambda: None, False),
    "new_ieee": (_new("ieee"), False),
    "new_tf32": (_new("tf32"), True),
    "legacy_false": (_legacy(False), False),
    "legacy_true": (_legacy(True), True),
    "precision_highest": (lambda: torch.set_float32_matmul_precision("highest"), False),
    "precision_high": (lambda: torch.set_float32_matmul_precision("high"), True),
    "precision_medium": (lambda: torch.set_float32_matmul_precision("medium"), True),
    "legacy_then_new": (_both(_legacy(True), _new("ieee")), False),
    "precision_then_new": (_both(lambda: torch.set_float32_matmul_precision("highest"), _new("tf32")), True),
    "new_then_legacy": (_both(_new("ieee"), _legacy(True)), True),
}


def tf32_seen(call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What `Rules.allow_tf32` the kernels received, forward and backward in turn."""
    from tilewise.kernels import tiled

    seen: list[bool] = []
    forward, backward = tiled.forward, tiled.backward
    monkeypatch.setattr(tiled, "forward", lambda t, r, out: (seen.append(r.allow_tf32), forward(t, r, out))[1])
    monkeypatch.setattr(
        tiled, "backward", lambda t, r, saved, cot, grads: (seen.append(r.allow_tf32), backward(t, r, saved, cot, grads))[1]
    )
    call()
    return seen


@pytest.mark.parametrize("switch", SWITCHES)
def test_float32_setting_is_read_without_raising(switch: str, monkeypatch: pytest.MonkeyPatch, float32_switches: None) -> None:
    change, allowed = SWITCHES[switch]
    change()
    q, k, v = qkv(dtype=torch.float32)
    assert tf32_seen(lambda: attention(q, k, v, backend="tiled").sum().backward(), monkeypatch) == [allowed, allowed]


@pytest.mark.parametrize("switch", SWITCHES)
def test_float32_setting_inside_a_fullgraph_trace(switch: str, monkeypatch: pytest.MonkeyPatch, float32_switches: None) -> None:
    change, allowed = SWITCHES[switch]
    change()
    torch._dynamo.reset()
    q, k, v = qkv(dtype=torch.float32)
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, backend="tiled"), fullgraph=True, backend="aot_eager")
    assert tf32_seen(lambda: compiled(q, k, v).sum().backward(), monkeypatch) == [allowed, allowed]


def test_float32_setting_of_the_forward_is_kept_for_backward(monkeypatch: pytest.MonkeyPatch, float32_switches: None) -> None:
    q, k, v = qkv(dtype=torch.float32)

    def call() -> None:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        out = attention(q, k, v, backend="tiled")
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        out.sum().backward()

    assert tf32_seen(call, monkeypatch) == [True, True]


def test_float32_setting_is_read_at_run_time_of_a_compiled_call(monkeypatch: pytest.MonkeyPatch, float32_switches: None) -> None:
    """The op reads the setting, not the trace: one compiled function follows a later change, backward included."""
    torch._dynamo.reset()
    q, k, v = qkv(dtype=torch.float32)
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, backend="tiled"), fullgraph=True, backend="aot_eager")

    def call() -> None:
        for value in ("ieee", "tf32"):
            torch.backends.cuda.matmul.fp32_precision = value
            compiled(q, k, v).sum().backward()

    assert tf32_seen(call, monkeypatch) == [False, False, True, True]


@every_dtype
@every_backend
def test_state_and_aux_are_wide(dtype: torch.dtype, backend: str) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    q, k, v = qkv(dtype=dtype)
    out, aux = attention(q, k, v, backend=backend, return_aux=EVERY_AUX)
    assert out.dtype == dtype
    assert {x.dtype for x in aux} == {wide}
    for grad, x in zip(torch.autograd.grad(out.sum(), (q, k, v)), (q, k, v), strict=True):
        assert grad.dtype == x.dtype
    assert attention(q, k, v, backend=backend, out_dtype=wide).dtype == wide


@every_backend
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_float32_output_is_not_rounded_to_the_inputs_dtype(backend: str, dtype: torch.dtype) -> None:
    q, k, v = (x.detach() for x in qkv(dtype=dtype))
    out = attention(q, k, v, backend=backend, out_dtype=torch.float32)
    assert not torch.equal(out, out.to(dtype).float())
    assert torch.equal(out.to(dtype), attention(q, k, v, backend=backend))


def test_float32_output_has_gradients() -> None:
    q, k, v = qkv(dtype=torch.bfloat16)
    out = attention(q, k, v, backend="tiled", out_dtype=torch.float32)
    weight = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v), weight)
    expected = torch.autograd.grad(attention(q.double(), k.double(), v.double(), backend="reference"), (q, k, v), weight.double())
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == torch.bfloat16
        torch.testing.assert_close(a.double(), b.double(), rtol=2e-2, atol=2e-2)


# ---------------------------------------------------------------------------------------------------------- 8. derivatives


@every_backend
@pytest.mark.parametrize("name", ["lse", "key_mass", "entropy"])
@pytest.mark.parametrize("extra", ["plain", "everything"])
def test_auxiliary_outputs_have_their_true_gradient(backend: str, name: str, extra: str) -> None:
    """Against autograd through probabilities spelt out here."""
    q, k, v = qkv(sq=6, sk=9, hq=4)
    sink = torch.randn(4, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(4, 6, 9, dtype=torch.float64, requires_grad=True)
    options: dict[str, Any] = {}
    if extra == "everything":
        options = dict(learnable_sink=sink, bias=bias, softcap=1.5, causal=True, dropout_p=0.4, dropout_seed=3)
    out, aux = attention(q, k, v, backend=backend, return_aux=EVERY_AUX, **options)

    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) * 8**-0.5
    if extra == "everything":
        scores = (1.5 * torch.tanh(scores / 1.5) + bias).masked_fill(torch.ones(6, 9).triu(4).bool(), NEG_INF)
        lse = torch.cat([scores, sink.view(1, 4, 1, 1).expand(2, 4, 6, 1)], -1).logsumexp(-1)
    else:
        lse = scores.logsumexp(-1)
    p = (scores - lse[..., None]).exp()
    entropy = -torch.where(p > 0, p * torch.where(p > 0, p, 1.0).log(), 0.0).sum(-1)
    expected = {"lse": lse, "key_mass": p.sum(2), "entropy": entropy}[name]
    got = getattr(aux, name)
    torch.testing.assert_close(got, expected)
    weight = torch.randn_like(expected)
    leaves = [q, k] + ([sink, bias] if extra == "everything" else [])
    grads = torch.autograd.grad((got * weight).sum(), leaves, retain_graph=True)
    wants = torch.autograd.grad((expected * weight).sum(), leaves, retain_graph=True)
    for grad, want in zip(grads, wants, strict=True):
        torch.testing.assert_close(grad, want)
    # Together with the output's own gradient, nothing is dropped or counted twice.
    both = torch.autograd.grad((got * weight).sum() + out.sum(), leaves, retain_graph=True)
    alone = torch.autograd.grad(out.sum(), leaves)
    for total, a, b in zip(both, grads, alone, strict=True):
        torch.testing.assert_close(total, a + b)


@pytest.mark.parametrize("backend", ["tiled", "auto"])
def test_max_logits_raises_in_backward(backend: str) -> None:
    q, k, v = qkv()
    out, aux = attention(q, k, v, backend=backend, return_aux=("max_logits", "lse"))
    assert aux.max_logits.requires_grad and aux.max_logits.grad_fn is not None
    with pytest.raises(NotImplementedError, match="max_logits"):
        aux.max_logits.sum().backward()
    out, aux = attention(q, k, v, backend=backend, return_aux=("max_logits", "lse"))
    with pytest.raises(NotImplementedError, match="max_logits"):
        (out.sum() + aux.max_logits.sum()).backward()
    # Not used in the loss, it is in nobody's way.
    out, aux = attention(q, k, v, backend=backend, return_aux=("max_logits", "lse"))
    (out.sum() + aux.lse.sum()).backward()


def test_reference_backend_is_differentiable_forwards_and_twice() -> None:
    """What the refusal of a third derivative recommends has to work."""
    q, k, v = qkv(b=1, sq=2, sk=3, hq=1, hk=1, d=2)

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, causal=True, backend="reference")

    assert torch.autograd.gradcheck(f, (q, k, v), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(f, (q, k, v))


# ------------------------------------------------------------------------------------------------------------------ 9. aux


@every_backend
def test_aux_is_a_named_tuple_with_none_for_the_rest(backend: str) -> None:
    q, k, v = qkv()
    out, aux = attention(q, k, v, backend=backend, return_aux="entropy")
    assert isinstance(aux, tilewise.Aux) and aux._fields == EVERY_AUX
    assert aux.lse is None and aux.max_logits is None and aux.key_mass is None
    assert aux.entropy.shape == (2, 2, 5)
    leaves, _ = torch.utils._pytree.tree_flatten(aux)
    assert len([x for x in leaves if x is not None]) == 1
    assert isinstance(attention(q, k, v, backend=backend), Tensor)
    out, aux = attention(q, k, v, backend=backend, return_aux=("key_mass", "max_logits"))
    assert aux.key_mass.shape == (2, 2, 7) and aux.max_logits.shape == (2,) and aux.lse is None
    assert torch.equal(out, attention(q, k, v, backend=backend))


@every_backend
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_probabilities_in_aux_are_those_before_dropout(backend: str, layout: str) -> None:
    q, k, v = qkv(sq=21, sk=37, hq=4)
    if layout == "bhsd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    _, plain = attention(q, k, v, backend=backend, layout=layout, return_aux=EVERY_AUX)
    _, dropped = attention(q, k, v, backend=backend, layout=layout, return_aux=EVERY_AUX, dropout_p=0.5, dropout_seed=1)
    for a, b in zip(plain, dropped, strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(plain.key_mass.sum(-1), torch.full((2, 4), 21.0, dtype=torch.float64))
    assert (plain.entropy > 0).all() and (plain.entropy <= math.log(37) + 1e-9).all()


@every_backend
def test_max_logits_is_per_head_without_the_sink(backend: str) -> None:
    q, k, v = qkv(sq=21, sk=37)
    bias = torch.randn(21, 37, dtype=torch.float64)
    lengths = torch.tensor([20, 37], dtype=I32)
    options = dict(causal=True, softcap=2.0, bias=bias, seqused_k=lengths, learnable_sink=torch.full((2,), 1e3).double())
    _, aux = attention(q, k, v, backend=backend, return_aux="max_logits", **options)
    scores = 2.0 * torch.tanh(torch.einsum("bihd,bjhd->bhij", q, k) * 8**-0.5 / 2.0) + bias
    p = torch.arange(21).view(1, 1, 21, 1) + lengths.view(2, 1, 1, 1) - 21
    scores = scores.masked_fill((torch.arange(37) > p) | (torch.arange(37) >= lengths.view(2, 1, 1, 1)), NEG_INF)
    torch.testing.assert_close(aux.max_logits, scores.amax((0, 2, 3)))


# ------------------------------------------------------------------------------------------------------------- 10. dropout


@every_backend
@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1, 2**32, 2**40 + 11, -1, 2**63 - 1, -(2**63)])
def test_dropout_mask_is_philox_of_the_position(backend: str, seed: int) -> None:
    """With V the identity and equal scores, the output is the kept pattern; sizes that no tile divides, and every counter word used."""
    size_q, size_k, heads = 5, 11, 3
    q, k = torch.zeros(2, size_q, heads, 8), torch.zeros(2, size_k, 1, 8)
    v = torch.eye(size_k).view(1, size_k, 1, size_k).expand(2, size_k, 1, size_k)
    for given in (seed, torch.tensor(seed, dtype=torch.int64)):
        out = attention(q, k, v, dropout_p=0.35, dropout_seed=given, backend=backend)
        for b in range(2):
            for h in range(heads):
                for i in range(size_q):
                    kept = [oracle.is_kept(seed, 0.35, b, h, i, j) for j in range(size_k)]
                    assert (out[b, i, h] > 0).tolist() == kept
    torch.testing.assert_close(out[out > 0], torch.full_like(out[out > 0], 1 / (0.65 * size_k)))


@every_backend
def test_dropout_threshold_is_the_floor(backend: str) -> None:
    """A probability just below, at and above a word of the stream flips exactly that one."""
    word = oracle.philox_4x32_10((0, 0, 0, 0), (5, 0))[2]
    q = k = torch.zeros(1, 4, 1, 8)
    v = torch.eye(4).view(1, 4, 1, 4)
    assert attention(q[:, :1], k, v, dropout_p=word / 2**32, dropout_seed=5, backend=backend)[0, 0, 0, 2] > 0
    assert attention(q[:, :1], k, v, dropout_p=(word + 1) / 2**32, dropout_seed=5, backend=backend)[0, 0, 0, 2] == 0


def test_dropout_is_the_same_beyond_one_tile_and_in_backward() -> None:
    """The reference's pattern over many tiles, forward and through dV, and the split into batch items does not matter."""
    q, k, v = qkv(sq=70, sk=133, hq=2)
    options = dict(dropout_p=0.25, dropout_seed=2**45 + 3, causal=True)
    out = attention(q, k, v, backend="tiled", **options)
    expected = attention(q, k, v, backend="reference", **options)
    torch.testing.assert_close(out, expected)
    weight = torch.randn_like(out)
    for a, b in zip(torch.autograd.grad(out, (q, k, v), weight), torch.autograd.grad(expected, (q, k, v), weight), strict=True):
        torch.testing.assert_close(a, b)


@every_backend
def test_dropout_seed_follows_torchs_generator(backend: str) -> None:
    q, k, v = qkv(sq=20, sk=20)
    torch.manual_seed(5)
    first, second = (attention(q, k, v, dropout_p=0.5, backend=backend) for _ in range(2))
    torch.manual_seed(5)
    again = attention(q, k, v, dropout_p=0.5, backend=backend)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    before = torch.get_rng_state()
    attention(q, k, v, dropout_p=0.5, dropout_seed=3, backend=backend)
    attention(q, k, v, backend=backend)
    assert torch.equal(before, torch.get_rng_state())


@every_backend
def test_dropout_is_unbiased_and_off_at_zero(backend: str) -> None:
    q, k, v = (x.detach() for x in qkv(b=1, sq=8, sk=16, dtype=torch.float32))
    plain = attention(q, k, v, backend=backend)
    assert torch.equal(attention(q, k, v, dropout_p=0.0, dropout_seed=1, backend=backend), plain)
    mean = torch.stack([attention(q, k, v, dropout_p=0.2, dropout_seed=seed, backend=backend) for seed in range(300)]).mean(0)
    assert (mean - plain).abs().max() < 0.25


# --------------------------------------------------------------------------------------------------------- 11. determinism


def test_deterministic_calls_repeat_bit_for_bit() -> None:
    q, k, v = qkv(sq=70, sk=133, hq=4, dtype=torch.float32)
    bias = torch.randn(70, 133, requires_grad=True)
    sink = torch.randn(4, requires_grad=True)

    def run() -> list[Tensor]:
        out, aux = attention(q, k, v, bias=bias, learnable_sink=sink, causal=True, deterministic=True, backend="tiled", return_aux="lse")
        return [out, aux.lse, *torch.autograd.grad(out.sum() + aux.lse.sum(), (q, k, v, bias, sink))]

    first = run()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


def rules_seen(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    from tilewise.kernels import tiled

    seen: list[bool] = []
    forward, backward = tiled.forward, tiled.backward
    monkeypatch.setattr(tiled, "forward", lambda t, r, out: (seen.append(r.deterministic), forward(t, r, out))[1])
    monkeypatch.setattr(
        tiled, "backward", lambda t, r, saved, cot, grads: (seen.append(r.deterministic), backward(t, r, saved, cot, grads))[1]
    )
    return seen


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("given", [None, False, True])
def test_deterministic_follows_torch_and_is_kept(flag: bool, given: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """None reads the global flag once, in forward; True and False win over it."""
    seen = rules_seen(monkeypatch)
    q, k, v = qkv()
    before = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(flag)
        out = attention(q, k, v, deterministic=given, backend="tiled")
        torch.use_deterministic_algorithms(not flag)
        out.sum().backward()
    finally:
        torch.use_deterministic_algorithms(before)
    expected = flag if given is None else given
    assert seen == [expected, expected]


# ------------------------------------------------------------------------------------------------------ 12. and 13. ground


def test_auto_on_cpu_does_not_warn() -> None:
    q, k, v = qkv(dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(q, k, v, causal=True).sum().backward()
        attention(q, k, v, bias=torch.randn(5, 7), softcap=2.0)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@every_backend
def test_output_and_gradients_are_contiguous_in_their_own_order(layout: str, backend: str) -> None:
    q, k, v = qkv(hq=4, dv=6, dtype=torch.float32)
    leaves = [x.detach().transpose(1, 2) if layout == "bhsd" else x.detach() for x in (q, k, v)]
    leaves = [leaves[0].contiguous(), leaves[1].transpose(1, 2).contiguous().transpose(1, 2), leaves[2].transpose(2, 3).contiguous().mT]
    leaves = [x.requires_grad_() for x in leaves]
    out = attention(*leaves, layout=layout, backend=backend)
    assert out.is_contiguous()
    for x, grad in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
        assert grad.shape == x.shape
        if backend != "reference":
            assert grad.is_contiguous()


def test_inputs_are_never_written() -> None:
    q, k, v = qkv(sq=21, sk=37, dtype=torch.float32)
    bias, mask = torch.randn(21, 37), torch.rand(21, 37) < 0.8
    lengths = torch.tensor([30, 50], dtype=I32)
    before = [x.clone() for x in (q, k, v, bias, mask, lengths)]
    attention(q, k, v, bias=bias, mask=mask, seqused_k=lengths, causal=True, backend="tiled").sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(before, (q, k, v, bias, mask, lengths), strict=True))


def test_meta_tensors_give_shapes_only() -> None:
    q, k, v = (x.detach().to("meta") for x in qkv(dtype=torch.bfloat16))
    out, aux = attention(q, k, v, return_aux=EVERY_AUX)
    assert out.device.type == "meta" and out.shape == q.shape and out.dtype == torch.bfloat16
    assert aux.lse.dtype == torch.float32 and aux.key_mass.shape == (2, 2, 7)
