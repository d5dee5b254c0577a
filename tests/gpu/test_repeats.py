"""Calls that come again, played from the recording of an earlier one: the same bits as worked out anew, wherever tensors lie by then."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import tilewise
from tilewise import attention, attention_with_kvcache, repeats
from tilewise.kernels import replay

from .common import qkv, randn

CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window and lse": {"window_size": (37, 5), "return_aux": "lse"},
    "softcap": {"softcap": 20.0, "softmax_scale": 0.2},
    "deterministic": {"deterministic": True, "causal": True},
    "heads first": {"layout": "bhsd"},
    "float32 out": {"out_dtype": torch.float32},
    "lengths, sink and slopes": {"seqused_q": (150, 200), "seqused_k": (264, 77), "learnable_sink": 4, "alibi_slopes": 4},
    "bias and mask": {"bias": (4, 200, 264), "mask": (200, 264)},
}


def made(call: dict[str, Any]) -> dict[str, Any]:
    """The tensors of a call in memory of their own."""
    make = {
        "seqused_q": lambda x: torch.tensor(x, dtype=torch.int32, device="cuda"),
        "seqused_k": lambda x: torch.tensor(x, dtype=torch.int32, device="cuda"),
        "learnable_sink": lambda x: randn(x, dtype=torch.float32),
        "alibi_slopes": lambda x: randn(x, dtype=torch.float32),
        "bias": lambda x: randn(*x),
        "mask": lambda x: randn(*x) > 0,
    }
    return {name: make[name](x) if name in make else x for name, x in call.items()}


def outputs(call: dict[str, Any], inputs: list[torch.Tensor], douts: list[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs of a call, which is deterministic only if it says so, and the gradients of q, k and v."""
    result = attention(*inputs, **{"deterministic": False} | call)
    out, lse = (result[0], result[1].lse) if isinstance(result, tuple) else (result, None)
    given = [douts[0].to(out.dtype)] if lse is None else [douts[0].to(out.dtype), douts[1]]
    wanted = [out] if lse is None else [out, lse]
    return [x.detach() for x in wanted] + list(torch.autograd.grad(wanted, inputs, given))


def anew(
    call: dict[str, Any], inputs: list[torch.Tensor], douts: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> list[torch.Tensor]:
    """The same, every step of it worked out again."""
    with monkeypatch.context() as patch:
        nothing_comes_again(patch)
        return outputs(call, inputs, douts)


def nothing_comes_again(patch: pytest.MonkeyPatch) -> None:
    for look_up in ("key_of", "again", "again_over_a_cache"):
        patch.setattr(repeats, look_up, lambda *_: None)


def problem(call: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Inputs in memory of their own, and gradients of out and lse."""
    inputs = list(qkv(2, 200, 264, dtype=dtype).values())
    dout, dlse = randn(2, 200, 4, 64, dtype=dtype), randn(2, 4, 200, dtype=torch.float32)
    if call.get("layout") == "bhsd":
        inputs, dout = [x.transpose(1, 2).contiguous() for x in inputs], dout.transpose(1, 2).contiguous()
    return [x.requires_grad_() for x in inputs], [dout, dlse]


def close(got: list[torch.Tensor], expected: list[torch.Tensor], exact: bool) -> None:
    """The same bits where nothing is added in the order of arrival, which only the float32 accumulator of dQ is."""
    for index, (x, y) in enumerate(zip(got, expected, strict=True)):
        dq = index == len(got) - 3
        assert x.shape == y.shape and x.stride() == y.stride() and x.dtype == y.dtype
        # Float32 sums in another order, then one rounding to the dtype.
        assert torch.equal(x, y) if exact or not dq else torch.allclose(x, y, rtol=torch.finfo(y.dtype).eps, atol=1e-4)


@pytest.mark.parametrize("name", CALLS)
def test_a_played_call_gives_the_bits_of_one_worked_out_anew(backend: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    repeats.forget()
    held = []
    for _ in range(5):  # every time in other memory: what was there before is held
        call = made(CALLS[name]) | {"backend": backend}
        inputs, douts = problem(call)
        held.append((call, inputs, douts))
        close(outputs(call, inputs, douts), anew(call, inputs, douts, monkeypatch), backend == "triton" or bool(call.get("deterministic")))
    (found,) = repeats.known.values()
    assert len(found.passes.known) == 2
    if "out_dtype" not in call:  # the gradient of a float32 output is converted, which is more than allocations and launches
        assert all(isinstance(x, replay.Pass) for x in found.passes.known.values())


def test_the_third_call_needs_no_key(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    repeats.forget()
    call = {"backend": backend, "causal": True, "deterministic": True}
    held = [problem(call) for _ in range(4)]
    cache = [randn(2, 64, 2, 64) for _ in range(2)]
    step = randn(2, 1, 8, 64)
    for inputs, douts in held[:3]:
        expected = [anew(call, *x, monkeypatch) for x in held]
        outputs(call, inputs, douts)
        with torch.no_grad():
            without = attention(*inputs, **call)
        read = attention_with_kvcache(step, *cache)

    def no_key(*_: Any) -> None:
        raise AssertionError("it is looked up")

    with monkeypatch.context() as patch:
        patch.setattr(repeats, "key_of", no_key)
        for x, y in zip(held, expected, strict=True):
            close(outputs(call, *x), y, True)
        with torch.no_grad():
            assert torch.equal(attention(*held[2][0], **call), without)
        assert torch.equal(attention_with_kvcache(step, *cache), read)
        with pytest.raises(AssertionError, match="looked up"):
            attention(*held[0][0], **call, softcap=1.0)


def test_other_strides_dtypes_and_lengths_at_the_same_address(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = [torch.randn(1 << 18, device="cuda").bfloat16() for _ in range(4)]
    layouts = [
        ((1, 128, 4, 64), (1 << 15, 256, 64, 1), torch.bfloat16),
        ((1, 128, 4, 64), (1 << 15, 64, 1 << 13, 1), torch.bfloat16),
        ((1, 128, 4, 64), (1 << 15, 256, 64, 1), torch.float16),
        ((1, 136, 4, 64), (1 << 15, 256, 64, 1), torch.bfloat16),
        ((2, 128, 4, 64), (1 << 15, 256, 64, 1), torch.bfloat16),
    ]
    for _ in range(4):
        for shape, stride, dtype in layouts:
            q, k, v, dout = (x.view(dtype).clamp(-3, 3).as_strided(shape, stride).detach() for x in memory)
            inputs = [x.requires_grad_() for x in (q, k, v)]
            call = {"backend": backend, "deterministic": True}
            close(outputs(call, inputs, [dout]), anew(call, inputs, [dout], monkeypatch), True)


def test_threads_on_streams_of_their_own(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = {"backend": backend, "causal": True, "deterministic": True}
    problems = [problem(call) for _ in range(4)]
    expected = [anew(call, *x, monkeypatch) for x in problems]
    torch.cuda.synchronize()

    def work(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(30):
                close(outputs(call, *problems[index]), expected[index], True)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_capture_after_plays(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = {"backend": backend, "deterministic": True}
    inputs, douts = problem(call)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(4):
            outputs(call, inputs, douts)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = outputs(call, inputs, douts)
    for _ in range(3):
        with torch.no_grad():
            for x in (*inputs, *douts):
                x.copy_(torch.randn_like(x))
        graph.replay()
        close(results, anew(call, inputs, douts, monkeypatch), True)


def test_hooks_second_derivatives_and_partial_gradients(backend: str) -> None:
    call = {"backend": backend, "causal": True, "deterministic": True}
    inputs, douts = problem(call)
    for _ in range(3):
        plain = outputs(call, inputs, douts)
    with torch.autograd.graph.save_on_cpu():
        result = attention(*inputs, **call)
    for x, y in zip(torch.autograd.grad(result, inputs, douts[0]), plain[1:], strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)
    expanded = torch.ones((), device="cuda", dtype=torch.bfloat16).expand(plain[0].shape)
    for _ in range(3):
        got = torch.autograd.grad(attention(*inputs, **call), inputs, expanded)
        expected = torch.autograd.grad(attention(*inputs, **call), inputs, expanded.contiguous())
        assert all(map(torch.equal, got, expected))
    q, k, v = (x.detach() for x in inputs)
    for _ in range(3):
        (dv,) = torch.autograd.grad(attention(q, k, v.requires_grad_(), **call), v, douts[0])
        torch.testing.assert_close(dv, plain[3], rtol=2e-2, atol=2e-2)
    small = [x[:, :16].detach().float().requires_grad_() for x in inputs]
    for _ in range(2):
        (dq,) = torch.autograd.grad(attention(*small, causal=True).square().sum(), small[:1], create_graph=True)
        assert torch.autograd.grad(dq.sum(), small[1])[0].isfinite().all()


def test_float32_reads_torchs_precision_on_every_call() -> None:
    inputs, _ = problem({}, torch.float32)
    q, k, v = (x.detach() for x in inputs)
    seen = {}
    for _ in range(3):
        for setting in ("highest", "high"):
            torch.set_float32_matmul_precision(setting)
            try:
                out = tilewise.attention(q, k, v)
                assert torch.equal(seen.setdefault(setting, out), out)
            finally:
                torch.set_float32_matmul_precision("highest")
    assert not torch.equal(seen["highest"], seen["high"])


@pytest.mark.parametrize("kind", ["plain", "appending", "paged", "rotary and split", "latent"])
def test_a_played_call_over_a_cache(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    repeats.forget()
    held = []
    for step in range(6):
        lengths = torch.tensor([5 + step, 300], dtype=torch.int32, device="cuda")
        q, new = randn(2, 1, 8, 64), {"k": randn(2, 1, 2, 64), "v": randn(2, 1, 2, 64), "cache_seqlens": lengths}
        caches, options = [randn(2, 512, 2, 64) for _ in range(2)], dict(new, causal=True)
        if kind == "plain":
            options = {}
        elif kind == "paged":
            caches = [randn(80, 16, 2, 64) for _ in range(2)]
            options["page_table"] = torch.randperm(80, device="cuda")[:64].view(2, 32).int()
        elif kind == "rotary and split":
            options |= {"rotary_cos": randn(512, 32), "rotary_sin": randn(512, 32), "num_splits": 4, "return_aux": "lse"}
        elif kind == "latent":
            latent = randn(2, 512, 1, 576)
            q, caches, options = randn(2, 1, 8, 576), [latent, latent[..., :512]], {"cache_seqlens": lengths}
        copies = [x.clone() for x in caches] if kind != "latent" else caches
        held.append((q, caches, copies, options))
        got = attention_with_kvcache(q, *caches, **options)
        with monkeypatch.context() as patch:
            nothing_comes_again(patch)
            expected = attention_with_kvcache(q, *copies, **options)
        (got, lse), (expected, other) = (x if isinstance(x, tuple) else (x, None) for x in (got, expected))
        assert torch.equal(got, expected) and all(map(torch.equal, caches, copies))
        assert lse is None or torch.equal(lse.lse, other.lse)
    (kept,) = repeats._over_caches.known.values()
    assert isinstance(kept, replay.Pass)


@pytest.mark.parametrize("same", [True, False], ids=["self attention", "cross attention"])
@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "as it comes"])
def test_a_played_packed_call_reads_its_own_offsets(backend: str, deterministic: bool, same: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other offsets on every call, empty sequences and rows of none among them."""
    repeats.forget()
    call = {"backend": backend, "causal": True, "deterministic": deterministic, "return_aux": "lse"}
    held = []
    for step in range(6):
        offsets = [torch.randint(0, 400, (6,)).sort().values.int().cuda() for _ in range(2)]
        inputs = [randn(400, heads, 128).requires_grad_() for heads in (4, 2, 2)]
        given = [randn(400, 4, 128), randn(4, 400, dtype=torch.float32)]
        held.append((offsets, inputs, given))

        def results(offsets: list[torch.Tensor], inputs: list[torch.Tensor], given: list[torch.Tensor]) -> list[torch.Tensor]:
            out, aux = tilewise.attention_varlen(*inputs, offsets[0], offsets[0] if same else offsets[1], **call)
            return [out.detach(), aux.lse.detach(), *torch.autograd.grad([out, aux.lse], inputs, given)]

        got = results(*held[step])
        with monkeypatch.context() as patch:
            nothing_comes_again(patch)
            expected = results(*held[step])
        close(got, expected, backend == "triton" or deterministic)
    (found,) = repeats.known.values()
    assert len(found.passes.known) == 2 and all(isinstance(x, replay.Pass) for x in found.passes.known.values())


@pytest.mark.parametrize("shape", [(1, 4, 200, 264), (3, 4, 200, 264), (3, 1, 200, 264)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_played_gradient_of_a_bias(backend: str, head_dim: int, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    repeats.forget()
    held = []
    for _ in range(5):
        inputs = [randn(3, length, 4, head_dim).requires_grad_() for length in (200, 264, 264)]
        bias, dout = randn(*shape).requires_grad_(), randn(3, 200, 4, head_dim)
        held.append((inputs, bias, dout))

        def gradients(inputs: list[torch.Tensor], bias: torch.Tensor, dout: torch.Tensor) -> list[torch.Tensor]:
            out = attention(*inputs, bias=bias, backend=backend, deterministic=False)
            return [out.detach(), *torch.autograd.grad(out, [*inputs, bias], dout)]

        got = gradients(inputs, bias, dout)
        with monkeypatch.context() as patch:
            nothing_comes_again(patch)
            expected = gradients(inputs, bias, dout)
        for x, y in zip(got, expected, strict=True):  # float32 sums in another order, then one rounding to the dtype
            assert x.shape == y.shape and x.stride() == y.stride()
            assert torch.allclose(x, y, rtol=torch.finfo(y.dtype).eps, atol=1e-4)
    (found,) = repeats.known.values()
    if backend == "hopper":
        assert all(isinstance(x, replay.Pass) for x in found.passes.known.values())
