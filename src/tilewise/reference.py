"""Eager attention written from index rules: the specification of every feature.

Nothing here is fast and everything is meant to be checked by eye. The kernels share no code with this file. Gradients come from
autograd. All arithmetic is float64 unless ``compute_dtype`` says otherwise.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

NEG_INF = float("-inf")


class Result(NamedTuple):
    """Everything that attention defines, before rounding to the output dtype."""

    out: Tensor  # in the layout of q
    lse: Tensor  # (B, Hq, Sq)
    max_logits: Tensor  # (Hq,)
    key_mass: Tensor  # (B, Hq, Sk)
    entropy: Tensor  # (B, Hq, Sq)


def attention(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
    """Attention by definition: ``(out, lse)`` in float64.

    Takes the arguments of `tilewise.attention` that carry meaning; shapes and names are the same.

    >>> q = k = v = torch.ones(1, 2, 1, 4)
    >>> out, lse = attention(q, k, v, causal=True)
    >>> lse[0, 0].tolist()  # 4 / sqrt(4) = 2; one key, then two
    [2.0, 2.6931471805599454]
    """
    result = attention_full(q, k, v, **arguments)
    return result.out, result.lse


def attention_full(
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
    layout: str = "bshd",
    compute_dtype: torch.dtype = torch.float64,
) -> Result:
    """As `attention`, with the auxiliary outputs too."""
    if layout == "bshd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    q, k, v = (x.to(compute_dtype) for x in (q, k, v))
    batch, heads, seqlen_q, head_dim = q.shape
    seqlen_k, device = k.shape[2], q.device
    group = heads // max(k.shape[1], 1)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)  # query head h reads kv head h // group

    # Where each query stands among the keys: p = i + len_k - len_q, per batch item.
    len_q = _lengths(seqused_q, batch, seqlen_q, device)
    len_k = _lengths(seqused_k, batch, seqlen_k, device)
    b = torch.arange(batch, device=device).view(-1, 1, 1, 1)
    h = torch.arange(heads, device=device).view(1, -1, 1, 1)
    i = torch.arange(seqlen_q, device=device).view(1, 1, -1, 1)
    j = torch.arange(seqlen_k, device=device).view(1, 1, 1, -1)
    p = i + (len_k - len_q).view(-1, 1, 1, 1)

    # What each query may see.
    visible = (i < len_q.view(-1, 1, 1, 1)) & (j < len_k.view(-1, 1, 1, 1)) & (h >= 0)  # (B, Hq, Sq, Sk)
    if causal:
        visible = visible & (j <= p)
    left, right = window_size
    if left >= 0:
        visible = visible & (j >= p - left)
    if right >= 0:
        visible = visible & (j <= p + right)
    if isinstance(mask, Tensor):
        visible = visible & mask
    elif mask is not None:
        visible = visible & mask.dense(batch, heads, seqlen_q, seqlen_k, len_q=len_q, len_k=len_k, device=device)

    if bias is not None:
        visible = visible & (bias != NEG_INF)

    # Scores, in the order: scale, softcap, bias and ALiBi, score function, mask.
    scale = softmax_scale if softmax_scale is not None else (1.0 / math.sqrt(head_dim) if head_dim else 1.0)
    slopes = None if alibi_slopes is None else alibi_slopes.to(compute_dtype).expand(batch, heads)[..., None, None]  # (B, Hq, 1, 1)

    def scores(visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scores with -inf where hidden, what is visible in the end, and v, with what nobody sees replaced: it goes nowhere."""
        seen_q, seen_k = visible.any(3)[..., None], visible.any(2)[..., None]
        s = scale * (torch.where(seen_q, q, 0.0) @ torch.where(seen_k, k, 0.0).transpose(-1, -2))
        if softcap > 0:
            s = softcap * torch.tanh(s / softcap)
        if bias is not None:
            s = s + bias.to(compute_dtype)
        if slopes is not None:
            s = s - slopes * (p - j).abs()
        if score_mod is not None:
            visible = visible & (s != NEG_INF)
            s = _apply_score_mod(score_mod, torch.where(visible, s, 0.0), *_where_visible(visible, b, h, i, j))
        visible = visible & (s != NEG_INF)
        return torch.where(visible, s, NEG_INF), visible, torch.where(seen_k, v, 0.0)

    # A score of -inf hides too, and what it hides is known only from the scores: so the scores are taken twice.
    with torch.no_grad():
        _, visible, _ = scores(visible)
    s, visible, v = scores(visible)

    # Softmax; the sink is a key without a value.
    sees = visible.any(3)
    row_max = s.detach().amax(3) if seqlen_k else torch.full(sees.shape, NEG_INF, dtype=compute_dtype, device=device)
    m = row_max
    if learnable_sink is not None:
        sink = learnable_sink.to(compute_dtype).view(1, -1, 1).expand(batch, heads, seqlen_q)
        in_use = (i < len_q.view(-1, 1, 1, 1)).squeeze(3).expand(batch, heads, seqlen_q)
        sink = torch.where(in_use, sink, NEG_INF)
        m = torch.maximum(m, sink.detach())
    m = torch.where(m == NEG_INF, 0.0, m)  # an empty row: any finite number will do
    l = torch.exp(s - m[..., None]).sum(3)
    if learnable_sink is not None:
        l = l + torch.exp(sink - m)
    lse = torch.where(l == 0, NEG_INF, m + torch.log(torch.where(l == 0, 1.0, l)))
    probs = torch.exp(s - m[..., None]) / torch.where(l == 0, 1.0, l)[..., None]  # not exp(s - lse): log l vanishes beside a huge m

    dropped = probs
    if dropout_p > 0:
        keep = philox_keep(dropout_seed, dropout_p, b, h, i, j)
        dropped = torch.where(keep, probs / (1.0 - dropout_p), 0.0)
    out = torch.where(sees[..., None], dropped @ v, 0.0)

    plogp = torch.where(probs > 0, probs * torch.log(torch.where(probs > 0, probs, 1.0)), 0.0)
    result = Result(
        out=out.transpose(1, 2) if layout == "bshd" else out,
        lse=lse,
        max_logits=row_max.amax((0, 2)) if batch * seqlen_q else row_max.new_full((heads,), NEG_INF),
        key_mass=probs.sum(2),
        entropy=-plogp.sum(3),
    )
    return result


def attention_varlen_full(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    **arguments: Any,
) -> Result:
    """Packed sequences: what a batch of them gives, padded to one length, with the lengths in ``seqused_*``.

    q (total_q, Hq, D), k and v (total_k, Hk, ...); out in the shape of q, lse and entropy (Hq, total_q), key_mass (Hq, total_k). Rows
    that belong to no sequence are 0, their lse -inf. ``max_seqlen_*`` is the size that a bias, mask or rule was made for; what a sequence
    has beyond a bias or mask counts as absent.
    """
    first_q, len_q = _boundaries(cu_seqlens_q, q.shape[0])
    first_k, len_k = _boundaries(cu_seqlens_k, k.shape[0])
    matrices = [x for x in (arguments.get("bias"), arguments.get("mask")) if isinstance(x, Tensor)]
    size_q, size_k = (
        most if most is not None and any(x.ndim >= -dim and x.shape[dim] > 1 for x in matrices) else max([most or 0, *lengths])
        for most, lengths, dim in ((max_seqlen_q, len_q, -2), (max_seqlen_k, len_k, -1))
    )

    def used(lengths: list[int], size: int, seqused: Tensor | None) -> Tensor:
        own = lengths if seqused is None else [min(max(int(n), 0), length) for n, length in zip(seqused, lengths, strict=True)]
        return torch.tensor([min(n, size) for n in own], dtype=torch.int32, device=q.device)

    def padded(x: Tensor, first: list[int], lengths: list[int], size: int) -> Tensor:
        rows = [x[start : start + min(length, size)] for start, length in zip(first, lengths, strict=True)]
        items = [torch.cat([row, row.new_zeros(size - len(row), *row.shape[1:])]) for row in rows]
        return torch.stack(items) if items else x.new_zeros(0, size, *x.shape[1:])

    full = attention_full(
        padded(q, first_q, len_q, size_q),
        *(padded(x, first_k, len_k, size_k) for x in (k, v)),
        seqused_q=used(len_q, size_q, seqused_q),
        seqused_k=used(len_k, size_k, seqused_k),
        **arguments,
    )

    def packed(x: Tensor, first: list[int], lengths: list[int], total: int, elsewhere: float) -> Tensor:
        """(sequences, size, ...) -> (total, ...)"""
        result = x.new_full((total, *x.shape[2:]), elsewhere)
        for item, start, length in zip(x, first, lengths, strict=True):
            rows = torch.arange(start, start + min(length, len(item)), device=x.device)
            result = result.index_copy(0, rows, item[: len(rows)])
        return result

    return Result(
        out=packed(full.out, first_q, len_q, q.shape[0], 0.0),
        lse=packed(full.lse.transpose(1, 2), first_q, len_q, q.shape[0], NEG_INF).transpose(0, 1),
        max_logits=full.max_logits,
        key_mass=packed(full.key_mass.transpose(1, 2), first_k, len_k, k.shape[0], 0.0).transpose(0, 1),
        entropy=packed(full.entropy.transpose(1, 2), first_q, len_q, q.shape[0], 0.0).transpose(0, 1),
    )


def _boundaries(cu_seqlens: Tensor, total: int) -> tuple[list[int], list[int]]:
    """First row and length of each sequence. An offset counts as no less than those before it and no more than the total."""
    ends, top = [], 0
    for offset in cu_seqlens.tolist():
        top = max(top, min(max(offset, 0), total))
        ends.append(top)
    return ends[:-1], [stop - start for start, stop in itertools.pairwise(ends)]


def _lengths(seqused: Tensor | None, batch: int, size: int, device: torch.device) -> Tensor:
    if seqused is None:
        return torch.full((batch,), size, dtype=torch.int64, device=device)
    return seqused.to(torch.int64).clamp(0, size)


def _where_visible(visible: Tensor, *indices: Tensor) -> list[Tensor]:
    """Indices of every pair, those of one visible pair for the hidden ones: a function may read tensors that end before these."""
    if not visible.numel():
        return list(indices)
    place = visible.reshape(-1).to(torch.int8).argmax()
    spread = [index.expand(visible.shape) for index in indices]
    return [torch.where(visible, index, index.reshape(-1)[place]) for index in spread]


def _apply_score_mod(fn: Callable[..., Tensor], s: Tensor, *indices: Tensor) -> Tensor:
    """Calls ``fn(score, b, h, q_idx, kv_idx)`` on every element, each argument a scalar to the function."""
    if s.numel() == 0:
        return s
    flat = [index.expand(s.shape).reshape(-1) for index in indices]
    return torch.vmap(fn)(s.reshape(-1), *flat).reshape(s.shape).to(s.dtype)


def philox_keep(seed: int | Tensor | None, dropout_p: float, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Which probabilities dropout keeps, by position: Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

    Key: the low and high 32 bits of the seed. Counter words: (j div 4, i, h, b). Element j takes word j mod 4 and is kept when that
    word is at least floor(p * 2**32). Arguments broadcast; the result is bool.
    """
    if seed is None:
        raise ValueError("dropout in the reference needs dropout_seed")
    seed = int(seed) % (1 << 64)
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    c0, c1, c2, c3 = (x.to(torch.int64) for x in torch.broadcast_tensors(j // 4, i, h, b))
    for _ in range(10):
        hi0, lo0 = _mul_32x32(c0, 0xD2511F53)
        hi1, lo1 = _mul_32x32(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    words = torch.stack(torch.broadcast_tensors(c0, c1, c2, c3), -1)
    word = words.gather(-1, (j % 4).expand(words.shape[:-1])[..., None]).squeeze(-1)
    return word >= int(dropout_p * (1 << 32))


def _mul_32x32(x: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of x * constant, by 16-bit halves so that no product leaves int64."""
    low = (x & 0xFFFF) * constant  # < 2**48
    high = (x >> 16) * constant + (low >> 16)  # < 2**49
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)
