"""Tracing by make_fx, selective checkpoints, vmap of what is no float, and a training step in one CUDA graph, on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tilewise import attention

from .common import BACKENDS, differentiates, watched

DEVICE = "cuda"
with_backward = pytest.mark.parametrize("backend", [backend for backend in BACKENDS if differentiates(backend)])


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def close(got: Any, expected: Any) -> None:
    """Within the roundings of bfloat16: the same tiles may be summed in another order."""
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)


# --------------------------------------------------------------------------------------------------------------------- make_fx


@pytest.mark.parametrize("tracing", ["real", "fake", "symbolic"])
@with_backward
def test_a_trace_of_both_passes_replays(backend: str, tracing: str) -> None:
    """It holds the two operators, no piece of their inside, and computes the same of other values."""

    def step(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, causal=True, backend=backend, deterministic=False)
        return out.detach(), *torch.autograd.grad(out, leaves, dout)

    def given() -> list[Tensor]:
        return [random(2, 200, heads, 64) for heads in (4, 2, 2, 4)]

    graph = make_fx(step, tracing_mode=tracing)(*given())
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert called.count(torch.ops.tilewise.attention_forward.default) == 1
    assert called.count(torch.ops.tilewise.attention_backward.default) == 1
    assert not [target for target in called if "mm" in str(target) or "softmax" in str(target)]
    other = given()
    expected = step(*other)
    with watched() as passes:
        close(graph(*other), expected)
    assert passes == [f"{backend} forward", f"{backend} backward"]


# --------------------------------------------------------------------------------------------------------- selective checkpoints


class Layer(nn.Module):
    """Projections around causal attention."""

    def __init__(self, backend: str, width: int = 256) -> None:
        super().__init__()
        self.backend = backend
        self.qkv = nn.Linear(width, 3 * width, bias=False, device=DEVICE)
        self.project = nn.Linear(width, width, bias=False, device=DEVICE)

    def forward(self, x: Tensor) -> Tensor:  # x (B, S, width)
        q, k, v = self.qkv(x).to(torch.bfloat16).unflatten(-1, (3, 4, -1)).unbind(2)
        out = attention(q, k, v, causal=True, backend=self.backend, deterministic=False)
        return x + self.project(out.flatten(2).float())


@pytest.mark.parametrize("saved", [True, False], ids=["saved", "recomputed"])
@with_backward
def test_a_policy_of_checkpoints_sees_the_operator(backend: str, saved: bool) -> None:
    """Saved by the policy, its forward pass runs once; otherwise once more. The gradients are those without a checkpoint."""
    layer, x = Layer(backend), random(2, 150, 256, dtype=torch.float32)
    seen = []

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op is not torch.ops.tilewise.attention_forward.default:
            return CheckpointPolicy.PREFER_RECOMPUTE
        seen.append(context.is_recompute)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.MUST_RECOMPUTE

    def gradients(run: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(run(x).square().mean(), list(layer.parameters()))

    expected = gradients(layer)
    with watched() as passes:
        got = gradients(
            lambda x: checkpoint(layer, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy))
        )
    assert passes == [f"{backend} forward"] * (1 if saved else 2) + [f"{backend} backward"]
    assert seen[:1] == [False]  # torch may ask again when it recomputes
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-2 * theirs.abs().max().item())


# ------------------------------------------------------------------------------------------------------------------------ vmap


def masks() -> Tensor:
    visible = torch.rand(3, 100, 130, device=DEVICE) > 0.3
    visible[..., 0] = True
    return visible


VALUES: dict[str, Callable[[], Tensor]] = {
    "mask": masks,
    "seqused_q": lambda: torch.tensor([[100, 3], [50, 99], [0, 77]], dtype=torch.int32, device=DEVICE),
    "seqused_k": lambda: torch.tensor([[130, 1], [64, 129], [77, 12]], dtype=torch.int32, device=DEVICE),
    "dropout_seed": lambda: torch.tensor([3, 5, 2**40], dtype=torch.int64, device=DEVICE),
}


@pytest.mark.parametrize("name", VALUES)
def test_vmap_of_what_is_no_float(name: str) -> None:
    """Equal to a loop over its values, outputs and gradients; the other tensors are shared by all."""
    q, k, v = (random(2, size, heads, 64) for size, heads in ((100, 4), (130, 2), (130, 2)))
    rules = dict(dropout_p=0.25) if name == "dropout_seed" else dict(causal=True)

    def call(value: Tensor) -> Tensor:
        return attention(q, k, v, **rules, **{name: value}, deterministic=False)

    def slopes(value: Tensor) -> tuple[Tensor, ...]:
        def loss(*x: Tensor) -> Tensor:
            return attention(*x, **rules, **{name: value}, deterministic=False).float().square().sum()

        return torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v)

    values = VALUES[name]()
    each = [call(value) for value in values]
    assert not torch.equal(each[0], each[1])
    close(torch.func.vmap(call)(values), torch.stack(each))
    expected = [torch.stack(x) for x in zip(*map(slopes, values), strict=True)]
    for got, want in zip(torch.func.vmap(slopes)(values), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=1e-2 * want.abs().max().item())


# ----------------------------------------------------------------------------------------------------------------- CUDA graphs


def captured(step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """What replays a step, and its static result, after the warm-up that a capture asks for."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph.replay, result


OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.2, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, capturable=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@with_backward
def test_a_captured_training_step_trains(backend: str, optimizer: str) -> None:
    """Forward, backward and the optimizer in one graph, replayed five times on new data, leave the weights where eager steps do."""
    first = Layer(backend)
    data = [(random(2, 150, 256, dtype=torch.float32), random(2, 150, 256, dtype=torch.float32)) for _ in range(5)]
    x, target = (torch.empty_like(part) for part in data[0])

    def prepared() -> tuple[Layer, torch.optim.Optimizer, Callable[[], Tensor]]:
        layer = Layer(backend)
        layer.load_state_dict(first.state_dict())
        optimize = OPTIMIZERS[optimizer](list(layer.parameters()))

        def step() -> Tensor:
            optimize.zero_grad(set_to_none=False)
            loss = F.mse_loss(layer(x), target)
            loss.backward()
            optimize.step()
            return loss.detach()

        return layer, optimize, step

    def run(step: Callable[[], Tensor]) -> list[float]:
        losses = []
        for part, wanted in data:
            x.copy_(part)
            target.copy_(wanted)
            losses.append(step().item())
        return losses

    eager, _, step = prepared()
    expected = run(step)
    layer, optimize, step = prepared()
    x.copy_(data[0][0])
    target.copy_(data[0][1])
    replay, loss = captured(step)
    layer.load_state_dict(first.state_dict())  # as before the warm-up, in the tensors that the graph knows
    for state in optimize.state.values():
        for value in state.values():
            value.zero_()
    assert run(lambda: (replay(), loss)[1]) == pytest.approx(expected, rel=1e-3)
    for mine, theirs, start in zip(layer.parameters(), eager.parameters(), first.parameters(), strict=True):
        moved = (theirs - start).norm()
        assert moved > 0 and (mine - theirs).norm() < 0.1 * moved  # AdamW's first steps are signs, which the smallest gradients change
