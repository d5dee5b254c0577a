"""Reading a contiguous cache with the Hopper forward kernel: for as many new queries as fill its tiles.

A few queries are bound by memory, which the portable decoding kernel reads as fast as it can be read. From `LEAST_ROWS` in each tile on,
queries times the query heads that share a key head, the tensor cores decide. The call is then one of attention with lengths: its queries
stand at the end of what each item has. Heads that share keys share a tile, and keys are cut in parts where tiles are few (`parts`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from ...plan import Operands, Outputs, Request, Rules
from ..triton.launch import run
from . import forward
from . import why_not as why_not_attention
from .configs import ROWS
from .parts import fewest_tiles

if TYPE_CHECKING:
    from torch import Tensor

    from ...kvcache.call import CacheOperands, CacheRules
    from ...plan import Target

TILE_ROWS = 2 * ROWS  # of a tile that heads share
LEAST_ROWS = TILE_ROWS // 2  # in use; with fewer, memory decides, or the portable kernel's tiles, which hold any number of heads
ITEMS = 128  # of the batch a program


@triton.jit(do_not_specialize=["items", "appended", "capacity"])
def add_appended(lengths_ptr, result_ptr, items, appended, capacity, BLOCK: tl.constexpr):
    """How many keys each item has once the new ones are there, at most those that the cache has room for."""
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    length = tl.minimum(tl.maximum(tl.load(lengths_ptr + item, mask=item < items, other=0), 0), capacity)
    tl.store(result_ptr + item, tl.minimum(length + appended, capacity), mask=item < items)


def why_not(t: CacheOperands, r: CacheRules, target: Target) -> str | None:
    """Why this kernel does not serve a call over a cache, in words; None if it does. Reads shapes and dtypes only."""
    absent = {
        "packed queries": t.cu_seqlens_q,
        "pages": t.page_table,
        "cache_batch_idx": t.cache_batch_idx,
        "left padding": t.cache_leftpad,
        "rotary": t.rotary_cos,
        "a mask": t.mask,
        "a float8 cache": t.k_descale,
    }
    for name, x in absent.items():
        if x is not None:
            return f"it does not serve {name} over a cache"
    if r.mask_mod or r.num_splits or r.batch_invariant or t.k_cache.dtype != t.q.dtype:
        return "it does not serve mask functions, parts that are told, or a cache of another dtype"
    seqlen_q, group = t.q.shape[1], t.q.shape[2] // max(1, t.k_cache.shape[2])
    if t.capacity == 0 or seqlen_q * group < LEAST_ROWS * fewest_tiles(TILE_ROWS, seqlen_q, group):
        return "few queries are bound by memory, and few queries of many heads leave its tiles half empty"
    return why_not_attention(_operands(t, t.cache_seqlens), _rules(r), Request(), target)


def attention(t: CacheOperands, r: CacheRules, out: Tensor, lse: Tensor) -> None:
    """Fill out (B, Sq, Hq, Dv) and lse (B, Hq, Sq)."""
    lengths = None if t.cache_seqlens is None else t.cache_seqlens.contiguous()
    if lengths is not None and r.appended:
        before, items = lengths, t.q.shape[0]
        lengths = before.new_empty(items)
        run(add_appended, -(-items // ITEMS), before, lengths, items, r.appended, t.capacity, BLOCK=ITEMS, num_warps=4)
    forward(_operands(t, lengths), _rules(r), Outputs(out.transpose(1, 2), lse))


def _operands(t: CacheOperands, lengths: Tensor | None) -> Operands:
    q, k, v = (x.transpose(1, 2) for x in (t.q, t.k_cache, t.v_cache))
    return Operands(q, k, v, alibi_slopes=t.alibi_slopes, sink=t.sink, seqused_k=lengths)


def _rules(r: CacheRules) -> Rules:
    return Rules(r.softmax_scale, softcap=r.softcap, window_left=r.window_left, window_right=r.window_right)
