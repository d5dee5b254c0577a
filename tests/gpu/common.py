"""What the GPU tests share: the backends, one comparison with the specification, and tensors behind unusual strides."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

from tilewise import UnsupportedAttention, attention, reference, repeats

from ..helpers import Answer, assert_close_to_reference, reference_with_grads, run_with_grads, unfused_with_grads

# What tests for every backend ask although the Hopper kernels do not serve it, in the words of their `why_not`.
REFUSALS = (
    "it computes in bfloat16 and float16",
    "it needs a multiple of 8 from 8 to 256",
    "TMA needs 1",
    "not aligned to 16 bytes",
    "it reads a bias with head dims up to 128",
    "it reads a mask with head dims up to 128",
)


def _backends() -> list[str]:
    if not torch.cuda.is_available() or torch.version.hip or torch.cuda.get_device_capability() != (9, 0):
        return ["triton"]
    return ["triton", "hopper"]


BACKENDS = _backends()
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def differentiates(backend: str) -> bool:
    """Whether a backend has a backward pass."""
    return backend == "auto" or hasattr(importlib.import_module(f"tilewise.kernels.{backend}"), "backward")


def calling(backend: str, *, deterministic: bool = False, **fixed: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """`attention` on one backend, as a function that returns (out, lse).

    Not deterministic unless a test says so: new memory is poisoned through torch's deterministic mode, which ``deterministic=None`` would
    follow, and then no test would run what users run.
    """

    def call(**arguments: Any) -> tuple[Tensor, Tensor]:
        out, aux = attention(**arguments, **fixed, deterministic=deterministic, backend=backend, return_aux="lse")
        return out, aux.lse

    return call


def skip_refused(backend: str, error: UnsupportedAttention) -> NoReturn:
    """What the Hopper kernels are known to refuse, the portable ones serve: there is nothing to test. Any other refusal is a failure."""
    if backend == "hopper" and any(words in str(error) for words in REFUSALS):
        pytest.skip(str(error))
    raise error


@contextmanager
def watched() -> Iterator[list[str]]:
    """The passes that kernels serve meanwhile, such as "hopper backward". Whatever calls came before, the next ones are first ones: a call
    that is played from its recording serves itself."""
    passes: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for backend in ("hopper", "triton", "tiled"):
            module = importlib.import_module(f"tilewise.kernels.{backend}")
            for name in ("forward", "backward"):
                kernel = getattr(module, name)

                def noted(*given: Any, kernel: Callable[..., None] = kernel, text: str = f"{backend} {name}") -> None:
                    passes.append(text)
                    kernel(*given)

                patch.setattr(module, name, noted)
        repeats.forget()
        yield passes


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


def qkv(
    batch: int = 2,
    seqlen_q: int = 333,
    seqlen_k: int = 517,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    head_dim_v: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    scale: float = 1.0,
) -> dict[str, Tensor]:
    """Random q, k, v by name, in layout bshd; `scale` widens the scores."""
    return {
        "q": randn(batch, seqlen_q, heads, head_dim, dtype=dtype, scale=scale),
        "k": randn(batch, seqlen_k, kv_heads, head_dim, dtype=dtype),
        "v": randn(batch, seqlen_k, kv_heads, head_dim_v or head_dim, dtype=dtype),
    }


def compare(
    arguments: dict[str, Any], backend: str, *, gradients: bool = True, backward: str = "", served: bool = False, **fixed: Any
) -> Answer:
    """Output, LSE and every gradient of one call against the specification, with cotangents of both outputs.

    `fixed` are arguments that the specification does not know (deterministic, out_dtype). A backend that refuses the call in one of the
    known ways (`REFUSALS`) skips the test, with its reason, unless the call must be `served`; one without a backward pass is compared
    forward. Both passes must be those of `backend`, or the backward pass that of the backend `backward`, which lends it.
    """
    q, v = arguments["q"], arguments["v"]
    layout = arguments.get("layout", "bshd")
    heads, seqlen_q = (q.shape[2], q.shape[1]) if layout == "bshd" else (q.shape[1], q.shape[2])
    dout = torch.randn(*q.shape[:3], v.shape[3], device="cuda").to(q.dtype)
    dlse = torch.randn(q.shape[0], heads, seqlen_q, device="cuda")
    exact = reference_with_grads(arguments, dout, dlse)
    unfused = unfused_with_grads(arguments, dout, dlse)
    differentiated = gradients and differentiates(backend)
    try:
        with watched() as passes:
            if differentiated:
                got = run_with_grads(calling(backend, **fixed), arguments, dout, dlse)
            else:
                with torch.no_grad():
                    got = Answer(*calling(backend, **fixed)(**arguments), {})
                exact.grads.clear()
    except UnsupportedAttention as error:
        if served:
            raise
        skip_refused(backend, error)
    if backend != "auto":
        assert passes == [f"{backend} forward"] + [f"{backward or backend} backward"] * differentiated, passes
    _allow_cancellation(arguments, exact, unfused, dout, layout)
    _allow_summation(arguments, exact, unfused, dout, dlse, layout)
    _allow_saved_lse(arguments, exact, unfused, dout, dlse)
    assert_close_to_reference(got, exact, unfused)
    return got


def _allow_cancellation(arguments: dict[str, Any], exact: Answer, unfused: Answer, dout: Tensor, layout: str) -> None:
    """The yardstick of dq and dk: no better than float32 can subtract delta from dP.

    dS = P (dP - delta) cancels where few keys are seen, exactly so where it is one; the unfused computation takes both from one sum and
    then has no error at all. The floor is one float32 rounding of the terms of dP, carried through the products that follow.
    """
    if "q" not in exact.grads or not exact.out.numel() or not arguments["k"].numel():
        return
    q, k, v = (arguments[name].detach().double() for name in ("q", "k", "v"))
    heads = 2 if layout == "bshd" else 1
    scale = arguments.get("softmax_scale")
    scale = abs(q.shape[3] ** -0.5 if scale is None else scale)
    largest = dout.double().abs().sum(3).amax() * v.abs().amax()
    rounding = torch.finfo(torch.float32).eps * scale * largest / (1 - arguments.get("dropout_p", 0.0))
    known = {name: value for name, value in arguments.items() if name not in ("q", "k", "v")}
    mass = reference.attention_full(q, k, v, **known).key_mass.amax() * (q.shape[heads] // k.shape[heads])
    for name, least in (("q", rounding * k.abs().amax()), ("k", rounding * q.abs().amax() * mass)):
        error = (unfused.grads[name].double() - exact.grads[name]).abs().max()
        unfused.grads[name] = exact.grads[name] + torch.maximum(error, least)


def _allow_saved_lse(arguments: dict[str, Any], exact: Answer, unfused: Answer, dout: Tensor, dlse: Tensor) -> None:
    """The yardstick of dv in float32: no better than the LSE that the backward pass finds, a float32 number (contract, rule 7).

    Its rounding is a relative error of every recomputed probability of the row, half a last digit of the LSE; the unfused computation keeps
    P instead, in memory of size N x N. The floor is that error in the sum of P |dout| that a key receives.
    """
    if "v" not in exact.grads or arguments["q"].dtype != torch.float32 or not exact.out.numel():
        return
    received = reference_with_grads(arguments, dout.abs(), None).grads["v"].abs().amax()
    finite = exact.lse[torch.isfinite(exact.lse)].abs()
    if finite.numel():
        rounding = torch.finfo(torch.float32).eps / 2 * finite.amax()
        error = (unfused.grads["v"].double() - exact.grads["v"]).abs().max().clamp(min=float(rounding * received))
        unfused.grads["v"] = exact.grads["v"] + error


def _allow_summation(arguments: dict[str, Any], exact: Answer, unfused: Answer, dout: Tensor, dlse: Tensor, layout: str) -> None:
    """The yardstick of gradients that add up the score matrix: no better than float32 can add its terms.

    Such a sum has few elements and cancels, so that the unfused error is a matter of luck; the floor is one float32 rounding of the sum
    of the terms' magnitudes, or of their rounding to the inputs' dtype, added in quadrature.
    """
    summed = {"bias", "alibi_slopes", "learnable_sink"} & exact.grads.keys()
    if not summed:
        return
    q, k = arguments["q"], arguments["k"]
    heads, seq = (2, 1) if layout == "bshd" else (1, 2)
    shape = (q.shape[0], q.shape[heads], q.shape[seq], k.shape[seq])
    bias = arguments.get("bias")
    full = torch.zeros(shape, dtype=torch.float64, device="cuda") if bias is None else bias.double().expand(shape)
    terms = reference_with_grads({**arguments, "bias": full}, dout, dlse).grads["bias"].abs()
    eps32, eps = torch.finfo(torch.float32).eps, torch.finfo(q.dtype).eps
    distance = max(shape[2:])

    def floor(sized: Callable[[Tensor], Tensor], factor: float = 1.0) -> float:
        return factor * float(eps32 * sized(terms).max() + eps * sized(terms.square()).sqrt().max())

    for name in summed:
        if name == "bias":
            rank = (1,) * (4 - bias.ndim) + tuple(bias.shape)
            if rank == shape:
                continue
            least = floor(lambda x, rank=rank: x.sum_to_size(rank))
        elif name == "alibi_slopes":
            dims = (2, 3) if arguments[name].ndim == 2 else (0, 2, 3)
            least = floor(lambda x, dims=dims: x.sum(dims), distance)
        else:
            least = floor(lambda x: x.sum((0, 2, 3))) + float(eps32 * dlse.abs().sum((0, 2)).max())
        error = (unfused.grads[name].double() - exact.grads[name]).abs().max().clamp(min=least)
        unfused.grads[name] = exact.grads[name] + error


def restride(x: Tensor, how: str) -> Tensor:
    """The same values of a (B, S, H, D) tensor behind other strides."""
    if how == "heads first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "one element in":
        flat = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
        flat[1:] = x.reshape(-1)
        return flat[1:].view(x.shape)
    if how == "every second":
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), float("nan"), dtype=x.dtype, device=x.device)
        wide[..., ::2] = x
        return wide[..., ::2]
    if how == "slice of packed":
        wide = torch.full((*x.shape[:2], 3 * x.shape[2], x.shape[3]), float("nan"), dtype=x.dtype, device=x.device)
        wide[:, :, x.shape[2] : 2 * x.shape[2]] = x
        return wide[:, :, x.shape[2] : 2 * x.shape[2]]
    return x


def new_specializations(call: Callable[[], Any]) -> int:
    """How many kernels a call compiled or loaded anew in this process."""
    import triton

    seen: list[Any] = []
    before = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = lambda *args, **kwargs: seen.append(kwargs)
    try:
        call()
    finally:
        triton.knobs.runtime.jit_post_compile_hook = before
    return len(seen)
