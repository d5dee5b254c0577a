"""`torch.nn.functional.scaled_dot_product_attention`, argument for argument, computed by `tilewise.attention`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant

from ..api import attention
from ..checks import broadcasts, check_finite, typed
from ..errors import UnsupportedAttention
from ..masks import Causal


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
            Or nested, of layout torch.jagged, ``(B, Hq, j, E)``, as key and value then are, without ``attn_mask``.
        key: ``(..., H, S, E)``. Leading dimensions broadcast against those of ``query``.
        value: ``(..., H, S, Ev)``.
        attn_mask: broadcasts to ``(..., Hq, L, S)``; bool with True = takes part, or floating and added to the scores. Never copied. Or
            ``torch.nn.attention.bias.causal_lower_right(L, S)`` or ``causal_upper_left(L, S)``.
        dropout_p: probability in [0, 1) of dropping a probability; the bits come from torch's generator but are not torch's.
        is_causal: query i sees keys j <= i.
        scale: default ``1 / sqrt(E)``.
        enable_gqa: Hq may be a multiple of H: query head h reads key head ``h // (Hq // H)``.

    Returns:
        ``(..., Hq, L, Ev)``.

    Raises:
        ValueError: shapes that do not fit. TypeError: a wrong dtype.
        UnsupportedAttention: a combination that cannot be served, such as a mask of rank 5 whose strides would make it be copied.

    Example:
        >>> q, k, v = (torch.randn(2, 8, 16, 64) for _ in range(3))
        >>> scaled_dot_product_attention(q, k, v, is_causal=True).shape
        torch.Size([2, 8, 16, 64])
    """
    if isinstance(query, Tensor) and query.is_nested:
        return _jagged(query, key, value, attn_mask, dropout_p, is_causal, scale)
    inputs = {"query": query, "key": key, "value": value}
    for name, x in inputs.items():
        if typed(name, x, Tensor).ndim < 2:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must have rank 2 or more, (..., L, E)")
    q, k, v = _broadcast(query, key, value, enable_gqa)
    lower_right = False
    if isinstance(attn_mask, CausalBias):  # stands for a triangle; the memory of this tensor holds nothing
        upper_left, lower_right = _triangle(attn_mask, q.shape[-2], k.shape[-2])
        is_causal, attn_mask = is_causal or upper_left, None
    mask = None if attn_mask is None else _matrix(attn_mask, (*q.shape[:-1], k.shape[-2]))
    if scale is not None:
        check_finite("scale", scale)
    window_right = 0 if lower_right else -1
    if is_causal:
        num_queries, num_keys = q.shape[-2], k.shape[-2]
        if num_queries < num_keys:  # keys past the last query are seen by none
            k, v = k[..., :num_queries, :], v[..., :num_queries, :]
            if mask is not None and mask.shape[-1] == num_keys:
                mask = mask[..., :num_queries]
        window_right = max(num_queries - num_keys, 0)  # j <= i, counted from p = i + num_keys - num_queries
    if lower_right:
        window_right = 0
    leading = q.shape[max(4 - max(x.ndim for x in inputs.values()), 0) : -2]
    folding = _Folding(q, mask)
    q, k, v = folding.fold(q), folding.fold(k), folding.fold(v)
    boolean = mask is not None and mask.dtype == torch.bool
    out = attention(
        q,
        k,
        v,
        window_size=(-1, window_right),
        mask=folding.mask if boolean else None,
        bias=None if boolean else folding.mask,
        softmax_scale=scale,
        dropout_p=dropout_p,
        layout="bhsd",
    )
    return folding.unfold(out).reshape(*leading, *out.shape[2:])


def _jagged(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None
) -> Tensor:
    """Nested tensors of layout torch.jagged, (B, Hq, j, E): each item attends within itself."""
    if attn_mask is not None:
        raise UnsupportedAttention(
            "attn_mask was given with nested tensors; give a rule that counts inside each sequence to tilewise.attention, as mask="
        )
    # Where both have the same lengths, the two alignments are one.
    same = isinstance(key, Tensor) and key.is_nested and query.shape[-2] == key.shape[-2]
    return attention(
        query,
        key,
        value,
        causal=is_causal and same,
        mask=Causal(align="top_left") if is_causal and not same else None,
        softmax_scale=scale,
        dropout_p=dropout_p,
        layout="bhsd",
    )


def _triangle(bias: CausalBias, num_queries: int, num_keys: int) -> tuple[bool, bool]:
    """Whether the bias is aligned to the first query and key, and whether to the last."""
    if (bias.seq_len_q, bias.seq_len_kv) != (num_queries, num_keys):
        raise ValueError(
            f"attn_mask is a causal bias of {bias.seq_len_q} queries and {bias.seq_len_kv} keys, and the call has {num_queries} and "
            f"{num_keys}; make one of these sizes"
        )
    return bias.variant == CausalVariant.UPPER_LEFT, bias.variant == CausalVariant.LOWER_RIGHT


def _matrix(attn_mask: Tensor, wanted: tuple[int, ...]) -> Tensor:
    """The mask, checked against the scores' shape, with a dimension for the queries and one for the keys."""
    if typed("attn_mask", attn_mask, Tensor).dtype != torch.bool and not attn_mask.is_floating_point():
        raise TypeError(f"attn_mask has dtype {attn_mask.dtype}; it must be bool, True = takes part, or floating and added to the scores")
    given = tuple(attn_mask.shape)
    if not broadcasts(given, wanted):
        raise ValueError(f"attn_mask has shape {given}, which does not broadcast to (..., Hq, L, S) = {wanted}")
    return attn_mask[(None,) * max(2 - attn_mask.ndim, 0)]


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


class _Folding:
    """Leading dimensions folded into a batch and, together with the heads, into more heads, so that the mask is read in place.

    A mask of rank 4 varies along the batch or not, and along the heads or not. So the dimensions along which a mask of higher rank varies
    as it does along the heads join the heads, the others the batch. Head h of group g reads key head h // group in either case.
    """

    def __init__(self, q: Tensor, mask: Tensor | None) -> None:
        self.sizes, self.heads = q.shape[:-3], q.shape[-3]
        self.outer, self.inner = list(range(len(self.sizes))), []
        self.mask = mask
        if mask is None or q.ndim == 4:
            return
        given, rank = tuple(mask.shape), q.ndim
        mask = mask[(None,) * (rank - mask.ndim)]
        for dim in range(rank - 2):
            if mask.stride(dim) == 0:  # expanded by the caller
                mask = mask.narrow(dim, 0, 1)
        varies = [size != 1 for size in mask.shape[:-2]]
        self.inner = [dim for dim in self.outer if varies[dim] == varies[-1]]
        self.outer = [dim for dim in self.outer if varies[dim] != varies[-1]]
        mask = mask.permute(*self.outer, *self.inner, rank - 3, rank - 2, rank - 1)
        cut = len(self.outer)
        try:
            self.mask = mask.view(mask.shape[:cut].numel(), mask.shape[cut:-2].numel(), *mask.shape[-2:])
        except RuntimeError:
            raise UnsupportedAttention(
                f"attn_mask has shape {given} and strides that do not let its leading dimensions be read as a batch and heads, so it would "
                "have to be copied; pass attn_mask.contiguous()"
            ) from None

    def fold(self, x: Tensor) -> Tensor:
        rank, cut = x.ndim, len(self.outer)
        x = x.permute(*self.outer, *self.inner, rank - 3, rank - 2, rank - 1)
        return x.reshape(x.shape[:cut].numel(), x.shape[cut:-2].numel(), *x.shape[-2:])

    def unfold(self, out: Tensor) -> Tensor:
        order = self.outer + self.inner
        if order == sorted(order):
            return out
        rank = len(order)
        out = out.view(*(self.sizes[dim] for dim in order), self.heads, *out.shape[-2:])
        return out.permute(*(order.index(dim) for dim in range(rank)), rank, rank + 1, rank + 2)
