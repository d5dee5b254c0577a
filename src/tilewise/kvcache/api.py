"""`attention_with_kvcache`: validation in words, the append, the read. No kernels and no Triton here."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import repeats
from ..api import Aux, autocast
from ..checks import broadcasts, check_finite, check_return_aux, check_window, typed
from ..errors import UnsupportedAttention
from ..expressions import Graph, Tracing, same_device
from ..mask_base import And, Pair, conjuncts
from ..masks import Mask
from ..score_mod import check_reads, program_text
from ..windows import intersection
from . import checks, ops
from .checks import CacheSizes


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
    num_splits: int = 0,
    batch_invariant: bool = False,
    check_values: bool = False,
    out_dtype: torch.dtype | None = None,
    return_aux: str | Sequence[str] = (),
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> Any:
    """Attention of new queries over a cache of keys and values, for inference. New keys and values, if given, are appended first.

    Item b has ``cache_seqlens[b]`` keys, plus those of ``k``. Its query i stands at position ``p = i + keys - Sq``: the last query stands
    at the last key. Causal, windows, ALiBi, mask rules and rotary embeddings use p. The caches are written in place and never copied, and
    ``cache_seqlens`` is not updated. Nothing waits for the device, so a call can be captured in a CUDA graph and replayed with other
    lengths and tables in the same tensors.

    Args:
        q: ``(B, Sq, Hq, D)``; float16, bfloat16, float32 or (in plain PyTorch) float64. Any strides, as for all tensors here.
        k_cache: ``(B, capacity, Hk, D)``, or ``(pages, page_size, Hk, D)`` with a ``page_table``. Hq is a multiple of Hk. In the dtype of
            q, or float8_e4m3fn (read only).
        v_cache: as ``k_cache`` with Dv for D; may be a view of it (``k_cache[..., :512]`` in multi-head latent attention).
        k: ``(B, S, Hk, D)``, new keys for positions ``cache_seqlens[b]`` and following. Needs ``cache_seqlens``.
        v: ``(B, S, Hk, Dv)``, their values; None where ``v_cache`` is a view of ``k_cache``.
        cache_seqlens: int32 ``(B,)``, or one int for all: the keys in the cache before the append, left padding included. None: all.
        page_table: int32 ``(B, n)``: the pages of each item in order; entries past its length are not read. Items may share pages.
        cache_batch_idx: int32 ``(B,)``: the cache row of each item, where that is not b.
        cache_leftpad: int32 ``(B,)``: how many leading positions of each item hold no key.
        rotary_cos: ``(positions, R / 2)`` with ``R <= D`` and at least as many positions as the cache has room for: turns the first R
            dims of q and of new keys by the angles of their positions (Su et al. 2021, "RoFormer"); a query before the first key (p < 0)
            is turned as at position 0. Keys in the cache are already turned.
        rotary_sin: as ``rotary_cos``.
        rotary_interleaved: True turns dims (2i, 2i + 1) together, False dims (i, i + R / 2).
        causal: a query sees keys j <= p.
        window_size: ``(left, right)``: a query sees keys p - left <= j <= p + right, inclusive; -1 is unlimited.
        mask: a rule from `tilewise.masks` over positions: its query index is p, its sequence the whole capacity. Or a bool tensor over the
            rows of this call that broadcasts to ``(B, Hq, Sq, capacity)``, True = visible.
        softmax_scale: default ``1 / sqrt(D)``.
        softcap: c > 0 replaces a score s by ``c * tanh(s / c)``.
        alibi_slopes: ``(Hq,)`` or ``(B, Hq)``: adds ``-slope * |p - j|``.
        learnable_sink: ``(Hq,)`` logits of a phantom key without value.
        num_splits: into how many parts the keys of an item are split on a GPU; 0 chooses from device and shapes. The result does not
            depend on it beyond rounding.
        batch_invariant: the same bits for an item whatever else is in the batch: parts then end at fixed positions.
        check_values: also check what lives on the device (lengths, rows, pages, slots written twice), at the price of a synchronisation.
            Without it values out of range are clamped on reading and dropped on writing: never an access outside the tensors.
        out_dtype: dtype of the output, that of q by default; ``torch.float32`` keeps partial results exact for `merge`.
        return_aux: ``"lse"`` or nothing.
        k_descale: float32 ``(Hk,)`` or ``(B, Hk)``: what the keys of a float8 cache are multiplied by. ``v_descale`` likewise.
        v_descale: see ``k_descale``.

    Returns:
        ``out`` ``(B, Sq, Hq, Dv)``, contiguous; with ``return_aux="lse"`` a pair ``(out, Aux)``, ``lse`` being ``(B, Hq, Sq)``.

    Raises:
        ValueError: a shape, length or number that has no meaning. TypeError: a wrong type or dtype.
        UnsupportedAttention: a combination that cannot be served; an input that requires grad.

    Sources: Dao et al. 2023, "Flash-Decoding for long-context inference" (splitting the keys); Kwon et al. 2023, "Efficient memory
    management for large language model serving with PagedAttention" (pages); Ainslie et al. 2023, "GQA" (grouped heads).

    Example:
        >>> k_cache, v_cache = torch.zeros(2, 64, 2, 16), torch.zeros(2, 64, 2, 16)
        >>> lengths = torch.tensor([5, 17], dtype=torch.int32)  # keys that are there already
        >>> q, k, v = torch.randn(2, 1, 4, 16), torch.randn(2, 1, 2, 16), torch.randn(2, 1, 2, 16)
        >>> out = attention_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)
        >>> out.shape, torch.equal(k_cache[1, 17], k[1, 0])
        (torch.Size([2, 1, 4, 16]), True)
    """
    tensors = (
        q, k_cache, v_cache, k, v, cache_seqlens, page_table, cache_batch_idx, cache_leftpad, rotary_cos, rotary_sin, alibi_slopes,
        learnable_sink, k_descale, v_descale,
    )  # fmt: skip

    found: Any = None
    rules: tuple[Any, ...] = (rotary_interleaved, causal, softmax_scale, softcap, num_splits, batch_invariant, out_dtype)
    if mask is None and not torch.compiler.is_compiling():
        found = repeats.again_over_a_cache(tensors, *rules, window_size, check_values, return_aux)
    if found is None:
        found = _looked_up(tensors, rules, mask, window_size, check_values, return_aux)
    return (found[0], Aux(lse=found[1])) if return_aux else found[0]


def _looked_up(
    tensors: tuple[Any, ...], rules: tuple[Any, ...], mask: Any, window_size: Any, check_values: Any, return_aux: Any
) -> Sequence[Tensor]:
    """(out, lse), or out alone where nobody asked for more and the call has come before."""
    rotary_interleaved, causal, softmax_scale, softcap, num_splits, batch_invariant, out_dtype = rules

    def compute(direct: bool) -> tuple[Tensor, Tensor]:
        return _append_and_read(
            *tensors, rotary_interleaved=rotary_interleaved, causal=causal, window_size=window_size, mask=mask,
            softmax_scale=softmax_scale, softcap=softcap, num_splits=num_splits, batch_invariant=batch_invariant,
            check_values=check_values, out_dtype=out_dtype, return_aux=return_aux, direct=direct,
        )  # fmt: skip

    key = None if mask is not None else repeats.key_of(tensors, rules, window_size, False, (check_values,), return_aux)
    if key is None:
        return compute(direct=False)
    wanted = 2 if return_aux else 1
    return repeats.over_a_cache(key, tensors, (*rules, window_size, check_values, return_aux), lambda: compute(direct=True)[:wanted])


def _append_and_read(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cache_seqlens: Tensor | int | None,
    page_table: Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    alibi_slopes: Tensor | None,
    learnable_sink: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    *,
    rotary_interleaved: bool,
    causal: bool,
    window_size: tuple[int, int],
    mask: Any,
    softmax_scale: float | None,
    softcap: float,
    num_splits: int,
    batch_invariant: bool,
    check_values: bool,
    out_dtype: torch.dtype | None,
    return_aux: str | Sequence[str],
    direct: bool,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call, validated; `direct` leaves the dispatcher out, for calls that nothing watches."""
    q, k, v = cast_new(q, k, v)
    checks.refuse_gradients(
        q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin, alibi_slopes=alibi_slopes,
        learnable_sink=learnable_sink, k_descale=k_descale, v_descale=v_descale, cache_seqlens=cache_seqlens, page_table=page_table,
        cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, mask=mask,
    )  # fmt: skip
    names = check_return_aux(return_aux)
    if set(names) - {"lse"}:
        raise UnsupportedAttention(f"return_aux is {return_aux!r}; a cache call returns 'lse' only, tilewise.attention the others")
    sizes = checks.check_tensors(q, k_cache, v_cache, k, v, page_table, cache_batch_idx)
    checks.check_out_dtype(out_dtype, q.dtype)
    window_left, window_right = check_window(window_size)
    if typed("causal", causal, bool):
        window_right = 0
    scale = (sizes.head_dim**-0.5 if sizes.head_dim else 1.0) if softmax_scale is None else check_finite("softmax_scale", softmax_scale)
    if check_finite("softcap", softcap) < 0:
        raise ValueError(f"softcap is {softcap}; it must be positive, or 0 for no cap")
    if isinstance(num_splits, bool) or not isinstance(num_splits, int) or num_splits < 0:
        raise ValueError(f"num_splits is {num_splits!r}; it must be a whole number of parts, or 0 to let the device and shapes decide")
    typed("batch_invariant", batch_invariant, bool)

    seqlens = _lengths(cache_seqlens, sizes, k)
    batch_idx = checks.vector("cache_batch_idx", cache_batch_idx, sizes, "the cache row of each item")
    leftpad = checks.vector("cache_leftpad", cache_leftpad, sizes, "the padding of each item")
    cos, sin = checks.rotary(rotary_cos, rotary_sin, rotary_interleaved, sizes)
    slopes = per_head("alibi_slopes", alibi_slopes, [(sizes.heads,), (sizes.batch, sizes.heads)], sizes)
    sink = per_head("learnable_sink", learnable_sink, [(sizes.heads,)], sizes)
    k_scale, v_scale = (checks.descale(name, x, k_cache, sizes) for name, x in (("k_descale", k_descale), ("v_descale", v_descale)))
    if check_values:
        checks.check_values_on_device(seqlens, page_table, batch_idx, leftpad, sizes)

    visible, mask_mod = None, ""
    captured: list[Tensor] = []
    if isinstance(mask, Tensor):
        visible = _rank4(mask, sizes)
    elif mask is not None:
        window, mask_mod, captured = lower_rule(mask, sizes)
        window_left, window_right = intersection((window_left, window_right), window)

    if k is not None and seqlens is not None:
        ops.cache_append(
            k_cache, None if v is None else v_cache, k, v, seqlens, page_table, batch_idx, cos, sin, rotary_interleaved, direct=direct
        )
    return ops.attention_cached(
        q=q, k_cache=k_cache, v_cache=v_cache, cache_seqlens=seqlens, page_table=page_table, cache_batch_idx=batch_idx,
        cache_leftpad=leftpad, rotary_cos=cos, rotary_sin=sin, mask=visible, alibi_slopes=slopes, sink=sink, k_descale=k_scale,
        v_descale=v_scale, captured=captured, softmax_scale=scale, softcap=float(softcap), window_left=window_left,
        window_right=window_right, appended=sizes.appended, rotary_interleaved=rotary_interleaved, num_splits=num_splits,
        batch_invariant=batch_invariant, mask_mod=mask_mod, out_dtype=out_dtype, direct=direct,
    )  # fmt: skip


def cast_new(q: Tensor, k: Tensor | None, v: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Inside autocast the new tensors become its dtype; a cache keeps its own."""
    cast = autocast(q, q if k is None else k, q if v is None else v)
    return cast[0], None if k is None else cast[1], None if v is None else cast[2]


def _lengths(cache_seqlens: Any, sizes: CacheSizes, k: Tensor | None) -> Tensor | None:
    if cache_seqlens is None:
        if k is not None:
            raise ValueError("k was given without cache_seqlens; say how many keys each item has before the append, 0 for an empty cache")
        return None
    if not isinstance(cache_seqlens, bool) and isinstance(cache_seqlens, numbers.Integral):
        cache_seqlens = int(cache_seqlens)
        if not 0 <= cache_seqlens <= sizes.capacity - sizes.appended:
            raise ValueError(
                f"cache_seqlens is {cache_seqlens}; with {sizes.appended} new keys and room for {sizes.capacity} it must be between 0 and "
                f"{sizes.capacity - sizes.appended}"
            )
        return torch.full((sizes.batch,), cache_seqlens, dtype=torch.int32, device=sizes.device)
    if not isinstance(cache_seqlens, Tensor):
        raise TypeError(
            f"cache_seqlens is of type {type(cache_seqlens).__name__}; it must be an int32 tensor (B,), or one int for all items"
        )
    return checks.vector("cache_seqlens", cache_seqlens, sizes, "the keys of each item before the append")


def per_head(name: str, x: Tensor | None, allowed: list[tuple[int, ...]], sizes: CacheSizes) -> Tensor | None:
    if x is None:
        return None
    typed(name, x, Tensor)
    if not x.is_floating_point():
        raise TypeError(f"{name} has dtype {x.dtype}; it must be floating")
    if x.device != sizes.device:
        raise ValueError(f"{name} is on {x.device} but q is on {sizes.device}; move it with .to(q.device)")
    if tuple(x.shape) not in allowed:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be {' or '.join(map(str, allowed))}: one for each query head")
    return x


def _rank4(mask: Tensor, sizes: CacheSizes) -> Tensor:
    target = (sizes.batch, sizes.heads, sizes.seqlen_q, sizes.capacity)
    if mask.dtype != torch.bool:
        raise TypeError(f"mask has dtype {mask.dtype}; it must be bool with True = visible, or a rule from tilewise.masks")
    if mask.device != sizes.device:
        raise ValueError(f"mask is on {mask.device} but q is on {sizes.device}; move it with .to(q.device)")
    if not broadcasts(mask.shape, target):
        raise ValueError(f"mask has shape {tuple(mask.shape)}, which does not broadcast to (B, Hq, Sq, capacity) = {target}")
    return mask[(None,) * (4 - mask.ndim)]


def lower_rule(mask: Any, sizes: CacheSizes) -> tuple[tuple[int, int], str, list[Tensor]]:
    """A rule over positions: the window it implies, and the program of the rest with the tensors that it reads."""
    if not isinstance(mask, Mask):
        raise TypeError(
            f"mask is {type(mask).__name__}; it must be a rule from tilewise.masks or a bool tensor that broadcasts to "
            "(B, Hq, Sq, capacity); for a function f(b, h, q_idx, kv_idx) use masks.Custom(f)"
        )
    mask.check(sizes.batch, sizes.heads, sizes.capacity, sizes.capacity)
    for tensor in mask.tensors():
        if not same_device(tensor.device, sizes.device):
            raise ValueError(f"mask {mask!r} is on {tensor.device} but q is on {sizes.device}; move it with mask.to('{sizes.device}')")
    rest = [part for part in conjuncts(mask) if part.window() is None]
    window = mask.implied_window()
    if not rest:
        return window, "", []
    rule = rest[0]
    for part in rest[1:]:
        rule = And(rule, part)
    graph = Graph(sizes.device)
    with Tracing():
        b, h, p, kv_idx = [graph.var(name) for name in ("b", "h", "p", "kv_idx")]
        visible = graph.lift(rule.predicate(Pair(b, h, p, kv_idx, p, sizes.capacity, sizes.capacity)))
    text, captured = program_text(visible)
    check_reads(text, captured, sizes.batch, sizes.heads)
    return window, text, captured
