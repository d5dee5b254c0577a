"""The functions of FlashAttention-2 (`flash_attn` 2.8), argument for argument, computed by tilewise on any device.

Beyond that signature each function takes, by keyword, what FlashAttention-3 and its relatives added: `s_aux` (or `learnable_sink`), and
where they apply `seqused_q`, `seqused_k`, `page_table`, `num_splits`, `pack_gqa`, `sm_margin`. float32 inputs, head dims of any size and
value heads of another size work too. What differs in meaning is listed in `docs/compat.md`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..api import attention
from ..checks import typed
from . import bert_padding
from .flash_options import bound, one_of, options, refuse_probabilities, training

__all__ = [
    "bert_padding",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Any:
    """Attention of dense batches.

    Args:
        q: ``(B, Sq, Hq, D)``; float16, bfloat16 or float32, any strides.
        k: ``(B, Sk, Hk, D)``, Hq a multiple of Hk.
        v: ``(B, Sk, Hk, Dv)``.
        dropout_p: probability of dropping a probability; 0 outside training.
        softmax_scale: default ``1 / sqrt(D)``.
        causal: aligned bottom-right: query i sees keys ``j <= i + Sk - Sq``.
        window_size: ``(left, right)``, inclusive around ``i + Sk - Sq``; -1 is unlimited.
        softcap: c > 0 replaces a score s by ``c * tanh(s / c)``.
        alibi_slopes: ``(Hq,)`` or ``(B, Hq)``, adds ``-slope * |i + Sk - Sq - j|``.
        deterministic: the same bits on every run; False leaves that to ``torch.use_deterministic_algorithms``.
        return_attn_probs: also return the log-sum-exp. The third result is None: probabilities are never stored.
        s_aux: ``(Hq,)`` logits of a learnable sink, also under the name ``learnable_sink``.
        learnable_sink: see ``s_aux``.
        seqused_q: int32 ``(B,)``: how many leading queries of each item are real.
        seqused_k: int32 ``(B,)``: how many leading keys.
        num_splits: changes no result; tilewise decides how the work is split.
        pack_gqa: as ``num_splits``.
        sm_margin: must be 0.

    Returns:
        ``out`` ``(B, Sq, Hq, Dv)``; with ``return_attn_probs`` ``(out, softmax_lse (B, Hq, Sq) float32, None)``.

    Raises:
        ValueError, TypeError: as `tilewise.attention`. UnsupportedAttention: probabilities under dropout, ``sm_margin``.

    Source: Dao 2023, "FlashAttention-2". Example:
        >>> q, k, v = (torch.randn(2, 128, 8, 64) for _ in range(3))
        >>> flash_attn_func(q, k, v, causal=True).shape
        torch.Size([2, 128, 8, 64])
    """
    refuse_probabilities(return_attn_probs, dropout_p)
    out, aux = attention(
        q,
        k,
        v,
        **options(
            causal=causal,
            window_size=window_size,
            softmax_scale=softmax_scale,
            softcap=softcap,
            s_aux=s_aux,
            learnable_sink=learnable_sink,
            sm_margin=sm_margin,
        ),
        **training(dropout_p=dropout_p, deterministic=deterministic, alibi_slopes=alibi_slopes, seqused_q=seqused_q, seqused_k=seqused_k),
        return_aux="lse",
    )
    return (out, aux.lse, None) if return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Any:
    """`flash_attn_func` of ``qkv`` ``(B, S, 3, H, D)``, read in place; the rest as there.

    >>> flash_attn_qkvpacked_func(torch.randn(2, 16, 3, 4, 32)).shape
    torch.Size([2, 16, 4, 32])
    """
    q, k, v = _unpack("qkv", qkv, 5, 3)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
        s_aux=s_aux, learnable_sink=learnable_sink, seqused_q=seqused_q, seqused_k=seqused_k, num_splits=num_splits, pack_gqa=pack_gqa,
        sm_margin=sm_margin,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Any:
    """`flash_attn_func` of q ``(B, Sq, Hq, D)`` and ``kv`` ``(B, Sk, 2, Hk, D)``, read in place; the rest as there.

    >>> flash_attn_kvpacked_func(torch.randn(2, 16, 4, 32), torch.randn(2, 24, 2, 2, 32)).shape
    torch.Size([2, 16, 4, 32])
    """
    k, v = _unpack("kv", kv, 5, 2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
        s_aux=s_aux, learnable_sink=learnable_sink, seqused_q=seqused_q, seqused_k=seqused_k, num_splits=num_splits, pack_gqa=pack_gqa,
        sm_margin=sm_margin,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Any:
    """`flash_attn_func` of sequences packed one after the other, each attending within itself.

    Args:
        q: ``(total_q, Hq, D)``, and likewise k ``(total_k, Hk, D)`` and v ``(total_k, Hk, Dv)``.
        k: see ``q``.
        v: see ``q``.
        cu_seqlens_q: int32 ``(sequences + 1,)``: sequence b owns queries ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1] - 1``.
        cu_seqlens_k: likewise for the keys. Causal masks are aligned bottom-right in each sequence.
        max_seqlen_q: the longest query sequence; not needed here.
        max_seqlen_k: the longest key sequence; not needed here.
        block_table: int32 ``(sequences, n)``, also under the name ``page_table``: the pages of each sequence, k and v then being
            ``(pages, page_size, Hk, D)``.

    The other arguments are those of `flash_attn_func`.

    Returns:
        ``out`` ``(total_q, Hq, Dv)``; with ``return_attn_probs`` ``(out, softmax_lse (Hq, total_q), None)``.
    """
    from ..varlen import attention_varlen

    refuse_probabilities(return_attn_probs, dropout_p)
    out, aux = attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        bound(max_seqlen_q),
        bound(max_seqlen_k),
        **options(
            causal=causal,
            window_size=window_size,
            softmax_scale=softmax_scale,
            softcap=softcap,
            s_aux=s_aux,
            learnable_sink=learnable_sink,
            sm_margin=sm_margin,
        ),
        **training(dropout_p=dropout_p, deterministic=deterministic, alibi_slopes=alibi_slopes, seqused_q=seqused_q, seqused_k=seqused_k),
        page_table=one_of(block_table=block_table, page_table=page_table),
        return_aux="lse",
    )
    return (out, aux.lse, None) if return_attn_probs else out


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Any:
    """`flash_attn_varlen_func` of ``qkv`` ``(total, 3, H, D)``, read in place; the rest as there."""
    q, k, v = _unpack("qkv", qkv, 4, 3)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
        s_aux=s_aux, learnable_sink=learnable_sink, seqused_q=seqused_q, seqused_k=seqused_k, num_splits=num_splits, pack_gqa=pack_gqa,
        sm_margin=sm_margin,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Any:
    """`flash_attn_varlen_func` of q ``(total_q, Hq, D)`` and ``kv`` ``(total_k, 2, Hk, D)``, read in place; the rest as there."""
    k, v = _unpack("kv", kv, 4, 2)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
        s_aux=s_aux, learnable_sink=learnable_sink, seqused_q=seqused_q, seqused_k=seqused_k, num_splits=num_splits, pack_gqa=pack_gqa,
        sm_margin=sm_margin,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    page_table: Tensor | None = None,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Any:
    """Attention of new queries over a cache, for inference; new keys and values are written into the cache first.

    Args:
        q: ``(B, Sq, Hq, D)``.
        k_cache: ``(rows, capacity, Hk, D)``, or ``(pages, page_size, Hk, D)`` with a table. Written in place; v_cache likewise with Dv.
        v_cache: see ``k_cache``.
        k: ``(B, S, Hk, D)``, new keys for positions ``cache_seqlens[b]`` and following; v likewise.
        v: see ``k``.
        rotary_cos: ``(positions, rotary_dim / 2)``, applied to q and k; only together with k and v. rotary_sin likewise.
        rotary_sin: see ``rotary_cos``.
        cache_seqlens: int32 ``(B,)`` or one int: keys in the cache before the append. Not updated.
        cache_batch_idx: int32 ``(B,)``: the cache row of each item.
        cache_leftpad: int32 ``(B,)``: where each item's keys start.
        block_table: int32 ``(B, n)``, also under the name ``page_table``.
        softmax_scale: this and the following arguments as in `flash_attn_func`; causal and windows count from the last new key.
        causal: see ``softmax_scale``.
        window_size: see ``softmax_scale``.
        softcap: see ``softmax_scale``.
        rotary_interleaved: True pairs dimensions (0, 1), (2, 3), ...; False pairs (0, rotary_dim / 2), ...
        alibi_slopes: see ``softmax_scale``.
        num_splits: parts that the keys are split into; 0 lets tilewise choose. Changes no result beyond rounding.
        return_softmax_lse: also return the log-sum-exp.
        s_aux: see ``softmax_scale``.
        learnable_sink: see ``softmax_scale``.
        page_table: see ``block_table``.
        pack_gqa: changes no result.
        sm_margin: must be 0.

    Returns:
        ``out`` ``(B, Sq, Hq, Dv)``; with ``return_softmax_lse`` ``(out, softmax_lse (B, Hq, Sq))``.

    Raises:
        UnsupportedAttention: rotary embeddings where FlashAttention counts positions otherwise than from the end (see `docs/compat.md`).
    """
    from .flash_cache import cached

    return cached(
        q, k_cache, v_cache, k, v, rotary_cos=rotary_cos, rotary_sin=rotary_sin, rotary_interleaved=rotary_interleaved,
        cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, alibi_slopes=alibi_slopes,
        page_table=one_of(block_table=block_table, page_table=page_table), num_splits=num_splits, return_softmax_lse=return_softmax_lse,
        **options(
            causal=causal, window_size=window_size, softmax_scale=softmax_scale, softcap=softcap, s_aux=s_aux,
            learnable_sink=learnable_sink, sm_margin=sm_margin,
        ),
    )  # fmt: skip


def _unpack(name: str, packed: Tensor, rank: int, count: int) -> tuple[Tensor, ...]:
    """The tensors that share one, along the dimension before the heads."""
    if typed(name, packed, Tensor).ndim != rank or packed.shape[-3] != count:
        wanted = ", ".join(["B", "S"] if rank == 5 else ["total"]) + f", {count}, H, D"
        raise ValueError(f"{name} has shape {tuple(packed.shape)}; it must be ({wanted})")
    return torch.unbind(packed, -3)
