"""Attention in plain Python numbers: loops over single elements, written from the index rules alone.

It shares nothing with `tilewise.reference`, which is checked against it, and imports neither torch nor tilewise. For tiny shapes only.
All arrays are numpy float64 in (batch, sequence, heads, dim) order; bias and mask broadcast to (batch, query heads, Sq, Sk).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

WORD = 0xFFFFFFFF


def philox_4x32_10(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Ten rounds of Philox-4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.4)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        left, right = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (right >> 32) ^ c1 ^ k0, right & WORD, (left >> 32) ^ c3 ^ k1, left & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3


def is_kept(seed: int, p: float, b: int, h: int, i: int, j: int) -> bool:
    """Whether dropout of probability p keeps the probability of query i and key j in batch item b and query head h."""
    words = philox_4x32_10((j // 4, i, h, b), (seed & WORD, (seed >> 32) & WORD))
    return words[j % 4] >= math.floor(p * 2**32)


@dataclass
class Answer:
    """Everything that one call of attention may return, and the probabilities before dropout."""

    out: Array  # (B, Sq, Hq, Dv)
    lse: Array  # (B, Hq, Sq)
    max_logits: Array  # (Hq,)
    key_mass: Array  # (B, Hq, Sk)
    entropy: Array  # (B, Hq, Sq)
    probabilities: Array  # (B, Hq, Sq, Sk)


def is_visible(p: int, j: int, len_k: int, causal: bool, window_size: tuple[int, int]) -> bool:
    """The rules of position: key j for a query that stands at p."""
    left, right = window_size
    if j >= len_k or (causal and j > p):
        return False
    return (left < 0 or p - left <= j) and (right < 0 or j <= p + right)


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    mask: NDArray[np.bool_] | None = None,
    bias: Array | None = None,
    score_mod: Callable[[float, int, int, int, int], float] | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    learnable_sink: Array | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
    seqused_q: Sequence[int] | None = None,
    seqused_k: Sequence[int] | None = None,
) -> Answer:
    """softmax(q kᵀ) v, one score at a time."""
    batch, size_q, heads, dim = q.shape
    size_k, heads_k = k.shape[1:3]
    dim_v = v.shape[3]
    scale = softmax_scale if softmax_scale is not None else (1 / math.sqrt(dim) if dim else 1.0)
    full = (batch, heads, size_q, size_k)
    visible_by_mask = np.broadcast_to(np.asarray(True) if mask is None else mask, full)
    bias_full = None if bias is None else np.broadcast_to(bias, full)
    slopes = None if alibi_slopes is None else np.broadcast_to(alibi_slopes, (batch, heads))

    answer = Answer(
        out=np.zeros((batch, size_q, heads, dim_v)),
        lse=np.full((batch, heads, size_q), -math.inf),
        max_logits=np.full((heads,), -math.inf),
        key_mass=np.zeros((batch, heads, size_k)),
        entropy=np.zeros((batch, heads, size_q)),
        probabilities=np.zeros(full),
    )
    for b in range(batch):
        len_q = size_q if seqused_q is None else min(max(int(seqused_q[b]), 0), size_q)
        len_k = size_k if seqused_k is None else min(max(int(seqused_k[b]), 0), size_k)
        for h in range(heads):
            group = h // (heads // heads_k)
            for i in range(len_q):
                p = i + len_k - len_q
                scores: dict[int, float] = {}
                for j in range(size_k):
                    if not (is_visible(p, j, len_k, causal, window_size) and visible_by_mask[b, h, i, j]):
                        continue
                    s = scale * sum(q[b, i, h, d] * k[b, j, group, d] for d in range(dim))
                    if softcap:
                        s = softcap * math.tanh(s / softcap)
                    if bias_full is not None:
                        s += bias_full[b, h, i, j]
                    if slopes is not None:
                        s -= slopes[b, h] * abs(p - j)
                    if score_mod is not None:
                        s = score_mod(s, b, h, i, j)
                    if s != -math.inf:
                        scores[j] = s
                answer.max_logits[h] = max([answer.max_logits[h], *scores.values()])
                logits = list(scores.values()) + ([] if learnable_sink is None else [float(learnable_sink[h])])
                if not logits:
                    continue
                top = max(logits)
                lse = top + math.log(sum(math.exp(s - top) for s in logits)) if top != -math.inf else -math.inf
                answer.lse[b, h, i] = lse
                for j, s in scores.items():
                    probability = math.exp(s - lse)
                    answer.probabilities[b, h, i, j] = probability
                    answer.key_mass[b, h, j] += probability
                    if probability > 0:
                        answer.entropy[b, h, i] -= probability * math.log(probability)
                    kept = 1.0
                    if dropout_p:
                        kept = is_kept(dropout_seed, dropout_p, b, h, i, j) / (1 - dropout_p)
                    for d in range(dim_v):
                        answer.out[b, i, h, d] += probability * kept * v[b, j, group, d]
    return answer


def numeric_gradient(function: Callable[[Array], float], at: Array, step: float = 1e-5) -> Array:
    """Central differences of a scalar function, one element at a time."""
    gradient = np.zeros_like(at)
    for index in np.ndindex(at.shape):
        up, down = at.copy(), at.copy()
        up[index] += step
        down[index] -= step
        gradient[index] = (function(up) - function(down)) / (2 * step)
    return gradient
