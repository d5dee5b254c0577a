"""Compile the cache kernels for GPUs that are not here: registers, spilled bytes and shared memory of each, as JSON lines.

``python scripts/compile_cache.py`` compiles every case, ``--sample`` a few, ``--target`` those of one GPU. Needs Triton and no torch.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import types
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from compile_all import SOURCES, TARGETS, amd_resources, kernels_package, nvidia_resources

DEPENDENT = ("sm90", "sm100", "sm120")  # targets where a merge is set up while the parts are still read
FLOATS = ("scale", "unit", "unit_exact", "softcap")
TYPES = {"bf16": 16, "fp16": 16, "fp32": 32, "fp8e4nv": 8}


@dataclass(frozen=True)
class Case:
    kernel: str  # attention_cached, merge_parts or cache_append
    target: str
    rows: int = 8  # query tokens times the heads of a group
    head_dim: int = 128
    head_dim_v: int = 128
    dtype: str = "bf16"
    cache_dtype: str = ""  # empty: dtype
    page_size: int = 0  # 0: contiguous
    features: str = ""  # "+"-joined, of causal, window, mask, softcap, alibi, sink, rotary, lengths, packed, alone

    def has(self, name: str) -> bool:
        return name in self.features.split("+")


def cache_kernels():
    """The kernels and their configs, without the modules that need torch."""
    configs_of_dense, _ = kernels_package()
    for name, folder in (("tilewise.kernels.triton.cache", SOURCES / "cache"),):
        if name not in sys.modules:
            package = types.ModuleType(name)
            package.__path__ = [str(folder)]
            sys.modules[name] = package
    if "torch" not in sys.modules:  # the launchers import it at the top; the kernels do not use it
        sys.modules["torch"] = types.ModuleType("torch")
    if "tilewise.kernels.triton.cache.launch" not in sys.modules:
        launch = types.ModuleType("tilewise.kernels.triton.cache.launch")
        launch.CacheLaunch = launch.captured = launch.on_device = launch.table = launch.vectors = None
        sys.modules[launch.__name__] = launch
    from tilewise.kernels.triton.cache import appending, configs, decode, merge

    kernels = {"attention_cached": decode.attention_cached, "merge_parts": merge.merge_parts, "cache_append": appending.cache_append}
    return configs_of_dense, configs, kernels


def constants_of(case: Case) -> tuple[dict, dict]:
    """Compile-time arguments and options of a case."""
    dense, configs, _ = cache_kernels()
    if case.kernel == "cache_append":
        constants = {"D": case.head_dim, "DV": case.head_dim_v, "BLOCK_D": case.head_dim, "BLOCK_DV": case.head_dim_v, "BLOCK_R": 16}
        return constants | {"ALIGN": 8, "ROTARY": 64 if case.has("rotary") else 0, "INTERLEAVED": True}, {"num_warps": 4, "num_stages": 1}
    block_dv = max(16, 1 << (case.head_dim_v - 1).bit_length())
    if case.kernel == "merge_parts":
        constants = {"DV": case.head_dim_v, "BLOCK_DV": block_dv, "BLOCK_M": 16, "SEARCH": case.has("packed"), "BLOCK_S": 32}
        dependent = case.target in DEPENDENT
        options = {"num_warps": 4, "num_stages": 1} | ({"launch_pdl": True} if dependent else {})
        return constants | {"NATURAL": False, "DEPENDENT": dependent}, options
    main, rest = configs.column_blocks(case.head_dim)
    bits, cache_bits = TYPES[case.dtype], TYPES[case.cache_dtype or case.dtype]
    values_in_keys = main == block_dv and rest > 0
    config = configs.choose(
        case.target, dense.SHARED_LIMIT[case.target], bits, cache_bits, case.rows, main + rest, block_dv, values_in_keys,
        case.page_size > 0, case.has("alone"),
    )  # fmt: skip
    constants = {
        "D": case.head_dim,
        "DV": case.head_dim_v,
        "MAIN": main,
        "REST": rest,
        "BLOCK_DV": block_dv,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "PART": 0,
        "LEAST": 4,
        "PAGE_SIZE": case.page_size,
        "ROTARY": 64 if case.has("rotary") else 0,
        "INTERLEAVED": True,
        "VALUES_IN_KEYS": values_in_keys,
        "ALIGN": 128 // bits,
        "NATURAL": bits == 32 or cache_bits == 8 or case.has("softcap") or case.has("alibi"),
        "PRECISION": "ieee",
        "MASK_MOD": "",
        "SEARCH": case.has("packed"),
        "DEPENDENT": case.target in DEPENDENT,
    }
    return constants, {"num_warps": config.num_warps, "num_stages": config.num_stages}


def argument_types(case: Case, parameters) -> tuple[dict[str, str], dict]:
    """Triton's signature and compile-time values, from the names of a kernel's parameters."""
    constants, _ = constants_of(case)
    cache = case.cache_dtype or case.dtype
    optional = {
        "table_ptr": "*i32" if case.page_size else None,
        "lengths_ptr": "*i32",
        "index_ptr": None,
        "padding_ptr": None,
        "offsets_ptr": "*i32" if case.has("packed") else None,
        "cos_ptr": "*fp32" if case.has("rotary") else None,
        "sin_ptr": "*fp32" if case.has("rotary") else None,
        "mask_ptr": "*u8" if case.has("mask") else None,
        "slopes_ptr": "*fp32" if case.has("alibi") else None,
        "sink_ptr": "*fp32" if case.has("sink") else None,
        "k_scale_ptr": "*fp32" if cache == "fp8e4nv" else None,
        "v_scale_ptr": "*fp32" if cache == "fp8e4nv" else None,
        "work_ptr": "*fp32",
        "captured_ptr": None,
        "captured_sizes": None,
        "lse_ptr": "*fp32",
        "softcap": "fp32" if case.has("softcap") else None,
        "window_left": "i32" if case.has("window") else None,
        "window_right": "i32" if case.has("window") or case.has("causal") else None,
        "k_cache_ptr": f"*{cache}",
        "v_cache_ptr": f"*{cache}",
        "q_ptr": f"*{case.dtype}",
        "out_ptr": f"*{case.dtype}",
    }
    new = case.kernel == "cache_append"
    signature, values = {}, {}
    for index, parameter in enumerate(parameters.values()):
        name = parameter.name
        if name in constants:
            kind, values[(index,)] = "constexpr", constants[name]
        elif name in optional:
            kind = optional[name]
        elif name.endswith("_ptr"):
            kind = f"*{case.dtype if new else cache}"
        elif name.startswith("stride_"):
            kind = None if name.endswith("d") and name.count("_") == 1 else "i32" if name.endswith(("slopes", "scale")) else "i64"
        else:
            kind = "fp32" if name in FLOATS else "i32"
        if kind is None:
            kind, values[(index,)] = "constexpr", None
        signature[name] = kind
    return signature, values


def compile_case(case: Case, keep: bool = False) -> dict:
    """Compile one kernel; its registers, spilled bytes and shared memory, and the text with `keep`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = cache_kernels()[2][case.kernel]
    signature, values = argument_types(case, inspect.signature(kernel.fn).parameters)
    attributes = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attributes)
    options = {**constants_of(case)[1], "enable_fp_fusion": True}
    binary = triton.compile(source, target=GPUTarget(*TARGETS[case.target]), options=options)
    row = {**asdict(case), "triton": triton.__version__, "shared": binary.metadata.shared, **options}
    row |= nvidia_resources(binary) if case.target.startswith("sm") else amd_resources(binary)
    return {**row, "asm": binary.asm} if keep else row


def cases() -> Iterator[Case]:
    """Every kernel for every target; on the H200's architecture every number of rows, kind of page, dtype, head dim and feature."""
    for target in TARGETS:
        yield Case("attention_cached", target)
        yield Case("attention_cached", target, page_size=16, features="causal")
        yield Case("attention_cached", target, rows=128, features="causal")
        yield Case("merge_parts", target)
        yield Case("cache_append", target, features="rotary")
    for rows in (32, 64):
        yield Case("attention_cached", "sm90", rows=rows, features="causal")
    for rows in (8, 128):
        yield Case("attention_cached", "sm90", rows=rows, head_dim=64, head_dim_v=64)
    yield Case("attention_cached", "sm90", page_size=64)
    yield Case("attention_cached", "sm90", features="alone")
    yield Case("attention_cached", "sm90", head_dim=256, head_dim_v=256)
    yield Case("attention_cached", "sm90", rows=128, head_dim=576, head_dim_v=512)
    yield Case("attention_cached", "sm90", cache_dtype="fp8e4nv", page_size=16)
    yield Case("attention_cached", "sm90", dtype="fp32")
    yield Case("attention_cached", "sm90", rows=128, page_size=16, features="causal+packed")
    yield Case("attention_cached", "sm90", rows=32, features="window+mask+softcap+alibi+sink+rotary", page_size=16)


def sample() -> Iterator[Case]:
    """What continuous integration compiles: the decoding kernel with pages for every target, the others on the H200's architecture."""
    for target in TARGETS:
        yield Case("attention_cached", target, page_size=16, features="causal")
    yield Case("attention_cached", "sm90")
    yield Case("attention_cached", "sm90", features="alone")
    yield Case("attention_cached", "sm90", rows=64, features="causal")
    yield Case("merge_parts", "sm90")
    yield Case("cache_append", "sm90", features="rotary")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", action="store_true", help="a few cases")
    parser.add_argument("--target", choices=TARGETS, help="only this one")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    with ProcessPoolExecutor(options.jobs) as pool:
        for row in pool.map(
            compile_case, [case for case in (sample() if options.sample else cases()) if options.target in (None, case.target)]
        ):
            print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
