"""Derivatives, function transforms, autocast, checkpoints and FLOP counts of `attention`."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tilewise import attention, masks

from .helpers import make_inputs
from .reports import report
from .small import Block, double, relative

I32 = torch.int32
EVERY_AUX = ("lse", "max_logits", "key_mass", "entropy")
both_backends = pytest.mark.parametrize("backend", ["tiled", "auto"])


# ------------------------------------------------------------------------------------------------------------- derivatives


def test_gradcheck() -> None:
    """Numeric against analytic in float64, with every differentiable tensor and every differentiable output."""
    x = double(batch=1, seqlen_q=3, seqlen_k=5, heads=2, kv_heads=1, head_dim=2)
    extra = [torch.randn(2, 3, 5), torch.rand(1, 2), torch.randn(2)]
    leaves = [t.requires_grad_() for t in [*x.values(), *(t.double() for t in extra)]]

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, slopes: Tensor, sink: Tensor) -> tuple[Tensor, ...]:
        out, aux = attention(
            q, k, v, bias=bias, alibi_slopes=slopes, learnable_sink=sink, causal=True, softcap=1.5, score_mod=relative,
            dropout_p=0.3, dropout_seed=5, backend="tiled", return_aux=("lse", "entropy", "key_mass"),
        )  # fmt: skip
        return out, aux.lse, aux.entropy, aux.key_mass

    assert torch.autograd.gradcheck(call, leaves)


@pytest.mark.parametrize("shape", [(), (2, 1, 1), (1, 5), (3, 1), (1, 1, 3, 5)], ids=str)
def test_gradcheck_of_broadcast_biases(shape: tuple[int, ...]) -> None:
    x = double(batch=2, seqlen_q=3, seqlen_k=5, heads=2, head_dim=2)
    bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda bias: attention(**x, bias=bias, window_size=(1, 1), backend="tiled"), (bias,))


NAMES = ("q", "k", "v", "bias", "alibi_slopes", "learnable_sink")


@pytest.mark.parametrize("needed", [c for n in range(1, 7) for c in itertools.combinations(NAMES, n)], ids="-".join)
def test_only_needed_gradients_are_computed(needed: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """All 63 subsets: the kernels get buffers for exactly those, and each is right."""
    from tilewise.kernels import tiled

    asked: list[set[str]] = []
    backward = tiled.backward

    def spy(t: Any, r: Any, saved: Any, cot: Any, grads: Any) -> None:
        buffers = dict(zip(NAMES, (grads.dq, grads.dk, grads.dv, grads.dbias, grads.dalibi_slopes, grads.dsink), strict=True))
        asked.append({name for name, buffer in buffers.items() if buffer is not None})
        backward(t, r, saved, cot, grads)

    monkeypatch.setattr(tiled, "backward", spy)
    x: dict[str, Any] = double(heads=2)
    x |= {"bias": torch.randn(5, 7).double(), "alibi_slopes": torch.rand(2).double(), "learnable_sink": torch.randn(2).double()}
    weight = torch.randn(2, 5, 2, 4, dtype=torch.float64)

    def run(backend: str) -> tuple[Tensor, ...]:
        leaves = {name: t.detach().clone().requires_grad_(name in needed) for name, t in x.items()}
        return torch.autograd.grad(attention(**leaves, causal=True, backend=backend), [leaves[name] for name in needed], weight)

    for name, a, b in zip(needed, run("tiled"), run("reference"), strict=True):
        torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")
    assert asked == [set(needed)]


def test_nothing_is_recorded_without_gradients() -> None:
    x = {name: t.requires_grad_() for name, t in make_inputs(1, 9, heads=2).items()}
    with torch.no_grad():
        assert attention(**x).grad_fn is None
    with torch.inference_mode():
        attention(**x)
    out = attention(**{name: t.detach() for name, t in x.items()})
    assert not out.requires_grad


def test_saved_memory_is_linear() -> None:
    """What waits for backward: inputs, output and LSE, nothing of the size of the score matrix."""
    saved: list[int] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t.untyped_storage().nbytes())
        return t

    x = {name: t.requires_grad_() for name, t in make_inputs(1, 301, heads=2, head_dim=8).items()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        attention(**x, causal=True, backend="tiled")
    assert sum(saved) <= 301 * 2 * 4 * (4 * 8 + 4)


def test_backward_twice_with_retained_graph() -> None:
    x = {name: t.requires_grad_() for name, t in make_inputs(1, 9, heads=2).items()}
    out = attention(**x, dropout_p=0.2)
    first = torch.autograd.grad(out.sum(), list(x.values()), retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(out.sum(), list(x.values())), strict=True):
        assert torch.equal(a, b)


def test_an_input_changed_in_place_before_backward_raises() -> None:
    x = {name: t.requires_grad_() for name, t in make_inputs(1, 9, heads=2).items()}
    k = x["k"] * 1
    out = attention(x["q"], k, x["v"])
    k.mul_(2)
    with pytest.raises(RuntimeError, match="inplace"):
        out.sum().backward()


# --------------------------------------------------------------------------------------------------------------- transforms

VMAPPED = ("q", "k", "v", "bias", "mask", "alibi_slopes", "learnable_sink", "seqused_q", "seqused_k", "dropout_seed")


MAPPED = [*((name,) for name in VMAPPED), ("q", "k", "v"), ("q", "mask"), ("k", "bias", "seqused_k"), VMAPPED]

MAPPED_ALONE = [("q",), ("k", "v"), ("mask",), ("alibi_slopes",), ("q", "k", "v", "alibi_slopes", "seqused_k")]


def vmap_inputs(size: int = 3) -> tuple[dict[str, Any], dict[str, Any]]:
    """A call, and for each tensor of it `size` different ones stacked in front."""

    def make(extra: tuple[int, ...]) -> dict[str, Any]:
        return {
            "q": torch.randn(*extra, 2, 5, 4, 8, dtype=torch.float64),
            "k": torch.randn(*extra, 2, 7, 2, 8, dtype=torch.float64),
            "v": torch.randn(*extra, 2, 7, 2, 6, dtype=torch.float64),
            "bias": torch.randn(*extra, 4, 5, 7, dtype=torch.float64),
            "mask": torch.rand(*extra, 2, 1, 5, 7) < 0.8,
            "alibi_slopes": torch.rand(*extra, 4, dtype=torch.float64),
            "learnable_sink": torch.randn(*extra, 4, dtype=torch.float64),
            "seqused_q": torch.randint(1, 6, (*extra, 2), dtype=I32),
            "seqused_k": torch.randint(1, 8, (*extra, 2), dtype=I32),
            "dropout_seed": torch.randint(0, 2**40, extra, dtype=torch.int64),
        }

    return make(()), make((size,))


@both_backends
@pytest.mark.parametrize("beside", ["nothing", "everything"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("names", MAPPED, ids="-".join)
def test_vmap_over_each_argument(names: tuple[str, ...], dropout: float, beside: str, backend: str) -> None:
    """B143: equal to a loop, whichever arguments are mapped, along whichever dimension, few or many others beside them."""
    fixed, stacked = vmap_inputs()
    aux_names: tuple[str, ...] = EVERY_AUX
    if beside == "nothing":  # what a batching rule may turn into one larger batch
        fixed = {name: x for name, x in fixed.items() if name in ("q", "k", "v", "dropout_seed")}
        aux_names = ("lse", "entropy", "key_mass")

    def call(mapped: dict[str, Any]) -> Any:
        out, aux = attention(**{**fixed, **mapped}, causal=True, dropout_p=dropout, backend=backend, return_aux=aux_names)
        return out, *(x for x in aux if x is not None)

    loop = [call({name: stacked[name][n] for name in names}) for n in range(3)]
    expected = [torch.stack(parts) for parts in zip(*loop, strict=True)]
    for a, b in zip(torch.func.vmap(call)({name: stacked[name] for name in names}), expected, strict=True):
        torch.testing.assert_close(a, b)
    last = {name: stacked[name].movedim(0, -1) for name in names}
    for a, b in zip(torch.func.vmap(call, in_dims=-1, out_dims=0)(last), expected, strict=True):
        torch.testing.assert_close(a, b)


@both_backends
@pytest.mark.parametrize(
    "mapped", [("q",), ("k", "v"), ("mask",), ("alibi_slopes",), ("q", "k", "v", "alibi_slopes", "seqused_k")], ids="-".join
)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_vmap_of_grad_alone(mapped: tuple[str, ...], dropout: float, backend: str) -> None:
    """Per-sample gradients of q, k and v where nothing else has one, so that the backward pass may be one larger batch."""
    fixed, stacked = vmap_inputs()
    names = {"q", "k", "v", *mapped} | ({"dropout_seed"} if dropout else set())
    given = {name: (stacked if name in mapped else fixed)[name] for name in VMAPPED if name in names}

    def loss(qkv: dict[str, Tensor], rest: dict[str, Tensor]) -> Tensor:
        return attention(**qkv, **rest, causal=True, dropout_p=dropout, backend=backend).sin().sum()

    qkv, rest = ({name: x for name, x in given.items() if (name in ("q", "k", "v")) is first} for first in (True, False))
    dims = tuple({name: 0 if name in mapped else None for name in part} for part in (qkv, rest))
    got = torch.func.vmap(torch.func.grad(loss), in_dims=dims)(qkv, rest)
    for n in range(3):
        leaves, others = ({name: (x[n] if name in mapped else x).clone() for name, x in part.items()} for part in (qkv, rest))
        leaves = {name: x.requires_grad_() for name, x in leaves.items()}
        for name, b in zip(leaves, torch.autograd.grad(loss(leaves, others), list(leaves.values())), strict=True):
            torch.testing.assert_close(got[name][n], b, msg=lambda text, name=name: f"{name}: {text}")


@report(143)
@both_backends
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_vmap_over_unbatched_calls(report: str, layout: str, backend: str) -> None:
    """(S, H, D) or (H, S, D) inputs, the batch made by vmap; nested twice."""
    x = make_inputs(6, 5, 7, heads=4, kv_heads=2, layout=layout)
    expected = attention(**x, layout=layout, causal=True, backend=backend)

    def single(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q[None], k[None], v[None], layout=layout, causal=True, backend=backend)[0]

    torch.testing.assert_close(torch.func.vmap(single)(*x.values()), expected)
    nested = torch.func.vmap(torch.func.vmap(single))(*(t.unflatten(0, (2, 3)) for t in x.values()))
    torch.testing.assert_close(nested.flatten(0, 1), expected)
    shared_keys = torch.func.vmap(single, in_dims=(0, None, None))(x["q"], x["k"][0], x["v"][0])
    torch.testing.assert_close(
        shared_keys[2:3], attention(x["q"][2:3], x["k"][:1], x["v"][:1], layout=layout, causal=True, backend=backend)
    )


@report(143)
@both_backends
@pytest.mark.parametrize(
    "mapped", [("q", "k", "v"), ("bias",), ("learnable_sink", "alibi_slopes"), ("q", "bias", "learnable_sink"), NAMES], ids="-".join
)
def test_vmap_of_grad(report: str, mapped: tuple[str, ...], backend: str) -> None:
    """Per-sample gradients of every differentiable argument, mapped or shared."""
    fixed, stacked = vmap_inputs()
    fixed, stacked = ({name: x[name] for name in NAMES} for x in (fixed, stacked))

    def loss(arguments: dict[str, Tensor], scale: Tensor) -> Tensor:
        out, aux = attention(**arguments, causal=True, softcap=2.0, backend=backend, return_aux="lse")
        return scale * (out.sin().sum() + aux.lse.cos().sum())

    scale = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)
    arguments = {name: (stacked if name in mapped else fixed)[name] for name in NAMES}
    dims = {name: 0 if name in mapped else None for name in NAMES}
    got = torch.func.vmap(torch.func.grad(loss), in_dims=(dims, 0))(arguments, scale)
    for n in range(3):
        leaves = {name: (x[n] if name in mapped else x).detach().clone().requires_grad_() for name, x in arguments.items()}
        expected = torch.autograd.grad(loss(leaves, scale[n]), list(leaves.values()))
        for name, b in zip(leaves, expected, strict=True):
            torch.testing.assert_close(got[name][n], b, msg=lambda text, name=name: f"{name}: {text}")


@both_backends
def test_gradient_through_vmap(backend: str) -> None:
    _, stacked = vmap_inputs()
    leaves = {name: stacked[name].requires_grad_() for name in ("q", "k", "v", "bias")}

    def call(mapped: dict[str, Tensor]) -> Tensor:
        return attention(**mapped, causal=True, backend=backend)

    weight = torch.randn(3, 2, 5, 4, 6, dtype=torch.float64)
    got = torch.autograd.grad(torch.func.vmap(call)(leaves), list(leaves.values()), weight)
    looped = torch.stack([call({name: x[n] for name, x in leaves.items()}) for n in range(3)])
    for a, b in zip(got, torch.autograd.grad(looped, list(leaves.values()), weight), strict=True):
        torch.testing.assert_close(a, b)


@both_backends
def test_vjp_and_jacrev(backend: str) -> None:
    x = double(batch=1, seqlen_q=2, seqlen_k=3, heads=1, head_dim=2)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, causal=True, backend=backend)

    leaves = [t.clone().requires_grad_() for t in x.values()]
    out, pullback = torch.func.vjp(call, *x.values())
    weight = torch.randn_like(out)
    for a, b in zip(pullback(weight), torch.autograd.grad(call(*leaves), leaves, weight), strict=True):
        torch.testing.assert_close(a, b)
    jacobians = torch.func.jacrev(call, argnums=(0, 1, 2))(*x.values())
    for a, b in zip(jacobians, torch.autograd.functional.jacobian(call, tuple(x.values())), strict=True):
        torch.testing.assert_close(a, b)


def test_per_sample_gradients_of_a_module() -> None:
    block = Block()
    inputs = torch.randn(2, 5, 32)
    parameters = {name: p.detach() for name, p in block.named_parameters()}

    def loss(parameters: dict[str, Tensor], inputs: Tensor) -> Tensor:
        return torch.func.functional_call(block, parameters, (inputs[None],)).square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, inputs)
    for n in range(2):
        block.zero_grad()
        block(inputs[n : n + 1]).square().sum().backward()
        for name, p in block.named_parameters():
            torch.testing.assert_close(per_sample[name][n], p.grad, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------- autocast, checkpoints, FLOPs, pickling


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@both_backends
def test_autocast_casts_q_k_and_v_alike(dtype: torch.dtype, backend: str) -> None:
    x = make_inputs(1, 9, heads=2)
    leaves = [t.requires_grad_() for t in x.values()]
    with torch.autocast("cpu", dtype):
        out, aux = attention(*leaves, backend=backend, return_aux="lse")
    assert out.dtype == dtype and aux.lse.dtype == torch.float32
    assert all(grad.dtype == torch.float32 for grad in torch.autograd.grad(out.sum(), leaves))
    with torch.autocast("cpu", dtype), torch.autocast("cpu", enabled=False):
        assert attention(*leaves, backend=backend).dtype == torch.float32
    wide = [t.detach().double() for t in leaves]
    with torch.autocast("cpu", dtype):
        assert attention(*wide, backend=backend).dtype == torch.float64
        assert attention(*leaves, backend=backend, out_dtype=torch.float32).dtype == torch.float32


def test_autocast_inside_a_compiled_function() -> None:
    x = make_inputs(1, 9, heads=2)
    compiled = torch.compile(lambda q, k, v: attention(q, k, v), fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        assert compiled(**x).dtype == torch.bfloat16


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("seed", [None, 11])
def test_checkpointing_keeps_the_dropout_mask(seed: int | None, use_reentrant: bool) -> None:
    """The seed comes from torch's generator, which checkpointing restores: recomputation drops what forward dropped."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, causal=True, dropout_p=0.5, dropout_seed=seed)

    results = []
    for wrap in (False, True):
        torch.manual_seed(4)
        leaves = [t.requires_grad_() for t in make_inputs(2, 20, heads=2).values()]
        torch.manual_seed(5)
        out = checkpoint(call, *leaves, use_reentrant=use_reentrant) if wrap else call(*leaves)
        results.append([out, *torch.autograd.grad(out.sin().sum(), leaves)] if not use_reentrant else _by_backward(out, leaves))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def _by_backward(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    out.sin().sum().backward()
    return [out.detach(), *(t.grad for t in leaves)]


@both_backends
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_flop_counter(causal: bool, layout: str, backend: str) -> None:
    """4 B H Sq Sk D forward and 2.5 times that backward, fewer where causality hides scores."""
    x = {name: t.requires_grad_() for name, t in make_inputs(2, 64, 64, heads=4, kv_heads=2, head_dim=16, layout=layout).items()}
    with FlopCounterMode(display=False) as forward:
        out = attention(**x, causal=causal, layout=layout, backend=backend)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    full = 4 * 2 * 4 * 64 * 64 * 16
    visible = (64 + 1) / (2 * 64) if causal else 1.0
    assert forward.get_total_flops() == pytest.approx(full * visible, rel=0.02)
    assert backward.get_total_flops() == pytest.approx(2.5 * full * visible, rel=0.02)


def test_flop_counter_with_unequal_head_dims() -> None:
    x = make_inputs(1, 8, 16, heads=2, head_dim=32, head_dim_v=8)
    with FlopCounterMode(display=False) as counter:
        attention(**x)
    assert counter.get_total_flops() == 2 * 2 * 8 * 16 * (32 + 8)


def test_a_module_with_attention_trains_the_same_as_eager() -> None:
    """Ten steps of a block with ours and with the reference give the same loss curve."""
    losses = []
    for backend in ("auto", "reference"):
        torch.manual_seed(0)
        block = Block()
        optimiser = torch.optim.Adam(block.parameters(), 1e-2)
        torch.manual_seed(1)
        curve = []
        for _ in range(10):
            x = torch.randn(2, 9, 32)
            q, k, v = block.qkv(x).unflatten(-1, (3, 4, -1)).unbind(2)
            loss = (block.out(attention(q, k, v, causal=True, backend=backend).flatten(2)) - x).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            curve.append(loss.item())
        losses.append(curve)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("shape", [(0, 2, 4, 3, 8), (3, 0, 4, 3, 8), (3, 2, 0, 3, 8), (3, 2, 4, 0, 8)], ids=str)
@pytest.mark.parametrize("mask", [None, masks.Chunked(2)], ids=str)
def test_vmap_over_empty_dimensions(shape: tuple[int, ...], mask: Any) -> None:
    x = torch.randn(shape)

    def both(y: Tensor) -> tuple[Tensor, Tensor]:
        return attention(y, y, y, mask=mask), torch.func.grad(lambda z: attention(z, y, y, mask=mask).sum())(y)

    out, grads = torch.func.vmap(both)(x)
    assert out.shape == grads.shape == shape
