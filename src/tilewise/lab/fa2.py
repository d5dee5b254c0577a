"""FlashAttention in the order of its second paper: outer loop over Q, inner loop over K and V (Dao 2023, "FlashAttention-2", Algorithm 1).

A query tile stays on chip with its state until it has seen every key, so O is written once and its state never travels; K and V are read
again for every query tile. The accumulator is not normalised on the way: one division at the end. m and l leave as one number, the LSE.
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
) -> None:
    """o (heads, N, D) in the input dtype and lse (heads, N) in the accumulator's."""
    heads, n, d = q.shape
    for head in range(heads):
        for rows in tile_ranges(n, tiles.block_m):
            q_tile = q.load(head, rows)
            acc = torch.zeros(rows.stop - rows.start, d, dtype=accumulator(q.dtype))
            m = torch.full_like(acc[:, 0], float("-inf"))
            l = torch.zeros_like(m)
            for cols in tile_ranges(n, tiles.block_n):
                k_tile, v_tile = k.load(head, cols), v.load(head, cols)
                s = q_tile @ k_tile.T * scale
                m_new = torch.maximum(m, s.amax(1))
                rescale = torch.exp(m - m_new)
                p = torch.exp(s - m_new[:, None])
                l = l * rescale + p.sum(1)
                acc = acc * rescale[:, None] + p @ v_tile
                m = m_new
                memory.step(head=head, rows=rows, cols=cols, m=m, l=l, o=acc)
            o.store(acc / l[:, None], head, rows)
            lse.store(m + torch.log(l), head, rows)


def backward(
    memory: DeviceMemory,
    q: DeviceTensor,
    k: DeviceTensor,
    v: DeviceTensor,
    o: DeviceTensor,
    lse: DeviceTensor,
    do: DeviceTensor,
    dq: DeviceTensor,
    dk: DeviceTensor,
    dv: DeviceTensor,
    scale: float,
    tiles: Tiles,
) -> None:
    """dq, dk, dv from dO in three launches, each of which keeps what it accumulates on chip.

    The paper's Algorithm 2 visits each pair of tiles once and adds to dQ in device memory; here dQ has a pass of its own, so S and dP are
    computed twice (7 products instead of 5) and nothing is added to in device memory, which also makes the result repeatable.
    """
    heads, n, _ = q.shape
    delta = memory.scratch("delta", (heads, n), accumulator(q.dtype))
    for head in range(heads):
        for rows in tile_ranges(n, tiles.block_m):
            delta.store((do.load(head, rows) * o.load(head, rows)).sum(1), head, rows)
    for head in range(heads):
        for cols in tile_ranges(n, tiles.block_n):
            k_tile, v_tile = k.load(head, cols), v.load(head, cols)
            dk_acc, dv_acc = torch.zeros_like(k_tile), torch.zeros_like(v_tile)
            for rows in tile_ranges(n, tiles.block_m):
                q_tile, do_tile, lse_tile, delta_tile = (x.load(head, rows) for x in (q, do, lse, delta))
                p = torch.exp(q_tile @ k_tile.T * scale - lse_tile[:, None])
                ds = p * (do_tile @ v_tile.T - delta_tile[:, None])
                dv_acc += p.T @ do_tile
                dk_acc += ds.T @ q_tile * scale
            dk.store(dk_acc, head, cols)
            dv.store(dv_acc, head, cols)
    for head in range(heads):
        for rows in tile_ranges(n, tiles.block_m):
            q_tile, do_tile, lse_tile, delta_tile = (x.load(head, rows) for x in (q, do, lse, delta))
            dq_acc = torch.zeros_like(q_tile)
            for cols in tile_ranges(n, tiles.block_n):
                k_tile, v_tile = k.load(head, cols), v.load(head, cols)
                p = torch.exp(q_tile @ k_tile.T * scale - lse_tile[:, None])
                ds = p * (do_tile @ v_tile.T - delta_tile[:, None])
                dq_acc += ds @ k_tile * scale
            dq.store(dq_acc, head, rows)
    memory.free(delta)
