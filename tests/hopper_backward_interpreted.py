"""The host side of the Hopper backward pass and its two small kernels, in Triton's interpreter: run by `test_hopper_backward_rows`.

The Gluon kernel, which has no interpreter, is replaced by a few lines of PyTorch that read and write the same buffers.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import pytest
import torch

from tilewise import reference
from tilewise.kernels.hopper import backward_launch
from tilewise.plan import Cotangents, Gradients, Operands, Rules, Saved

from . import helpers


class StandIn:
    """Fills the accumulator of dQ, dK and dV from the buffers that the Gluon kernel would be given."""

    def __init__(self, variant):
        self.variant = variant

    def __getitem__(self, grid):
        return self

    def __call__(self, *arguments):
        a, c = dict(zip(backward_launch.attention_backward.arg_names, arguments, strict=True)), self.variant
        q, k, v, do = (a[f"{name}_desc"].base.float() for name in ("q", "k", "v", "do"))
        batch, heads, seqlen_q, dim = q.shape
        group, seqlen_k = a["group"], k.shape[2]
        lse, delta = (a[f"{name}_desc"].base.view(batch, heads, -1) for name in ("lse", "delta"))
        padded = lse.shape[2]
        assert padded == a["row_blocks"] * c.block_m
        q, do = (torch.nn.functional.pad(x, (0, 0, 0, padded - seqlen_q)) for x in (q, do))
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        rows, keys = torch.arange(padded)[:, None], torch.arange(seqlen_k)
        seen = torch.ones(padded, seqlen_k, dtype=torch.bool)
        if c.right:
            seen &= keys <= rows + seqlen_k - seqlen_q + a["window_right"]
        prob = torch.where(seen, torch.exp2(q @ k.mT * a["exp_scale"] - lse[..., None]), 0.0)
        ds = torch.where(prob == 0, 0.0, prob * (do @ v.mT - delta[..., None]))
        nothing = lse[..., None] == float("inf")
        q, do = (torch.where(nothing, 0.0, x) for x in (q, do))

        def of_key_heads(x):
            return x.view(batch, heads // group, group, seqlen_k, -1).sum(2)

        a["dv_desc"].base.copy_(of_key_heads(prob.mT @ do))
        a["dk_desc"].base.copy_(of_key_heads(ds.mT @ q) * a["out_scale"])
        dq = torch.nn.functional.pad(ds @ k, (0, c.dim - dim)).reshape(-1, c.dim)
        if c.dq_parts == 2:
            dq = dq.view(-1, 2, 2, 64).transpose(1, 2).reshape(-1, c.dim)
        if c.ordered:  # without turns, rows stay as they were allocated
            taken = (dq.view(-1, c.block_m * c.dim) != 0).any(1)
            StandIn.turns.copy_(taken[:, None].expand(-1, c.dq_parts).reshape(-1))
            dq = torch.where(taken.repeat_interleave(c.block_m)[:, None], dq, float("nan"))
            a["dq_desc"].base.copy_(dq)
        else:
            a["dq_desc"].base.add_(dq)


CASES = {
    "d64 full": {},
    "d64 causal, fewer keys": {"seqlen_q": 300, "seqlen_k": 70, "right": 0},
    "d40, grouped, ordered": {"dim": 40, "kv_heads": 2, "right": 0, "ordered": True},
    "d128/72, strided dout": {"dim": 128, "dim_v": 72, "dout": "expanded"},
    "d256, ordered, sink": {"dim": 256, "seqlen_q": 200, "seqlen_k": 100, "right": 0, "ordered": True, "sink": True},
    "d200 dlse only": {"dim": 200, "dout": "none"},
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_with_the_large_kernel_replaced(name, monkeypatch):
    case = {"dim": 64, "dim_v": 0, "kv_heads": 4, "seqlen_q": 70, "seqlen_k": 130, "right": -1, "ordered": False, "sink": False, "dout": ""}
    case |= CASES[name]
    inputs = helpers.make_inputs(
        2, case["seqlen_q"], case["seqlen_k"], 4, case["kv_heads"], case["dim"], case["dim_v"] or case["dim"], dtype=torch.float16
    )
    inputs |= {"causal": case["right"] == 0}
    if case["sink"]:
        inputs["learnable_sink"] = torch.randn(4)
    out, lse = reference.attention(**inputs)
    dout, dlse = torch.randn(out.shape).half(), torch.randn(lse.shape)
    if case["dout"] == "expanded":
        dout = torch.randn(1, 1, 1, 1).half().expand(out.shape)
    if case["dout"] == "none":
        dout = torch.zeros_like(dout)
    exact = helpers.reference_with_grads(inputs, dout, dlse)

    heads_first = {n: inputs[n].transpose(1, 2) for n in "qkv"}
    t = Operands(*heads_first.values(), sink=inputs.get("learnable_sink"))
    r = Rules(case["dim"] ** -0.5, window_right=case["right"], deterministic=case["ordered"])
    variant = backward_launch.variant_of(t, r)
    monkeypatch.setattr(backward_launch, "program_for", lambda *_: backward_launch.BackwardProgram(variant, 0, StandIn(variant)))
    new_empty = torch.Tensor.new_empty

    def remember_turns(x, *size, dtype=None, **options):
        made = new_empty(x, *size, dtype=dtype, **options)
        if dtype == torch.int32:
            StandIn.turns = made
        return made

    monkeypatch.setattr(torch.Tensor, "new_empty", remember_turns)
    grads = {n: torch.full_like(x, float("nan")) for n, x in heads_first.items()}
    dsink = torch.full((4,), float("nan")) if case["sink"] else None
    with np.errstate(all="ignore"):
        backward_launch.launch(
            t,
            r,
            Saved(out.half().transpose(1, 2), lse.float()),
            Cotangents(None if case["dout"] == "none" else dout.transpose(1, 2), dlse),
            Gradients(grads["q"], grads["k"], grads["v"], dsink=dsink),
        )
    for n, got in grads.items():
        want = exact.grads[n].transpose(1, 2)
        # The saved output is rounded to float16, and so is the result.
        assert (got - want).norm() <= 4e-3 * want.norm() + 1e-3, n
    if case["sink"]:
        assert (dsink - exact.grads["learnable_sink"]).norm() <= 4e-3 * exact.grads["learnable_sink"].norm()
