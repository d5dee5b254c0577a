"""`torch.nn.functional.scaled_dot_product_attention`, argument for argument, computed by `tilewise.attention`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..api import attention
from ..checks import typed
from ..errors import UnsupportedAttention


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Exact attention with torch's signature and meaning, in O(N) memory on every device.

    As in torch, ``is_causal`` is aligned top-left (query i sees keys j <= i, whatever the two lengths are) and ``dropout_p`` acts on every
    call: pass 0 outside training. A query whose keys are all masked gives 0. ``attn_mask`` and ``is_causal`` together are AND-ed.

    Args:
        query: ``(..., Hq, L, E)``; fewer dimensions, ``(L, E)`` or ``(Hq, L, E)``, will do. float16, bfloat16, float32 (float64 on CPU).
        key: ``(..., H, S, E)``. Leading dimensions broadcast against those of ``query``.
        value: ``(..., H, S, Ev)``.
        attn_mask: broadcasts to ``(..., Hq, L, S)``; bool with True = takes part, or floating and added to the scores. Never copied.
        dropout_p: probability in [0, 1) of dropping a probability; the bits come from torch's generator but are not torch's.
        is_causal: query i sees keys j <= i.
        scale: default ``1 / sqrt(E)``.
        enable_gqa: Hq may be a multiple of H: query head h reads key head ``h // (Hq // H)``.

    Returns:
        ``(..., Hq, L, Ev)``, contiguous.

    Raises:
        ValueError: shapes that do not fit. TypeError: a wrong dtype. UnsupportedAttention: a combination that cannot be served, such as a
        mask that varies along dimensions which are neither outer nor inner, so that it would have to be copied.

    Example:
        >>> q, k, v = (torch.randn(2, 8, 16, 64) for _ in range(3))
        >>> scaled_dot_product_attention(q, k, v, is_causal=True).shape
        torch.Size([2, 8, 16, 64])
    """
    inputs = {"query": query, "key": key, "value": value}
    for name, x in inputs.items():
        if typed(name, x, Tensor).ndim < 2:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must have rank 2 or more, (..., L, E)")
    q, k, v = _broadcast(query, key, value, enable_gqa)
    mask = None if attn_mask is None else typed("attn_mask", attn_mask, Tensor)
    window_right = -1
    if is_causal:
        num_queries, num_keys = q.shape[-2], k.shape[-2]
        if num_queries < num_keys:  # keys past the last query are seen by none
            k, v = k[..., :num_queries, :], v[..., :num_queries, :]
            mask = mask if mask is None or mask.shape[-1] == 1 else mask[..., :num_queries]
        window_right = max(num_queries - num_keys, 0)  # j <= i, counted from p = i + num_keys - num_queries
    given_rank = max(x.ndim for x in inputs.values())
    leading = q.shape[max(4 - given_rank, 0) : -2]
    q, k, v, mask = _rank_four(q, k, v, mask)
    boolean = mask is not None and mask.dtype == torch.bool
    out = attention(
        q,
        k,
        v,
        window_size=(-1, window_right),
        mask=mask if boolean else None,
        bias=None if boolean else mask,
        softmax_scale=scale,
        dropout_p=dropout_p,
        layout="bhsd",
    )
    return out.reshape(*leading, *out.shape[2:])


def _broadcast(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of rank 4 or more with equal leading dimensions, as views; the head counts are left to grouped-query attention."""
    rank = max(4, query.ndim, key.ndim, value.ndim)
    q, k, v = (x[(None,) * (rank - x.ndim)] for x in (query, key, value))
    heads, kv_heads = q.shape[-3], k.shape[-3]
    if v.shape[-3] != kv_heads:
        if enable_gqa or 1 not in (kv_heads, v.shape[-3]):
            raise ValueError(f"key has {kv_heads} heads but value has {v.shape[-3]}; they must agree")
        kv_heads = max(kv_heads, v.shape[-3])
    if heads != kv_heads and kv_heads != 1 and not enable_gqa:
        if heads != 1:
            raise ValueError(
                f"query has {heads} heads and key has {kv_heads}; they must agree, or pass enable_gqa=True to share each key head among "
                "several query heads"
            )
        heads = kv_heads
    try:
        leading = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    except RuntimeError:
        shapes = f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
        raise ValueError(f"query, key and value have shapes {shapes}; the dimensions before the last two must broadcast") from None
    q = q.expand(*leading, heads, *q.shape[-2:])
    return q, k.expand(*leading, kv_heads, *k.shape[-2:]), v.expand(*leading, kv_heads, *v.shape[-2:])


def _rank_four(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The leading dimensions gathered into a batch and, where the mask asks for it, further ones into the heads.

    A mask of rank 5 or more can be read in place when the dimensions that it varies along can be cut in two runs, each wholly broadcast
    or wholly present. Head h of group g then reads key head h // group as before, since groups stay together.
    """
    if mask is None or (q.ndim == 4 and mask.ndim <= 4):
        q, k, v = (x.reshape(-1, *x.shape[-3:]) for x in (q, k, v))
        return q, k, v, mask
    sizes = q.shape[:-2]
    given = tuple(mask.shape)
    shape = (1,) * (q.ndim - mask.ndim) + given
    if len(shape) > q.ndim or any(have not in (1, want) for have, want in zip(shape, sizes, strict=False)):
        raise ValueError(f"attn_mask has shape {given}, which does not broadcast to (..., Hq, L, S) with leading {tuple(sizes)}")
    for cut in range(len(sizes) - 1, -1, -1):
        outer, inner = _gathered(shape[:cut], sizes[:cut]), _gathered(shape[cut:-2], sizes[cut:])
        if outer is None or inner is None:
            continue
        try:
            mask = mask.view(outer, inner, *shape[-2:])
        except RuntimeError:  # its strides do not let these dimensions be one
            continue
        q, k, v = (x.reshape(x.shape[:cut].numel(), -1, *x.shape[-2:]) for x in (q, k, v))
        return q, k, v, mask
    raise UnsupportedAttention(
        f"attn_mask has shape {given} and strides {mask.stride()} for leading dimensions {tuple(sizes)}: these cannot be read as a batch and "
        "heads, so it would have to be copied. Pass it contiguous and in full shape, or reorder the leading dimensions"
    )


def _gathered(mask_sizes: tuple[int, ...], sizes: torch.Size) -> int | None:
    """The size of a run of mask dimensions as one: 1 or the whole product; None where the run mixes both."""
    if all(size == 1 for size in mask_sizes):
        return 1
    return sizes.numel() if mask_sizes == tuple(sizes) else None
