"""The Hopper kernels compile without a GPU, and the machine code is what the design counts on.

A fixed sample runs always; the other shipped variants carry the marker ``slow``. Assertions: wgmma present and never serialised, no
spill, shared memory within the device's limit, barriers where the launcher predicts them, exponentials between the two waits.
"""

from __future__ import annotations

import itertools
import re

import pytest

pytest.importorskip("triton")

from tilewise.kernels.hopper import compiling, configs, launch
from tilewise.kernels.hopper.configs import SHARED_MEMORY_LIMIT, TILES, Addresses, Variant, tile_columns, tile_name, value_columns
from tilewise.kernels.hopper.gluon_api import machine_code

SCRATCH = 2048  # bytes that the compiler adds for barriers and captured arguments


def variant(dim, dim_v=None, name=None, dtype="bf16", **rules) -> Variant:
    dim_v = dim_v or dim
    chunk, chunks = tile_columns(dim)
    forms = (rules.get("bias", ""), rules.get("mask", ""))
    tile = TILES[name or tile_name(dim, dim_v, 1024, 1024, rules.get("right", False), False, *forms)]
    return Variant(tile, dtype, chunk, chunks, value_columns(dim_v), **rules)


EVERYTHING = {
    "right": True,
    "left": True,
    "lengths_q": True,
    "lengths_k": True,
    "scale_first": True,
    "softcap": True,
    "alibi": True,
    "sink": True,
}
TENSORS = {"bias": "tma", "mask": "tma", "values_a_head": True}
UNALIGNED = {"bias": "full", "bias_dtype": "fp32", "mask": "full", "values_a_head": True}
PARTS = {"parts": True, "store_tma": False}
PACKED = {"packed": True, "lengths_q": True, "lengths_k": True}
SAMPLE = {
    "d128 causal": variant(128, right=True),
    "d64 full, three consumers": variant(64, name="64 long"),
    "d192/128 causal, columns in three chunks": variant(192, 128, right=True),
    "d64 everything": variant(64, **EVERYTHING),
    "d64 bias": variant(64, scale_first=True, bias="tma"),
    "d128 causal mask": variant(128, right=True, mask="tma"),
    "d128 packed causal": variant(128, right=True, **PACKED),
    "d128 packed causal, four heads in a tile": variant(128, right=True, heads=4, **PACKED),
    "d128 lists": variant(128, listed=True),
    "d128 causal dropout": variant(128, right=True, dropout=True),
    "d128 causal in parts": variant(128, right=True, **PARTS),
}
REST = {
    "d64 full": variant(64),
    "d64 causal": variant(64, right=True),
    "d64 causal, three consumers": variant(64, name="64 long causal", right=True),
    "d64 window": variant(64, right=True, left=True),
    "d64 float32 bias": variant(64, scale_first=True, bias="full", bias_dtype="fp32"),
    "d64 bias of keys": variant(64, scale_first=True, bias="keys"),
    "d64 mask": variant(64, mask="tma"),
    "d64 causal bias and mask": variant(64, right=True, scale_first=True, **TENSORS),
    "d64 everything and tensors": variant(64, **EVERYTHING, **TENSORS),
    "d64 everything and unaligned tensors": variant(64, **EVERYTHING, **UNALIGNED),
    "d96 causal": variant(96, right=True),
    "d128 full": variant(128),
    "d128 causal fp16": variant(128, dtype="fp16", right=True),
    "d128 window": variant(128, right=True, left=True),
    "d128 lengths": variant(128, right=True, lengths_q=True, lengths_k=True),
    "d128 softcap": variant(128, right=True, scale_first=True, softcap=True),
    "d128 float32 out": variant(128, store_tma=False),
    "d128 everything": variant(128, **EVERYTHING),
    "d96 bias": variant(96, scale_first=True, bias="tma"),
    "d128 bias": variant(128, scale_first=True, bias="tma"),
    "d128 bias of rows": variant(128, scale_first=True, bias="rows"),
    "d128 mask of keys": variant(128, mask="keys"),
    "d128 everything and tensors": variant(128, **EVERYTHING, **TENSORS),
    "d128 everything and unaligned tensors": variant(128, **EVERYTHING, **UNALIGNED),
    "d192/192 full": variant(192),
    "d256 full": variant(256),
    "d256 causal": variant(256, right=True),
    "d256 everything": variant(256, **EVERYTHING),
    "d64 lists": variant(64, listed=True),
    "d128 lists causal": variant(128, listed=True, right=True),
    "d128 lists everything": variant(128, listed=True, right=True, scale_first=True, softcap=True, alibi=True, sink=True),
    "d256 lists": variant(256, listed=True, log2_list=1),
    "d96 packed": variant(96, **PACKED),
    "d64 packed": variant(64, **PACKED),
    "d64 packed causal": variant(64, right=True, **PACKED),
    "d128 packed window": variant(128, right=True, left=True, **PACKED),
    "d128 packed everything": variant(128, packed=True, **EVERYTHING),
    "d256 packed causal": variant(256, right=True, **PACKED),
    "d64 packed, two heads in a tile": variant(64, heads=2, **PACKED),
    "d128 packed causal, eight heads in a tile": variant(128, right=True, heads=8, **PACKED),
    "d128 packed window, sixteen heads in a tile": variant(128, right=True, left=True, heads=16, **PACKED),
    "d128 packed everything, four heads in a tile": variant(128, packed=True, heads=4, **EVERYTHING),
    "d256 packed causal float32 out, eight heads in a tile": variant(256, right=True, heads=8, store_tma=False, **PACKED),
    "d64 dropout": variant(64, dropout=True),
    "d64 everything and dropout": variant(64, dropout=True, **EVERYTHING),
    "d128 window and dropout": variant(128, right=True, left=True, dropout=True),
    "d128 causal mask and dropout": variant(128, right=True, mask="tma", dropout=True),
    "d128 bias and dropout": variant(128, scale_first=True, bias="tma", dropout=True),
    "d128 packed causal dropout": variant(128, right=True, dropout=True, **PACKED),
    "d128 everything and dropout": variant(128, dropout=True, **EVERYTHING),
    "d192/128 causal dropout": variant(192, 128, right=True, dropout=True),
    "d256 causal dropout": variant(256, right=True, dropout=True),
    "d64 in parts, two heads in a tile": variant(64, heads=2, **PARTS),
    "d128 causal in parts, four heads in a tile": variant(128, right=True, heads=4, **PARTS),
    "d128 window and lengths in parts, eight heads in a tile": variant(
        128, right=True, left=True, lengths_q=True, lengths_k=True, heads=8, **PARTS
    ),
    "d128 everything in parts, eight heads in a tile": variant(128, heads=8, **EVERYTHING, **PARTS),
    "d64 everything in parts, four heads in a tile": variant(64, heads=4, **EVERYTHING, **PARTS),
    "d128 in parts, sixteen heads in a tile": variant(128, heads=16, **PARTS),
    "d192/128 causal in parts, eight heads in a tile": variant(192, 128, right=True, heads=8, **PARTS),
    "d256 causal in parts, eight heads in a tile": variant(256, right=True, heads=8, **PARTS),
    "d64 in parts": variant(64, **PARTS),
    "d64 window in parts": variant(64, right=True, left=True, **PARTS),
    "d64 everything in parts": variant(64, **EVERYTHING, **PARTS),
    "d128 in parts": variant(128, **PARTS),
    "d128 everything in parts": variant(128, **EVERYTHING, **PARTS),
    "d128 causal dropout in parts": variant(128, right=True, dropout=True, **PARTS),
    "d192/128 causal in parts": variant(192, 128, right=True, **PARTS),
    "d256 causal in parts": variant(256, right=True, **PARTS),
    "d256 everything in parts": variant(256, **EVERYTHING, **PARTS),
}
# Bytes of spill stores that ptxas leaves outside the loop over key blocks; these may not grow. Where a name is missing: none.
SPILLS = {
    "d64 full, three consumers": 64,
    "d64 causal, three consumers": 32,
    "d64 bias of keys": 4,
    "d64 float32 bias": 152,
    "d64 everything and unaligned tensors": 700,
    "d128 causal dropout": 64,
    "d128 causal dropout in parts": 48,
    "d128 window and dropout": 64,
    "d128 everything and dropout": 64,
    "d128 packed everything": 64,
    "d192/128 causal dropout": 112,
    "d256 everything": 68,
    "d256 packed causal": 148,
    "d256 packed causal float32 out, eight heads in a tile": 104,
    "d256 everything in parts": 148,
    "d256 causal in parts, eight heads in a tile": 36,
    "d256 causal dropout": 64,
}

# Spilled values that are read back inside that loop: 232 registers are short for everything at once with 64 values of a float32 bias and
# 64 of a mask in flight.
RELOADS = {"d64 everything and unaligned tensors": 145}
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,5})\*/\s+(.*?);", re.M)


def key_loops(listing: str) -> list[list[str]]:
    """The innermost loops that hold wgmma: one a consumer. Predicated branches close them, for ptxas puts waits out of line, behind
    everything else, with a plain jump back; where it closes a loop by a plain jump, too, that is the first one.
    """
    found = [(int(address, 16), text.strip()) for address, text in _INSTRUCTION.findall(listing)]
    index = {address: i for i, (address, _) in enumerate(found)}

    def back(pattern: str) -> list[tuple[int, int, list[str]]]:
        spans = []
        for i, (address, text) in enumerate(found):
            jump = re.match(pattern + r"BRA.*?0x([0-9a-f]+)", text)
            target = int(jump.group(1), 16) if jump else address + 1
            if target < address and target in index:
                body = [line for _, line in found[index[target] : i + 1]]
                if any("GMMA" in line for line in body):
                    spans.append((index[target], i, body))
        return spans

    spans = back(r"@\S+ ") or back("")[:1]
    return [
        body
        for low, high, body in spans
        if not any(low <= other_low and other_high <= high and (other_low, other_high) != (low, high) for other_low, other_high, _ in spans)
    ]


def exponentials_between_waits(body: list[str]) -> int:
    """The largest number of EX2 after a wait that leaves one product running, and before the one that leaves none."""
    best = count = 0
    inside = False
    for line in body + body:  # ptxas may have rotated the loop
        if "WARPGROUP.DEPBAR" in line:
            inside, count = "gsb0, 0x1" in line, 0
        elif inside and "MUFU.EX2" in line:
            count += 1
            best = max(best, count)
    return best


def check(name: str, v: Variant) -> None:
    compiled, addresses = launch.build(v, "fp32" if not v.store_tma else v.dtype, "fp32", "fp32")
    check_compiled(name, v, addresses, compiled.metadata.shared, *machine_code(compiled.asm["ptx"]))


def check_compiled(name: str, v: Variant, addresses: Addresses, shared: int, said: str, listing: str) -> None:
    """Whatever Triton compiled it: where it put barriers, the bytes of shared memory, what ptxas said, and the machine code."""
    assert addresses == compiling.predicted_addresses(v), "a second compilation was needed: the compiler places shared memory elsewhere"
    assert shared <= SHARED_MEMORY_LIMIT
    assert "C75" not in said and "serializ" not in said.lower(), said
    stores = int(re.search(r"(\d+) bytes spill stores", said).group(1))
    assert stores <= SPILLS.get(name, 0), said
    loops = key_loops(listing)
    assert len(loops) == v.warpgroups
    exponentials = v.block_n // 2  # a thread's share of P
    for body in loops:
        assert sum("HGMMA" in line for line in body) >= 4
        reloads = sum("LDL" in line or "STL" in line for line in body)
        assert reloads <= RELOADS.get(name, 0), "spills inside the loop over key blocks"
        under = exponentials // 2 if v.split else exponentials
        assert exponentials_between_waits(body) >= under, "ptxas moved the exponentials out from under the PV product"


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
    tensors = [{}, {"bias": "tma"}, {"mask": "tma"}, {"bias": "tma", "mask": "tma"}] if max(dim, dim_v) <= 128 else [{}]
    for store_tma, forms in itertools.product((True, False), tensors):
        v = variant(dim, dim_v, store_tma=store_tma, **forms)
        assert v.chunk * v.chunks >= dim and v.dim_v >= dim_v
        assert v.tile_bytes + SCRATCH <= SHARED_MEMORY_LIMIT
        assert v.barriers <= v.barrier_words


def test_out_leaves_inside_its_own_part_of_the_query_buffer():
    from tilewise.kernels.hopper.epilogue import out_slot

    for dim in (64, 96, 128, 192, 256):
        for dim_v in (64, 128, 256):
            v = variant(dim, dim_v)
            if v.own_out_buffer:
                continue
            for warpgroup in range(v.warpgroups):
                start = out_slot(v, warpgroup) * v.out_bytes
                mine = v.chunks * v.q_bytes
                assert warpgroup * mine <= start and start + v.out_bytes <= (warpgroup + 1) * mine


def test_tiles_fit_their_registers():
    for tile in TILES.values():
        warps = -(-(4 * tile.warpgroups + 1) // 4) * 4
        others = 4 * (tile.warpgroups - 1) * tile.consumer_registers + 4 * tile.producer_registers
        assert tile.launch_registers * warps - others >= 4 * tile.consumer_registers
        assert tile.launch_registers * warps * 32 <= 65_536
    assert configs.ROWS == 64
