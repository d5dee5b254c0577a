"""From a variant of the backward pass to its compiled kernel; see `compiling`."""

from __future__ import annotations

from typing import Any

from .backward_configs import WARPS, BackwardVariant
from .backward_pass import attention_backward
from .compiling import barrier_address, matrix_type
from .gluon_api import compile_kernel, shared_layout


def signature(variant: BackwardVariant, slopes: str) -> dict[str, str]:
    """The Triton types of `attention_backward`'s arguments; `slopes` names the element type of the ALiBi slopes."""

    def tiled(rows: int, width: int, swizzle: int) -> str:
        return f"tensordesc<{variant.dtype}[1, 1, {rows}, {width}],{shared_layout(swizzle, 4)!r}>"

    row = f"tensordesc<fp32[{variant.block_m}],{shared_layout(0, 1, 32)!r}>"
    bias, mask = (matrix_type(dtype, variant.block_m, variant.block_n) for dtype in (variant.bias_dtype, "u8"))
    special = {
        "q_desc": tiled(variant.block_m, variant.dim, variant.swizzle),
        "k_desc": tiled(variant.block_n, variant.dim, variant.swizzle),
        "v_desc": tiled(variant.block_n, variant.dim_v, variant.swizzle_v),
        "do_desc": tiled(variant.block_m, variant.dim_v, variant.swizzle_v),
        "lse_desc": row,
        "delta_desc": row,
        "dq_desc": f"tensordesc<fp32[{variant.dq_box[0]}, {variant.dq_box[1]}],{shared_layout(128, 2, 32)!r}>",
        "dk_desc": tiled(variant.block_n, variant.dim, variant.swizzle),
        "dv_desc": tiled(variant.block_n, variant.dim_v, variant.swizzle_v),
        "lengths_q_ptr": "*i32",
        "lengths_k_ptr": "*i32",
        "slopes_ptr": f"*{slopes}",
        "dslopes_ptr": "*fp32",
        "seed_ptr": "*i64",
        "keep_scale": "fp32",
        "turns_ptr": "*i32",
        "key_sums_ptr": "*fp32",
        "records_ptr": "*i32",
        "partial_ptr": "*i32",
        "full_ptr": "*i32",
        "lse_rest_desc": row if variant.bias else "constexpr",
        "bias_desc": bias if variant.bias == "tma" else "constexpr",
        "bias_ptr": f"*{variant.bias_dtype}",
        "dbias_desc": matrix_type(variant.dtype, variant.block_m, variant.block_n) if variant.bias_gradient == "stored" else "constexpr",
        "dbias_ptr": "*fp32",
        "stride_dbias_b": "i64",
        "stride_dbias_h": "i64",
        "mask_desc": mask if variant.mask == "tma" else "constexpr",
        "mask_ptr": "*u8",
        **{f"stride_{name}_{dim}": "i64" for name in ("bias", "mask") for dim in "bhm"},
        "scale": "fp32",
        "exp_scale": "fp32",
        "softcap": "fp32",
        "out_scale": "fp32",
        "C": "constexpr",
        "A": "constexpr",
    }
    return {name: special.get(name, "i32") for name in attention_backward.arg_names}


def compile_backward(variant: BackwardVariant, slopes: str) -> tuple[Any, int]:
    """Compile a variant. The offset that its raw PTX uses is compared with where the compiler put the barriers, and corrected once."""
    types = signature(variant, slopes)
    absent = {name: None for name in ("lse_rest_desc", "bias_desc", "dbias_desc", "mask_desc") if types[name] == "constexpr"}
    address = variant.barrier_offset
    for _ in range(2):
        kernel = compile_kernel(
            attention_backward,
            types,
            {"C": variant, "A": address, **absent},
            num_warps=WARPS,
            maxnreg=variant.tile.launch_registers,
        )
        actual = barrier_address(kernel.asm["ptx"])
        if actual == address:
            return kernel, address
        address = actual
    raise RuntimeError(f"the compiler moved shared memory between two compilations of {variant}")
