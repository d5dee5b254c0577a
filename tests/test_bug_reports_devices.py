"""Public reports of faults in other attention libraries: memory of masks, generations of GPUs, installing. Nothing here needs a GPU.

The number of the report is in the test's id.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import textwrap
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tilewise import UnsupportedAttention, attention, cost, explain, masks, plan
from tilewise.kernels.triton import configs

from .reports import report

ROOT = Path(__file__).parents[1]


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that an operator makes."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor):
                self.nbytes = max(self.nbytes, x.untyped_storage().nbytes())
        return result


@report(146)
@pytest.mark.parametrize(
    "rule", [masks.SlidingWindow(512, 0), masks.Causal() & masks.Chunked(1024), masks.FirstKeys(4) | masks.SlidingWindow(9, 9)], ids=repr
)
def test_a_mask_rule_is_never_an_n_by_n_tensor(report: str, rule: masks.Mask) -> None:
    """96,000 queries: its tile ranges, and a call planned with it, take no memory that grows with the square."""
    n = 96_000
    with Largest() as largest, warnings.catch_warnings():
        warnings.simplefilter("error")
        rule.tile_range(128, 128, seqlen_q=n, seqlen_k=n)
        q = torch.empty(1, n, 8, 64, dtype=torch.bfloat16, device="meta")
        planned = explain(q, q, q, mask=rule, device="NVIDIA H200")
    assert 0 < largest.nbytes <= 2 * q.numel() * q.element_size()
    assert planned.extra_bytes < 1e9 < n * n


DEVICES = {
    "V100": plan.Target("cuda", (7, 0), "V100", shared_memory=98_304),
    "T4": plan.Target("cuda", (7, 5), "T4", shared_memory=65_536),
    "A100": plan.Target("cuda", (8, 0), "A100", shared_memory=166_912),
    "RTX 3090": plan.Target("cuda", (8, 6), "RTX 3090", shared_memory=101_376),
    "RTX 4090": plan.Target("cuda", (8, 9), "RTX 4090", shared_memory=101_376),
    "H200": plan.Target("cuda", (9, 0), "H200", shared_memory=232_448),
    "B200": plan.Target("cuda", (10, 0), "B200", shared_memory=232_448),
    "RTX 5090": plan.Target("cuda", (12, 0), "RTX 5090", shared_memory=101_376),
}


def operands(dim: int, dtype: torch.dtype) -> plan.Operands:
    return plan.Operands(*(torch.empty(1, 4, 256, dim, dtype=dtype, device="meta") for _ in range(3)))


@report(149)
@pytest.mark.parametrize("device", [name for name in DEVICES if DEVICES[name].capability >= (8, 0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_tiles_fit_the_shared_memory_that_the_device_says(report: str, dim: int, dtype: torch.dtype, device: str) -> None:
    target = DEVICES[device]
    bits, block = 8 * dtype.itemsize, configs.padded(dim)
    for purpose in (configs.FORWARD, configs.DKDV, configs.DQ):
        config = configs.choose(configs.architecture(target), target.shared_memory, bits, purpose, frozenset(), block, block)
        assert configs.shared_bytes(config, bits, purpose, block, block) <= target.shared_memory


@report(161)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_a_custom_mask_is_served_on_every_generation(report: str, backward: bool) -> None:
    mask = torch.empty(1, 1, 256, 256, dtype=torch.bool, device="meta")
    rules, request = plan.Rules(softmax_scale=0.125), plan.Request(backward=backward)
    for target, given in itertools.product(DEVICES.values(), ("tensor", "rule")):
        t = operands(64, torch.bfloat16)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if given == "tensor":
                plan.select(replace(t, mask=mask), rules, request=request, target=target)  # raises where a generation does not serve it
            else:
                plan.select(t, replace(rules, mask_mod="q_idx >= kv_idx"), request=request, target=target)


@report(163, 164)
def test_nothing_is_compiled_and_no_system_is_named(report: str) -> None:
    """No extension modules, no set-up script, and Triton only where it has packages: what pip does is copy files."""
    source = ROOT / "src" / "tilewise"
    assert not [path for path in source.rglob("*") if path.suffix in (".c", ".cpp", ".cu", ".cuh", ".so", ".pyx")]
    assert not (ROOT / "setup.py").exists() and "ext-modules" not in (ROOT / "pyproject.toml").read_text()


@report(164)
def test_attention_works_where_the_system_has_no_triton(report: str) -> None:
    """The package as Windows sees it: no Triton, no `resource`, no `fcntl`, and `sys.platform` of that system."""
    script = """
        import sys, torch
        for name in ("triton", "resource", "fcntl", "pwd", "termios"):
            sys.modules[name] = None
        sys.platform = "win32"
        import tilewise
        from tilewise import doctor
        q = torch.randn(1, 9, 2, 8, requires_grad=True)
        tilewise.attention(q, q, q, causal=True, softcap=3.0).sum().backward()
        assert q.grad.isfinite().all()
        assert doctor.main(["--json"]) == 0
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@report(166)
@pytest.mark.parametrize("device", DEVICES)
def test_every_generation_is_served_and_older_ones_warn_once(report: str, device: str) -> None:
    """Triton's kernels from sm80 on, the newest included; before that plain PyTorch, with one warning that says why."""
    plan._warn_once.cache_clear()
    target, rules = DEVICES[device], plan.Rules(softmax_scale=0.125)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        chosen = [plan.select(operands(64, torch.float16), rules, target=target).backend for _ in range(3)]
    if target.capability >= (8, 0):
        assert set(chosen) <= {"triton", "hopper"} and not said
    else:
        assert set(chosen) == {"tiled"} and len(said) == 1
        assert f"{target.capability[0]}.{target.capability[1]}" in str(said[0].message) and "8.0" in str(said[0].message)
    plan._warn_once.cache_clear()


def test_explaining_a_call_uses_up_no_warning() -> None:
    """What `explain` looks at is not run: the first real call still says that it is slow."""
    plan._warn_once.cache_clear()
    q = torch.empty(1, 8, 1, 8, dtype=torch.float16, device="meta")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert explain(q, q, q, score_mod=lambda s, b, h, i, j: s * 2, device="NVIDIA A100").backend
        t, rules = operands(64, torch.float64), plan.Rules(softmax_scale=0.125)
        with pytest.raises(UnsupportedAttention, match="tiled"):
            plan.select(t, rules, "triton", target=DEVICES["A100"])
    with pytest.warns(UserWarning, match="exact but slow"):
        plan.select(t, rules, target=DEVICES["A100"])
    plan._warn_once.cache_clear()


@report(145)
def test_the_plan_of_a_long_call_is_linear_everywhere(report: str) -> None:
    """Extra memory that `explain` promises for 40,320 tokens, on every device it knows."""
    q = torch.empty(1, 40_320, 16, 64, dtype=torch.bfloat16, device="meta")
    for device in ("cpu", *(d.name for d in cost.DEVICES)):
        for pass_ in ("fwd", "bwd"):
            assert explain(q, q, q, causal=True, device=device, pass_=pass_).extra_bytes < 20 * q.numel() * 2
    assert attention(*(torch.randn(1, 8, 1, 8) for _ in range(3)), causal=True).isfinite().all()
