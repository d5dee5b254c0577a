"""Dropout keyed by position: Philox4x32-10 in 64-bit integer arithmetic of torch or NumPy.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), section 3.3. A word of the generator is a
function of a key (the seed) and a counter (the position), so any tile can be drawn on its own, in any order, and again in backward.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
ROUNDS = 10
_MIXING_ROUNDS = 3  # until every word depends on the whole counter; where the counter broadcasts, these are cheap


def philox(seed: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four 32-bit words of Philox4x32-10 for the 64-bit key `seed` (0-d int64) and the counter (c0, c1, c2, c3).

    The counter words are int64 tensors in [0, 2**32) that broadcast against each other; the results have the full shape.
    """
    if not _on_host(seed):
        return _rounds(torch, (c0, c1, c2, c3), _keys(seed), MULTIPLIERS, _WORD, 32)
    np = _numpy()
    counter = tuple(c.numpy().view(np.uint64) for c in (c0, c1, c2, c3))
    keys = [(np.uint64(k0), np.uint64(k1)) for k0, k1 in _keys(int(seed))]
    words = _rounds(np, counter, keys, tuple(map(np.uint64, MULTIPLIERS)), np.uint64(_WORD), np.uint64(32))
    return tuple(torch.from_numpy(word.view(np.int64)) for word in words)  # type: ignore[return-value]


def _on_host(seed: Tensor) -> bool:
    return seed.device.type == "cpu" and _numpy() is not None


def _rounds(xp: Any, counter: tuple[Any, ...], keys: list[tuple[Any, Any]], multipliers: tuple[Any, ...], mask: Any, half: Any) -> Any:
    """The ten rounds, in the arithmetic of `xp`: torch's int64, or NumPy's uint64."""
    # Products wrap modulo 2**64, which keeps all 64 bits of a 32 x 32 product; the mask makes a signed shift an unsigned one.
    # Between rounds c1 and c3 hold whole products: the bits above 32 are masked off where they are used.
    c0, c1, c2, c3 = counter
    for k0, k1 in keys[:_MIXING_ROUNDS]:
        product0, product1 = c0 * multipliers[0], c2 * multipliers[1]
        c0, c1 = ((product1 >> half) ^ c1 ^ k0) & mask, product1
        c2, c3 = ((product0 >> half) ^ c3 ^ k1) & mask, product0
    shape = (c0 ^ c2).shape  # that of all four from now on
    c0, c1, c2, c3 = (c if c.shape == shape else xp.zeros_like(c0 ^ c2) ^ c for c in (c0, c1, c2, c3))
    product0, product1 = xp.empty_like(c0), xp.empty_like(c0)
    shift = getattr(xp, "bitwise_right_shift", None) or xp.right_shift  # NumPy has both names from 2.0 on
    for k0, k1 in keys[_MIXING_ROUNDS:]:
        xp.multiply(c0, multipliers[0], out=product0)
        xp.multiply(c2, multipliers[1], out=product1)
        for c, product, other, key in ((c0, product1, c1, k0), (c2, product0, c3, k1)):
            shift(product, half, out=c)
            xp.bitwise_xor(c, other, out=c)
            xp.bitwise_xor(c, key, out=c)
            xp.bitwise_and(c, mask, out=c)
        c1, product1 = product1, c1
        c3, product0 = product0, c3
    return c0, c1 & mask, c2, c3 & mask


def _keys(word: Any) -> list[tuple[Any, Any]]:
    """The two key words of each round for a 64-bit seed."""
    low, high = word & _WORD, (word >> 32) & _WORD
    return [((low + n * WEYL[0]) & _WORD, (high + n * WEYL[1]) & _WORD) for n in range(ROUNDS)]


@functools.cache
def _numpy() -> Any:
    """NumPy, where it is installed and torch was built for it: on a CPU its integer arithmetic takes a third of the time of torch's."""
    try:
        import numpy

        torch.empty(0, device="cpu").numpy()
    except (ImportError, RuntimeError):
        return None
    return numpy


def keep_mask(seed: Tensor, dropout_p: float, b: Tensor, h: Tensor, i: Tensor, start: int, stop: int) -> Tensor:
    """Which probabilities of keys start <= j < stop dropout keeps: bool, the shape of (b, h, i) broadcast with (..., stop - start).

    `b`, `h`, `i` are int64 and broadcast, with a last dimension of size 1: batch item, query head and query of each row. Element j takes
    word j mod 4 of the counter (j div 4, i, h, b) and is kept iff that word is at least floor(dropout_p * 2**32).
    """
    quads = torch.arange(start // 4, -(-stop // 4), device=seed.device)
    threshold = int(dropout_p * (1 << 32))
    words = philox(seed, quads, i, h, b)
    keep = torch.empty(*words[0].shape, 4, dtype=torch.bool, device=seed.device)
    if _on_host(seed):
        np = _numpy()
        for n, word in enumerate(words):
            np.greater_equal(word.numpy(), threshold, out=keep.numpy()[..., n])
    else:
        for n, word in enumerate(words):
            torch.ge(word, threshold, out=keep[..., n])
    first = start % 4
    return keep.flatten(-2)[..., first : first + stop - start]


def write_keep_mask(out: Tensor, *args: Any) -> None:
    """`keep_mask(*args)` as 0 and 1 in the memory of ``out``, which has its shape and an integer dtype."""
    keep = keep_mask(*args)
    if _on_host(args[0]):
        out.numpy()[...] = keep.numpy()
    else:
        out.copy_(keep)


def in_threads(work: Callable[[slice], None], parts: Sequence[slice]) -> None:
    """``work(part)`` for every part, on as many threads as torch uses: NumPy, unlike torch, computes on the thread that calls it."""
    threads = min(torch.get_num_threads(), len(parts)) if _numpy() is not None else 1
    if threads == 1:
        for part in parts:
            work(part)
    else:
        list(_pool(os.getpid(), torch.get_num_threads()).map(work, parts))


@functools.lru_cache(maxsize=1)
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Of this process: the threads of a parent do not survive a fork."""
    return ThreadPoolExecutor(threads, thread_name_prefix="tilewise-dropout")
