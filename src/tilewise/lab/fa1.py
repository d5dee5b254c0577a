"""FlashAttention in the order of its first paper: outer loop over K and V, inner loop over Q (Dao et al. 2022, Algorithms 1 and 4).

One K and V tile stays on chip while all query tiles pass by. So the state of every query, O, m and l, must wait in device memory and is
read and written once for every K and V tile: Tc (2 N d + 4 N) elements. S and P never exist in device memory; backward computes them
again from Q, K, m and l.
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
    m: DeviceTensor,
    l: DeviceTensor,
    scale: float,
    tiles: Tiles,
) -> None:
    """o, m, l for (heads, N, D) inputs. They are state until the last tile has passed, so they stay in the accumulator's dtype."""
    heads, n, _ = q.shape
    for head in range(heads):
        for rows in tile_ranges(n, tiles.block_m):  # line 2: the state of no keys at all
            o.store(0.0, head, rows)
            m.store(float("-inf"), head, rows)
            l.store(0.0, head, rows)
        for cols in tile_ranges(n, tiles.block_n):
            k_tile, v_tile = k.load(head, cols), v.load(head, cols)
            for rows in tile_ranges(n, tiles.block_m):
                q_tile, o_tile, m_tile, l_tile = (x.load(head, rows) for x in (q, o, m, l))
                s = q_tile @ k_tile.T * scale
                m_block = s.amax(1)
                p = torch.exp(s - m_block[:, None])
                m_new = torch.maximum(m_tile, m_block)
                l_old = l_tile * torch.exp(m_tile - m_new)
                weight = torch.exp(m_block - m_new)
                l_new = l_old + weight * p.sum(1)
                # line 12: O is normalised after every tile, so it is undone, extended and divided again
                o_new = (l_old[:, None] * o_tile + weight[:, None] * (p @ v_tile)) / l_new[:, None]
                o.store(o_new, head, rows)
                m.store(m_new, head, rows)
                l.store(l_new, head, rows)
                memory.step(head=head, rows=rows, cols=cols, m=m_new, l=l_new, o=o_new)


def backward(
    q: DeviceTensor,
    k: DeviceTensor,
    v: DeviceTensor,
    o: DeviceTensor,
    m: DeviceTensor,
    l: DeviceTensor,
    do: DeviceTensor,
    dq: DeviceTensor,
    dk: DeviceTensor,
    dv: DeviceTensor,
    scale: float,
    tiles: Tiles,
) -> None:
    """dq, dk, dv from dO, recomputing P tile by tile; dq is state in device memory, as o was, and has the accumulator's dtype."""
    heads, n, _ = q.shape
    for head in range(heads):
        for rows in tile_ranges(n, tiles.block_m):
            dq.store(0.0, head, rows)
        for cols in tile_ranges(n, tiles.block_n):
            k_tile, v_tile = k.load(head, cols), v.load(head, cols)
            dk_acc, dv_acc = (torch.zeros_like(x, dtype=accumulator(x.dtype)) for x in (k_tile, v_tile))
            for rows in tile_ranges(n, tiles.block_m):
                q_tile, o_tile, do_tile, dq_tile = (x.load(head, rows) for x in (q, o, do, dq))
                m_tile, l_tile = m.load(head, rows), l.load(head, rows)
                p = torch.exp(q_tile @ k_tile.T * scale - m_tile[:, None]) / l_tile[:, None]
                delta = (do_tile * o_tile).sum(1)
                ds = p * (do_tile @ v_tile.T - delta[:, None])
                dv_acc += p.T @ do_tile
                dk_acc += ds.T @ q_tile * scale
                dq.store(dq_tile + ds @ k_tile * scale, head, rows)
            dk.store(dk_acc, head, cols)
            dv.store(dv_acc, head, cols)
