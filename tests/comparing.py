"""One comparison of a backend with the reference, shared by the tests of features and of bug reports."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise import attention, reference

from .helpers import Answer, assert_close_to_reference, reference_with_grads, run_with_grads, unfused_with_grads


def at_least_summation_noise(unfused: Answer, exact: Answer, arguments: dict[str, Any], dout: Tensor, dlse: Tensor | None) -> Answer:
    """The yardstick for gradients that are sums over the score matrix: no better than float32 can add those terms.

    Such a sum has few elements and often cancels, so that the error of one unfused run is a matter of luck: the bound is one float32
    rounding of the sum of the terms' magnitudes. The terms are dS (the gradient of a bias of full shape), for slopes times a distance;
    a row's sink gradient and its dS sum to dlse.
    """
    q, k = arguments["q"], arguments["k"]
    heads, seq = (1, 2) if arguments.get("layout") == "bhsd" else (2, 1)
    shape = (q.shape[0], q.shape[heads], q.shape[seq], k.shape[seq])
    given = arguments.get("bias")
    full = torch.zeros(shape, dtype=torch.float64) if given is None else given.double().broadcast_to(shape)
    terms = reference_with_grads({**arguments, "bias": full}, dout, dlse).grads["bias"].abs()
    eps = torch.finfo(torch.float32).eps
    noise = {
        "bias": lambda: terms.sum_to_size((1,) * (4 - given.ndim) + given.shape).max(),
        "alibi_slopes": lambda: max(shape[2:]) * terms.sum((2, 3)).max() * (1 if arguments["alibi_slopes"].ndim == 2 else shape[0]),
        "learnable_sink": lambda: terms.sum((0, 2, 3)).max() + (0 if dlse is None else dlse.abs().sum((0, 2)).max()),
    }
    for name in noise.keys() & exact.grads.keys():
        if (name == "bias" and given.numel() == terms.numel()) or not exact.grads[name].numel():
            continue
        error = torch.maximum((unfused.grads[name].double() - exact.grads[name]).abs().max(), eps * noise[name]())
        unfused.grads[name] = exact.grads[name] + error
    return unfused


def compare(arguments: dict[str, Any], backend: str = "auto", dout: Tensor | None = None, with_lse: bool = True) -> dict[str, Tensor]:
    """Output, LSE and every gradient against the reference, from cotangents of both outputs; returns ours by name.

    float64 must agree to a few digits less than it has; other dtypes to the derived tolerance.
    """
    dtype = arguments["q"].dtype
    wide = dtype == torch.float64
    generator = torch.Generator().manual_seed(1)
    out, lse = reference.attention(**arguments)
    if dout is None:
        dout = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(dtype)
    dlse = torch.randn(lse.shape, generator=generator, dtype=torch.float64).to(dtype if wide else torch.float32) if with_lse else None

    def ours(**given: Any) -> tuple[Tensor, Tensor]:
        out, aux = attention(**given, backend=backend, return_aux="lse")
        return out, aux.lse

    got, exact = run_with_grads(ours, arguments, dout, dlse), reference_with_grads(arguments, dout, dlse)
    results = {"out": got.out, "lse": got.lse, **{f"d{name}": grad for name, grad in got.grads.items()}}
    if wide:
        wanted = {"out": exact.out, "lse": exact.lse, **{f"d{name}": grad for name, grad in exact.grads.items()}}
        for name, value in wanted.items():
            torch.testing.assert_close(results[name], value, rtol=1e-8, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")
    else:
        unfused = at_least_summation_noise(unfused_with_grads(arguments, dout, dlse), exact, arguments, dout, dlse)
        assert_close_to_reference(got, exact, unfused)
    return results
