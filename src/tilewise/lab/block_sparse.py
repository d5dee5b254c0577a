"""Block-sparse FlashAttention: the loops of `fa2`, leaving out the tiles that a block mask leaves out (Dao et al. 2022, section 3.3).

Traffic and time fall with the density of the mask: Theta(N d + N^2 d^2 s / M) for a fraction s of the tiles (Proposition 4). Which
tiles a query tile visits is a list in device memory, so it is counted too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .traffic import DeviceMemory, DeviceTensor, Tiles, accumulator, tile_ranges


def tile_lists(mask: Tensor) -> tuple[Tensor, Tensor]:
    """How many key tiles each query tile visits (Tr,), and which (Tr, Tc), int32, for a bool mask of tiles (Tr, Tc).

    >>> counts, indices = tile_lists(torch.tensor([[True, False, True], [False, False, False]]))
    >>> counts.tolist(), indices.tolist()
    ([2, 0], [[0, 2, -1], [-1, -1, -1]])
    """
    counts = mask.sum(1, dtype=torch.int32)
    order = torch.argsort(~mask, dim=1, stable=True).to(torch.int32)
    listed = torch.arange(mask.shape[1]) < counts[:, None]
    return counts, torch.where(listed, order, -1).to(torch.int32)


def random_mask(tiles_m: int, tiles_n: int, density: float, seed: int = 0) -> Tensor:
    """A bool mask (Tr, Tc) with round(density Tc) tiles in every row, at least one.

    >>> random_mask(4, 8, 0.25).sum(1).tolist()
    [2, 2, 2, 2]
    """
    generator = torch.Generator().manual_seed(seed)
    kept = max(1, round(density * tiles_n))
    ranks = torch.rand(tiles_m, tiles_n, generator=generator).argsort(1).argsort(1)
    return ranks < kept


def forward(
    memory: DeviceMemory,
    q: DeviceTensor,
    k: DeviceTensor,
    v: DeviceTensor,
    o: DeviceTensor,
    lse: DeviceTensor,
    counts: DeviceTensor,
    indices: DeviceTensor,
    scale: float,
    tiles: Tiles,
) -> None:
    """As `fa2.forward` over the tiles listed; a row that visits none gets 0 and the LSE of no keys, -inf."""
    heads, n, d = q.shape
    for head in range(heads):
        for number, rows in enumerate(tile_ranges(n, tiles.block_m)):
            q_tile = q.load(head, rows)
            acc = torch.zeros(rows.stop - rows.start, d, dtype=accumulator(q.dtype))
            m = torch.full_like(acc[:, 0], float("-inf"))
            l = torch.zeros_like(m)
            for position in range(int(counts.load(number))):
                start = int(indices.load(number, position)) * tiles.block_n
                cols = slice(start, min(start + tiles.block_n, n))
                k_tile, v_tile = k.load(head, cols), v.load(head, cols)
                s = q_tile @ k_tile.T * scale
                m_new = torch.maximum(m, s.amax(1))
                rescale = torch.exp(m - m_new)
                p = torch.exp(s - m_new[:, None])
                l = l * rescale + p.sum(1)
                acc = acc * rescale[:, None] + p @ v_tile
                m = m_new
                memory.step(head=head, rows=rows, cols=cols, m=m, l=l, o=acc)
            empty = l == 0
            o.store(acc / torch.where(empty, 1.0, l)[:, None], head, rows)
            lse.store(torch.where(empty, float("-inf"), m + torch.log(l)), head, rows)
