"""What a kernel of the lab takes on chip, from the compiler alone: shared memory, registers, spilled bytes. Needs Triton, not a GPU.

This is where the limit on the head dimension comes from. A tile of Q, its accumulator and the K and V tiles grow with D; once they
exceed the shared memory of a block or the registers of its threads, the kernel cannot launch or spills to device memory.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import results
from .predict import Case
from .predict import fa2_forward as predict_fa2
from .predict import split_dim_forward as predict_split
from .traffic import Tiles

REGISTERS_PER_THREAD = 255
REGISTERS_PER_BLOCK = 65536


@dataclass(frozen=True, slots=True)
class Resources:
    """Of one compiled kernel; `spill_bytes` counts stores and loads of a thread as the assembler reports them."""

    shared_bytes: int
    registers: int
    spill_bytes: int
    warps: int

    def fits(self, shared_limit: int) -> bool:
        """Whether a block of it can be launched at all."""
        return self.shared_bytes <= shared_limit and self.registers * self.warps * 32 <= REGISTERS_PER_BLOCK


def fa2_forward(d: int, block_m: int, block_n: int, dtype: str = "bf16", capability: int = 90) -> Resources:
    """The forward kernel of `lab.triton.fa2` at head dimension `d` (a power of two) and these tiles.

    Raises:
        RuntimeError: the compiler or the assembler refuses the kernel; the message is its own.
    """
    from .triton import fa2

    pointers = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "o_ptr"), f"*{dtype}") | {"lse_ptr": "*fp32"}
    sizes = {"D": d, "BLOCK_M": block_m, "BLOCK_N": block_n}
    return _compile(fa2.forward_kernel, pointers, {"scale": "fp32", "n": "i32"}, sizes, fa2.warps(block_m, d), 2, capability)


def split_dim_forward(d: int, piece: int, block_m: int, block_n: int, dtype: str = "bf16", capability: int = 90) -> Resources:
    """The forward kernel of `lab.triton.split_dim`; `d` is not part of it, which is the point."""
    from .triton import split_dim

    pointers = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "o_ptr"), f"*{dtype}") | {"lse_ptr": "*fp32"}
    sizes = {"PIECE": piece, "BLOCK_M": block_m, "BLOCK_N": block_n}
    return _compile(split_dim.forward_kernel, pointers, {"scale": "fp32", "n": "i32", "d": "i32"}, sizes, 8, 2, capability)


def _compile(
    kernel: Any, pointers: dict[str, str], scalars: dict[str, str], constants: dict[str, int], warps: int, stages: int, capability: int
) -> Resources:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = pointers | scalars | dict.fromkeys(constants, "constexpr")
    # As the launcher finds them: tensors start on 16 bytes, lengths are multiples of 16.
    aligned = [index for index, (name, kind) in enumerate(signature.items()) if name in pointers or kind == "i32"]
    attrs = {(index,): [["tt.divisibility", 16]] for index in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    try:
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps, "num_stages": stages})
        report = _assemble(compiled.asm["ptx"], capability)
    except subprocess.CalledProcessError as error:
        raise RuntimeError(error.stderr) from error
    registers = re.search(r"Used (\d+) registers", report)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert registers and spills, report
    return Resources(compiled.metadata.shared, int(registers[1]), int(spills[1]) + int(spills[2]), warps)


def _assemble(ptx: str, capability: int) -> str:
    """What the assembler says of a kernel."""
    from triton.backends.nvidia import compiler

    ptxas = compiler.get_ptxas(capability).path
    arch = f"sm_{capability}a" if capability >= 90 else f"sm_{capability}"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [ptxas, "-v", f"--gpu-name={arch}", str(source), "-o", str(Path(folder) / "kernel.cubin")]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
    return result.stderr + result.stdout


def limits(head_dims: tuple[int, ...], tiles: tuple[tuple[int, int], ...], shared_limit: int = 232448) -> list[results.Row]:
    """A row for every head dimension and tile: what the forward kernels of `fa2` and `split_dim` take on Hopper, and whether that fits.

    `on_chip_bytes` is what the algorithm itself names; the compiler's double buffering of K and V comes on top of it in `shared_bytes`.
    """
    rows = []
    for d in head_dims:
        for block_m, block_n in tiles:
            case = Case(1, 4096, d, 2, Tiles(block_m, block_n), piece=128)
            for name in ("fa2", "split_dim") if (block_m, block_n) == (64, 64) and d >= 128 else ("fa2",):
                row: results.Row = {
                    "experiment": "headdim", "algorithm": name, "pass": "fwd", "head_dim": d, "block_m": block_m, "block_n": block_n,
                    "dtype": "bfloat16", "capability": 90, "shared_limit": shared_limit, "status": "ok",
                    "on_chip_bytes": (predict_fa2 if name == "fa2" else predict_split)(case).on_chip_bytes,
                }  # fmt: skip
                try:
                    found = fa2_forward(d, block_m, block_n) if name == "fa2" else split_dim_forward(d, 128, block_m, block_n)
                    row |= {"shared_bytes": found.shared_bytes, "registers": found.registers, "spill_bytes": found.spill_bytes}
                    row |= {"warps": found.warps, "fits": found.fits(shared_limit)}
                except RuntimeError as refusal:
                    row |= {"status": "unsupported", "reason": str(refusal)[:300], "fits": False}
                rows.append(row)
                print(row, flush=True)
    return rows


def command() -> None:
    """`python -m tilewise.lab.resources --out FILE`: the head-dimension limit as results rows, without a GPU."""
    parser = argparse.ArgumentParser(description=command.__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--head-dims", default="64,128,256,512")
    parser.add_argument("--tiles", default="128x64,64x64,64x32,32x32,16x16")
    given = parser.parse_args()
    tiles = tuple((int(m), int(n)) for m, n in (text.split("x") for text in given.tiles.split(",")))
    shared = results.common("cpu") | {"device": "sm_90, compiled without a GPU"}
    results.write((shared | row for row in limits(tuple(int(d) for d in given.head_dims.split(",")), tiles)), given.out)


if __name__ == "__main__":
    command()
