"""Every check of arguments, each in one sentence: the argument, what was given, what is allowed, what to do."""

from __future__ import annotations

import numbers
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .errors import UnsupportedAttention

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WIDEST = 2**62  # wider than any sequence, and a position that far away is still an int64
_AUX_NAMES = ("lse", "max_logits", "key_mass", "entropy")


class Packing(NamedTuple):
    """How sequences lie in packed q, k and v: their boundaries, and the most tokens one of them may have (None: not said)."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int | None
    max_seqlen_k: int | None


class Sizes(NamedTuple):
    """The sizes of one call, and the device that all its tensors share. In a packed call the batch items are the sequences."""

    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    device: torch.device
    batch_name: str = "B"
    scores_name: str = "(B, Hq, Sq, Sk)"

    def of_sequences(self, packing: Packing) -> Sizes:
        """The sizes that per-sequence arguments have: in place of a missing bound stands the total, which no sequence exceeds."""
        return self._replace(
            batch=packing.cu_seqlens_q.shape[0] - 1,
            seqlen_q=self.seqlen_q if packing.max_seqlen_q is None else packing.max_seqlen_q,
            seqlen_k=self.seqlen_k if packing.max_seqlen_k is None else packing.max_seqlen_k,
            batch_name="sequences",
            scores_name="(sequences, Hq, max_seqlen_q, max_seqlen_k)",
        )


def typed(name: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        shown = repr(value)
        shown = f"{shown} of type " if len(shown) <= 60 and "\n" not in shown else "of type "
        raise TypeError(f"{name} is {shown}{_type_name(value)}; it must be a {kind.__name__}")
    if isinstance(value, Tensor) and (value.layout != torch.strided or value.is_nested):
        if value.is_nested:
            raise TypeError(
                f"{name} is a nested tensor, which does not fit the other arguments; it must be dense: pad it, with "
                f"{name}.to_padded_tensor(0.0), and give its lengths"
            )
        raise TypeError(f"{name} is a tensor of layout {value.layout}; it must be dense: use {name}.to_dense()")
    return value


def _type_name(value: Any) -> str:
    """With its module where that is not Python's own: numpy has a bool, too."""
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def check_qkv(q: Tensor, k: Tensor, v: Tensor, layout: str, backend: str, packed: bool = False) -> Sizes:
    """Ranks, dtypes, devices and shapes of q, k and v; packed ones come with a batch of one, and no layout was said."""
    check_layout(layout)
    for name, x in (("q", q), ("k", k), ("v", v)):
        typed(name, x, Tensor)
        if x.ndim != 4:
            shape = "(B, S, H, D)" if layout == "bshd" else "(B, H, S, D)"
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must have rank 4, {shape} in layout {layout!r}")
    if not (q.dtype == k.dtype == v.dtype):
        raise TypeError(
            f"q, k and v have dtypes {q.dtype}, {k.dtype} and {v.dtype}; they must agree: cast them, or call inside torch.autocast"
        )
    if q.dtype not in _DTYPES:
        raise TypeError(f"q has dtype {q.dtype}; it must be float16, bfloat16, float32 or float64")
    if not (q.device == k.device == v.device):
        raise ValueError(f"q, k and v are on {q.device}, {k.device} and {v.device}; move them to one device")
    heads, seq = (2, 1) if layout == "bshd" else (1, 2)
    said = "" if packed else f" (layout {layout!r})"
    if not (q.shape[0] == k.shape[0] == v.shape[0]):
        raise ValueError(f"q, k and v have batch sizes {q.shape[0]}, {k.shape[0]} and {v.shape[0]}; they must agree (expand one of size 1)")
    if k.shape[seq] != v.shape[seq]:
        raise ValueError(f"k has {k.shape[seq]} keys but v has {v.shape[seq]} values{said}; each key needs one value")
    if k.shape[heads] != v.shape[heads]:
        raise ValueError(f"k has {k.shape[heads]} heads but v has {v.shape[heads]}{said}; they must agree")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q has head dim {q.shape[3]} but k has {k.shape[3]}; they must agree (only v may differ)")
    if (k.shape[heads] == 0 and q.shape[heads] != 0) or (k.shape[heads] and q.shape[heads] % k.shape[heads]):
        raise ValueError(
            f"q has {q.shape[heads]} heads, which is no multiple of the {k.shape[heads]} heads of k and v{said}; "
            "in grouped-query attention each kv head serves the same number of query heads"
        )
    if q.dtype == torch.float64 and backend in ("triton", "hopper"):
        raise UnsupportedAttention(f"backend={backend!r} has no float64; use backend='tiled', or float32 inputs")
    return Sizes(q.shape[0], q.shape[heads], k.shape[heads], q.shape[seq], k.shape[seq], q.shape[3], v.shape[3], q.device)


def check_layout(layout: str) -> None:
    if layout not in ("bshd", "bhsd"):
        raise ValueError(f"layout is {layout!r}; it must be 'bshd' for (B, S, H, D) or 'bhsd' for (B, H, S, D)")


def check_window(window_size: Any) -> tuple[int, int]:
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"window_size is {window_size!r}; it must be a pair (left, right), -1 for unlimited")
    for side, value in zip(("left", "right"), window_size, strict=True):
        if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
            raise TypeError(f"window_size has {side} = {value!r}; it must be an int, -1 for unlimited")
        if value < -1:
            raise ValueError(f"window_size has {side} = {value}; it must be 0 or more keys, or -1 for unlimited")
    left, right = (WIDEST if value > WIDEST else value for value in window_size)
    return left, right


def check_finite(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, numbers.Real)):
        raise TypeError(f"{name} is {value!r} of type {type(value).__name__}; it must be a number (a Python float)")
    value = value if isinstance(value, (int, float)) else float(value)  # NumPy's float32 cannot be compared with the largest float64
    if not -sys.float_info.max <= value <= sys.float_info.max:  # not isfinite: torch.compile does not trace it for symbolic numbers
        raise ValueError(f"{name} is {value}; it must be finite")
    return float(value)


def check_return_aux(return_aux: str | Sequence[str] | None) -> tuple[str, ...]:
    """The names that it holds."""
    if return_aux is not None and not isinstance(return_aux, (str, tuple, list, set, frozenset)):
        raise TypeError(f"return_aux is {return_aux!r}; it must be one name or several of {', '.join(_AUX_NAMES)}")
    names = (return_aux,) if isinstance(return_aux, str) else tuple(return_aux or ())
    for name in names:
        if name not in _AUX_NAMES:
            raise ValueError(f"return_aux names {name!r}; it must be one or several of {', '.join(_AUX_NAMES)}")
    return names


def broadcasts(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether a tensor of a shape can be expanded to another one."""
    return len(shape) <= len(wanted) and all(have in (1, want) for have, want in zip(reversed(shape), reversed(wanted), strict=False))


def broadcast_to_scores(name: str, x: Tensor | None, sizes: Sizes, boolean: bool = False) -> Tensor | None:
    """Checks that x broadcasts to (B, Hq, Sq, Sk), or to what stands for it in a packed call; returns it unexpanded."""
    if x is None:
        return None
    typed(name, x, Tensor)
    if type(x).__module__ == "torch.nn.attention.bias":  # such a tensor stands for a rule: its memory holds nothing
        raise TypeError(
            f"{name} is torch's {type(x).__name__}; give causal=True for causal_lower_right, mask=Causal('top_left') for causal_upper_left"
        )
    if boolean and x.dtype != torch.bool:
        raise TypeError(f"mask has dtype {x.dtype}; it must be bool with True = visible; give an additive mask as bias=")
    if not boolean and x.dtype not in _DTYPES:
        raise TypeError(f"{name} has dtype {x.dtype}; it must be float16, bfloat16, float32 or float64; give a boolean mask as mask=")
    _same_device(name, x, sizes)
    target = (sizes.batch, sizes.heads, sizes.seqlen_q, sizes.seqlen_k)
    if not broadcasts(x.shape, target):
        padding = x.ndim == 2 and tuple(x.shape) == (sizes.batch, sizes.seqlen_k)
        hint = f"; one row of keys for each batch item is given as {name}[:, None, None, :]" if padding else ""
        raise ValueError(f"{name} has shape {tuple(x.shape)}, which does not broadcast to {sizes.scores_name} = {target}{hint}")
    return x


def per_head(name: str, x: Tensor | None, sizes: Sizes, per_batch: bool) -> Tensor | None:
    if x is None:
        return None
    typed(name, x, Tensor)
    if x.dtype not in _DTYPES:
        raise TypeError(f"{name} has dtype {x.dtype}; it must be float16, bfloat16, float32 or float64")
    _same_device(name, x, sizes)
    allowed = [(sizes.heads,), (sizes.batch, sizes.heads)] if per_batch else [(sizes.heads,)]
    if tuple(x.shape) not in allowed:
        names = f"(Hq,) or ({sizes.batch_name}, Hq)" if per_batch else "(Hq,)"
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be {names} = {' or '.join(map(str, allowed))}")
    return x


def sequence_lengths(name: str, x: Tensor | None, size: int, sizes: Sizes) -> Tensor | None:
    if x is None:
        return None
    typed(name, x, Tensor)
    if x.dtype != torch.int32:
        raise TypeError(f"{name} has dtype {x.dtype}; it must be int32: use {name}.to(torch.int32)")
    _same_device(name, x, sizes)
    if tuple(x.shape) != (sizes.batch,):
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}; it must be ({sizes.batch_name},) = ({sizes.batch},), one length for each of them"
        )
    return x


def check_values_on_device(seqused_q: Tensor | None, seqused_k: Tensor | None, sizes: Sizes) -> None:
    """Reads the lengths on the host: a synchronisation, asked for by check_values=True."""
    for name, x, size in (("seqused_q", seqused_q, sizes.seqlen_q), ("seqused_k", seqused_k, sizes.seqlen_k)):
        if x is None or not x.numel():
            continue
        low, high = int(x.min()), int(x.max())
        if low < 0 or high > size:
            raise ValueError(f"{name} holds lengths from {low} to {high}; they must be between 0 and {size}, the size of that dimension")


def _same_device(name: str, x: Tensor, sizes: Sizes) -> None:
    if x.device != sizes.device:
        raise ValueError(f"{name} is on {x.device} but q is on {sizes.device}; move it with .to(q.device)")


def refuse_descale(**scales: Any) -> None:
    for name, scale in scales.items():
        if scale is not None:
            raise UnsupportedAttention(
                f"{name} was given, but fp8 inputs are not supported yet; pass float16 or bfloat16 tensors and no {name}"
            )


def refuse_a_seed_for_each_rank(q: Tensor) -> None:
    """Every rank of a DTensor would draw its own seed, and what they computed would not fit together."""
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(q, distributed.DTensor):
        raise UnsupportedAttention(
            "dropout_seed is None, and q is a DTensor: every rank would draw another seed; give the same dropout_seed on all ranks, an int"
        )
