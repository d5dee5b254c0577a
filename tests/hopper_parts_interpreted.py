"""The host side of calls in parts and their merge, in Triton's interpreter: run by `test_hopper_parts`.

The Gluon kernel, which has no interpreter, is replaced: tiles come from its walk and the end of a tile from its epilogue, both as plain
Python, and PyTorch computes the softmax of the visited blocks in between.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import types

import numpy as np
import pytest
import torch

from tilewise import reference
from tilewise.kernels.hopper import configs, epilogue, launch, parts
from tilewise.kernels.hopper.launch import LOG2_E, Program
from tilewise.plan import Operands, Outputs, Rules

from .test_hopper_walk import _FOUND, _Int, _Pointer

INFINITY = float("inf")


def exponent_line(C, p, m_i):
    """The kernel's, without its bit operations."""
    m_i = torch.as_tensor(m_i)
    offset = m_i * p.exp_scale
    huge = offset.abs() > 2.0**27
    power = 2.0 ** np.ceil(np.log2(p.exp_scale))
    return torch.where(huge, power, p.exp_scale), torch.where(m_i == -INFINITY, 0.0, torch.where(huge, m_i * power, offset))


def _where(condition, a, b):
    return torch.where(torch.as_tensor(condition), torch.as_tensor(a), torch.as_tensor(b))


_GL = types.SimpleNamespace(
    where=_where,
    maximum=lambda a, b: torch.maximum(a, torch.as_tensor(b)),
    exp2=torch.exp2,
    load=lambda at: torch.tensor(at.values[at.at]),
    float32=torch.float32,
)
_stand_ins = {"gl": _GL, "exponent_line": exponent_line, "split_head": _FOUND["split_head"], "LOG2_E": LOG2_E}
state = types.FunctionType(epilogue.state.fn.__code__, {**vars(epilogue), **_stand_ins}, "state")


class StandIn:
    """Fills the workspace as the Gluon kernel would."""

    def __init__(self, variant, work, t):
        self.variant, self.work, self.t = variant, work, t

    def __getitem__(self, grid):
        return self

    def __call__(self, *arguments):
        a, c, t = dict(zip(launch.attention_forward.arg_names, arguments, strict=True)), self.variant, self.t
        q, k, v = (a[f"{name}_desc"].base.float() for name in "qkv")
        batch, heads, seqlen_q, _ = q.shape
        dim_v, count = a["dim_v"], a["parts"]
        work = self.work[-1]
        rows_all = count * batch * heads * seqlen_q
        accumulators = work[: rows_all * dim_v].view(count, batch, heads, seqlen_q, dim_v)
        states = work[rows_all * dim_v :].view(2, count, batch * heads, seqlen_q)
        assert a["out_ptr"] == work.data_ptr() and a["lse_ptr"] == states.data_ptr()
        pointers = {
            "lengths_q_ptr": t.seqused_q,
            "lengths_k_ptr": t.seqused_k,
            "sink_ptr": t.sink,
        }
        numbers = {name: _Int(x) if type(x) is int else x for name, x in a.items()}
        p = types.SimpleNamespace(**{**numbers, **{name: _Pointer(x.tolist()) for name, x in pointers.items() if x is not None}})
        for number in range(a["tiles"]):
            tile = _FOUND["find_tile"](c, p, number)
            b, head = divmod(tile.batch_head, heads)
            rows = torch.arange(tile.row, min(tile.row + c.block_m, seqlen_q))
            blocks = torch.arange((tile.last_block - tile.blocks + 1) * c.block_n, (tile.last_block + 1) * c.block_n)
            seen = (blocks < tile.keys_end).expand(len(rows), -1)
            if c.right:
                seen = seen & (blocks <= rows[:, None] + tile.shift + a["window_right"])
            if c.left:
                seen = seen & (blocks >= rows[:, None] + tile.shift - a["window_left"])
            at = (blocks + tile.origin).clamp(max=k.shape[2] - 1)
            s = q[b, head, rows] @ k[b, head // a["group"], at].mT
            s = torch.where(seen, s * a["scale"] if c.scale_first else s, -INFINITY)
            m_i = s.amax(1)
            unit, offset = exponent_line(c, p, m_i)
            probability = torch.exp2(s * unit[:, None] - offset[:, None])
            l_i = probability.sum(1)
            acc = probability @ v[b, head // a["group"], at]
            acc = torch.where((l_i == 0)[:, None], float("nan"), acc)  # 0 * NaN, at worst
            factor, m, l = state(c, p, tile, m_i, l_i)
            if c.lengths_q:
                m = torch.where(rows < tile.rows_end, m, -INFINITY)
                factor = torch.where(rows < tile.rows_end, factor, 0.0)
            if c.sink:
                acc = torch.where((factor == 0)[:, None], 0.0, acc * factor[:, None])
            accumulators[tile.part, b, head, rows] = acc
            states[0, tile.part, tile.batch_head, rows] = m
            states[1, tile.part, tile.batch_head, rows] = torch.where(m == -INFINITY, 0.0, l)


def merged(monkeypatch, t: Operands, r: Rules, count: int, layout: str, out_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """out (B, H, Sq, Dv) and lse of a call in `count` parts."""
    batch, heads, seqlen_q, _ = t.q.shape
    shape = (batch, heads, seqlen_q, t.v.shape[3])
    out = torch.full(shape, float("nan"), dtype=out_dtype)
    if layout == "bshd":
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
    outputs = Outputs(out, torch.full(shape[:3], float("nan")))
    variant = launch.variant_of(t, r, outputs, cut=True)
    work: list[torch.Tensor] = []
    make = parts.workspace

    def poisoned(*given):
        work.append(make(*given).fill_(float("nan")))
        return work[-1]

    monkeypatch.setattr(parts, "workspace", poisoned)
    monkeypatch.setattr(parts, "parts_of", lambda *_: count)
    monkeypatch.setattr(launch, "program_for", lambda *_: Program(variant, configs.Addresses(0, 0), StandIn(variant, work, t)))
    monkeypatch.setattr(launch, "multiprocessors", lambda _: 4)
    monkeypatch.setattr(launch.replay, "asked", lambda make, device: torch.zeros(2, dtype=torch.int32))
    with np.errstate(all="ignore"):
        launch.launch(t, r, outputs)
    monkeypatch.undo()
    assert variant.parts and not variant.store_tma
    return outputs.out, outputs.lse


RULES = {
    "full": {},
    "causal": {"window_right": 0},
    "window": {"window_left": 100, "window_right": 40},
    "negative scale": {"softmax_scale": -0.3},
}


@pytest.mark.parametrize("layout, with_lengths", [("bshd", False), ("bhsd", True)])
@pytest.mark.parametrize("name", RULES)
def test_parts_add_up(monkeypatch, name, with_lengths, layout):
    torch.manual_seed(len(name))
    for count, seqlen_q, seqlen_k, sink in ((2, 4, 700, None), (18, 2, 513, torch.tensor([0.5, -INFINITY]))):
        q = torch.randn(2, 2, seqlen_q, 16, dtype=torch.bfloat16) * 3
        k, v = (torch.randn(2, 1, seqlen_k, 16, dtype=torch.bfloat16) for _ in range(2))
        used_q = used_k = None
        if with_lengths:
            used_q, used_k = (torch.tensor(x, dtype=torch.int32) for x in ((seqlen_q, seqlen_q // 2), (seqlen_k - 77, 0)))
        r = Rules(**{"softmax_scale": 0.25, **RULES[name]})
        t = Operands(q, k, v, sink=sink, seqused_q=used_q, seqused_k=used_k)
        out, lse = merged(monkeypatch, t, r, count, layout, torch.float32)
        window = r.window_left, r.window_right
        exact, exact_lse = reference.attention(
            *(x.transpose(1, 2).double() for x in (q, k, v)),
            window_size=window, softmax_scale=r.softmax_scale, learnable_sink=sink, seqused_q=used_q, seqused_k=used_k,
        )  # fmt: skip
        torch.testing.assert_close(out, exact.transpose(1, 2).float(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse, exact_lse.float(), rtol=1e-5, atol=1e-5)


def test_scores_that_no_exponent_holds(monkeypatch):
    """Maxima of parts beyond 2^27 in base 2, close to each other: only the largest score counts, whichever part has it."""
    q = torch.full((1, 1, 130, 16), 133_120.0, dtype=torch.bfloat16)
    k = q[:, :, :1].expand(1, 1, 500, 16).clone()
    k[0, 0, 77] *= 1.01
    v = torch.randn(1, 1, 500, 16, dtype=torch.bfloat16)
    out, lse = merged(monkeypatch, Operands(q, k, v), Rules(0.0361), 3, "bhsd", torch.bfloat16)
    assert torch.equal(out, v[:, :, 77:78].expand_as(out))
    exact = (q.double() @ k.double().mT).amax(3) * 0.0361
    torch.testing.assert_close(lse.double(), exact, rtol=8 * torch.finfo(torch.float32).eps, atol=0.0)
