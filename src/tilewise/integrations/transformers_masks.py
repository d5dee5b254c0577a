"""The masks of `transformers` models as rules: causal order, windows, packed sequences and padding without an N x N tensor.

`transformers` describes a mask by functions of indices that it nests into each other. The ones it ships are recognised here by what they
are; a mask that holds any other function is built as the library builds it for `sdpa`, a boolean tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewise.masks import Document


@dataclass(frozen=True, eq=False)
class RuleMask:
    """What one attention layer may see, in O(N) memory; stands where `transformers` passes a (B, 1, Sq, Sk) boolean tensor.

    Query i stands at position ``p = i + length - Sq`` with ``length`` the keys in use. A model that looks into its mask, by indexing or by
    any torch function, gets the boolean tensor.
    """

    shape: torch.Size  # (B, 1, Sq, Sk)
    window: tuple[int, int]  # keys p - left to p + right, -1: unlimited
    length: Tensor | None = None  # int32 (B,), keys in use where that is not Sk
    padding: Tensor | None = None  # bool (B, 1, 1, Sk), True = a real key
    documents: Tensor | None = None  # (B, S), equal numbers see each other
    cu_seqlens: Tensor | None = None  # int32, the documents of all rows one after the other, where they could be counted

    @property
    def ndim(self) -> int:
        return 4

    @property
    def offsets(self) -> tuple[Tensor, Tensor] | None:
        return None if self.cu_seqlens is None else (self.cu_seqlens, self.cu_seqlens)

    def dense(self) -> Tensor:
        """The boolean tensor (B, 1, Sq, Sk)."""
        num_queries, num_keys = self.shape[2:]
        device = next((x.device for x in (self.length, self.padding, self.documents) if x is not None), None)
        j = torch.arange(num_keys, device=device).view(1, 1, 1, -1)
        length = num_keys if self.length is None else self.length.view(-1, 1, 1, 1)
        p = torch.arange(num_queries, device=device).view(1, 1, -1, 1) + length - num_queries
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
        """The arguments of `tilewise.attention` that mean this mask; at most one of padding and documents is present."""
        return dict(
            window_size=self.window,
            seqused_k=self.length,
            mask=self.padding if self.documents is None else Document(self.documents),
        )

    def __getitem__(self, index: Any) -> Tensor:
        return self.dense()[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dense(), name)

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = tuple(x.dense() if isinstance(x, cls) else x for x in args)
        return function(*args, **{key: x.dense() if isinstance(x, cls) else x for key, x in (kwargs or {}).items()})


def build_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Any = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Any:
    """The mask of one kind of layer, as `transformers` asks for it: a `RuleMask`, a boolean tensor, or None where nothing is hidden.

    ``attention_mask`` (B, tokens seen) is the padding, True = real. None also stands for plain causal order where the caller allows it.
    """
    from transformers import masking_utils

    if isinstance(attention_mask, RuleMask):  # prepared by generation, handed through the model
        return attention_mask
    mask_function = masking_utils.causal_mask_function if mask_function is None else mask_function
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
        return masking_utils.sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, device=device,
            allow_is_causal_skip=allow_is_causal_skip, allow_is_bidirectional_skip=allow_is_bidirectional_skip, **kwargs,
        )  # fmt: skip

    padding = _padding(attention_mask, kv_length, kv_offset)
    left = -1 if static and found.left >= length - 1 else found.left
    if not found.windowed and found.documents is None:
        if padding is None and allow_is_bidirectional_skip:
            return None
        everything = torch.ones((), dtype=torch.bool, device=device) if padding is None else padding
        return everything.expand(batch_size, 1, q_length, kv_length)
    plain = left < 0 and padding is None and found.documents is None
    if allow_is_causal_skip and plain and static and length == kv_length and q_length in (1, kv_length):
        return None
    in_use = None
    if not (static and length == kv_length):
        in_use = torch.as_tensor(length, dtype=torch.int32, device=device).expand(batch_size)
    cu_seqlens = None
    if found.documents is not None and not torch.compiler.is_compiling():
        cu_seqlens = _offsets(found.documents)
    shape = torch.Size((batch_size, 1, q_length, kv_length))
    return RuleMask(shape, (left, found.right), in_use, padding, found.documents, cu_seqlens)


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
