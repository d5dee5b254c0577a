"""Double backward: gradients of gradients against the reference in float64, and what is refused beyond."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewise import BlockMask, attention, attention_varlen, reference
from tilewise.kernels import chunks, tangents, tiled

from . import cases
from .helpers import make_inputs
from .small import I32, double, qkv
from .test_jvp import AUX, TABLE_MODS, outputs


def penalty(gradients: tuple[Tensor | None, ...]) -> Tensor:
    """A number in which every gradient counts, each differently."""
    return sum(((n + 1) * g).sin().sum() for n, g in enumerate(gradients) if g is not None and g.requires_grad)  # type: ignore[return-value]


def second_gradients(arguments: dict[str, Any], leaves: list[Tensor], backend: str, aux: tuple[str, ...] = AUX) -> list[Tensor]:
    """The gradients of a penalty on the gradients, with respect to the leaves and to what arrived at the outputs."""
    outs = [torch.where(x.isfinite(), x, 0.0) for x in outputs(arguments, backend, aux)]
    generator = torch.Generator().manual_seed(3)
    arrived = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype).requires_grad_() for x in outs]
    first = torch.autograd.grad(outs, leaves, arrived, create_graph=True, allow_unused=True)
    second = torch.autograd.grad(penalty(first), leaves + arrived, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves + arrived, second, strict=True)]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("choice", cases.CHOICES[1::2] + cases.SINGLES, ids=cases.name)
def test_double_backward_of_every_feature(choice: cases.Choice) -> None:
    """Each pair of features, over several tiles, every output with a gradient, every input differentiated twice."""
    call = cases.build(choice, tiny=len(choice["lengths"]) % 2 == 0).map(lambda _, x: x.detach().requires_grad_())
    arguments = {"q": call.q, "k": call.k, "v": call.v, **call.options}
    names, leaves = zip(*call.differentiable().items(), strict=True)
    results = [second_gradients(arguments, list(leaves), backend) for backend in ("tiled", "reference")]
    for name, a, b in zip((*names, "dout", "dlse", "dkey_mass", "dentropy"), *results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("name", TABLE_MODS)
def test_double_backward_through_score_functions(name: str) -> None:
    x = {key: t.requires_grad_() for key, t in double(heads=4, kv_heads=2).items()}
    gate, table = torch.randn(4, dtype=torch.float64, requires_grad=True), torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    results = [
        second_gradients({**x, "score_mod": TABLE_MODS[name](gate, table), "causal": True}, [*x.values(), gate, table], backend)
        for backend in ("tiled", "reference")
    ]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


def test_gradgradcheck() -> None:
    """Numeric against analytic in float64, with every differentiable tensor and every differentiable output."""
    x = double(batch=1, seqlen_q=2, seqlen_k=3, heads=2, kv_heads=1, head_dim=2)
    extra = [torch.randn(2, 2, 3), torch.rand(1, 2), torch.randn(2)]
    leaves = [t.requires_grad_() for t in [*x.values(), *(t.double() for t in extra)]]

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, slopes: Tensor, sink: Tensor) -> tuple[Tensor, ...]:
        return outputs(
            dict(
                q=q, k=k, v=v, bias=bias, alibi_slopes=slopes, learnable_sink=sink, causal=True, softcap=1.5,
                score_mod=lambda s, b, h, i, j: s + 0.3 * torch.sin(s), dropout_p=0.3, dropout_seed=5,
            ),
            "tiled",
        )  # fmt: skip

    assert torch.autograd.gradgradcheck(call, leaves)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_second_gradients_are_as_exact_as_unfused_ones(dtype: torch.dtype) -> None:
    """Error against float64: at most 1.5 times that of the unfused computation of the same dtype, and one rounding."""
    x, u = (make_inputs(2, 40, 48, heads=4, kv_heads=2, dtype=dtype) for _ in range(2))
    dout = torch.randn(2, 40, 4, 16).to(dtype)

    def run(to: torch.dtype, ours: bool) -> tuple[Tensor, ...]:
        leaves = [t.to(to).requires_grad_() for t in x.values()]
        unfused = None if ours else reference.attention(*leaves, causal=True, compute_dtype=to)[0]
        out = attention(*leaves, causal=True, backend="tiled") if unfused is None else unfused
        first = torch.autograd.grad(out, leaves, dout.to(to), create_graph=True)
        return torch.autograd.grad(first, leaves, [t.to(to) for t in u.values()])

    for got, unfused, exact in zip(run(dtype, True), run(dtype, False), run(torch.float64, False), strict=True):
        error, allowed = ((y.double() - exact).abs().max().item() for y in (got, unfused))
        assert error <= 1.5 * allowed + 4 * torch.finfo(dtype).eps * exact.abs().max().item()


def test_hidden_values_reach_no_second_gradient() -> None:
    """NaN beyond the lengths, in inputs and in what arrives, changes no number, and those rows get 0."""

    def run(poison: float) -> list[Tensor]:
        torch.manual_seed(0)
        x = {name: t.double() for name, t in make_inputs(2, 9, 12, heads=4, kv_heads=2).items()}
        arrived = torch.randn(2, 9, 4, 16, dtype=torch.float64)
        directions = [torch.randn_like(t) for t in x.values()]
        for t in (x["q"], arrived, directions[0]):
            t[0, 4:] = poison
        for t in (x["k"], x["v"], *directions[1:]):
            t[0, 10:] = poison
        lengths = dict(seqused_q=torch.tensor([4, 9], dtype=I32), seqused_k=torch.tensor([10, 12], dtype=I32))
        leaves = [t.requires_grad_() for t in (*x.values(), arrived)]
        first = torch.autograd.grad(attention(*leaves[:3], **lengths, backend="tiled"), leaves[:3], arrived, create_graph=True)
        return list(torch.autograd.grad(first, leaves, directions))

    clean, poisoned = run(0.5), run(float("nan"))
    for a, b in zip(clean, poisoned, strict=True):
        assert torch.equal(a, b)
    assert not clean[0][0, 4:].any() and not clean[3][0, 4:].any() and not clean[1][0, 10:].any()


@pytest.mark.parametrize("wanted", ["q", "k", "v", "bias", "dout"])
def test_only_needed_second_gradients_are_computed(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    kernel = tangents.backward_jvp
    monkeypatch.setattr(tangents, "backward_jvp", lambda *a: (calls.append(a[-1]), kernel(*a)))
    x: dict[str, Tensor] = {**double(heads=2), "bias": torch.randn(5, 7).double()}
    arrived = torch.randn(2, 5, 2, 4, dtype=torch.float64)
    results = []
    for backend in ("tiled", "reference"):
        leaves = {name: t.clone().requires_grad_(name in ("q", wanted)) for name, t in {**x, "dout": arrived}.items()}
        dout = leaves["dout"]
        out = attention(**{name: t for name, t in leaves.items() if name != "dout"}, causal=True, backend=backend)
        (first,) = torch.autograd.grad(out, leaves["q"], dout, create_graph=True)
        results.append(torch.autograd.grad(first.sin().sum(), leaves[wanted])[0])
    torch.testing.assert_close(*results)
    asked = [{name for name in ("dq", "dk", "dv", "dbias") if getattr(grads, name) is not None} for grads in calls]
    assert asked == [{"dq", f"d{wanted}"} - {"ddout"}]


def test_second_gradients_repeat_bit_for_bit() -> None:
    x = [t.requires_grad_() for t in make_inputs(2, 40, heads=4, kv_heads=2).values()]
    runs = [second_gradients(dict(zip("qkv", x, strict=True)), x, "tiled", ("lse",)) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_a_third_derivative_raises_in_words() -> None:
    q, k, v = qkv(b=1, sq=2, sk=3, hq=1, hk=1, d=2)
    (first,) = torch.autograd.grad(attention(q, k, v).sin().sum(), q, create_graph=True)
    (second,) = torch.autograd.grad(first.sin().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"first and second derivatives.*backend='reference'"):
        second.sum().backward()


def test_a_gradient_penalty_trains_the_same_as_eager() -> None:
    """Five steps of a loss that holds the norm of an input's gradient."""
    curves = []
    for backend in ("auto", "reference"):
        torch.manual_seed(0)
        project = torch.nn.Linear(8, 24)
        optimiser = torch.optim.SGD(project.parameters(), 0.1)
        curve = []
        for _ in range(5):
            x = torch.randn(2, 6, 8, requires_grad=True)
            q, k, v = project(x).unflatten(-1, (3, 2, 4)).unbind(2)
            energy = attention(q, k, v, causal=True, backend=backend).square().sum()
            (slope,) = torch.autograd.grad(energy, x, create_graph=True)
            loss = 1e-3 * energy + 1e-5 * (slope.square().sum() - 1)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            curve.append(loss.item())
        curves.append(curve)
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)


def seconds_and_tangents(call: Callable[..., Tensor], x: dict[str, Tensor]) -> list[Tensor]:
    """A tangent and the second gradients of a call of some named tensors."""
    generator = torch.Generator().manual_seed(4)
    u = tuple(torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in x.values())
    tangents = torch.func.jvp(lambda *given: call(**dict(zip(x, given, strict=True))), tuple(x.values()), u)[1]
    leaves = [t.detach().clone().requires_grad_() for t in x.values()]
    first = torch.autograd.grad(call(**dict(zip(x, leaves, strict=True))).sin().sum(), leaves, create_graph=True)
    return [tangents, *torch.autograd.grad(penalty(first), leaves)]


@pytest.mark.parametrize("on_the_device", [False, True], ids=["host", "device"])
def test_packed_sequences(on_the_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of any length, one of them empty, rows that belong to none; with offsets that the host reads, and that it must not."""
    if on_the_device:
        for module in (tiled, tangents, chunks):
            monkeypatch.setattr(module, "host_reads", lambda device: False)
    monkeypatch.setattr(tiled, "CPU_TILES", tiled.TileSizes(block_m=4, block_n=4, scores=64))
    x: dict[str, Tensor] = {"q": torch.randn(14, 4, 6), "k": torch.randn(15, 2, 6), "v": torch.randn(15, 2, 5)}
    x |= {"bias": torch.randn(3, 1, 6, 7), "alibi_slopes": torch.rand(3, 4), "learnable_sink": torch.randn(4)}
    x = {name: t.double() for name, t in x.items()}
    cu_q, cu_k = (torch.tensor(c, dtype=I32) for c in ([0, 6, 6, 11], [0, 7, 9, 13]))

    def call(backend: str, **given: Tensor) -> Tensor:
        options: dict[str, Any] = dict(causal=True, dropout_p=0.2, dropout_seed=3, max_seqlen_q=6, max_seqlen_k=7)
        out, aux = attention_varlen(
            *(given.pop(name) for name in "qkv"), cu_q, cu_k, **given, **options, backend=backend, return_aux=("lse", "key_mass")
        )
        return torch.cat([out.flatten(), torch.where(aux.lse.isfinite(), aux.lse, 0.0).flatten(), aux.key_mass.flatten()])

    results = [seconds_and_tangents(partial(call, backend), x) for backend in ("tiled", "reference")]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


def test_block_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that gather keys from several runs."""
    monkeypatch.setattr(tiled, "CPU_TILES", tiled.TileSizes(block_m=16, block_n=64, scores=2 * 16 * 64))
    visible = torch.rand(1, 1, 4, 6) < 0.5
    visible[..., 0, :] = torch.tensor([True, False, True, False, True, True])
    dense = visible.repeat_interleave(16, 2).repeat_interleave(16, 3)
    mask = BlockMask.from_dense(dense, block_size=16)
    x = double(seqlen_q=64, seqlen_k=96, heads=4, kv_heads=2) | {"bias": torch.randn(4, 64, 96).double()}
    results = [
        seconds_and_tangents(lambda m=m, backend=backend, **given: attention(**given, mask=m, backend=backend), x)
        for m, backend in ((mask, "tiled"), (dense, "reference"))
    ]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)
