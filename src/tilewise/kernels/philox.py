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
_MIXING_ROUNDS = 3  # until every word depends on the whole counter; where the counter broadcasts, these are cheap


def philox(seed: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four 32-bit words of Philox4x32-10 for the 64-bit key `seed` (0-d int64) and the counter (c0, c1, c2, c3).

    The counter words are int64 tensors in [0, 2**32) that broadcast against each other; the results have the full shape.
    """
    # int64 products wrap modulo 2**64, which keeps all 64 bits of a 32 x 32 product; the mask makes the signed shift an unsigned one.
    # Between rounds c1 and c3 hold whole products: the bits above 32 are masked off where they are used.
    shape = torch.broadcast_shapes(c0.shape, c1.shape, c2.shape, c3.shape)
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(_MIXING_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = ((product1 >> 32) ^ c1 ^ k0) & _WORD, product1
        c2, c3 = ((product0 >> 32) ^ c3 ^ k1) & _WORD, product0
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    c0, c1, c2, c3 = (c if c.shape == shape else c.expand(shape).contiguous() for c in (c0, c1, c2, c3))
    product0, product1 = torch.empty_like(c0), torch.empty_like(c0)
    for _ in range(_ROUNDS - _MIXING_ROUNDS):
        torch.mul(c0, _MULTIPLIERS[0], out=product0)
        torch.mul(c2, _MULTIPLIERS[1], out=product1)
        torch.bitwise_right_shift(product1, 32, out=c0).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(_WORD)
        torch.bitwise_right_shift(product0, 32, out=c2).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(_WORD)
        c1, product1 = product1, c1
        c3, product0 = product0, c3
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1.bitwise_and_(_WORD), c2, c3.bitwise_and_(_WORD)


def keep_mask(seed: Tensor, dropout_p: float, b: Tensor, h: Tensor, i: Tensor, start: int, stop: int) -> Tensor:
    """Which probabilities of keys start <= j < stop dropout keeps: bool, the shape of (b, h, i) broadcast with (..., stop - start).

    `b`, `h`, `i` are int64 and broadcast, with a last dimension of size 1: batch item, query head and query of each row. Element j takes
    word j mod 4 of the counter (j div 4, i, h, b) and is kept iff that word is at least floor(dropout_p * 2**32).
    """
    quads = torch.arange(start // 4, -(-stop // 4), device=seed.device)
    threshold = int(dropout_p * (1 << 32))
    words = philox(seed, quads, i, h, b)
    keep = torch.empty(*words[0].shape, 4, dtype=torch.bool, device=seed.device)
    for n, word in enumerate(words):
        torch.ge(word, threshold, out=keep[..., n])
    first = start % 4
    return keep.flatten(-2)[..., first : first + stop - start]
