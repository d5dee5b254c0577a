"""What every launch needs: the arguments and compile-time choices that follow from the tensors and rules of one call."""

from __future__ import annotations

import functools
import math
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from ..kernel_cache import prepare
from .configs import DBIAS, ROW_BLOCK, Config, architecture, choose, features, padded, shared_limit
from .recipes import Launcher, run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from ...plan import Operands, Rules
    from .emission import Facts

__all__ = ["RUNTIME", "Launch", "run"]

prepare()

# Runtime values that no compiled kernel depends on: without this list Triton would compile anew for a length of 1 or a multiple of 16.
RUNTIME = [f"stride_{x}{dim}" for x in ("q", "k", "v", "o", "do", "dq", "dk", "dv", "x") for dim in "bhsd"]
RUNTIME += [f"stride_{x}_{dim}" for x in ("bias", "mask", "slopes", "dlse", "dbias") for dim in "bhmn"]
RUNTIME += ["heads", "group", "size_q", "size_k", "row_blocks", "row_tiles", "window_left", "window_right", "dropout_threshold"]
RUNTIME += ["bias_batch", "bias_heads", "shared_batch", "shared_heads"]
RUNTIME += ["slots", "sequences", "most_q", "most_k", "size", "total", "shared"]
RUNTIME += ["captured_sizes", "list_sizes"]  # whose elements see to that themselves: `emission.encoded`

NO_LISTS: dict[str, Any] = {"lists_ptr": None, "list_sizes": None, "LIST_M": 0, "LIST_N": 0}

LOG2E = 1.4426950408889634
WIDEST_WINDOW = 1 << 30  # positions are 32-bit: a wider window is no window


def raw_scores(scale: float, softcap: float, biased: bool) -> bool:
    """Whether scores may stay `q·k` until the exponential: nothing is added to them, and the scale keeps their order."""
    return scale > 0.0 and softcap == 0.0 and not biased


def power_of_two_at_least(x: float) -> float:
    mantissa, exponent = math.frexp(x)
    return math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else min(exponent, 127))


class Arguments(NamedTuple):
    """Of a launch: how many programs, and what they are given by place and by name."""

    programs: int
    given: tuple[Any, ...]
    named: dict[str, Any]


class Launch(Launcher):
    """The choices of one call that its kernels share, and their arguments."""

    def __init__(self, t: Operands, r: Rules) -> None:
        # Packed sequences, lists and programs come with arguments that are made anew for every call.
        same = t.cu_seqlens_q is None and t.blocks is None and not t.captured
        optional = (t.bias, t.mask, t.alibi_slopes, t.sink, t.seqused_q, t.seqused_k, t.dropout_seed)
        super().__init__((t.q, t.k, t.v, *optional), (r,) if same and t.q.is_cuda else None)
        self.t, self.r = t, r
        self.batch, self.heads, self.size_q, self.d = t.q.shape
        self.sequences = None if t.cu_seqlens_q is None else t.cu_seqlens_q.shape[0] - 1
        self.items = self.batch if self.sequences is None else self.sequences  # what a bias or slopes may tell apart
        # Packed lengths are in the records of tiles; kernels that have none need no lengths.
        self.seqused_q, self.seqused_k = (None if self.sequences is not None else contiguous(x) for x in (t.seqused_q, t.seqused_k))
        self.rows_padded = -(-self.size_q // ROW_BLOCK) * ROW_BLOCK
        self.heads_k, self.size_k, self.dv = t.v.shape[1:]
        self.block_d, self.block_dv = padded(self.d), padded(self.dv)
        self.bits = t.q.element_size() * 8
        # Whether any tile may hold hidden pairs, not only those at the ends of what a window and the lengths show.
        self.dense = t.bias is not None or (t.blocks is None and (t.mask is not None or bool(r.mask_mod)))
        self.score_mod, self.mask_mod = "", ""
        self._facts: tuple[Facts, ...] = ()
        self._indices: tuple[tuple[str, tuple[int, int]], ...] = ()
        if r.score_mod or r.mask_mod:
            self._emit()
        # float32 pays for natural scores too: a rounded scale * log2(e) would cost the recomputed probabilities their last bits.
        added = t.bias is not None or t.alibi_slopes is not None or bool(r.score_mod)
        self.natural = t.q.element_size() == 4 or not raw_scores(r.softmax_scale, r.softcap, added)
        # Values that nobody sees can sit in a tile only where a mask, a bias, the left end of a window or a length hides them.
        # A query without keys counts too: those before the first key, where there are fewer keys than queries.
        # Beyond a packed sequence lies another one.
        unseen = 0 <= r.window_right < self.size_q - self.size_k
        hiding = (t.bias, t.mask, t.seqused_q, t.seqused_k, t.cu_seqlens_q, t.blocks)
        self.sanitize = unseen or any(x is not None for x in hiding) or r.window_left >= 0
        self.sanitize |= bool(r.score_mod or r.mask_mod)
        self.precision = "tf32" if r.allow_tf32 and self.bits == 32 else "ieee"

    def _emit(self) -> None:
        from . import emission

        t, r = self.t, self.r
        ragged = any(x is not None for x in (t.seqused_q, t.seqused_k, t.cu_seqlens_q))
        self._facts = tuple(map(emission.facts, t.captured))
        self._indices = emission.sizes(self.items, self.heads, self.size_q, self.size_k, ragged)
        if r.score_mod:
            self.score_mod = emission.forward_text(r.score_mod, self._facts, self._indices)
            self.dense |= emission.may_hide(r.score_mod)
        if r.mask_mod:
            self.mask_mod = emission.forward_text(r.mask_mod, self._facts, self._indices)

    def score_gradient(self, wanted: frozenset[int] = frozenset()) -> str:
        """The derivative of the score function, which also adds to the gradients of the captured tensors ``wanted``."""
        if not self.r.score_mod:
            return ""
        from . import emission

        return emission.gradient_text(self.r.score_mod, wanted, self._facts, self._indices)

    def config(self, purpose: str, *further: str) -> Config:
        """The tiles of a kernel of this call, which has the features ``further`` besides those of the operands and rules."""
        from ...plan import target_of

        target = target_of(self.t.q.device)
        used = features(self.t, self.r).union(further)
        listed = None if self.t.blocks is None or purpose == DBIAS else (self.t.blocks.block_m, self.t.blocks.block_n)
        return choose(architecture(target), shared_limit(target), self.bits, purpose, used, self.block_d, self.block_dv, listed)

    def key_lists(self, config: Config) -> dict[str, Any]:
        """The lists of key blocks that each block of queries visits."""
        x = self.t.blocks
        if x is None:
            return NO_LISTS
        from .block_lists import list_arguments

        tensors, tiles = (x.kv_num, x.kv_idx, x.kv_full_num, x.kv_full_idx), -(-self.size_q // config.block_m)
        return {**list_arguments(tensors, tiles, x.block_m // config.block_m), "LIST_M": x.block_m, "LIST_N": x.block_n}

    def query_lists(self, config: Config) -> dict[str, Any]:
        """The lists of query blocks that each block of keys is visited by."""
        x = self.t.blocks
        if x is None:
            return NO_LISTS
        from .block_lists import list_arguments

        tensors, tiles = (x.q_num, x.q_idx, x.q_full_num, x.q_full_idx), -(-self.size_k // config.block_n)
        return {**list_arguments(tensors, tiles, x.block_n // config.block_n), "LIST_M": x.block_m, "LIST_N": x.block_n}

    def constants(self, config: Config, align: int, tma: bool) -> dict[str, Any]:
        """The compile-time arguments that every kernel over tiles has."""
        return {
            "D": self.d,
            "DV": self.dv,
            "BLOCK_D": self.block_d,
            "BLOCK_DV": self.block_dv,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "ALIGN": align,
            "TMA": tma,
            "NATURAL": self.natural,
            "SANITIZE": self.sanitize,
            "DENSE": self.dense,
            "BIAS_ALIGN": matrix_alignment(self.t.bias),
            "MASK_ALIGN": matrix_alignment(self.t.mask),
            "SCORE_MOD": self.score_mod,
            "MASK_MOD": self.mask_mod,
            "PRECISION": self.precision,
            "enable_fp_fusion": True,  # Triton 3.10 stops fusing multiply-adds unless told to
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
        }

    def run_tiles(
        self, kernel: Any, further: Sequence[Tensor | None], config: Config, flag: Tensor | None, arguments: Callable[[], Arguments]
    ) -> None:
        """Launch a kernel that walks tiles as both of its variants, of which the flag (`finite`) lets one run, or without a flag as the one
        that is safe. One kernel with both loops would keep the faster from the registers and blocks that it could have alone."""
        worked_out: Arguments | None = None
        for hide in (self.sanitize,) if flag is None else (False, True):
            if self.repeat(kernel, (*further, flag), (config, hide)):
                continue
            if worked_out is None:
                worked_out = arguments()
            programs, given, named = worked_out
            self.run(kernel, programs, *given, **named, nonfinite_ptr=flag, HIDE=hide)

    def device_guard(self) -> AbstractContextManager[Any]:
        """Triton launches on the current device, which need not be that of the tensors."""
        import torch

        device = self.t.q.device
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            return nullcontext()
        return torch.cuda.device(device)

    @functools.cached_property
    def rule_arguments(self) -> dict[str, Any]:
        """Everything but the tiles' own tensors, by the kernels' parameter names."""
        t, r = self.t, self.r
        unit = 1.0 if self.natural else r.softmax_scale * LOG2E
        slopes = t.alibi_slopes
        arguments: dict[str, Any] = {
            "slopes_ptr": slopes,
            "stride_slopes_b": 0 if slopes is None or slopes.shape[0] == 1 else slopes.stride(0),
            "stride_slopes_h": 0 if slopes is None else slopes.stride(1),
            "seqused_q_ptr": self.seqused_q,
            "seqused_k_ptr": self.seqused_k,
            "seed_ptr": t.dropout_seed if r.dropout_p > 0.0 else None,
            "heads": self.heads,
            "group": self.heads // max(self.heads_k, 1),
            "size_q": self.size_q,
            "size_k": self.size_k,
            "scale": r.softmax_scale,
            "unit": unit,
            "unit_exact": power_of_two_at_least(unit),
            "softcap": r.softcap if r.softcap > 0.0 else None,
            "window_left": min(r.window_left, WIDEST_WINDOW) if r.window_left >= 0 else None,
            "window_right": min(r.window_right, WIDEST_WINDOW) if r.window_right >= 0 else None,
            "dropout_threshold": math.floor(r.dropout_p * 2**32),
            "keep_scale": 1.0 / (1.0 - r.dropout_p),
            "captured_ptr": None,
            "captured_sizes": None,
        }
        if t.captured and (self.score_mod or self.mask_mod):
            from .emission import encoded

            arguments["captured_ptr"] = tuple(as_bytes(x) for x in t.captured)
            arguments["captured_sizes"] = tuple(encoded(x) for x in t.captured)
        for name, matrix in (("bias", t.bias), ("mask", t.mask)):
            arguments[f"{name}_ptr"] = as_bytes(matrix)
            for dim, stride in zip("bhmn", matrix_strides(matrix, matrix_alignment(matrix)), strict=True):
                arguments[f"stride_{name}_{dim}"] = stride
        return arguments


def contiguous(x: Tensor | None) -> Tensor | None:
    """Vectors of one number a batch item or head: too small for a stride to be worth an argument."""
    return None if x is None else x.contiguous()


def as_bytes(x: Tensor | None) -> Tensor | None:
    import torch

    return x.view(torch.uint8) if x is not None and x.dtype == torch.bool else x


def broadcast_strides(x: Tensor | None) -> tuple[int, ...]:
    """Strides with 0 for every dimension of size 1."""
    return (0,) * 4 if x is None else used_strides(x.shape, x.stride())


# What follows from sizes and strides alone is kept: in training and serving the same ones come again and again.


@functools.lru_cache(maxsize=4096)
def used_strides(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(0 if n == 1 else s for n, s in zip(shape, stride, strict=True))


@functools.lru_cache(maxsize=4096)
def rows_aligned(shape: tuple[int, ...], stride: tuple[int, ...], step: int) -> bool:
    """Whether every row starts at a multiple of ``step`` elements, and neighbours in it are adjacent."""
    adjacent = shape[3] == 1 or stride[3] == 1
    return adjacent and all(s % step == 0 for s in used_strides(shape, stride)[:3])


@functools.lru_cache(maxsize=4096)
def rows_describable(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    return rows_aligned(shape, stride, 8) and 0 not in shape and all(n == 1 or s > 0 for n, s in zip(shape[:3], stride[:3], strict=True))


def matrix_strides(x: Tensor | None, align: int = 1) -> tuple[int | None, ...]:
    """Strides of a bias or mask, the outer ones in units of ``align`` elements, the last None where neighbours are adjacent: known to the
    compiler, it makes reads wide."""
    b, h, m, n = broadcast_strides(x)
    return b // align, h // align, m // align, None if n == 1 else n


def matrix_alignment(x: Tensor | None) -> int:
    """How many elements of a bias or mask make the 16 bytes on which all its rows start, or 1."""
    step = 1 if x is None else 16 // x.element_size()
    outer = broadcast_strides(x)[:3]
    return step if x is not None and x.data_ptr() % 16 == 0 and all(s % step == 0 for s in outer) else 1


def alignment(*tensors: Tensor) -> int:
    """How many elements divide every stride and 16 bytes in all of `tensors`: 16 bytes' worth, or 1."""
    step = 16 // min(x.element_size() for x in tensors)
    aligned = all(x.data_ptr() % 16 == 0 and rows_aligned(x.shape, x.stride(), step) for x in tensors)
    return step if aligned else 1


def inner_stride(x: Tensor) -> int | None:
    """The stride of the head dim, None where neighbours are adjacent: the only stride a compiled kernel knows."""
    return None if x.shape[3] == 1 or x.stride(3) == 1 else x.stride(3)


def strides(x: Tensor | None, align: int) -> tuple[int | None, ...]:
    """(batch, head, row) strides in units of ``align`` elements, and the inner one as `inner_stride` gives it."""
    if x is None:
        return 0, 0, 0, None
    b, h, s, _ = used_strides(x.shape, x.stride())
    return b // align, h // align, s // align, inner_stride(x)


def describable(*tensors: Tensor) -> bool:
    """Whether tensor descriptors can address all of these: 16-byte rows, no broadcast dimension, nothing empty."""
    return all(x.element_size() == 2 and x.data_ptr() % 16 == 0 and rows_describable(x.shape, x.stride()) for x in tensors)


def source(x: Tensor, rows: int, cols: int, by_descriptor: bool) -> Any:
    """What a kernel reads tiles of [rows, cols] from: the tensor, or a descriptor of it."""
    if not by_descriptor:
        return x
    from triton.tools.tensor_descriptor import TensorDescriptor

    # The stride of a dimension of size 1 is never used, but must be a multiple of 16 bytes.
    outer = [8 * ((x.shape[3] + 7) // 8) if n == 1 else s for n, s in zip(x.shape[:3], x.stride()[:3], strict=True)]
    return TensorDescriptor(x, list(x.shape), [*outer, 1], [1, 1, rows, cols])
