"""How each peer is called: unfused attention, PyTorch's own kernels, FlexAttention, FlashAttention 2 to 4, xFormers, FlashInfer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .cases import Case
from .masked import BLOCK, case_mask
from .provider import Inputs, Prepared, Unsupported, in_pages, refuse


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


def eager(case: Case, inputs: Inputs) -> Prepared:
    """Unfused attention in the inputs' dtype, as a careful user writes it: few passes, in place where autograd allows."""
    refuse(case, pages=case.page_size > 0)
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


def sdpa(backend: SDPBackend) -> Callable[[Case, Inputs], Prepared]:
    def prepare(case: Case, inputs: Inputs) -> Prepared:
        uneven = case.causal and case.seqlen_q != case.seqlen_k
        other = dict(pages=case.page_size > 0, mask=bool(case.mask))
        refuse(case, window=case.window != (-1, -1), softcap=case.softcap > 0, bottom_right_causal=uneven, **other)
        hidden = _hidden(case, inputs) if case.padded else None
        options: dict[str, Any] = dict(is_causal=case.causal and hidden is None, enable_gqa=case.heads != case.kv_heads)

        def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
            mask = bias if hidden is None else ~hidden
            out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, **options)
            return out.transpose(1, 2)

        return Prepared(call, context=lambda: sdpa_kernel(backend))

    return prepare


def flex(case: Case, inputs: Inputs) -> Prepared:
    """FlexAttention, compiled for this case alone: static shapes, a fresh compiler state, and no eager run in its place."""
    refuse(case, pages=case.page_size > 0)
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


def flash(
    function: Callable[..., Any],
    unlimited: int | None,
    softcap: bool = True,
    with_cache: Callable[..., Any] | None = None,
    varlen: Callable[..., Any] | None = None,
    lists: Callable[..., Any] | None = None,
) -> Callable[[Case, Inputs], Prepared]:
    """The call that FlashAttention 2, 3 and 4 share; `unlimited` is what each takes for no limit of a window. `with_cache` is the call over
    a cache, `varlen` that over packed sequences, `lists` what holds lists of blocks, of those that have one."""

    def prepare(case: Case, inputs: Inputs) -> Prepared:
        capped = case.softcap > 0 and not softcap
        if case.packed and varlen is not None:
            return packed_flash(case, varlen)
        if case.mask and lists is not None and case_mask(case.mask, case.seqlen_q, case.device).bits is not None:
            return listed_flash(case, function, lists)
        refuse(case, bias=case.bias is not None, padding=case.padded, fp32=case.dtype == "fp32", softcap=capped, mask=bool(case.mask))
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
        refuse(case, pages=case.page_size > 0)

        def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
            out = function(q, k, v, **options)
            return out[0] if isinstance(out, tuple) else out

        return Prepared(call)

    return prepare


def packed_flash(case: Case, varlen: Callable[..., Any]) -> Prepared:
    """FlashAttention over packed documents. The longest is found here, outside the timed call: a user would wait for the device."""
    mask = case_mask(case.mask, case.seqlen_q, case.device)
    offsets = {"q": mask.offsets, "k": mask.offsets if mask.key_offsets is None else mask.key_offsets}
    bounds: dict[str, Any] = {f"cu_seqlens_{side}": x for side, x in offsets.items()}
    bounds |= {f"max_seqlen_{side}": int(x.diff().max()) for side, x in offsets.items() if x is not None}

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        out = varlen(q[0], k[0], v[0], **bounds, causal=True)
        return (out[0] if isinstance(out, tuple) else out).unsqueeze(0)

    return Prepared(call)


def listed_flash(case: Case, function: Callable[..., Any], tensors: Callable[..., Any]) -> Prepared:
    """FlashAttention-4 over lists of whole blocks, forward alone: its backward pass takes none on Hopper. The lists are built here, outside
    the timed call, one for each head as its kernel wants them."""
    bits = case_mask(case.mask, case.seqlen_q, case.device).bits
    assert bits is not None
    bits = bits.expand(case.batch, case.heads, -1, -1)
    count = bits.sum(-1, dtype=torch.int32)
    index = bits.int().argsort(dim=-1, descending=True, stable=True).int().contiguous()
    nothing = dict(mask_block_cnt=torch.zeros_like(count), mask_block_idx=torch.zeros_like(index))
    lists = tensors(**nothing, full_block_cnt=count.contiguous(), full_block_idx=index, block_size=(BLOCK, BLOCK))

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        if torch.is_grad_enabled() and q.requires_grad:  # it would return gradients of a call without lists
            raise Unsupported("its lists are for the forward pass")
        out = function(q, k, v, mask_mod=None, block_sparse_tensors=lists)
        return out[0] if isinstance(out, tuple) else out

    return Prepared(call)


def flash_3(package: Any) -> Callable[[Case, Inputs], Prepared]:
    """FlashAttention-3, whole or without its backward pass."""
    return flash(package.flash_attn_func, -1, with_cache=package.flash_attn_with_kvcache, varlen=package.flash_attn_varlen_func)


def xformers(function: Callable[..., Tensor], causal_mask: type) -> Callable[[Case, Inputs], Prepared]:
    def prepare(case: Case, inputs: Inputs) -> Prepared:
        other = case.window != (-1, -1) or case.padded or case.softcap > 0
        kinds = dict(mask=bool(case.mask), cache=case.cached)
        refuse(case, gqa=case.heads != case.kv_heads, window_padding_or_softcap=other, bias=case.bias is not None, **kinds)
        mask = causal_mask() if case.causal else None
        return Prepared(lambda q, k, v, bias=None: function(q, k, v, attn_bias=mask))

    return prepare


def flashinfer(module: Any) -> Callable[[Case, Inputs], Prepared]:
    def prepare(case: Case, inputs: Inputs) -> Prepared:
        bounded = case.window[1] >= 0 and not case.causal
        kinds = dict(fp32=case.dtype == "fp32", mask=bool(case.mask), cache=case.cached)
        refuse(case, bias=case.bias is not None, padding=case.padded, right_window=bounded, **kinds)
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
