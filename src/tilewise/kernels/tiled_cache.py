"""Attention over a cache in plain torch, tile by tile: any device, every feature; of a paged cache one tile of pages at a time.

Each item is visited alone and its tiles end at fixed positions, so that its bits do not depend on what else is in the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kvcache.call import AppendOperands, CacheOperands, CacheRules
from ..plan import accumulator_dtype
from .chunks import NEG_INF, host_reads, program
from .tiled import accumulate, finite, hide, online_softmax_update

TILE_SCORES = 1 << 20  # scores of a step, over all heads
TILE_KEYS = 512


def attention(t: CacheOperands, r: CacheRules, out: Tensor, lse: Tensor) -> None:
    """Fills out (B, Sq, Hq, Dv) and lse (B, Hq, Sq); packed: (1, total, Hq, Dv) and (Hq, total), 0 and -inf past the last offset."""
    if t.cu_seqlens_q is None:
        for b in range(t.batch):
            attend(t, r, b, t.q[b], None, out[b], lse[b])
        return
    out.zero_()
    lse.fill_(NEG_INF)
    total = t.q.shape[1]
    offsets = t.cu_seqlens_q
    if host_reads(t.q.device):
        bounds = offsets.tolist()
        for b in range(t.batch):
            part = slice(bounds[b], bounds[b + 1])
            attend(t, r, b, t.q[0, part], None, out[0, part], lse[:, part])
        return
    # The host must not read the offsets: as many rows as an item may have are fetched from its first on, and its own alone are kept.
    window = torch.arange(total, device=t.q.device)
    for b in range(t.batch):
        rows = (offsets[b] + window) % total  # past the end it begins anew: no row twice
        length = offsets[b + 1] - offsets[b]
        part_out, part_lse = out.new_empty(len(rows), *out.shape[2:]), lse.new_empty(lse.shape[0], len(rows))
        attend(t, r, b, t.q[0, rows], length, part_out, part_lse)
        own = window < length
        out[0, rows] = torch.where(own[:, None, None], part_out, out[0, rows])
        lse[:, rows] = torch.where(own, part_lse, lse[:, rows])


def attend(t: CacheOperands, r: CacheRules, b: int, q: Tensor, length_q: Tensor | None, out: Tensor, lse: Tensor) -> None:
    """One item: q (M, Hq, D) to out (M, Hq, Dv) and lse (Hq, M). `length_q` counts the queries where that is known to the device alone."""
    host = host_reads(q.device)
    len_k, stored, leftpad = lengths(t, r, b, host)
    first = len_k - (len(q) if length_q is None else length_q)  # position of query 0
    step = max(1, TILE_SCORES // (max(1, q.shape[1]) * TILE_KEYS))
    for start in range(0, len(q), step):
        rows = slice(start, min(start + step, len(q)))
        attend_tile(t, r, b, q[rows], first + start, start, stored, leftpad, out[rows], lse[:, rows])


def attend_tile(
    t: CacheOperands, r: CacheRules, b: int, q: Tensor, first: int | Tensor, start: int, stored: int | Tensor, leftpad: int | Tensor,
    out: Tensor, lse: Tensor,
) -> None:  # fmt: skip
    """A tile of queries of one item, the first of which is query `start` and stands at position `first`."""
    count, heads, head_dim = q.shape
    kv_heads, head_dim_v = t.v_cache.shape[2:]
    dtype, device = accumulator_dtype(q.dtype), q.device
    p = torch.arange(count, device=device) + first
    if t.rotary_cos is not None and t.rotary_sin is not None:
        q = rotate(q, t.rotary_cos, t.rotary_sin, p, r.rotary_interleaved)
    scale = r.softmax_scale
    group = heads // kv_heads if kv_heads else 1
    grouped = (q.to(dtype) * scale).view(count, kv_heads, group, head_dim)
    grouped = grouped.permute(1, 2, 0, 3).reshape(kv_heads, group * count, head_dim)
    if t.k_descale is not None:
        grouped = grouped * of_item(t.k_descale, b).to(dtype)[:, None, None]

    m = grouped.new_full((kv_heads, group * count, 1), NEG_INF)
    l = torch.zeros_like(m)
    o = grouped.new_zeros(kv_heads, group * count, head_dim_v)
    begin, end = key_range(r, first, count, stored, leftpad, t.capacity)
    for j0 in range(begin // TILE_KEYS * TILE_KEYS, end, TILE_KEYS):
        j = torch.arange(j0, min(j0 + TILE_KEYS, end), device=device)
        hidden = hidden_from(t, r, b, p, j, start, stored, leftpad)  # (Hq or 1, M or 1, N)
        of_keys = hidden.all(1).expand(heads, -1).view(kv_heads, group, -1).all(1)[..., None]  # (Hk, N, 1)
        keys = fetch(t, t.k_cache, b, j0, len(j)).to(dtype).masked_fill(of_keys, 0.0)
        s = torch.bmm(grouped, keys.mT, out=grouped.new_empty(kv_heads, group * count, len(j)))  # out=: autocast leaves it alone
        if r.softcap > 0:
            s.div_(r.softcap).tanh_().mul_(r.softcap)
        tile = s.view(heads, count, len(j))
        if t.alibi_slopes is not None:
            slopes = of_item(t.alibi_slopes, b).to(dtype)[:, None, None]
            tile.addcmul_(slopes, (p[:, None] - j).abs().to(dtype), value=-1)
        hide(tile, hidden)
        weights, alpha = online_softmax_update(s, m, l)
        values = fetch(t, t.v_cache, b, j0, len(j)).to(dtype).masked_fill(of_keys, 0.0)
        accumulate(o, alpha, torch.bmm(weights, values, out=torch.empty_like(o)))

    if t.sink is not None:
        sink = t.sink.to(dtype).view(kv_heads, group, 1).expand(-1, -1, count).reshape(kv_heads, group * count, 1)
        m_new = torch.maximum(m, sink)
        alpha = (m - finite(m_new)).exp_()
        l.mul_(alpha).add_((sink - finite(m_new)).exp_())
        o.mul_(alpha)
        m = m_new
    lse.copy_((m + l.log()).view(heads, count))
    o.div_(l.masked_fill(l == 0, 1.0))
    if t.v_descale is not None:
        o.mul_(of_item(t.v_descale, b).to(dtype)[:, None, None])
    out.copy_(o.view(heads, count, head_dim_v).transpose(0, 1))


def of_item(x: Tensor, b: int) -> Tensor:
    """The row of item b in a tensor that may have one for all."""
    return x[b if x.shape[0] > 1 else 0]


def lengths(t: CacheOperands, r: CacheRules, b: int, host: bool) -> tuple[int | Tensor, int | Tensor, int | Tensor]:
    """Keys of item b, how many of them have a slot, and its left padding: numbers where the host may read them."""
    capacity = t.capacity
    len_k: int | Tensor = capacity
    leftpad: int | Tensor = 0
    if t.cache_seqlens is not None:
        length = t.cache_seqlens[b]
        len_k = (min(max(int(length), 0), capacity) if host else length.clamp(0, capacity)) + r.appended
    if t.cache_leftpad is not None:
        padding = t.cache_leftpad[b]
        leftpad = max(int(padding), 0) if host else padding.clamp(min=0)
    stored = min(len_k, capacity) if isinstance(len_k, int) else len_k.clamp(max=capacity)
    return len_k, stored, leftpad


def key_range(
    r: CacheRules, first: int | Tensor, count: int, stored: int | Tensor, leftpad: int | Tensor, capacity: int
) -> tuple[int, int]:
    """The keys that some query may see, as far as the host knows."""
    if isinstance(stored, Tensor) or isinstance(first, Tensor) or isinstance(leftpad, Tensor):
        return 0, capacity
    begin, end = leftpad, stored
    if r.window_left >= 0:
        begin = max(begin, first - r.window_left)
    if r.window_right >= 0:
        end = min(end, first + count + r.window_right)
    return begin, end


def hidden_from(
    t: CacheOperands, r: CacheRules, b: int, p: Tensor, j: Tensor, start: int, stored: int | Tensor, leftpad: int | Tensor
) -> Tensor:
    """What each query must not see: (Hq or 1, M or 1, N)."""
    position, key = p[None, :, None], j[None, None, :]
    hidden = (key >= stored) | (key < leftpad)
    if r.window_left >= 0:
        hidden = hidden | (key < position - r.window_left)
    if r.window_right >= 0:
        hidden = hidden | (key > position + r.window_right)
    if t.mask is not None:
        mask = of_item(t.mask, b)  # (Hq or 1, Sq or 1, capacity or 1)
        rows = slice(start, start + len(p)) if mask.shape[1] > 1 else slice(None)
        hidden = hidden | ~(mask[:, rows, j] if mask.shape[2] > 1 else mask[:, rows])
    if r.mask_mod:
        heads = torch.arange(t.q.shape[2], device=p.device)[:, None, None]
        at = {"b": torch.full_like(heads[:1], b), "h": heads, "q_idx": position, "kv_idx": key, "p": position}
        hidden = hidden | ~program(r.mask_mod).evaluate(at, t.captured)
    return hidden


def fetch(t: CacheOperands, cache: Tensor, b: int, j0: int, count: int) -> Tensor:
    """(Hk, count, dim): keys or values [j0, j0 + count) of item b; of pages only those that hold them."""
    if t.page_table is None:
        if t.cache_batch_idx is None:
            rows = cache[b, j0 : j0 + count]
        else:
            row = t.cache_batch_idx[b].clamp(0, cache.shape[0] - 1)
            rows = cache[int(row) if host_reads(cache.device) else row, j0 : j0 + count]
        return rows.transpose(0, 1)
    size = cache.shape[1]
    first = j0 // size
    pages = t.page_table[b, first : -(-(j0 + count) // size)].long().clamp(0, cache.shape[0] - 1)
    return cache[pages].flatten(0, 1)[j0 - first * size :][:count].transpose(0, 1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, p: Tensor, interleaved: bool) -> Tensor:
    """x (..., H, D) turned by the angles of positions p (...), in x's dtype."""
    dtype = accumulator_dtype(x.dtype)
    p = p.clamp(0, cos.shape[0] - 1)
    c, s = cos[p].to(dtype).unsqueeze(-2), sin[p].to(dtype).unsqueeze(-2)  # (..., 1, R / 2)
    half = cos.shape[1]
    turning = x[..., : 2 * half].to(dtype)
    a, b = turning.unflatten(-1, (half, 2)).unbind(-1) if interleaved else turning.unflatten(-1, (2, half)).unbind(-2)
    turned = torch.stack([a * c - b * s, a * s + b * c], -1 if interleaved else -2).flatten(-2)
    return torch.cat([turned.to(x.dtype), x[..., 2 * half :]], -1)


def append(t: AppendOperands) -> None:
    """Writes new keys and values into their slots; tokens without a slot are dropped. Reads nothing on the host."""
    batch, count = t.k.shape[:2]
    rows, slots = t.k_cache.shape[:2]
    device, capacity = t.k.device, t.capacity
    position = t.cache_seqlens.long().clamp(0, capacity)[:, None] + torch.arange(count, device=device)  # (B, S)
    k = t.k if t.rotary_cos is None or t.rotary_sin is None else rotate(t.k, t.rotary_cos, t.rotary_sin, position, t.rotary_interleaved)
    valid, inside = position < capacity, position.clamp(max=max(capacity - 1, 0))
    if t.page_table is not None:
        row = t.page_table.long().gather(1, inside // slots)
    else:
        row = (torch.arange(batch, device=device) if t.cache_batch_idx is None else t.cache_batch_idx.long())[:, None].expand_as(position)
    valid = (valid & (row >= 0) & (row < rows)).flatten()
    if rows * slots == 0:
        return
    row, slot = row.clamp(0, rows - 1).flatten(), (inside % slots).flatten()
    # A dropped token writes what the first kept one writes, or, where none is kept, what is there already: no choice is left to a race.
    instead = valid.int().argmax()
    source = torch.where(valid, torch.arange(batch * count, device=device), instead)
    row, slot, kept = row[source], slot[source], valid[instead]
    for cache, new in ((t.k_cache, k), (t.v_cache, t.v)):
        if cache is not None and new is not None:
            cache[row, slot] = torch.where(kept, new.flatten(0, 1)[source].to(cache.dtype), cache[row, slot])
