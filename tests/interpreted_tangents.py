"""The Triton kernels for tangents in Triton's interpreter, run by `test_jvp` in a process of its own: see `interpreted`."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tilewise import attention, reference
from tilewise.api import prepare
from tilewise.kernels.triton import tangents as kernels
from tilewise.ops import DIFFERENTIABLE, operands
from tilewise.tangent_ops import BACKWARD_JVP_ARGS, COTANGENTS, TANGENTS

from . import cases
from .helpers import make_inputs
from .test_jvp import tangents_of

# Programs are refused by these kernels; the generator of dropout takes the interpreter a minute, so it comes in one tiny case.
SLOW = {"score_mod": ["none"], "dropout": ["none"]}
DROPOUT = {**cases.OFF, "dropout": "drop", "heads": "gqa"}
CHOICES = [*cases.covering_array({**cases.FACTORS, **SLOW})[::4], DROPOUT]
# Of the backward pass, every pair of what its kernels branch on.
BRANCHES: dict[str, list[str]] = {
    **{factor: [level] for factor, level in cases.OFF.items()},
    "lengths": ["more_keys", "more_queries"],
    "heads": ["mha", "mqa"],
    "dims": ["same", "value_wider"],
    "position": ["none", "causal", "window"],
    "seqused": ["none", "both"],
    "mask": ["none", "per_head"],
    "bias": ["none", "full", "per_key"],
    "softcap": ["none", "tight"],
    "alibi": ["none", "per_batch"],
    "sink": ["none", "finite"],
    "strides": ["contiguous", "inner_two"],
}
BACKWARD_CHOICES = cases.covering_array(BRANCHES)


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch):
    """The kernels decline the CPU; here they are meant to run on it. NumPy warns where a GPU computes infinities in silence."""
    from tilewise.kernels import triton

    monkeypatch.setattr(kernels, "why_not", lambda *_: None)
    monkeypatch.setattr(triton, "why_not", lambda *_: None)
    with np.errstate(all="ignore"):
        yield


@pytest.mark.parametrize("choice", CHOICES, ids=cases.name)
def test_float32(choice):
    """Against the tangents of the specification in float64, within a few roundings of the largest."""
    tiny = choice["dropout"] != "none"
    whole, call = (cases.build(choice, dtype=dtype, tiny=tiny) for dtype in (torch.float64, torch.float32))
    exact, got = tangents_of(whole, "reference", ("lse",)), tangents_of(call, "triton", ("lse",))
    for a, b, out in zip(got[1], exact[1], exact[0], strict=True):
        b = torch.where(out.isfinite(), b, 0.0)
        bound = 64 * torch.finfo(torch.float32).eps * max(1.0, b.abs().max().item())
        assert (a.double() - b).abs().max().item() <= bound


# ------------------------------------------------------------------------------------------------ the tangent of the backward pass

NAMES = dict(zip(("q", "k", "v", "bias", "alibi_slopes", "learnable_sink"), DIFFERENTIABLE, strict=True))


def arrivals(call: cases.Call, moving: set[str]) -> dict[str, Tensor]:
    """Random gradients of out and lse, and tangents of those and of the operands, as far as they move: by the operator's names."""
    generator = torch.Generator().manual_seed(2)

    def like(x: Tensor, shape: tuple[int, ...] | None = None, to: torch.dtype | None = None) -> Tensor:
        return torch.randn(x.shape if shape is None else shape, generator=generator, dtype=torch.float64).to(to or x.dtype)

    heads, rows = (1, 2) if call.options.get("layout") == "bhsd" else (2, 1)
    lse = (call.q.shape[0], call.q.shape[heads], call.q.shape[rows])
    accumulate = torch.promote_types(call.q.dtype, torch.float32)
    drawn = {f"t{NAMES[name]}": like(x) for name, x in call.differentiable().items()}
    for prefix in ("d", "td"):
        drawn |= {f"{prefix}out": like(call.q, (*call.q.shape[:3], call.v.shape[3])), f"{prefix}lse": like(call.q, lse, accumulate)}
    return {name: x for name, x in drawn.items() if name in moving}


EVERYTHING = {*TANGENTS, "dout", "dlse", "tdout", "tdlse"}


def exact_tangents(call: cases.Call, moving: set[str], compute_dtype: torch.dtype) -> dict[str, Tensor]:
    """J(x)^T w moves by the gradient of <u, J(x)^T w>, a Hessian being symmetric, and by J(x)^T tw."""
    leaves = {name: x.detach().to(compute_dtype).requires_grad_() for name, x in call.differentiable().items()}
    given = {"q": call.q, "k": call.k, "v": call.v, **call.options, **leaves}
    out, lse = reference.attention(**given, compute_dtype=compute_dtype)
    results = out, torch.where(lse.isfinite(), lse, 0.0)
    arrived = {name: x.to(compute_dtype) for name, x in arrivals(call, moving).items()}

    def through(prefix: str, **options: Any) -> list[Tensor]:
        weights = [arrived.get(prefix + name, torch.zeros_like(y)) for name, y in zip(("out", "lse"), results, strict=True)]
        grads = torch.autograd.grad(results, list(leaves.values()), weights, allow_unused=True, retain_graph=True, **options)
        return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves.values(), grads, strict=True)]

    first = through("d", create_graph=True)
    u = [arrived.get(f"t{NAMES[name]}", torch.zeros_like(x)) for name, x in leaves.items()]
    inner = sum((g * x).sum() for g, x in zip(first, u, strict=True))
    second = torch.autograd.grad(inner, list(leaves.values()), allow_unused=True, retain_graph=True)
    zero = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves.values(), second, strict=True)]
    return {name: (a + b).detach() for name, a, b in zip(leaves, zero, through("td"), strict=True)}


def kernels_tangents(call: cases.Call, arrived: dict[str, Tensor]) -> dict[str, Tensor]:
    """From the three kernels, with what the tiled path saves."""
    given = {"q": call.q, "k": call.k, "v": call.v, **call.options}
    with torch.no_grad():
        out, aux = attention(**given, backend="tiled", return_aux="lse")
    arguments = prepare(**given, backend="triton").op_arguments
    wanted = [name for name in NAMES if given.get(name) is not None and not (name == "bias" and kernels.is_shared(operands(arguments)))]
    named = {name: None for name in (*COTANGENTS, *(f"t{name}" for name in COTANGENTS), *TANGENTS)}
    named |= arguments | arrived
    named |= {"tcaptured": [], "out": out, "lse": aux.lse, "entropy": out.new_empty(0), "allow_tf32": False}
    named["needs"] = [name in wanted for name in NAMES]
    got = torch.ops.tilewise.attention_backward_jvp(*(named.get(name) for name in BACKWARD_JVP_ARGS))
    return dict(zip(wanted, got, strict=True))


def assert_float32(choice: cases.Choice, moving: set[str] = EVERYTHING, tiny: bool = False) -> None:
    """Against float64, within a few roundings of the largest."""
    exact = exact_tangents(cases.build(choice, tiny=tiny), moving, torch.float64)
    call = cases.build(choice, dtype=torch.float32, tiny=tiny)
    got = kernels_tangents(call, arrivals(call, moving))
    for name, x in got.items():
        want = exact[name]
        bound = 64 * torch.finfo(torch.float32).eps * max(1.0, want.abs().max().item())
        error = (x.double() - want).abs().max().item()
        assert error <= bound, f"{name}: error {error:.3e}, bound {bound:.3e}"


# What stands still, or did not arrive, in every second of the choices.
STILL: list[set[str]] = [{"tq", "tdlse"}, {"tk", "dlse"}, {"tv", "tbias"}, {"tdout", "tsink"}, {"dout", "tdout"}]
STILL += [{"tq", "tk", "talibi_slopes"}]


@pytest.mark.parametrize("index", range(len(BACKWARD_CHOICES)), ids=lambda index: cases.name(BACKWARD_CHOICES[index]))
def test_backward_float32(index):
    still = STILL[index // 2 % len(STILL)] if index % 2 else set()
    assert_float32(BACKWARD_CHOICES[index], EVERYTHING - still)


@pytest.mark.parametrize("choice", [DROPOUT, {**cases.OFF, "bias": "per_query", "mask": "empty_rows", "softcap": "tight"}], ids=cases.name)
def test_backward_of_tiny_calls(choice):
    assert_float32(choice, tiny=True)


def test_backward_float16():
    """At most 1.5 times the error of the unfused computation of the same dtype, and one rounding of the largest element."""
    choice = {**cases.OFF, "lengths": "more_keys", "position": "causal", "softcap": "tight", "dims": "value_wider"}
    call = cases.build(choice, dtype=torch.float16)
    exact, unfused = (exact_tangents(call, EVERYTHING, to) for to in (torch.float64, torch.float16))
    for name, x in kernels_tangents(call, arrivals(call, EVERYTHING)).items():
        error, allowed = ((y.double() - exact[name]).abs().max().item() for y in (x, unfused[name]))
        assert error <= 1.5 * allowed + torch.finfo(torch.float16).eps * exact[name].abs().max().item(), name


def test_backward_hides_what_nobody_sees():
    """NaN past the lengths, in a masked key and in a row that sees nothing, in inputs, arrivals and directions, changes no number."""

    def run(poison: float) -> list[Tensor]:
        torch.manual_seed(0)
        x, u = (make_inputs(1, 9, 12, heads=2, kv_heads=1) for _ in range(2))
        dout, tdout = torch.randn(1, 9, 2, 16), torch.randn(1, 9, 2, 16)
        mask = torch.ones(1, 1, 9, 12, dtype=torch.bool)
        mask[..., 3], mask[..., 2, :] = False, False
        for t in (x["q"], u["q"], dout, tdout):
            t[:, 7:] = t[:, 2] = poison
        for given in (x, u):
            for name in ("k", "v"):
                given[name][:, 10:] = given[name][:, 3] = poison
        lengths = [torch.tensor([n], dtype=torch.int32) for n in (7, 10)]
        options = {"mask": mask, "seqused_q": lengths[0], "seqused_k": lengths[1], "softcap": 2.0}
        drawn = {"dout": dout, "tdout": tdout, **{f"t{name}": t for name, t in u.items()}}
        return list(kernels_tangents(cases.Call(**x, options=options), drawn).values())

    clean, poisoned = run(0.5), run(float("nan"))
    for a, b in zip(clean, poisoned, strict=True):
        assert torch.equal(a, b)
    dq, dk, dv = clean
    assert not dq[:, 7:].any() and not dq[:, 2].any()
    for x in (dk, dv):
        assert not x[:, 10:].any() and not x[:, 3].any()


@pytest.mark.parametrize("shape", [{"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}], ids=str)
def test_backward_of_empty_dimensions(shape):
    """Without keys only a sink moves the LSE."""
    x = make_inputs(**{"batch": 2, "seqlen_q": 3, "seqlen_k": 4, "heads": 2, **shape})
    call = cases.Call(**x, options={"learnable_sink": torch.randn(2)})
    exact = exact_tangents(call, EVERYTHING, torch.float64)
    for name, got in kernels_tangents(call, arrivals(call, EVERYTHING)).items():
        torch.testing.assert_close(got.double(), exact[name], rtol=1e-5, atol=1e-6)
