"""Softmax over the rows of a matrix that lives in device memory: three passes, two, one.

Each function reads x (rows, N) and writes y of the same shape, `block` elements at a time, one row after the other. What differs is how
often x crosses the border: 3 reads and a write, 2 and 1, 1 and 1 (Milakov & Gimelshein 2018, "Online normalizer calculation for softmax",
Algorithms 2 and 3).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .traffic import DeviceTensor, tile_ranges


def three_pass(x: DeviceTensor, y: DeviceTensor, block: int) -> None:
    """The maximum in a first pass, the sum in a second, the result in a third."""
    rows, length = x.shape
    for row in range(rows):
        m = torch.tensor(float("-inf"))
        for cols in tile_ranges(length, block):
            m = torch.maximum(m, x.load(row, cols).max())
        l = torch.tensor(0.0)
        for cols in tile_ranges(length, block):
            l = l + torch.exp(x.load(row, cols) - m).sum()
        for cols in tile_ranges(length, block):
            y.store(torch.exp(x.load(row, cols) - m) / l, row, cols)


def two_pass(x: DeviceTensor, y: DeviceTensor, block: int) -> None:
    """Maximum and sum together: the sum so far is rescaled by e^(m_old - m_new) when the maximum grows."""
    rows, length = x.shape
    for row in range(rows):
        m, l = torch.tensor(float("-inf")), torch.tensor(0.0)
        for cols in tile_ranges(length, block):
            m, l = online_update(m, l, x.load(row, cols))
        for cols in tile_ranges(length, block):
            y.store(torch.exp(x.load(row, cols) - m) / l, row, cols)


def online_update(m: Tensor, l: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Maximum and sum after one more block of scores."""
    m_new = torch.maximum(m, scores.max())
    return m_new, l * torch.exp(m - m_new) + torch.exp(scores - m_new).sum()


def one_pass(x: DeviceTensor, y: DeviceTensor) -> None:
    """The whole row on chip: read once, written once; possible only as long as a row fits."""
    for row in range(x.shape[0]):
        scores = x.load(row, slice(None))
        p = torch.exp(scores - scores.max())
        y.store(p / p.sum(), row, slice(None))
