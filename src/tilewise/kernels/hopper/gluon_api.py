"""The one place that names Gluon: the experimental language is spelled differently by Triton 3.6 and 3.9.

Everything the Hopper kernels need from `triton.experimental.gluon` is imported from here, under one spelling. A new Triton release
that renames something is answered in this file alone.
"""

import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate

from ..kernel_cache import prepare
from ..triton import meanwhile
from ..triton.launching import Descriptor

__all__ = [
    "BarrierLayout",
    "Descriptor",
    "aggregate",
    "barrier_init",
    "barrier_invalidate",
    "block_barrier",
    "compile_kernel",
    "constexpr_function",
    "descriptor_type",
    "expect_bytes",
    "fence_async_shared",
    "gl",
    "jit",
    "machine_code",
    "memdesc_type",
    "reinterpret",
    "shared_layout",
    "tma_load",
    "tma_reduce_add",
    "tma_store",
    "tma_store_wait",
    "warp_specialize",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]

prepare()

jit = gluon.jit
constexpr_function = gluon.constexpr_function
aggregate = getattr(gluon, "aggregate", _aggregate)
warp_specialize = gl.warp_specialize

memdesc_type = gl.shared_memory_descriptor
descriptor_type = tma.tensor_descriptor

# The old names still exist in 3.9 but raise, so the new one is looked for.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
tma_store_wait = tma.store_wait
block_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@builtin
def tma_reduce_add(desc, coord, src, _semantic=None):
    """Add a tile in shared memory to global memory, element by element and atomically; in the background, like `tma_store`."""
    if hasattr(tma, "async_atomic_add"):
        tma.async_atomic_add(desc, coord, src, _semantic=_semantic)
    else:  # 3.6 has the operation, but no function that emits it
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


@builtin
def reinterpret(memdesc, dtype, shape, layout, _semantic=None):
    """The same shared memory under another dtype, shape and layout."""
    method = getattr(memdesc, "reinterpret", None) or memdesc._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)


BarrierLayout = mbarrier.MBarrierLayout
barrier_init = mbarrier.init
barrier_invalidate = mbarrier.invalidate
expect_bytes = mbarrier.expect  # the byte count is positional: its keyword differs between releases


def shared_layout(swizzle_bytes: int, rank: int, element_bits: int = 16) -> gl.NVMMASharedLayout:
    """The layout in which TMA writes a tile and wgmma reads it: rows of `swizzle_bytes`, swizzled inside that width."""
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle_bytes, element_bitwidth=element_bits, rank=rank)


def compile_kernel(fn, signature: dict[str, str], constants: dict, *, num_warps: int, maxnreg: int):
    """Compile a Gluon function for sm_90a; needs no GPU. `signature` maps every argument to its Triton type.

    The result is launched as `kernel[(x, y, z)](*arguments)`, constants included, and is cached on disk by Triton.
    """
    names = list(signature)
    keyed = {(names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(fn=fn, signature=signature, constexprs=keyed, attrs={})
    options = {"num_warps": num_warps, "maxnreg": maxnreg, "enable_fp_fusion": True}
    with meanwhile.launcher_made(source):
        return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def _assembler() -> str:
    from triton.backends.nvidia import compiler

    try:
        return compiler.get_ptxas(90).path
    except TypeError:
        return compiler.get_ptxas().path


def machine_code(ptx: str) -> tuple[str, str]:
    """(what ptxas says with -v, the SASS listing) of a kernel's PTX, with the assembler that Triton itself uses."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [_assembler(), "-v", "--gpu-name=sm_90a", str(source), "-o", str(binary)]
        said = subprocess.run(command, capture_output=True, text=True, check=True)
        listing = subprocess.run([str(tools / "cuobjdump"), "-sass", str(binary)], capture_output=True, text=True, check=True)
    return said.stdout + said.stderr, re.sub(r"[ \t]+", " ", listing.stdout)
