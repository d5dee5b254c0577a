"""Train one model per attention from one seed and decide whether their loss curves agree."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewise.demo.model import Attention, ByteGPT

# Rounding drives two equal runs apart at about one rate, but the gap at one step is one draw of a random quantity. Of eight runs that
# differed in the order of summation alone, every two stayed within a factor of 12.1 of each other at each of 100 steps. Mistakes are far
# outside: a mask that is off by one key moves the first loss by 6e-4, a scale that is off by 3 % the third loss by 9e-5, where the
# tolerance is 1e-5.
NOISE_FACTOR = 16.0


@dataclass(frozen=True)
class Curve:
    """Losses of one training run (nats per byte) and the seconds that it took."""

    losses: list[float]
    seconds: float


def train(
    attention: Attention,
    batches: Tensor,
    *,
    seed: int,
    device: torch.device,
    planned: int | None = None,
    seconds: float = math.inf,
    on_step: Callable[[float], None] = lambda loss: None,
) -> Curve:
    """Train a `ByteGPT` in float32 on batches (steps, B, S + 1) and return its loss at each step; `on_step` is called with each.

    The learning rate follows a schedule of `planned` steps (default: as many as there are batches). After `seconds` the training stops
    where it is, but not before ten steps.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ByteGPT(attention)
    model.to(device)
    steps = planned or len(batches)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 10, 0.55 + 0.45 * math.cos(math.pi * step / steps))
    )
    losses = []
    start = time.perf_counter()
    for tokens in batches.to(device):
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        on_step(losses[-1])
        if len(losses) >= 10 and time.perf_counter() - start > seconds:
            break
    return Curve(losses, time.perf_counter() - start)


@dataclass(frozen=True)
class Agreement:
    """Per step: the gap between two curves and what rounding alone explains."""

    gaps: list[float]
    tolerances: list[float]

    @property
    def holds(self) -> bool:
        return all(gap <= tolerance for gap, tolerance in zip(self.gaps, self.tolerances, strict=True))


def compare(curve: Curve, eager: Curve, eager_reversed: Curve) -> Agreement:
    """Does `curve` stay as close to `eager` as an eager run that only sums in another order?

    Training amplifies rounding, so no fixed tolerance is right for every step. The yardstick is measured instead: `eager_reversed` is the
    eager model visiting its keys from last to first, so its gap to `eager` is rounding, amplified, and nothing else. The tolerance at a
    step is `NOISE_FACTOR` times the largest such gap so far, or times the float32 spacing of the loss while that is larger.
    """
    gaps, tolerances = [], []
    largest = 0.0
    for loss, reference, other in zip(curve.losses, eager.losses, eager_reversed.losses, strict=True):
        largest = max(largest, abs(other - reference))
        gaps.append(abs(loss - reference))
        tolerances.append(NOISE_FACTOR * max(largest, torch.finfo(torch.float32).eps * abs(reference)))
    return Agreement(gaps, tolerances)
