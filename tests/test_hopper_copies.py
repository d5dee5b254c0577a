"""The Hopper kernels read the caller's own tensors, behind any strides that TMA takes, and a launch allocates what `explain` states.

The launches run as they are, but for the kernels: what would be launched is noted, and so is all memory that is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from tilewise import cost, explain
from tilewise.kernels.hopper import backward_launch, backward_pass, forward_pass, launch, why_not, workspace_bytes
from tilewise.kernels.hopper.configs import Addresses
from tilewise.plan import Cotangents, Gradients, Operands, Outputs, Request, Rules, Saved, Target

H200 = Target("cuda", (9, 0), "NVIDIA H200")
MULTIPROCESSORS = 132
BATCH, SEQLEN = 2, 2048  # long enough that no tile is cut


def packed(heads: int, seqlen: int, dim: int, first: int) -> Tensor:
    """Some heads of a projection that holds those of Q, K and V side by side."""
    return torch.zeros(BATCH, seqlen, 3 * heads, dim, dtype=torch.bfloat16)[:, :, first * heads : (first + 1) * heads].transpose(1, 2)


# (B, H, S, D) views as the kernels see them; the last argument tells Q, K and V apart.
VIEWS: dict[str, Callable[[int, int, int, int], Tensor]] = {
    "bshd": lambda heads, seqlen, dim, which: torch.zeros(BATCH, seqlen, heads, dim, dtype=torch.bfloat16).transpose(1, 2),
    "bhsd": lambda heads, seqlen, dim, which: torch.zeros(BATCH, heads, seqlen, dim, dtype=torch.bfloat16),
    "a slice of packed heads": packed,
    "rows with a gap": lambda heads, seqlen, dim, which: torch.zeros(BATCH, heads, seqlen, dim + 8, dtype=torch.bfloat16)[..., :dim],
    "every second query": lambda heads, seqlen, dim, which: torch.zeros(BATCH, heads, 2 * seqlen, dim, dtype=torch.bfloat16)[:, :, ::2],
    "batch inside": lambda heads, seqlen, dim, which: torch.zeros(seqlen, heads, BATCH, dim, dtype=torch.bfloat16).permute(2, 1, 0, 3),
}


def operands(how: str, dim: int = 64, heads: int = 4, kv_heads: int = 4) -> Operands:
    made = [VIEWS[how](number, SEQLEN, dim, which) for which, number in enumerate((heads, kv_heads, kv_heads))]
    return Operands(*made)


class Allocated(TorchDispatchMode):
    """Counts the bytes of storages that operators make."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, Any] = {}  # kept, so that no address comes twice

    @property
    def bytes(self) -> int:
        return sum(storage.nbytes() for storage in self.storages.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in given:
            storage = result.untyped_storage()
            self.storages[storage.data_ptr()] = storage
        return result


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of the large kernels by name, as they would be launched."""
    noted: list[dict[str, Any]] = []

    def start(names: list[str]) -> Callable[..., None]:
        return lambda kernel, programs, *arguments: noted.append(dict(zip(names, arguments, strict=True)))

    tickets = torch.zeros(2, dtype=torch.int32)
    monkeypatch.setattr(
        launch, "program_for", lambda t, r, out, cut: launch.Program(launch.variant_of(t, r, out, cut), Addresses(0, 0), None)
    )
    forward = SimpleNamespace(asked=lambda make, device: tickets, start=start(forward_pass.attention_forward.arg_names))
    monkeypatch.setattr(launch, "replay", forward)
    monkeypatch.setattr(launch, "multiprocessors", lambda _: MULTIPROCESSORS)

    def program_for(t: Operands, r: Rules, slopes: bool, bias: str) -> backward_launch.BackwardProgram:
        return backward_launch.BackwardProgram(backward_launch.variant_of(t, r, slopes, bias), 0, None)

    monkeypatch.setattr(backward_launch, "program_for", program_for)
    monkeypatch.setattr(backward_launch, "meanwhile", SimpleNamespace(start=start(backward_pass.attention_backward.arg_names)))
    monkeypatch.setattr(backward_launch, "multiprocessors", lambda _: MULTIPROCESSORS)
    monkeypatch.setattr(backward_launch, "run", lambda *arguments, **options: None)
    return noted


def both_passes(t: Operands, r: Rules) -> tuple[int, int]:
    """Runs the launches of both passes; the bytes that each takes beside its results."""
    for request in (Request(), Request(backward=True, needs=frozenset("qkv"))):
        assert why_not(t, r, request, H200) is None
    out, lse = torch.empty_like(t.q), torch.empty(t.q.shape[:3])
    grads = Gradients(torch.empty_like(t.q), torch.empty_like(t.k), torch.empty_like(t.v))
    with Allocated() as forward:
        launch.launch(t, r, Outputs(out, lse))
    with Allocated() as backward:
        backward_launch.launch(t, r, Saved(out, lse), Cotangents(out), grads)
    return forward.bytes, backward.bytes


@pytest.mark.parametrize("how", VIEWS)
def test_descriptors_are_of_the_callers_tensors(launched: list[dict[str, Any]], how: str) -> None:
    t = operands(how)
    forward, backward = both_passes(t, Rules(0.1, window_right=0))
    assert len(launched) == 2
    for arguments in launched:
        for name in "qkv":
            given, found = getattr(t, name), arguments[f"{name}_desc"]
            assert found.base.data_ptr() == given.data_ptr() and tuple(found.strides) == given.stride()
    assert forward == workspace_bytes(t, Rules(0.1, window_right=0), Request(), H200) == 0
    assert backward == workspace_bytes(t, Rules(0.1, window_right=0), Request(backward=True, needs=frozenset("qkv")), H200)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("heads, kv_heads, dim", [(4, 4, 64), (8, 1, 64), (8, 2, 72), (6, 2, 128), (4, 1, 256)])
def test_a_backward_pass_allocates_what_explain_states(
    launched: list[dict[str, Any]], heads: int, kv_heads: int, dim: int, deterministic: bool
) -> None:
    """With heads that share keys as without: nothing of K or V is expanded."""
    t = operands("bshd", dim, heads, kv_heads)
    _, backward = both_passes(t, Rules(0.1, window_right=0, deterministic=deterministic))
    given = (x.transpose(1, 2).to("meta") for x in (t.q, t.k, t.v))
    told = explain(*given, pass_="bwd", causal=True, softmax_scale=0.1, deterministic=deterministic, device="NVIDIA H200")
    state = cost.state_bytes(cost.Problem(BATCH, heads, SEQLEN, dim, kv_heads=kv_heads))
    assert told.backend == "hopper" and told.extra_bytes == state + backward
