"""The implementations that are compared, ours among them. Peers are found at run time; none is required.

A provider turns a `Case` and its `Inputs` into a `Prepared` call on tensors of shape (batch, sequence, heads, dim), or raises
`Unsupported` with the reason. Whatever may be set up once (masks, plans, compilation) is set up there, outside the timed call.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import site
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .cases import Case
from .masked import case_mask

Call = Callable[..., Tensor]  # (q, k, v, bias or None) -> out


class Unsupported(Exception):
    """A provider cannot serve a case; the message says why."""


@dataclass(slots=True)
class Inputs:
    """The tensors of a case: what every provider receives."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    bias: Tensor | None = None
    seqused_k: Tensor | None = None

    @staticmethod
    def make(case: Case, seed: int = 0) -> Inputs:
        """Standard normal q, k, v, dout and bias."""
        generator = torch.Generator(case.device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device=case.device, dtype=case.torch_dtype, generator=generator)

        lengths = torch.tensor(case.key_lengths(), dtype=torch.int32, device=case.device) if case.padded else None
        q = normal(case.batch, case.seqlen_q, case.heads, case.head_dim)
        k = normal(case.batch, case.seqlen_k, case.kv_heads, case.head_dim)
        return Inputs(
            q=q,
            k=k,
            v=k[..., : case.head_dim_v] if case.latent else normal(case.batch, case.seqlen_k, case.kv_heads, case.head_dim_v),
            dout=normal(case.batch, case.seqlen_q, case.heads, case.head_dim_v),
            bias=normal(*case.bias) if case.bias is not None else None,
            seqused_k=lengths,
        )

    def leaves(self) -> list[Tensor]:
        """Fresh tensors over the same memory that take part in differentiation: q, k, v and the bias, if there is one."""
        tensors = [self.q, self.k, self.v] + ([] if self.bias is None else [self.bias])
        return [x.detach().requires_grad_() for x in tensors]


@dataclass(slots=True)
class Prepared:
    """A call ready to be timed, the context it must run in, and which of our backends serves its forward and its backward pass."""

    call: Call
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    backend: str | None = None
    backward_backend: str | None = None

    def serving(self, pass_: str) -> str | None:
        """The backend that a row of this pass is filed under; both passes together go by the forward's."""
        return self.backward_backend if pass_ == "bwd" else self.backend


@dataclass(frozen=True, slots=True)
class Provider:
    """One implementation. `name` is its name in results files, `backend` the variant of ours (else empty)."""

    name: str
    prepare: Callable[[Case, Inputs], Prepared] = field(repr=False)
    backend: str = ""
    backward: bool = True

    @property
    def label(self) -> str:
        return f"{self.name}:{self.backend}" if self.backend else self.name


def _refuse(case: Case, **limits: bool) -> None:
    """Raises for features that a peer lacks: each keyword names one, True where the case uses it and the peer does not have it."""
    missing = [name for name, used in limits.items() if used]
    if missing:
        raise Unsupported(f"no {', '.join(missing)}")


# ------------------------------------------------------------------------------------------------------------ ours and eager


def _tilewise(backend: str) -> Callable[[Case, Inputs], Prepared]:
    def prepare(case: Case, inputs: Inputs) -> Prepared:
        import tilewise

        if case.cached:
            return cached_tilewise(case, inputs)
        if case.packed:
            return packed_tilewise(case, inputs, backend)
        options: dict[str, Any] = dict(causal=case.causal, window_size=case.window, softcap=case.softcap, backend=backend or "auto")
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


def packed_tilewise(case: Case, inputs: Inputs, backend: str) -> Prepared:
    """Our call over packed documents. Nothing is prepared for their lengths: the offsets are all it gets."""
    import tilewise

    from .. import ops, plan
    from ..varlen import prepare_varlen

    offsets = case_mask(case.mask, case.seqlen_q, case.device).offsets
    options: dict[str, Any] = dict(cu_seqlens_q=offsets, cu_seqlens_k=offsets, causal=True, backend=backend or "auto")

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


def in_pages(case: Case, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor | None]:
    """The keys and values of a case as caches, and the page table of paged ones: pages in random order."""
    if not case.page_size:
        return inputs.k, inputs.v, None
    count = case.batch * case.seqlen_k // case.page_size
    order = torch.randperm(count, device=case.device, generator=torch.Generator(case.device).manual_seed(0))
    pages = []
    for x in (inputs.k, inputs.v):
        cache = torch.empty(count, case.page_size, *x.shape[2:], dtype=x.dtype, device=x.device)
        cache[order] = x.reshape(cache.shape)
        pages.append(cache)
    return pages[0], pages[1], order.to(torch.int32).view(case.batch, -1)


def _hidden(case: Case, inputs: Inputs) -> Tensor | None:
    """Where unfused attention must not look: bool, broadcastable to (batch, heads, seqlen_q, seqlen_k); None where nothing hides."""
    device = inputs.q.device
    position = torch.arange(case.seqlen_q, device=device)[:, None] + (case.seqlen_k - case.seqlen_q)
    key = torch.arange(case.seqlen_k, device=device)[None, :]
    left, right = case.window[0], 0 if case.causal else case.window[1]
    hidden: Tensor | None = None
    if left >= 0:
        hidden = key < position - left
    if right >= 0:
        ahead = key > position + right
        hidden = ahead if hidden is None else hidden | ahead
    if inputs.seqused_k is not None:
        beyond = key >= inputs.seqused_k[:, None, None, None]
        hidden = beyond if hidden is None else hidden | beyond
    if case.mask:
        unseen = ~case_mask(case.mask, case.seqlen_q, case.device).function(0, 0, torch.arange(case.seqlen_q, device=device)[:, None], key)
        hidden = unseen if hidden is None else hidden | unseen
    return hidden


def _eager(case: Case, inputs: Inputs) -> Prepared:
    """Unfused attention in the inputs' dtype, as a careful user writes it: few passes, in place where autograd allows."""
    _refuse(case, pages=case.page_size > 0)
    hidden = _hidden(case, inputs)
    scale, group = case.head_dim**-0.5, case.heads // case.kv_heads

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if group > 1:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = (q * scale) @ k.transpose(-1, -2)
        if case.softcap:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        if bias is not None:
            scores = scores + bias
        if hidden is not None:
            scores = scores.masked_fill_(hidden, float("-inf"))
        return (scores.softmax(-1) @ v).transpose(1, 2)

    return Prepared(call)


# ---------------------------------------------------------------------------------------------------------- torch's own peers


def _sdpa(backend: SDPBackend) -> Callable[[Case, Inputs], Prepared]:
    def prepare(case: Case, inputs: Inputs) -> Prepared:
        uneven = case.causal and case.seqlen_q != case.seqlen_k
        other = dict(pages=case.page_size > 0, mask=bool(case.mask))
        _refuse(case, window=case.window != (-1, -1), softcap=case.softcap > 0, bottom_right_causal=uneven, **other)
        hidden = _hidden(case, inputs) if case.padded else None
        options: dict[str, Any] = dict(is_causal=case.causal and hidden is None, enable_gqa=case.heads != case.kv_heads)

        def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
            mask = bias if hidden is None else ~hidden
            out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, **options)
            return out.transpose(1, 2)

        return Prepared(call, context=lambda: sdpa_kernel(backend))

    return prepare


def _flex(case: Case, inputs: Inputs) -> Prepared:
    """FlexAttention, compiled for this case alone: static shapes, a fresh compiler state, and no eager run in its place."""
    _refuse(case, pages=case.page_size > 0)
    import torch._dynamo
    import torch._functorch.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    torch._functorch.config.donated_buffer = False  # the backward pass is run many times over one graph
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    shift, lengths = case.seqlen_k - case.seqlen_q, inputs.seqused_k
    left, right = case.window[0], 0 if case.causal else case.window[1]

    given = case_mask(case.mask, case.seqlen_q, case.device).function if case.mask else None

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        visible = j >= 0 if given is None else given(b, h, i, j)
        if left >= 0:
            visible = visible & (j >= i + shift - left)
        if right >= 0:
            visible = visible & (j <= i + shift + right)
        if lengths is not None:
            visible = visible & (j < lengths[b])
        return visible

    block_mask = None
    if left >= 0 or right >= 0 or lengths is not None or given is not None:
        batch = case.batch if lengths is not None else None
        block_mask = create_block_mask(mask_mod, batch, None, case.seqlen_q, case.seqlen_k, device=case.device)

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            if case.softcap:
                score = case.softcap * torch.tanh(score / case.softcap)
            if bias is not None:
                score = score + bias[0 if bias.shape[0] == 1 else b, 0 if bias.shape[1] == 1 else h, i, j]
            return score

        changes = score_mod if case.softcap or bias is not None else None
        out = compiled(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            score_mod=changes,
            block_mask=block_mask,
            enable_gqa=case.heads != case.kv_heads,
        )
        return out.transpose(1, 2)

    return Prepared(call)


# -------------------------------------------------------------------------------------------------------------- installed peers


def _flash(
    function: Callable[..., Any],
    unlimited: int | None,
    softcap: bool = True,
    with_cache: Callable[..., Any] | None = None,
    varlen: Callable[..., Any] | None = None,
) -> Callable[[Case, Inputs], Prepared]:
    """The call that FlashAttention 2, 3 and 4 share; `unlimited` is what each takes for no limit of a window. `with_cache` is the call over
    a cache, `varlen` that over packed sequences, of those that have one."""

    def prepare(case: Case, inputs: Inputs) -> Prepared:
        capped = case.softcap > 0 and not softcap
        if case.packed and varlen is not None:
            return packed_flash(case, varlen)
        _refuse(case, bias=case.bias is not None, padding=case.padded, fp32=case.dtype == "fp32", softcap=capped, mask=bool(case.mask))
        options: dict[str, Any] = dict(causal=case.causal)
        left, right = case.window
        if (left, right) != (-1, -1):
            right = 0 if case.causal else right
            options["window_size"] = tuple(unlimited if side < 0 else side for side in (left, right))
        if case.softcap:
            options["softcap"] = case.softcap
        if case.cached and with_cache is not None:
            k_cache, v_cache, table = in_pages(case, inputs)
            used = torch.full((case.batch,), case.seqlen_k, dtype=torch.int32, device=case.device)
            options |= dict(cache_seqlens=used) | ({} if table is None else {"page_table": table})

            def read(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
                out = with_cache(q, k_cache, v_cache, **options)
                return out[0] if isinstance(out, tuple) else out

            return Prepared(read)
        _refuse(case, pages=case.page_size > 0)

        def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
            out = function(q, k, v, **options)
            return out[0] if isinstance(out, tuple) else out

        return Prepared(call)

    return prepare


def packed_flash(case: Case, varlen: Callable[..., Any]) -> Prepared:
    """FlashAttention over packed documents. The longest is found here, outside the timed call: a user would wait for the device."""
    offsets = case_mask(case.mask, case.seqlen_q, case.device).offsets
    assert offsets is not None
    longest = int(offsets.diff().max())
    bounds = dict(cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=longest, max_seqlen_k=longest)

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        out = varlen(q[0], k[0], v[0], **bounds, causal=True)
        return (out[0] if isinstance(out, tuple) else out).unsqueeze(0)

    return Prepared(call)


def _xformers(function: Callable[..., Tensor], causal_mask: type) -> Callable[[Case, Inputs], Prepared]:
    def prepare(case: Case, inputs: Inputs) -> Prepared:
        other = case.window != (-1, -1) or case.padded or case.softcap > 0
        kinds = dict(mask=bool(case.mask), cache=case.cached)
        _refuse(case, gqa=case.heads != case.kv_heads, window_padding_or_softcap=other, bias=case.bias is not None, **kinds)
        mask = causal_mask() if case.causal else None
        return Prepared(lambda q, k, v, bias=None: function(q, k, v, attn_bias=mask))

    return prepare


def _flashinfer(module: Any) -> Callable[[Case, Inputs], Prepared]:
    def prepare(case: Case, inputs: Inputs) -> Prepared:
        bounded = case.window[1] >= 0 and not case.causal
        kinds = dict(fp32=case.dtype == "fp32", mask=bool(case.mask), cache=case.cached)
        _refuse(case, bias=case.bias is not None, padding=case.padded, right_window=bounded, **kinds)
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device=case.device)
        wrapper = module.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
        starts = [torch.arange(case.batch + 1, dtype=torch.int32, device=case.device) * length for length in (case.seqlen_q, case.seqlen_k)]
        wrapper.plan(
            *starts,
            case.heads,
            case.kv_heads,
            case.head_dim,
            head_dim_vo=case.head_dim_v,
            causal=case.causal,
            window_left=case.window[0],
            logits_soft_cap=case.softcap or None,
            q_data_type=case.torch_dtype,
        )

        def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
            return wrapper.run(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)).unflatten(0, q.shape[:2])

        return Prepared(call)

    return prepare


# ---------------------------------------------------------------------------------------------------------------------- finding


def flash_3(package: Any) -> Callable[[Case, Inputs], Prepared]:
    """FlashAttention-3, whole or without its backward pass."""
    return _flash(package.flash_attn_func, -1, with_cache=package.flash_attn_with_kvcache, varlen=package.flash_attn_varlen_func)


def _load(provider: str) -> Provider:
    """The provider of an installed package; ImportError (or what its import raises) where it is not there."""
    if provider == "fa2":
        package = importlib.import_module("flash_attn")
        return Provider("fa2", _flash(package.flash_attn_func, -1, varlen=package.flash_attn_varlen_func))
    if provider == "fa3":
        try:
            full = importlib.import_module("flash_attn_interface")
            return Provider("fa3", flash_3(full))
        except ImportError:
            forward = importlib.import_module("fa3_fwd_interface")
            return Provider("fa3", flash_3(forward), backward=False)
    if provider == "fa4":
        package = importlib.import_module("flash_attn.cute")
        return Provider("fa4", _flash(package.flash_attn_func, None, varlen=package.flash_attn_varlen_func))
    if provider == "xformers":
        ops = importlib.import_module("xformers.ops")
        return Provider("xformers", _xformers(ops.memory_efficient_attention, ops.LowerTriangularMask))
    return Provider("flashinfer", _flashinfer(importlib.import_module("flashinfer")), backward=False)


def _ours(backend: str) -> Provider:
    return Provider("tilewise", _tilewise(backend), backend=backend)


BUILT_IN: dict[str, Provider] = {
    "tilewise": _ours(""),
    "eager": Provider("eager", _eager),
    "sdpa_flash": Provider("sdpa_flash", _sdpa(SDPBackend.FLASH_ATTENTION)),
    "sdpa_cudnn": Provider("sdpa_cudnn", _sdpa(SDPBackend.CUDNN_ATTENTION)),
    "sdpa_efficient": Provider("sdpa_efficient", _sdpa(SDPBackend.EFFICIENT_ATTENTION)),
    "sdpa_math": Provider("sdpa_math", _sdpa(SDPBackend.MATH)),
    "flex": Provider("flex", _flex),
}
INSTALLED = ("fa2", "fa3", "fa4", "xformers", "flashinfer")
NAMES = (*BUILT_IN, *INSTALLED)
ON_CPU = ("tilewise", "eager", "sdpa_flash")


def find(names: str, device: str) -> tuple[list[Provider], dict[str, str]]:
    """The providers that are there, and why each other one is not.

    Args:
        names: comma-separated names, ours also with a backend ("tilewise:triton"); empty takes all that make sense on `device`.
        device: "cuda" or "cpu".

    The environment variable FA4_DIR names a folder of unpacked FlashAttention-4 packages, which is then searched as well.
    """
    if os.environ.get("FA4_DIR"):
        site.addsitedir(os.environ["FA4_DIR"])
    wanted = names.split(",") if names else list(NAMES if device == "cuda" else ON_CPU)
    found: list[Provider] = []
    missing: dict[str, str] = {}
    for name in wanted:
        base, _, backend = name.partition(":")
        if base == "tilewise":
            found.append(_ours(backend))
        elif name in BUILT_IN:
            found.append(BUILT_IN[name])
        elif name in INSTALLED:
            try:
                found.append(_load(name))
            except Exception as error:  # a broken binary package raises anything from OSError to AttributeError
                missing[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        else:
            raise ValueError(f"no provider is named {name!r}; there are {', '.join(NAMES)}")
    return found, missing
