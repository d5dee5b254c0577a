"""Standard attention: S and P exist in device memory (Dao et al. 2022, "FlashAttention", Algorithm 0).

Three launches and six trips: read Q and K, write S; read S, write P; read P and V, write O. The two matrix products are tiled, as any
matrix product on a GPU is, so Q and V also travel once for every tile that needs them.
"""

from __future__ import annotations

import torch

from . import softmax_rows
from .traffic import DeviceMemory, DeviceTensor, Tiles, accumulator, tile_ranges


def forward(memory: DeviceMemory, q: DeviceTensor, k: DeviceTensor, v: DeviceTensor, o: DeviceTensor, scale: float, tiles: Tiles) -> None:
    """o = softmax(scale q k^T) v for (heads, N, D) tensors; S and P are held in the input dtype."""
    heads, n, _ = q.shape
    s = memory.scratch("s", (heads, n, n), q.dtype)
    scores(q, k, s, scale, tiles)
    p = memory.scratch("p", (heads, n, n), q.dtype)
    flat_s, flat_p = (DeviceTensor(memory, x.name, x.data.view(heads * n, n)) for x in (s, p))
    softmax_rows.one_pass(flat_s, flat_p)
    weighted_sum(p, v, o, tiles)
    memory.free(s, p)


def scores(q: DeviceTensor, k: DeviceTensor, s: DeviceTensor, scale: float, tiles: Tiles) -> None:
    """S = scale Q K^T, one tile of S after the other."""
    heads, n, _ = q.shape
    for head in range(heads):
        for rows in tile_ranges(n, tiles.block_m):
            for cols in tile_ranges(n, tiles.block_n):
                s.store(q.load(head, rows) @ k.load(head, cols).T * scale, head, rows, cols)


def weighted_sum(p: DeviceTensor, v: DeviceTensor, o: DeviceTensor, tiles: Tiles) -> None:
    """O = P V, one tile of O after the other."""
    heads, n, d = v.shape
    for head in range(heads):
        for rows in tile_ranges(n, tiles.block_m):
            acc = torch.zeros(rows.stop - rows.start, d, dtype=accumulator(v.dtype))
            for cols in tile_ranges(n, tiles.block_n):
                acc += p.load(head, rows, cols) @ v.load(head, cols)
            o.store(acc, head, rows)
