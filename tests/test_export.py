"""Graphs that leave the process or are cut by others: export, AOTInductor, make_fx, selective checkpoints; the operators for tangents."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from tilewise import attention, attention_with_kvcache, cost, ops

from .helpers import make_inputs
from .small import double
from .test_ops import detached

OPS = torch.ops.tilewise


class Attend(torch.nn.Module):
    """A module whose call has something of everything: a captured tensor, a bias, a sink."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.sink = (torch.nn.Parameter(torch.randn(2)) for _ in range(2))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, causal=True, learnable_sink=self.sink, score_mod=lambda s, b, h, i, j: s * self.gate[h])


class Serve(torch.nn.Module):
    """A prompt's attention and a step over a cache, which is written to: calls that capture no tensor."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
        last = [x[:, -1:] for x in (q, k, v)]
        return attention(q, k, v, causal=True), attention_with_kvcache(
            last[0], k_cache, v_cache, *last[1:], cache_seqlens=used, causal=True
        )


def exported(module: torch.nn.Module, *more: Tensor) -> torch.export.ExportedProgram:
    size = torch.export.Dim("size", min=2, max=4096)
    shapes = [{1: size}] * 3 + [None] * len(more)
    with torch.no_grad():
        return torch.export.export(module, (*make_inputs(2, 9, heads=2).values(), *more), dynamic_shapes=shapes)


def test_an_exported_program_is_saved_and_loaded(tmp_path: Path) -> None:
    """Of any length, also in another session: the file names the operators and holds the parameters."""
    module = Attend()
    torch.export.save(exported(module), tmp_path / "attend.pt2")
    loaded = torch.export.load(tmp_path / "attend.pt2").module()
    other = make_inputs(2, 31, heads=2)
    torch.testing.assert_close(loaded(*other.values()), module(**other))


def test_an_aot_inductor_package_is_compiled_loaded_and_run(tmp_path: Path) -> None:
    """Calls without captured tensors are those whose empty list a package cannot carry. A cache is written to in place there too."""
    module, used = Serve(), torch.tensor([3, 5], dtype=torch.int32)
    options = {"aot_inductor.compile_wrapper_opt_level": "O0"}
    program = exported(module, *torch.randn(2, 2, 16, 2, 16), used)
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "serve.pt2"), inductor_configs=options)
    loaded = torch._inductor.aoti_load_package(path)
    for size in (9, 31):
        other, caches = make_inputs(2, size, heads=2), torch.randn(2, 2, 16, 2, 16)
        theirs, ours = caches.clone(), caches.clone()
        for a, b in zip(loaded(*other.values(), *theirs.unbind(), used), module(*other.values(), *ours.unbind(), used), strict=True):
            torch.testing.assert_close(a, b)
        assert torch.equal(theirs, ours) and not torch.equal(theirs, caches)


@pytest.mark.parametrize("tracing", ["real", "symbolic"])
def test_make_fx_of_derivatives(tracing: str) -> None:
    """A trace of tangents and second derivatives holds the operators and nothing of their inside."""
    x = list(double(batch=1, heads=2).values())

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, causal=True, backend="tiled")

    def step(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        tangent = torch.func.jvp(f, (q, k, v), (k.sum() + q, k, v))[1]
        return tangent, torch.func.grad(lambda q: torch.func.grad(lambda q: f(q, k, v).sin().sum())(q).square().sum())(q)

    graph = make_fx(step, tracing_mode=tracing)(*x)
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    names = {str(target) for target in called if "tilewise" in str(target)}
    assert names == {f"tilewise.attention_{name}.default" for name in ("forward", "backward", "jvp", "backward_jvp")}
    assert not [target for target in called if "mm" in str(target) or "softmax" in str(target)]
    for a, b in zip(graph(*x), step(*x), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kept", [True, False])
def test_selective_checkpointing_sees_the_operator(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy may keep attention's result and recompute the rest, or recompute both; gradients are the same."""
    x = [t.requires_grad_() for t in make_inputs(2, 12, heads=2).values()]
    ran: list[int] = []
    monkeypatch.setattr(ops, "run_forward", lambda args, run=ops.run_forward: (ran.append(1), run(args))[1])

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = kept and op == OPS.attention_forward.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.MUST_RECOMPUTE

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q.sin(), k, v, causal=True).cos()

    out = checkpoint(f, *x, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, policy))
    got = torch.autograd.grad(out.sum(), x)
    assert len(ran) == (1 if kept else 2)
    for a, b in zip(got, torch.autograd.grad(f(*x).sum(), x), strict=True):
        torch.testing.assert_close(a, b)


# ----------------------------------------------------------------------------------------------- the operators for tangents


def tangent_calls() -> list[tuple[Any, tuple[Any, ...]]]:
    """What a double backward and a jvp of grad hand to the operators."""
    from torch.utils._python_dispatch import TorchDispatchMode

    calls: list[tuple[Any, tuple[Any, ...]]] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (OPS.attention_jvp.default, OPS.attention_backward_jvp.default):
                calls.append((func, args))
            return func(*args, **(kwargs or {}))

    x = [t.requires_grad_() for t in double(heads=2).values()]
    gate, sink = torch.randn(2).double().requires_grad_(), torch.randn(2).double().requires_grad_()
    with Record():
        out, aux = attention(
            *x, learnable_sink=sink, score_mod=lambda s, b, h, i, j: s * gate[h], backend="tiled", return_aux=("lse", "entropy", "key_mass")
        )
        loss = out.sin().sum() + aux.lse.sin().sum() + aux.entropy.sin().sum() + aux.key_mass.sin().sum()
        first = torch.autograd.grad(loss, [*x, gate, sink], create_graph=True)
        torch.autograd.grad(sum(g.square().sum() for g in first), [*x, gate, sink])
    assert [func for func, _ in calls] == [OPS.attention_jvp.default, OPS.attention_backward_jvp.default]
    return calls


def test_opcheck_of_the_operators_for_tangents() -> None:
    """Schema, autograd registration, fakes and AOT dispatch with static and dynamic shapes; a third derivative raises elsewhere."""
    (jvp, jvp_args), (backward, backward_args) = tangent_calls()
    torch.library.opcheck(jvp, detached(jvp_args, False))
    torch.library.opcheck(backward, detached(backward_args, False))
    torch.library.opcheck(jvp, jvp_args, test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))
    torch.library.opcheck(backward, backward_args, test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))


def test_flops_of_tangents() -> None:
    x = {name: t.requires_grad_() for name, t in make_inputs(2, 32, heads=2, head_dim=16).items()}
    problem = cost.Problem(batch=2, heads=2, seqlen_q=32, head_dim=16)
    with FlopCounterMode(display=False) as counter:
        torch.func.jvp(lambda *x: attention(*x), tuple(x.values()), tuple(x.values()))
    assert counter.get_total_flops() == cost.flops(problem) + cost.tangent_flops(problem)
    first = torch.autograd.grad(attention(**x).sum(), list(x.values()), create_graph=True)
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(sum(g.square().sum() for g in first), list(x.values()))
    # The gradient that reached the output is a constant, so that only the second operator runs.
    assert counter.get_total_flops() == cost.tangent_flops(problem, "bwd")


def test_autocast_of_derivatives() -> None:
    """Inside autocast the tangents are those of the cast call."""
    x = tuple(make_inputs(1, 9, heads=2).values())
    with torch.autocast("cpu", torch.bfloat16):
        out, tangent = torch.func.jvp(lambda *x: attention(*x), x, x)
    assert out.dtype == tangent.dtype == torch.bfloat16
    half = tuple(t.bfloat16() for t in x)
    torch.testing.assert_close(tangent, torch.func.jvp(lambda *x: attention(*x), half, half)[1])


def test_two_threads_do_not_meet() -> None:
    """Forward, backward and second derivatives in two threads at once give what one thread does."""
    inputs = [[t.requires_grad_() for t in make_inputs(2, 40, heads=2).values()] for _ in range(2)]

    def run(x: list[Tensor]) -> list[Tensor]:
        first = torch.autograd.grad(attention(*x, causal=True, softcap=2.0).sin().sum(), x, create_graph=True)
        return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), x)]

    expected, got = [run(x) for x in inputs], [[], []]

    def repeat(n: int) -> None:
        for _ in range(5):
            got[n].append(run(inputs[n]))

    threads = [threading.Thread(target=repeat, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n in range(2):
        assert len(got[n]) == 5
        for repeated in got[n]:
            assert all(torch.equal(a, b) for a, b in zip(repeated, expected[n], strict=True))
