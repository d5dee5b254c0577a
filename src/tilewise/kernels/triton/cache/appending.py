"""Appending to a cache: new keys, turned by their rotary embedding, and new values go to the slots of their positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from ..configs import padded
from ..launch import alignment, contiguous, run, strides
from .launch import on_device, table
from .tiles import columns, load_turned

if TYPE_CHECKING:
    from ....kvcache.call import AppendOperands

ROWS = 16  # tokens times heads of one program
RUNTIME = [f"stride_{x}{dim}" for x in ("k", "v", "kc", "vc") for dim in "bsh"]
RUNTIME += ["stride_table", "tokens", "kv_heads", "size", "capacity", "slots", "rows", "positions"]


@triton.jit(do_not_specialize=RUNTIME)
def cache_append(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, lengths_ptr, table_ptr, index_ptr, cos_ptr, sin_ptr,
    stride_kb: tl.int64, stride_ks: tl.int64, stride_kh: tl.int64, stride_kd,
    stride_vb: tl.int64, stride_vs: tl.int64, stride_vh: tl.int64, stride_vd,
    stride_kcb: tl.int64, stride_kcs: tl.int64, stride_kch: tl.int64, stride_kcd,
    stride_vcb: tl.int64, stride_vcs: tl.int64, stride_vch: tl.int64, stride_vcd,
    stride_table: tl.int64, tokens, kv_heads, size, capacity, slots, rows, positions,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_R: tl.constexpr, ALIGN: tl.constexpr,
    ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Tokens times heads, BLOCK_R a program; a token whose position has no slot in the cache is dropped."""
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    token, h = r // kv_heads, r % kv_heads
    b, i = token // size, token % size
    inside = token < tokens
    length = tl.load(lengths_ptr + b, mask=inside, other=0).to(tl.int64)
    position = tl.minimum(tl.maximum(length, 0), capacity) + i
    kept = inside & (position < capacity)
    row, slot = b, position
    if table_ptr is not None:
        row = tl.load(table_ptr + b * stride_table + position // slots, mask=kept, other=-1).to(tl.int64)
        slot = position % slots
    elif index_ptr is not None:
        row = tl.load(index_ptr + b, mask=kept, other=-1).to(tl.int64)
    kept = kept & (row >= 0) & (row < rows)

    turn = None
    if cos_ptr is not None:
        turn = (cos_ptr, sin_ptr, positions)
    source = k_ptr + (b * stride_kb + i * stride_ks + h * stride_kh) * ALIGN
    k = load_turned(source, kept, stride_kd, position, turn, 0, BLOCK_D, D, ROTARY, INTERLEAVED)  # [R, D]
    target = k_cache_ptr + (row * stride_kcb + slot * stride_kcs + h * stride_kch) * ALIGN
    offs_d = tl.arange(0, BLOCK_D)
    tl.store(target[:, None] + columns(0, BLOCK_D, stride_kcd)[None, :], k, mask=kept[:, None] & (offs_d < D)[None, :])
    if v_ptr is not None:
        source = v_ptr + (b * stride_vb + i * stride_vs + h * stride_vh) * ALIGN
        offs_d = tl.arange(0, BLOCK_DV)
        written = kept[:, None] & (offs_d < DV)[None, :]
        v = tl.load(source[:, None] + columns(0, BLOCK_DV, stride_vd)[None, :], mask=written, other=0.0)  # [R, DV]
        target = v_cache_ptr + (row * stride_vcb + slot * stride_vcs + h * stride_vch) * ALIGN
        tl.store(target[:, None] + columns(0, BLOCK_DV, stride_vcd)[None, :], v, mask=written)


def append(t: AppendOperands) -> None:
    """Writes into the caches on the current stream of their device."""
    batch, size, kv_heads, dim = t.k.shape
    dim_v = 0 if t.v is None else t.v.shape[3]
    align = alignment(*[x for x in (t.k, t.v, t.k_cache, t.v_cache) if x is not None])
    page_table = table(t.page_table)
    positions, columns = (0, 0) if t.rotary_cos is None else t.rotary_cos.shape
    with on_device(t.k.device):
        run(
            cache_append, -(-batch * size * kv_heads // ROWS), t.k, t.v, t.k_cache, t.v_cache, contiguous(t.cache_seqlens), page_table,
            contiguous(t.cache_batch_idx), contiguous(t.rotary_cos), contiguous(t.rotary_sin),
            *strides(t.k, align), *strides(t.v, align), *strides(t.k_cache, align), *strides(t.v_cache, align),
            0 if page_table is None else page_table.stride(0), batch * size, kv_heads, size, t.capacity, t.k_cache.shape[1],
            t.k_cache.shape[0], positions,
            D=dim, DV=dim_v, BLOCK_D=padded(dim), BLOCK_DV=padded(max(dim_v, 1)), BLOCK_R=ROWS, ALIGN=align, ROTARY=2 * columns,
            INTERLEAVED=t.rotary_interleaved, num_warps=4,
        )  # fmt: skip
