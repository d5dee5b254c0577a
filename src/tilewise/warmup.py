"""Compiles the kernels of a model before its first call: `tilewise warmup`.

Every kernel is compiled once for its head dims, dtype and rules, whatever the lengths, and Triton keeps it on disk. So running one short
call of each kind, in processes side by side, makes the first step of a later process as quick as the disk allows.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import torch

from .errors import UnsupportedAttention


@dataclass(frozen=True)
class Model:
    """The attention of a model: heads and dims, and the window of each kind of layer (0: none)."""

    heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int, ...] = (0,)
    causal: bool = True
    softcap: float = 0.0
    sinks: bool = False


MODELS = {
    "bert-base": Model(12, 12, 64, causal=False),
    "gemma-2-9b": Model(16, 8, 256, windows=(0, 4096), softcap=50.0),
    "gemma-2-27b": Model(32, 16, 128, windows=(0, 4096), softcap=50.0),
    "gemma-3-12b": Model(16, 8, 256, windows=(0, 1024)),
    "gpt-2": Model(12, 12, 64),
    "gpt-oss-20b": Model(64, 8, 64, windows=(0, 128), sinks=True),
    "llama-3-8b": Model(32, 8, 128),
    "llama-3-70b": Model(64, 8, 128),
    "llama-3.2-1b": Model(32, 8, 64),
    "mistral-7b": Model(32, 8, 128, windows=(4096,)),
    "qwen-3-8b": Model(32, 8, 128),
    "vit-large": Model(16, 16, 64, causal=False),
}


@dataclass(frozen=True)
class Case:
    """One kind of call: a layer of the model in training, or a decoding step over a cache."""

    name: str
    model: Model
    window: int
    dtype: torch.dtype
    decode: bool = False


def cases(model: Model, dtype: torch.dtype) -> list[Case]:
    """The kinds of calls that training and serving a model make.

    >>> [case.name for case in cases(MODELS["mistral-7b"], torch.bfloat16)]
    ['training, window 4096', 'decoding, window 4096']
    """
    kinds = [False, True] if model.causal else [False]
    names = {window: f", window {window}" if window else "" for window in model.windows}
    return [
        Case(("decoding" if decode else "training") + names[window], model, window, dtype, decode)
        for window in model.windows
        for decode in kinds
    ]


def check_device() -> None:
    """Raises UnsupportedAttention, in words, where there is nothing to compile for."""
    if not torch.cuda.is_available():
        raise UnsupportedAttention(
            "tilewise warmup compiles kernels for the GPU of this machine, and torch sees none; run it where the model will run. On a CPU "
            "there is nothing to compile."
        )


def run(case: Case, device: str = "cuda", length: int = 256) -> float:
    """Makes one call of the kind, and its backward pass in training; returns the seconds that took."""
    from . import attention, attention_with_kvcache

    started = time.perf_counter()
    model = case.model
    window = (case.window - 1, -1) if case.window else (-1, -1)  # models count the query's own key
    sink = torch.zeros(model.heads, device=device) if model.sinks else None
    rules: dict[str, Any] = dict(causal=model.causal, window_size=window, softcap=model.softcap, learnable_sink=sink)

    def tensor(tokens: int, heads: int) -> torch.Tensor:
        return torch.zeros(1, tokens, heads, model.head_dim, dtype=case.dtype, device=device)

    if case.decode:
        cache = tensor(length, model.kv_heads)
        used = torch.full((1,), length - 1, dtype=torch.int32, device=device)
        new = tensor(1, model.kv_heads)
        attention_with_kvcache(tensor(1, model.heads), cache, cache.clone(), new, new, cache_seqlens=used, **rules)
    else:
        q, k, v = (tensor(length, heads).requires_grad_() for heads in (model.heads, model.kv_heads, model.kv_heads))
        attention(q, k, v, **rules).sum().backward()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def run_all(listed: list[Case], processes: int = 0, call: Callable[[Case], float] = run) -> Iterator[tuple[Case, float]]:
    """Runs the cases side by side in fresh processes, and yields (case, seconds) as they finish.

    ``processes`` 0 takes one for each case, at most as many as there are cores. An exception in a process is raised here.
    """
    workers = processes or min(len(listed), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(call, case): case for case in listed}
        for future in as_completed(running):
            yield running[future], future.result()
