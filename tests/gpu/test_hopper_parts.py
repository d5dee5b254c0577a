"""Calls with few tiles or few queries, cut along the keys and with several heads in a tile: every rule, the same bits every time."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tilewise import attention, explain
from tilewise.kernels.hopper import parts

from .common import BACKENDS, compare, qkv, randn

pytestmark = pytest.mark.skipif("hopper" not in BACKENDS, reason="needs a Hopper GPU")


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of parts of each call that is merged; what the kernel does not write into the workspace is NaN."""
    counts: list[int] = []
    make = parts.workspace

    def workspace(t: Any, count: int) -> torch.Tensor:
        counts.append(count)
        return make(t, count).fill_(float("nan"))

    monkeypatch.setattr(parts, "workspace", workspace)
    return counts


def lengths(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


# (seqlen_q, seqlen_k, heads, kv_heads) of two batch items; heads in a tile: 1, 1, 4 of which 3 are there
SHAPES = ((128, 8192, 4, 4), (333, 4097, 3, 1), (20, 6000, 6, 2))
RULES: dict[str, Any] = {
    "full": lambda heads: {},
    "causal": lambda heads: {"causal": True},
    "window": lambda heads: {"window_size": (3000, 50)},
    "left": lambda heads: {"window_size": (2500, -1)},
    "lengths": lambda heads: {"causal": True, "seqused_q": lengths(1, 0), "seqused_k": lengths(3001, 17)},
    "no keys": lambda heads: {"seqused_k": lengths(0, 4000)},
    "softcap": lambda heads: {"softcap": 20.0},
    "alibi": lambda heads: {"causal": True, "alibi_slopes": torch.rand(heads, device="cuda")},
    "sink": lambda heads: {"causal": True, "learnable_sink": randn(heads, dtype=torch.float32)},
    "sink, no keys": lambda heads: {"seqused_k": lengths(0, 4000), "learnable_sink": randn(heads, dtype=torch.float32)},
    "negative scale": lambda heads: {"softmax_scale": -0.1},
    "dropout": lambda heads: {"causal": True, "dropout_p": 0.2, "dropout_seed": 7},
    "dropout, window": lambda heads: {"window_size": (3000, 0), "dropout_p": 0.2, "dropout_seed": 7},
}


@pytest.mark.parametrize("name", RULES)
def test_every_rule(poisoned: list[int], name: str) -> None:
    for seqlen_q, seqlen_k, heads, kv_heads in SHAPES:
        inputs = qkv(2, seqlen_q, seqlen_k, heads, kv_heads, head_dim=128)
        compare({**inputs, **RULES[name](heads)}, "hopper", gradients=(name, seqlen_q) in (("causal", 333), ("sink", 20)))
    assert len(poisoned) == len(SHAPES) and min(poisoned) > 1


# (seqlen_q, seqlen_k, heads, kv_heads), and the heads in a tile
SHARED = {(1, 5000, 8, 2): 4, (7, 8192, 16, 1): 16, (20, 6000, 6, 2): 4, (150, 4500, 4, 2): 2, (16, 9000, 16, 2): 8, (64, 6000, 2, 2): 1}


@pytest.mark.parametrize("shape", SHARED)
def test_heads_that_share_a_tile(poisoned: list[int], shape: tuple[int, ...]) -> None:
    inputs = qkv(2, *shape, head_dim=64)
    found = re.search(r"queries of (\d+) heads in each", explain(**inputs, causal=True).tiles)
    assert (int(found[1]) if found else 1) == SHARED[shape]
    compare({**inputs, "causal": True}, "hopper", gradients=False)
    assert len(poisoned) == 1


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dim, dim_v", [(64, 64), (96, 96), (192, 128), (256, 256)])
def test_every_width_with_heads_that_share_a_tile(poisoned: list[int], dim: int, dim_v: int, layout: str) -> None:
    for seqlen_q, heads, kv_heads in ((16, 16, 2), (40, 10, 2), (3, 64, 2)):
        inputs = qkv(2, seqlen_q, 5000, heads, kv_heads, dim, dim_v)
        if layout == "bhsd":
            inputs = {name: x.transpose(1, 2).contiguous() for name, x in inputs.items()}
        compare({**inputs, "causal": True, "layout": layout}, "hopper", gradients=False)
    assert len(poisoned) == 3


def test_a_full_machine_with_heads_that_share_a_tile(poisoned: list[int]) -> None:
    compare({**qkv(40, 4, 3000, 32, 4, head_dim=128), "causal": True}, "hopper", gradients=False)
    assert len(poisoned) == 1


@pytest.mark.parametrize(
    "dim, dim_v, dtype", [(256, 256, "bf16"), (192, 128, "bf16"), (72, 40, "fp16"), (96, 96, "bf16"), (16, 16, "fp16")]
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_every_width(poisoned: list[int], dim: int, dim_v: int, dtype: str, causal: bool, layout: str) -> None:
    inputs = qkv(1, 200, 6000, 6, 3, dim, dim_v, torch.bfloat16 if dtype == "bf16" else torch.float16)
    if layout == "bhsd":
        inputs = {name: x.transpose(1, 2).contiguous() for name, x in inputs.items()}
    compare({**inputs, "causal": causal, "layout": layout}, "hopper")
    out = attention(**inputs, causal=causal, layout=layout, backend="hopper", out_dtype=torch.float32)
    assert out.is_contiguous() and not out.isnan().any()
    assert poisoned and min(poisoned) > 1


def test_few_causal_tiles(poisoned: list[int]) -> None:
    for seqlen in (2048, 4097):
        compare({**qkv(1, seqlen, seqlen, heads=2, kv_heads=1, head_dim=128), "causal": True}, "hopper")
    assert poisoned


def test_large_logits(poisoned: list[int]) -> None:
    compare({**qkv(1, 128, 8192, head_dim=128, scale=40.0), "causal": True}, "hopper", gradients=False)
    q = torch.full((1, 64, 1, 128), 133_120.0, dtype=torch.bfloat16, device="cuda")
    k = q[:, :1].expand(1, 8192, 1, 128).clone()
    k[:, 5000] *= 1.01
    v = randn(1, 8192, 1, 128)
    out = attention(q, k, v, backend="hopper")
    assert torch.equal(out, v[:, 5000:5001].expand_as(out))
    assert poisoned


def test_hidden_values_and_other_inputs_of_one_layout() -> None:
    """NaN beyond the length and before the window reaches nothing; and what was launched once is launched again with other tensors.
    Without `poisoned`, beside which no launch is kept."""
    inputs = [qkv(2, 100, 8192, 4, 4, head_dim=128) for _ in range(3)]
    used = lengths(7000, 5001)
    for x in inputs:
        want = attention(**x, window_size=(3000, 0), seqused_k=used, backend="hopper").clone()
        for name in ("k", "v"):
            for b, n in enumerate((7000, 5001)):
                x[name][b, n:] = float("nan")
                x[name][b, : n - 100 - 3000] = float("nan")
        for _ in range(3):
            assert torch.equal(attention(**x, window_size=(3000, 0), seqused_k=used, backend="hopper"), want)
    assert "parts" in explain(**inputs[0], window_size=(3000, 0), seqused_k=used).tiles


def test_a_hundred_runs_are_bitwise_equal() -> None:
    for seqlen_q, rules in ((512, {}), (512, {"causal": True}), (16, {"causal": True})):
        inputs = qkv(1, seqlen_q, 8192, 16, 4, head_dim=128)
        out, aux = attention(**inputs, **rules, backend="hopper", return_aux="lse")
        for _ in range(100):
            again, again_aux = attention(**inputs, **rules, backend="hopper", return_aux="lse")
            assert torch.equal(out, again) and torch.equal(aux.lse, again_aux.lse)


def test_in_a_graph() -> None:
    inputs = qkv(1, 128, 8192, 8, 8, head_dim=128)
    want = attention(**inputs, causal=True, backend="hopper")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(**inputs, causal=True, backend="hopper")
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, want)


def test_explain_says_so() -> None:
    x = qkv(1, 128, 65_536, 8, 8, head_dim=128)
    found = explain(*x.values())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = attention(*x.values(), backend="hopper")
    used = torch.cuda.max_memory_allocated() - before - out.nbytes
    assert "parts" in found.tiles and used <= 1.1 * found.extra_bytes + (4 << 20)
