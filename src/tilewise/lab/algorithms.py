"""The steps of the road as a table: how each is predicted, counted on any machine, and launched on a GPU.

All take the same `Inputs`; `run`, `gpu`, `profile` and the tests walk this table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from . import block_sparse, fa1, fa2, predict, softmax_rows, split_dim, standard
from .predict import Case, Prediction, Visit
from .traffic import DeviceMemory, DeviceTensor, Tiles, accumulator, tile_ranges

Results = dict[str, Tensor]
SOFTMAX_BLOCK = 1024


@dataclass(slots=True)
class Inputs:
    """q, k, v and dO as (heads, N, D) in one dtype, and a mask of tiles for the block-sparse step."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    tiles: Tiles
    density: float = 1.0
    piece: int = 0

    @staticmethod
    def random(
        heads: int, n: int, d: int, tiles: Tiles, *, dtype: torch.dtype = torch.float32, device: str = "cpu", density: float = 1.0,
        piece: int = 0, seed: int = 0,
    ) -> Inputs:  # fmt: skip
        """Normal numbers from a seed."""
        generator = torch.Generator(device).manual_seed(seed)
        q, k, v, do = (torch.randn(heads, n, d, generator=generator, dtype=torch.float32, device=device).to(dtype) for _ in range(4))
        return Inputs(q, k, v, do, tiles, density, piece)

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.q.shape[2])

    def case(self) -> Case:
        """The sizes alone."""
        heads, n, d = self.q.shape
        mask = self.tile_mask().to(torch.int64)
        rows, cols = (torch.tensor([s.stop - s.start for s in tile_ranges(n, block)]) for block in (self.tiles.block_m, self.tiles.block_n))
        visit = Visit(int(mask.sum()), int((mask @ cols).sum()), int((rows[:, None] * mask).sum()), int(rows @ mask @ cols))
        return Case(heads, n, d, self.q.element_size(), self.tiles, visit, self.piece or d)

    def tile_mask(self) -> Tensor:
        """Which tiles the block-sparse step visits (Tr, Tc), on the CPU."""
        n = self.q.shape[1]
        return block_sparse.random_mask(-(-n // self.tiles.block_m), -(-n // self.tiles.block_n), self.density)


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One step. `launch` prepares a GPU run and returns the call that is timed."""

    name: str
    pass_: str
    title: str
    predict: Callable[[Case, int], Prediction]  # the second argument: programs that run side by side
    count: Callable[[DeviceMemory, Inputs], Results] | None  # None: its traffic can be counted on a GPU only
    launch: Callable[[Inputs], Callable[[], Results]]


# --------------------------------------------------------------------------------------------------------------- counted runs


def _place(memory: DeviceMemory, inputs: Inputs) -> tuple[DeviceTensor, DeviceTensor, DeviceTensor, DeviceTensor]:
    q, k, v, do = (memory.place(name, getattr(inputs, name)) for name in ("q", "k", "v", "do"))
    return q, k, v, do


def _count_softmax(passes: int) -> Callable[[DeviceMemory, Inputs], Results]:
    def count(memory: DeviceMemory, inputs: Inputs) -> Results:
        x = memory.place("x", inputs.q.flatten(0, 1))
        y = memory.result("y", tuple(x.shape), x.dtype)
        if passes == 1:
            softmax_rows.one_pass(x, y)
        else:
            rung = softmax_rows.three_pass if passes == 3 else softmax_rows.two_pass
            rung(x, y, min(SOFTMAX_BLOCK, inputs.tiles.block_n))
        return {"y": y.data.view_as(inputs.q)}

    return count


def _count_standard(memory: DeviceMemory, inputs: Inputs) -> Results:
    q, k, v, _ = _place(memory, inputs)
    o = memory.result("o", tuple(q.shape), q.dtype)
    standard.forward(memory, q, k, v, o, inputs.scale, inputs.tiles)
    return {"o": o.data}


def _fa1_state(memory: DeviceMemory, inputs: Inputs) -> tuple[DeviceTensor, DeviceTensor, DeviceTensor]:
    dtype, shape = accumulator(inputs.q.dtype), tuple(inputs.q.shape)
    return memory.result("o", shape, dtype), memory.scratch("m", shape[:2], dtype), memory.scratch("l", shape[:2], dtype)


def _count_fa1_forward(memory: DeviceMemory, inputs: Inputs) -> Results:
    q, k, v, _ = _place(memory, inputs)
    o, m, l = _fa1_state(memory, inputs)
    fa1.forward(memory, q, k, v, o, m, l, inputs.scale, inputs.tiles)
    return {"o": o.data, "lse": m.data + torch.log(l.data)}


def _count_fa1_backward(memory: DeviceMemory, inputs: Inputs) -> Results:
    q, k, v, do = _place(memory, inputs)
    before = DeviceMemory()  # what the forward pass left behind is input here
    o, m, l = _fa1_state(before, inputs)
    fa1.forward(before, *_place(before, inputs)[:3], o, m, l, inputs.scale, inputs.tiles)
    o, m, l = (memory.place(x.name, x.data) for x in (o, m, l))
    dq = memory.result("dq", tuple(q.shape), accumulator(q.dtype))
    dk, dv = (memory.result(name, tuple(q.shape), q.dtype) for name in ("dk", "dv"))
    fa1.backward(q, k, v, o, m, l, do, dq, dk, dv, inputs.scale, inputs.tiles)
    return {"dq": dq.data, "dk": dk.data, "dv": dv.data}


def _outputs(memory: DeviceMemory, inputs: Inputs) -> tuple[DeviceTensor, DeviceTensor]:
    shape = tuple(inputs.q.shape)
    return memory.result("o", shape, inputs.q.dtype), memory.scratch("lse", shape[:2], accumulator(inputs.q.dtype))


def _count_fa2_forward(memory: DeviceMemory, inputs: Inputs) -> Results:
    q, k, v, _ = _place(memory, inputs)
    o, lse = _outputs(memory, inputs)
    fa2.forward(memory, q, k, v, o, lse, inputs.scale, inputs.tiles)
    return {"o": o.data, "lse": lse.data}


def _count_fa2_backward(memory: DeviceMemory, inputs: Inputs) -> Results:
    q, k, v, do = _place(memory, inputs)
    before = DeviceMemory()
    o, lse = _outputs(before, inputs)
    fa2.forward(before, *_place(before, inputs)[:3], o, lse, inputs.scale, inputs.tiles)
    o, lse = (memory.place(x.name, x.data) for x in (o, lse))
    dq, dk, dv = (memory.result(name, tuple(q.shape), q.dtype) for name in ("dq", "dk", "dv"))
    fa2.backward(memory, q, k, v, o, lse, do, dq, dk, dv, inputs.scale, inputs.tiles)
    return {"dq": dq.data, "dk": dk.data, "dv": dv.data}


def _count_split_dim(memory: DeviceMemory, inputs: Inputs) -> Results:
    q, k, v, _ = _place(memory, inputs)
    o, lse = _outputs(memory, inputs)
    split_dim.forward(memory, q, k, v, o, lse, inputs.scale, inputs.tiles, inputs.piece or q.shape[2])
    return {"o": o.data, "lse": lse.data}


def _count_block_sparse(memory: DeviceMemory, inputs: Inputs) -> Results:
    q, k, v, _ = _place(memory, inputs)
    o, lse = _outputs(memory, inputs)
    counts, indices = block_sparse.tile_lists(inputs.tile_mask())
    lists = [memory.scratch(name, tuple(x.shape), x.dtype) for name, x in (("counts", counts), ("indices", indices))]
    for target, source in zip(lists, (counts, indices), strict=True):
        target.data.copy_(source)  # made beforehand, from the mask alone
    block_sparse.forward(memory, q, k, v, o, lse, lists[0], lists[1], inputs.scale, inputs.tiles)
    return {"o": o.data, "lse": lse.data}


# -------------------------------------------------------------------------------------------------------------------- launches


def _kernels(name: str) -> ModuleType:
    """A module of `lab.triton`, imported only when a kernel is to run: Triton is optional."""
    import importlib

    return importlib.import_module(f"{__package__}.triton.{name}")


def _sizes(inputs: Inputs) -> dict[str, int]:
    return {"block_m": inputs.tiles.block_m, "block_n": inputs.tiles.block_n}


def _launch_softmax(passes: int) -> Callable[[Inputs], Callable[[], Results]]:
    def prepare(inputs: Inputs) -> Callable[[], Results]:
        x = inputs.q.flatten(0, 1)
        y = torch.empty_like(x)
        kernels = _kernels("softmax_rows")

        def run() -> Results:
            kernels.softmax_rows(x, y, passes)
            return {"y": y.view_as(inputs.q)}

        return run

    return prepare


def _launch_standard(inputs: Inputs) -> Callable[[], Results]:
    kernels = _kernels("standard")
    return lambda: {"o": kernels.forward(inputs.q, inputs.k, inputs.v, inputs.scale, **_sizes(inputs))}


def _launch_fa1_forward(inputs: Inputs) -> Callable[[], Results]:
    kernels = _kernels("fa1")

    def run() -> Results:
        o, m, l = kernels.forward(inputs.q, inputs.k, inputs.v, inputs.scale, **_sizes(inputs))
        return {"o": o, "m": m, "l": l}

    return run


def _launch_fa1_backward(inputs: Inputs) -> Callable[[], Results]:
    kernels = _kernels("fa1")
    o, m, l = kernels.forward(inputs.q, inputs.k, inputs.v, inputs.scale, **_sizes(inputs))

    def run() -> Results:
        grads = kernels.backward(inputs.q, inputs.k, inputs.v, o, m, l, inputs.do, inputs.scale, **_sizes(inputs))
        return dict(zip(("dq", "dk", "dv"), grads, strict=True))

    return run


def _launch_fa2_forward(inputs: Inputs) -> Callable[[], Results]:
    kernels = _kernels("fa2")
    return lambda: dict(zip(("o", "lse"), kernels.forward(inputs.q, inputs.k, inputs.v, inputs.scale, **_sizes(inputs)), strict=True))


def _launch_fa2_backward(inputs: Inputs) -> Callable[[], Results]:
    kernels = _kernels("fa2")
    o, lse = kernels.forward(inputs.q, inputs.k, inputs.v, inputs.scale, **_sizes(inputs))

    def run() -> Results:
        grads = kernels.backward(inputs.q, inputs.k, inputs.v, o, lse, inputs.do, inputs.scale, **_sizes(inputs))
        return dict(zip(("dq", "dk", "dv"), grads, strict=True))

    return run


def _launch_split_dim(inputs: Inputs) -> Callable[[], Results]:
    kernels, piece = _kernels("split_dim"), inputs.piece or inputs.q.shape[2]

    def run() -> Results:
        return dict(zip(("o", "lse"), kernels.forward(inputs.q, inputs.k, inputs.v, inputs.scale, piece, **_sizes(inputs)), strict=True))

    return run


def _launch_block_sparse(inputs: Inputs) -> Callable[[], Results]:
    kernels = _kernels("block_sparse")
    lists = [x.to(inputs.q.device) for x in block_sparse.tile_lists(inputs.tile_mask())]

    def run() -> Results:
        return dict(zip(("o", "lse"), kernels.forward(inputs.q, inputs.k, inputs.v, *lists, inputs.scale, **_sizes(inputs)), strict=True))

    return run


def _launch_production(pass_: str) -> Callable[[Inputs], Callable[[], Results]]:
    def prepare(inputs: Inputs) -> Callable[[], Results]:
        from .. import attention

        leaves = [x[None].detach().requires_grad_(pass_ == "bwd") for x in (inputs.q, inputs.k, inputs.v)]
        if pass_ == "fwd":
            return lambda: {"o": attention(*leaves, layout="bhsd")[0]}
        o = attention(*leaves, layout="bhsd")

        def run() -> Results:
            grads = torch.autograd.grad(o, leaves, inputs.do[None], retain_graph=True)
            return {name: g[0] for name, g in zip(("dq", "dk", "dv"), grads, strict=True)}

        return run

    return prepare


# ---------------------------------------------------------------------------------------------------------------- the table


def _predict_softmax(passes: int) -> Callable[[Case, int], Prediction]:
    return lambda case, at_once: predict.softmax_rows(case.heads * case.n, case.d, case.itemsize, passes, at_once)


def _predict_production(pass_: str) -> Callable[[Case, int], Prediction]:
    return lambda case, at_once: predict.production(case, pass_)


SOFTMAX = tuple(
    Algorithm(f"softmax_{passes}", "fwd", title, _predict_softmax(passes), _count_softmax(passes), _launch_softmax(passes))
    for passes, title in ((3, "softmax, safe 3-pass"), (2, "softmax, online 2-pass"), (1, "softmax, row on chip"))
)
STANDARD = Algorithm("standard", "fwd", "standard attention", lambda c, _: predict.standard_forward(c), _count_standard, _launch_standard)
FA1 = Algorithm("fa1", "fwd", "FlashAttention-1 order", predict.fa1_forward, _count_fa1_forward, _launch_fa1_forward)
FA1_BACKWARD = Algorithm("fa1", "bwd", "FlashAttention-1 order", predict.fa1_backward, _count_fa1_backward, _launch_fa1_backward)
FA2 = Algorithm("fa2", "fwd", "FlashAttention-2 order", lambda c, _: predict.fa2_forward(c), _count_fa2_forward, _launch_fa2_forward)
FA2_BACKWARD = Algorithm(
    "fa2", "bwd", "FlashAttention-2 order", lambda c, _: predict.fa2_backward(c), _count_fa2_backward, _launch_fa2_backward
)
SPLIT_DIM = Algorithm(
    "split_dim",
    "fwd",
    "FlashAttention-2 order, D cut",
    lambda c, _: predict.split_dim_forward(c),
    _count_split_dim,
    _launch_split_dim,
)
BLOCK_SPARSE = Algorithm(
    "block_sparse", "fwd", "block-sparse", lambda c, _: predict.block_sparse_forward(c), _count_block_sparse, _launch_block_sparse
)
ATTENTION = (STANDARD, FA1, FA2, SPLIT_DIM, BLOCK_SPARSE, FA1_BACKWARD, FA2_BACKWARD)
PRODUCTION = tuple(
    Algorithm("tilewise", pass_, "tilewise.attention", _predict_production(pass_), None, _launch_production(pass_))
    for pass_ in ("fwd", "bwd")
)
ALL = SOFTMAX + ATTENTION + PRODUCTION
