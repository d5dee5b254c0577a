"""Calls that came lately, told from others without a key: what makes one another, and that each computes what a first call does.

Kernels that compute on the CPU, launched by address as compiled ones are, stand in for those of a GPU: `replay` records and plays them.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tilewise import attention, attention_with_kvcache, plan, repeats
from tilewise.kernels import replay
from tilewise.kvcache import api as cache_api

B, S, H, D = 2, 8, 2, 16
SHAPE, SCALE = (B, S, H, D), 0.25
BF16 = torch.bfloat16


def at(place: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The memory that a launch was given, as a tensor."""
    address = place if isinstance(place, int) else place.data_ptr()
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype).view(shape)


def formula(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: int) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    scores = SCALE * q @ k.mT
    if causal:
        scores = scores.masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1)


class Kernel:
    """Stands for a compiled kernel that has nothing of Triton's launcher but the public call, and computes."""

    def __init__(self, compute: Callable[..., None], **types: str) -> None:
        self.src, self.compute, self.launches = SimpleNamespace(signature=types), compute, 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, stream: Any = None) -> None:
            self.launches += 1
            with torch._C._DisableTorchDispatch(), torch.no_grad():
                self.compute(*arguments)

        return launch


def _forward(q: Any, k: Any, v: Any, out: Any, lse: Any, causal: int) -> None:
    result, sums = formula(*(at(x, SHAPE, BF16) for x in (q, k, v)), causal)
    at(out, SHAPE, BF16).copy_(result)
    at(lse, (B, H, S), torch.float32).copy_(sums)


def _backward(q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, dlse: Any, dq: Any, dk: Any, dv: Any, causal: int) -> None:
    with torch.enable_grad():
        inputs = [at(x, SHAPE, BF16).clone().requires_grad_() for x in (q, k, v)]
        results = formula(*inputs, causal)
        assert torch.equal(results[1].detach(), at(lse, (B, H, S), torch.float32)), "the LSE is that of this call"
        loss = sum(
            (x * at(g, tuple(x.shape), t)).sum()
            for x, g, t in zip(results, (dout, dlse), (BF16, torch.float32), strict=True)
            if g is not None
        )
        grads = torch.autograd.grad(loss, inputs, allow_unused=True)
    for place, grad in zip((dq, dk, dv), grads, strict=True):
        if place is not None:
            at(place, SHAPE, BF16).copy_(0 if grad is None else grad)


FORWARD = Kernel(_forward, **dict.fromkeys(("q", "k", "v", "out", "lse"), "*bf16"), causal="i32")
BACKWARD = Kernel(_backward, **dict.fromkeys(("q", "k", "v", "out", "lse", "dout", "dlse", "dq", "dk", "dv"), "*bf16"), causal="i32")


class Backend:
    """Copies what is not contiguous: such a pass cannot be played."""

    @staticmethod
    def forward(t: Any, r: Any, out: Any) -> None:
        inputs = [x.transpose(1, 2).contiguous() for x in (t.q, t.k, t.v)]
        replay.start(FORWARD, 1, *inputs, out.out, out.lse, int(r.window_right == 0))

    @staticmethod
    def backward(t: Any, r: Any, saved: Any, cot: Any, grads: Any) -> None:
        given = [None if x is None else x.transpose(1, 2).contiguous() for x in (t.q, t.k, t.v, saved.out, cot.dout)]
        given[4:4] = [saved.lse.contiguous()]
        places = [None if x is None else x.data_ptr() for x in (cot.dlse, grads.dq, grads.dk, grads.dv)]
        replay.start(BACKWARD, 1, *given, *places, int(r.window_right == 0))


@pytest.fixture(autouse=True)
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU in the place of a GPU that captures nothing, with the kernels above."""
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: True))
    enabled = torch.is_autocast_enabled
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: enabled("cpu"))
    monkeypatch.setattr(plan, "select", lambda *_, **__: SimpleNamespace(kernels=lambda: Backend))
    repeats.forget()
    yield
    repeats.forget()
    replay.of_streams.cache_clear()
    replay.spaces.cache_clear()


def tensors(**options: Any) -> list[torch.Tensor]:
    return [torch.randn(SHAPE, dtype=BF16, **options) for _ in range(3)]


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each call from now on: whether it was found without its key, and played."""
    calls: list[bool] = []
    again, over_a_cache = repeats.again, repeats.again_over_a_cache

    def seen(look: Any) -> Any:
        def listening(*arguments: Any) -> Any:
            result = look(*arguments)
            calls.append(result is not None)
            return result

        return listening

    monkeypatch.setattr(repeats, "again", seen(again))
    monkeypatch.setattr(repeats, "again_over_a_cache", seen(over_a_cache))
    return calls


def close(x: torch.Tensor, y: torch.Tensor) -> None:
    torch.testing.assert_close(x.float(), y.float(), rtol=2**-7, atol=2**-9)  # one rounding to bfloat16


def check(inputs: list[torch.Tensor], **call: Any) -> torch.Tensor:
    out = attention(*inputs, softmax_scale=SCALE, **call)
    close(out.detach(), formula(*(x.detach() for x in inputs), int(call.get("causal", False)))[0])
    return out


def test_this_torch_says_whether_layouts_are_the_same() -> None:
    """Without it the tests below test nothing: all calls would be looked up."""
    assert repeats._guards() is not None
    with torch.inference_mode(), torch.autocast("cpu"), torch.device("meta"):
        repeats._guards.cache_clear()
        assert repeats._guards() is not None


def test_the_third_call_is_found_and_reads_its_own_tensors(found: list[bool]) -> None:
    held = []
    for _ in range(8):
        held.append(tensors())
        check(held[-1])
    assert found == [False] * 2 + [True] * 6
    for _ in range(4):
        check(held[-1], causal=True)
    assert found[8:] == [False, False, True, True]
    check(held[0])
    assert found[-1]


def others() -> dict[str, Callable[[list[torch.Tensor]], Any]]:
    """Calls that are another one after a plain call has come again and again, and how each is made of its tensors."""

    def within(context: Any) -> Callable[[list[torch.Tensor]], Any]:
        def call(x: list[torch.Tensor]) -> Any:
            with context:
                return check(x)

        return call

    return {
        "window": lambda x: check(x, window_size=(-1, 0), causal=True),
        "equal window": lambda x: check(x, window_size=tuple([-1, -1])),
        "layout": lambda x: attention(*x, layout="bhsd"),
        "strides": lambda x: check([y.transpose(1, 2).contiguous().transpose(1, 2) for y in x]),
        "one stride": lambda x: check([x[0], x[1], x[2].transpose(1, 2).contiguous().transpose(1, 2)]),
        "negated": lambda x: check([x[0], torch._neg_view(x[1].neg()), x[2]]),
        "parameter": lambda x: check([torch.nn.Parameter(y, requires_grad=False) for y in x]),
        "twice": lambda x: check([x[0], x[0], x[2]]),
        "two views at one place": lambda x: check([x[0], x[0].view(SHAPE), x[2]]),
        "between 16 bytes": lambda x: check([x[0], x[1], torch.randn(B * S * H * D + 1, dtype=BF16)[1:].view(SHAPE)]),
        "grad": lambda x: check([x[0], x[1], x[2].requires_grad_()]),
        "inference": within(torch.inference_mode()),
        "mode": within(_Watching()),
        "profiler": within(torch.autograd.profiler.profile()),
        "forward mode": within(torch.autograd.forward_ad.dual_level()),
        "vmap": lambda x: torch.vmap(lambda _: check(x))(torch.zeros(1)),
        "functional grad": lambda x: torch.func.grad(lambda s: check([x[0], x[1], x[2]]).float().sum() * s)(torch.ones(())),
        "lse": lambda x: attention(*x, softmax_scale=SCALE, return_aux="lse"),
        "slopes": lambda x: attention(*x, softmax_scale=SCALE, alibi_slopes=torch.zeros(H)),
        "lengths": lambda x: attention(*x, softmax_scale=SCALE, seqused_k=torch.full((B,), S, dtype=torch.int32)),
        "out dtype": lambda x: check(x, out_dtype=BF16),
        "deterministic": lambda x: check(x, deterministic=True),
    }


class _Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", others())
def test_another_call_is_not_taken_for_one_that_came_lately(name: str, found: list[bool]) -> None:
    for _ in range(5):
        check(tensors())
    assert found[-1]
    with contextlib.suppress(NotImplementedError):
        others()[name](tensors())
    assert not any(found[5:])
    check(tensors())
    assert found[-1], "and the one that came lately is still known"


@pytest.mark.parametrize(
    "wrong",
    [{"causal": 0}, {"window_size": [-1, -1]}, {"window_size": (-1, -1, 0)}, {"softcap": False}, {"softcap": -1.0}, {"backend": "x"}],
    ids=str,
)
def test_an_error_that_equals_a_call_that_came_lately_stays_one(wrong: dict[str, Any]) -> None:
    for _ in range(5):
        check(tensors())
    if wrong == {"window_size": [-1, -1]}:
        check(tensors(), **wrong)
    else:
        with pytest.raises((TypeError, ValueError)):
            check(tensors(), **wrong)
    for x in (tensors()[0][0], None, 3, tensors()[0].to_sparse(), torch.nested.nested_tensor([torch.zeros(3, H, D)])):
        with pytest.raises((TypeError, ValueError)):
            attention(tensors()[0], x, tensors()[0], softmax_scale=SCALE)
        with pytest.raises((TypeError, ValueError, AttributeError)):
            attention(x, *tensors()[:2], softmax_scale=SCALE)


def test_torchs_deterministic_flag_makes_another_call(found: list[bool]) -> None:
    for _ in range(5):
        check(tensors())
    flag = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(not flag, warn_only=True)
        check(tensors())
        assert not found[-1]
    finally:
        torch.use_deterministic_algorithms(flag, warn_only=True)
    check(tensors())
    assert found[-1]


def test_autocast_makes_another_call(found: list[bool]) -> None:
    for _ in range(5):
        check(tensors())
    with torch.autocast("cpu", dtype=torch.float16):
        attention(*tensors(), softmax_scale=SCALE)
        assert not found[-1]


def test_a_captured_call_or_one_on_another_device_is_worked_out(found: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(5):
        check(tensors())
    for name, changed in (("_cuda_isCurrentStreamCapturing", True), ("_cuda_getDevice", 0)):
        with monkeypatch.context() as patch:
            patch.setattr(torch._C, name, lambda changed=changed: changed)
            for _ in range(3):
                check(tensors())
                assert not found[-1]
        check(tensors())
        assert found[-1] and sum(map(len, repeats.lately.values())) == 1


# ------------------------------------------------------------------------------------------------------------------ derivatives


def gradients(inputs: list[torch.Tensor], douts: list[torch.Tensor | None], **call: Any) -> list[torch.Tensor]:
    """Outputs and gradients of the inputs that require one."""
    result = attention(*inputs, softmax_scale=SCALE, **call)
    outputs = [result[0], result[1].lse] if isinstance(result, tuple) else [result]
    wanted = [(x, g) for x, g in zip(outputs, douts, strict=False) if g is not None]
    leaves = [x for x in inputs if x.requires_grad]
    grads = torch.autograd.grad([x for x, _ in wanted], leaves, [g for _, g in wanted])
    return [*(x.detach() for x in outputs), *grads]


def expected(inputs: list[torch.Tensor], douts: list[torch.Tensor | None], **call: Any) -> list[torch.Tensor]:
    leaves = [x.detach().float().requires_grad_(x.requires_grad) for x in inputs]
    results = formula(*leaves, int(call.get("causal", False)))
    results = results if call.get("return_aux") else results[:1]
    loss = sum((x * g).sum() for x, g in zip(results, douts, strict=False) if g is not None) + 0 * sum(x.sum() for x in leaves)
    grads = torch.autograd.grad(loss, [x for x in leaves if x.requires_grad], allow_unused=True)
    return [*(x.detach() for x in results), *(torch.zeros(SHAPE) if x is None else x for x in grads)]


@pytest.mark.parametrize("needs", [(1, 1, 1), (1, 0, 0), (0, 1, 1), (0, 0, 1)], ids=str)
@pytest.mark.parametrize("return_aux", [(), "lse"], ids=["out", "lse"])
def test_gradients_of_calls_that_came_lately(needs: tuple[int, ...], return_aux: Any, found: list[bool]) -> None:
    held = []
    for _ in range(8):
        inputs = [x.requires_grad_(bool(need)) for x, need in zip(tensors(), needs, strict=True)]
        for which in ((1, 1), (1, 0), (0, 1)) if return_aux else ((1, 0),):
            douts: list[torch.Tensor | None] = [
                torch.randn(SHAPE, dtype=BF16) if which[0] else None,
                torch.randn(B, H, S) if which[1] else None,
            ]
            held.append((inputs, douts))
            for causal in (False, True):
                call = dict(return_aux=return_aux, causal=causal)
                for x, y in zip(gradients(inputs, douts, **call), expected(inputs, douts, **call), strict=True):
                    close(x, y)
        with torch.no_grad():
            check(inputs)
    assert all(found[-7:])
    calls = list(repeats.known.values())
    assert any(isinstance(x, replay.Pass) for call in calls for key, x in call.passes.known.items() if isinstance(key, tuple))
    assert all(0 < len(call.lately) <= 3 for call in calls if True in call.passes.known)
    for call in calls:
        for key, play in ((call.returns_lse, call.play), (True, call.play_with_lse)):
            recorded = call.passes.known.get(key)
            assert recorded is None or (isinstance(recorded, replay.Pass) and play is recorded.play)


def test_saved_tensors_are_those_of_their_call() -> None:
    """Changed in place, transformed by hooks, backward twice, several calls before their backward passes."""
    inputs = [x.requires_grad_() for x in tensors()]
    dout = torch.randn(SHAPE, dtype=BF16)
    truth = expected(inputs, [dout])
    for _ in range(5):
        plain = gradients(inputs, [dout])
    for x, y in zip(plain, truth, strict=True):
        close(x, y)

    result = attention(*inputs, softmax_scale=SCALE)
    with torch.no_grad():
        inputs[0].add_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(result, inputs, dout)

    for pack, unpack in ((lambda x: x.clone(), lambda x: x), (lambda x: x, lambda x: x.mT.contiguous().mT), (lambda x: x, lambda x: x * 1)):
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            for _ in range(3):
                for x, y in zip(gradients(inputs, [dout]), truth, strict=True):
                    close(x, y)

    result = attention(*inputs, softmax_scale=SCALE)
    others = [x.requires_grad_() for x in tensors()]
    between = attention(*others, softmax_scale=SCALE)
    for _ in range(2):
        for x, y in zip(torch.autograd.grad(result, inputs, dout, retain_graph=True), truth[1:], strict=True):
            close(x, y)
    for x, y in zip(torch.autograd.grad(between, others, dout), expected(others, [dout])[1:], strict=True):
        close(x, y)
    for x, y in zip(gradients(inputs, [dout.mT.contiguous().mT]), truth, strict=True):
        close(x, y)
    for x, y in zip(gradients(inputs, [dout[:1, :1].expand(SHAPE)]), expected(inputs, [dout[:1, :1].expand(SHAPE)]), strict=True):
        close(x, y)


def test_second_derivatives_of_a_call_that_came_lately(monkeypatch: pytest.MonkeyPatch) -> None:
    """They go the ordinary way, whatever was played before."""
    inputs, dout = [x.requires_grad_() for x in tensors()], torch.randn(SHAPE, dtype=BF16)
    for _ in range(5):
        gradients(inputs, [dout])
    called: list[dict[str, Any]] = []
    monkeypatch.setattr(repeats.derivatives.FORWARD, "vjp", lambda args, arrived, needed: called.append(args) or {"q": inputs[0] * 2})
    result = attention(*inputs, softmax_scale=SCALE)
    (dq,) = torch.autograd.grad(result, inputs[:1], dout, create_graph=True)
    assert len(called) == 1 and dq.requires_grad and called[0]["q"] is inputs[0] and called[0]["lse"].shape == (B, H, S)


# ------------------------------------------------------------------------------------------------------------------ over a cache


def _read(q: Any, k: Any, v: Any, new: Any, out: Any) -> None:
    keys = at(k, SHAPE, BF16)
    if new is not None:
        keys[:, 0] = at(new, (B, 1, H, D), BF16)[:, 0]
    at(out, SHAPE, BF16).copy_(at(q, SHAPE, BF16) + 2 * keys + 4 * at(v, SHAPE, BF16))


READ = Kernel(_read, **dict.fromkeys(("q", "k", "v", "new", "out"), "*bf16"))


def test_steps_over_a_cache(found: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    def append_and_read(q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, *_: Any, **__: Any) -> Any:
        out, lse = torch.empty_like(q), torch.empty(B, H, S)
        replay.start(READ, 1, q, k_cache, v_cache, k, out)
        return out, lse

    monkeypatch.setattr(cache_api, "_append_and_read", append_and_read)
    expect_found = {"reading": 3, "appending": 3, "latent": 3}
    for kind in expect_found:
        for step in range(6):
            q, keys, values = tensors()
            k, v = (torch.randn(B, 1, H, D, dtype=BF16) if kind == "appending" else None for _ in range(2))
            if kind == "latent":
                values = keys.view(SHAPE)
            before, version = keys.clone(), keys._version
            out = attention_with_kvcache(q, keys, values, k, v)
            if k is not None:
                before[:, 0] = k[:, 0]
                assert keys._version > version
            assert torch.equal(keys, before)
            close(out, q + 2 * keys + 4 * values)
            assert found[-1] == (step >= 2), (kind, step)
    q, keys, values = tensors()
    for call in ({"causal": True}, {"rotary_interleaved": False}, {"window_size": (3, 0)}, {"return_aux": "lse"}, {"out_dtype": BF16}):
        attention_with_kvcache(q, keys, values, **call)
        assert not found[-1]
    for same, call in (
        (False, {"cache_leftpad": torch.zeros(B, dtype=torch.int32)}),
        (False, {"alibi_slopes": torch.zeros(H)}),
        (True, {}),
    ):
        attention_with_kvcache(q, keys, values, **call)
        assert found[-1] == same
    attention_with_kvcache(q.requires_grad_(), keys, values)
    assert not found[-1]


@pytest.mark.parametrize("over_a_cache", [False, True], ids=["attention", "cache"])
def test_calls_in_float32_are_looked_up_with_torchs_precision(
    over_a_cache: bool, found: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[str] = []

    class Float32(Backend):
        @staticmethod
        def forward(t: Any, r: Any, out: Any) -> None:
            passes.append("tf32" if r.allow_tf32 else "ieee")
            replay.start(Kernel(lambda *_: None, q="*fp32", out="*fp32"), 1, t.q, out.out)

    def append_and_read(q: Any, *_: Any, **__: Any) -> Any:
        passes.append(torch.get_float32_matmul_precision())
        out = torch.empty_like(q)
        replay.start(Kernel(lambda *_: None, q="*fp32", out="*fp32"), 1, q, out)
        return out, torch.empty(B, H, S)

    monkeypatch.setattr(plan, "select", lambda *_, **__: SimpleNamespace(kernels=lambda: Float32))
    monkeypatch.setattr(cache_api, "_append_and_read", append_and_read)
    inputs = [x.float() for x in tensors()]
    try:
        for setting in ("highest", "high", "highest", "high"):
            torch.set_float32_matmul_precision(setting)
            for _ in range(4):
                (attention_with_kvcache if over_a_cache else attention)(*inputs)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert len(passes) == 4 and len(set(passes)) == 2 and not any(found), "each setting is worked out and recorded once"


def test_what_a_call_saves_does_not_depend_on_who_watches() -> None:
    """Checkpointing counts what the forward pass and its repetition save: one may be watched and the other played."""
    for _ in range(4):
        gradients(tensors(requires_grad=True), [torch.randn(SHAPE, dtype=BF16)])
    inputs, dout = tensors(requires_grad=True), torch.randn(SHAPE, dtype=BF16)
    with FlopCounterMode(display=False):
        out = checkpoint(lambda *x: attention(*x, softmax_scale=SCALE), *inputs, use_reentrant=False)
    results = [out, *torch.autograd.grad(out, inputs, dout)]
    for result, wanted in zip(results, expected(inputs, [dout]), strict=True):
        close(result.detach(), wanted)


def test_values_without_memory_are_zeros() -> None:
    """As some derivatives of torch make them."""
    for _ in range(4):
        check(tensors())
    q, k, _ = tensors()
    assert not attention(q, k, torch._efficientzerotensor(SHAPE, dtype=BF16), softmax_scale=SCALE).any()
