"""The host side of calls in parts and their merge, in Triton's interpreter: run by `test_hopper_parts`.

The Gluon kernel, which has no interpreter, is replaced: tiles come from its walk and the end of a tile from its epilogue, both as plain
Python, and PyTorch computes the softmax of the visited blocks in between.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import itertools
import types

import numpy as np
import pytest
import torch

from tilewise import reference
from tilewise.kernels.hopper import configs, epilogue, forward_pass, launch, parts, walk
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


class _Values:
    """A pointer to a tensor."""

    def __init__(self, values, at=0):
        self.values, self.at = values, at

    def __add__(self, offset):
        return _Values(self.values, self.at + torch.as_tensor(offset))


_GL = types.SimpleNamespace(
    where=_where,
    maximum=lambda a, b: torch.maximum(a, torch.as_tensor(b)),
    minimum=lambda a, b: torch.minimum(a, torch.as_tensor(b)),
    arange=lambda start, end, layout: torch.arange(start, end),
    exp2=torch.exp2,
    load=lambda at: at.values[at.at],
    float32=torch.float32,
    int64=torch.int64,
)
_stand_ins = {
    "gl": _GL,
    "exponent_line": exponent_line,
    "LOG2_E": LOG2_E,
    "divide": lambda a, b: a // b,
    "split_head": _FOUND["split_head"],
}


def _body(module, name):
    """A function of the kernel over tensors of PyTorch."""
    _stand_ins[name] = types.FunctionType(getattr(module, name).fn.__code__, {**vars(module), **_stand_ins}, name)
    return _stand_ins[name]


queries, own_heads = _body(walk, "queries"), _body(walk, "own_heads")
for _name in ("heads_left", "later_heads"):
    _body(epilogue, _name)
state, rows_of_part = _body(epilogue, "state"), _body(epilogue, "rows_of_part")
LAYOUT = types.SimpleNamespace(layout=None)


class Maxima(torch.Tensor):
    """What a tile of scores leaves: knows its layout, as a tensor of the device does."""

    type = LAYOUT


class StandIn:
    """Fills the workspace as the Gluon kernel would."""

    def __init__(self, variant, work, t):
        self.variant, self.work, self.t = variant, work, t

    def __getitem__(self, grid):
        return self

    def __call__(self, *arguments):
        a, c, t = dict(zip(forward_pass.attention_forward.arg_names, arguments, strict=True)), self.variant, self.t
        q, k, v = (a[f"{name}_desc"].base.float() for name in "qkv")
        batch, heads, seqlen_q, _ = q.shape
        dim_v, count = a["dim_v"], a["parts"]
        work = self.work[-1]
        rows_all = batch * heads * seqlen_q
        accumulators = work[: count * rows_all * dim_v].view(count * rows_all, dim_v)
        states = work[count * rows_all * dim_v :].view(2, count * rows_all)
        assert a["out_ptr"] == work.data_ptr() and a["lse_ptr"] == states.data_ptr()
        lists = {"lengths_q_ptr": t.seqused_q, "lengths_k_ptr": t.seqused_k}
        pointers = {name: _Pointer(x.tolist()) for name, x in lists.items() if x is not None}
        pointers |= {name: _Values(x.flatten()) for name, x in (("sink_ptr", t.sink), ("slopes_ptr", t.alibi_slopes)) if x is not None}
        p = types.SimpleNamespace(**{**{name: _Int(x) if type(x) is int else x for name, x in a.items()}, **pointers})
        for number, warpgroup in itertools.product(range(a["tiles"]), range(c.warpgroups)):
            tile = _FOUND["find_tile"](c, p, number)
            b, head, row, _ = _FOUND["query_coordinates"](c, p, tile, warpgroup, 0)
            head, row = int(head), int(row)
            assert row == _FOUND["own_row"](c, tile, warpgroup)
            box = torch.zeros(c.own_heads, c.own_queries, q.shape[3])  # TMA fills with zeros what lies outside
            inside = q[b, head : head + c.own_heads, row : row + c.own_queries]
            box[: inside.shape[0], : inside.shape[1]] = inside
            rows = row + queries(c, None)
            blocks = torch.arange((tile.last_block - tile.blocks + 1) * c.block_n, (tile.last_block + 1) * c.block_n)
            seen = (blocks < tile.keys_end).expand(len(rows), -1)
            if c.right:
                seen = seen & (blocks <= rows[:, None] + tile.shift + a["window_right"])
            if c.left:
                seen = seen & (blocks >= rows[:, None] + tile.shift - a["window_left"])
            _, key_head, first_key, _ = _FOUND["key_coordinates"](c, p, tile, tile.last_block - tile.blocks + 1, 0)
            at = (int(first_key) + torch.arange(len(blocks))).clamp(max=k.shape[2] - 1)
            s = box.flatten(0, 1) @ k[b, key_head, at].mT
            s = s * a["scale"] if c.scale_first else s
            if c.alibi:
                slope = p.slopes_ptr + own_heads(c, p, tile.batch_head % heads, None, warpgroup)
                s = s - torch.as_tensor(_GL.load(slope)).view(-1, 1) * (rows[:, None] + tile.shift - blocks).abs()
            s = torch.where(seen, s, -INFINITY)
            m_i = s.amax(1)
            unit, offset = exponent_line(c, p, m_i)
            probability = torch.exp2(s * unit[:, None] - offset[:, None])
            l_i = probability.sum(1)
            acc = probability @ v[b, key_head, at]
            acc = torch.where((l_i == 0)[:, None], float("nan"), acc)  # 0 * NaN, at worst
            factor, m, l = state(c, p, tile, m_i.as_subclass(Maxima), l_i, warpgroup)
            if c.lengths_q:
                m = torch.where(rows < tile.rows_end, m, -INFINITY)
                factor = torch.where(rows < tile.rows_end, factor, 0.0)
            if c.sink:
                acc = torch.where((factor == 0)[:, None], 0.0, acc * factor[:, None])
            ours, written = rows_of_part(c, p, tile.batch_head, tile.rows_stop - row, None, warpgroup)
            place = (int(tile.part * rows_all + tile.batch_head * seqlen_q) + row + ours)[written]
            assert states[:, place].isnan().all(), "a row twice"
            accumulators[place] = acc[written]
            states[0, place] = m[written]
            states[1, place] = torch.where(m == -INFINITY, 0.0, l)[written]
        assert not states.isnan().any(), "a row is missing"


def merged(monkeypatch, t: Operands, r: Rules, cut: parts.Cut, layout: str, out_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """out (B, H, Sq, Dv) and lse of a call."""
    batch, heads, seqlen_q, _ = t.q.shape
    shape = (batch, heads, seqlen_q, t.v.shape[3])
    out = torch.full(shape, float("nan"), dtype=out_dtype)
    if layout == "bshd":
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
    outputs = Outputs(out, torch.full(shape[:3], float("nan")))
    variant = launch.variant_of(t, r, outputs, cut)
    work: list[torch.Tensor] = []
    make = parts.workspace

    def poisoned(*given):
        work.append(make(*given).fill_(float("nan")))
        return work[-1]

    monkeypatch.setattr(parts, "workspace", poisoned)
    monkeypatch.setattr(parts, "cut_of", lambda *_: cut)
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
    "alibi": {"window_right": 0},
}


@pytest.mark.parametrize(
    "name, layout, with_lengths",
    [("full", "bshd", False), *((name, "bhsd", True) for name in RULES if name != "negative scale"), ("negative scale", "bshd", False)],
)
def test_parts_add_up(monkeypatch, name, layout, with_lengths):
    torch.manual_seed(len(name))
    for cut, seqlen_q, seqlen_k, heads, sink in (
        (parts.Cut(2), 4, 700, (2, 1), None),
        (parts.Cut(18, 2), 2, 513, (2, 1), torch.tensor([0.5, -INFINITY])),
        (parts.Cut(3, 4), 2, 400, (6, 2), torch.randn(6)),
        (parts.Cut(1, 16), 9 if name == "causal" else 1, 130, (3, 1), None),
    ):
        q = torch.randn(2, heads[0], seqlen_q, 16, dtype=torch.bfloat16) * 3
        k, v = (torch.randn(2, heads[1], seqlen_k, 16, dtype=torch.bfloat16) for _ in range(2))
        slopes = torch.rand(1, heads[0]) if name == "alibi" else None
        used_q = used_k = None
        if with_lengths:
            used_q, used_k = (torch.tensor(x, dtype=torch.int32) for x in ((seqlen_q, seqlen_q // 2), (seqlen_k - 77, 0)))
        r = Rules(**{"softmax_scale": 0.25, **RULES[name]})
        t = Operands(q, k, v, sink=sink, alibi_slopes=slopes, seqused_q=used_q, seqused_k=used_k)
        out, lse = merged(monkeypatch, t, r, cut, layout, torch.float32)
        window = r.window_left, r.window_right
        exact, exact_lse = reference.attention(
            *(x.transpose(1, 2).double() for x in (q, k, v)),
            window_size=window, softmax_scale=r.softmax_scale, learnable_sink=sink, alibi_slopes=slopes, seqused_q=used_q, seqused_k=used_k,
        )  # fmt: skip
        torch.testing.assert_close(out, exact.transpose(1, 2).float(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse, exact_lse.float(), rtol=1e-5, atol=1e-5)


def test_scores_that_no_exponent_holds(monkeypatch):
    """Maxima of parts beyond 2^27 in base 2, close to each other: only the largest score counts, whichever part has it."""
    q = torch.full((1, 1, 66, 16), 133_120.0, dtype=torch.bfloat16)
    k = q[:, :, :1].expand(1, 1, 500, 16).clone()
    k[0, 0, 77] *= 1.01
    v = torch.randn(1, 1, 500, 16, dtype=torch.bfloat16)
    out, lse = merged(monkeypatch, Operands(q, k, v), Rules(0.0361), parts.Cut(3), "bhsd", torch.bfloat16)
    assert torch.equal(out, v[:, :, 77:78].expand_as(out))
    exact = (q.double() @ k.double().mT).amax(3) * 0.0361
    torch.testing.assert_close(lse.double(), exact, rtol=8 * torch.finfo(torch.float32).eps, atol=0.0)
