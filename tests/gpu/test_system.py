"""How a call behaves inside a program: graphs, streams, synchronisation, repeated bits, compilation, checkpoints, several devices."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tilewise
from tilewise import attention, masks, ops, reference
from tilewise.api import prepare

from ..reports import report
from .common import BACKENDS, calling, compare, differentiates, new_specializations, qkv, randn, watched

DIFFERENTIATING = [backend for backend in BACKENDS if differentiates(backend)]
with_backward = pytest.mark.parametrize("backend", DIFFERENTIATING)


def step(inputs, dout, deterministic=False, **options):
    """Output and gradients of one call."""
    out = attention(**inputs, **options, deterministic=deterministic)
    return out.detach(), *torch.autograd.grad(out, list(inputs.values()), dout)


def capture(call):
    """The graph of a call and its static results, after the warm-up that capture asks for."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results


# --------------------------------------------------------------------------------------------------------------------- graphs


@report(142)
@with_backward
def test_a_captured_step_replays_on_new_values(report, backend):
    inputs = {name: x.requires_grad_() for name, x in qkv(2, 300, 300).items()}
    dout, used = randn(2, 300, 4, 64), torch.tensor([300, 100], dtype=torch.int32, device="cuda")
    options = dict(causal=True, seqused_k=used, backend=backend)
    with watched() as passes:
        step(inputs, dout, **options)
    assert passes == [f"{backend} forward", f"{backend} backward"]
    graph, results = capture(lambda: step(inputs, dout, **options))
    for lengths in ([300, 100], [17, 300]):
        with torch.no_grad():
            for x in (*inputs.values(), dout):
                x.copy_(torch.randn_like(x))
            used.copy_(torch.tensor(lengths))
        graph.replay()
        replayed = [x.clone() for x in results]
        for got, expected in zip(replayed, step(inputs, dout, **options), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)


@report(130)
@with_backward
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dropout_draws_a_new_mask_each_replay_and_backward_uses_the_same(report, backend, dtype):
    """V is the identity, so that the output is P after dropout, and dv must be its transpose times dout."""
    inputs = {name: x.requires_grad_() for name, x in qkv(1, 64, 64, heads=2, kv_heads=2, dtype=dtype).items()}
    with torch.no_grad():
        inputs["v"].copy_(torch.eye(64, device="cuda")[None, :, None].expand(1, 64, 2, 64))
    dout = randn(1, 64, 2, 64, dtype=dtype)
    graph, (out, _, _, dv) = capture(lambda: step(inputs, dout, dropout_p=0.5, backend=backend))
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append(out == 0)
        assert 0.4 < seen[-1].float().mean() < 0.6
        expected = torch.einsum("bihj,bihd->bjhd", out.float(), dout.float())
        close = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
        torch.testing.assert_close(dv.float(), expected, **close)
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])


def test_a_forward_graph(backend):
    inputs = qkv(2, 200, 200)
    with torch.no_grad():
        graph, out = capture(lambda: attention(**inputs, causal=True, backend=backend))
        for x in inputs.values():
            x.copy_(torch.randn_like(x))
        graph.replay()
        torch.testing.assert_close(out, attention(**inputs, causal=True, backend=backend), rtol=0, atol=0)


# -------------------------------------------------------------------------------------------------------- streams and the host


@report(125)
@with_backward
def test_only_the_current_stream_is_used(report, backend):
    """On a side stream the inputs become right only after a long wait there: a kernel elsewhere would read the old ones."""
    final, dout = qkv(2, 500, 500), randn(2, 500, 4, 64)
    expected = step({name: x.clone().requires_grad_() for name, x in final.items()}, dout, backend=backend)
    inputs = {name: torch.full_like(x, float("nan")).requires_grad_() for name, x in final.items()}
    late = torch.full_like(dout, float("nan"))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        with torch.no_grad():
            for name, x in inputs.items():
                x.copy_(final[name])
            late.copy_(dout)
        results = step(inputs, late, backend=backend)
    torch.cuda.current_stream().wait_stream(side)
    for got, want in zip(results, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)


@with_backward
@pytest.mark.parametrize("drop", [0.0, 0.2], ids=["plain", "dropout"])
def test_no_host_synchronisation(backend, drop):
    inputs = {name: x.requires_grad_() for name, x in qkv(2, 300, 300).items()}
    dout, used = randn(2, 300, 4, 64), torch.tensor([300, 100], dtype=torch.int32, device="cuda")
    mask = torch.rand(2, 1, 300, 300, device="cuda") < 0.7
    options = dict(causal=True, seqused_k=used, mask=mask, dropout_p=drop, backend=backend)
    with watched() as passes:
        step(inputs, dout, **options)
    assert passes == [f"{backend} forward", f"{backend} backward"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(inputs, dout, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@report(152)
def test_a_new_length_compiles_nothing(report, backend):
    """Lengths, batch sizes and head counts are no part of a compiled kernel, those that Triton likes to specialise on included."""

    def run(batch, seqlen_q, seqlen_k, heads, kv_heads):
        inputs = {name: x.requires_grad_(differentiates(backend)) for name, x in qkv(batch, seqlen_q, seqlen_k, heads, kv_heads).items()}
        out, _ = calling(backend)(**inputs, causal=True)
        if differentiates(backend):
            torch.autograd.grad(out, list(inputs.values()), torch.ones_like(out))

    for kv_heads in (4, 2):  # a group of one query head needs no loop over the group: another kernel
        run(2, 200, 200, 4, kv_heads)
    run(1, 1, 3000, 8, 8)  # few tiles, which are cut along their keys: another kernel
    shapes = [(2, 1, 1, 4, 2), (2, 16, 16, 4, 2), (1, 17, 1000, 4, 4), (3, 128, 256, 8, 1), (5, 1024, 1024, 1, 1), (1, 1, 4096, 16, 16)]
    shapes += [(2, 3, 8192, 4, 4), (1, 100, 65_536, 2, 2)]
    assert {shape: new_specializations(lambda shape=shape: run(*shape)) for shape in shapes} == dict.fromkeys(shapes, 0)


FIRST_CALL = """
import hashlib, sys, time
import torch
from tilewise import attention

torch.manual_seed(0)
q, k, v, dout = torch.randn(4, 2, 300, 4, 64, device="cuda", dtype=torch.bfloat16)
leaves = [x.requires_grad_() for x in (q, k, v)]
out = attention(*leaves, causal=True, deterministic=True, backend={backend!r})
results = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
bits = hashlib.sha256(b"".join(x.view(torch.int16).cpu().numpy().tobytes() for x in results)).hexdigest()
from triton.runtime.cache import triton_key

print(bits, triton_key.cache_info().currsize, "triton.experimental.gluon" in sys.modules)
# Autograd's thread may let go of the pass some time after the results are here. It takes Python's lock for that, and torch aborts a process
# whose interpreter ends meanwhile, whatever the operators were.
time.sleep(0.5)
"""


@with_backward
def test_a_new_process_finds_the_kernels_of_another(backend, tmp_path):
    """The second has neither hashed Triton nor imported what only compiling needs, and computes the same."""
    command = [sys.executable, "-c", FIRST_CALL.format(backend=backend)]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    printed = []
    for process in ("first", "second"):
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
        assert run.returncode == 0, f"the {process} process ended with {run.returncode}\n{run.stdout}{run.stderr}"
        printed.append(run.stdout.split())
    first, second = printed
    assert second == [first[0], "0", "False"] and first[1] == "1"
    assert backend != "hopper" or first[2] == "True"  # it did import it, so that the second could be seen to


@report(127, 128)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_tensors_on_a_device_that_is_not_current(report, backend, compiled):
    torch._dynamo.reset()
    call = torch.compile(attention) if compiled else attention
    for device in ("cuda:1", "cuda:0", "cuda:1"):  # what is kept of one device's launches is not for the other
        inputs = {name: x.to(device).requires_grad_(differentiates(backend)) for name, x in qkv(2, 200, 200).items()}
        expected, _ = reference.attention(**inputs, causal=True)
        with torch.cuda.device(0):
            for _ in range(3):
                out = call(**inputs, causal=True, backend=backend)
                if differentiates(backend):
                    grads = torch.autograd.grad(out.square().sum(), list(inputs.values()))
                    assert all(x.device == out.device and x.isfinite().all() for x in grads)
        assert out.device == inputs["q"].device
        torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)


def test_results_do_not_depend_on_the_batch_around(backend):
    """A batch item alone gives what it gives among others (to rounding: few tiles may be split over their keys)."""
    inputs = qkv(5, 300, 300)
    whole = attention(**inputs, causal=True, backend=backend)
    alone = attention(**{name: x[3:4] for name, x in inputs.items()}, causal=True, backend=backend)
    torch.testing.assert_close(whole[3:4], alone, rtol=1e-2, atol=4e-3)


# ----------------------------------------------------------------------------------------------------- compilation and autograd


@pytest.mark.unpoisoned
def test_compiled_whole_with_dynamic_lengths_and_no_recompile():
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, causal=True), fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for n in (128, 200, 333, 1000):
            inputs = {name: x.requires_grad_() for name, x in qkv(2, n, n).items()}
            for x in inputs.values():
                torch._dynamo.mark_dynamic(x, 1)
            dout = randn(2, n, 4, 64)
            out = compiled(**inputs)
            got = [out.detach(), *torch.autograd.grad(out, list(inputs.values()), dout)]
            for mine, expected in zip(got, step(inputs, dout, causal=True), strict=True):
                torch.testing.assert_close(mine, expected, rtol=1e-2, atol=1e-2)
                assert mine.stride() == expected.stride()


@pytest.mark.parametrize(
    "options",
    [
        dict(causal=True),
        dict(layout="bhsd", window_size=(20, 5)),
        dict(softcap=2.0, return_aux="lse"),
    ],
    ids=["causal", "bhsd window", "softcap"],
)
def test_opcheck(options):
    inputs = qkv(2, 70, 70)
    if options.get("layout") == "bhsd":
        inputs = {name: x.transpose(1, 2) for name, x in inputs.items()}
    op = torch.ops.tilewise.attention_forward.default
    for grad in (False, True):
        leaves = {name: x.detach().requires_grad_(grad) for name, x in inputs.items()}
        arguments = prepare(**leaves, **options).op_arguments
        # With gradients, the check of AOT dispatch differentiates max_logits too, whose gradient raises.
        checks = ("test_schema", "test_autograd_registration", "test_faketensor") + (() if grad else ("test_aot_dispatch_dynamic",))
        torch.library.opcheck(op, tuple(arguments[name] for name in ops.FORWARD_ARGS), test_utils=checks)


@with_backward
def test_checkpointing_repeats_the_dropout_mask(backend):
    inputs = {name: x.requires_grad_() for name, x in qkv(2, 200, 200).items()}
    dout = randn(2, 200, 4, 64)

    def call(q, k, v):
        return attention(q, k, v, dropout_p=0.3, backend=backend, deterministic=True)

    results = []
    for run in (call, lambda *x: checkpoint(call, *x, use_reentrant=False)):
        torch.manual_seed(5)
        out = run(*inputs.values())
        results.append([out.detach(), *torch.autograd.grad(out, list(inputs.values()), dout)])
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)


# --------------------------------------------------------------------------------------------- what the fast kernels do not take


SERVED_ELSEWHERE = {
    "chunked mask": lambda: dict(mask=masks.Chunked(50)),
    "score function": lambda: dict(score_mod=lambda s, b, h, i, j: s + 0.0625 * (i - j)),
    "custom mask": lambda: dict(mask=masks.Custom(lambda b, h, i, j: (i + j) % 3 != 0)),
}


@pytest.mark.parametrize("name", SERVED_ELSEWHERE)
def test_every_call_is_served_on_a_gpu(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compare({**qkv(2, 150, 170), **SERVED_ELSEWHERE[name]()}, "auto")


def test_every_auxiliary_output_on_a_gpu():
    inputs = qkv(2, 150, 170)
    names = ("lse", "max_logits", "key_mass", "entropy")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, aux = attention(**inputs, causal=True, return_aux=names)
    expected = reference.attention_full(**inputs, causal=True)
    for name in names:
        torch.testing.assert_close(getattr(aux, name).double(), getattr(expected, name), rtol=2e-2, atol=2e-2)


AUXILIARY = {
    "causal": lambda: dict(causal=True),
    "bias, sink": lambda: dict(bias=randn(4, 333, 517), learnable_sink=randn(4, dtype=torch.float32)),
    "mask, scale": lambda: dict(mask=torch.rand(333, 517, device="cuda") < 0.2, softmax_scale=-0.3),
    "window, dropout": lambda: dict(window_size=(50, 9), dropout_p=0.2, dropout_seed=3),
    "lengths": lambda: dict(seqused_k=torch.tensor([0, 400], dtype=torch.int32, device="cuda"), softcap=2.0),
    "score_mod": lambda: dict(score_mod=lambda s, b, h, i, j: s + (i - j) * 0.0625),
}


@pytest.mark.parametrize("dtype,dim", [(torch.bfloat16, 128), (torch.float16, 64), (torch.float32, 64)], ids=str)
@pytest.mark.parametrize("name", AUXILIARY)
def test_auxiliary_outputs_of_the_portable_kernels(name, dtype, dim):
    """As close to float64 as the unfused computation in the inputs' dtype, and a few roundings of float32."""
    arguments = {**qkv(head_dim=dim, dtype=dtype), **AUXILIARY[name]()}
    _, aux = attention(**arguments, backend="triton", return_aux=("max_logits", "key_mass", "entropy"))
    exact, unfused = (reference.attention_full(**arguments, compute_dtype=to) for to in (torch.float64, dtype))
    for output in ("max_logits", "key_mass", "entropy"):
        got, want, eager = (getattr(x, output).double() for x in (aux, exact, unfused))
        assert torch.equal(got[want.isinf()], want[want.isinf()])
        got, want, eager = (torch.where(want.isinf(), 0.0, x) for x in (got, want, eager))
        error, allowed = ((x - want).abs().amax().item() for x in (got, eager))
        size = max(1.0, want.abs().amax().item()) * max(1.0, exact.lse[exact.lse.isfinite()].abs().amax().item())
        assert error <= 1.5 * allowed + 8 * torch.finfo(torch.float32).eps * size, (output, error, allowed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_auto_takes_a_fast_backend(dtype):
    explained = tilewise.explain(**qkv(2, 256, 256, dtype=dtype), causal=True)
    assert explained.backend in BACKENDS
    assert explained.roofline_ms is None or explained.roofline_ms > 0
