"""Faults of decoding over caches, and of packed sequences, that users of other libraries reported in public.

An id says what went wrong and where it was reported. What is right is written here, one query at a time in plain float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tilewise import masks
from tilewise.compat import flash_attn, flash_attn_interface

from .public_faults import I32, definition, qkv, wide

CACHES: dict[str, Callable[[], dict[str, Any]]] = {}


def case(name: str) -> Callable[[Any], Any]:
    return lambda build: CACHES.setdefault(name, build)


def turned(x: Tensor, position: int, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x (H, D) with its first R dims turned by the angles of a position."""
    half = cos.shape[1]
    a, b = (x[:, 0 : 2 * half : 2], x[:, 1 : 2 * half : 2]) if interleaved else (x[:, :half], x[:, half : 2 * half])
    c, s = cos[position], sin[position]
    first, second = a * c - b * s, a * s + b * c
    pairs = torch.stack([first, second], 2).flatten(1) if interleaved else torch.cat([first, second], 1)
    return torch.cat([pairs, x[:, 2 * half :]], 1)


def answer(a: dict[str, Any], rule: Callable[[int, Tensor], Tensor] | None) -> tuple[Tensor, Tensor]:
    """(out (B, Sq, Hq, Dv), lse (B, Hq, Sq)) of `attention_with_kvcache(**a)`; `rule(p, j)` says what a mask shows."""
    q, rows = a["q"], a.get("cache_batch_idx")
    batch, num_queries, heads, dim = q.shape
    outs, lses = [], []
    for b in range(batch):
        table = a.get("page_table")
        keys, values = (
            x[table[b].long().clamp(0, x.shape[0] - 1)].flatten(0, 1) if table is not None else x[b if rows is None else int(rows[b])]
            for x in (a["k_cache"], a["v_cache"])
        )
        keys, values = keys.clone(), values.clone()
        length = keys.shape[0] if "cache_seqlens" not in a else int(a["cache_seqlens"][b])
        for n in range(a["k"].shape[1] if "k" in a else 0):
            new = a["k"][b, n]
            keys[length] = turned(new, length, a["rotary_cos"], a["rotary_sin"], a["rotary_interleaved"]) if "rotary_cos" in a else new
            values[length] = a["v"][b, n]
            length += 1
        group = heads // keys.shape[1]
        j = torch.arange(keys.shape[0])
        for i in range(num_queries):
            p = i + length - num_queries
            x = q[b, i]
            if "rotary_cos" in a:
                x = turned(x, max(p, 0), a["rotary_cos"], a["rotary_sin"], a["rotary_interleaved"])
            seen = (j >= (int(a["cache_leftpad"][b]) if "cache_leftpad" in a else 0)) & (j < length)
            left, right = a.get("window_size", (-1, -1))
            right = 0 if a.get("causal") else right
            seen = seen & ((j >= p - left) | (left < 0)) & ((j <= p + right) | (right < 0))
            seen = seen & rule(p, j) if rule is not None else seen
            k, v = (t[seen].repeat_interleave(group, 1) for t in (keys, values))
            scores = torch.einsum("hd,jhd->hj", x, k) / math.sqrt(dim)
            if a.get("softcap"):
                scores = a["softcap"] * torch.tanh(scores / a["softcap"])
            if "alibi_slopes" in a:
                scores = scores - a["alibi_slopes"][:, None] * (p - j[seen]).abs()
            sink = a["learnable_sink"][:, None] if "learnable_sink" in a else scores.new_full((heads, 1), -math.inf)
            lse = torch.logsumexp(torch.cat([scores, sink], 1), 1)
            weights = torch.where(lse[:, None] == -math.inf, 0.0, torch.exp(scores - lse[:, None]))
            outs.append(torch.einsum("hj,jhd->hd", weights, v))
            lses.append(lse)
    return torch.stack(outs).view(batch, num_queries, heads, -1), torch.stack(lses).view(batch, num_queries, heads).mT


def cache(batch: int = 2, seqlen_q: int = 1, capacity: int = 16, *, new: int = 0, dim: int = 8, rows: int | None = None) -> dict[str, Any]:
    shape = rows or batch, capacity, 2, dim
    made = {"q": wide(batch, seqlen_q, 4, dim), "k_cache": wide(*shape), "v_cache": wide(*shape)}
    made |= {"k": wide(batch, new, 2, dim), "v": wide(batch, new, 2, dim)} if new else {}
    return made | {"cache_seqlens": torch.tensor([3, 7, 5, 0][:batch], dtype=I32)}


def angles(positions: int, columns: int) -> dict[str, Tensor]:
    angle = torch.outer(torch.arange(positions, dtype=torch.float64), torch.linspace(1.0, 0.1, columns, dtype=torch.float64))
    return {"rotary_cos": angle.cos(), "rotary_sin": angle.sin()}


for _interleaved in (True, False):

    @case(f"six rotary dims of ten, interleaved={_interleaved} (Dao-AILab/flash-attention#817)")
    def _(interleaved: bool = _interleaved) -> dict[str, Any]:
        return cache(new=1, dim=10) | angles(16, 3) | {"rotary_interleaved": interleaved, "causal": True}

    @case(f"two new tokens turned by places of their own, interleaved={_interleaved} (Dao-AILab/flash-attention#1402)")
    def _(interleaved: bool = _interleaved) -> dict[str, Any]:
        return cache(4, 2, new=2) | angles(16, 4) | {"rotary_interleaved": interleaved, "causal": True}


@case("left padding beside a window (Dao-AILab/flash-attention#1788)")
def _() -> dict[str, Any]:
    return cache(new=1) | {"cache_leftpad": torch.tensor([1, 4], dtype=I32), "window_size": (3, 0)}


@case("left padding of everything and beyond (Dao-AILab/flash-attention#1788)")
def _() -> dict[str, Any]:
    return cache() | {"cache_leftpad": torch.tensor([3, 9], dtype=I32)}


@case("several queries behind a cache that is not empty (sgl-project/sgl-kernel-xpu#196)")
def _() -> dict[str, Any]:
    return cache(4, 5, new=5) | {"causal": True}


@case("more queries than keys (vllm-project/vllm#15113)")
def _() -> dict[str, Any]:
    return cache(4, 6) | {"causal": True}


@case("rows of a larger cache (Dao-AILab/flash-attention#772)")
def _() -> dict[str, Any]:
    return cache(4, 3, new=3, rows=6) | {"cache_batch_idx": torch.tensor([1, 2, 3, 4], dtype=I32), "causal": True}


@case("pages of one token at high numbers (flashinfer-ai/flashinfer#3130)")
def _() -> dict[str, Any]:
    arguments = cache(2, 1, 1, rows=3000, dim=2)
    return arguments | {"page_table": torch.randint(2900, 3000, (2, 9), dtype=I32)}


@case("pages of three tokens, the last in part (AtomaAI/atoma-infer#52)")
def _() -> dict[str, Any]:
    return cache(4, 2, 3, rows=20, new=1) | {"page_table": torch.randperm(20)[:16].to(I32).view(4, 4), "causal": True}


@case("numbers of pages that are not read are none (vllm-project/vllm#30887)")
def _() -> dict[str, Any]:
    table = torch.tensor([[2, -1, -1, 7777], [0, 1, 3, -5]], dtype=I32)
    return cache(2, 1, 3, rows=4) | {"page_table": table}


@case("a sink counted once by splits of which some are empty (ROCm/rocm-libraries#12227)")
def _() -> dict[str, Any]:
    arguments = cache(4, 1, 64) | {"cache_seqlens": torch.tensor([64, 40, 9, 0], dtype=I32), "num_splits": 4, "softcap": 2.0}
    return arguments | {"cache_leftpad": torch.tensor([50, 0, 9, 0], dtype=I32), "learnable_sink": wide(4) * 3}


@case("slopes measure from the newest token (Dao-AILab/flash-attention#907)")
def _() -> dict[str, Any]:
    return cache(4, 2, new=1) | {"alibi_slopes": wide(4).abs()}


@case("heads before tokens in memory (casper-hansen/AutoAWQ#208)")
def _() -> dict[str, Any]:
    arguments = cache(new=2)
    return arguments | {name: arguments[name].transpose(1, 2).contiguous().transpose(1, 2) for name in ("k_cache", "v_cache")}


@case("slices of one tensor of keys and values (Dao-AILab/flash-attention#862)")
def _() -> dict[str, Any]:
    both = wide(2, 2, 16, 2, 8)
    return cache(new=1) | {"k_cache": both[:, 0], "v_cache": both[:, 1]}


@case("values that are the first dims of the keys, an item without keys (flashinfer-ai/flashinfer#4975)")
def _() -> dict[str, Any]:
    arguments = cache(4)
    return arguments | {"v_cache": arguments["k_cache"][..., :6]}


@case("a rule of places (apache/tvm#17049)")
def _() -> dict[str, Any]:
    return cache(4, 3) | {"mask": masks.Custom(lambda b, h, p, j: (p - j) % 3 != 1)}


@pytest.mark.parametrize("name", CACHES)
def test_caches(name: str) -> None:
    arguments = CACHES[name]()
    rule = (lambda p, j: (p - j) % 3 != 1) if "mask" in arguments else None
    want = answer(arguments, rule)
    before = {n: arguments[n].clone() for n in ("k_cache", "v_cache")}
    out, aux = tilewise.attention_with_kvcache(**arguments, return_aux="lse", batch_invariant="num_splits" not in arguments)
    torch.testing.assert_close((out, aux.lse), want, rtol=1e-9, atol=1e-10)
    written = arguments["k"].shape[:2].numel() if "k" in arguments else 0
    for n, x in before.items():
        assert ((arguments[n] != x).flatten(2).any(2)).sum() == written


# ---------------------------------------------------------------------------------------------------------------- what hides


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("report", ["vllm-project/vllm#30887", "vllm-project/vllm#29998"])
def test_pages_that_no_window_reaches_may_hold_anything(report: str, poison: float) -> None:
    arguments = cache(2, 1, 4, rows=8) | {"page_table": torch.arange(8, dtype=I32).view(2, 4), "window_size": (2, 0)}
    arguments["cache_seqlens"] = torch.tensor([13, 16], dtype=I32)
    want = answer(arguments, None)
    for x in (arguments["k_cache"], arguments["v_cache"]):
        x[:2], x[4:6], x[3, 1:] = poison, poison, poison
    out, aux = tilewise.attention_with_kvcache(**arguments, return_aux="lse")
    torch.testing.assert_close((out, aux.lse), want, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("report", ["ml-explore/mlx#3452 sinks", "mistralai/mistral-inference#60 windows"])
def test_one_query_alone_is_the_last_of_many(report: str) -> None:
    x = qkv(2, 34, kv_heads=2)
    rules = {"learnable_sink": wide(4)} if "sinks" in report else {"window_size": (5, 0)}
    whole = tilewise.attention(**x, causal=True, **rules)[:, -1:]
    alone = tilewise.attention(x["q"][:, -1:], x["k"], x["v"], causal=True, **rules)
    cached = tilewise.attention_with_kvcache(x["q"][:, -1:], x["k"], x["v"], causal=True, **rules)
    torch.testing.assert_close(alone, whole, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(cached, whole, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("module", [flash_attn, flash_attn_interface])
def test_what_is_written_for_one_place_lies_in_no_other(module: Any) -> None:
    """An expanded cache would hold the last item's keys for all; a length may be NumPy's."""
    numpy = pytest.importorskip("numpy")
    arguments = cache(new=1)
    expanded = arguments | {"k_cache": arguments["k_cache"][:1].expand(2, -1, -1, -1)}
    with pytest.raises(ValueError, match=r"k_cache of shape .* is expanded .* memory of its own"):
        module.flash_attn_with_kvcache(**expanded)
    with pytest.raises(TypeError, match=r"cache_seqlens is of type list; it must be an int32 tensor .* or one int"):
        module.flash_attn_with_kvcache(**arguments | {"cache_seqlens": [3, 7]})
    got = module.flash_attn_with_kvcache(**arguments | {"cache_seqlens": numpy.int64(4)})
    torch.testing.assert_close(got, answer(arguments | {"cache_seqlens": torch.tensor([4, 4])}, None)[0], rtol=1e-9, atol=1e-10)


# -------------------------------------------------------------------------------------------------------------------- packed

CU = torch.tensor([0, 5, 5, 6, 18], dtype=I32)


def packed() -> dict[str, Any]:
    return {name: x[0] for name, x in qkv(1, 20).items()} | {"cu_seqlens_q": CU, "cu_seqlens_k": CU}


def each_alone(x: dict[str, Any], **rules: Any) -> Tensor:
    """Sequence by sequence; the two rows that no sequence has are 0."""
    out = torch.zeros(x["q"].shape, dtype=torch.float64)
    for start, stop in zip(CU[:-1].tolist(), CU[1:].tolist(), strict=True):
        part = {name: x[name][None, start:stop] for name in "qkv"}
        length = stop - start
        distance = torch.arange(length)[:, None] - torch.arange(length)
        visible = (distance >= 0) & (distance <= rules.get("left", length)) & (torch.arange(length) < rules.get("used", length))
        if length:
            more = {name: value for name, value in rules.items() if name not in ("left", "used")}
            out[start:stop] = definition(**part, visible=visible, **more)[0][0]
    return out


def nested(x: dict[str, Any]) -> list[Tensor]:
    offsets = CU.long()
    return [torch.nested.nested_tensor_from_jagged(x[name], offsets) for name in "qkv"]


PACKED: dict[str, Callable[[dict[str, Any]], tuple[Tensor, Tensor]]] = {
    "positional arguments behind the bounds (Dao-AILab/flash-attention#1040)": lambda x: (
        flash_attn.flash_attn_varlen_qkvpacked_func(
            torch.stack([x["q"], x["k"], x["v"]], 1), CU, 12, 0.0, 0.7, True, (3, -1), 2.0, None, False, False
        ),
        each_alone(x, softmax_scale=0.7, left=3, softcap=2.0),
    ),
    "bounds that are 0-d tensors (huggingface/transformers#48353)": lambda x: (
        flash_attn.flash_attn_varlen_func(*x.values(), torch.tensor(12), torch.tensor(12), causal=True), each_alone(x),
    ),
    "bounds that are NumPy's (huggingface/transformers#48353)": lambda x: (
        flash_attn.flash_attn_varlen_func(*x.values(), *pytest.importorskip("numpy").array([12, 12], "int32"), causal=True), each_alone(x),
    ),
    "windows with None for no limit (Dao-AILab/flash-attention#2251)": lambda x: (
        flash_attn_interface.flash_attn_varlen_func(*x.values(), causal=True, window_size=(2, None)), each_alone(x, left=2),
    ),
    "windows that say infinity by a large number (vllm-project/vllm#29065)": lambda x: (
        tilewise.attention_varlen(*x.values(), causal=True, window_size=(2**63 - 1, 2**63 - 1)), each_alone(x),
    ),
    "gaps between the keys of sequences (facebookresearch/xformers#1108)": lambda x: (
        tilewise.attention_varlen(*x.values(), mask=masks.Causal(align="top_left"), seqused_k=torch.tensor([2, 0, 1, 2], dtype=I32)),
        torch.cat([each_alone(x, used=2)[:5], each_alone(x)[5:6], each_alone(x, used=2)[6:]]),
    ),
    "a nested tensor is isolated sequences (pytorch/pytorch#177378)": lambda x: (
        tilewise.attention(*nested(x), causal=True).values(), each_alone(x),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PACKED)
def test_packed(name: str) -> None:
    x = packed()
    if "nested" in name:
        x = {n: t[:18] if n in "qkv" else t for n, t in x.items()}
    got, want = PACKED[name](x)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("report", ["Dao-AILab/flash-attention#1661"])
def test_boundaries_that_decrease_mean_the_same_everywhere(report: str) -> None:
    """Searched as if they were sorted, they would number the documents by chance."""
    x, offsets = qkv(1, 12), torch.tensor([0, 7, 3, 9, 12], dtype=I32)
    rule = masks.Document.from_cu_seqlens(offsets, 12)
    number = torch.tensor([0] * 7 + [2] * 2 + [3] * 3)
    want = definition(**x, visible=number[:, None] == number)[0]
    packed_out = tilewise.attention_varlen(*(t[0] for t in x.values()), offsets, offsets)
    for out in (
        tilewise.attention(**x, mask=rule),
        tilewise.attention(**x, mask=tilewise.BlockMask(rule, 12, block_size=16)),
        tilewise.attention(**x, mask=rule, backend="reference"),
        packed_out[None],
    ):
        torch.testing.assert_close(out, want, rtol=1e-9, atol=1e-10)
