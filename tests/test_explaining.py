"""`explain`: what a call would use and cost, without running it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tilewise
from tilewise import UnsupportedAttention, attention, cost, explain, explaining, masks, ops, plan

from . import cases


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def test_numbers_are_the_fields_formulas() -> None:
    b, n, h, d = 2, 4096, 16, 128
    q, k = meta(b, n, h, d), meta(b, n, 4, d)
    told = explain(q, k, k, device="NVIDIA H200")
    assert told.flops == 4 * b * h * n * n * d
    assert told.bytes == 2 * (2 * b * n * h * d + 2 * b * n * 4 * d) + 4 * b * h * n  # q, k, v, out, and the LSE
    assert told.unfused_bytes >= 2 * 2 * b * h * n * n > 100 * told.extra_bytes
    h200 = cost.device_named("NVIDIA H200")
    assert h200 is not None
    assert told.roofline_ms == pytest.approx(told.flops / h200.matmul_rate("bfloat16", False) * 1e3)
    backward = explain(q, k, k, pass_="bwd", device="NVIDIA H200")
    assert backward.flops == 2.5 * told.flops and backward.roofline_ms > 2 * told.roofline_ms
    causal = explain(q, k, k, causal=True, device="NVIDIA H200")
    assert causal.flops == pytest.approx(told.flops / 2, rel=1e-3)


def test_one_decoded_token_is_bound_by_memory() -> None:
    told = explain(meta(4, 1, 64, 128), meta(4, 65536, 8, 128), meta(4, 65536, 8, 128), device="NVIDIA H200")
    assert told.bound == "memory"
    assert told.roofline_ms == pytest.approx(told.bytes / cost.device_named("NVIDIA H200").bandwidth * 1e3)


def test_each_faster_backend_says_why_it_is_not_taken() -> None:
    q = meta(1, 256, 4, 64)
    assert explain(q, q, q, device="NVIDIA H200").declined == ()
    scored = explain(q, q, q, score_mod=lambda s, b, h, i, j: s - 0.1 * h, device="NVIDIA H200")
    assert scored.backend == "triton" and [name for name, _ in scored.declined] == ["hopper"] and "score" in scored.declined[0][1]
    dropped = explain(q, q, q, dropout_p=0.1, device="NVIDIA H200")
    assert dropped.backend == "hopper" and dropped.declined == ()
    biased = explain(q, q, q, bias=meta(256, 256), device="NVIDIA H200")
    assert biased.backend == "hopper" and "V is copied" in str(biased) and biased.extra_bytes >= 2 * q.numel()
    wide = meta(1, 256, 4, 320)
    tiled = explain(wide, wide, wide, device="NVIDIA H200")
    assert tiled.backend == "tiled" and [name for name, _ in tiled.declined] == ["hopper", "triton"]
    for _, reason in tiled.declined:
        assert "320" in reason
    for name, reason in tiled.declined:
        assert name in str(tiled) and reason in str(tiled)


def test_the_backward_pass_told_is_that_of_the_gradients_wanted() -> None:
    """Of all three where no tensor requires one. A gradient of q alone is not the Hopper kernel's."""
    q, k, v = (torch.empty(1, 1024, 4, 64, dtype=torch.bfloat16, device="meta") for _ in range(3))
    told = [explain(q, k, v, causal=True, pass_="bwd", device="NVIDIA H200").backend]
    told.append(explain(q.requires_grad_(), k, v, causal=True, pass_="bwd", device="NVIDIA H200").backend)
    assert told == ["hopper", "triton"]


def test_sums_of_a_shared_bias_are_memory_that_is_told() -> None:
    """In whole blocks of 64 queries and 128 keys; none of a bias that nothing shares, nor where the order of additions is fixed."""

    def told(bias_batch: int, needed: bool = True, deterministic: bool = False, seqlen_k: int = 300) -> explaining.Explanation:
        q, k, v = (meta(2, rows, 4, 64).requires_grad_() for rows in (300, seqlen_k, seqlen_k))
        bias = meta(bias_batch, 4, 300, seqlen_k).requires_grad_(needed)
        return explain(q, k, v, bias=bias, pass_="bwd", device="NVIDIA H200", deterministic=deterministic)

    alone = told(2)
    assert told(1).extra_bytes == alone.extra_bytes + 4 * 4 * 384 * 384 and "added up" in str(told(1))
    assert told(1, needed=False).extra_bytes == alone.extra_bytes and "portable" in str(alone) and "stored" in str(told(2, seqlen_k=304))
    assert "portable" in str(told(1, deterministic=True))


@pytest.mark.parametrize("aux", ["max_logits", "key_mass", "entropy"])
def test_kernels_compute_auxiliary_outputs_and_leave_their_gradients(aux: str) -> None:
    """The gradient of what the portable kernels returned comes from the tiled path."""
    x = torch.empty(1, 4, 256, 64, dtype=torch.bfloat16, device="meta")
    t, r = plan.Operands(x, x, x), plan.Rules(0.125)
    gpu, asked = plan.Target("cuda", (9, 0), "NVIDIA H200", shared_memory=232448), plan.Request(aux=frozenset({aux}))

    def chosen(backend: str, **changes: bool) -> str:
        return plan.select(t, r, backend, request=replace(asked, **changes), target=gpu, warn=False).backend

    assert chosen("triton") == chosen("auto") == "triton"
    assert chosen("triton", backward=True) == chosen("hopper", backward=True) == chosen("auto", backward=True) == "tiled"
    assert chosen("auto", tangent=True) == "tiled"
    with pytest.raises(UnsupportedAttention, match=f"tangent of {aux}"):
        chosen("triton", tangent=True)


@pytest.mark.parametrize("choice", [cases.OFF, *cases.CHOICES[::6]], ids=cases.name)
def test_the_backend_told_is_the_backend_that_runs(choice: cases.Choice, monkeypatch: pytest.MonkeyPatch) -> None:
    call = cases.build(choice, dtype=torch.float32)
    served: list[str] = []
    original = plan.select

    def watched(*given, **options):
        chosen = original(*given, **options)
        served.append(chosen.backend)
        return chosen

    told = [explain(call.q, call.k, call.v, pass_=pass_, **call.options).backend for pass_ in ("fwd", "bwd")]
    monkeypatch.setattr(ops.plan, "select", watched)
    leaves = call.map(lambda _, x: x.detach().requires_grad_())
    attention(leaves.q, leaves.k, leaves.v, **leaves.options).sum().backward()
    assert served == told


class Nothing(TorchDispatchMode):
    """No operator may compute with real memory."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        assert not isinstance(result, torch.Tensor) or result.device.type == "meta" or result.numel() <= 64, func
        return result


def test_meta_tensors_do_and_nothing_runs() -> None:
    q = meta(8, 131072, 64, 128)  # 17 GB if it were real
    rule = masks.Causal() & masks.Custom(lambda b, h, i, j: (i - j) % 7 != 3)
    with Nothing():
        told = explain(q, q, q, mask=rule, score_mod=lambda s, b, h, i, j: s - 0.1 * h, dropout_p=0.0, device="NVIDIA A100")
        plain = explain(q, q, q, causal=True)
    assert told.backend in ("tiled", "triton") and plain.device in ("cpu", torch.cuda.is_available() and torch.cuda.get_device_name())


def test_it_refuses_what_attention_refuses() -> None:
    q = meta(1, 8, 2, 16)
    with pytest.raises(ValueError, match="window_size"):
        explain(q, q, q, window_size=(-3, 0))
    with pytest.raises(UnsupportedAttention, match="hopper"):
        explain(q, q, q, backend="hopper", device="NVIDIA A100")
    with pytest.raises(ValueError, match="pass_ is 'sideways'"):
        explain(q, q, q, pass_="sideways")
    with pytest.raises(ValueError, match=r"device is 'NVIDIA Z9'; .*'NVIDIA H200'"):
        explain(q, q, q, device="NVIDIA Z9")


@pytest.mark.parametrize("name", ["causl", "packing"])
def test_a_keyword_that_attention_lacks_is_named(name: str) -> None:
    q = meta(1, 8, 2, 16)
    with pytest.raises(TypeError, match=f"explain got '{name}', which is no argument of attention"):
        explain(q, q, q, **{name: True})


def test_it_prints_well_and_is_plain_data() -> None:
    q = meta(1, 16384, 16, 128)
    told = tilewise.explain(q, q, q, causal=True, device="NVIDIA H200")
    data = json.loads(json.dumps(told.as_dict()))
    assert data["backend"] == told.backend and data["flops"] == told.flops
    lines = str(told).splitlines()
    assert all(len(line) < 160 for line in lines)
    assert [line.split()[0] for line in lines] == ["pass", "backend", "device", "work", "extra", "roofline"]
