"""The demo from end to end, as data: nothing is printed or drawn here."""

from __future__ import annotations

import itertools
import math
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import tilewise
from tilewise.bench.source_hash import kernel_source_hash
from tilewise.demo.model import Attention, ByteGPT, eager_attention
from tilewise.demo.scaling import Shape, measure
from tilewise.demo.text import draw_batches, standard_library_text
from tilewise.demo.training import Curve, compare, train

Progress = Callable[[str, int, int], None]
"""Called as progress(what is running, units done, units in all)."""


@dataclass(frozen=True)
class Settings:
    """What the demo does. `Settings.for_device` fits it into two minutes of a two-core CPU, or uses what a GPU has."""

    device: str
    steps: int
    context: int
    batch: int
    lengths: tuple[int, ...]
    heads: int
    head_dim: int
    dtype: torch.dtype
    memory_limit: int
    time_budget: float
    seed: int = 0

    @classmethod
    def for_device(cls, device: str, *, steps: int | None = None, memory_limit: int | None = None) -> Settings:
        """Sizes for a torch device name. `memory_limit` in bytes: 2 GB on a CPU, nine tenths of what is free on a GPU by default."""
        if torch.device(device).type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            return cls(
                device=device,
                steps=steps or 200,
                context=1024,
                batch=16,
                lengths=tuple(2**power for power in range(10, 18)),
                heads=16,
                head_dim=64,
                dtype=torch.bfloat16,
                memory_limit=memory_limit or int(0.9 * free),
                time_budget=60.0,
            )
        return cls(
            device=device,
            steps=steps or 80,
            context=256,
            batch=8,
            lengths=tuple(2**power for power in range(8, 15)),
            heads=4,
            head_dim=64,
            dtype=torch.float32,
            memory_limit=memory_limit or 2 * 10**9,
            time_budget=40.0,
        )


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`tilewise.attention` as the demo's model calls it: q, k, v (B, S, H, D)."""
    return tilewise.attention(q, k, v, causal=True)


def run(settings: Settings, progress: Progress = lambda what, done, total: None) -> dict[str, Any]:
    """Train twice (and once more for the yardstick), then measure time and memory. Returns plain numbers, ready for JSON.

    `results["training"]["agree"]` says whether the loss curves agree within rounding; see `training.compare`.
    """
    device = torch.device(settings.device)
    return {
        "tilewise": tilewise.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine(),
        "device_type": device.type,
        "threads": torch.get_num_threads(),
        "source_hash": kernel_source_hash(device.type),
        "training": _train_all(settings, device, progress),
        "scaling": _measure_all(settings, device, progress),
    }


def _train_all(settings: Settings, device: torch.device, progress: Progress) -> dict[str, Any]:
    text = standard_library_text()
    batches = draw_batches(text, settings.steps, settings.batch, settings.context, settings.seed)
    attentions: dict[str, Attention] = {
        "eager": eager_attention,
        "tilewise": causal_attention,
        "eager_reversed": partial(eager_attention, reverse_keys=True),
    }
    curves: dict[str, Curve] = {}
    for name, attention in attentions.items():
        what = f"training, {name.replace('_', ', keys ')}"
        curves[name] = train(
            attention,
            # On a slow or busy machine the first run stops early; the others then do as many steps.
            batches[: len(curves["eager"].losses)] if curves else batches,
            seed=settings.seed,
            device=device,
            planned=settings.steps,
            seconds=math.inf if curves else settings.time_budget / 2,
            on_step=_step_counter(progress, what, settings.steps),
        )
        progress(what, settings.steps, settings.steps)
    agreement = compare(curves["tilewise"], curves["eager"], curves["eager_reversed"])
    head_dim = ByteGPT(eager_attention).head_dim
    example = torch.empty(settings.batch, settings.context, 4, head_dim, device="meta")
    return {
        "backend": tilewise.explain(example, example, example, causal=True, device=device).backend,
        "text_bytes": len(text),
        "parameters": sum(parameter.numel() for parameter in ByteGPT(eager_attention).parameters()),
        "steps": len(curves["eager"].losses),
        "batch": settings.batch,
        "context": settings.context,
        "losses": {name: curve.losses for name, curve in curves.items()},
        "seconds": {name: curve.seconds for name, curve in curves.items()},
        "gaps": agreement.gaps,
        "tolerances": agreement.tolerances,
        "agree": agreement.holds,
    }


def _step_counter(progress: Progress, what: str, total: int) -> Callable[[float], None]:
    steps = itertools.count(1)
    return lambda loss: progress(what, next(steps), total)


def _measure_all(settings: Settings, device: torch.device, progress: Progress) -> dict[str, Any]:
    shapes = [Shape(length, settings.heads, settings.head_dim, settings.dtype) for length in settings.lengths]
    points = []
    what = "measuring longer contexts"
    total = 2 * len(shapes)
    progress(what, 0, total)
    for point in measure(causal_attention, shapes, device, memory_limit=settings.memory_limit, time_budget=settings.time_budget):
        points.append(point)
        progress(what, len(points), total)
    progress(what, total, total)
    example = torch.empty(1, settings.lengths[-1], settings.heads, settings.head_dim, dtype=settings.dtype, device="meta")
    return {
        "backend": tilewise.explain(example, example, example, causal=True, device=device).backend,
        "heads": settings.heads,
        "head_dim": settings.head_dim,
        "dtype": str(settings.dtype).removeprefix("torch."),
        "memory_limit": settings.memory_limit,
        "points": [asdict(point) for point in points],
    }
