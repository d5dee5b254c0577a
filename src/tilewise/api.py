"""`attention`: validation in words, normalisation, and the hand-over to the ops. No kernels and no Triton here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import derivatives, ops, plan, reference, repeats
from .block_mask import BlockMask, TileLists
from .checks import (
    Packing,
    Sizes,
    broadcast_to_scores,
    check_finite,
    check_qkv,
    check_return_aux,
    check_values_on_device,
    check_window,
    per_head,
    refuse_a_seed_for_each_rank,
    refuse_descale,
    sequence_lengths,
    typed,
)
from .documents import packed_by
from .errors import UnsupportedAttention
from .given_rules import lists_of_given
from .masks import Lowered, Mask, lower
from .windows import intersection


class Aux(NamedTuple):
    """The auxiliary outputs of a call, None for what was not asked for. A pytree.

    ``lse`` (B, Hq, Sq): natural logarithm of the softmax denominator, sink included. ``max_logits`` (Hq,): the largest score after softcap,
    bias and score function. ``key_mass`` (B, Hq, Sk): attention received by each key, the column sums of P before dropout.
    ``entropy`` (B, Hq, Sq): -sum p ln p over the keys. All float32 (float64 for float64 inputs).
    """

    lse: Tensor | None = None
    max_logits: Tensor | None = None
    key_mass: Tensor | None = None
    entropy: Tensor | None = None


class Prepared(NamedTuple):
    """A validated call: the arguments of the forward op by name, and what the user asked to get back."""

    op_arguments: dict[str, Any]
    aux_names: tuple[str, ...]
    wants_aux: bool
    reference_arguments: dict[str, Any]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    layout: str = "bshd",
    backend: str = "auto",
    out_dtype: torch.dtype | None = None,
    check_values: bool = False,
    return_aux: str | Sequence[str] = (),
) -> Any:
    """Exact attention, softmax(q k^T) v, computed tile by tile: the (Sq, Sk) matrix never exists, forward or backward.

    Query i stands at position ``p = i + len_k - len_q`` among the keys, so causal masks are aligned bottom-right: with Sq = 2 and Sk = 4
    the first query sees keys 0 to 2. Scores are ``softmax_scale * q.k``, then softcap, then bias and ALiBi, then ``score_mod``, then the
    mask; the sink joins the denominator; dropout acts on the probabilities. A query that sees no key gives 0 (and gradients 0, LSE
    -inf). A key that no query sees never influences anything, whatever it holds. All masks given together are AND-ed.

    Args:
        q: ``(B, Sq, Hq, D)``; float16, bfloat16, float32, or float64 (on CPU, and through ``backend="tiled"``). Any strides. Jagged
            `torch.nested` tensors, all three of them, are served as `attention_varlen` serves packed ones, and give nested results.
        k: ``(B, Sk, Hk, D)``, Hq a multiple of Hk (GQA, MQA): query head h reads kv head ``h // (Hq // Hk)``.
        v: ``(B, Sk, Hk, Dv)``; Dv may differ from D. One dtype and device for q, k and v; autocast casts all three.
        causal: a query sees keys j <= p.
        window_size: ``(left, right)``: a query sees keys p - left <= j <= p + right, inclusive; -1 is unlimited.
        mask: a rule from `tilewise.masks`; a `BlockMask`, whose empty tiles cost nothing; or a bool tensor that broadcasts to
            ``(B, Hq, Sq, Sk)``, True = visible. Never copied.
        bias: floating tensor that broadcasts to ``(B, Hq, Sq, Sk)``, added to the scores in float32; -inf masks, any finite value does not.
            Differentiable in every broadcast shape.
        score_mod: ``f(score, b, h, q_idx, kv_idx) -> score``, an ordinary function as FlexAttention takes; may read tensors.
        softmax_scale: default ``1 / sqrt(D)``. Zero and negative values are allowed.
        softcap: c > 0 replaces a score s by ``c * tanh(s / c)``; 0 is off (Gemma Team 2024, "Gemma 2", section 2).
        alibi_slopes: ``(Hq,)`` or ``(B, Hq)``: adds ``-slope * |p - j|`` (Press et al. 2022, "Train short, test long"). Differentiable.
        learnable_sink: ``(Hq,)`` logits of a phantom key without value (OpenAI 2025, gpt-oss). Differentiable.
        dropout_p: probability in [0, 1) of dropping a probability, keyed by position (Philox4x32-10, Salmon et al. 2011).
        dropout_seed: None draws one on the device from torch's generator; or an int; or a 0-d int64 tensor on the device of q.
        seqused_q: int32 ``(B,)``: how many leading queries of each batch item are real; later rows of the output are 0, of the LSE -inf.
        seqused_k: int32 ``(B,)``: how many leading keys are real.
        q_descale: reserved for fp8, as are ``k_descale`` and ``v_descale``.
        k_descale: see ``q_descale``.
        v_descale: see ``q_descale``.
        deterministic: same bits on every run. None follows ``torch.are_deterministic_algorithms_enabled()``.
        layout: ``"bshd"`` as above, or ``"bhsd"`` for ``(B, H, S, D)``; of inputs and output.
        backend: ``"auto"``, ``"reference"``, ``"tiled"``, ``"triton"`` or ``"hopper"``; a named one serves the call or raises.
        out_dtype: dtype of the output, that of q by default; ``torch.float32`` keeps partial results exact for `merge`.
        check_values: also check values that live on the device (lengths), at the price of a synchronisation.
        return_aux: a name, or names, of ``lse``, ``max_logits``, ``key_mass``, ``entropy``.

    Returns:
        ``out``, shaped as q with Dv for D and contiguous; with ``return_aux`` a pair ``(out, Aux)``.

    Raises:
        ValueError: a shape, length or number that has no meaning. TypeError: a wrong type or dtype.
        UnsupportedAttention: a combination that the backend cannot serve.
        NotImplementedError: in backward, for a derivative that does not exist.

    Sources: Milakov & Gimelshein 2018 (online softmax); Dao et al. 2022, "FlashAttention", Algorithms 1 and 4 (tiling, recomputation);
    Dao 2023, "FlashAttention-2", section 3 (loop order).

    Example:
        >>> q, k, v = (torch.randn(2, 128, 8, 64, requires_grad=True) for _ in range(3))
        >>> out = attention(q, k, v, causal=True)
        >>> out.shape
        torch.Size([2, 128, 8, 64])
        >>> out.sum().backward()
        >>> out, aux = attention(q, k, v, window_size=(31, 0), return_aux="lse")
        >>> aux.lse.shape
        torch.Size([2, 8, 128])
    """
    alone = (
        score_mod is mask is bias is alibi_slopes is learnable_sink is dropout_seed is seqused_q is seqused_k
        is q_descale is k_descale is v_descale is None and not torch.compiler.is_compiling()
    )  # fmt: skip
    if alone:
        found = repeats.again(
            q, k, v, causal, window_size, softmax_scale, softcap, dropout_p, deterministic, layout, backend, out_dtype, check_values,
            return_aux,
        )  # fmt: skip
        if found is not None:
            return (found[0], Aux(lse=found[1])) if return_aux else found[0]
    key = None
    operands: tuple[Any, ...] = (q, k, v, bias, mask, alibi_slopes, learnable_sink, seqused_q, seqused_k)
    rules: tuple[Any, ...] = (causal, softmax_scale, softcap, layout, backend, out_dtype)
    if mask is not None and not isinstance(mask, Tensor):
        documents = packed_by(mask, q, k, v, layout, bias, score_mod, alibi_slopes, dropout_p, seqused_q, seqused_k, backend, return_aux)
        if documents is not None:
            operands = (q, k, v, None, None, alibi_slopes, learnable_sink, None, None, documents.offsets)
            rules = (*rules, "documents", *documents.window)
    if score_mod is None and dropout_seed is None and q_descale is None and k_descale is None and v_descale is None:
        key = repeats.key_of(operands, rules, window_size, deterministic, (dropout_p, check_values, backend == "reference"), return_aux)
        known = None if key is None else repeats.known.get(key)
        if known is not None:
            found = known(*operands)
            if alone:
                repeats.keep_lately(
                    known, operands, causal, window_size, softmax_scale, softcap, dropout_p, deterministic, layout, backend, out_dtype,
                    check_values, return_aux,
                )  # fmt: skip
            return (found[0], Aux(lse=found[1])) if return_aux else found[0]
    arguments: dict[str, Any] = dict(
        causal=causal, window_size=window_size, mask=mask, bias=bias, score_mod=score_mod, softmax_scale=softmax_scale, softcap=softcap,
        alibi_slopes=alibi_slopes, learnable_sink=learnable_sink, dropout_p=dropout_p, dropout_seed=dropout_seed, seqused_q=seqused_q,
        seqused_k=seqused_k, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, deterministic=deterministic, layout=layout,
        backend=backend, out_dtype=out_dtype, check_values=check_values, return_aux=return_aux,
    )  # fmt: skip
    if getattr(q, "is_nested", False):
        from .jagged import attention_jagged

        return attention_jagged(q, k, v, **arguments)
    prepared = prepare(q, k, v, **arguments)
    if key is not None:
        result = repeats.remember(key, prepared.op_arguments, prepared.wants_aux)(*operands)
    elif backend == "reference":
        result = as_the_op(reference.attention_full, prepared.reference_arguments, out_dtype)
    else:
        result = derivatives.attention_forward(**prepared.op_arguments)
    return returned(prepared, result)


def returned(prepared: Prepared, result: Sequence[Tensor]) -> Any:
    """What the user gets of (out, lse, max_logits, key_mass, entropy)."""
    if not prepared.wants_aux:
        return result[0]
    by_name = dict(zip(Aux._fields, result[1:], strict=False))
    return result[0], Aux(**{name: by_name[name] for name in prepared.aux_names})


def as_the_op(
    specification: Callable[..., reference.Result], arguments: dict[str, Any], out_dtype: torch.dtype | None
) -> tuple[Tensor, ...]:
    """The specification with the op's conventions: dtypes, and contiguous output and gradients."""
    # Flattening and back changes nothing, but its derivative lays the gradient out in the input's own order of dimensions.
    flat = {name: arguments[name].reshape(-1).view(arguments[name].shape) for name in ("q", "k", "v")}
    full = specification(**(arguments | flat))
    dtype = arguments["q"].dtype
    return (full.out.to(out_dtype or dtype).contiguous(), *(x.to(plan.accumulator_dtype(dtype)) for x in full[1:]))


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    layout: str = "bshd",
    backend: str = "auto",
    out_dtype: torch.dtype | None = None,
    check_values: bool = False,
    return_aux: str | Sequence[str] = (),
    packing: Packing | None = None,
) -> Prepared:
    """Validates the arguments of `attention` and turns them into those of the forward op. Launches nothing but the drawing of a seed.

    `packing` says that q, k and v, of batch size 1, hold packed sequences; `attention_varlen` has checked it.
    """
    refuse_descale(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    typed("causal", causal, bool)
    typed("check_values", check_values, bool)
    if backend not in plan.BACKENDS:
        raise ValueError(f"backend is {backend!r}; it must be one of {', '.join(plan.BACKENDS)}")
    aux_names = check_return_aux(return_aux)
    q, k, v = autocast(q, k, v)
    sizes = check_qkv(q, k, v, layout, backend, packed=packing is not None)
    window_left, window_right = user_window = check_window(window_size)
    user_mask = mask
    if packing is None and mask is not None and backend != "reference":
        documents = packed_by(mask, q, k, v, layout, bias, score_mod, alibi_slopes, dropout_p, seqused_q, seqused_k, backend, return_aux)
        if documents is not None:
            mask, packing = None, Packing(documents.offsets, documents.offsets, None, None)
            window_left, window_right = intersection(user_window, documents.window)
    if packing is not None:
        sizes = sizes.of_sequences(packing)
    if causal:
        window_right = 0
    if softmax_scale is None:
        scale = 1.0 / math.sqrt(sizes.head_dim) if sizes.head_dim else 1.0
    else:
        scale = check_finite("softmax_scale", softmax_scale)
    softcap = check_finite("softcap", softcap)
    if softcap < 0:
        raise ValueError(f"softcap is {softcap}; it must be positive, or 0 for no cap")
    if not 0.0 <= check_finite("dropout_p", dropout_p) < 1.0:
        raise ValueError(f"dropout_p is {dropout_p}; it must be in [0, 1)")
    if out_dtype not in (None, q.dtype, plan.accumulator_dtype(q.dtype)):
        allowed = " or ".join(dict.fromkeys(map(str, (q.dtype, plan.accumulator_dtype(q.dtype)))))
        raise ValueError(f"out_dtype is {out_dtype}; for inputs of {q.dtype} it must be None or {allowed}")

    bias = broadcast_to_scores("bias", bias, sizes)
    alibi_slopes = per_head("alibi_slopes", alibi_slopes, sizes, per_batch=True)
    sink = per_head("learnable_sink", learnable_sink, sizes, per_batch=False)
    seqused_q = sequence_lengths("seqused_q", seqused_q, sizes.seqlen_q, sizes)
    seqused_k = sequence_lengths("seqused_k", seqused_k, sizes.seqlen_k, sizes)
    if check_values:
        check_values_on_device(seqused_q, seqused_k, sizes)
    if dropout_p > 0 and dropout_seed is None:
        refuse_a_seed_for_each_rank(q)
    seed = _seed(dropout_seed, dropout_p, q.device)

    mask_mod, score_text, captured, dense, lists = "", "", [], None, None
    if isinstance(mask, Tensor):
        dense = broadcast_to_scores("mask", mask, sizes, boolean=True)
    elif mask is not None and (backend != "reference" or isinstance(mask, BlockMask)):
        ragged = seqused_q is not None or seqused_k is not None
        lowered, lists = _lower_mask(mask, sizes, q.device, ragged=ragged, packed=packing is not None)
        window_left, window_right = intersection((window_left, window_right), (lowered.window_left, lowered.window_right))
        mask_mod, captured, dense = lowered.program_text, list(lowered.captured), lowered.dense
    if score_mod is not None and not callable(score_mod):
        raise TypeError(
            f"score_mod is of type {type(score_mod).__name__}; it must be a function f(score, b, h, q_idx, kv_idx) that returns a score, "
            "or None"
        )
    if score_mod is not None and backend != "reference":
        from .score_mod import trace_score_mod

        score_text, score_captured = trace_score_mod(score_mod, q.device, first=len(captured))
        captured = captured + list(score_captured)
    if mask_mod or score_text:
        from .score_mod import check_reads

        for text in (mask_mod, score_text):
            check_reads(text, captured, sizes.batch, sizes.heads)

    if deterministic is not None and not isinstance(deterministic, bool):
        raise TypeError(f"deterministic is {deterministic!r}; it must be True, False, or None to follow torch.use_deterministic_algorithms")
    deterministic = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
    operands = dict(
        q=q, k=k, v=v, bias=bias, mask=dense, alibi_slopes=alibi_slopes, sink=sink, seqused_q=seqused_q, seqused_k=seqused_k,
        dropout_seed=seed, captured=captured,
    )  # fmt: skip
    rules = dict(
        softmax_scale=scale, softcap=softcap, window_left=window_left, window_right=window_right, dropout_p=float(dropout_p),
        deterministic=deterministic, score_mod=score_text, mask_mod=mask_mod, layout=layout, backend=backend,
    )  # fmt: skip
    same_meaning = dict(
        q=q, k=k, v=v, causal=causal, window_size=user_window, mask=user_mask, bias=bias, score_mod=score_mod, softmax_scale=scale,
        softcap=softcap, alibi_slopes=alibi_slopes, learnable_sink=sink, dropout_p=dropout_p, dropout_seed=seed, seqused_q=seqused_q,
        seqused_k=seqused_k, layout=layout,
    )  # fmt: skip
    blocks = dict(
        blocks=[] if lists is None else lists.tensors(),
        block_m=0 if lists is None else lists.block_m,
        block_n=0 if lists is None else lists.block_n,
    )
    aux = ",".join(name for name in ops.AUX if name in aux_names)
    packed = dict.fromkeys(ops.PACKED) if packing is None else packing._asdict()
    return Prepared(operands | rules | blocks | packed | dict(out_dtype=out_dtype, aux=aux), aux_names, bool(aux_names), same_meaning)


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Inside autocast q, k and v become its dtype, all three alike; float64 stays, as in torch's own rule."""
    if not isinstance(q, Tensor) or q.device.type not in ("cuda", "cpu", "xpu", "mps") or not torch.is_autocast_enabled(q.device.type):
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)

    def cast(x: Tensor) -> Tensor:
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x

    return cast(q), cast(k), cast(v)


def _seed(seed: int | Tensor | None, dropout_p: float, device: torch.device) -> Tensor | None:
    """The dropout key as a 0-d int64 tensor on the device, so that graph replay and checkpointing see a new value or the same."""
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.ndim != 0 or seed.device != device:
            raise ValueError(
                f"dropout_seed is a tensor of {seed.dtype}, shape {tuple(seed.shape)} on {seed.device}; it must be int64, 0-d, on {device}"
            )
    elif seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise TypeError(f"dropout_seed is {seed!r}; it must be None, an int, or a 0-d int64 tensor on the device of q")
    elif seed is not None and not -(2**63) <= seed < 2**64:
        raise ValueError(f"dropout_seed is {seed}; it must fit in 64 bits, signed or unsigned")
    if dropout_p == 0:
        return None
    if seed is None:
        return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=device)
    if isinstance(seed, Tensor):
        return seed
    return torch.full((), (seed + 2**63) % 2**64 - 2**63, dtype=torch.int64, device=device)


def _lower_mask(mask: Any, sizes: Sizes, device: torch.device, ragged: bool, packed: bool) -> tuple[Lowered, TileLists | None]:
    """What the kernels take of a rule, and the tile lists where it has or deserves them."""
    if isinstance(mask, BlockMask):
        if packed:
            raise UnsupportedAttention(
                "mask is a BlockMask, whose tiles count from the start of one common sequence; packed sequences take the rule itself"
            )
        mask.check(sizes.batch, sizes.heads, sizes.seqlen_q, sizes.seqlen_k, device, ragged)
        return mask.lowered, mask.needed
    if not isinstance(mask, Mask):
        raise TypeError(
            f"mask is {type(mask).__name__}; it must be a rule from tilewise.masks, a tilewise.BlockMask, or a bool tensor that broadcasts "
            f"to {sizes.scores_name}; for a function f(b, h, q_idx, kv_idx) use masks.Custom(f)"
        )
    call: dict[str, Any] = dict(batch=sizes.batch, heads=sizes.heads, seqlen_q=sizes.seqlen_q, seqlen_k=sizes.seqlen_k, device=device)
    if packed:
        return lower(mask, **call, ragged=True), None
    return lower(mask, **call), lists_of_given(mask, **call, ragged=ragged)


__all__ = ["Aux", "UnsupportedAttention", "attention"]
