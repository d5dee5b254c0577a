"""Compile the Triton kernels for GPUs that are not here, and record what the compiler made of them.

``python scripts/compile_all.py`` compiles the full matrix and writes benchmarks/compiled.json: registers, spilled bytes and shared memory
of each kernel, with a hash of the sources that they came from. ``--sample`` compiles a few of each; ``--check`` only compares the hash;
``--target`` takes one GPU. Rows of other targets and other versions of Triton stay in the table as long as the sources have not changed.
A case that spills more bytes than its row in the table, under the same Triton, is an error; ``--let-spills-grow`` writes the table anyway.
Needs Triton and no torch; without a GPU of the kind.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import itertools
import json
import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "benchmarks" / "compiled.json"
SOURCES = ROOT / "src" / "tilewise" / "kernels" / "triton"
TARGETS = {
    "sm80": ("cuda", 80, 32),
    "sm90": ("cuda", 90, 32),
    "sm100": ("cuda", 100, 32),
    "sm120": ("cuda", 120, 32),
    "gfx942": ("hip", "gfx942", 64),
}
KERNELS = ("attention_forward", "row_terms", "lse_rest", "attention_dkdv", "attention_dq", "bias_gradient", "schedule", "sum_rows")
KERNELS += ("find_nonfinite", "attention_jvp", "key_mass", "row_tangents", "attention_dq_tangent", "attention_dkdv_tangent")
PURPOSE = {"attention_forward": "forward", "lse_rest": "forward", "attention_dkdv": "dkdv", "attention_dq": "dq", "bias_gradient": "dbias"}
PURPOSE["key_mass"] = "dkdv"
# Kernels with tiles of their own, see `tangents.configs`.
TANGENTS = {"attention_jvp": "forward", "row_tangents": "rows", "attention_dq_tangent": "dq", "attention_dkdv_tangent": "dkdv"}
FEATURES = (
    "plain",
    "causal",
    "window",
    "mask",
    "bias",
    "softcap",
    "alibi",
    "dropout",
    "sink",
    "seqused",
    "gqa",
    "program",
    "packed",
    "lists",
    "hidden",
    "aux",
    "everything",
)

# What `kernels.triton.emission` makes of score + table[h, q_idx - kv_idx + n] * gate[h], of its derivative with gradients of both tensors,
# and of (documents[b, q_idx] == documents[b, kv_idx]) & (q_idx >= kv_idx).
LOADS = """score f
h i
q_idx i
kv_idx i
sub i 2 3
const i 4095
add i 4 5
load f 0 inside,narrow,adjacent 1 6
load f 1 inside,narrow,adjacent 1
"""
SCORE_MOD = LOADS + "mul f 7 8\nadd f 0 9"
SCORE_GRAD = LOADS.replace("score f", "grad f") + "chain f 0 8\nchain f 0 7\nscatter f 0 - 9 1 6\n"
SCORE_GRAD += "scatter f 1 sum_rows,sum_cols 10 1\nfloat f 0"
MASK_MOD = """b i
q_idx i
kv_idx i
load i 2 inside,narrow,adjacent 0 1
load i 2 inside,narrow,adjacent 0 2
eq b 3 4
ge b 1 2
and b 5 6"""
CAPTURED, CAPTURED_SIZES = ("*bf16", "*fp32", "*i32"), (("i64",) * 4, ("i64",) * 2, ("i64",) * 4)


@dataclass(frozen=True)
class Case:
    kernel: str
    target: str
    head_dim: int
    dtype: str  # as Triton spells it
    features: str  # "+"-joined

    @property
    def bits(self) -> int:
        return 32 if self.dtype == "fp32" else 16

    def has(self, *names: str) -> bool:
        on = self.features.split("+")
        return "everything" in on or any(name in on for name in names)


def kernels_package(source: Path = SOURCES):
    """The kernels without `tilewise/__init__.py`, which needs torch."""
    for name, folder in (("tilewise", source.parent.parent), ("tilewise.kernels", source.parent)):
        if name not in sys.modules:
            package = types.ModuleType(name)
            package.__path__ = [str(folder)]
            sys.modules[name] = package
    from tilewise.kernels.triton import bias_gradient, configs, dkdv, dq, finite, forward_pass, key_mass, lse_rest, packed, row_terms
    from tilewise.kernels.triton.tangents import dkdv as dkdv_tangent
    from tilewise.kernels.triton.tangents import dq as dq_tangent
    from tilewise.kernels.triton.tangents import forward as tangents
    from tilewise.kernels.triton.tangents import rows

    return configs, {
        "attention_forward": forward_pass.attention_forward,
        "row_terms": row_terms.row_terms,
        "lse_rest": lse_rest.lse_rest,
        "attention_dkdv": dkdv.attention_dkdv,
        "attention_dq": dq.attention_dq,
        "bias_gradient": bias_gradient.bias_gradient,
        "schedule": packed.schedule,
        "sum_rows": packed.sum_rows,
        "find_nonfinite": finite.find_nonfinite,
        "key_mass": key_mass.key_mass,
        "attention_jvp": tangents.attention_jvp,
        "row_tangents": rows.row_tangents,
        "attention_dq_tangent": dq_tangent.attention_dq_tangent,
        "attention_dkdv_tangent": dkdv_tangent.attention_dkdv_tangent,
    }


def source_hash() -> str:
    digest = hashlib.sha256()
    for path in [*sorted(SOURCES.glob("*.py")), *sorted(SOURCES.glob("tangents/*.py"))]:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def config_of(case: Case, configs):
    """The tiles that the case runs with on a device of its target; None for a kernel without a choice."""
    if case.kernel not in PURPOSE and case.kernel not in TANGENTS:
        return None
    named = {"window": "window_left", "seqused": "lengths", "packed": "lengths"}
    used = frozenset(named.get(feature, feature) for feature in FEATURES if case.has(feature))
    limit, block = configs.SHARED_LIMIT[case.target], configs.padded(case.head_dim)
    if case.kernel in TANGENTS:
        from tilewise.kernels.triton.tangents import configs as tangents

        return tangents.choose(case.target, limit, case.bits, TANGENTS[case.kernel], used, block, block)
    return configs.choose(case.target, limit, case.bits, PURPOSE[case.kernel], used, block, block)


def estimated_shared(case: Case, configs) -> int:
    block = configs.padded(case.head_dim)
    if case.kernel in TANGENTS:
        from tilewise.kernels.triton.tangents import configs as tangents

        return tangents.shared_bytes(config_of(case, configs), case.target, case.bits, TANGENTS[case.kernel], block, block)
    used = frozenset(feature for feature in FEATURES if case.has(feature))
    return configs.shared_bytes(config_of(case, configs), case.bits, PURPOSE[case.kernel], block, block, used)


def argument_types(case: Case, parameters, configs) -> tuple[dict[str, str], dict]:
    """Triton's signature and compile-time constants for one case, from the names of a kernel's parameters."""
    block, config = configs.padded(case.head_dim), config_of(case, configs)
    constants: dict[str, object] = {"D": case.head_dim, "DV": case.head_dim, "BLOCK_D": block, "BLOCK_DV": block}
    constants |= {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n} if config else {"BLOCK_M": 64}
    tma = bool(config and config.descriptors and case.kernel not in ("lse_rest", "key_mass"))
    natural = case.bits == 32 or case.has("bias", "softcap", "alibi", "program")
    natural |= case.kernel in ("lse_rest", "bias_gradient")
    constants |= {
        "ALIGN": 128 // case.bits,
        "TMA": tma,
        "TMA_DO": tma,
        "NATURAL": natural,
        "SANITIZE": case.has("window", "mask", "bias", "seqused", "program", "packed", "lists", "hidden"),
        "HIDE": case.has("hidden"),
        "PRECISION": "ieee",
        "FRUGAL": bool(config and config.frugal),
        "GROUPED": case.has("gqa"),
        "BLOCK": 128,
        "CHUNK": configs.CHUNK,
        "OVER_KEYS": False,
        "KEYS": False,
        "KEEP": True,
        "DENSE": case.has("mask", "bias", "program") or case.kernel == "bias_gradient",
        "SCORE_MOD": SCORE_MOD if case.has("program") else "",
        "MASK_MOD": MASK_MOD if case.has("program") else "",
        "SCORE_GRAD": SCORE_GRAD if case.has("program") else "",
        "BIAS_ALIGN": 128 // case.bits,
        "MASK_ALIGN": 16,
        "DBIAS_ALIGN": 4,
        "LIST_M": 128 if case.has("lists") else 0,
        "LIST_N": 128 if case.has("lists") else 0,
    }
    if case.kernel != "attention_dq":
        constants["SCORE_GRAD"] = "\n".join(line for line in constants["SCORE_GRAD"].split("\n") if not line.startswith("scatter"))
    bias = case.has("bias") or case.kernel in ("lse_rest", "bias_gradient")
    optional = {
        "bias_ptr": f"*{case.dtype}" if bias else None,
        "mask_ptr": "*u8" if case.has("mask") else None,
        "slopes_ptr": "*fp32" if case.has("alibi") else None,
        "sink_ptr": "*fp32" if case.has("sink") else None,
        "sink_partial_ptr": "*fp32" if case.has("sink") else None,
        "seqused_q_ptr": "*i32" if case.has("seqused") else None,
        "seqused_k_ptr": "*i32" if case.has("seqused") else None,
        "cu_seqlens_q_ptr": "*i32",
        "cu_seqlens_k_ptr": "*i32",
        "tiles_ptr": "*i32" if case.has("packed") or case.kernel == "schedule" else None,
        "slots": "i32" if case.has("packed") or case.kernel == "schedule" else None,
        "sequences_ptr": "*i32" if case.has("packed") or case.kernel in ("schedule", "sum_rows") else None,
        "seed_ptr": "*i64" if case.has("dropout") else None,
        "softcap": "fp32" if case.has("softcap") else None,
        "window_left": "i32" if case.has("window") else None,
        "window_right": "i32" if case.has("causal", "window") else None,
        "dlse_ptr": None,
        "tdlse_ptr": None,
        "rest_ptr": "*fp32" if bias or case.kernel == "lse_rest" else None,
        "dbias_ptr": "*fp32" if case.kernel == "bias_gradient" else None,
        "bias_rows_ptr": None,
        "bias_cols_ptr": "*fp32" if bias and case.kernel == "attention_dkdv" else None,
        "slope_rows_ptr": "*fp32" if case.has("alibi") else None,
        "tbias_ptr": f"*{case.dtype}" if case.has("bias") else None,
        "tslopes_ptr": "*fp32" if case.has("alibi") else None,
        "tsink_ptr": "*fp32" if case.has("sink") else None,
        "captured_ptr": CAPTURED if case.has("program") else None,
        "captured_sizes": CAPTURED_SIZES if case.has("program") else None,
        "nonfinite_ptr": "*i32",
        "largest_ptr": "*fp32" if case.has("aux") else None,
        "entropy_ptr": "*fp32" if case.has("aux") else None,
        "lists_ptr": ("*i32", "*i32", "*i32", "*i32", "*i64") if case.has("lists") else None,
        "list_sizes": ("i64",) * 6 if case.has("lists") else None,
        "dcaptured_ptr": ("*fp32", "*fp32", "constexpr") if case.has("program") else None,
    }
    floats = {"scale", "unit", "unit_exact", "keep_scale", "lse_scale"}
    statistics = {"lse_ptr", "tlse_ptr", "row_lse_ptr", "row_tlse_ptr", "delta_ptr", "tdelta_ptr", "partial_ptr", "result_ptr", "mass_ptr"}

    def kind(name: str) -> str | tuple | None:
        if name in optional:
            return optional[name]
        if name.endswith("_ref"):
            rows = constants["BLOCK_M"] if name in ("q_ref", "do_ref") else constants["BLOCK_N"]
            return f"tensordesc<{case.dtype}[1, 1, {rows}, {block}]>" if tma else f"*{case.dtype}"
        if name.endswith("_ptr"):
            return "*fp32" if name in statistics else f"*{case.dtype}"
        if name.startswith("stride_"):
            adjacent = name in ("stride_bias_n", "stride_mask_n", "stride_dbias_n") or (name.endswith("d") and name.count("_") == 1)
            return None if adjacent else "i32" if "slopes" in name else "i64"
        return "fp32" if name in floats else "i64" if name == "dropout_threshold" else "i32"

    signature, values = {}, {}
    for index, parameter in enumerate(parameters.values()):
        name = parameter.name
        if name in constants:
            signature[name], values[(index,)] = "constexpr", constants[name]
        elif (type_ := kind(name)) is None:
            signature[name], values[(index,)] = "constexpr", None
        else:
            signature[name] = type_
            if name == "dcaptured_ptr":  # the document numbers have no gradient
                values[(index, 2)] = None
    options = {"num_warps": config.num_warps if config else 4, "num_stages": config.num_stages if config else 1}
    return signature, {"constexprs": values, "options": options}


def compile_case(case: Case, keep: bool = False) -> dict:
    """Compile one kernel; its registers, spilled bytes and shared memory (AMD: LDS), and the text of `keep`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    configs, kernels = kernels_package()
    kernel = kernels[case.kernel]
    signature, chosen = argument_types(case, inspect.signature(kernel.fn).parameters, configs)
    attributes = {(i,): [["tt.divisibility", 16]] for i, type_ in enumerate(signature.values()) if str(type_).startswith("*")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=chosen["constexprs"], attrs=attributes)
    options = {**chosen["options"], "enable_fp_fusion": True}
    binary = triton.compile(source, target=GPUTarget(*TARGETS[case.target]), options=options)
    row = {**asdict(case), "triton": triton.__version__, "shared": binary.metadata.shared}
    row |= nvidia_resources(binary) if case.target.startswith("sm") else amd_resources(binary)
    return {**row, "asm": binary.asm} if keep else row


def nvidia_resources(binary) -> dict:
    """From the compiled object itself: `cuobjdump -res-usage`, and local loads and stores in its machine code."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage = subprocess.run([knobs.nvidia.cuobjdump.path, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage.stdout + usage.stderr)}
    return {"registers": found["REG"], "spilled": found["STACK"] + found["LOCAL"]}


def amd_resources(binary) -> dict:
    text = binary.asm["amdgcn"]
    number = {key: int(value) for key, value in re.findall(r"\.(vgpr_count|agpr_count|private_segment_fixed_size):\s+(\d+)", text)}
    return {"registers": number["vgpr_count"], "spilled": number["private_segment_fixed_size"]}


WALKS = ("attention_forward", "attention_dkdv", "attention_dq")  # the kernels that walk tiles: all of the time, nearly all of the registers


def matrix() -> Iterator[Case]:
    """The kernels that walk tiles for every target, head dim and dtype of the configuration table; each feature on the two architectures
    whose own rows it has; the small kernels once a target."""
    for target in TARGETS:
        for kernel in WALKS:
            for dim, features in itertools.product((64, 128, 256), ("plain", "causal")):
                yield Case(kernel, target, dim, "bf16", features)
            yield Case(kernel, target, 128, "fp16", "causal")
            yield Case(kernel, target, 128, "fp32", "causal")
            if target in ("sm80", "sm90"):
                yield from (Case(kernel, target, 128, "bf16", features) for features in FEATURES[2:])
        yield from (Case(kernel, target, 128, "bf16", "causal") for kernel in KERNELS if kernel not in WALKS)
        for kernel in TANGENTS:
            yield from (Case(kernel, target, dim, "bf16", "causal") for dim in (64, 256))
            yield Case(kernel, target, 128, "bf16", "plain")
            yield Case(kernel, target, 64, "fp32", "causal")


def sample() -> Iterator[Case]:
    """What continuous integration compiles: each kernel for each target, the hot ones of sm90, and one call with every feature."""
    for target in TARGETS:
        yield from (Case(kernel, target, 128, "bf16", "causal") for kernel in KERNELS if kernel not in ("schedule", "sum_rows"))
    yield Case("schedule", "sm90", 128, "bf16", "packed")
    for kernel in ("attention_forward", "attention_dkdv", "attention_dq"):
        yield Case(kernel, "sm90", 128, "bf16", "plain")
        yield Case(kernel, "sm90", 64, "bf16", "causal")
        yield Case(kernel, "sm80", 64, "fp16", "everything")
    for kernel in ("row_tangents", "attention_dq_tangent", "attention_dkdv_tangent"):
        yield Case(kernel, "sm90", 128, "bf16", "plain")
        yield Case(kernel, "sm90", 64, "bf16", "causal")
    for kernel in ("attention_dkdv", "attention_dq"):  # these may spill, see `grown`
        yield Case(kernel, "sm90", 256, "bf16", "causal")
    yield Case("attention_dq", "sm90", 128, "fp32", "causal")


def main() -> int | str:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", action="store_true", help="a few cases of every target, as JSON lines, not written to the table")
    parser.add_argument("--check", action="store_true", help="only check that the table is of these sources")
    parser.add_argument("--target", choices=TARGETS, help="only this one")
    parser.add_argument("--let-spills-grow", action="store_true", help="write the table although a case spills more than its row")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    if options.check:
        fresh = json.loads(TABLE.read_text())["source_hash"] == source_hash()
        print("fresh" if fresh else "stale: run python scripts/compile_all.py")
        return 0 if fresh else 1
    cases = [case for case in (sample() if options.sample else matrix()) if options.target in (None, case.target)]
    before, rows = source_hash(), []
    with ProcessPoolExecutor(options.jobs) as pool:
        for row in pool.map(compile_case, cases):
            rows.append(row)
            print(json.dumps(row), flush=True)
    if options.sample:
        return "\n".join(grown(rows, committed()["rows"])) or 0  # a text goes to stderr, and the status is 1
    write_table(rows, before, options.let_spills_grow)
    return 0


def committed() -> dict:
    return json.loads(TABLE.read_text()) if TABLE.exists() else {"source_hash": "", "rows": []}


def grown(rows: list[dict], known: list[dict]) -> list[str]:
    """What spills more bytes than its row in the table, which another version of Triton says nothing about; a sentence for each.

    The table may be of older sources: that is how a change of a kernel is held to what the one before it spilled.
    """

    def key(row: dict) -> tuple:
        return (*(row[name] for name in ("kernel", "target", "head_dim", "dtype", "features")), f"Triton {row['triton']}")

    before = {key(row): row["spilled"] for row in known}
    return [
        f"{' '.join(map(str, key(row)))} spills {row['spilled']} bytes, and {before[key(row)]} in {TABLE.name}"
        for row in rows
        if row["spilled"] > before.get(key(row), row["spilled"])
    ]


def write_table(rows: list[dict], compiled_from: str, let_spills_grow: bool = False) -> None:
    if compiled_from != source_hash():
        raise SystemExit("the sources changed while they were compiled: nothing written")
    old = committed()
    worse = grown(rows, old["rows"])
    if worse and not let_spills_grow:
        raise SystemExit("\n".join([*worse, "nothing written: mend these kernels, or give --let-spills-grow"]))
    replaced = {(row["target"], row["triton"]) for row in rows}
    kept = [row for row in old["rows"] if old["source_hash"] == compiled_from and (row["target"], row["triton"]) not in replaced]
    lines = ",\n".join("  " + json.dumps(row) for row in kept + rows)
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(f'{{"source_hash": "{compiled_from}", "rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    sys.exit(main())
