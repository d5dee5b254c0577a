"""The host side of the Hopper backward pass and its two small kernels, in Triton's interpreter: run by `test_hopper_backward_rows`.

The Gluon kernel, which has no interpreter, is replaced by a few lines of PyTorch that read and write the same buffers.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import pytest
import torch

from tilewise import BlockMask, masks, reference
from tilewise.kernels.hopper import backward_launch, backward_pass
from tilewise.kernels.hopper.gluon_api import gl
from tilewise.kernels.hopper.hidden import finite_copy
from tilewise.kernels.philox import keep_mask
from tilewise.kernels.triton import packed as packed_kernels
from tilewise.plan import Cotangents, Gradients, Operands, Rules, Saved
from tilewise.tile_lists import TileLists

from . import helpers


def as_accumulated(c, dq):
    """Rows of dQ (N, dim) as the kernel leaves them in the accumulator, as whole blocks of (block_m * dim) numbers."""
    split = 2 // c.tile.dq_rows
    x = dq.reshape(-1, c.block_m // 16, 2, 8, split, c.dq_parts, c.dim // split // c.dq_parts // 8, 4, 2)
    x = x.permute(0, 5, 4, 6, 1, 3, 7, 2, 8) if c.lanes else x.permute(0, 1, 2, 3, 5, 4, 6, 7, 8)
    return x.reshape(-1, c.block_m * c.dim)


def places_of_sums(c, columns):
    """Which numbers of a tile of dK or dV, counted row after row, follow one another in its sums: the compiler's layout of an accumulator,
    in the order of `barriers.add_in_memory`, [warp, 4 values of each lane]."""
    from triton._C.libtriton import gluon_ir, ir

    context = ir.context()
    ir.load_dialects(context)
    builder, groups = gluon_ir.GluonOpBuilder(context), c.tile.key_groups
    layout = gl.NVMMADistributedLayout([3, 0], [4 * groups, 2 // groups], [16, columns * groups // 2, 16])
    held = builder.to_linear_layout(layout._to_ir(builder), [c.block_n, columns])
    places = torch.zeros(1, dtype=torch.int64)
    for row, column in (*held.reg_bases[:2], *held.lane_bases, *held.reg_bases[2:], *held.warp_bases):
        places = torch.cat((places, places + row * columns + column))
    assert len(places) == c.block_n * columns
    return places


class StandIn:
    """Fills the accumulator of dQ, dK and dV from the buffers that the Gluon kernel would be given."""

    def __init__(self, variant):
        self.variant = variant

    def __getitem__(self, grid):
        return self

    def __call__(self, *arguments):
        a, c = dict(zip(backward_pass.attention_backward.arg_names, arguments, strict=True)), self.variant
        if c.packed:
            return self.packed(a)
        q, k, v, do = (a[f"{name}_desc"].base.float() for name in ("q", "k", "v", "do"))
        batch, heads, seqlen_q, dim = q.shape
        group, seqlen_k = a["group"] * a["sharing"], k.shape[2]
        assert (a["sharing"] > 1) == c.apart and a["heads_k"] * a["group"] == heads and not (c.apart and c.grouped)
        lse, delta = (a[f"{name}_desc"].base.view(batch, heads, -1) for name in ("lse", "delta"))
        padded = lse.shape[2]
        assert padded == a["row_blocks"] * c.block_m
        q, do = (torch.nn.functional.pad(x, (0, 0, 0, padded - seqlen_q)) for x in (q, do))
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        rows, keys = torch.arange(padded)[:, None], torch.arange(seqlen_k)
        seen = torch.ones(padded, seqlen_k, dtype=torch.bool)
        if c.listed:  # what is not visited is not read
            seen = StandIn.listed(a, c, padded, seqlen_k)
            q, do = (torch.where(seen.any(3)[..., None], x, 0.0) for x in (q, do))
            k, v = (torch.where(seen.any(2)[..., None], x, 0.0) for x in (k, v))
        if c.right:
            seen = seen & (keys <= rows + seqlen_k - seqlen_q + a["window_right"])
        exponent = q @ k.mT * a["exp_scale"] - lse[..., None]
        if c.bias:
            rest = a["lse_rest_desc"].base.view(batch, heads, -1)
            bias = torch.nn.functional.pad(StandIn.bias.float().expand(batch, heads, seqlen_q, seqlen_k), (0, 0, 0, padded - seqlen_q))
            exponent = (q @ k.mT * a["scale"] + bias - lse[..., None]) * a["exp_scale"] - rest[..., None]
        if c.mask:
            seen = seen & torch.nn.functional.pad(StandIn.mask.expand(batch, heads, seqlen_q, seqlen_k), (0, 0, 0, padded - seqlen_q))
        prob = torch.where(seen, torch.exp2(exponent), 0.0)
        kept, dp = prob, do @ v.mT
        if c.dropout:
            assert a["drop_below"] == int(DROPPED * 2**32) - 2**32 and a["seed_ptr"] == StandIn.seed.data_ptr()
            b, h, i = (torch.arange(n).view(-1, *[1] * ones) for n, ones in ((batch, 3), (heads, 2), (padded, 1)))
            keep = keep_mask(StandIn.seed, DROPPED, b, h, i, 0, seqlen_k)
            kept, dp = torch.where(keep, prob, 0.0), torch.where(keep, dp * a["keep_scale"], 0.0)
        ds = prob * (dp - delta[..., None])
        if not (c.bias or c.mask):
            ds = torch.where(prob == 0, 0.0, ds)
        nothing = lse[..., None] == float("inf")
        ours = StandIn.ours(a, c, batch, heads // group)
        if c.bias_gradient == "added":
            StandIn.add_to_bias(a, c, ds, ours)
        if c.bias_gradient == "stored":
            visited = seen.view(batch, heads, -1, c.block_m, seqlen_k) if seen.ndim == 4 else seen.view(1, 1, -1, c.block_m, seqlen_k)
            visited = torch.nn.functional.pad(visited, (0, -seqlen_k % c.block_n)).unflatten(4, (-1, c.block_n)).any(5).any(3)
            visited = visited.repeat_interleave(c.block_m, 2).repeat_interleave(c.block_n, 3)[:, :, :seqlen_q, :seqlen_k]
            target = a["dbias_desc"].base
            target.copy_(torch.where(visited, ds[:, :, :seqlen_q].to(target.dtype), target))
        if not (c.bias or c.mask or c.listed):
            q, do = (torch.where(nothing, 0.0, x) for x in (q, do))

        def of_key_heads(x):
            return x.view(batch, heads // group, group, seqlen_k, -1).sum(2)

        if c.apart:
            StandIn.add_to_keys(a, c, of_key_heads(ds.mT @ q), of_key_heads(kept.mT @ do))
        else:
            for name, x in (("dv", of_key_heads(kept.mT @ do) * a["keep_scale"]), ("dk", of_key_heads(ds.mT @ q) * a["out_scale"])):
                target = a[f"{name}_desc"].base
                target[ours] = x[ours].to(target.dtype)
        ds = torch.where(ours.repeat_interleave(group, 1)[..., None, None], ds, 0.0)
        dq = as_accumulated(c, torch.nn.functional.pad(ds @ k, (0, c.dim - dim)))
        if c.order:  # without turns, rows stay as they were allocated
            taken = (dq != 0).any(1)
            StandIn.turns.copy_(taken[:, None].expand(-1, c.dq_parts).reshape(-1))
            dq = torch.where(taken[:, None], dq, float("nan"))
            a["dq_desc"].base.view_as(dq).copy_(dq)
        else:
            a["dq_desc"].base.view_as(dq).add_(dq)

    @staticmethod
    def ours(a, c, batch, heads_k):
        """(B, Hk), True for the key heads of the batch that a launch works on."""
        ours = torch.ones(batch, heads_k, dtype=torch.bool)
        if c.heads_first or c.bias_gradient == "added":
            item = torch.arange(batch)[:, None] if c.heads_first else torch.arange(heads_k)
            ours &= (item >= a["first_item"]) & (item < a["first_item"] + a["items"])
        assert a["batch_heads"] == ours.sum() * a["sharing"]
        return ours

    @staticmethod
    def add_to_keys(a, c, dk, dv):
        """dK and dV (B, Hk, seqlen_k, columns) to their sums, tile by tile."""
        tiles, parts = a["key_tiles"], []
        for x, columns in ((dk, c.dim), (dv, c.dim_v)):
            x = torch.nn.functional.pad(x, (0, columns - x.shape[3], 0, tiles * c.block_n - x.shape[2]))
            parts.append(x.view(-1, c.block_n * columns)[:, places_of_sums(c, columns)])
        sums = StandIn.made[a["key_sums_ptr"]]
        sums += torch.cat(parts, 1).flatten()

    @staticmethod
    def add_to_bias(a, c, ds, ours):
        """dS (B, Hq, padded, seqlen_k), as the threads hold it, to the sums of the bias's gradient."""
        batch, heads = ds.shape[:2]
        per_head = a["key_tiles"] * a["row_blocks"] * c.block_m * c.block_n
        x = torch.nn.functional.pad(ds, (0, a["key_tiles"] * c.block_n - ds.shape[3]))
        x = x.view(batch, heads, -1, c.block_m // 8, 4, 2, a["key_tiles"], c.block_n // 16, 2, 8)
        x = x.permute(0, 1, 6, 2, 7, 3, 9, 4, 8, 5).reshape(batch, heads, per_head)
        sums = StandIn.made[a["dbias_ptr"]].view(-1, per_head)
        for b, h in np.ndindex(batch, heads):
            if ours[b, h // a["group"]]:
                place = (b * a["stride_dbias_b"] + h * a["stride_dbias_h"]) // per_head
                fresh = a["stores"] and h % a["group"] == 0
                sums[place] = x[b, h] if fresh else sums[place] + x[b, h]

    @staticmethod
    def listed(a, c, padded, seqlen_k):
        """The pairs that the records lead to, (B, Hq, padded, seqlen_k)."""
        lists, group = StandIn.lists, a["group"]
        batch, heads_k = lists.records.shape[:2]
        seen = torch.zeros(batch, heads_k, group, padded, seqlen_k, dtype=torch.bool)
        for b, head_k, rank in np.ndindex(batch, heads_k, a["key_tiles"]):
            tile, _, *fields = lists.records[b, head_k, rank].tolist()
            keys = slice(tile * c.block_n, tile * c.block_n + c.block_n)
            for g in range(group):
                entries = fields[4 * g : 4 * g + 4]
                for count, start, idx in zip(entries[:2], entries[2:], (lists.partial, lists.full), strict=True):
                    for entry in idx.flatten()[start : start + count].tolist():
                        rows = slice(entry * c.block_m << c.log2_list, (entry + 1) * c.block_m << c.log2_list)
                        assert not seen[b, head_k, g, rows, keys].any() and rows.stop <= padded
                        seen[b, head_k, g, rows, keys] = True
        return seen.flatten(1, 2)

    def packed(self, a):
        """Tile by tile, as the records say."""
        c = self.variant
        q, k, v, do = (a[f"{name}_desc"].base.float()[0] for name in ("q", "k", "v", "do"))
        heads, group = q.shape[0], a["group"]
        lse, delta = (a[f"{name}_desc"].base.view(heads, a["row_blocks"], c.block_m) for name in ("lse", "delta"))
        acc = a["dq_desc"].base.view(heads, a["row_blocks"], c.block_m * c.dim)
        for sequence, key, first_q, _rows_q, length_q, first_k, rows_k, length_k in StandIn.tiles.records.tolist():
            end, blocks = min(key + c.block_n, rows_k), -(-length_q // c.block_m)
            if key >= end:
                continue
            at, first_block = slice(first_k + key, first_k + end), first_q // c.block_m + sequence
            ours = torch.zeros(2, heads // group, end - key, max(c.dim, c.dim_v))
            used = max(0, min(end, length_k) - key)
            for h in range(heads if used else 0):
                rows, keys = torch.arange(blocks * c.block_m)[:, None], key + torch.arange(used)
                mine = [torch.zeros(blocks * c.block_m, x.shape[2]) for x in (q, do)]
                for x, source in zip(mine, (q, do), strict=True):
                    x[:length_q] = source[h, first_q : first_q + length_q]
                read = slice(first_block, first_block + blocks)
                k_tile, v_tile = (x[h // group, first_k + key : first_k + key + used] for x in (k, v))
                seen = (keys <= rows + length_k - length_q + a["window_right"]) | (not c.right)
                exponent = mine[0] @ k_tile.mT * a["exp_scale"] - lse[h, read].reshape(-1, 1)
                distance = (rows + length_k - length_q - keys).abs()
                if c.alibi:
                    exponent = exponent - StandIn.slopes[sequence, h] * distance * 1.4426950408889634
                prob = torch.where(seen, torch.exp2(exponent), 0.0)
                ds = prob * (mine[1] @ v_tile.mT - delta[h, read].reshape(-1, 1))
                ours[1, h // group, :used, : v.shape[2]] += prob.mT @ mine[1]
                ours[0, h // group, :used, : k.shape[2]] += ds.mT @ mine[0] * a["out_scale"]
                dq = as_accumulated(c, torch.nn.functional.pad(ds @ k_tile, (0, c.dim - k.shape[2])))
                if c.order:
                    turns = StandIn.turns.view(heads, a["row_blocks"], c.dq_parts)[h, read]
                    dq = torch.where((turns[:, :1] > 0), acc[h, read] + dq, dq)
                    turns += 1
                    acc[h, read] = dq
                else:
                    acc[h, read] += dq
                if c.alibi:
                    StandIn.dslopes[0, h, first_k + key] = -(ds * distance)[:length_q].sum()
            for name, x in (("dk", ours[0]), ("dv", ours[1])):
                target = a[f"{name}_desc"].base[0]
                x = x[..., : target.shape[2]].to(target.dtype)
                target[:, at] = x if key + c.block_n <= rows_k else target[:, at] + x


DROPPED = 0.6
CASES = {
    "d64 full": {},
    "d64 causal, fewer keys": {"seqlen_q": 300, "seqlen_k": 70, "right": 0},
    "d40, grouped, ordered": {"dim": 40, "kv_heads": 2, "right": 0, "ordered": True},
    "d128/72, strided dout": {"dim": 128, "dim_v": 72, "dout": "expanded"},
    "d256, ordered, sink": {"dim": 256, "seqlen_q": 200, "seqlen_k": 100, "right": 0, "ordered": True, "sink": True},
    "d200 dlse only": {"dim": 200, "dout": "none"},
    "d64 dropout, grouped": {"kv_heads": 2, "right": 0, "dropout": True},
    "d64 tiles apart": {"kv_heads": 2, "right": 0, "apart": True, "seqlen_k": 300},
    "d128/72 tiles apart, dropout, strided dk and dv": {
        "dim": 128,
        "dim_v": 72,
        "kv_heads": 1,
        "apart": True,
        "dropout": True,
        "strided": True,
        "right": 0,
    },
    "d200/40 tiles apart, sink": {"dim": 200, "dim_v": 40, "kv_heads": 2, "apart": True, "sink": True, "right": 0},
    "d72/256 tiles apart, dv alone": {"dim": 72, "dim_v": 256, "kv_heads": 2, "apart": True, "without": "k", "right": 0},
    "d64 tiles apart, dk alone": {"kv_heads": 2, "apart": True, "without": "v", "right": 0},
    "d64 tiles that are not apart: ordered": {"kv_heads": 2, "right": 0, "apart": True, "ordered": True},
}
# Beside NaN in a key that nobody sees, in the last query, which sees nothing, and in what reaches its output.
TENSORS = {
    "bias": {"bias": (2, 4, 70, 130), "right": 0},
    "bias over heads, grouped, ordered": {"bias": (2, 1, 70, 130), "kv_heads": 2, "ordered": True},
    "bias over all, sink": {"bias": (1, 1, 70, 130), "sink": True, "kv_heads": 2},
    "bias of its own": {"bias": (2, 4, 70, 136), "seqlen_k": 136, "half": True, "ordered": True},
    "bias of its own, causal": {"bias": (2, 4, 200, 136), "seqlen_q": 200, "seqlen_k": 136, "half": True, "right": 0},
    "bias over the batch": {"bias": (1, 4, 70, 130)},
    "bias over the batch, keys that rows of 16 bytes hold": {"bias": (1, 4, 70, 136), "seqlen_k": 136},
    "bias over heads": {"bias": (2, 1, 300, 130), "kv_heads": 2, "seqlen_q": 300},
    "bias over the batch, causal": {"bias": (1, 4, 300, 300), "seqlen_q": 300, "seqlen_k": 300, "right": 0},
    "low bias": {"bias": (1, 4, 70, 130), "low": True},
    "mask": {"mask": (2, 4, 70, 130), "dim": 128},
    "bias and mask": {"bias": (1, 4, 70, 130), "mask": (2, 1, 70, 130), "right": 0},
}


# Beside NaN in a block of keys that nobody sees, in a block of queries that sees nothing, and in what reaches its output.
LISTS = {
    "lists": {"blocks": (1, 1), "seqlen_q": 300, "seqlen_k": 400},
    "lists of heads, grouped, sink": {
        "blocks": (2, 4),
        "seqlen_q": 384,
        "seqlen_k": 640,
        "kv_heads": 2,
        "dim": 128,
        "sink": True,
        "right": 0,
    },
    "lists of 256 queries": {"blocks": (1, 4), "list": (256, 128), "seqlen_q": 300, "seqlen_k": 400, "dim": 40, "kv_heads": 2},
    "lists, the diagonal unknown to them, d256": {"blocks": (1, 1), "seqlen_q": 256, "seqlen_k": 256, "dim": 256, "right": 0, "late": True},
}


@pytest.mark.parametrize("name", [*CASES, *TENSORS, *LISTS])
def test_gradients_with_the_large_kernel_replaced(name, monkeypatch):
    case = {"dim": 64, "dim_v": 0, "kv_heads": 4, "seqlen_q": 70, "seqlen_k": 130, "right": -1, "ordered": False, "sink": False, "dout": ""}
    case |= {"dropout": False, "half": False, "apart": False, "strided": False, "without": ""} | (CASES | TENSORS | LISTS)[name]
    if case["apart"]:
        monkeypatch.setattr(backward_launch, "APART_FROM", 70)
    inputs = helpers.make_inputs(
        2, case["seqlen_q"], case["seqlen_k"], 4, case["kv_heads"], case["dim"], case["dim_v"] or case["dim"], dtype=torch.float16
    )
    inputs |= {"causal": case["right"] == 0}
    if case["sink"]:
        inputs["learnable_sink"] = torch.randn(4)
    StandIn.seed = torch.tensor(-5)
    if case["dropout"]:
        inputs |= {"dropout_p": DROPPED, "dropout_seed": StandIn.seed}
    hidden = torch.zeros(case["seqlen_q"], case["seqlen_k"], dtype=torch.bool)
    hidden[:, 17] = hidden[-1] = True
    if "bias" in case:
        low = -2e4 if case.get("low") else 0.0
        inputs["bias"] = (torch.randn(case["bias"]) + low).masked_fill_(hidden, float("-inf")).to(torch.float16 if case["half"] else None)
    if "mask" in case:
        inputs["mask"] = (torch.rand(case["mask"]) < 0.7) & ~hidden
    blocks: TileLists | None = None
    if "blocks" in case:
        size = case.get("list", (128, 128))
        bits = torch.rand(*case["blocks"], -(-case["seqlen_q"] // size[0]), -(-case["seqlen_k"] // size[1])) < 0.7
        bits[..., 1], bits[..., -1, :], bits[..., 0, 0] = False, False, True
        rule = masks.Blocks(bits, size)
        inputs["mask"] = rule
        listed = rule & masks.Causal() if case["right"] == 0 and not case.get("late") else rule
        blocks = BlockMask(listed, case["seqlen_q"], case["seqlen_k"], block_size=size).lists
    out, lse = reference.attention(**inputs)
    dout, dlse = torch.randn(out.shape).half(), torch.randn(lse.shape)
    if case["dout"] == "expanded":
        dout = torch.randn(1, 1, 1, 1).half().expand(out.shape)
    if case["dout"] == "none":
        dout = torch.zeros_like(dout)
    exact = helpers.reference_with_grads(inputs, dout, dlse)

    if blocks is not None:
        first = (out.shape[1] - 1) // size[0] * size[0]
        inputs["q"][:, first:] = dout[:, first:] = inputs["k"][:, size[1] : 2 * size[1]] = inputs["v"][:, size[1] : 2 * size[1]] = float(
            "nan"
        )
    if name in TENSORS:
        inputs["q"][:, -1] = dout[:, -1] = inputs["k"][:, 17] = inputs["v"][:, 17] = float("nan")
    heads_first = {n: inputs[n].transpose(1, 2) for n in "qkv"}
    StandIn.bias, StandIn.mask = inputs.get("bias"), None if blocks else inputs.get("mask")
    sink, seed = inputs.get("learnable_sink"), StandIn.seed
    t = Operands(*heads_first.values(), StandIn.bias, StandIn.mask, sink=sink, dropout_seed=seed, blocks=blocks)
    dropout_p = DROPPED * case["dropout"]
    r = Rules(case["dim"] ** -0.5, window_right=case["right"], dropout_p=dropout_p, deterministic=case["ordered"])
    monkeypatch.setattr(backward_launch, "multiprocessors", lambda _: 3)

    def program_for(t, r, slope_gradient, bias_gradient):
        own = StandIn.bias is not None and StandIn.bias.shape[:2] == (2, 4)
        expected = "" if StandIn.bias is None else "stored" if own and case["half"] else "added" if not (own or case["ordered"]) else ""
        assert bias_gradient == expected
        variant = backward_launch.variant_of(t, r, slope_gradient, bias_gradient)
        assert variant.apart == (case["apart"] and not case["ordered"])
        return backward_launch.BackwardProgram(variant, 0, StandIn(variant))

    monkeypatch.setattr(backward_launch, "program_for", program_for)
    new_empty, StandIn.made = torch.Tensor.new_empty, {}

    def remember_turns(x, *size, dtype=None, **options):
        made = new_empty(x, *size, dtype=dtype, **options)
        if dtype == torch.int32:
            StandIn.turns = made
        StandIn.made[made.data_ptr()] = made
        return made.fill_(float("nan")) if dtype == torch.float32 else made

    def remember_lists(*given):
        StandIn.lists = of_keys(*given)
        return StandIn.lists

    of_keys = backward_launch.Lists.of_keys
    monkeypatch.setattr(backward_launch.Lists, "of_keys", remember_lists)
    monkeypatch.setattr(torch.Tensor, "new_empty", remember_turns)
    grads = {n: torch.full_like(x, float("nan")) for n, x in heads_first.items()}
    if case["strided"]:
        grads["k"] = grads["k"].repeat_interleave(2, 3)[..., ::2]
        grads["v"] = grads["v"].repeat_interleave(2, 2)[:, :, ::2]
    if case["without"]:
        del grads[case["without"]]
    dsink = torch.full((4,), float("nan")) if case["sink"] else None
    dbias = None if StandIn.bias is None else torch.full_like(StandIn.bias, float("nan"))
    with np.errstate(all="ignore"):
        backward_launch.launch(
            t,
            r,
            Saved(out.half().transpose(1, 2), lse.float()),
            Cotangents(None if case["dout"] == "none" else dout.transpose(1, 2), dlse),
            Gradients(grads["q"], grads.get("k"), grads.get("v"), dbias=dbias, dsink=dsink),
        )
    for n, got in grads.items():
        want = exact.grads[n].transpose(1, 2)
        # The saved output is rounded to float16, and so is the result.
        assert (got - want).norm() <= 4e-3 * want.norm() + 1e-3, n
    if dbias is not None:
        assert (dbias - exact.grads["bias"]).norm() <= 4e-3 * exact.grads["bias"].norm()
    if case["sink"]:
        assert (dsink - exact.grads["learnable_sink"]).norm() <= 4e-3 * exact.grads["learnable_sink"].norm()


@pytest.mark.parametrize("heads", [2, 4], ids=["a key head", "a query head"])
@pytest.mark.parametrize("keys", [True, False], ids=["keys", "queries"])
def test_copies_keep_what_somebody_sees(keys, heads):
    """Rows that are not finite are cleared where window, lengths, bias and mask together hide them from all who read a head."""
    heads = heads if keys else 4
    q, k = torch.randn(2, 4, 70, 8).half(), torch.randn(2, 2, 130, 8).half()
    wild = torch.rand(*(k if keys else q).shape[:3]) < 0.5
    x = (k if keys else q).masked_fill(wild[..., None], float("nan"))
    bias = torch.randn(1, 4, 70, 130).masked_fill(torch.rand(1, 4, 70, 130) < 0.9, float("-inf"))
    mask = torch.rand(2, 1, 70, 130) < 0.3
    lengths_q, lengths_k = torch.tensor([70, 33], dtype=torch.int32), torch.tensor([90, 130], dtype=torch.int32)
    t = Operands(q, k, k, bias, mask, seqused_q=lengths_q, seqused_k=lengths_k)
    copy = finite_copy(x, t, Rules(1.0, window_left=60, window_right=3), keys=keys, heads=heads)
    rows, columns = torch.arange(70)[:, None], torch.arange(130)
    position = rows + (lengths_k - lengths_q).view(2, 1, 1, 1)
    seen = (bias != float("-inf")) & mask & (columns >= position - 60) & (columns <= position + 3)
    seen = seen & (rows < lengths_q.view(2, 1, 1, 1)) & (columns < lengths_k.view(2, 1, 1, 1))
    read = seen.view(2, heads, 4 // heads, 70, 130).any(2).any(2) if keys else seen.any(3)
    wild, x = (y.repeat_interleave(heads // y.shape[1], 1) for y in (wild, x))
    expected = torch.where((wild & ~read)[..., None], 0.0, x)
    assert read[wild].any() and not read[wild].all()
    assert torch.equal(copy.nan_to_num(7.0), expected.nan_to_num(7.0))


PACKED = {
    "d64 causal": {"causal": True},
    "d40, grouped, ordered, lengths": {"dim": 40, "kv_heads": 2, "causal": True, "ordered": True, "lengths": True},
    "d256, sink, slopes of sequences": {"dim": 256, "sink": True, "slopes": True},
    "offsets that decrease": {"cu": ([0, 90, 60, 95, 300], [0, 40, 41, 20, 100])},
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences_with_the_large_kernel_replaced(name, monkeypatch):
    """Sequences of every relation to a tile, empty ones, and rows of none, which may hold anything."""
    case = {"dim": 64, "kv_heads": 4, "causal": False, "ordered": False, "lengths": False, "sink": False, "slopes": False} | PACKED[name]
    cu_q, cu_k = case.get("cu", ([3, 3 + 70, 73, 73 + 128, 202], [5, 135, 140, 140, 140 + 129]))
    cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32) for cu in (cu_q, cu_k))
    total_q, total_k = 210, 280
    inputs = {
        x: torch.randn(total, heads, case["dim"]).half()
        for x, total, heads in (("q", total_q, 4), ("k", total_k, case["kv_heads"]), ("v", total_k, case["kv_heads"]))
    }
    if case["sink"]:
        inputs["learnable_sink"] = torch.randn(4)
    if case["slopes"]:
        inputs["alibi_slopes"] = torch.rand(4, 4) * 0.1
    options = {"causal": case["causal"], "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    if case["lengths"]:
        options |= {f"seqused_{x}": torch.tensor(used, dtype=torch.int32) for x, used in (("q", [70, 0, 60, 1]), ("k", [129, 5, 0, 64]))}

    def full(**given):
        result = reference.attention_varlen_full(**given, **options)
        return result.out, result.lse

    out, lse = full(**inputs)
    dout, dlse = torch.randn(out.shape).half(), torch.randn(lse.shape)
    exact = helpers.run_on_leaves(full, inputs, dout, dlse, lambda x: x.detach().double().requires_grad_())

    heads_first = {n: inputs[n].transpose(0, 1)[None] for n in "qkv"}
    t = Operands(
        *heads_first.values(), alibi_slopes=inputs.get("alibi_slopes"), sink=inputs.get("learnable_sink"),
        seqused_q=options.get("seqused_q"), seqused_k=options.get("seqused_k"), cu_seqlens_q=cu_q, cu_seqlens_k=cu_k,
    )  # fmt: skip
    r = Rules(case["dim"] ** -0.5, window_right=0 if case["causal"] else -1, deterministic=case["ordered"])
    variant = backward_launch.variant_of(t, r, case["slopes"])
    monkeypatch.setattr(backward_launch, "multiprocessors", lambda _: 3)
    monkeypatch.setattr(backward_launch, "program_for", lambda *_: backward_launch.BackwardProgram(variant, 0, StandIn(variant)))
    StandIn.slopes = inputs.get("alibi_slopes")
    scheduled, new_empty, new_zeros = packed_kernels.scheduled, torch.Tensor.new_empty, torch.Tensor.new_zeros

    def remember(found, name):
        setattr(StandIn, name, found)
        return found

    def remember_records(*given, **named):
        tiles, sequences = scheduled(*given, **named)
        return remember(tiles, "tiles") and (tiles, sequences)

    def poisoned(x, *size, dtype=None, **more):
        made = new_empty(x, *size, dtype=dtype, **more)
        return remember(made.fill_(-7), "turns") if dtype == torch.int32 else made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(packed_kernels, "scheduled", remember_records)
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    monkeypatch.setattr(torch.Tensor, "new_zeros", lambda *given, **named: remember(new_zeros(*given, **named), "dslopes"))
    grads = {n: torch.full_like(x, float("nan")) for n, x in heads_first.items()}
    others = {n: torch.full_like(inputs[n], float("nan")) for n in ("learnable_sink", "alibi_slopes") if n in inputs}
    with np.errstate(all="ignore"):
        backward_launch.launch(
            t,
            r,
            Saved(out.half().transpose(0, 1)[None], lse.float().contiguous()[None]),
            Cotangents(dout.transpose(0, 1)[None], dlse[None]),
            Gradients(*grads.values(), dsink=others.get("learnable_sink"), dalibi_slopes=others.get("alibi_slopes")),
        )
    got = {n: x[0].transpose(0, 1) for n, x in grads.items()} | others
    for n, x in got.items():
        want = exact.grads[n]
        # The saved output is rounded to float16, and so is the result.
        assert (x - want).norm() <= 4e-3 * want.norm() + 1e-3, n
        assert n not in "qkv" or (x == 0)[want == 0].all()
