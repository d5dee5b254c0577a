"""Beyond the head dimension that a tile can hold: the loops of `fa2`, with the head dimension cut into pieces.

On chip there is a tile of S and one piece of Q, K, V and O, so the need no longer grows with D. The price: S is summed up from
pieces, and computed again for every piece of O; Q is read again with every K tile. Used only where `fa2` does not fit.
"""

from __future__ import annotations

import torch

from .traffic import DeviceMemory, DeviceTensor, Tiles, accumulator, tile_ranges


def forward(
    memory: DeviceMemory,
    q: DeviceTensor,
    k: DeviceTensor,
    v: DeviceTensor,
    o: DeviceTensor,
    lse: DeviceTensor,
    scale: float,
    tiles: Tiles,
    piece: int,
) -> None:
    """As `fa2.forward`, with `piece` columns of the head dimension at a time."""
    heads, n, d = q.shape
    for head in range(heads):
        for rows in tile_ranges(n, tiles.block_m):
            for out_dims in tile_ranges(d, piece):
                acc = torch.zeros(rows.stop - rows.start, out_dims.stop - out_dims.start, dtype=accumulator(q.dtype))
                m = torch.full_like(acc[:, 0], float("-inf"))
                l = torch.zeros_like(m)
                for cols in tile_ranges(n, tiles.block_n):
                    s = torch.zeros(rows.stop - rows.start, cols.stop - cols.start, dtype=acc.dtype)
                    for dims in tile_ranges(d, piece):
                        s += q.load(head, rows, dims) @ k.load(head, cols, dims).T
                    s = s * scale
                    m_new = torch.maximum(m, s.amax(1))
                    rescale = torch.exp(m - m_new)
                    p = torch.exp(s - m_new[:, None])
                    l = l * rescale + p.sum(1)
                    acc = acc * rescale[:, None] + p @ v.load(head, cols, out_dims)
                    m = m_new
                o.store(acc / l[:, None], head, rows, out_dims)
                if out_dims.start == 0:
                    lse.store(m + torch.log(l), head, rows)
