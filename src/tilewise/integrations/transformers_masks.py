"""The masks of `transformers` models as rules: causal order, windows, packed sequences and padding without an N x N tensor.

`transformers` describes a mask by functions of indices that it nests into each other. The ones it ships are recognised here by what they
are; a mask that holds any other function is built as the library builds it for `sdpa`, a boolean tensor. So are, under torch.compile, masks
other than plain causal and bidirectional ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tilewise.errors import UnsupportedAttention
from tilewise.masks import Document

# What may be asked of a mask by a model that does not hand it on: nothing that would take it for numbers to add to the scores.
_LOGICAL = {
    torch.logical_not,
    torch.logical_and,
    torch.where,
    torch.Tensor.__and__,
    torch.Tensor.__rand__,
    torch.Tensor.logical_and,
}


# Methods that move booleans about: what they return is a mask of its own, of any rank.
_MOVING = ("repeat", "repeat_interleave", "expand", "view", "reshape", "flatten", "unsqueeze", "squeeze", "transpose", "permute", "clone")


class _Misread(UnsupportedAttention, AttributeError):
    """An AttributeError too, so that `hasattr` says what it says of any object."""


@dataclass(frozen=True, eq=False)
class RuleMask:
    """What one attention layer may see, in O(N) memory; stands where `transformers` passes a (B, 1, Sq, Sk) boolean tensor.

    Query i stands at position ``p = i + length - Sq`` with ``length`` the keys in use. Indexing and logical functions work as on that
    tensor. Arithmetic raises: a model that adds its mask to the scores computes its attention by itself, not through the library's
    interface, and would compute something else.
    """

    shape: torch.Size  # (B, 1, Sq, Sk)
    device: torch.device
    window: tuple[int, int] = (-1, -1)  # keys p - left to p + right, -1: unlimited
    length: Tensor | None = None  # int32 (B,), keys in use where that is not Sk
    padding: Tensor | None = None  # bool (B, 1, 1, Sk), True = a real key
    documents: Tensor | None = None  # (B, S), equal numbers see each other
    cu_seqlens: Tensor | None = None  # int32, the documents of all rows one after the other, where they could be counted
    visible: Tensor | None = None  # bool (B, 1, Sq, Sk): a mask that is no rule

    dtype = torch.bool

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def offsets(self) -> tuple[Tensor, Tensor] | None:
        return None if self.cu_seqlens is None else (self.cu_seqlens, self.cu_seqlens)

    def dense(self) -> Tensor:
        """The boolean tensor (B, 1, Sq, Sk)."""
        if self.visible is not None:
            return self.visible
        num_queries, num_keys = self.shape[2:]
        j = torch.arange(num_keys, device=self.device).view(1, 1, 1, -1)
        length = num_keys if self.length is None else self.length.view(-1, 1, 1, 1)
        p = torch.arange(num_queries, device=self.device).view(1, 1, -1, 1) + length - num_queries
        visible = j < length
        left, right = self.window
        if left >= 0:
            visible = visible & (j >= p - left)
        if right >= 0:
            visible = visible & (j <= p + right)
        if self.padding is not None:
            visible = visible & self.padding
        if self.documents is not None:
            visible = visible & (self.documents[:, None, :, None] == self.documents[:, None, None, :])
        return visible.expand(self.shape)

    def arguments(self) -> dict[str, Any]:
        """The arguments of `tilewise.attention` that mean this mask; at most one of padding, documents and visible is present."""
        tensor = self.padding if self.visible is None else self.visible
        return dict(window_size=self.window, seqused_k=self.length, mask=tensor if self.documents is None else Document(self.documents))

    def __getitem__(self, index: Any) -> RuleMask:
        part = self.dense()[index]
        if part.ndim != 4:
            raise _not_numbers(f"indexed with {index}")
        return RuleMask(part.shape, self.device, visible=part)

    def contiguous(self) -> RuleMask:
        return self

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    def is_floating_point(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        if name in _MOVING:
            return functools.partial(self._moved, name)
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"RuleMask has no attribute {name!r}")
        raise _Misread(*_not_numbers(f"asked for {name}").args)

    def _moved(self, name: str, *args: Any, **keywords: Any) -> RuleMask:
        visible = getattr(self.dense(), name)(*args, **keywords)
        return RuleMask(visible.shape, self.device, visible=visible)

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in _LOGICAL:
            raise _not_numbers(f"given to {getattr(function, '__name__', function)}")
        args = tuple(x.dense() if isinstance(x, cls) else x for x in args)
        return function(*args, **{key: x.dense() if isinstance(x, cls) else x for key, x in (kwargs or {}).items()})

    def __add__(self, other: Any) -> Any:
        raise _not_numbers("added to something")

    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __add__

    def __lt__(self, other: Any) -> Any:
        raise _not_numbers("compared with something")

    __le__ = __gt__ = __ge__ = __lt__

    def __invert__(self) -> Tensor:
        return ~self.dense()

    def __and__(self, other: Any) -> Tensor:
        return self.dense() & (other.dense() if isinstance(other, RuleMask) else other)

    __rand__ = __and__

    def to(self, *target: Any, **keywords: Any) -> RuleMask:
        """On another device, as for a model that is spread over several. A model that asks for another dtype, or for booleans, takes the
        mask for numbers, of which those that hide a key are not 0."""
        asked: Any = torch._C._nn._parse_to(*target, **keywords)
        device, dtype, *_ = asked
        if dtype is not None:
            raise _not_numbers(f"converted to {dtype}")
        if device in (None, self.device):
            return self
        names = ("length", "padding", "documents", "cu_seqlens", "visible")
        moved = {name: x.to(device) for name in names if (x := getattr(self, name)) is not None}
        return replace(self, device=device, **moved)


def _not_numbers(what: str) -> UnsupportedAttention:
    return UnsupportedAttention(
        f"the attention mask was {what}: this model does not hand its mask to the attention interface of transformers but works with "
        'it itself, which tilewise cannot follow; load it with attn_implementation="eager"'
    )


def build_mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Any = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str | None = None,
    cache_position: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """The mask of one kind of layer, as `transformers` asks for it: a `RuleMask`, or None where every query sees every key.

    ``attention_mask`` (B, tokens seen) is the padding, True = real. Causal order is never left to the layer: a model that computes its
    attention by itself would not know of it. Older releases give the queries' places as ``cache_position`` (Sq,), newer ones as
    ``q_length`` and ``q_offset``.
    """
    from transformers import masking_utils

    if isinstance(attention_mask, RuleMask):  # prepared by generation, handed through the model
        return attention_mask
    mask_function = masking_utils.causal_mask_function if mask_function is None else mask_function
    places: dict[str, Any] = dict(q_length=q_length, q_offset=q_offset, device="cpu" if device is None else device)
    if cache_position is not None:
        places = dict(cache_position=cache_position)
        device, q_length = cache_position.device, cache_position.shape[0]
        q_offset = cache_position[0] if torch.compiler.is_compiling() else int(cache_position[0])
    if q_length is None:
        raise TypeError("build_mask needs q_length or cache_position")
    found = _Found()
    length = q_offset - kv_offset + q_length
    static = isinstance(length, int)
    if (
        (attention_mask is not None and attention_mask.ndim != 2)
        or not found.add(mask_function, masking_utils)
        or (static and length > kv_length)
        or (found.right != 0 and found.windowed and not (static and length == kv_length))
        or (found.documents is not None and attention_mask is not None)
    ):
        visible = masking_utils.sdpa_mask(
            batch_size=batch_size, kv_length=kv_length, kv_offset=kv_offset, mask_function=mask_function, attention_mask=attention_mask,
            allow_is_causal_skip=False, allow_is_bidirectional_skip=allow_is_bidirectional_skip, **places, **kwargs,
        )  # fmt: skip
        return None if visible is None else RuleMask(visible.shape, visible.device, visible=visible)

    padding = _padding(attention_mask, kv_length, kv_offset)
    left = -1 if static and found.left >= length - 1 else found.left
    sees_all = padding is None and found.documents is None and left < 0 and static and length == kv_length
    if sees_all and ((q_length == 1 and allow_is_causal_skip) or (found.right < 0 and allow_is_bidirectional_skip)):
        return None
    in_use = None
    device = torch.get_default_device() if device is None else torch.device(device)
    if found.windowed and not (static and length == kv_length):
        in_use = torch.as_tensor(length, dtype=torch.int32, device=device).expand(batch_size)
    cu_seqlens = None
    if found.documents is not None and not torch.compiler.is_compiling():
        cu_seqlens = _offsets(found.documents)
    shape = torch.Size((batch_size, 1, q_length, kv_length))
    return RuleMask(shape, device, (left, found.right), in_use, padding, found.documents, cu_seqlens)


class _Found:
    """The rules gathered from a tree of mask functions, all of which are AND-ed."""

    def __init__(self) -> None:
        self.left, self.right = -1, -1
        self.documents: Tensor | None = None

    @property
    def windowed(self) -> bool:
        return self.left >= 0 or self.right >= 0

    def add(self, function: Any, known: Any) -> bool:
        """Takes in one function of `known`, the library's module of them; False if it is another, or not understood."""
        if function is known.causal_mask_function:
            self._window(-1, 0)
            return True
        if function is known.bidirectional_mask_function:
            return True
        if torch.compiler.is_compiling():  # what a function made in the traced region holds cannot be read
            return False
        if getattr(function, "__module__", None) != known.__name__ or function.__closure__ is None:
            return False
        inside = dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__), strict=True))
        match function.__qualname__.partition(".")[0]:
            case "and_masks":
                return all(self.add(each, known) for each in inside["mask_functions"])
            case "sliding_window_overlay":  # kv > q - window
                self._window(inside["sliding_window"] - 1, -1)
            case "sliding_window_bidirectional_overlay":  # |q - kv| <= window
                self._window(inside["sliding_window"], inside["sliding_window"])
            case "remap_positions_for_packed_sequence":  # positions count up by 1 within a sequence, so order and distances stay
                return self.add(inside["mask_function"], known)
            case "packed_sequence_mask_function":
                self.documents = inside["packed_sequence_mask"]
            case _:
                return False
        return True

    def _window(self, left: int, right: int) -> None:
        self.left = max(left, self.left) if min(left, self.left) < 0 else min(left, self.left)
        self.right = max(right, self.right) if min(right, self.right) < 0 else min(right, self.right)


def _padding(attention_mask: Tensor | None, kv_length: int, kv_offset: int) -> Tensor | None:
    """(B, 1, 1, Sk), True = real; None where every key is. Slots that no token has filled yet count as padding."""
    if attention_mask is None:
        return None
    kept = attention_mask[:, kv_offset : kv_offset + kv_length].to(torch.bool)
    kept = torch.nn.functional.pad(kept, (0, kv_length - kept.shape[1]))
    if not torch.compiler.is_compiling() and bool(kept.all()):
        return None
    return kept[:, None, None]


def _offsets(documents: Tensor) -> Tensor:
    """Where each document starts in the rows laid end to end, and where the last one ends. Counts them: a synchronisation on a GPU."""
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    first = torch.nonzero(starts.flatten()).flatten()
    return torch.nn.functional.pad(first, (0, 1), value=documents.numel()).to(torch.int32)
