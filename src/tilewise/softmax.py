"""The softmax ladder: from the formula to the merge rule that makes attention tileable.

Each rung is a pure function of a vector; the last one is the rule that every kernel of this library applies to tiles.

For x = [2, 1, 3] the running maximum and sum are (2, 1), (2, 1.36788), (3, 1.50321):

>>> import torch
>>> states = [State.of(x) for x in torch.tensor([[2.0], [1.0], [3.0]], dtype=torch.float64)]
>>> running = states[0]
>>> for state in states[1:]:
...     running = running.merge(state)
...     print(f"m = {running.m.item():.0f}, l = {running.l.item():.5f}")
m = 2, l = 1.36788
m = 3, l = 1.50321
>>> [round(p, 5) for p in online_two_pass(torch.tensor([2.0, 1.0, 3.0], dtype=torch.float64)).tolist()]
[0.24473, 0.09003, 0.66524]
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

NEG_INF = float("-inf")


def naive(x: Tensor) -> Tensor:
    """exp(x) / sum(exp(x)) over a vector (N,), as the formula stands: overflows once exp(x) does.

    In float16 the largest number is 65504 and e^11 = 59874 still fits, so the first integer that overflows is 12.

    >>> naive(torch.tensor([11.0, 0.0], dtype=torch.float16)).isfinite().all().item()
    True
    >>> naive(torch.tensor([12.0, 0.0], dtype=torch.float16)).isfinite().all().item()
    False
    """
    e = torch.exp(x)
    return e / e.sum()


def safe_three_pass(x: Tensor) -> Tensor:
    """Softmax of a vector (N,) with the maximum subtracted: three passes over x (maximum, sum, result).

    A vector of -inf only has no distribution; it gives zeros, as an empty row of attention does.
    """
    m = x.max() if x.numel() else x.new_tensor(NEG_INF)
    if m == NEG_INF:
        return torch.zeros_like(x)
    denominator = torch.exp(x - m).sum()
    return torch.exp(x - m) / denominator


class State(NamedTuple):
    """The maximum m of a block of scores and the sum l of exp(score - m): all that softmax needs to know of it.

    The empty block is (-inf, 0), the identity of `merge`.
    """

    m: Tensor
    l: Tensor

    @classmethod
    def of(cls, x: Tensor) -> State:
        """The state of one block (N,) of scores, N = 0 and -inf included."""
        if x.numel() == 0:
            return cls(x.new_tensor(NEG_INF), x.new_tensor(0.0))
        m = x.max()
        return cls(m, torch.exp(x - torch.where(m == NEG_INF, 0.0, m)).sum())

    def merge(self, other: State) -> State:
        """The state of both blocks together: m = max(m1, m2), l = l1 e^(m1 - m) + l2 e^(m2 - m).

        Associative and commutative, so blocks may be taken in any order and grouped in any way (Milakov & Gimelshein 2018,
        "Online normalizer calculation for softmax", section 3.1).
        """
        m = torch.maximum(self.m, other.m)
        safe = torch.where(m == NEG_INF, 0.0, m)  # two empty blocks: (-inf) - (-inf) has no value
        return State(m, self.l * torch.exp(self.m - safe) + other.l * torch.exp(other.m - safe))


def online_two_pass(x: Tensor) -> Tensor:
    """Softmax of a vector (N,) with maximum and sum found in one pass, then the result in a second.

    When the maximum grows from m_old to m_new, the sum so far is multiplied by e^(m_old - m_new) (Milakov & Gimelshein 2018, Algorithm 3).
    """
    return blocked(x, block=1)


def blocked(x: Tensor, block: int) -> Tensor:
    """Softmax of a vector (N,) whose state is merged from blocks of ``block`` scores: what attention does tile by tile."""
    state = State.of(x[:0])
    for start in range(0, x.numel(), block):
        state = state.merge(State.of(x[start : start + block]))
    if state.m == NEG_INF:
        return torch.zeros_like(x)
    return torch.exp(x - state.m) / state.l
