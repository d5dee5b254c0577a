"""Measurements that need a process of their own: the first call of all, and peak memory where no allocator keeps count."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from .cases import CASES, Case
from .peers import find
from .provider import Inputs

PACKAGE_PARENT = Path(__file__).resolve().parents[2]
# Where compiled kernels outlive a process; a fresh folder for each makes a first call cold.
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR")


def measure(case: Case, pass_: str, provider: str, left: Callable[[], float]) -> Iterator[dict[str, Any]]:
    """The fields that fresh processes find out about a case: one answer, or for first calls two (`cache` is "cold", then "disk").

    `left` tells the seconds until the budget ends; a child that would outlive it is stopped and answers nothing.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PACKAGE_PARENT), os.environ.get("PYTHONPATH", "")])}
        if case.kind == "first_call":
            environment |= {name: str(Path(folder, name)) for name in CACHES}
        for cache in ("cold", "disk") if case.kind == "first_call" else (None,):
            if left() <= 3:
                return
            request = json.dumps({"id": case.id, "pass": pass_, "provider": provider})
            command = [sys.executable, "-m", "tilewise.bench", "child", request]
            limit = None if left() == float("inf") else left() - 2
            try:
                done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit)
            except subprocess.TimeoutExpired:
                return
            lines = done.stdout.strip().splitlines()
            if done.returncode or not lines:
                error = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1][:300]
                status = "oom" if "OutOfMemoryError" in error else "unsupported"
                yield {"status": status, "reason": error, "cache": cache}
                return
            yield {**json.loads(lines[-1]), "cache": cache}


def main(arguments: list[str]) -> int:
    """Serves one request of `measure`, which comes as JSON; answers with a line of JSON."""
    request = json.loads(arguments[0])
    case = next(case for case in CASES if case.id == request["id"])
    (provider,), _ = find(request["provider"], case.device)
    inputs = Inputs.make(case)
    # What torch does once itself: its matmul library, and what it imports to check the gradients that a backward pass is given.
    x = torch.ones(8, 8, device=case.device, requires_grad=True)
    torch.autograd.grad(x.matmul(x), x, torch.ones_like(x))
    if case.device == "cuda":
        torch.cuda.synchronize()
    begin, before = time.perf_counter(), _resident_bytes()
    prepared = provider.prepare(case, inputs)
    with prepared.context():
        _once(prepared.call, request["pass"], inputs)
        first = time.perf_counter()
        answer: dict[str, Any] = {"backend": prepared.serving(request["pass"]) or provider.backend or None, "rounds": 1}
        if case.kind == "memory":
            answer["peak_bytes"] = _peak_bytes() - before
        else:
            # Ours watch the call that comes again and play those after it (kernels/replay.py): the third is what all later ones cost.
            _once(prepared.call, request["pass"], inputs)
            again = time.perf_counter()
            _once(prepared.call, request["pass"], inputs)
            answer |= {"ms": round((first - begin) * 1e3, 3), "ms_warm": round((time.perf_counter() - again) * 1e3, 3)}
    print(json.dumps(answer))
    return 0


def _once(call: Callable[..., torch.Tensor], pass_: str, inputs: Inputs) -> None:
    if pass_ == "fwd":
        with torch.no_grad():
            call(inputs.q, inputs.k, inputs.v, inputs.bias)
    else:
        leaves = inputs.leaves()
        torch.autograd.grad(call(*leaves), leaves, inputs.dout)
    if inputs.q.is_cuda:
        torch.cuda.synchronize()


def _resident_bytes() -> int:
    """What this process holds now; where the system does not say, the most that it ever held."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return _peak_bytes()


def _peak_bytes() -> int:
    import resource  # not on Windows, where everything else here works

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
