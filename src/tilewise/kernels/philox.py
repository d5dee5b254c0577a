"""Dropout keyed by position: Philox4x32-10 in torch's int64 arithmetic.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), section 3.3. A word of the generator is a
function of a key (the seed) and a counter (the position), so any tile can be drawn on its own, in any order, and again in backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
_ROUNDS = 10


def philox(seed: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four 32-bit words of Philox4x32-10 for the 64-bit key `seed` (0-d int64) and the counter (c0, c1, c2, c3).

    The counter words are int64 tensors below 2**32 that broadcast against each other. Words the counter broadcasts over are computed
    once: the first two of ten rounds mix only parts of it. The results are int64 in [0, 2**32), not necessarily of the full shape.
    """
    # int64 products wrap modulo 2**64, which keeps all 64 bits of a 32 x 32 product: the high word survives the signed shift and a mask.
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = _high_xor(product1, c1, k0), product1  # bits above 32 of c1 and c3 are junk that _high_xor masks off
        c2, c3 = _high_xor(product0, c3, k1), product0
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1 & _WORD, c2, c3 & _WORD


def _high_xor(product: Tensor, word: Tensor, key: Tensor) -> Tensor:
    """The low 32 bits of (product >> 32) ^ word ^ key."""
    mixed = (product >> 32) ^ word
    return mixed.bitwise_xor_(key).bitwise_and_(_WORD)


def keep_mask(seed: Tensor, dropout_p: float, b: Tensor, h: Tensor, i: Tensor, start: int, stop: int) -> Tensor:
    """Which probabilities of keys start <= j < stop dropout keeps: bool, the shape of (b, h, i) broadcast with (..., stop - start).

    `b`, `h`, `i` are int64 and broadcast, with a last dimension of size 1: batch item, query head and query of each row. Element j takes
    word j mod 4 of the counter (j div 4, i, h, b) and is kept iff that word is at least floor(dropout_p * 2**32).
    """
    quads = torch.arange(start // 4, -(-stop // 4), dtype=torch.int64, device=seed.device)
    threshold = int(dropout_p * (1 << 32))
    shape = torch.broadcast_shapes(b.shape, h.shape, i.shape, quads.shape)
    keep = torch.empty(*shape, 4, dtype=torch.bool, device=seed.device)
    for word, values in enumerate(philox(seed, quads, i, h, b)):
        keep[..., word] = values >= threshold
    first = start - start // 4 * 4
    return keep.flatten(-2)[..., first : first + stop - start]
