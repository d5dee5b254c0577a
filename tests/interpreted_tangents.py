"""The Triton kernel for tangents in Triton's interpreter, run by `test_jvp` in a process of its own: see `interpreted`."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import pytest
import torch

from tilewise.kernels.triton import tangents as kernels

from . import cases
from .test_jvp import tangents_of

# Programs are refused by this kernel; the generator of dropout takes the interpreter a minute, so it comes in one tiny case.
SLOW = {"score_mod": ["none"], "dropout": ["none"]}
CHOICES = [*cases.covering_array({**cases.FACTORS, **SLOW})[::4], {**cases.OFF, "dropout": "drop", "heads": "gqa"}]


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
