"""The training text: the source of Python's own standard library, which every machine has."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor


def standard_library_text(max_bytes: int = 4 << 20) -> Tensor:
    """The standard library's top-level modules, joined in order of their names: a 1-d uint8 tensor of at most `max_bytes`.

    Raises RuntimeError where the installation holds no source files.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= max_bytes:
            break
    if not text:
        raise RuntimeError(f"the demo trains on the source of the standard library, but {folder} holds no .py files")
    return torch.frombuffer(text[:max_bytes], dtype=torch.uint8)


def draw_batches(text: Tensor, steps: int, batch: int, context: int, seed: int) -> Tensor:
    """Random windows of the text: int64 (steps, batch, context + 1), the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - context, (steps, batch, 1), generator=generator)
    return text[starts + torch.arange(context + 1)].long()
