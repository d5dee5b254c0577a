"""Our own calls among the implementations that are compared: dense, packed, and over a cache."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .cases import Case
from .masked import case_mask
from .provider import DETERMINISTIC, Inputs, Prepared, Unsupported, in_pages


def prepare_tilewise(backend: str) -> Callable[[Case, Inputs], Prepared]:
    """Our call by this backend; an empty name stands for "auto", `DETERMINISTIC` for "auto" with `deterministic=True`."""
    if backend == DETERMINISTIC:
        return _deterministic
    return _by_backend(backend)


def _deterministic(case: Case, inputs: Inputs) -> Prepared:
    """Our call with the same bits on every run, filed as such beside the backend that serves it."""
    if case.cached:
        raise Unsupported("a call over a cache has no other order")
    prepared = _by_backend("", deterministic=True)(case, inputs)
    backward = prepared.backward_backend and f"{prepared.backward_backend} {DETERMINISTIC}"
    return replace(prepared, backend=f"{prepared.backend} {DETERMINISTIC}", backward_backend=backward)


def _by_backend(backend: str, **more: Any) -> Callable[[Case, Inputs], Prepared]:

    def prepare(case: Case, inputs: Inputs) -> Prepared:
        import tilewise

        if case.cached:
            return cached_tilewise(case, inputs)
        if case.packed:
            return packed_tilewise(case, inputs, backend, **more)
        options: dict[str, Any] = dict(causal=case.causal, window_size=case.window, softcap=case.softcap, backend=backend or "auto", **more)
        if inputs.seqused_k is not None:
            options["seqused_k"] = inputs.seqused_k
        if case.mask:
            rule = case_mask(case.mask, case.seqlen_q, case.device).rule
            options["mask"] = tilewise.BlockMask(rule, case.seqlen_q, case.seqlen_k, device=case.device)

        def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
            return tilewise.attention(q, k, v, bias=bias, **options)

        def serving(pass_: str) -> str:
            return tilewise.explain(inputs.q, inputs.k, inputs.v, bias=inputs.bias, pass_=pass_, **options).backend

        try:
            forward = serving("fwd")
        except tilewise.UnsupportedAttention as error:
            raise Unsupported(str(error)) from error
        if case.device == "cuda" and forward == "tiled" and backend != "tiled":
            raise Unsupported("no kernel of ours serves it on this device")
        backward = None
        with contextlib.suppress(tilewise.UnsupportedAttention):  # a backend that serves the forward pass alone can still be timed
            backward = serving("bwd")
        return Prepared(call, backend=forward, backward_backend=backward)

    return prepare


def packed_tilewise(case: Case, inputs: Inputs, backend: str, **more: Any) -> Prepared:
    """Our call over packed documents. Nothing is prepared for their lengths: the offsets are all it gets."""
    import tilewise

    from .. import ops, plan
    from ..varlen import prepare_varlen

    mask = case_mask(case.mask, case.seqlen_q, case.device)
    of_keys = mask.offsets if mask.key_offsets is None else mask.key_offsets
    options: dict[str, Any] = dict(cu_seqlens_q=mask.offsets, cu_seqlens_k=of_keys, causal=True, backend=backend or "auto", **more)

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        return tilewise.attention_varlen(q[0], k[0], v[0], **options).unsqueeze(0)

    def serving(backward: bool) -> str:
        arguments = prepare_varlen(inputs.q[0], inputs.k[0], inputs.v[0], **options).op_arguments
        return plan.select(ops.operands(arguments), ops.rules(arguments, False), backend or "auto", request=plan.Request(backward)).backend

    try:
        forward = serving(False)
    except tilewise.UnsupportedAttention as error:
        raise Unsupported(str(error)) from error
    backward = None
    with contextlib.suppress(tilewise.UnsupportedAttention):
        backward = serving(True)
    return Prepared(call, backend=forward, backward_backend=backward)


def cached_tilewise(case: Case, inputs: Inputs) -> Prepared:
    """Our call over a cache, with the lengths on the device, as a server has them."""
    import tilewise

    k_cache, v_cache, table = in_pages(case, inputs)
    used = torch.full((case.batch,), case.seqlen_k, dtype=torch.int32, device=case.device)
    options: dict[str, Any] = dict(cache_seqlens=used, page_table=table, causal=case.causal, window_size=case.window, softcap=case.softcap)

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        return tilewise.attention_with_kvcache(q, k_cache, v_cache, **options)

    return Prepared(call)
