"""The cache kernels in Triton's interpreter, on the CPU: run by `test_kvcache_kernels` in a process of its own."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import pytest
import torch
from torch import Tensor

from tilewise import attention_with_kvcache, plan
from tilewise.kernels import tiled_cache
from tilewise.kernels.triton import cache
from tilewise.kernels.triton.cache import configs
from tilewise.kernels.triton.cache.merge import merge_parts
from tilewise.kvcache import ops

from . import cache_cases

served: list[str] = []


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch):
    """The kernels decline the CPU; here they are meant to run on it, and to say so if they do not serve a call."""

    def backend(t, r):
        reason = cache.why_not(t, r, plan.target_of(t.q.device))
        served.append(reason or "triton")
        return cache if reason is None else tiled_cache

    served.clear()
    monkeypatch.setattr(cache, "_device_reason", lambda target: None)
    monkeypatch.setattr(ops, "backend", backend)
    monkeypatch.setattr(ops, "append_backend", lambda t: cache)
    monkeypatch.setattr(tiled_cache, "TILE_KEYS", 16)
    monkeypatch.setattr(configs, "INVARIANT_KEYS", 32)
    monkeypatch.setattr(configs, "LEAST_KEYS", 16)
    with np.errstate(all="ignore"):
        yield


@pytest.mark.parametrize("seed", range(12))
def test_random_calls(seed):
    cache_cases.check(cache_cases.random_call(seed, (torch.float32, torch.float16)))
    assert served == ["triton"]


def cached(batch: int, capacity: int, size_q: int = 1, heads: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(batch, size_q, heads, 16), *(torch.randn(batch, capacity, 2, 16) for _ in range(2))


def test_the_split_changes_nothing_but_rounding():
    q, k_cache, v_cache = cached(2, 90, 3)
    used, sink = torch.tensor([90, 11], dtype=torch.int32), torch.randn(4)
    options = {"cache_seqlens": used, "causal": True, "learnable_sink": sink, "return_aux": "lse"}
    whole, whole_aux = attention_with_kvcache(q, k_cache, v_cache, num_splits=1, **options)
    for splits in (2, 5, 100):
        out, aux = attention_with_kvcache(q, k_cache, v_cache, num_splits=splits, **options)
        torch.testing.assert_close(out, whole)
        torch.testing.assert_close(aux.lse, whole_aux.lse)


def test_neighbours_do_not_change_the_bits():
    """Alone, with others, in a larger cache, in pages: the parts of an item end at the same positions."""
    q, k_cache, v_cache = cached(3, 64, 2)
    used = torch.tensor([64, 7, 40], dtype=torch.int32)
    for options in ({"causal": True}, {"window_size": (20, 0)}):
        together = attention_with_kvcache(q, k_cache, v_cache, cache_seqlens=used, batch_invariant=True, **options)
        for b in (0, 2) if options.get("causal") else (1,):
            part = slice(b, b + 1)
            alone = attention_with_kvcache(q[part], k_cache[part], v_cache[part], cache_seqlens=used[part], batch_invariant=True, **options)
            assert torch.equal(alone, together[part])
        wider = [torch.cat([x, torch.full_like(x, float("nan"))], 1) for x in (k_cache, v_cache)]
        assert torch.equal(attention_with_kvcache(q, *wider, cache_seqlens=used, batch_invariant=True, **options), together)
        pages = [x.reshape(48, 4, 2, 16) for x in (k_cache, v_cache)]
        table = torch.arange(48, dtype=torch.int32).view(3, 16)
        paged = attention_with_kvcache(q, *pages, page_table=table, cache_seqlens=used, batch_invariant=True, **options)
        assert torch.equal(paged, together)


def test_hidden_keys_reach_nothing():
    q, k_cache, v_cache = cached(1, 64)
    mask = torch.arange(64) % 3 != 1
    options = {"cache_seqlens": torch.tensor([50], dtype=torch.int32), "cache_leftpad": torch.tensor([5], dtype=torch.int32)}
    clean = attention_with_kvcache(q, k_cache, v_cache, mask=mask, **options)
    for x in (k_cache, v_cache):
        x[:, ~mask], x[:, :5], x[:, 50:] = float("nan"), float("inf"), float("nan")
    assert torch.equal(attention_with_kvcache(q, k_cache, v_cache, mask=mask, **options), clean)
    v_cache[:, 6] = float("nan")
    for splits in (1, 3):
        assert attention_with_kvcache(q, k_cache, v_cache, mask=mask, num_splits=splits, **options).isnan().all(), "a visible NaN must show"


def test_values_in_keys_are_loaded_once():
    """Head dims 24 and 16 in one latent vector: two blocks of columns for the first product, the first of them for the second."""
    latent, q = torch.randn(2, 40, 1, 24), torch.randn(2, 2, 4, 24)
    got = attention_with_kvcache(q, latent, latent[..., :16], cache_seqlens=33, causal=True)
    want = attention_with_kvcache(q, latent.clone(), latent[..., :16].clone(), cache_seqlens=33, causal=True)
    assert torch.equal(got, want)
    torch.testing.assert_close(got[1], tiled(q, latent, latent[..., :16], 33)[1])


def tiled(q: Tensor, k_cache: Tensor, v_cache: Tensor, length: int) -> Tensor:
    from tilewise import attention

    return attention(q, k_cache[:, :length], v_cache[:, :length], causal=True)


@pytest.mark.parametrize("counts", [[5, 0, 1], [1, 30, 2, 0, 9, 1], [0, 0], []], ids=str)
def test_packed_queries(counts):
    """Items that fit a low tile and items that do not, in any order, with rows before and after that belong to nobody."""
    items, total = len(counts), sum(counts) + 3
    k_cache, v_cache = (torch.randn(30, 4, 2, 16) for _ in range(2))
    table = torch.randint(30, (items, 10), dtype=torch.int32)
    offsets = torch.tensor([1, *counts], dtype=torch.int32).cumsum(0).int()
    call = {
        "q": torch.randn(1, total, 8, 16), "k_cache": k_cache, "v_cache": v_cache, "page_table": table, "softmax_scale": 0.25,
        "cu_seqlens_q": offsets, "cache_seqlens": torch.tensor([c + 7 * (b % 2) for b, c in enumerate(counts)], dtype=torch.int32),
        "window_right": 0,
    }  # fmt: skip
    host = ops.CacheOperands(**{name: call[name] for name in call if name not in ("softmax_scale", "window_right")})
    want, want_lse = torch.empty_like(call["q"]), torch.empty(8, total)
    tiled_cache.attention(host, ops.CacheRules(0.25, window_right=0), want, want_lse)
    for splits in (1, 3):
        out, lse = ops.attention_cached(**call, num_splits=splits)
        torch.testing.assert_close(out, want)
        torch.testing.assert_close(lse, want_lse)
    assert not out[:, 0].any() and not out[:, -2:].any()


def test_out_of_range_values_stay_inside():
    """Lengths, pages and rows far outside: finite memory gives finite numbers, and nothing but the slots of the tokens changes."""
    q, k_cache, v_cache = torch.randn(2, 2, 4, 16), torch.randn(6, 4, 2, 16), torch.randn(6, 4, 2, 16)
    table = torch.tensor([[-5, 1], [2, 2**30]], dtype=torch.int32)
    k, v = torch.randn(2, 2, 2, 16), torch.randn(2, 2, 2, 16)
    before = k_cache.clone()
    out = attention_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=torch.tensor([4, 2**30], dtype=torch.int32), page_table=table)
    assert torch.isfinite(out).all()
    before[1, :2] = k[0]
    assert torch.equal(k_cache, before)
    rows = torch.tensor([-7, 99], dtype=torch.int32)
    out = attention_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=torch.tensor([-3, 1], dtype=torch.int32), cache_batch_idx=rows)
    assert torch.isfinite(out).all() and torch.equal(k_cache, before)


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_every_tensor_behind_strides(paged):
    """Every second element of a larger tensor along each dimension: what is read, what is written, and what lies between stays."""

    def scattered(x: Tensor) -> Tensor:
        wide = torch.full([2 * n + 1 for n in x.shape], 1000).to(x.dtype)
        return wide[tuple(slice(1, None, 2) for _ in x.shape)].copy_(x)

    i32 = torch.int32
    tensors = {
        "q": torch.randn(2, 2, 4, 8), "k_cache": torch.randn(5, 4, 2, 8), "v_cache": torch.randn(5, 4, 2, 6), "k": torch.randn(2, 1, 2, 8),
        "v": torch.randn(2, 1, 2, 6), "cache_seqlens": torch.tensor([2, 3], dtype=i32), "rotary_cos": torch.randn(8, 2),
        "rotary_sin": torch.randn(8, 2), "alibi_slopes": torch.rand(2, 4), "learnable_sink": torch.randn(4),
        "cache_leftpad": torch.tensor([1, 0], dtype=i32), "mask": torch.rand(2, 4, 2, 8 if paged else 4) < 0.8,
    }  # fmt: skip
    rows = {"page_table": torch.tensor([[3, 0], [1, 4]], dtype=i32)} if paged else {"cache_batch_idx": torch.tensor([4, 2], dtype=i32)}
    tensors |= rows
    for splits in (1, 2):
        results = []
        for given in ({name: scattered(x) for name, x in tensors.items()}, {name: x.clone() for name, x in tensors.items()}):
            out, aux = attention_with_kvcache(**given, num_splits=splits, return_aux="lse")
            results.append((out, aux.lse, given["k_cache"], given["v_cache"]))
            assert all((x._base[::2] == 1000).all() for x in results[-1][2:] if x._base is not None)
        torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("splits, at_once", [(1, 4), (3, 4), (9, 4), (70, 32)])
def test_parts_add_up_whatever_empty_ones_hold(splits, at_once):
    """More parts than are added at once, empty ones among them, first, last, or alone; empty ones behind them change no bit."""
    torch.manual_seed(splits)
    rows, dim_v, infinity = 5, 12, float("inf")
    m, l, acc = 40 * torch.randn(splits, rows), torch.rand(splits, rows) + 0.5, torch.randn(splits, rows, dim_v)
    empty = torch.rand(splits, rows) < 0.4
    empty[:, 0], empty[:, 1], empty[:, 2] = True, torch.arange(splits) > 0, torch.arange(splits) < splits - 1
    m[empty], l[empty], acc[empty] = -infinity, 0.0, float("nan")

    def merged(*parts: Tensor) -> tuple[Tensor, Tensor]:
        m, l, acc = parts
        out, lse = torch.full((rows, dim_v), float("nan")), torch.full((rows,), float("nan"))
        work = torch.cat([acc.flatten(), m.flatten(), l.flatten()])
        shape = 1, 1, rows, rows, 1, 1, 1, rows, 0, 1 << 30  # one head, one tile
        merge_parts[(rows,)](
            work, out, lse, None, *shape, len(m), 1.0, 1.0,
            DV=dim_v, BLOCK_DV=16, BLOCK_M=16, SEARCH=False, BLOCK_S=at_once, NATURAL=False, DEPENDENT=False,
        )  # fmt: skip
        return out, lse

    out, lse = merged(m, l, acc)
    most = m.double().amax(0)
    weights = torch.where(empty, 0.0, (m.double() - most).exp2())
    total = (weights * l).sum(0)
    summed = torch.einsum("sr,srd->rd", weights, acc.double().masked_fill(empty[..., None], 0.0))
    want = summed / total.masked_fill(total == 0, 1.0)[:, None]
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), torch.where(total == 0, -infinity, (most + total.log2()) * np.log(2)), rtol=1e-5, atol=1e-6)

    behind = at_once + 1
    longer = [torch.cat([x, torch.full((behind, *x.shape[1:]), fill)]) for x, fill in ((m, -infinity), (l, 0.0), (acc, float("nan")))]
    assert all(map(torch.equal, merged(*longer), (out, lse)))
