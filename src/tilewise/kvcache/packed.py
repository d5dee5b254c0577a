"""Packed queries over keys in pages: one call for prompts and decoding tokens together, as serving engines make it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..api import Aux
from ..checks import check_finite, check_return_aux, check_window, typed
from ..errors import UnsupportedAttention
from ..mask_base import traced
from ..masks import Mask
from ..windows import intersection
from . import checks, ops
from .api import cast_new, lower_rule, per_head


def attention_over_pages(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    cu_seqlens_q: Tensor,
    page_table: Tensor,
    seqused_k: Tensor | None = None,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    mask: Any = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    check_values: bool = False,
    return_aux: str | Sequence[str] = (),
) -> Any:
    """Attention of packed queries over keys that are in pages already, for inference.

    Sequence b owns the queries ``q[cu_seqlens_q[b] : cu_seqlens_q[b + 1]]`` and the first ``seqused_k[b]`` keys of its pages; its last
    query stands at its last key. Rows that belong to no sequence give 0 (LSE -inf). Nothing waits for the device.

    Args:
        q: ``(total, Hq, D)``. The other arguments are those of `attention_with_kvcache`, without an append.
        k_pages: ``(pages, page_size, Hk, D)``.
        v_pages: ``(pages, page_size, Hk, Dv)``.
        cu_seqlens_q: int32 ``(n + 1,)``: where each sequence begins, and the end of the last one.
        page_table: int32 ``(n, m)``: the pages of each sequence in order.
        seqused_k: int32 ``(n,)``: the keys of each sequence, those of its queries included. None: all that its pages hold.
        mask: a rule over positions, of which the functions that `masks.Custom` takes get the position as their query index.

    Returns:
        ``out`` ``(total, Hq, Dv)``; with ``return_aux="lse"`` a pair ``(out, Aux)``, ``lse`` being ``(Hq, total)``.

    Raises:
        ValueError, TypeError, UnsupportedAttention: as `attention_with_kvcache`.

    Example:
        >>> pages = torch.randn(2, 8, 4, 2, 16)  # keys and values, 8 pages of 4
        >>> table = torch.tensor([[0, 1, 2], [5, 4, 3]], dtype=torch.int32)
        >>> offsets, used = torch.tensor([0, 1, 6], dtype=torch.int32), torch.tensor([9, 12], dtype=torch.int32)
        >>> attention_over_pages(torch.randn(6, 4, 16), *pages, offsets, table, used, causal=True).shape
        torch.Size([6, 4, 16])
    """
    typed("q", q, Tensor)
    if q.ndim != 3:
        raise ValueError(f"q has shape {tuple(q.shape)}; packed queries have rank 3, (total, Hq, D)")
    q = cast_new(q, None, None)[0]
    checks.refuse_gradients(
        q=q, k=k_pages, v=v_pages, alibi_slopes=alibi_slopes, learnable_sink=learnable_sink, cu_seqlens_q=cu_seqlens_q,
        page_table=page_table, seqused_k=seqused_k,
    )  # fmt: skip
    names = check_return_aux(return_aux)
    if set(names) - {"lse"}:
        raise UnsupportedAttention(f"return_aux is {return_aux!r}; over pages only 'lse' can be returned")
    items = check_offsets("cu_seqlens_q", cu_seqlens_q, q)
    typed("page_table", page_table, Tensor)
    sizes = checks.check_tensors(q[None], k_pages, v_pages, None, None, page_table, None, items)
    checks.check_out_dtype(out_dtype, q.dtype)
    used = checks.vector("seqused_k", seqused_k, sizes, "the keys of each sequence")
    left, right = check_window(window_size)
    right = 0 if typed("causal", causal, bool) else right
    scale = (sizes.head_dim**-0.5 if sizes.head_dim else 1.0) if softmax_scale is None else check_finite("softmax_scale", softmax_scale)
    if check_finite("softcap", softcap) < 0:
        raise ValueError(f"softcap is {softcap}; it must be positive, or 0 for no cap")
    mask_mod = ""
    captured: list[Tensor] = []
    if isinstance(mask, Tensor):
        raise UnsupportedAttention("mask is a tensor; over pages a mask is a rule from tilewise.masks, as the rows of sequences differ")
    if mask is not None:
        window, mask_mod, captured = lower_rule(mask, sizes)
        left, right = intersection((left, right), window)
    if check_values:
        offsets = cu_seqlens_q.tolist()
        if offsets[0] < 0 or offsets[-1] > q.shape[0] or any(a > b for a, b in pairwise(offsets)):
            raise ValueError(f"cu_seqlens_q is {offsets}; offsets must not decrease, and lie between 0 and total = {q.shape[0]}")
        checks.check_values_on_device(used, page_table, None, None, sizes)
    out, lse = ops.attention_cached(
        q=q[None],
        k_cache=k_pages,
        v_cache=v_pages,
        cu_seqlens_q=cu_seqlens_q,
        cache_seqlens=used,
        page_table=page_table,
        alibi_slopes=per_head("alibi_slopes", alibi_slopes, [(sizes.heads,), (items, sizes.heads)], sizes),
        sink=per_head("learnable_sink", learnable_sink, [(sizes.heads,)], sizes),
        k_descale=checks.descale("k_descale", k_descale, k_pages, sizes),
        v_descale=checks.descale("v_descale", v_descale, k_pages, sizes),
        captured=captured,
        softmax_scale=scale,
        softcap=float(softcap),
        window_left=left,
        window_right=right,
        mask_mod=mask_mod,
        out_dtype=out_dtype,
    )
    return (out[0], Aux(lse=lse)) if names else out[0]


def check_offsets(name: str, x: Tensor, q: Tensor) -> int:
    """How many sequences the offsets describe."""
    typed(name, x, Tensor)
    if x.dtype != torch.int32 or x.ndim != 1 or x.shape[0] == 0:
        raise ValueError(f"{name} is {x.dtype} of shape {tuple(x.shape)}; it must be int32, (n + 1,)")
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device} but q is on {q.device}; move it with .to(q.device)")
    return x.shape[0] - 1


def varlen_over_pages(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, page_table: Tensor, **arguments: Any
) -> Any:
    """`attention_varlen` with a page table, by its own arguments: served where it means what `attention_over_pages` means, else refused."""
    served = ("seqused_k", "causal", "window_size", "mask", "softmax_scale", "softcap", "alibi_slopes", "learnable_sink", "k_descale",
              "v_descale", "out_dtype", "check_values", "return_aux")  # fmt: skip
    given = {name: value for name, value in arguments.items() if name in served}
    off = {"bias": None, "score_mod": None, "dropout_p": 0.0, "seqused_q": None, "q_descale": None, "backend": "auto"}
    for name, nothing in off.items():
        if (value := arguments.get(name, nothing)) is not nothing and value != nothing:
            raise UnsupportedAttention(f"{name} was given with a page_table; over pages attention is for inference and takes no {name}")
    for name, x in (("k", k), ("v", v)):
        typed(name, x, Tensor)
        if x.ndim != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; with a page_table it must have rank 4, (pages, page_size, Hk, D)")
    typed("page_table", page_table, Tensor)
    if cu_seqlens_k is not None:
        items = check_offsets("cu_seqlens_k", cu_seqlens_k, q)
        if items != check_offsets("cu_seqlens_q", cu_seqlens_q, q):
            raise ValueError(
                f"cu_seqlens_q describes {cu_seqlens_q.shape[0] - 1} sequences and cu_seqlens_k {items}; every sequence needs both"
            )
        lengths, used = cu_seqlens_k.cummax(0).values.diff(), given.get("seqused_k")
        if isinstance(used, Tensor) and tuple(used.shape) != (items,):
            raise ValueError(f"seqused_k has shape {tuple(used.shape)}; it must be (sequences,) = ({items},), one length for each of them")
        given["seqused_k"] = lengths if used is None else torch.minimum(lengths, used)
    mask = given.get("mask")
    if isinstance(mask, Mask) and page_table.ndim == 2:
        capacity = k.shape[1] * page_table.shape[1]
        text, _ = traced(mask, capacity, capacity, q.device)
        if re.search(r"\bq_idx\b", text):
            raise UnsupportedAttention(
                f"mask {mask!r} numbers the queries of a sequence; over pages a rule may speak of positions and keys; with a cache, "
                "attention_with_kvcache gives a rule the position as its query index"
            )
    return attention_over_pages(q, k, v, cu_seqlens_q, page_table, **given)
