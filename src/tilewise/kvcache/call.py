"""One call over a cache, described without its Python arguments: what its kernels receive.

Position. Item b holds `len = cache_seqlens[b] + appended` keys. Its query i stands at p = i + len - len_q, its key j at j. Key j lives in
slot j of row `cache_batch_idx[b]` (b itself without one), or in slot `j % page_size` of page `page_table[b, j // page_size]`. Lengths,
rows and pages that lie outside the buffers are clamped into them, so that no value on the device can cause an access elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class CacheOperands:
    """The tensors of a read-only call. Packed: q is (1, total, Hq, D), and item b owns rows [cu_seqlens_q[b], cu_seqlens_q[b + 1]);
    the offsets never decrease and lie in [0, total]."""

    q: Tensor  # (B, Sq, Hq, D)
    k_cache: Tensor  # (rows, slots, Hk, D): rows are batch items or pages
    v_cache: Tensor  # (rows, slots, Hk, Dv)
    cu_seqlens_q: Tensor | None = None  # int32 (B + 1,)
    cache_seqlens: Tensor | None = None  # int32 (B,); None: the whole capacity
    page_table: Tensor | None = None  # int32 (B, n)
    cache_batch_idx: Tensor | None = None  # int32 (B,)
    cache_leftpad: Tensor | None = None  # int32 (B,): keys before it are padding
    rotary_cos: Tensor | None = None  # (positions, rotary dims / 2)
    rotary_sin: Tensor | None = None
    mask: Tensor | None = None  # bool, rank 4, each size 1 or that of (B, Hq, Sq, capacity); True = visible
    alibi_slopes: Tensor | None = None  # (B or 1, Hq)
    sink: Tensor | None = None  # (Hq,)
    k_descale: Tensor | None = None  # (B or 1, Hk), for caches in float8
    v_descale: Tensor | None = None
    captured: tuple[Tensor, ...] = ()  # what `CacheRules.mask_mod` reads

    @property
    def batch(self) -> int:
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def capacity(self) -> int:
        """How many keys an item can have."""
        return self.k_cache.shape[1] * (1 if self.page_table is None else self.page_table.shape[1])


@dataclass(frozen=True, slots=True)
class CacheRules:
    """What a read-only call computes, apart from its tensors."""

    softmax_scale: float
    softcap: float = 0.0  # 0: none
    window_left: int = -1  # -1: unlimited
    window_right: int = -1
    appended: int = 0  # keys in the cache beyond cache_seqlens
    rotary_interleaved: bool = True
    num_splits: int = 0  # 0: chosen
    batch_invariant: bool = False
    mask_mod: str = ""  # text of a traced program over b, h, p and kv_idx; "": none
    allow_tf32: bool = False


@dataclass(slots=True)
class AppendOperands:
    """The tensors of an append: token i of item b goes to position cache_seqlens[b] + i. Tokens without a slot are dropped."""

    k_cache: Tensor
    v_cache: Tensor | None  # None: values are part of the keys (one latent vector, as in MLA)
    k: Tensor  # (B, S, Hk, D)
    v: Tensor | None
    cache_seqlens: Tensor
    page_table: Tensor | None = None
    cache_batch_idx: Tensor | None = None
    rotary_cos: Tensor | None = None
    rotary_sin: Tensor | None = None
    rotary_interleaved: bool = True

    @property
    def capacity(self) -> int:
        return self.k_cache.shape[1] * (1 if self.page_table is None else self.page_table.shape[1])
