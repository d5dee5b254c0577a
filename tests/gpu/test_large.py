"""Sizes at which other libraries broke: offsets beyond 31 bits, grids beyond 16, very long sequences, and memory that must stay O(N)."""

from __future__ import annotations

import gc
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewise import attention, attention_varlen, cost, explain
from tilewise.bench.cases import Case
from tilewise.bench.check import Oracle
from tilewise.bench.peers import BUILT_IN
from tilewise.bench.provider import Inputs

from ..reports import report
from .common import BACKENDS, calling, differentiates, qkv, randn, watched

BEYOND = 1 << 31


def far_apart(x: Tensor, dim: int) -> Tensor:
    """The same values with the elements of `dim` so far apart that the last offset passes 2^31 elements."""
    step = (BEYOND + (1 << 24)) // (x.shape[dim] - 1) // 64 * 64
    assert step > x.numel() // x.shape[dim]
    rest = [d for d in range(x.ndim) if d != dim]
    strides = [0] * x.ndim
    strides[dim], run = step, 1
    for d in reversed(rest):
        strides[d], run = run, run * x.shape[d]
    flat = torch.empty(step * (x.shape[dim] - 1) + run, dtype=x.dtype, device=x.device)
    spread = flat.as_strided(x.shape, strides)
    assert (x.shape[dim] - 1) * spread.stride(dim) > BEYOND
    return spread.copy_(x)


def results(inputs: dict[str, Tensor], dout: Tensor, backend: str, **options) -> dict[str, Tensor]:
    """The output and, where the backend has them, the gradients of q, k and v, all of them its own."""
    named = {name: x.detach().requires_grad_(differentiates(backend)) for name, x in inputs.items()}
    with watched() as passes:
        out, _ = calling(backend)(**named, **options)
        found = {"out": out.detach()}
        if differentiates(backend):
            grads = torch.autograd.grad(out, list(named.values()), dout)
            found |= {f"d{name}": grad for name, grad in zip(named, grads, strict=True)}
    assert passes == [f"{backend} {name}" for name in ("forward", "backward")[: 1 + differentiates(backend)]]
    return found


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=2e-2, atol=2e-2, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("dim", [0, 1, 2], ids=["batch", "row", "head"])
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_offsets_are_64_bit(backend, name, dim):
    """A batch, row or head stride that carries an offset past 2^31: the same result as from contiguous tensors."""
    if name == "dout" and not differentiates(backend):
        pytest.skip(f"{backend} has no backward pass")
    inputs = qkv(3, 300, 300, heads=3, kv_heads=3)
    dout = randn(3, 300, 3, 64)
    expected = results(inputs, dout, backend, causal=True)
    if name == "dout":
        got = results(inputs, far_apart(dout, dim), backend, causal=True)
    else:
        got = results({**inputs, name: far_apart(inputs[name], dim)}, dout, backend, causal=True)
    assert_same(got, expected)


@pytest.mark.parametrize("dim", [1, 2], ids=["head", "row"])
@pytest.mark.parametrize("name", ["bias", "mask"])
def test_offsets_into_biases_and_masks_are_64_bit(backend, name, dim):
    inputs, dout = qkv(1, 300, 300, heads=3, kv_heads=3), randn(1, 300, 3, 64)
    matrix = randn(1, 3, 300, 300) if name == "bias" else torch.rand(1, 3, 300, 300, device="cuda") < 0.7
    expected = results(inputs, dout, backend, **{name: matrix})
    assert_same(results(inputs, dout, backend, **{name: far_apart(matrix, dim)}), expected)


@report(80, 89)
def test_outputs_and_gradients_beyond_31_bits(report, backend):
    """8,500 batch items of 16 heads of 128 x 128: 2.2e9 elements in each tensor; the last items equal a run of their own."""
    shape = (8_500, 128, 16, 128)
    assert math.prod(shape) > BEYOND
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    inputs = {"q": q, "k": k, "v": v}
    got = results(inputs, dout, backend, causal=True)
    last = slice(shape[0] - 3, shape[0])
    alone = results({name: x[last].clone() for name, x in inputs.items()}, dout[last].clone(), backend, causal=True)
    assert_same({name: x[last] for name, x in got.items()}, alone)


@report(88)
@pytest.mark.unpoisoned
def test_a_mask_and_a_bias_of_more_than_31_bits_of_elements(report, backend):
    """46,400 x 46,400 scores: a dense causal mask equals the rule, and the bias gradient's last rows equal float64."""
    n = 46_400
    assert n * n > BEYOND
    inputs, dout = qkv(1, n, n, heads=1, kv_heads=1), randn(1, n, 1, 64)
    mask = torch.ones(n, n, dtype=torch.bool, device="cuda").tril_()
    assert_same(results(inputs, dout, backend, mask=mask), results(inputs, dout, backend, causal=True))
    del mask
    bias = torch.zeros(n, n, dtype=torch.bfloat16, device="cuda").requires_grad_()
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}  # the Hopper kernels give no gradient of a bias alone
    with watched() as passes:
        out = attention(**leaves, bias=bias, backend=backend, deterministic=False)
        *_, dbias = torch.autograd.grad(out, [*leaves.values(), bias], dout)
    assert passes == [f"{backend} forward", f"{backend} backward"]
    q, k, v = (x[0, :, 0].double() for x in inputs.values())
    rows = slice(n - 8, n)
    p = torch.softmax(q[rows] @ k.T / 8, -1)
    dp = dout[0, rows, 0].double() @ v.T
    expected = p * (dp - (p * dp).sum(-1, keepdim=True))
    error = (dbias[rows].double() - expected).norm() / expected.norm()
    assert error < 1e-2


@report(91)
@pytest.mark.unpoisoned
def test_biases_of_packed_sequences_beyond_31_bits(report):
    """190,485 packed queries and biases of 11,275 keys: those of the last of 17 sequences begin near 2^31 elements and end beyond."""
    sequences, queries, keys = 17, 11_205, 11_275
    assert sequences * queries * keys > BEYOND
    q, dout = (randn(sequences * queries, 1, 64) for _ in range(2))
    k, v = (randn(sequences * keys, 1, 64) for _ in range(2))
    bias = torch.empty(sequences, 1, queries, keys, dtype=torch.bfloat16, device="cuda").normal_()
    cu_q, cu_k = (torch.arange(sequences + 1, dtype=torch.int32, device="cuda") * n for n in (queries, keys))
    leaves = [x.requires_grad_() for x in (q, k, v, bias)]
    out = attention_varlen(q, k, v, cu_q, cu_k, queries, keys, bias=bias, softmax_scale=0.125, backend="triton", deterministic=False)
    got = [out.detach()[-queries:], *torch.autograd.grad(out, leaves, dout)]
    got[1:] = [got[1][-queries:], got[2][-keys:], got[3][-keys:], got[4][-1:]]
    alone = [x.detach()[None, -n:].clone().requires_grad_() for x, n in ((q, queries), (k, keys), (v, keys))]
    last = bias.detach()[-1:].clone().requires_grad_()
    expected = attention(*alone, bias=last, softmax_scale=0.125, backend="triton", deterministic=False)
    want = [expected.detach()[0], *torch.autograd.grad(expected, [*alone, last], dout[None, -queries:])]
    for name, mine, right in zip(("out", "dq", "dk", "dv", "dbias"), got, want, strict=True):
        mine, right = mine.float().view(right.shape), right.float()
        assert (mine - right).norm() < 1e-2 * right.norm(), name


@pytest.mark.parametrize("dim", [64, 128])
def test_131072_tokens(backend, dim):
    """Every row of both heads against float64, and all gradients of the key head they share."""
    case = Case("long", str(dim), seqlen_q=131_072, heads=2, kv_heads=1, head_dim=dim, causal=True)
    inputs = Inputs.make(case)
    oracle = Oracle(case, inputs, gradients=differentiates(backend))
    found = results({"q": inputs.q, "k": inputs.k, "v": inputs.v}, inputs.dout, backend, causal=True)
    for name, value in found.items():
        error, right = oracle.judge({name: value})
        assert right, f"{name}: relative error {error:.2e}, limit {oracle.limit(name):.2e}"


@pytest.mark.parametrize(
    "batch,seqlen_q,seqlen_k,heads",
    [(10_923, 32, 32, 6), (65_537, 1, 5, 1), (1, 8_400_000, 16, 1)],
    ids=["batch x heads", "batch", "query tiles"],
)
def test_grids_beyond_65535(backend, batch, seqlen_q, seqlen_k, heads):
    inputs = qkv(batch, seqlen_q, seqlen_k, heads=heads, kv_heads=heads, head_dim=16)
    dout = randn(batch, seqlen_q, heads, 16)
    got = results(inputs, dout, backend)
    items, rows = slice(batch - 1, batch), slice(max(0, seqlen_q - 40), seqlen_q)
    part = {"q": inputs["q"][items, rows], "k": inputs["k"][items], "v": inputs["v"][items]}
    alone = results({name: x.clone() for name, x in part.items()}, dout[items, rows].clone(), backend)
    assert_same({"out": got["out"][items, rows]}, {"out": alone["out"]})
    if differentiates(backend):
        assert_same({"dq": got["dq"][items, rows]}, {"dq": alone["dq"]})
        if rows.start == 0:
            assert_same({name: got[name][items] for name in ("dk", "dv")}, {name: alone[name] for name in ("dk", "dv")})


def peak_above_inputs(call) -> int:
    call()
    gc.collect()  # what an earlier test left in a cycle would be freed meanwhile
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.unpoisoned
@pytest.mark.parametrize("pass_", ["fwd", "fwd+bwd"])
def test_memory_grows_with_the_length_not_its_square(backend, pass_):
    """The measured exponent is 1, and the size is what `cost` predicts."""
    if pass_ != "fwd" and not differentiates(backend):
        pytest.skip(f"{backend} has no backward pass")
    lengths, peaks = (4096, 8192, 16384, 32768), []
    for n in lengths:
        inputs, dout = qkv(1, n, n, heads=8, kv_heads=8), randn(1, n, 8, 64)
        if pass_ == "fwd":
            peaks.append(peak_above_inputs(lambda inputs=inputs: attention(**inputs, causal=True, backend=backend)))
        else:
            leaves = {name: x.requires_grad_() for name, x in inputs.items()}

            def both(leaves=leaves, dout=dout):
                torch.autograd.grad(attention(**leaves, causal=True, backend=backend), list(leaves.values()), dout)

            peaks.append(peak_above_inputs(both))
    x, y = (torch.tensor(values, dtype=torch.float64).log() for values in (lengths, peaks))
    exponent = float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())
    assert 0.9 < exponent < 1.1, peaks
    problem = cost.Problem(batch=1, heads=8, seqlen_q=lengths[-1], head_dim=64)
    expected = cost.output_bytes(problem) + cost.extra_bytes(problem, "bwd")
    expected += 0 if pass_ == "fwd" else cost.output_bytes(problem, "bwd")
    expected += problem.heads * problem.seqlen_q * 64 * 4 if (pass_, backend) == ("fwd+bwd", "hopper") else 0  # dQ in float32
    assert peaks[-1] < 1.5 * expected + (4 << 20)


# What a backward pass of the Hopper kernels takes: dQ in float32, and beside a bias or mask copies and sums.
BACKWARD: dict[str, Any] = {
    "plain": lambda: {},
    "in order": lambda: dict(causal=True, deterministic=True),
    "heads that share keys": lambda: dict(causal=True),
    "dropout": lambda: dict(causal=True, dropout_p=0.1, dropout_seed=3),
    "mask": lambda: dict(mask=torch.rand(2, 1, 2048, 2048, device="cuda") < 0.7),
    "bias, stored": lambda: dict(bias=randn(2, 4, 2048, 2048)),
    "bias, added up": lambda: dict(bias=randn(1, 4, 2048, 2048)),
}


@pytest.mark.unpoisoned
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", BACKWARD)
def test_a_backward_pass_takes_no_more_than_explain_states(name, dim):
    """Beside its gradients: in the first call, in the one that is recorded, and in one that is played."""
    if "hopper" not in BACKENDS:
        pytest.skip("needs a Hopper GPU")
    heads, kv_heads = (32, 4) if name == "heads that share keys" else (4, 4)
    arguments = {"deterministic": False, **qkv(2, 2048, 2048, heads, kv_heads, dim), **BACKWARD[name](), "backend": "hopper"}
    leaves = [arguments[key].requires_grad_() for key in ("q", "k", "v", "bias") if key in arguments]
    told, dout = explain(**arguments, pass_="bwd"), randn(2, 2048, heads, dim)
    assert told.backend == "hopper"
    for _ in range(3):
        out = attention(**arguments)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        grads = torch.autograd.grad(out, leaves, dout)
        used = torch.cuda.max_memory_allocated() - before - sum(x.nbytes for x in grads)
        assert used <= told.extra_bytes + (1 << 20), (used, told.extra_bytes)
        del out, grads


@pytest.mark.unpoisoned
@pytest.mark.parametrize("name", ["mask", "bias"])
def test_a_broadcast_mask_or_bias_is_not_expanded(backend, name):
    n = 16384
    inputs = qkv(1, n, n, heads=8, kv_heads=8)
    row = torch.ones(1, 1, 1, n, dtype=torch.bool, device="cuda") if name == "mask" else randn(1, 1, 1, n)
    plain = peak_above_inputs(lambda: attention(**inputs, backend=backend))
    # Expanded over the queries it would take n * n bytes or more. A copy of V, where a backend makes one, is what `explain` states.
    stated = explain(**inputs, backend=backend, **{name: row}).extra_bytes - explain(**inputs, backend=backend).extra_bytes
    assert stated <= inputs["v"].nbytes
    assert peak_above_inputs(lambda: attention(**inputs, backend=backend, **{name: row})) < plain + stated + (4 << 20)


@pytest.mark.unpoisoned
@pytest.mark.parametrize("pass_", ["fwd", "fwd+bwd"])
def test_the_prediction_for_unfused_attention_holds(pass_):
    """What the plots draw where unfused attention runs out of memory is no more than it takes where it does not, and most of it.

    The prediction counts the matrices that must be held; the library may hold one more while it takes the softmax's derivative.
    """
    case = Case("unfused", "8k", seqlen_q=8192, heads=8, head_dim=64)
    inputs = Inputs.make(case)
    call = BUILT_IN["eager"].prepare(case, inputs).call
    if pass_ == "fwd":
        with torch.no_grad():
            peak = peak_above_inputs(lambda: call(inputs.q, inputs.k, inputs.v))
    else:
        leaves = inputs.leaves()
        peak = peak_above_inputs(lambda: torch.autograd.grad(call(*leaves), leaves, inputs.dout))
    predicted = cost.unfused_bytes(case.problem(), "fwd" if pass_ == "fwd" else "bwd")
    assert 0.95 * predicted < peak < 1.4 * predicted
