"""`attention_varlen`: sequences of different lengths, packed one after the other without padding."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import derivatives, reference, repeats
from .api import Aux, Prepared, as_the_op, prepare, returned
from .checks import Packing, typed
from .errors import UnsupportedAttention


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    mask: Any = None,
    bias: Tensor | None = None,
    score_mod: Callable[..., Tensor] | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    deterministic: bool | None = None,
    backend: str = "auto",
    out_dtype: torch.dtype | None = None,
    check_values: bool = False,
    return_aux: str | Sequence[str] = (),
    page_table: Tensor | None = None,
) -> Any:
    """Exact attention over packed sequences: `attention` of each sequence on its own, in one call and without padding.

    Sequence b owns the queries ``q[cu_seqlens_q[b] : cu_seqlens_q[b + 1]]`` and likewise its keys and values. All rules count inside the
    sequence: causal masks are aligned bottom-right for each one, and in masks, biases, ALiBi, dropout and functions the batch index b is
    the sequence while ``q_idx`` and ``kv_idx`` start from 0 in it. A sequence may be empty on either side, and the two sides may have
    different lengths. Rows that belong to no sequence, before the first offset or from the last one on, give 0 (LSE -inf) and get the
    gradient 0, whatever they hold.

    Nothing here reads the offsets on the host of a GPU call: a captured graph may be replayed with other offsets in the same tensor.
    Offsets that decrease, or lie outside the tensors, count as the largest offset before them, at most the total.

    Args:
        q: ``(total_q, Hq, D)``, dtypes and strides as in `attention`. ``total_q`` may be larger than the last offset.
        k: ``(total_k, Hk, D)``, Hq a multiple of Hk.
        v: ``(total_k, Hk, Dv)``.
        cu_seqlens_q: int32 ``(sequences + 1,)``: where each sequence's queries start, and where the last one ends.
        cu_seqlens_k: int32 ``(sequences + 1,)``: likewise for keys and values. For self attention, the same tensor.
        max_seqlen_q: an upper bound of the query counts. Never needed for a right result, and a bound that is too low changes none; it is
            the size that a mask or bias with a row for each query must have, and it sharpens counts of operations.
        max_seqlen_k: likewise for keys.
        causal: as in `attention`, as are all arguments that are not described here.
        window_size: see ``causal``.
        mask: a rule from `tilewise.masks` (except Blocks), or a bool tensor that broadcasts to ``(sequences, Hq, max_seqlen_q,
            max_seqlen_k)``, True = visible.
        bias: floating, broadcasts to ``(sequences, Hq, max_seqlen_q, max_seqlen_k)``. Tokens of a longer sequence beyond what a bias or
            mask tensor covers count as absent, as beyond ``seqused_*``.
        score_mod: see ``causal``.
        softmax_scale: see ``causal``.
        softcap: see ``causal``.
        alibi_slopes: ``(Hq,)`` or ``(sequences, Hq)``.
        learnable_sink: see ``causal``.
        dropout_p: see ``causal``.
        dropout_seed: see ``causal``.
        seqused_q: int32 ``(sequences,)``: how many leading queries of each sequence are real.
        seqused_k: int32 ``(sequences,)``: how many leading keys are real.
        q_descale: see ``causal``.
        k_descale: see ``causal``.
        v_descale: see ``causal``.
        deterministic: see ``causal``.
        backend: see ``causal``.
        out_dtype: see ``causal``.
        check_values: also check the offsets and lengths, at the price of a synchronisation.
        return_aux: as in `attention`; packed: ``lse`` and ``entropy`` (Hq, total_q), ``max_logits`` (Hq,), ``key_mass`` (Hq, total_k).
        page_table: int32 ``(sequences, n)``, for inference: k and v are then pages ``(pages, page_size, Hk, D or Dv)``, of which a
            sequence has those in its row, in order. Its keys are counted by ``cu_seqlens_k`` or, where that is None, by ``seqused_k``;
            rules may speak of positions and keys.

    Returns:
        ``out`` ``(total_q, Hq, Dv)``, contiguous; with ``return_aux`` a pair ``(out, Aux)``.

    Raises:
        ValueError, TypeError, UnsupportedAttention, NotImplementedError: as `attention`.

    Sources: Dao 2023, "FlashAttention-2", section 3 (the loop); the packed form is that of its ``flash_attn_varlen_func``.

    Example:
        >>> q, k, v = (torch.randn(10, 4, 64) for _ in range(3))
        >>> offsets = torch.tensor([0, 7, 10], dtype=torch.int32)
        >>> out = attention_varlen(q, k, v, offsets, offsets, causal=True)
        >>> alone = tilewise.attention(q[None, 7:], k[None, 7:], v[None, 7:], causal=True)
        >>> torch.allclose(out[7:], alone[0], atol=1e-6)
        True
    """
    if page_table is not None:
        from .kvcache.packed import varlen_over_pages

        return varlen_over_pages(
            q, k, v, cu_seqlens_q, cu_seqlens_k, page_table, causal=causal, window_size=window_size, mask=mask, bias=bias,
            score_mod=score_mod, softmax_scale=softmax_scale, softcap=softcap, alibi_slopes=alibi_slopes, learnable_sink=learnable_sink,
            dropout_p=dropout_p, seqused_q=seqused_q, seqused_k=seqused_k, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
            backend=backend, out_dtype=out_dtype, check_values=check_values, return_aux=return_aux,
        )  # fmt: skip
    key = None
    # One address stands for one operand: offsets that both sides share are given once.
    shared = cu_seqlens_k is cu_seqlens_q
    operands = q, k, v, None, None, alibi_slopes, learnable_sink, seqused_q, seqused_k, cu_seqlens_q, None if shared else cu_seqlens_k
    ordinary = (mask, bias, score_mod, dropout_seed, q_descale, k_descale, v_descale)
    if all(x is None for x in ordinary) and cu_seqlens_q is not None and cu_seqlens_k is not None:
        rules = ("packed", shared, causal, softmax_scale, softcap, backend, out_dtype, max_seqlen_q, max_seqlen_k)
        key = repeats.key_of(operands, rules, window_size, deterministic, (dropout_p, check_values, backend == "reference"), return_aux)
        known = None if key is None else repeats.known.get(key)
        if known is not None:
            found = known(*operands)
            return (found[0], Aux(lse=found[1])) if return_aux else found[0]
    prepared = prepare_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=causal, window_size=window_size, mask=mask, bias=bias,
        score_mod=score_mod, softmax_scale=softmax_scale, softcap=softcap, alibi_slopes=alibi_slopes, learnable_sink=learnable_sink,
        dropout_p=dropout_p, dropout_seed=dropout_seed, seqused_q=seqused_q, seqused_k=seqused_k, q_descale=q_descale,
        k_descale=k_descale, v_descale=v_descale, deterministic=deterministic, backend=backend, out_dtype=out_dtype,
        check_values=check_values, return_aux=return_aux,
    )  # fmt: skip
    if key is not None:
        result = repeats.remember(key, prepared.op_arguments, prepared.wants_aux, packed=True)(*operands)
    elif backend == "reference":
        result = as_the_op(reference.attention_varlen_full, prepared.reference_arguments, out_dtype)
    else:
        # The derivative of squeeze is a view, that of [0] a tensor of zeros and a copy into it.
        result = tuple(x if x is None or x.ndim == 1 else x.squeeze(0) for x in derivatives.attention_forward(**prepared.op_arguments))
    return returned(prepared, result)


def prepare_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    page_table: Tensor | None = None,
    **arguments: Any,
) -> Prepared:
    """Validates the arguments of `attention_varlen` and turns them into those of the forward op, on q, k and v of batch size 1."""
    if page_table is not None:
        raise UnsupportedAttention("page_table was given; a call over pages is described by attention_varlen alone")
    for name, x in (("q", q), ("k", k), ("v", v)):
        typed(name, x, Tensor)
        if x.ndim != 3:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; packed sequences have rank 3, (total, H, D); for batches use attention")
    packing = _packing(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    _require_bounds(packing, arguments.get("mask"), arguments.get("bias"))
    given = arguments | {"check_values": False, "layout": "bshd"}
    prepared = prepare(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), packing=packing, **given)
    if arguments.get("check_values"):
        _check_boundaries(packing, q.shape[0], k.shape[0], arguments)
    same_meaning = prepared.reference_arguments | packing._asdict()
    del same_meaning["layout"]
    return prepared._replace(reference_arguments=same_meaning | {name: same_meaning[name].squeeze(0) for name in ("q", "k", "v")})


def _packing(q: Tensor, k: Tensor, cu_q: Any, cu_k: Any, max_q: Any, max_k: Any) -> Packing:
    for name, x in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        typed(name, x, Tensor)
        if x.dtype != torch.int32:
            raise TypeError(f"{name} has dtype {x.dtype}; it must be int32: use {name}.to(torch.int32)")
        if x.ndim != 1 or x.shape[0] == 0:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be (sequences + 1,): 0, then where each sequence ends")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} but q is on {q.device}; move it with .to(q.device)")
    if cu_q.shape != cu_k.shape:
        raise ValueError(
            f"cu_seqlens_q describes {cu_q.shape[0] - 1} sequences and cu_seqlens_k {cu_k.shape[0] - 1}; every sequence needs both"
        )
    for name, most in (("max_seqlen_q", max_q), ("max_seqlen_k", max_k)):
        if most is None:
            continue
        if isinstance(most, bool) or not isinstance(most, (int, torch.SymInt)):
            raise TypeError(f"{name} is {most!r} of type {type(most).__name__}; it must be an int, or None")
        if most < 0:
            raise ValueError(f"{name} is {most}; it must be 0 or more, or None")
    return Packing(cu_q, cu_k, max_q, max_k)


def _require_bounds(packing: Packing, mask: Any, bias: Any) -> None:
    """What has one entry for each query or key of a sequence needs to be told how many those may be."""
    from . import masks

    given = {"bias": bias} if isinstance(bias, Tensor) else {}
    if isinstance(mask, Tensor):
        given["mask"] = mask
    for name, x in given.items():
        for side, dim in (("q", -2), ("k", -1)):
            if getattr(packing, f"max_seqlen_{side}") is None and x.ndim >= -dim and x.shape[dim] != 1:
                raise ValueError(
                    f"{name} has shape {tuple(x.shape)}, so max_seqlen_{side} must be given: in a packed call it must broadcast to "
                    "(sequences, Hq, max_seqlen_q, max_seqlen_k)"
                )
    if isinstance(mask, masks.Mask) and (packing.max_seqlen_q is None or packing.max_seqlen_k is None):
        sized = [leaf for leaf in masks.leaves(mask) if isinstance(leaf, (masks.Document, masks.Dense))]
        if sized:
            raise ValueError(
                f"mask {sized[0]!r} has an entry for each position of a sequence: give max_seqlen_q and max_seqlen_k, the sizes it was "
                "made for"
            )


def _check_boundaries(packing: Packing, total_q: int, total_k: int, arguments: dict[str, Any]) -> None:
    """Reads offsets and lengths on the host: a synchronisation, asked for by check_values=True."""
    matrices = [(name, x) for name in ("bias", "mask") if isinstance(x := arguments.get(name), Tensor)]
    for side, total, dim in (("q", total_q, -2), ("k", total_k, -1)):
        offsets = getattr(packing, f"cu_seqlens_{side}").tolist()
        most = getattr(packing, f"max_seqlen_{side}")
        seqused = arguments.get(f"seqused_{side}")
        used = seqused.tolist() if isinstance(seqused, Tensor) else []
        if offsets[0] < 0 or offsets[-1] > total:
            raise ValueError(f"cu_seqlens_{side} runs from {offsets[0]} to {offsets[-1]}; it must stay between 0 and {total}, the total")
        for b, (start, stop) in enumerate(itertools.pairwise(offsets)):
            if stop < start:
                raise ValueError(f"cu_seqlens_{side} decreases from {start} to {stop} at sequence {b}; offsets must not decrease")
            if most is not None and stop - start > most:
                covered = [name for name, x in matrices if x.ndim >= -dim and x.shape[dim] != 1]
                beyond = f", and the {covered[0]} covers no more" if covered else ""
                raise ValueError(f"sequence {b} has length {stop - start}, above max_seqlen_{side} = {most}{beyond}; raise the bound")
            if used and not 0 <= used[b] <= stop - start:
                raise ValueError(f"seqused_{side} is {used[b]} for sequence {b}; it must be between 0 and {stop - start}, its length")


__all__ = ["Aux", "attention_varlen"]
