"""Which packed calls and which calls with lists of blocks the Hopper kernels take, and what they say of the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tilewise import masks, plan
from tilewise.block_mask import BlockMask
from tilewise.kernels import hopper
from tilewise.kernels.hopper import backward_launch
from tilewise.plan import Operands, Request, Rules, Target

H200 = Target("cuda", (9, 0), "NVIDIA H200")
BITS = torch.eye(8, dtype=torch.bool)[None, None]


def meta(seqlen: int = 1024, heads: int = 2, head_dim: int = 128) -> torch.Tensor:
    return torch.empty(1, heads, seqlen, head_dim, dtype=torch.bfloat16, device="meta")


def packed(**changes: Any) -> tuple[Operands, Rules]:
    offsets = torch.empty(17, dtype=torch.int32, device="meta")
    return replace(Operands(meta(), meta(), meta(), cu_seqlens_q=offsets, cu_seqlens_k=offsets), **changes), Rules(0.1, window_right=0)


def listed(rule: masks.Mask, block_size: int | tuple[int, int] = 128, seqlen_q: int = 1024, **changes: Any) -> tuple[Operands, Rules]:
    mask = BlockMask(rule, seqlen_q, 1024, block_size=block_size)
    left, right, text, captured, dense = mask.lowered
    operands = Operands(meta(seqlen_q), meta(), meta(), mask=dense, captured=tuple(captured), blocks=mask.lists)
    return replace(operands, **changes), Rules(0.1, window_left=left, window_right=right, mask_mod=text)


TAKEN = {
    "packed": lambda: packed(),
    "packed, lengths": lambda: packed(seqused_q=torch.empty(16), seqused_k=torch.empty(16)),
    "blocks": lambda: listed(masks.Blocks(BITS, 128)),
    "blocks in halves": lambda: listed(masks.Blocks(BITS[..., :4, :4], 256), 128),
    "blocks of 256": lambda: listed(masks.Blocks(BITS[..., :4, :4], 256), 256),
    "causal blocks": lambda: listed(masks.Blocks(BITS, 128) & masks.Causal()),
    "causal blocks, fewer queries": lambda: listed(masks.Blocks(BITS[..., :6, :], 128) & masks.Causal(), seqlen_q=768),
}
DECLINED = {
    "no key": (lambda: packed(k=meta(0), v=meta(0)), "need a key"),
    "small blocks": (lambda: listed(masks.Blocks(torch.ones(1, 1, 16, 16, dtype=torch.bool), 64), 64), "128"),
    "blocks inside a tile": (lambda: listed(masks.Blocks(torch.ones(1, 1, 16, 16, dtype=torch.bool), 64)), "mask functions"),
    "another rule": (lambda: listed(masks.Blocks(BITS, 128) & masks.Chunked(100)), "mask functions"),
    "a rule beside it": (lambda: listed(masks.Blocks(BITS, 128) | masks.FirstKeys(4)), "mask functions"),
    "two lists": (lambda: listed(masks.Blocks(BITS, 128) & masks.Blocks(BITS, 128)), "mask functions"),
    "lengths": (lambda: listed(masks.Blocks(BITS, 128), seqused_k=torch.empty(1)), "seqused"),
    "a window": (lambda: listed(masks.Blocks(BITS, 128) & masks.SlidingWindow(100, 0)), "windows"),
    "a diagonal that cuts tiles": (lambda: listed(masks.Blocks(BITS, 128) & masks.Causal(), seqlen_q=1000), "multiple"),
    "a diagonal in large blocks": (lambda: listed(masks.Blocks(BITS[..., :4, :4], 256) & masks.Causal(), 256), "diagonal"),
    "a mask tensor": (
        lambda: listed(masks.Dense(torch.ones(1024, 1024, dtype=torch.bool)) & masks.Blocks(BITS, 128)),
        "mask beside listed",
    ),
}


@pytest.mark.parametrize("name", TAKEN)
def test_taken(name):
    t, r = TAKEN[name]()
    assert hopper.why_not(t, r, Request(), H200) is None
    assert "tiles of 128 x 128" in hopper.describe(t, r, Request(), H200)


@pytest.mark.parametrize("name", DECLINED)
def test_declined(name):
    make, words = DECLINED[name]
    t, r = make()
    assert words in hopper.why_not(t, r, Request(), H200)
    assert plan.select(t, r, target=H200).backend == "triton"


BACKWARD = Request(backward=True, needs=frozenset("qkv"))


@pytest.mark.parametrize("name", TAKEN)
def test_gradients_taken(name):
    t, r = TAKEN[name]()
    assert hopper.why_not(t, r, BACKWARD, H200) is None
    assert "tiles of 64 x 128" in hopper.describe(t, r, BACKWARD, H200)
    assert plan.select(t, r, "hopper", request=BACKWARD, target=H200).backend == "hopper"


GRADIENTS_DECLINED = {
    "a fixed order": (lambda: listed(masks.Blocks(BITS, 128)), {"deterministic": True}, "no fixed order"),
    "a diagonal in large blocks of queries": (
        lambda: listed(masks.Blocks(BITS[..., :4, :], (256, 128)), (256, 128)),
        {"window_right": 0},
        "cuts",
    ),
}


@pytest.mark.parametrize("name", GRADIENTS_DECLINED)
def test_each_pass_has_its_own_backend(name):
    """What only the forward kernel serves is differentiated by the portable ones, also where hopper was named."""
    make, options, words = GRADIENTS_DECLINED[name]
    t, r = make()
    r = replace(r, **options)
    assert plan.select(t, r, target=H200).backend == "hopper"
    assert words in hopper.why_not(t, r, BACKWARD, H200)
    for backend in ("auto", "hopper"):
        assert plan.select(t, r, backend, request=BACKWARD, target=H200).backend == "triton"


@pytest.mark.parametrize("name", ["bias", "mask"])
def test_a_tensor_goes_with_both_passes(name: str) -> None:
    tensor = torch.empty(1, 1, 1024, 1024, dtype=torch.bool if name == "mask" else torch.bfloat16, device="meta")
    call = replace(Operands(meta(), meta(), meta()), **{name: tensor}), Rules(0.1)
    assert plan.select(*call, target=H200).backend == "hopper"
    assert plan.select(*call, request=BACKWARD, target=H200).backend == "hopper"


def grouped(seqlen_q: int, seqlen_k: int, head_dim: int = 128, **changes: Any) -> Operands:
    return replace(Operands(meta(seqlen_q, 6, head_dim), meta(seqlen_k, 2, head_dim), meta(seqlen_k, 2, head_dim)), **changes)


LENGTHS = torch.empty(1, dtype=torch.int32, device="meta")
APART: dict[str, tuple[Operands, dict[str, Any], bool]] = {
    "causal": (grouped(4097, 4096, 64), {"window_right": 0}, True),
    "head dim 256": (grouped(4096, 4096, 256), {"window_right": 0}, True),
    "lengths, softcap": (grouped(4096, 4096, seqused_q=LENGTHS, seqused_k=LENGTHS), {"softcap": 3.0, "window_right": 0}, True),
    "slopes, sink, dropout": (
        grouped(4096, 9999, alibi_slopes=torch.empty(1, 6, device="meta"), sink=torch.empty(6), dropout_seed=torch.tensor(1)),
        {"dropout_p": 0.1, "window_right": 0},
        True,
    ),
    "full": (grouped(4096, 4096), {}, False),
    "window": (grouped(4096, 4096), {"window_left": 100, "window_right": 0}, False),
    "few queries": (grouped(4095, 4096), {"window_right": 0}, False),
    "few keys": (grouped(4096, 4095), {"window_right": 0}, False),
    "a fixed order": (grouped(4096, 4096), {"deterministic": True, "window_right": 0}, False),
    "a head each": (replace(grouped(4096, 4096), k=meta(4096, 6), v=meta(4096, 6)), {"window_right": 0}, False),
    "a mask": (grouped(4096, 4096, mask=torch.empty(1, 1, 4096, 4096, dtype=torch.bool, device="meta")), {}, False),
    "packed": (grouped(4096, 4096, cu_seqlens_q=LENGTHS, cu_seqlens_k=LENGTHS), {}, False),
}


@pytest.mark.parametrize("name", APART)
def test_query_heads_that_share_keys_have_tiles_of_their_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And dQ is then added as where no heads share keys. Their sums of dK and dV are memory that is told."""
    t, rules, apart = APART[name]
    r = Rules(0.1, **rules)
    v = backward_launch.variant_of(t, r)
    assert v.apart == apart == ("each query head has its own" in hopper.describe(t, r, BACKWARD, H200))
    assert v.ordered == r.deterministic and (not apart or v.grouped == v.alibi)
    told = hopper.workspace_bytes(t, r, BACKWARD, H200)
    monkeypatch.setattr(backward_launch, "APART_FROM", 1 << 30)
    tiles = -(-t.k.shape[2] // v.block_n)
    assert told - hopper.workspace_bytes(t, r, BACKWARD, H200) == apart * 4 * 2 * tiles * v.block_n * (v.dim + v.dim_v)


@pytest.mark.parametrize(
    "t, rules, order",
    [
        (grouped(2048, 2048), {}, "first"),
        (grouped(8192, 8192), {"window_right": 0}, "first"),
        (grouped(2048, 2048, 64), {}, ""),
        (grouped(2048, 2048, 136), {}, ""),
        (Operands(meta(2048, 4, 64), meta(2048, 4, 64), meta(2048, 4, 64)), {"window_right": 0}, "first"),
        (Operands(meta(4096, 4, 64), meta(4096, 4, 64), meta(4096, 4, 64)), {"window_right": 0}, ""),
        (Operands(meta(4096, 4, 64), meta(4096, 4, 64), meta(4096, 4, 64)), {"window_right": 0, "window_left": 64}, "first"),
        (Operands(meta(4096, 4, 64), meta(4096, 4, 64), meta(4096, 4, 64)), {"deterministic": True}, "all"),
        (grouped(2048, 2048, cu_seqlens_q=LENGTHS, cu_seqlens_k=LENGTHS), {}, "first"),
        (grouped(2048, 2048, 64, cu_seqlens_q=LENGTHS, cu_seqlens_k=LENGTHS), {"window_right": 0, "window_left": 64}, ""),
        (grouped(2048, 2048, mask=torch.empty(1, 1, 2048, 2048, dtype=torch.bool, device="meta")), {}, ""),
    ],
)
def test_the_order_of_additions_to_dq(t: Operands, rules: dict[str, Any], order: str) -> None:
    """Where it is not "", one number a block of queries says how many have added, and nothing has to be cleared before."""
    r = Rules(0.1, **rules)
    v = backward_launch.variant_of(t, r)
    assert v.order == order and v.ordered == r.deterministic
    if order:
        rows = t.q.shape[0] * t.q.shape[1] * backward_launch.row_blocks_of(t, v.block_m)
        numbers = rows * v.block_m * (v.dim + 2) + rows * v.dq_parts
        assert hopper.workspace_bytes(t, r, BACKWARD, H200) == 4 * (numbers + backward_launch.key_sums_of(t, v))
