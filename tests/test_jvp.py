"""Forward mode: tangents of every output along every input, against the reference in float64."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tilewise import UnsupportedAttention, attention, masks, ops, plan, reference
from tilewise.api import prepare
from tilewise.kernels import tangents, tiled

from . import cases
from .helpers import make_inputs
from .small import I32, NEG_INF, double, qkv

AUX = ("lse", "key_mass", "entropy")
ARGUMENTS = ("q", "k", "v", "bias", "alibi_slopes", "learnable_sink")


def outputs(arguments: dict[str, Any], backend: str, aux: tuple[str, ...] = AUX) -> tuple[Tensor, ...]:
    out, given = attention(**arguments, backend=backend, return_aux=aux)
    return out, *(x for x in given if x is not None)


def tangents_of(
    call: cases.Call, backend: str, aux: tuple[str, ...] = AUX, along: dict[str, Tensor] | None = None
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Outputs and their tangents, from `torch.func.jvp` over every differentiable tensor of the call."""
    moving = call.differentiable()
    generator = torch.Generator().manual_seed(2)
    drawn = {name: torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for name, x in moving.items()}
    directions = tuple((drawn if along is None else along).values())

    def f(*given: Tensor) -> tuple[Tensor, ...]:
        named = dict(zip(moving, given, strict=True))
        return outputs({"q": call.q, "k": call.k, "v": call.v, **call.options, **named}, backend, aux)

    return torch.func.jvp(f, tuple(moving.values()), directions)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("choice", cases.CHOICES[::2] + cases.SINGLES, ids=cases.name)
def test_tangents_of_every_feature(choice: cases.Choice) -> None:
    """Each pair of features, over several tiles: out, lse, key_mass and entropy, all inputs moving at once."""
    call = cases.build(choice, tiny=len(choice["lengths"]) % 2 == 0)
    got, expected = tangents_of(call, "tiled"), tangents_of(call, "reference")
    for name, a, b in zip(("out", *AUX), got[1], expected[1], strict=True):
        b = torch.where(reference_lse_is_finite(expected[0][1], name), b, 0.0)
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")
    for a, b in zip(got[0], expected[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def reference_lse_is_finite(lse: Tensor, name: str) -> Tensor:
    """An empty row's LSE is -inf and stays there."""
    return lse != NEG_INF if name == "lse" else torch.ones((), dtype=torch.bool)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_tangents_are_as_exact_as_unfused_ones(dtype: torch.dtype, scale: float) -> None:
    """Error against float64: at most 1.5 times that of the unfused computation of the same dtype, and one rounding."""
    x = make_inputs(2, 64, 80, heads=4, kv_heads=2, dtype=dtype, scale=scale)
    u = make_inputs(2, 64, 80, heads=4, kv_heads=2, dtype=dtype)

    def tangent(to: torch.dtype, ours: bool) -> tuple[Tensor, Tensor]:
        def f(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            if ours:
                return outputs({"q": q, "k": k, "v": v, "causal": True, "softcap": 20.0}, "tiled", ("lse",))
            return reference.attention(q, k, v, causal=True, softcap=20.0, compute_dtype=to)

        return torch.func.jvp(f, tuple(t.to(to) for t in x.values()), tuple(t.to(to) for t in u.values()))[1]

    for got, unfused, exact in zip(tangent(dtype, True), tangent(dtype, False), tangent(torch.float64, False), strict=True):
        error, allowed = ((y.double() - exact).abs().max().item() for y in (got, unfused))
        assert error <= 1.5 * allowed + 4 * torch.finfo(got.dtype).eps * exact.abs().max().item()


def one_argument() -> dict[str, Any]:
    q, k, v = (x.detach() for x in qkv())
    bias, slopes, sink = torch.randn(5, 7).double(), torch.rand(2).double(), torch.randn(2).double()
    return dict(q=q, k=k, v=v, bias=bias, alibi_slopes=slopes, learnable_sink=sink)


@pytest.mark.parametrize("backend", ["tiled", "auto"])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_each_argument_alone(name: str, backend: str) -> None:
    """Dual tensors, func.jvp and jacfwd agree with the reference, whichever argument moves; the others have no tangent."""
    arguments = one_argument()
    primal = arguments.pop(name)
    u = torch.randn_like(primal)

    def f(x: Tensor, backend: str = backend) -> tuple[Tensor, ...]:
        return outputs({name: x, **arguments}, backend)

    expected = torch.func.jvp(lambda x: f(x, "reference"), (primal,), (u,))[1]
    with forward_ad.dual_level():
        dual = [forward_ad.unpack_dual(y).tangent for y in f(forward_ad.make_dual(primal, u))]
    columns = torch.func.jacfwd(f)(primal)
    for a, b, c, d in zip(torch.func.jvp(f, (primal,), (u,))[1], dual, columns, expected, strict=True):
        torch.testing.assert_close(a, d)
        torch.testing.assert_close(torch.zeros_like(d) if b is None else b, d)
        torch.testing.assert_close((c.flatten(d.ndim) * u.flatten()).sum(-1), d)


def test_torch_gradcheck_of_forward_mode() -> None:
    x = double(batch=1, seqlen_q=3, seqlen_k=4, heads=2, kv_heads=1, head_dim=2)
    leaves = [t.requires_grad_() for t in x.values()]

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, causal=True, softcap=1.5, dropout_p=0.3, dropout_seed=5, backend="tiled")

    assert torch.autograd.gradcheck(f, leaves, check_forward_ad=True, check_backward_ad=False)


# -------------------------------------------------------------------------------------------------------- score functions

TABLE_MODS = {
    "gated": lambda gate, table: lambda s, b, h, i, j: s * gate[h] - table[h, (i - j).clamp(0, 3)] * (i - j),
    "curved": lambda gate, table: (
        lambda s, b, h, i, j: torch.where(i > j, torch.tanh(gate[h] * s) + s * s * table[h, 1], torch.exp(-s * s))
    ),
    "masking": lambda gate, table: lambda s, b, h, i, j: torch.where((i + j) % 3 == 0, NEG_INF, torch.sigmoid(s) * gate[h]),
    "roots": lambda gate, table: lambda s, b, h, i, j: torch.sqrt(1 + s * s) * torch.abs(gate[h]) + torch.maximum(s, table[h, 2]),
}


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("name", TABLE_MODS)
def test_tangents_through_score_functions(name: str) -> None:
    """Scores and captured tensors move, one of them or both; what is hidden does not matter."""
    x = double(seqlen_q=20, seqlen_k=23, heads=4, kv_heads=2)
    moving = {**x, "gate": torch.randn(4).double(), "table": torch.randn(4, 4).double()}
    u = {key: torch.randn_like(t) for key, t in moving.items()}

    def f(given: dict[str, Tensor], backend: str) -> tuple[Tensor, ...]:
        rest = {key: t for key, t in ({**moving, **given}).items()}
        mod = TABLE_MODS[name](rest.pop("gate"), rest.pop("table"))
        return outputs({**rest, "score_mod": mod, "causal": True}, backend, ("key_mass", "entropy"))

    for names in (tuple(moving), ("gate",), ("table", "q")):
        given, along = ({key: t[key] for key in names} for t in (moving, u))
        got, expected = (torch.func.jvp(lambda g, b=b: f(g, b), (given,), (along,))[1] for b in ("tiled", "reference"))
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


# ---------------------------------------------------------------------------------------------------------- the contract


def test_max_logits_raises() -> None:
    q, k, v = (x.detach() for x in qkv())
    with pytest.raises(NotImplementedError, match=r"max_logits has no forward-mode"):
        torch.func.jvp(lambda q: attention(q, k, v, return_aux="max_logits"), (q,), (torch.ones_like(q),))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=r"max_logits has no forward-mode"):
        attention(forward_ad.make_dual(q, torch.ones_like(q)), k, v, return_aux="max_logits")


def test_torchs_older_vmap_in_forward_mode_raises_in_words() -> None:
    """torch.func's has rules for it. The older one in reverse mode is served: see `test_public_faults_interfaces`."""
    q, k, v = qkv(b=1, sq=2, sk=3, hq=1, hk=1, d=2)
    with pytest.raises(NotImplementedError, match=r"use torch.func.jacfwd"):
        torch.autograd.functional.jacobian(lambda q: attention(q, k, v), q, vectorize=True, strategy="forward-mode")


def test_a_third_derivative_raises_in_words() -> None:
    x = double(batch=1, seqlen_q=2, seqlen_k=3, heads=1, head_dim=2)

    def f(q: Tensor) -> Tensor:
        return attention(q, x["k"], x["v"]).sin().sum()

    one = (torch.ones_like(x["q"]),)
    with pytest.raises(NotImplementedError, match=r"first and second derivatives.*backend='reference'"):
        torch.func.jvp(lambda q: torch.func.jvp(f, (q,), one)[1], (x["q"],), one)
    with pytest.raises(NotImplementedError, match=r"first and second derivatives.*third"):
        torch.func.grad(lambda q: torch.func.hessian(f)(q).square().sum())(x["q"])


@pytest.mark.parametrize("how", ["func.jvp", "compiled", "dual numbers", "grad of jvp"])
def test_training_through_a_tangent(how: str) -> None:
    """The gradient of a loss that holds an output and its tangent, in the weights before attention: what mean-flow models train on."""
    torch.manual_seed(0)
    x, u = (torch.randn(2, 7, 8, dtype=torch.float64) for _ in range(2))
    weights = torch.randn(3, 8, 12, dtype=torch.float64)

    def loss(weights: Tensor, backend: str) -> Tensor:
        def f(x: Tensor) -> Tensor:
            q, k, v = ((x @ w).unflatten(-1, (3, 4)) for w in weights)
            return attention(q, k, v, causal=True, backend=backend)

        if how == "dual numbers":
            with forward_ad.dual_level():
                out, tangent = forward_ad.unpack_dual(f(forward_ad.make_dual(x, u)))
        else:
            out, tangent = torch.func.jvp(f, (x,), (u,))
        return (out.sin() * tangent).sum() + tangent.square().sum()

    def gradient(backend: str) -> Tensor:
        if how == "grad of jvp":
            return torch.func.grad(loss)(weights, backend)
        w = weights.clone().requires_grad_()
        compiled = how == "compiled" and backend != "reference"
        (torch.compile(loss, backend="aot_eager", fullgraph=True) if compiled else loss)(w, backend).backward()
        assert w.grad is not None
        return w.grad

    torch.testing.assert_close(gradient("auto"), gradient("reference"), rtol=1e-10, atol=1e-10)


def test_hidden_values_reach_no_tangent() -> None:
    """NaN in what nobody sees, in the inputs and in their tangents; rows that see nothing stand still."""
    x = {name: t.double() for name, t in make_inputs(2, 9, 12, heads=4, kv_heads=2).items()}
    options: dict[str, Any] = dict(
        seqused_q=torch.tensor([4, 9], dtype=I32), seqused_k=torch.tensor([10, 0], dtype=I32), mask=masks.Custom(lambda b, h, i, j: j != 3),
        learnable_sink=torch.randn(4).double(),
    )  # fmt: skip
    u = {name: torch.randn_like(t) for name, t in x.items()}

    def run() -> tuple[Tensor, ...]:
        return torch.func.jvp(lambda q, k, v: outputs({"q": q, "k": k, "v": v, **options}, "tiled"), tuple(x.values()), tuple(u.values()))[
            1
        ]

    clean = run()
    for poisoned in (x, u):
        poisoned["q"][0, 4:] = float("nan")
        for name in ("k", "v"):
            poisoned[name][0, 10:] = poisoned[name][0, 3] = poisoned[name][1] = float("nan")
    for a, b in zip(run(), clean, strict=True):
        assert torch.equal(a, b)
    assert not clean[0][1].any() and not clean[1][1].any() and not clean[0][0, 4:].any()


def test_rows_of_scores_without_a_logarithm_to_spare() -> None:
    """-1e9 + ln 4 is -1e9 in float32: the probabilities still sum to 1 in the tangents."""
    x, u = make_inputs(1, 8, heads=2), make_inputs(1, 8, heads=2)
    bias = torch.full((8, 8), -1e9)

    def f(backend: str, to: torch.dtype) -> tuple[Tensor, Tensor]:
        return torch.func.jvp(
            lambda q, k, v: attention(q, k, v, bias=bias.to(to), backend=backend),
            tuple(t.to(to) for t in x.values()),
            tuple(t.to(to) for t in u.values()),
        )

    # float32 rounds the scores themselves: each row is the average of its values, whatever q and k are
    out, tout = f("tiled", torch.float32)
    torch.testing.assert_close(out, x["v"].mean(1, keepdim=True).expand_as(out))
    ts = torch.einsum("bihd,bjhd->bhij", u["q"], x["k"]) + torch.einsum("bihd,bjhd->bhij", x["q"], u["k"])
    tp = (ts - ts.mean(-1, keepdim=True)) / (8 * 4)
    expected = torch.einsum("bhij,bjhd->bihd", tp, x["v"]) + u["v"].mean(1, keepdim=True)
    torch.testing.assert_close(tout, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [dict(batch=0), dict(seqlen_q=0), dict(seqlen_k=0), dict(head_dim=0), dict(head_dim_v=0)], ids=str)
def test_empty_dimensions(shape: dict[str, int]) -> None:
    x = double(**{"batch": 2, "seqlen_q": 3, "seqlen_k": 4, "heads": 2, **shape})
    sink = torch.randn(2).double()
    given = (*x.values(), sink)

    def f(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, backend: str) -> tuple[Tensor, ...]:
        return outputs({"q": q, "k": k, "v": v, "learnable_sink": sink}, backend, ("lse",))

    got, expected = (
        torch.func.jvp(lambda *g, b=b: f(*g, backend=b), given, tuple(map(torch.ones_like, given)))[1] for b in ("tiled", "reference")
    )
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_memory_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor made on the way has the size of the score matrix, in the tangent of either pass."""
    monkeypatch.setattr(tiled, "CPU_TILES", tiled.TileSizes(block_m=16, block_n=16, scores=2 * 16 * 16))
    size = 160
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            made = [x for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, Tensor)]
            largest = max([largest, *(x.untyped_storage().nbytes() // x.element_size() for x in made)])
            return result

    x = {name: t.transpose(1, 2) for name, t in make_inputs(1, size, heads=2, head_dim=8).items()}
    t, r = plan.Operands(**x), plan.Rules(0.3, window_right=0)
    out, lse = torch.empty_like(x["v"]), torch.empty(1, 2, size)
    tiled.forward(t, r, plan.Outputs(out, lse))
    saved, u = plan.Saved(out, lse), plan.Tangents(*x.values())
    grads = plan.Gradients(*(torch.empty_like(y) for y in x.values()))
    with Watch():
        tangents.jvp(t, r, u, saved, plan.Outputs(torch.empty_like(out), torch.empty_like(lse)))
        tangents.backward_jvp(t, r, u, saved, plan.Cotangents(out), plan.Cotangents(out), grads)
    assert largest <= 2 * size * 8


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_triton_kernel_in_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    tests = Path(__file__).with_name("interpreted_tangents.py")
    command = [sys.executable, "-m", "pytest", str(tests), "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tests.parent.parent)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]


def test_a_named_backend_without_tangents_raises() -> None:
    x = make_inputs(1, 32, heads=2, dtype=torch.float16)
    prepared = prepare(**x, score_mod=lambda s, b, h, i, j: s * 2)
    t, r = ops.operands(prepared.op_arguments), ops.rules(prepared.op_arguments, False)
    gpu, request = plan.Target("cuda", (9, 0), "NVIDIA H200", shared_memory=232448), plan.Request(tangent=True)
    with pytest.raises(UnsupportedAttention, match=r"backend='triton' cannot serve"):
        plan.select(t, r, "triton", request=request, target=gpu)
    assert plan.select(t, r, "hopper", request=request, target=gpu).backend == "tiled"
    plain = replace(r, score_mod="")
    assert plan.select(t, plain, "triton", request=request, target=gpu).backend == "triton"
    second = replace(request, backward=True)
    assert plan.select(t, plain, "auto", request=second, target=gpu).backend == "triton"
    shared = replace(t, bias=torch.zeros(1, 2, 32, 32).half())
    assert plan.select(shared, plain, "auto", request=replace(second, needs=frozenset({"q"})), target=gpu).backend == "triton"
    second, shared = replace(second, needs=frozenset({"bias"})), replace(t, bias=torch.zeros(1, 1, 32, 32).half())
    chosen = plan.select(shared, plain, "auto", request=second, target=gpu, warn=False)
    assert chosen.backend == "tiled" and "a bias of all queries and keys that batch items or heads share" in dict(chosen.declined)["triton"]


# ---------------------------------------------------------------------------------------------------------- composition


def test_nested_transforms() -> None:
    """vmap of jvp, jvp of vmap and jvp over a mapped tangent, against loops."""
    x = make_inputs(3, 5, 7, heads=2, head_dim=4)
    x = {name: t.double()[:, None] for name, t in x.items()}
    u = {name: torch.randn_like(t) for name, t in x.items()}

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, causal=True)

    def push(x: tuple[Tensor, ...], u: tuple[Tensor, ...]) -> Tensor:
        return torch.func.jvp(f, x, u)[1]

    loop = torch.stack([push(tuple(t[n] for t in x.values()), tuple(t[n] for t in u.values())) for n in range(3)])
    torch.testing.assert_close(torch.func.vmap(push)(tuple(x.values()), tuple(u.values())), loop)
    torch.testing.assert_close(torch.func.jvp(torch.func.vmap(f), tuple(x.values()), tuple(u.values()))[1], loop)
    first = tuple(t[0] for t in x.values())
    along = torch.func.vmap(push, in_dims=(None, 0))(first, tuple(u.values()))
    torch.testing.assert_close(along, torch.stack([push(first, tuple(t[n] for t in u.values())) for n in range(3)]))


def test_hessians() -> None:
    """Forward over reverse, reverse over forward and reverse over reverse give the same matrix, that of the reference."""
    x = double(batch=1, seqlen_q=2, seqlen_k=3, heads=1, head_dim=2)
    bias = torch.randn(2, 3).double()

    def loss(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, backend: str = "auto") -> Tensor:
        return attention(q, k, v, bias=bias, backend=backend).sin().sum()

    given, every = (*x.values(), bias), (0, 1, 2, 3)
    expected = torch.autograd.functional.hessian(lambda *g: loss(*g, backend="reference"), given)
    forward, reverse = torch.func.jacfwd, torch.func.jacrev
    for outer, inner in ((forward, reverse), (reverse, forward), (reverse, reverse)):
        got = outer(inner(loss, argnums=every), argnums=every)(*given)
        torch.testing.assert_close(got, expected)


def test_forward_mode_through_a_compiled_function() -> None:
    """One graph each: jvp, grad of grad and a Hessian-vector product inside torch.compile, and dual tensors; no zero is made up."""
    x = tuple(double(batch=1, seqlen_q=3, seqlen_k=4, heads=2).values())
    u = tuple(torch.randn_like(t) for t in x)

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, causal=True)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return f(q, k, v).sin().sum()

    def dual(q: Tensor, k: Tensor, v: Tensor, tq: Tensor, tk: Tensor, tv: Tensor) -> Tensor:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(f(forward_ad.make_dual(q, tq), k, forward_ad.make_dual(v, tv))).tangent

    def every(*g: Tensor) -> list[Tensor]:
        return [
            torch.func.jvp(f, g[:3], g[3:])[1],
            torch.func.jvp(torch.func.grad(loss), g[:3], g[3:])[1],
            torch.func.grad(lambda q: torch.func.grad(loss)(q, *g[1:3]).square().sum())(g[0]),
            dual(*g),
        ]

    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(every, fullgraph=True, backend="aot_eager")(*x, *u), every(*x, *u))


def test_the_op_itself_has_no_silent_zero() -> None:
    """Below the Python call too: torch.func over the operator gives the tangent."""
    x = double()
    arguments = prepare(**x, causal=True).op_arguments
    order = [a.name for a in torch.ops.tilewise.attention_forward.default._schema.arguments]

    def f(q: Tensor) -> Tensor:
        return torch.ops.tilewise.attention_forward(*(({**arguments, "q": q})[name] for name in order))[0]

    u = torch.randn_like(x["q"])
    expected = torch.func.jvp(lambda q: attention(q, x["k"], x["v"], causal=True, backend="reference"), (x["q"],), (u,))[1]
    torch.testing.assert_close(torch.func.jvp(f, (x["q"],), (u,))[1], expected)
