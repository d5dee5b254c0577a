"""The functions of FlashAttention-3 (`flash_attn_interface`), argument for argument, computed by tilewise on any device.

`num_splits` and `pack_gqa` change no result and are left to tilewise. Each function also takes `s_aux` (or `learnable_sink`) by keyword.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..api import attention
from ..errors import UnsupportedAttention
from ..merging import merge
from .flash_options import bound, options, training

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
) -> Any:
    """Attention of dense batches; the arguments that `tilewise.compat.flash_attn.flash_attn_func` has too mean the same.

    Args:
        q: ``(B, Sq, Hq, D)``, k ``(B, Sk, Hk, D)``, v ``(B, Sk, Hk, Dv)``.
        k: see ``q``.
        v: see ``q``.
        softmax_scale: default ``1 / sqrt(D)``.
        causal: aligned bottom-right.
        qv: must be None.
        q_descale: must be None, as must k_descale and v_descale: for fp8, which is not supported.
        k_descale: see ``q_descale``.
        v_descale: see ``q_descale``.
        window_size: ``(left, right)``, inclusive; -1 is unlimited.
        attention_chunk: n > 0: a query at position p sees keys j with ``floor(j / n) == floor(p / n)``.
        softcap: c > 0 replaces a score s by ``c * tanh(s / c)``.
        num_splits: changes no result.
        pack_gqa: changes no result.
        deterministic: the same bits on every run; False leaves that to ``torch.use_deterministic_algorithms``.
        sm_margin: must be 0.
        return_attn_probs: also return the log-sum-exp.
        s_aux: ``(Hq,)`` logits of a learnable sink, also under the name ``learnable_sink``.
        learnable_sink: see ``s_aux``.

    Returns:
        ``out`` ``(B, Sq, Hq, Dv)``; with ``return_attn_probs`` ``(out, softmax_lse (B, Hq, Sq))``.

    Raises:
        ValueError, TypeError: as `tilewise.attention`. UnsupportedAttention: ``qv``, scales, ``sm_margin``.

    Source: Shah et al. 2024, "FlashAttention-3". Example:
        >>> q, k, v = (torch.randn(2, 128, 8, 64) for _ in range(3))
        >>> out, softmax_lse = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
        >>> softmax_lse.shape
        torch.Size([2, 8, 128])
    """
    out, aux = attention(
        q,
        k,
        v,
        **options(
            causal=causal, window_size=window_size, softmax_scale=softmax_scale, softcap=softcap, s_aux=s_aux,
            learnable_sink=learnable_sink, sm_margin=sm_margin, attention_chunk=attention_chunk, qv=qv,
        ),
        **training(deterministic=deterministic, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale),
        return_aux="lse",
    )  # fmt: skip
    return (out, aux.lse) if return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    return_softmax: bool = False,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
) -> Any:
    """`flash_attn_func` of ``qkv`` ``(B, S, 3, H, D)``, or of ``(B, S, Hq + 2 Hk, D)`` with ``num_heads_q`` = Hq; read in place.

    ``return_softmax`` is the name that some releases have for ``return_attn_probs``.

    >>> flash_attn_qkvpacked_func(torch.randn(2, 16, 8, 32), num_heads_q=4).shape
    torch.Size([2, 16, 4, 32])
    """
    if qkv.ndim == 5 and qkv.shape[2] == 3:
        q, k, v = qkv.unbind(2)
    elif qkv.ndim == 4 and num_heads_q is not None and qkv.shape[2] >= num_heads_q and (qkv.shape[2] - num_heads_q) % 2 == 0:
        kv_heads = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split([num_heads_q, kv_heads, kv_heads], 2)
    else:
        raise ValueError(
            f"qkv has shape {tuple(qkv.shape)} with num_heads_q={num_heads_q}; it must be (B, S, 3, H, D), or (B, S, Hq + 2 Hk, D) with "
            "num_heads_q = Hq"
        )
    return flash_attn_func(
        q, k, v, softmax_scale, causal, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, window_size=window_size,
        attention_chunk=attention_chunk, softcap=softcap, deterministic=deterministic, sm_margin=sm_margin,
        return_attn_probs=return_attn_probs or return_softmax, s_aux=s_aux, learnable_sink=learnable_sink, num_splits=num_splits,
        pack_gqa=pack_gqa,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    page_table: Tensor | None = None,
) -> Any:
    """`flash_attn_func` of packed sequences: q ``(total_q, Hq, D)``, k ``(total_k, Hk, D)``, v ``(total_k, Hk, Dv)``.

    ``cu_seqlens_*`` are int32 ``(sequences + 1,)`` offsets, ``seqused_*`` int32 ``(sequences,)`` lengths in use, ``max_seqlen_*`` bounds
    that are not needed here. With ``page_table`` int32 ``(sequences, n)`` k and v are ``(pages, page_size, Hk, D)``.

    Returns:
        ``out`` ``(total_q, Hq, Dv)``; with ``return_attn_probs`` ``(out, softmax_lse (Hq, total_q))``.
    """
    from ..varlen import attention_varlen

    out, aux = attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        bound(max_seqlen_q),
        bound(max_seqlen_k),
        **options(
            causal=causal, window_size=window_size, softmax_scale=softmax_scale, softcap=softcap, s_aux=s_aux,
            learnable_sink=learnable_sink, sm_margin=sm_margin, attention_chunk=attention_chunk, qv=qv,
        ),
        **training(
            deterministic=deterministic, seqused_q=seqused_q, seqused_k=seqused_k, q_descale=q_descale, k_descale=k_descale,
            v_descale=v_descale,
        ),
        page_table=page_table,
        return_aux="lse",
    )  # fmt: skip
    return (out, aux.lse) if return_attn_probs else out


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
) -> Any:
    """Attention of new queries over a cache; arguments as in `tilewise.compat.flash_attn.flash_attn_with_kvcache` and `flash_attn_func`.

    ``k_descale`` and ``v_descale`` ``(B, Hk)`` belong to a float8 cache. With ``cu_seqlens_q`` int32 ``(B + 1,)`` the queries are packed,
    ``(total, Hq, D)``; their keys must be in the cache already and ``cache_seqlens`` counts them in. ``cu_seqlens_k_new`` is without effect
    when no keys are appended; ``rotary_seqlens`` must be None, ``scheduler_metadata`` too: `get_scheduler_metadata` returns that.

    Returns:
        ``out`` ``(B, Sq, Hq, Dv)``; with ``return_softmax_lse`` ``(out, softmax_lse (B, Hq, Sq))``. Packed: ``(total, Hq, Dv)`` and
        ``(Hq, total)``.
    """
    from .flash_cache import cached, ragged

    appended = "append the new keys before the call, and pass neither k nor v"
    refused = {
        "cu_seqlens_k_new": (None if k is None else cu_seqlens_k_new, appended),
        "rotary_seqlens": (rotary_seqlens, "turn q and k before the call"),
        "q_descale": (q_descale, "pass q in float16 or bfloat16; the cache alone may be float8"),
    }
    if cu_seqlens_q is not None:
        refused |= {
            "k with cu_seqlens_q": (k, appended),
            "rotary_cos with cu_seqlens_q": (rotary_cos, "turn q before the call"),
            "cache_leftpad with cu_seqlens_q": (cache_leftpad, "let each item's keys start at 0"),
        }
    for name, (value, way) in refused.items():
        if value is not None:
            raise UnsupportedAttention(f"flash_attn_with_kvcache does not take {name}; {way}")
    shared = options(
        causal=causal, window_size=window_size, softmax_scale=softmax_scale, softcap=softcap, s_aux=s_aux, learnable_sink=learnable_sink,
        sm_margin=sm_margin, attention_chunk=attention_chunk, qv=qv, scheduler_metadata=scheduler_metadata,
    )  # fmt: skip
    shared |= dict(
        cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx, page_table=page_table, k_descale=k_descale, v_descale=v_descale,
        return_softmax_lse=return_softmax_lse,
    )  # fmt: skip
    if cu_seqlens_q is not None:
        return ragged(q, k_cache, v_cache, cu_seqlens_q, **shared)
    return cached(
        q, k_cache, v_cache, k, v, rotary_cos=rotary_cos, rotary_sin=rotary_sin, rotary_interleaved=rotary_interleaved,
        cache_leftpad=cache_leftpad, num_splits=num_splits, **shared,
    )  # fmt: skip


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over the union of disjoint sets of keys, from its parts.

    Args:
        out_partial: float32 ``(parts, B, S, H, D)``.
        lse_partial: float32 ``(parts, B, S, H)``, heads last.
        out: a tensor ``(B, S, H, D)`` to write to.
        out_dtype: dtype of the result where ``out`` is not given; float32 by default.

    Returns:
        ``(out, lse (B, S, H))``.

    >>> out, lse = flash_attn_combine(torch.randn(3, 1, 8, 2, 16), torch.randn(3, 1, 8, 2))
    >>> out.shape, lse.shape
    (torch.Size([1, 8, 2, 16]), torch.Size([1, 8, 2]))
    """
    merged, lse = merge(out_partial.unbind(), lse_partial.transpose(-1, -2).unbind())
    result = merged.to(out_dtype or merged.dtype) if out is None else out.copy_(merged)
    return result, lse.transpose(-1, -2)


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> None:
    """None, whatever the arguments: tilewise plans each call by itself, without reading lengths on the host.

    >>> get_scheduler_metadata(1, 1, 128, 8, 8, 64, torch.tensor([100], dtype=torch.int32)) is None
    True
    """
