"""Statements about attention that are often repeated, each turned into an experiment with a right answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import softmax
from . import predict
from .algorithms import FA1, FA2, Inputs
from .predict import Case
from .traffic import DeviceMemory, Tiles

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Finding:
    """What is said, what was found, and whether it holds."""

    name: str
    said: str
    found: str
    holds: bool
    numbers: dict[str, float]


def overflow() -> Finding:
    """float16 reaches 65504 and e^11 = 59874: 12 is the first integer whose exponential is infinite."""
    integers = range(1, 20)
    first = next(i for i in integers if torch.tensor(float(i), dtype=torch.float16).exp().isinf())
    largest = torch.finfo(torch.float16).max
    return Finding(
        "float16 overflow",
        "float16 ends at 65536, so e^x overflows from x = 11 on",
        f"float16 ends at {largest:.0f}, e^11 = {math.exp(11):.0f} fits, the first integer that overflows is {first}",
        first == 11,
        {"first": first, "largest": largest, "log_largest": math.log(largest)},
    )


def rescale_factor() -> Finding:
    """Online softmax with e^(m_old - m_new), and with the difference of exponentials that some texts print."""

    def denominator(factor: Callable[[Tensor, Tensor], Tensor]) -> float:
        x = torch.tensor([2.0, 1.0, 3.0], dtype=torch.float64)
        m, l = x[0], torch.ones((), dtype=torch.float64)
        for score in x[1:]:
            m_new = torch.maximum(m, score)
            l = l * factor(m, m_new) + torch.exp(score - m_new)
            m = m_new
        return l.item()

    exact = softmax.State.of(torch.tensor([2.0, 1.0, 3.0], dtype=torch.float64)).l.item()
    right = denominator(lambda old, new: torch.exp(old - new))
    printed = denominator(lambda old, new: torch.exp(old) - torch.exp(new))
    return Finding(
        "rescale factor",
        "when the maximum grows, multiply the sum by e^m_old - e^m_new",
        f"for [2, 1, 3] the sum is {exact:.5f}; e^(m_old - m_new) gives {right:.5f}, e^m_old - e^m_new gives {printed:.5f}",
        math.isclose(printed, exact),
        {"exact": exact, "right": right, "printed": printed},
    )


def loop_order() -> Finding:
    """Bytes of both orders, counted: only with the outer loop over queries does the state stay on chip."""
    state = {}
    for step in (FA1, FA2):
        memory = DeviceMemory()
        assert step.count is not None
        step.count(memory, Inputs.random(1, 512, 64, Tiles(64, 64)))
        names = ("o", "m", "l", "lse")
        state[step.name] = sum(memory.bytes(name=name) for name in names), memory.bytes()
    (fa1_state, fa1_all), (fa2_state, fa2_all) = state["fa1"], state["fa2"]
    return Finding(
        "loop order",
        "K and V outside, Q inside, and what lies between never goes to device memory",
        f"N = 512, d = 64, tiles of 64: state moves {fa1_state:,} bytes with K and V outside and {fa2_state:,} with Q outside "
        f"(in all {fa1_all:,} and {fa2_all:,})",
        fa1_state == fa2_state,
        {"fa1_state": fa1_state, "fa2_state": fa2_state, "fa1_bytes": fa1_all, "fa2_bytes": fa2_all},
    )


def traffic_against_compute() -> Finding:
    """Six N x N passes in fp16 against the products: a ratio that depends on d alone."""
    ratios = {f"{name}_d{d}": predict.traffic_over_compute(d, *rates) for name, rates in RATES.items() for d in (64, 128)}
    needed = predict.traffic_over_compute(1, *RATES["a100"]) / 40
    return Finding(
        "traffic against compute",
        "more than 40 ms of traffic against less than 1 ms of compute, for the same problem on an A100",
        f"six passes over N x N cost 468/d times the products on an A100 ({ratios['a100_d64']:.1f} at d = 64, "
        f"{ratios['a100_d128']:.1f} at d = 128) and 618/d on an H200; 40 times would need d below {needed:.0f}",
        False,
        ratios | {"passes_counted_a100_d64": predict.traffic_over_compute(64, *RATES["a100"], passes=4)},
    )


def six_trips() -> Finding:
    """The trips of Algorithm 0, each as large as it is, and the two problems that a total of 96 GiB can mean."""
    total = 6 * 2**33 * 2
    squares = standard_bytes(heads=8, n=32 * 1024, d=64)
    wide = standard_bytes(heads=16 * 32, n=128 * 1024, d=128)
    return Finding(
        "six trips",
        "six trips of the same size: 96 GiB, 48 ms at 2 TB/s",
        f"six trips of 2^33 numbers of 2 bytes are {total / GIB:.0f} GiB, {total / 2e12 * 1e3:.1f} ms. Read as B N^2 (B = 8, N = 32k), "
        f"Algorithm 0 moves {squares / GIB:.1f} GiB at d = 64: four of its trips are over N^2, four over N d. Read as B N d (B = 16, "
        f"N = 128k, d = 4096 in heads of 128), it moves {wide / GIB:,.0f} GiB: that reading leaves the N^2 trips out",
        False,
        {"total_bytes": total, "milliseconds": total / 2e12 * 1e3, "reading_squares": squares, "reading_wide": wide},
    )


def standard_bytes(heads: int, n: int, d: int) -> int:
    """Device-memory bytes of standard attention in fp16 behind a cache that holds one head's Q, K and V."""
    return predict.standard_forward(Case(heads, n, d, 2, Tiles(128, 128))).device_bytes(predict.L2_BYTES)


RATES = {"a100": (2e12, 312e12), "h200": (4.8e12, 989e12)}  # bytes and fp16 operations a second, datasheets
ALL = (overflow, rescale_factor, loop_order, traffic_against_compute, six_trips)
