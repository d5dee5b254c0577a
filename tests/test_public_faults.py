"""More faults that users of other attention libraries reported in public, each as a small input that differs in kind from the rest.

An id says what went wrong and where it was reported. What is right is written here or in `public_faults`, in plain float64.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tilewise

from .helpers import assert_close_to_reference, run_on_leaves
from .public_faults import CASES, Case

PARAMETERS = ("bias", "alibi_slopes", "learnable_sink")


def check(case: Case, dtype: torch.dtype, backend: str) -> None:
    """Output, LSE and every gradient, from cotangents of both outputs, against the case's own answer in float64.

    Gradients of parameters are sums whose terms cancel; they get the bound of `interpreted.check`.
    """
    arguments = {name: x.to(dtype) if isinstance(x, Tensor) and x.dtype == torch.float64 else x for name, x in case.arguments.items()}
    if dtype == torch.float64:
        arguments = {name: x.to(dtype) if name in PARAMETERS else x for name, x in arguments.items()}

    def ours(**given) -> tuple[Tensor, Tensor]:
        out, aux = tilewise.attention(**given, backend=backend, return_aux="lse")
        return out, aux.lse

    with torch.no_grad():
        out, lse = case.answer(
            **{name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in arguments.items()}
        )
    dout, dlse = torch.randn(out.shape).to(dtype), torch.randn(lse.shape).to(torch.float64 if dtype == torch.float64 else torch.float32)
    got = run_on_leaves(lambda **g: case.call(ours, **g), arguments, dout, dlse, lambda x: x.detach().clone().requires_grad_())
    exact = run_on_leaves(case.answer, arguments, dout, dlse, lambda x: x.detach().double().requires_grad_())
    if dtype == torch.float64:
        for name, want in {"out": exact.out, "lse": exact.lse, **exact.grads}.items():
            have = {"out": got.out, "lse": got.lse, **got.grads}[name]
            torch.testing.assert_close(have, want, rtol=1e-8, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")
        return
    unfused = run_on_leaves(case.answer, arguments, dout, dlse, lambda x: x.detach().to(dtype).requires_grad_())
    for name in {*PARAMETERS} & {*exact.grads}:
        want = exact.grads.pop(name)
        error, allowed = ((x.grads[name].double() - want).abs().max().item() for x in (got, unfused))
        size = max(want.abs().max().item(), 1.0)
        assert error <= 8.0 * (allowed + torch.finfo(got.grads[name].dtype).eps * size), (
            f"d{name}: error {error:.3e}, unfused {allowed:.3e}"
        )
    assert_close_to_reference(got, exact, unfused, recomputed=True)


@pytest.mark.parametrize("name", CASES)
def test_attention(name: str, small_tiles: None) -> None:
    case = CASES[name]()
    for backend in ("reference", "tiled", "auto"):
        check(case, torch.float64, backend)
    for dtype in (torch.float32, torch.bfloat16):
        check(case, dtype, "auto")
