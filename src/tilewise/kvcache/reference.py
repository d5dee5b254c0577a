"""Attention over a cache by definition: every key is fetched by its position, one by one, and the dense specification does the rest."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..mask_base import Pair


def attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    cache_seqlens: Tensor | int | None = None,
    page_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = True,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    mask: Any = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    compute_dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns (out, lse, k_cache, v_cache): the output and LSE in `compute_dtype`, and the caches as they are after the append.

    Arguments as in `tilewise.attention_with_kvcache`; the caches that were given stay as they are.
    """
    batch, seqlen_q, heads, head_dim = q.shape
    page_size, kv_heads = k_cache.shape[1:3]
    capacity = page_size * (1 if page_table is None else page_table.shape[1])
    k_cache, v_cache = k_cache.clone(), v_cache.clone()
    appended = 0 if k is None else k.shape[1]
    scale = softmax_scale if softmax_scale is not None else (1.0 / math.sqrt(head_dim) if head_dim else 1.0)

    def slot(b: int, j: int) -> tuple[int, int]:
        """Where key j of item b lives."""
        if page_table is not None:
            return int(page_table[b, j // page_size]), j % page_size
        return (b if cache_batch_idx is None else int(cache_batch_idx[b])), j

    def length_before(b: int) -> int:
        if cache_seqlens is None:
            return capacity
        return cache_seqlens if isinstance(cache_seqlens, int) else int(cache_seqlens[b])

    def turned(x: Tensor, position: int) -> Tensor:
        """(H, D) of one token after the rotary embedding of its position."""
        x = x.to(compute_dtype)
        if rotary_cos is None or rotary_sin is None:
            return x
        angle = max(position, 0)  # a query before the first key is turned as at it
        return rotate(x, rotary_cos[angle].to(compute_dtype), rotary_sin[angle].to(compute_dtype), rotary_interleaved)

    if k is not None:
        for b in range(batch):
            for i in range(appended):
                row, place = slot(b, length_before(b) + i)
                k_cache[row, place] = turned(k[b, i], length_before(b) + i).to(k_cache.dtype)
                if v is not None:
                    v_cache[row, place] = v[b, i].to(v_cache.dtype)
                else:  # values are part of the keys
                    v_cache[row, place] = k_cache[row, place, :, : v_cache.shape[3]]

    outs, lses = [], []
    for b in range(batch):
        length = length_before(b) + appended
        places = [slot(b, j) for j in range(length)]
        keys = torch.stack([k_cache[place] for place in places]) if places else k_cache[0, :0]
        values = torch.stack([v_cache[place] for place in places]) if places else v_cache[0, :0]
        keys, values = keys.to(compute_dtype), values.to(compute_dtype)  # (len, Hk, D), (len, Hk, Dv)
        if k_descale is not None:
            keys = keys * k_descale.to(compute_dtype).expand(batch, kv_heads)[b, :, None]
        if v_descale is not None:
            values = values * v_descale.to(compute_dtype).expand(batch, kv_heads)[b, :, None]

        first = length - seqlen_q  # position of query 0
        queries = torch.stack([turned(q[b, i], first + i) for i in range(seqlen_q)]) if seqlen_q else q[b].to(compute_dtype)
        j = torch.arange(length, device=q.device).view(1, 1, 1, -1)
        visible = j >= (0 if cache_leftpad is None else int(cache_leftpad[b]))
        if isinstance(mask, Tensor):
            rank4 = mask[(None,) * (4 - mask.ndim)]
            own = rank4[b : b + 1] if rank4.shape[0] > 1 else rank4
            visible = visible & (own[..., :length] if own.shape[3] > 1 else own)
        elif mask is not None:
            p = (torch.arange(seqlen_q, device=q.device) + first).view(1, 1, -1, 1)
            h = torch.arange(heads, device=q.device).view(1, -1, 1, 1)
            at = Pair(torch.full_like(h[:, :1], b), h, p, j, p, capacity, capacity)  # a rule speaks of positions: its query index is p
            visible = visible & mask.predicate(at)
        out, lse = reference.attention(
            queries[None],
            keys[None],
            values[None],
            causal=causal,
            window_size=window_size,
            mask=visible,
            softmax_scale=scale,
            softcap=softcap,
            alibi_slopes=None if alibi_slopes is None else alibi_slopes.expand(batch, heads)[b],
            learnable_sink=learnable_sink,
            compute_dtype=compute_dtype,
        )
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses), k_cache, v_cache


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotary embedding (Su et al. 2021, "RoFormer", section 3.4.2) of the leading dimensions of x (..., D) by cos, sin (..., R / 2).

    Pair i, turned by angle i, is (x[2i], x[2i + 1]) where interleaved, else (x[i], x[i + R / 2]). Dimensions from R on stay.

    >>> rotate(torch.tensor([1.0, 0.0, 5.0]), torch.tensor([0.0]), torch.tensor([1.0]), interleaved=True)
    tensor([0., 1., 5.])
    """
    half = cos.shape[-1]
    turning, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        first, second = turning[..., 0::2], turning[..., 1::2]
    else:
        first, second = turning[..., :half], turning[..., half:]
    turned = first * cos - second * sin, first * sin + second * cos
    joined = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat([joined, rest], -1)
