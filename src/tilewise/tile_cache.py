"""Tile lists that were built before, found by what they were built from: the rule's program, its tensors' content, and the sizes.

On a CPU a tensor's content is what it holds; on other devices, where reading it would mean waiting, it is the tensor itself and its
version, which PyTorch raises at every write. Nothing is kept while a CUDA graph is captured or a tracer looks on.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from threading import Lock
from typing import Any, TypeVar

import torch
from torch import Tensor

Found = TypeVar("Found")

ENTRIES = 16
LARGEST = 64 << 20  # bytes of the lists that are kept
_kept: OrderedDict[Hashable, tuple[Any, list[weakref.ref[Tensor]]]] = OrderedDict()
_lock = Lock()


def find(key: tuple[Any, ...], tensors: Sequence[Tensor], build: Callable[[], Found]) -> Found:
    """What `build` returned before for the same key and tensors, else what it returns now."""
    device = key[-1]
    if watched(device) or not all(map(_has_content, tensors)):
        return build()
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
    full_key = (*key, stream, torch.is_inference_mode_enabled(), *map(_content, tensors))
    with _lock:
        if full_key in _kept:
            found, alive = _kept[full_key]
            if all(reference() is not None for reference in alive):
                _kept.move_to_end(full_key)
                return found
    built = build()
    if sum(x.numel() * x.element_size() for x in built.tensors()) <= LARGEST:  # type: ignore[attr-defined]
        with _lock:
            _kept[full_key] = built, [weakref.ref(x) for x in tensors if x.device.type != "cpu"]
            while len(_kept) > ENTRIES:
                _kept.popitem(last=False)
    return built


def versions(tensors: Sequence[Tensor]) -> list[tuple[Tensor, int]]:
    """The tensors with the number of writes that they have seen, where PyTorch counts them."""
    if torch.compiler.is_compiling():
        return []
    return [(x, x._version) for x in tensors if not x.is_inference()]


def written_since(seen: Sequence[tuple[Tensor, int]]) -> bool:
    """Whether one of these tensors was written to after `versions` looked at it."""
    return not torch.compiler.is_compiling() and any(x._version != version for x, version in seen)


def clear() -> None:
    """Forgets everything."""
    with _lock:
        _kept.clear()


def host_may_read(device: torch.device) -> bool:
    """Whether values on a device can be read now without waiting for it and without a tracer that would have to know them."""
    return device.type == "cpu" and not watched(device)


def watched(device: torch.device) -> bool:
    """Whether a tracer, a transform, a mode or a graph that is captured looks on: then nothing is kept, and nothing of it is found."""
    if recorded(device) or torch._C._are_functorch_transforms_active():
        return True
    return torch.utils._python_dispatch._get_current_dispatch_mode() is not None


def recorded(device: torch.device) -> bool:
    """Whether what is done now will be done again, with other values in its tensors: by torch.compile, or in a CUDA graph."""
    return torch.compiler.is_compiling() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def _has_content(x: Tensor) -> bool:
    return type(x) in (Tensor, torch.nn.Parameter) and x.device.type != "meta" and not (x.is_inference() and x.device.type != "cpu")


def _content(x: Tensor) -> Hashable:
    shape = str(x.dtype), tuple(x.shape)
    if x.device.type != "cpu":
        return *shape, id(x), x._version, x.data_ptr(), x.stride()
    flat = x.detach().contiguous().view(-1).view(torch.uint8) if x.numel() else torch.empty(0, dtype=torch.uint8, device="cpu")
    return *shape, hashlib.blake2b(flat.numpy().data, digest_size=16).digest()
