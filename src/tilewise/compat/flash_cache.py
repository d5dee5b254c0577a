"""FlashAttention's `flash_attn_with_kvcache`, versions 2 and 3, as a call of `tilewise.attention_with_kvcache`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..checks import typed
from ..errors import UnsupportedAttention
from ..kvcache import attention_with_kvcache
from ..kvcache.packed import attention_over_pages


def cached(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    *,
    return_softmax_lse: bool,
    **arguments: Any,
) -> Any:
    """Both versions' common part; `arguments` are named as tilewise names them."""
    if arguments["rotary_cos"] is not None:
        _check_rotary(q, k, arguments)
    out, aux = attention_with_kvcache(q, k_cache, v_cache, k, v, **arguments, return_aux="lse")
    return (out, aux.lse) if return_softmax_lse else out


def ragged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    *,
    cache_seqlens: Tensor | int | None,
    cache_batch_idx: Tensor | None,
    page_table: Tensor | None,
    return_softmax_lse: bool,
    **arguments: Any,
) -> Any:
    """Version 3's call with packed queries, ``(total, Hq, D)``. In a contiguous cache each row is one page."""
    items = typed("cu_seqlens_q", cu_seqlens_q, Tensor).shape[0] - 1
    if page_table is not None and cache_batch_idx is not None:
        raise UnsupportedAttention("cache_batch_idx with a page_table: the table says which pages an item has; index its rows instead")
    if page_table is None:
        rows = torch.arange(items, dtype=torch.int32, device=q.device) if cache_batch_idx is None else cache_batch_idx
        page_table = rows[:, None]
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((items,), cache_seqlens, dtype=torch.int32, device=q.device)
    out, aux = attention_over_pages(q, k_cache, v_cache, cu_seqlens_q, page_table, cache_seqlens, **arguments, return_aux="lse")
    return (out, aux.lse) if return_softmax_lse else out


def _check_rotary(q: Tensor, k: Tensor | None, arguments: dict[str, Any]) -> None:
    """FlashAttention turns query i by position cache_seqlens + i (in a call without causal order or window, every query by cache_seqlens);
    tilewise by the place that the query has among the keys. Where the two differ the call is refused."""
    if k is None:
        raise UnsupportedAttention("rotary_cos was given without k and v; FlashAttention turns queries only together with new keys")
    if k.shape[1] != q.shape[1]:
        raise UnsupportedAttention(
            f"rotary_cos with {q.shape[1]} queries and {k.shape[1]} new keys: FlashAttention and tilewise count the queries' positions "
            "differently there; turn q and k beforehand and pass no rotary_cos"
        )
    if q.shape[1] > 1 and not arguments["causal"] and max(arguments["window_size"]) < 0:
        raise UnsupportedAttention(
            f"rotary_cos with {q.shape[1]} queries in neither causal order nor a window: FlashAttention turns them all by one position, "
            "tilewise each by its own; turn q and k beforehand and pass no rotary_cos"
        )
    if arguments["cache_leftpad"] is not None:
        raise UnsupportedAttention(
            "rotary_cos with cache_leftpad: FlashAttention-2 counts positions from the first real key, tilewise from the start of the "
            "cache; turn q and k beforehand and pass no rotary_cos"
        )
