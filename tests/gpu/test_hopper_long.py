"""Head dim 64 where the Hopper forward kernel has three consumers: tiles of 192 rows, for long calls without further features."""

from __future__ import annotations

import pytest
import torch

from tilewise import explain

from .common import BACKENDS, DTYPES, compare, qkv

pytestmark = pytest.mark.skipif("hopper" not in BACKENDS, reason="needs a Hopper GPU")

# Calls change to these tiles at 1,536 and 3,072 tokens; both are multiples of 192, as 1,728 and 3,264 are.
EDGES = {False: (1536, 1728), True: (3072, 3264)}


def consumers(arguments: dict) -> int:
    tiles = explain(**arguments).tiles
    assert "parts" not in tiles
    return 3 if tiles.startswith("tiles of 192 x 128, 3 consumer") else 2


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype, kv_heads, layout", [("bf16", 4, "bshd"), ("fp16", 2, "bhsd")])
def test_lengths_around_multiples_of_192(dtype: str, kv_heads: int, layout: str, causal: bool) -> None:
    """One row less than such tiles begin at, and one row less, none and one more than whole tiles; gradients of the longest."""
    first, whole = EDGES[causal]
    for seqlen in (first - 1, first, first + 1, whole - 1, whole, whole + 1):
        inputs = qkv(2, seqlen, seqlen, 4, kv_heads, dtype=DTYPES[dtype])
        if layout == "bhsd":
            inputs = {name: x.transpose(1, 2).contiguous() for name, x in inputs.items()}
        arguments = {**inputs, "causal": causal, "layout": layout}
        if seqlen >= first:
            assert consumers(arguments) == 3
        compare(arguments, "hopper", gradients=seqlen > whole)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("seqlen_k", [1, 100, 129, 5000])
def test_other_numbers_of_keys(seqlen_k: int, causal: bool) -> None:
    """Causal queries in front of the first key see nothing, in whole tiles and in part of one."""
    arguments = {**qkv(2, EDGES[causal][1] + 77, seqlen_k, 4, 2), "causal": causal}
    assert consumers(arguments) == 3
    compare(arguments, "hopper", gradients=False)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_float32_outputs(causal: bool) -> None:
    arguments = {**qkv(2, EDGES[causal][1] + 1, EDGES[causal][1] + 1, 4, 2), "causal": causal}
    assert consumers(arguments) == 3
    assert compare(arguments, "hopper", gradients=False, out_dtype=torch.float32).out.dtype == torch.float32
