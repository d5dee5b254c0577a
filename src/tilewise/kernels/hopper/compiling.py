"""From a variant to its compiled kernel: the types of its arguments, and where the compiler put what raw PTX touches."""

from __future__ import annotations

import re
from typing import Any

from .configs import Addresses, Variant
from .forward_pass import V_MARK, attention_forward
from .gluon_api import compile_kernel, shared_layout


def signature(variant: Variant, out: str, slopes: str, sink: str) -> dict[str, str]:
    """The Triton types of `attention_forward`'s arguments; out, slopes and sink name the element types of theirs."""

    def tiled(rows: int, columns: int, swizzle: int, heads: int = 1) -> str:
        return f"tensordesc<{variant.dtype}[1, {heads}, {rows}, {columns}],{shared_layout(swizzle, 4)!r}>"

    bias, mask = (matrix_type(dtype, 64, variant.block_n) for dtype in (variant.bias_dtype, "u8"))
    special = {
        "q_desc": tiled(variant.own_queries, variant.chunk, variant.q_swizzle, variant.own_heads),
        "k_desc": tiled(variant.block_n, variant.chunk, variant.q_swizzle),
        "v_desc": tiled(variant.block_n, variant.dim_v, variant.v_swizzle),
        "o_desc": tiled(variant.own_queries, variant.dim_v, variant.v_swizzle, variant.own_heads),
        "lse_ptr": "*fp32",
        "out_ptr": f"*{out}",
        "counter_ptr": "*i32",
        "lengths_q_ptr": "*i32",
        "lengths_k_ptr": "*i32",
        "records_ptr": "*i32",
        "partial_ptr": "*i32",
        "full_ptr": "*i32",
        "slopes_ptr": f"*{slopes}",
        "sink_ptr": f"*{sink}",
        "bias_desc": bias if variant.bias == "tma" else "constexpr",
        "bias_ptr": f"*{variant.bias_dtype}",
        "mask_desc": mask if variant.mask == "tma" else "constexpr",
        "mask_ptr": "*u8",
        "seed_ptr": "*i64",
        "found_ptr": "*i32",
        "keep_scale": "fp32",
        "scale": "fp32",
        "exp_scale": "fp32",
        "softcap": "fp32",
        "stride_out_b": "i64",
        "stride_out_h": "i64",
        "stride_out_s": "i64",
        **{f"stride_{name}_{dim}": "i64" for name in ("bias", "mask") for dim in "bhm"},
        "C": "constexpr",
        "A": "constexpr",
    }
    return {name: special.get(name, "i32") for name in attention_forward.arg_names}


def matrix_type(dtype: str, rows: int, keys: int) -> str:
    """The Triton type of a descriptor of bias or mask tiles."""
    size = 1 if dtype == "u8" else 2
    return f"tensordesc<{dtype}[1, 1, {rows}, {keys}],{shared_layout(min(128, size * keys), 4, 8 * size)!r}>"


def _barrier_offsets(ptx: str) -> dict[int, list[int]]:
    """Offsets in shared memory of the barriers that a kernel initialises, by their count of arrivals."""
    found: dict[int, list[int]] = {}
    for register, count in re.findall(r"mbarrier\.init\.shared::cta\.b64 \[(%r\d+)\], (\d+);", ptx):
        sums = re.findall(rf"add\.s32\s+{re.escape(register)}, %r\d+, (\d+);", ptx)
        found.setdefault(int(count), []).extend(int(x) for x in sums)
    return found


def barrier_address(ptx: str) -> int:
    """Where the compiler placed the first barrier."""
    return min(x for offsets in _barrier_offsets(ptx).values() for x in offsets)


def addresses_in(ptx: str, variant: Variant) -> Addresses:
    """Where the compiler placed the barriers and, for a variant with key lengths, the V tiles."""
    found = _barrier_offsets(ptx)
    marks = found.pop(V_MARK.value, None) or [0]  # nothing is added to reach the start
    return Addresses(min(x for offsets in found.values() for x in offsets), marks[0])


def predicted_addresses(variant: Variant) -> Addresses:
    """Where they usually are: large buffers first, those of one size in the order of their allocation, the barriers behind them."""
    q = variant.warpgroups * variant.q_stages * variant.chunks * variant.q_bytes
    k = variant.stages * variant.chunks * variant.k_bytes
    v = variant.stages * variant.v_bytes
    before = sum(x for x in (q, k) if x >= v) + sum(x for x in (variant.bias_ring, variant.mask_ring) if x > v)
    return Addresses(variant.tile_bytes, before if variant.lengths_k else 0)


def compile_forward(variant: Variant, out: str, slopes: str, sink: str) -> tuple[Any, Addresses]:
    """Compile a variant. The offsets that its raw PTX uses are compared with where the compiler put things, and corrected once."""
    types = signature(variant, out, slopes, sink)
    absent = {name: None for name in ("bias_desc", "mask_desc") if types[name] == "constexpr"}
    addresses = predicted_addresses(variant)
    for _ in range(2):
        kernel = compile_kernel(
            attention_forward,
            types,
            {"C": variant, "A": addresses, **absent},
            num_warps=4,
            maxnreg=variant.tile.launch_registers,
        )
        actual = addresses_in(kernel.asm["ptx"], variant)
        if actual == addresses:
            return kernel, addresses
        addresses = actual
    raise RuntimeError(f"the compiler moved shared memory between two compilations of {variant}")
