"""The operators as the rest of PyTorch sees them: opcheck, compilation, transforms, autocast, checkpoints, FLOPs."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from tilewise import attention, derivatives, ops, plan, tangent_ops
from tilewise.kernels import tangents, tiled

from . import cases
from .helpers import make_inputs
from .reports import report
from .small import Block, double, relative

I32 = torch.int32
EVERY_AUX = ("lse", "max_logits", "key_mass", "entropy")
both_backends = pytest.mark.parametrize("backend", ["tiled", "auto"])


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def arguments_of(call: cases.Call) -> dict[str, Any]:
    return {"q": call.q, "k": call.k, "v": call.v, **call.options}


# ------------------------------------------------------------------------------------------------------------------ opcheck


def recorded(arguments: dict[str, Any], leaves: list[Tensor], **options: Any) -> list[tuple[Any, tuple[Any, ...]]]:
    """What one call, forward and backward, hands to the ops."""
    calls: list[tuple[Any, tuple[Any, ...]]] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "tilewise":
                calls.append((func, args))
            return func(*args, **(kwargs or {}))

    with Record():
        result = attention(**arguments, **options)
        outs = [x for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, Tensor)]
        outs = [x for x in outs if x.requires_grad and x.shape != (arguments["q"].shape[2 if arguments.get("layout") != "bhsd" else 1],)]
        torch.autograd.grad(outs, leaves, [torch.ones_like(x) for x in outs], allow_unused=True)
    assert [func.name().split("::")[1] for func, _ in calls] == ["attention_forward", "attention_backward"]
    return calls


def detached(args: tuple[Any, ...], requires_grad: bool) -> tuple[Any, ...]:
    def leaf(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.detach().requires_grad_(requires_grad and x.is_floating_point() and x.requires_grad)

    return torch.utils._pytree.tree_map(leaf, args)


OPCHECK = [
    cases.OFF,
    *(cases.OFF | {"lengths": "more_keys", factor: level} for factor, levels in cases.FACTORS.items() for level in levels[-1:]),
    *cases.CHOICES[::8],
]


@report(134)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("choice", OPCHECK, ids=cases.name)
def test_opcheck(report: str, choice: cases.Choice, dtype: torch.dtype) -> None:
    """Schema, autograd registration, fakes and AOT dispatch with static and dynamic shapes, for both ops."""
    call = cases.build(choice, tiny=True, dtype=dtype).map(lambda _, x: x.requires_grad_())
    leaves = list(call.differentiable().values())
    (forward, args), (backward, backward_args) = recorded(
        arguments_of(call), leaves, backend="tiled", return_aux=("lse", "entropy", "key_mass")
    )
    # The gradients themselves are compared elsewhere; AOT dispatch would hand a cotangent to max_logits, whose gradient raises.
    torch.library.opcheck(forward, args, test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))
    torch.library.opcheck(
        backward, detached(backward_args, False), test_utils=("test_schema", "test_autograd_registration", "test_faketensor")
    )


@pytest.mark.parametrize("aux", ["", "lse", "entropy"])
def test_opcheck_all_utilities(aux: str) -> None:
    x = {name: t.requires_grad_() for name, t in double().items()}
    (forward, args), (backward, backward_args) = recorded(x, list(x.values()), backend="tiled", return_aux=aux or ())
    torch.library.opcheck(forward, detached(args, False))
    torch.library.opcheck(backward, detached(backward_args, False))


def test_compile_every_differentiable_output() -> None:
    """All differentiable outputs get a cotangent inside one compiled graph."""
    x = {name: t.requires_grad_() for name, t in double().items()}

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        out, aux = attention(q, k, v, causal=True, backend="tiled", return_aux=("lse", "entropy", "key_mass"))
        return out, aux.lse, aux.entropy, aux.key_mass

    eager = torch.autograd.grad([o.sin().sum() for o in call(**x)], list(x.values()))
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for a, b in zip(torch.autograd.grad([o.sin().sum() for o in compiled(**x)], list(x.values())), eager, strict=True):
        torch.testing.assert_close(a, b)


# ------------------------------------------------------------------------------------------------------------------- fakes


@both_backends
@pytest.mark.parametrize("choice", cases.CHOICES[::4], ids=cases.name)
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_fakes_equal_the_real_ones(choice: cases.Choice, out_dtype: torch.dtype | None, backend: str) -> None:
    """Shape, strides, dtype and device of every output and gradient, over the features."""

    def run(call: cases.Call) -> list[Tensor]:
        leaves = call.map(lambda _, x: x.detach().requires_grad_())
        out, aux = attention(**arguments_of(leaves), backend=backend, return_aux=EVERY_AUX, out_dtype=out_dtype)
        outs = [out, aux.lse, aux.key_mass, aux.entropy]
        return [*outs, aux.max_logits, *torch.autograd.grad(outs, list(leaves.differentiable().values()), list(map(torch.ones_like, outs)))]

    call = cases.build(choice, tiny=True, dtype=torch.bfloat16)
    real = run(call)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake_call = cases.Call(*(mode.from_tensor(x) for x in (call.q, call.k, call.v)))
        fake_call.options = {key: mode.from_tensor(x) if isinstance(x, Tensor) else x for key, x in call.options.items()}
        fake = run(fake_call)
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)


def test_out_strides_follow_the_layout_and_nothing_else() -> None:
    for layout, order in itertools.product(("bshd", "bhsd"), itertools.permutations(range(4))):
        x = make_inputs(2, 5, 7, heads=4, kv_heads=2, layout=layout)
        inverse = sorted(range(4), key=order.__getitem__)
        q, k, v = (t.permute(order).contiguous().permute(inverse).requires_grad_() for t in x.values())
        out = attention(q, k, v, layout=layout, backend="tiled")
        assert out.is_contiguous() and all(grad.is_contiguous() for grad in torch.autograd.grad(out.sum(), (q, k, v)))


# --------------------------------------------------------------------------------------------------------- torch.compile


COMPILED: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "causal": lambda: dict(causal=True),
    "window_softcap": lambda: dict(window_size=(3, 1), softcap=2.0),
    "mask": lambda: dict(mask=torch.rand(2, 1, 9, 11) < 0.7),
    "bias": lambda: dict(bias=torch.randn(4, 9, 11, requires_grad=True)),
    "scalar_bias": lambda: dict(bias=torch.randn((), requires_grad=True)),
    "alibi": lambda: dict(alibi_slopes=torch.rand(2, 4, requires_grad=True)),
    "sink": lambda: dict(learnable_sink=torch.randn(4, requires_grad=True)),
    "lengths": lambda: dict(seqused_q=torch.tensor([3, 9], dtype=I32), seqused_k=torch.tensor([11, 6], dtype=I32)),
    "dropout": lambda: dict(dropout_p=0.3, dropout_seed=7),
    "dropout_seed_tensor": lambda: dict(dropout_p=0.3, dropout_seed=torch.tensor(7)),
    "score_mod": lambda: dict(score_mod=relative),
}


@report(134)
@pytest.mark.parametrize(("name", "layout"), [(name, ("bshd", "bhsd")[n % 2]) for n, name in enumerate(COMPILED)])
def test_compile_fullgraph(report: str, name: str, layout: str) -> None:
    """One graph, forward and backward, with the numbers of the eager call."""
    x = make_inputs(2, 9, 11, heads=4, kv_heads=2, head_dim=8, layout=layout)
    options = COMPILED[name]()
    leaves = [t.requires_grad_() for t in x.values()] + [t for t in options.values() if isinstance(t, Tensor) and t.requires_grad]

    def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        out, aux = attention(2 * q, k, v, layout=layout, return_aux="lse", **options)
        return out * 2, aux.lse

    def run(f: Any) -> list[Tensor]:
        out, lse = f(*leaves[:3], **options)
        return [out, lse, *torch.autograd.grad([out, lse], leaves, [torch.ones_like(out), torch.ones_like(lse)])]

    for a, b in zip(run(torch.compile(call, fullgraph=True, backend="aot_eager")), run(call), strict=True):
        torch.testing.assert_close(a, b)


def test_compile_draws_a_new_dropout_mask_each_call() -> None:
    x = make_inputs(1, 9, heads=2)
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, dropout_p=0.5), fullgraph=True, backend="aot_eager")
    torch.manual_seed(3)
    first, second = compiled(**x), compiled(**x)
    assert not torch.equal(first, second)


@report(140)
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compile_a_transformer_block(report: str, compiler: str) -> None:
    """B134, B137, B140: the whole block is one graph, and its strides survive inductor's assertions."""
    block = Block()
    compiled = torch.compile(block, fullgraph=True, backend=compiler)
    x = torch.randn(2, 17, 32)
    results = []
    for f in (block, compiled):
        block.zero_grad()
        out = f(x)
        out.square().mean().backward()
        results.append([out, *(p.grad.clone() for p in block.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_compile_transposed_views_with_inductor() -> None:
    """B137: (B, H, S, D) views of (B, S, H, D) memory; the fake's strides are what inductor's code then asserts."""
    x = {name: t.transpose(1, 2).requires_grad_() for name, t in make_inputs(2, 16, heads=4, head_dim=8).items()}

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (attention(q * 2, k, v + 1, layout="bhsd", causal=True) + 1).transpose(1, 2).flatten(2)

    expected = call(**x)
    got = torch.compile(call, fullgraph=True)(**x)
    torch.testing.assert_close(got, expected)
    for a, b in zip(*(torch.autograd.grad(o.sin().sum(), list(x.values())) for o in (got, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@report(152)
@pytest.mark.parametrize("options", [dict(), dict(causal=True), dict(window_size=(4, 0), softcap=1.0)], ids=str)
def test_a_new_length_does_not_recompile(report: str, options: dict[str, Any]) -> None:
    """B136: dynamic lengths and batch; one graph serves them all, forward and backward."""
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, **options), fullgraph=True, dynamic=True, backend="aot_eager")
    stance = "default"
    # No two sizes of the first call are equal, which the tracer would take for one symbol.
    for batch, sq, sk in [(3, 5, 7), (5, 9, 9), (3, 40, 33), (6, 3, 70), (7, 6, 8)]:
        x = {name: t.requires_grad_() for name, t in make_inputs(batch, sq, sk, heads=4, kv_heads=2).items()}
        with torch.compiler.set_stance(stance):
            out = compiled(**x)
        expected = attention(**x, **options)
        torch.testing.assert_close(out, expected)
        for a, b in zip(*(torch.autograd.grad(o.sum(), list(x.values())) for o in (out, expected)), strict=True):
            torch.testing.assert_close(a, b)
        stance = "fail_on_recompile"


@report(136)
def test_marked_dynamic_dimensions_stay_dynamic(report: str) -> None:
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, causal=True), fullgraph=True, backend="aot_eager")
    x = make_inputs(4, 9, 9, heads=2)
    for t in x.values():
        torch._dynamo.mark_dynamic(t, 0)
        torch._dynamo.mark_dynamic(t, 1)
    compiled(**x)
    with torch.compiler.set_stance("fail_on_recompile"):
        other = make_inputs(6, 21, 21, heads=2)
        torch.testing.assert_close(compiled(**other), attention(**other, causal=True))


def test_automatic_dynamic_shapes_settle_after_two_graphs() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, causal=True), fullgraph=True, backend=counter)
    for size in (8, 9, 10, 33, 64):
        compiled(**make_inputs(2, size, heads=2))
    assert counter.frame_count <= 2


def test_bad_input_is_reported_inside_a_compiled_function() -> None:
    compiled = torch.compile(lambda q, k, v: attention(q, k, v), fullgraph=True, backend="aot_eager")
    x = make_inputs(2, 9, heads=4)
    with pytest.raises(Exception, match="head dim"):
        compiled(x["q"], x["k"][..., :8], x["v"])


@pytest.mark.parametrize("tracing", ["real", "fake", "symbolic"])
def test_make_fx(tracing: str) -> None:
    """A trace holds the two ops and no piece of their inside."""
    x = list(make_inputs(2, 9, 11, heads=4, kv_heads=2).values())

    def step(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
        return torch.autograd.grad(attention(q, k, v, causal=True, backend="tiled").sum(), (q, k, v))

    graph = make_fx(step, tracing_mode=tracing)(*x)
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert called.count(torch.ops.tilewise.attention_forward.default) == 1
    assert called.count(torch.ops.tilewise.attention_backward.default) == 1
    assert not [target for target in called if "mm" in str(target) or "softmax" in str(target)]
    other = list(make_inputs(2, 9, 11, heads=4, kv_heads=2, scale=0.5).values())
    for a, b in zip(graph(*other), step(*other), strict=True):
        torch.testing.assert_close(a, b)


def test_export() -> None:
    class Attend(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, k, v, causal=True)

    x = make_inputs(2, 9, heads=2)
    size = torch.export.Dim("size", min=2, max=4096)
    program = torch.export.export(Attend(), tuple(x.values()), dynamic_shapes=[{1: size}] * 3)
    other = make_inputs(2, 31, heads=2)
    torch.testing.assert_close(program.module()(*other.values()), attention(**other, causal=True))


def test_the_ops_are_registered_once_and_in_one_place() -> None:
    schema = torch.ops.tilewise.attention_forward.default._schema
    assert [argument.name for argument in schema.arguments][: len(ops.OPERANDS)] == list(ops.OPERANDS)
    assert len(schema.returns) == 5 and not schema.is_mutable


@pytest.mark.parametrize("listener", ["profiler", "flops", "checkpoint", "none"])
def test_the_operator_is_called_when_somebody_listens_and_left_out_otherwise(listener: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager calls skip the dispatcher, with the same results and gradients; whoever counts or records operators still sees them."""
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = (torch.randn(2, 40, 4, 16, requires_grad=True) for _ in range(3))
    expected = torch.ops.tilewise.attention_forward.default
    direct = []
    monkeypatch.setattr(derivatives, "run_forward", lambda args, run=derivatives.run_forward: (direct.append(1), run(args))[1])

    def call() -> tuple[torch.Tensor, ...]:
        out = attention(q, k, v, causal=True)
        return out, *torch.autograd.grad(out.square().sum(), (q, k, v))

    plain = call()
    assert len(direct) == 1
    if listener == "profiler":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            seen = call()
        names = {event.key for event in profile.key_averages()}
        assert {"tilewise::attention_forward", "tilewise::attention_backward"} <= names
    elif listener == "flops":
        with FlopCounterMode(display=False) as counter:
            seen = call()
        assert expected._overloadpacket in counter.get_flop_counts()["Global"]
    elif listener == "checkpoint":
        out = torch.utils.checkpoint.checkpoint(lambda *x: attention(*x, causal=True), q, k, v, use_reentrant=False)
        seen = (out, *torch.autograd.grad(out.square().sum(), (q, k, v)))
    else:
        seen = call()
        assert len(direct) == 2
    for a, b in zip(plain, seen, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def column(x: Tensor) -> Tensor:
    """x as a column of a table of something else."""
    return torch.stack([x + 1, x, x - 1], -1)[..., 1]


def test_kernels_get_vectors_without_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """One number a batch item or head lies beside the next, wherever the caller keeps them, also where samples of a vmap share them."""
    x = double(batch=2, seqlen_q=5, seqlen_k=7, heads=2, head_dim=2)
    vectors = {"alibi_slopes": torch.rand(2, 2), "learnable_sink": torch.randn(2), "seqused_q": torch.tensor([5, 3]).int()}
    vectors["seqused_k"] = torch.tensor([6, 4]).int()
    seen: list[Any] = []
    for module, name in ((tiled, "forward"), (tiled, "backward"), (tangents, "jvp"), (tangents, "backward_jvp")):
        monkeypatch.setattr(module, name, lambda t, *rest, run=getattr(module, name): (seen.append(t), run(t, *rest))[1])

    def call(q: Tensor, **vectors: Tensor) -> Tensor:
        return attention(q, x["k"], x["v"], **vectors, backend="tiled")

    def everything(**vectors: Tensor) -> list[Tensor]:
        def loss(q: Tensor) -> Tensor:
            return call(q, **vectors).square().sum()

        return [
            call(x["q"], **vectors),
            torch.func.grad(loss)(x["q"]),
            torch.func.jvp(torch.func.grad(loss), (x["q"],), (x["k"][:, :5],))[1],
        ]

    for kept in (vectors, {name: v[:1].expand(v.shape) for name, v in vectors.items()}):  # as they are, and one for all
        torch.testing.assert_close(everything(**{name: column(v) for name, v in kept.items()}), everything(**kept))
    one = {name: v[:1] if name != "learnable_sink" else column(v) for name, v in vectors.items()}
    mapped = torch.func.vmap(lambda q: attention(q, x["k"][:1], x["v"][:1], **one, backend="tiled"))(x["q"][:, None])
    torch.testing.assert_close(mapped[0], attention(x["q"][:1], x["k"][:1], x["v"][:1], **one, backend="tiled"))
    assert len(seen) > 12
    assert all(v.is_contiguous() for t in seen for v in (t.alibi_slopes, t.sink, t.seqused_q, t.seqused_k))


def test_what_lies_beyond_the_reach_of_offsets_is_not_for_kernels() -> None:
    """Along a row their offsets have 32 bits: a transposed bias or mask of so many elements is left to plain torch, a gradient copied."""
    pytest.importorskip("triton")
    target, rules = plan.Target("cuda", (9, 0), "NVIDIA H200", shared_memory=232448), plan.Rules(0.125)
    matrix = torch.empty(50_000, 50_000, dtype=torch.bool, device="meta")
    for mask, served in ((matrix, True), (matrix.mT, False), (matrix.mT[:, :40_000], True), (matrix[:, :1].mT, False)):
        q, k = (torch.empty(1, 2, size, 64, dtype=torch.bfloat16, device="meta") for size in mask.shape)
        for name in ("bias", "mask"):
            t = plan.Operands(q, k, k, **{name: mask[None, None]})
            reason = plan.why_not("triton", t, rules, plan.Request(), target)
            assert reason is None if served else "32-bit" in str(reason)
            assert (plan.select(t, rules, target=target, warn=False).backend == "tiled") is not served
    direction = dict.fromkeys(tangent_ops.TANGENTS) | {"tcaptured": None, "layout": "bshd", "tbias": matrix.mT}
    tbias = tangent_ops._direction(direction).tbias
    dout = torch.empty(64, 1 << 26, device="meta").mT.view(1 << 14, 1 << 10, 4, 64)
    arrived = ops.cotangents(dict.fromkeys(tangent_ops.COTANGENTS) | {"dout": dout, "layout": "bhsd"}).dout
    assert tbias is not None and tbias.is_contiguous() and arrived is not None and arrived.is_contiguous()


def test_kernels_run_on_the_device_of_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they keep of earlier launches is found by the current device: it changes before they look."""
    entered: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered.append(device) or contextlib.nullcontext())
    for index, expected in ((0, []), (1, [torch.device("cuda:1")])):
        device = torch.device("cuda", index)
        with ops.on_device(SimpleNamespace(device=device)):  # type: ignore[arg-type]
            assert entered == expected
    with ops.on_device(torch.zeros(1)):
        assert len(entered) == 1


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}], ids=["torch", "tiled"])
def test_gradients_without_memory_are_zeros(options):
    """As some derivatives of torch make them of an output that they do not depend on."""
    inputs = [torch.randn(1, 8, 2, 16, requires_grad=True) for _ in range(3)]
    out = attention(*inputs, **options)
    assert not any(x.any() for x in torch.autograd.grad(out, inputs, torch._efficientzerotensor(out.shape)))
