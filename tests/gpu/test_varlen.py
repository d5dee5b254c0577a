"""Packed sequences on a GPU: against the specification, without waiting for the device, and captured in a graph."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewise import attention, attention_varlen, packing

from ..packed import CASES, I32, LARGE, SIZE, Size, build, check, offsets
from .common import BACKENDS, watched

on_hopper = pytest.mark.skipif("hopper" not in BACKENDS, reason="needs a Hopper GPU")
BOTH = [*BACKENDS, pytest.param("auto", marks=on_hopper)]
# Sequences of every relation to a tile of 64 or 128; the fourth has queries and no keys.
TILES = Size((5, 0, 300, 70, 129, 64), (6, 33, 257, 0, 128, 200), heads=4, kv_heads=2)
HOPPER_CASES = ("plain", "causal", "window", "causal_window_softcap", "alibi_of_sequences", "alibi_sink", "lengths")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def shorten(arguments: dict[str, Any], **used: list[int]) -> None:
    """Other lengths in a call that has lengths: those that fit its sequences."""
    for key in used.keys() & arguments.keys():
        arguments[key] = torch.tensor(used[key], dtype=I32, device=arguments["q"].device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_every_feature_and_gradient(name: str, dtype: str) -> None:
    check(build(name, DTYPES[dtype], "cuda"), "triton", deterministic=False)


@on_hopper
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "name,dims",
    [(name, (128, 128)) for name in HOPPER_CASES]
    + [(name, (64, 64)) for name in HOPPER_CASES]
    + [(name, dims) for name in ("causal", "lengths") for dims in ((256, 256), (192, 128), (72, 40))],
    ids=str,
)
def test_every_gradient_of_the_hopper_kernel(name: str, dims: tuple[int, int], deterministic: bool) -> None:
    arguments = build(name, torch.bfloat16, "cuda", TILES, dims)
    shorten(arguments, seqused_q=[5, 0, 290, 70, 0, 63], seqused_k=[1, 30, 257, 0, 128, 65])
    with watched() as passes:
        check(arguments, "auto", deterministic=deterministic)
    assert passes == ["hopper forward", "hopper backward"]


@on_hopper
@pytest.mark.parametrize(
    "name,head_dims",
    [(name, (128, 128)) for name in HOPPER_CASES]
    + [(name, dims) for name in ("plain", "causal_window_softcap") for dims in ((64, 64), (96, 96), (192, 128), (256, 256))],
    ids=str,
)
def test_what_the_hopper_kernels_serve(name: str, head_dims: tuple[int, int]) -> None:
    size = SIZE if name == "lengths" else LARGE
    dtype = torch.float16 if name == "window" else torch.bfloat16
    arguments = build("plain" if name == "alibi_of_sequences" else name, dtype, "cuda", size, head_dims)
    if name == "alibi_of_sequences":
        arguments |= {"causal": True, "alibi_slopes": torch.rand(len(size.lengths_q), size.heads, device="cuda", dtype=dtype) * 0.1}
    with watched() as passes:
        check(arguments, "hopper", deterministic=False)
    assert passes == ["hopper forward", "hopper backward"]


SERVED = Size((1, 130, 1, 0, 17, 1), (300, 130, 129, 60, 400, 0), heads=4, kv_heads=2)  # some prompts, and one token of others


@on_hopper
@pytest.mark.parametrize("group,head_dim", [(2, 64), (4, 128), (7, 128), (8, 256), (16, 128), (24, 64), (3, 128)])
@pytest.mark.parametrize("name", ["causal", "causal_window_softcap", "alibi_sink", "lengths"])
def test_heads_that_share_keys_share_a_tile(name: str, group: int, head_dim: int) -> None:
    """Where there are fewer queries than keys: all heads of a group, some, or none; a group of 7 leaves a tile of 8 not full."""
    arguments = build(name, torch.bfloat16, "cuda", SERVED._replace(heads=2 * group), (head_dim, head_dim))
    shorten(arguments, seqused_q=[1, 99, 0, 0, 17, 1], seqused_k=[222, 130, 128, 1, 0, 0])
    with watched() as passes:
        check(arguments, "hopper", deterministic=False)
    assert passes == ["hopper forward", "hopper backward"]


@on_hopper
@pytest.mark.parametrize("group", [4, 7])
def test_rows_of_shared_tiles_in_float32(group: int) -> None:
    """They leave from registers, one by one, as do those of a tile that a sequence ends in: the same numbers before rounding."""
    arguments = build("causal", torch.bfloat16, "cuda", SERVED._replace(heads=2 * group), (128, 128))
    plain, wide = (attention_varlen(**arguments, backend="hopper", out_dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    assert torch.equal(plain, wide.bfloat16())


@pytest.mark.parametrize("name", ["causal", "bias_shared", "alibi_of_sequences", "mask_function"])
def test_the_tiled_path_finds_sequences_on_the_device(name: str) -> None:
    arguments = build(name, torch.float64, "cuda")
    outs = [attention_varlen(**arguments, backend=backend, return_aux="key_mass") for backend in ("tiled", "reference")]
    for got, expected in zip((outs[0][0], outs[0][1].key_mass), (outs[1][0], outs[1][1].key_mass), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-9)


def packed(lengths: list[int], heads: int = 4, kv_heads: int = 2, head_dim: int = 64, spare: int = 0) -> tuple[list[Tensor], Tensor]:
    total = sum(lengths) + spare
    shapes = [(total, heads, head_dim), (total, kv_heads, head_dim), (total, kv_heads, head_dim)]
    return [torch.randn(s, device="cuda").bfloat16().requires_grad_() for s in shapes], offsets(*lengths, device="cuda")


def alone(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], **options: Any) -> Tensor:
    parts, start = [], 0
    for n in lengths:
        rows = slice(start, start + n)
        parts.append(attention(q[None, rows], k[None, rows], v[None, rows], backend="triton", **options)[0])
        start += n
    return torch.cat(parts)


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (100, 20)}], ids=str)
def test_packing_equals_single_sequences(options: dict[str, Any], head_dim: int, backend: str) -> None:
    """Long enough for many tiles of the real tables, with sequences of every relation to a tile."""
    lengths = [1, 127, 128, 129, 0, 1000, 63, 2048, 5]
    leaves, cu = packed(lengths, head_dim=head_dim)
    dout = torch.randn(leaves[0].shape, device="cuda").bfloat16()
    outs = attention_varlen(*leaves, cu, cu, **options, backend=backend, deterministic=False), alone(*leaves, lengths, **options)
    torch.testing.assert_close(*outs, rtol=2e-2, atol=2e-2)
    for a, b in zip(*(torch.autograd.grad(out, leaves, dout) for out in outs), strict=True):
        torch.testing.assert_close(a, b, rtol=4e-2, atol=4e-2)


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_neighbours_stay_apart(head_dim: int, backend: str) -> None:
    """NaN that one sequence sees, and NaN in rows of no sequence, leave all other bits as they are."""
    lengths = [100, 70, 130]
    leaves, cu = packed(lengths, spare=40, head_dim=head_dim)
    dirty = [x.detach().clone() for x in leaves]
    for x in dirty:
        x[100:170], x[300:] = float("nan"), float("nan")
    results = []
    for given in (leaves, [x.requires_grad_() for x in dirty]):
        out = attention_varlen(*given, cu, cu, causal=True, backend=backend, deterministic=True)
        results.append([out, *torch.autograd.grad(out, given, torch.ones_like(out))])
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got[:100], expected[:100]) and torch.equal(got[170:300], expected[170:300])
        assert (got[300:] == 0).all() and (expected[300:] == 0).all()


@pytest.mark.parametrize("bound", [None, 512])
def test_nothing_waits_for_the_device(bound: int | None) -> None:
    leaves, cu = packed([100, 412, 3])
    attention_varlen(*leaves, cu, cu, bound, bound, causal=True).sum().backward()
    torch.cuda.synchronize()
    with torch.cuda.device(0):
        torch.cuda.set_sync_debug_mode("error")
        try:
            attention_varlen(*leaves, cu, cu, bound, bound, causal=True).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize("options", [{"causal": True}, {"dropout_p": 0.2, "dropout_seed": 3}], ids=str)
def test_a_graph_is_replayed_with_other_lengths(options: dict[str, Any], backend: str) -> None:
    """B142: forward and backward are captured once; the offsets in the same tensor decide what a replay computes."""
    (q, k, v), cu = packed([256, 256, 0, 0])
    dout = torch.randn_like(q)

    def step() -> list[Tensor]:
        out = attention_varlen(q, k, v, cu, cu, **options, backend=backend, deterministic=True)
        return [out, *torch.autograd.grad(out, (q, k, v), dout)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for lengths in ([3, 500, 0, 9], [512, 0, 0, 0], [0, 0, 0, 1], [128, 128, 128, 128]):
        cu.copy_(offsets(*lengths, device="cuda"))
        graph.replay()
        for got, expected in zip(captured, step(), strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize("cu", [[0, 500, 3, 300], [-7, 30, 9999, 2], [9, 9, 1, 0]], ids=str)
def test_offsets_that_make_no_sense_stay_inside(cu: list[int], backend: str) -> None:
    (q, k, v), _ = packed([300])
    given = torch.tensor(cu, dtype=I32, device="cuda")
    counted = given.long().clamp(0, 300).cummax(0).values.int()
    leaves = (q, k, v)
    options = dict(causal=True, backend=backend, deterministic=True)
    outs = [attention_varlen(*leaves, bounds, bounds, **options) for bounds in (given, counted)]
    assert torch.equal(*outs)
    for a, b in zip(*(torch.autograd.grad(out, leaves, torch.ones_like(out)) for out in outs), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", BOTH)
def test_ten_thousand_sequences_and_a_long_one(backend: str) -> None:
    draw = random.Random(0)
    lengths = [draw.randint(0, 8) for _ in range(10_000)]
    lengths[5_000] = 4_096
    leaves, cu = packed(lengths, head_dim=32)
    out = attention_varlen(*leaves, cu, cu, causal=True, backend=backend, deterministic=False)
    start = sum(lengths[:5_000])
    rows = slice(start, start + 4_096)
    expected = attention(*(x[None, rows] for x in leaves), causal=True, backend="triton")[0]
    torch.testing.assert_close(out[rows], expected, rtol=2e-2, atol=2e-2)
    first = [next(i for i in range(10_000) if lengths[i] >= 2)]
    begin = sum(lengths[: first[0]])
    torch.testing.assert_close(out[begin], leaves[2][begin].repeat_interleave(2, 0))
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out, leaves, torch.ones_like(out)))


def test_the_same_bits_on_every_run() -> None:
    """B121: packed and separate."""
    arguments = build("bias_shared", torch.bfloat16, "cuda")
    leaves = {name: arguments[name].requires_grad_() for name in ("q", "k", "v", "bias", "learnable_sink")}

    def run() -> list[Tensor]:
        out = attention_varlen(**arguments, backend="triton", deterministic=True)
        return [out, *torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out))]

    first = run()
    for _ in range(30):
        assert all(torch.equal(a, b) for a, b in zip(run(), first, strict=True))


@on_hopper
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_ordered_runs_of_packed_sequences_give_the_same_bits(head_dim: int) -> None:
    leaves, cu = packed([777, 1, 128, 0, 1500, 63], heads=8, head_dim=head_dim, spare=9)
    with watched() as passes:
        out = attention_varlen(*leaves, cu, cu, causal=True, deterministic=True)
        dout = torch.randn_like(out)
        first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    assert passes == ["hopper forward", "hopper backward"]
    for _ in range(200):
        assert torch.equal(attention_varlen(*leaves, cu, cu, causal=True, deterministic=True), out)
        again = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


def test_unpadding_into_a_given_room_does_not_wait() -> None:
    x, mask = (
        torch.randn(2, 50, 4, 64, device="cuda").bfloat16(),
        torch.arange(50, device="cuda") < torch.tensor([[50], [20]], device="cuda"),
    )
    packing.unpad(x, mask, 80)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        p = packing.unpad(x, mask, 80)
        out = attention_varlen(p.values, p.values, p.values, p.cu_seqlens, p.cu_seqlens, causal=True)
        padded = packing.pad(out, p.indices, 2, 50)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (padded[1, 20:] == 0).all()


@pytest.mark.parametrize("lengths", [[3, 40, 7]])
def test_nested_tensors(lengths: list[int]) -> None:
    (q, k, v), cu = packed(lengths)
    bounds = cu.long()
    out = attention(*(torch.nested.nested_tensor_from_jagged(x, bounds) for x in (q, k, v)), causal=True)
    assert torch.equal(out.values(), attention_varlen(q, k, v, cu, cu, causal=True))
