"""The Hopper backward kernels compile without a GPU, and the machine code is what the design counts on; see `test_hopper_compile`.

Assertions: wgmma present and never serialised, spills as listed and none of them new, shared memory within the device's limit, barriers
where the launcher predicts them, and exponentials between the wait for S and the wait for dP.
"""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")

from tilewise.kernels.hopper import backward_launch
from tilewise.kernels.hopper.backward_configs import TILES, WARPS, BackwardVariant, columns, tile_name
from tilewise.kernels.hopper.configs import SHARED_MEMORY_LIMIT
from tilewise.kernels.hopper.gluon_api import machine_code

from .test_hopper_compile import SCRATCH, exponentials_between_waits, key_loops


def variant(dim, dim_v=None, dtype="bf16", **rules) -> BackwardVariant:
    dim_v = dim_v or dim
    tile = TILES[tile_name(dim, dim_v, any(rules.get(name) for name in ("softcap", "alibi", "bias", "mask", "dropout")))]
    # As `variant_of` has them: of two orders at head dim 64 that of short calls.
    grouped = rules.pop("grouped", bool(rules.get("alibi")))
    cleared = any(rules.get(name) for name in ("listed", "bias", "mask")) or max(dim, dim_v) > 128
    cleared = cleared or (max(dim, dim_v) <= 64 and bool(rules.get("packed")))
    order = rules.pop("order", "" if cleared else "first")
    return BackwardVariant(tile, dtype, columns(dim), columns(dim_v), grouped=grouped, order=order, **rules)


LENGTHS = {"lengths_q": True, "lengths_k": True, "hidden_rows": True, "hidden_keys": True}
EVERYTHING = {"right": True, "left": True, "softcap": True, "alibi": True, "slope_gradient": True, "order": "all", **LENGTHS}
WITHOUT_CLEARING = {**EVERYTHING, "hidden_rows": False, "hidden_keys": False}  # as always beside a bias or mask
UNORDERED = {**WITHOUT_CLEARING, "order": ""}  # as always beside the gradient of a bias
PACKED = {"packed": True, "hidden_rows": True, "hidden_keys": True}
SAMPLE = {
    "d128 causal": variant(128, right=True),
    "d64 full, ordered": variant(64, order="all"),
    "d256 causal": variant(256, right=True),
    "d128 packed causal, ordered": variant(128, right=True, order="all", **PACKED),
    "d64 bias": variant(64, bias="tma"),
    "d64 bias with its gradient": variant(64, bias="tma", bias_gradient="added", heads_first=True),
    "d128 lists": variant(128, listed=True, log2_list=1),
    "d64 dropout": variant(64, dropout=True),
    "d128 causal, tiles apart": variant(128, right=True, apart=True),
}
REST = {
    "d64 full": variant(64),
    "d64 full, cleared": variant(64, order=""),
    "d64 causal": variant(64, right=True),
    "d64 causal, cleared": variant(64, right=True, order=""),
    "d256 full": variant(256),
    "d64 window": variant(64, right=True, left=True, hidden_keys=True),
    "d64 lengths": variant(64, right=True, **LENGTHS),
    "d64 softcap": variant(64, right=True, softcap=True),
    "d64 alibi": variant(64, right=True, alibi=True, slope_gradient=True),
    "d64 everything": variant(64, **EVERYTHING),
    "d64/128 causal": variant(64, 128, right=True),
    "d128 full": variant(128),
    "d128 causal fp16": variant(128, dtype="fp16", right=True),
    "d128 causal, ordered": variant(128, right=True, order="all"),
    "d64 causal, grouped": variant(64, right=True, grouped=True, order=""),
    "d128 causal, grouped, ordered": variant(128, right=True, grouped=True, order="all"),
    "d128 lists, grouped": variant(128, listed=True, log2_list=1, grouped=True),
    "d256 full, grouped": variant(256, grouped=True),
    "d128 window": variant(128, right=True, left=True, hidden_keys=True),
    "d128 lengths": variant(128, right=True, **LENGTHS),
    "d128 softcap": variant(128, right=True, softcap=True),
    "d128 alibi": variant(128, right=True, alibi=True),
    "d128 alibi with its gradient": variant(128, right=True, alibi=True, slope_gradient=True),
    "d256 alibi": variant(256, right=True, alibi=True, slope_gradient=True),
    "d128 everything": variant(128, **EVERYTHING),
    "d128/64 causal": variant(128, 64, right=True),
    "d192/128 causal": variant(192, 128, right=True),
    "d256 full, ordered": variant(256, order="all"),
    "d256 lengths": variant(256, right=True, **LENGTHS),
    "d256 everything": variant(256, **EVERYTHING),
    "d64 packed": variant(64, **PACKED),
    "d64 packed causal": variant(64, right=True, **PACKED),
    "d128 packed": variant(128, **PACKED),
    "d128 packed window": variant(128, right=True, left=True, **PACKED),
    "d128 packed alibi": variant(128, right=True, alibi=True, slope_gradient=True, **PACKED),
    "d256 packed causal": variant(256, right=True, **PACKED),
    "d64 lists": variant(64, listed=True),
    "d64 lists causal": variant(64, right=True, listed=True),
    "d128 lists causal": variant(128, right=True, listed=True, log2_list=1),
    "d128 lists everything": variant(128, right=True, softcap=True, alibi=True, slope_gradient=True, listed=True, log2_list=1),
    "d256 lists": variant(256, listed=True, log2_list=1),
    "d256 lists causal": variant(256, right=True, listed=True, log2_list=1),
    "d64 mask": variant(64, mask="tma"),
    "d64 float32 bias": variant(64, bias="full", bias_dtype="fp32"),
    "d64 bias of keys": variant(64, bias="keys"),
    "d64 everything and tensors": variant(64, bias="tma", mask="tma", **WITHOUT_CLEARING),
    "d128 bias": variant(128, bias="tma"),
    "d128 causal mask": variant(128, right=True, mask="tma"),
    "d128 float32 bias": variant(128, bias="full", bias_dtype="fp32"),
    "d128 mask of rows": variant(128, mask="rows"),
    "d128 everything and tensors": variant(128, bias="tma", mask="tma", **WITHOUT_CLEARING),
    "d64 float32 bias with its gradient": variant(64, bias="full", bias_dtype="fp32", bias_gradient="added"),
    "d64 everything, with the gradient of a bias": variant(64, bias="tma", mask="tma", bias_gradient="added", **UNORDERED),
    "d64 bias with its gradient, dropout": variant(64, bias="tma", bias_gradient="added", dropout=True),
    "d64 bias of its own with its gradient": variant(64, bias="tma", bias_gradient="stored"),
    "d64 bias of its own with its gradient, ordered": variant(64, bias="tma", bias_gradient="stored", order="all", right=True),
    "d128 bias of its own with its gradient": variant(128, bias="tma", bias_gradient="stored"),
    "d128 bias with its gradient": variant(128, bias="tma", bias_gradient="added", heads_first=True),
    "d128 causal mask of heads": variant(128, right=True, mask="tma", heads_first=True),
    "d128 float32 bias with its gradient": variant(128, bias="full", bias_dtype="fp32", bias_gradient="added"),
    "d128 everything, with the gradient of a bias": variant(128, bias="tma", mask="tma", bias_gradient="added", **UNORDERED),
    "d64 bias and dropout": variant(64, bias="tma", dropout=True),
    "d64 everything and dropout": variant(64, dropout=True, **EVERYTHING),
    "d128 causal dropout": variant(128, right=True, dropout=True),
    "d128 causal dropout, ordered": variant(128, right=True, order="all", dropout=True),
    "d128 packed causal dropout": variant(128, right=True, dropout=True, **PACKED),
    "d128 everything and dropout": variant(128, dropout=True, **EVERYTHING),
    "d256 causal dropout": variant(256, right=True, dropout=True),
    "d64 causal, tiles apart": variant(64, right=True, apart=True, order=""),
    "d64 lengths, tiles apart": variant(64, right=True, apart=True, order="", **LENGTHS),
    "d128 causal fp16, tiles apart": variant(128, dtype="fp16", right=True, apart=True),
    "d128 alibi with its gradient, tiles apart": variant(128, right=True, alibi=True, slope_gradient=True, apart=True),
    "d128 causal dropout, tiles apart": variant(128, right=True, dropout=True, apart=True),
    "d128 everything, tiles apart": variant(128, **{**EVERYTHING, "left": False, "order": "first"}, apart=True),
    "d192/128 causal, tiles apart": variant(192, 128, right=True, apart=True),
    "d256 causal, tiles apart": variant(256, right=True, apart=True),
    "d256 lengths, tiles apart": variant(256, right=True, apart=True, **LENGTHS),
}
# Bytes of spill stores, and instructions of the loop over query blocks that reload or save a register: these may not grow. Outside the
# loop each value costs once a tile of keys.
OUTSIDE = 64
SPILLS = {
    "d64 full, ordered": (72, 13),
    "d64 full": (72, 13),
    "d64 full, cleared": (88, 16),
    "d64 causal": (88, 16),
    "d64 causal, cleared": (92, 18),
    "d64 window": (104, 21),
    "d64 lengths": (148, 29),
    "d64 alibi": (80, 0),
    "d64 everything": (168, 19),
    "d64 causal, grouped": (68, 1),
    "d128 causal, grouped, ordered": (72, 3),
    "d128 softcap": (136, 41),
    "d128 alibi with its gradient": (252, 51),
    "d256 alibi": (528, 70),
    "d128 everything": (536, 197),
    "d256 lengths": (80, 9),
    "d256 everything": (600, 92),
    "d64 packed": (140, 23),
    "d64 packed causal": (164, 29),
    "d128 packed alibi": (280, 65),
    "d256 packed causal": (92, 8),
    "d64 lists": (84, 15),
    "d64 lists causal": (96, 19),
    "d128 lists everything": (532, 186),
    "d64 everything and tensors": (420, 84),
    "d128 bias": (64, 4),
    "d128 causal mask": (64, 7),
    "d128 float32 bias": (164, 48),
    "d128 mask of rows": (104, 22),
    "d128 everything and tensors": (1044, 385),
    "d64 everything, with the gradient of a bias": (500, 108),
    "d64 bias with its gradient, dropout": (64, 2),
    "d128 bias of its own with its gradient": (152, 20),
    "d128 bias with its gradient": (108, 21),
    "d128 causal mask of heads": (64, 7),
    "d128 float32 bias with its gradient": (172, 49),
    "d128 everything, with the gradient of a bias": (1044, 375),
    "d64 everything and dropout": (240, 37),
    "d128 causal dropout": (68, 8),
    "d128 causal dropout, ordered": (64, 6),
    "d128 packed causal dropout": (108, 19),
    "d128 everything and dropout": (992, 372),
    "d256 causal dropout": (64, 4),
    "d64 causal, tiles apart": (64, 16),
    "d64 lengths, tiles apart": (108, 25),
    "d128 alibi with its gradient, tiles apart": (220, 50),
    "d128 causal dropout, tiles apart": (64, 7),
    "d128 everything, tiles apart": (508, 193),
    "d256 lengths, tiles apart": (64, 7),
}


def check(name: str, v: BackwardVariant) -> None:
    compiled, address = backward_launch.build(v, "fp32")
    check_compiled(name, v, address, compiled.metadata.shared, *machine_code(compiled.asm["ptx"]))


def check_compiled(name: str, v: BackwardVariant, address: int, shared: int, said: str, listing: str) -> None:
    """As of the forward kernels."""
    assert address == v.barrier_offset, "a second compilation was needed: the compiler places shared memory elsewhere"
    assert shared <= SHARED_MEMORY_LIMIT
    assert "C75" not in said and "serializ" not in said.lower(), said
    allowed, reloads = SPILLS.get(name, (OUTSIDE, 0))
    assert int(re.search(r"(\d+) bytes spill stores", said).group(1)) <= allowed, said
    (body,) = key_loops(listing)
    products = 2 * v.dim // 16 + 2 * v.dim_v // 16 + v.block_m // 16 * 4  # at least: as many instructions as steps of 16
    assert sum("HGMMA" in line for line in body) >= products // 2
    assert sum("LDL" in line or "STL" in line for line in body) <= reloads, "spills inside the loop over query blocks"
    if v.bias_gradient == "added":
        vectors = sum("REDG.E.ADD.F32x4" in line for line in body)
        assert vectors == v.block_m * v.block_n // (32 * WARPS * 4), "dS leaves in other than vectors of four"
    if v.apart:
        assert not any("REDG.E" in line for line in body)
        vectors = sum("REDG.E.ADD.F32x4" in line for line in listing.splitlines())
        assert vectors == v.key_numbers // (32 * WARPS * 4), "dK and dV leave in other than vectors of four, or more than once"
    if not (v.softcap or v.share_p):
        share = v.block_m * v.block_n // (32 * WARPS)  # of P, a thread
        assert exponentials_between_waits(body) >= share // 2, "ptxas moved the exponentials out from under the dP product"


@pytest.mark.parametrize("name", SAMPLE)
def test_sample(name):
    check(name, SAMPLE[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", REST)
def test_rest(name):
    check(name, REST[name])


@pytest.mark.parametrize("dim_v", [8, 64, 72, 128, 136, 192, 256])
@pytest.mark.parametrize("dim", [8, 64, 72, 96, 104, 128, 136, 192, 200, 256])
def test_shared_memory_of_every_head_dim(dim, dim_v):
    tensors = [{"bias": "tma"}, {"mask": "tma"}, {"bias": "tma", "mask": "tma"}] if max(dim, dim_v) <= 128 else []
    for rules in ({}, {"alibi": True}, *tensors):
        v = variant(dim, dim_v, **rules)
        assert v.dim >= dim and v.dim_v >= dim_v
        scratch = SCRATCH if len(rules) < 2 else SCRATCH // 2  # of which 420 are used, with every feature
        assert v.shared_bytes + 8 * v.barrier_words + scratch <= SHARED_MEMORY_LIMIT
        assert v.barriers <= v.barrier_words
        assert backward_launch.ROW_PADDING % v.block_m == 0


def test_tiles_fit_their_registers():
    for tile in TILES.values():
        compute = (tile.launch_registers * (WARPS + 4) - 4 * tile.worker_registers) // WARPS
        assert compute >= 240 and tile.launch_registers * (WARPS + 4) * 32 <= 65_536
