"""Clocks of a benchmark: device time, wall time, time to return, and what the card was doing meanwhile."""

from __future__ import annotations

import contextlib
import importlib
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

# One queue of a device takes about a thousand launches before the host must wait; a call may launch ten kernels.
MOST_QUEUED = 60
L2_FLUSH_BYTES = 256 << 20


@dataclass(slots=True)
class Sensors:
    """Clock and power of the current device: through NVIDIA's management library, else nvidia-smi, else nothing."""

    _handle: Any = None
    _nvml: Any = None
    _smi: bool = False

    @staticmethod
    def open(device: str) -> Sensors:
        if device != "cuda" or torch.version.hip:
            return Sensors()
        try:
            pynvml = importlib.import_module("pynvml")
            pynvml.nvmlInit()
            uuid = f"GPU-{torch.cuda.get_device_properties().uuid}"
            return Sensors(pynvml.nvmlDeviceGetHandleByUUID(uuid.encode()), pynvml)
        except Exception:  # no bindings, or a library that refuses: speed is measured all the same
            return Sensors(_smi=True)

    def read(self) -> tuple[float | None, float | None]:
        """(MHz of the multiprocessors, watts), None where unknown."""
        if self._nvml is not None:
            with contextlib.suppress(self._nvml.NVMLError):
                clock = self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM)
                return float(clock), self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000
        if self._smi:
            query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
            query += ["-i", f"GPU-{torch.cuda.get_device_properties().uuid}"]
            try:
                clock, power = subprocess.run(query, capture_output=True, text=True, timeout=5, check=True).stdout.split(",")
                return float(clock), float(power)
            except (OSError, ValueError, subprocess.SubprocessError):
                self._smi = False
        return None, None


@dataclass(slots=True)
class Samples:
    """One provider's measurements of one case and pass: a median a round."""

    ms: list[float] = field(default_factory=list)
    clocks_mhz: list[float] = field(default_factory=list)
    power_w: list[float] = field(default_factory=list)

    def quartiles(self) -> tuple[float, float, float]:
        """(median, first, third) over the rounds."""
        if len(self.ms) < 2:
            return self.ms[0], self.ms[0], self.ms[0]
        first, median, third = statistics.quantiles(self.ms, n=4, method="inclusive")
        return median, first, third

    def note(self, clock: float | None, power: float | None) -> None:
        if clock is not None:
            self.clocks_mhz.append(clock)
        if power is not None:
            self.power_w.append(power)


class CudaClock:
    """Device time by events, with the L2 cache overwritten before every call and the queue kept full."""

    l2 = "flushed"

    def __init__(self, sensors: Sensors, round_ms: float) -> None:
        self.sensors, self.round_ms = sensors, round_ms
        self._flush = torch.empty(L2_FLUSH_BYTES, dtype=torch.int8, device="cuda")
        self._calls: dict[int, tuple[int, float]] = {}

    def _plan(self, call: Callable[[], Any]) -> tuple[int, float]:
        """(repetitions that fill a round, host seconds a call where the host sets the pace, else 0), from a few calls."""
        key = id(call)
        if key not in self._calls:
            call()
            torch.cuda.synchronize()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin = time.perf_counter()
            start.record()
            for _ in range(3):
                call()
            end.record()
            host = (time.perf_counter() - begin) / 3
            torch.cuda.synchronize()
            one = max(start.elapsed_time(end) / 3, 1e-3)
            least = 3 if one < self.round_ms else 1
            repetitions = max(least, min(MOST_QUEUED, round(self.round_ms / one)))
            self._calls[key] = (repetitions, host if host * 1e3 > 0.7 * one else 0.0)
        return self._calls[key]

    def round(self, call: Callable[[], Any], samples: Samples) -> None:
        """Times one round of a call and notes the median of its repetitions, the clock and the power."""
        repetitions, host = self._plan(call)
        if repetitions > 1:
            call()
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repetitions)]
        if host:  # the host launches about as slowly as the device works, and events would time the gaps: queue all, then start
            torch.cuda._sleep(int(min(0.05, (host + 2e-5) * repetitions) * 2e9))  # cycles, at about 2 GHz
        for start, end in events:
            self._flush.zero_()
            start.record()
            call()
            end.record()
        events[repetitions // 2][1].synchronize()
        samples.note(*self.sensors.read())  # while the second half runs
        torch.cuda.synchronize()
        samples.ms.append(statistics.median(start.elapsed_time(end) for start, end in events))

    def forget(self) -> None:
        """Calls are told apart by identity, which another case may reuse."""
        self._calls.clear()


class WallClock:
    """Wall time of calls that block: the CPU's clock."""

    l2 = "warm"

    def __init__(self, round_ms: float) -> None:
        self.round_ms = round_ms

    def round(self, call: Callable[[], Any], samples: Samples) -> None:
        times: list[float] = []
        begin = time.perf_counter()
        while not times or (len(times) < MOST_QUEUED and (time.perf_counter() - begin) * 1e3 < self.round_ms):
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e3)
        samples.ms.append(statistics.median(times))

    def forget(self) -> None:
        pass


class HostClock:
    """Time until a call returns, with the device never waited for: the host's own cost, for inputs so small that the queue stays short."""

    l2 = "warm"
    calls = 100

    def round(self, call: Callable[[], Any], samples: Samples) -> None:
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(self.calls):
            call()
        samples.ms.append((time.perf_counter() - start) * 1e3 / self.calls)
        torch.cuda.synchronize()

    def forget(self) -> None:
        pass


def ceilings(device: str) -> tuple[float, float]:
    """(matrix products in FLOP/s, copy in bytes/s) of this device, measured now: the roof of every plot."""
    size, elements, dtype = (8192, 1 << 30, torch.bfloat16) if device == "cuda" else (1024, 1 << 24, torch.float32)
    clock = CudaClock(Sensors(), 60) if device == "cuda" else WallClock(60)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    source = torch.randn(elements, device=device)
    target = torch.empty_like(source)

    def median_ms(call: Callable[[], Any]) -> float:
        samples = Samples()
        for _ in range(3):
            clock.round(call, samples)
        return samples.quartiles()[0]

    product, copy = median_ms(lambda: a @ b), median_ms(lambda: target.copy_(source))
    return 2 * size**3 / (product / 1e3), 2 * elements * 4 / (copy / 1e3)
