"""Function transforms, exported programs, torch's extension point and warm-up on a GPU. Forward mode and graphs have files of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tilewise import attention, attention_with_kvcache, reference
from tilewise.cli import main
from tilewise.integrations import torch_sdpa

DEVICE = "cuda"


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def close(got: Any, expected: Any) -> None:
    """Within the roundings of bfloat16: the same tiles may be summed in another order."""
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)


MAPPED = {
    "q, k, v": ("q", "k", "v"),
    "queries alone": ("q",),
    "keys and values": ("k", "v"),
    "bias": ("bias",),
    "slopes and sink": ("alibi_slopes", "learnable_sink"),
}


@pytest.mark.parametrize("name", MAPPED)
def test_vmap_and_its_gradients(name: str) -> None:
    """Equal to a loop, outputs and gradients of each sample, alone and within another vmap, up to the order of float32 sums."""
    shapes = {"q": (1, 100, 4, 64), "k": (1, 130, 2, 64), "v": (1, 130, 2, 64), "bias": (4, 100, 130), "alibi_slopes": (4,)}
    fixed = {key: random(*shape, dtype=torch.float32) for key, shape in (shapes | {"learnable_sink": (4,)}).items()}
    stacked = {key: torch.stack([fixed[key] * (1 - 0.2 * n) for n in range(6)]) for key in MAPPED[name]}

    def call(mapped: dict[str, Tensor]) -> Tensor:
        return attention(**{**fixed, **mapped}, causal=True)

    def loss(mapped: dict[str, Tensor]) -> Tensor:
        return call(mapped).square().sum()

    def same(got: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())

    each = [{key: x[n] for key, x in stacked.items()} for n in range(6)]
    outs = torch.stack([call(mapped) for mapped in each])
    same(torch.func.vmap(call)(stacked), outs)
    nested = {key: x.unflatten(0, (2, 3)) for key, x in stacked.items()}
    same(torch.func.vmap(torch.func.vmap(call))(nested).flatten(0, 1), outs)
    grads = torch.func.vmap(torch.func.grad(loss))(stacked)
    for n, mapped in enumerate(each):
        for key, expected in torch.func.grad(loss)(mapped).items():
            same(grads[key][n], expected)


def test_samples_of_one_item_share_its_lengths() -> None:
    """Folded into one batch, they have one length, slope and LSE in memory, by a stride of 0."""
    q, k, v = random(6, 1, 100, 4, 64), random(1, 130, 2, 64), random(1, 130, 2, 64)
    shared = dict(
        seqused_k=torch.tensor([77], dtype=torch.int32, device=DEVICE), seqused_q=torch.tensor([90], dtype=torch.int32, device=DEVICE)
    )
    shared |= dict(alibi_slopes=random(1, 4).abs() * 0.1, learnable_sink=random(4))

    def call(q: Tensor) -> Tensor:
        return attention(q, k, v, **shared, causal=True)

    def slope(q: Tensor) -> Tensor:
        return torch.func.grad(lambda q: call(q).square().sum())(q)

    for f in (call, slope):
        close(torch.func.vmap(f)(q), torch.stack([f(x) for x in q]))
    dout = random(6, 1, 100, 4, 64)
    _, pull = torch.func.vjp(call, q[0])
    close(torch.func.vmap(pull)(dout)[0], torch.stack([pull(x)[0] for x in dout]))


@pytest.mark.parametrize("transform", [torch.func.jacrev, torch.func.jacfwd, torch.func.hessian], ids=lambda f: f.__name__)
def test_jacobians_and_hessians(transform: Callable[..., Any]) -> None:
    x = [random(1, size, heads, 16, dtype=torch.float32) for size, heads in ((3, 2), (5, 1), (5, 1))]

    def call(q: Tensor, k: Tensor, v: Tensor, backend: str = "auto") -> Tensor:
        out = attention(q, k, v, causal=True, backend=backend)
        return out.sin().sum() if transform is torch.func.hessian else out

    got = transform(call, argnums=(0, 1, 2))(*x)
    exact = transform(lambda *y: call(*y, backend="reference"), argnums=(0, 1, 2))(*(t.double() for t in x))
    for a, b in zip(torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(exact), strict=True):
        torch.testing.assert_close(a, b.float(), rtol=1e-4, atol=1e-4)


class Serve(torch.nn.Module):
    """A prompt's attention with a captured tensor, and a step over a cache, which is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Parameter(torch.rand(4, device=DEVICE))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, used: Tensor) -> tuple[Tensor, ...]:
        last = [x[:, -1:] for x in (q, k, v)]
        gated = attention(q, k, v, causal=True, score_mod=lambda s, b, h, i, j: s * self.gate[h])
        return (
            attention(q, k, v, causal=True),
            gated,
            attention_with_kvcache(last[0], k_cache, v_cache, *last[1:], cache_seqlens=used, causal=True),
        )


def serving(size: int) -> list[Tensor]:
    return [random(2, size, 4, 64), random(2, size, 2, 64), random(2, size, 2, 64), *random(2, 2, 64, 2, 64).unbind()]


PLAIN_PACKAGE = """
import sys, torch
program = torch.export.export(torch.nn.ReLU(), (torch.ones(4, device="cuda"),))
torch._inductor.aoti_load_package(torch._inductor.aoti_compile_and_package(program, package_path=sys.argv[1]))
"""


@pytest.mark.parametrize("packaged", [False, True], ids=["exported", "AOTInductor"])
def test_programs_that_leave_the_process(packaged: bool, tmp_path) -> None:
    """Saved, loaded and run at another length; a package writes into the caches that it is given."""
    if packaged:
        plain = subprocess.run([sys.executable, "-c", PLAIN_PACKAGE, str(tmp_path / "plain.pt2")], capture_output=True, text=True)
        if plain.returncode < 0:
            pytest.skip(f"torch {torch.__version__} ends the process (signal {-plain.returncode}) when it loads a package of torch.nn.ReLU")
    module, used = Serve(), torch.tensor([3, 40], dtype=torch.int32, device=DEVICE)
    size = torch.export.Dim("size", min=2, max=4096)
    with torch.no_grad():
        program = torch.export.export(module, (*serving(70), used), dynamic_shapes=[{1: size}] * 3 + [None] * 3)
        if packaged:
            options = {"aot_inductor.compile_wrapper_opt_level": "O0"}
            path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "s.pt2"), inductor_configs=options)
            loaded = torch._inductor.aoti_load_package(path)
        else:
            torch.export.save(program, tmp_path / "s.pt2")
            loaded = torch.export.load(tmp_path / "s.pt2").module()
        for length in (70, 301):
            ours = serving(length)
            theirs = [x.clone() for x in ours]
            for a, b in zip(loaded(*theirs, used), module(*ours, used), strict=True):
                close(a, b)
            for a, b in zip(theirs, ours, strict=True):
                assert torch.equal(a, b)


def test_plain_sdpa_under_the_registered_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks, grouped heads, biases with gradients: each call arrives, and is as exact as torch's own."""
    calls: list[Any] = []
    ours = torch_sdpa.scaled_dot_product_attention
    monkeypatch.setattr(torch_sdpa, "scaled_dot_product_attention", lambda *a, **kw: calls.append(kw) or ours(*a, **kw))
    q, k, v = (random(2, heads, 200, 64).requires_grad_() for heads in (4, 2, 2))
    bias = random(4, 200, 200).requires_grad_()
    cases: list[dict[str, Any]] = [dict(is_causal=True), dict(attn_mask=torch.rand(200, 200, device=DEVICE) > 0.3), dict(attn_mask=bias)]

    def run(case: dict[str, Any], to: torch.dtype) -> list[Tensor]:
        leaves = [x.detach().to(to).requires_grad_() for x in (q, k, v)]
        given = {key: x.to(to) if isinstance(x, Tensor) and x.is_floating_point() else x for key, x in case.items()}
        out = F.scaled_dot_product_attention(*leaves, **given, enable_gqa=True)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    torch_sdpa.register()
    for case in cases:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            exact, unfused = run(case, torch.float64), run(case, q.dtype)
        before = len(calls)
        torch.nn.attention.activate_flash_attention_impl("tilewise")
        try:
            got = run(case, q.dtype)
        finally:
            torch.nn.attention.restore_flash_attention_impl()
        assert len(calls) == before + 1
        for mine, theirs, right in zip(got, unfused, exact, strict=True):
            error, allowed = ((x.double() - right).abs().max().item() for x in (mine, theirs))
            assert error <= 1.5 * allowed + torch.finfo(q.dtype).eps * right.abs().max().item()


def test_warm_up_compiles_what_the_model_calls(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("typer", reason="the commands need typer and rich: pip install 'tilewise[bench]'")
    assert main(["warmup", "--shape", "4,2,64", "--full", "--json"]) == 0
    times = json.loads(capsys.readouterr().out)
    assert list(times) == ["training"] and times["training"] > 0


def test_a_third_derivative_raises() -> None:
    x = random(1, 8, 2, 64, dtype=torch.float32)

    def slope(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda y: torch.func.grad(f)(y).square().sum()

    with pytest.raises(NotImplementedError, match="first and second derivatives"):
        torch.func.grad(slope(slope(lambda y: attention(y, x, x).sum())))(x)
    exact = torch.func.grad(slope(lambda y: reference.attention(y, x.double(), x.double())[0].sum()))(x.double())
    torch.testing.assert_close(torch.func.grad(slope(lambda y: attention(y, x, x).sum()))(x), exact.float(), rtol=1e-3, atol=1e-4)
