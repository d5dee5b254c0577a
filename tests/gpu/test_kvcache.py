"""The cache kernels on a GPU: random calls, graphs with changing lengths, real sizes, compiled decoding, and accesses that stay inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tilewise import attention_varlen, attention_with_kvcache, masks, repeats
from tilewise.kernels.triton import cache
from tilewise.kvcache import ops, reference

from .. import cache_cases
from ..reports import report
from .common import new_specializations, randn, restride
from .test_system import capture

I32 = torch.int32
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DIMS: cache_cases.Dims = ((64, 64), (128, 128), (96, 80), (192, 128), (60, 24), (256, 256))


@pytest.fixture(autouse=True)
def served_by_triton(monkeypatch):
    """A call that falls to plain PyTorch must not pass as a test of the kernels."""

    def never(*_):
        raise AssertionError("this call was not served by the Triton kernels")

    monkeypatch.setattr(ops, "_warn_once", never)


def integers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=I32, device="cuda")


@pytest.mark.parametrize("seed", range(120))
def test_random_calls_equal_the_specification(seed):
    """With torch's default precision of float32 products, which is IEEE."""
    cache_cases.check(cache_cases.random_call(seed, DTYPES, DIMS, device="cuda"))


def paged(x: Tensor, page_size: int, shuffle: Tensor) -> Tensor:
    """A contiguous cache as pages in the order of `shuffle`."""
    pages = x.reshape(-1, page_size, *x.shape[2:])
    out = torch.empty_like(pages)
    out[shuffle] = pages
    return out


def sampled_reference(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], heads: list[int], **options) -> dict:
    """float64 output of some query heads of every item, causal."""
    group = q.shape[2] // k.shape[2]
    found = {}
    for b, length in enumerate(lengths):
        for h in heads:
            keys, values = (x[b, :length, h // group].double() for x in (k, v))
            s = q[b, :, h].double() @ keys.T * q.shape[3] ** -0.5
            p = torch.arange(q.shape[1], device=q.device)[:, None] + length - q.shape[1]
            s = s.masked_fill(torch.arange(length, device=q.device) > p, float("-inf"))
            found[b, h] = s.softmax(-1) @ values
    return found


@report(61, 62, 151)
@pytest.mark.parametrize("page_size", [0, 1, 16, 64, 256])
@pytest.mark.parametrize(
    ("batch", "capacity", "size_q"), [(16, 8192, 1), (4, 65536, 1), (1, 131072, 1), (1, 32768, 4), (1, 32768, 16), (2, 32768, 64)]
)
def test_real_sizes(report, page_size, batch, capacity, size_q):
    """64 query heads over 8 kv heads of 128 dims; the lengths of the items differ."""
    if page_size == 1 and batch * capacity > 140_000:
        pytest.skip("one page size of one is enough")
    q = randn(batch, size_q, 64, 128)
    k, v = randn(batch, capacity, 8, 128), randn(batch, capacity, 8, 128)
    lengths = [capacity - 37 * b * (b > 0) - (capacity // 3) * (b % 3 == 2) for b in range(batch)]
    options: dict = {"cache_seqlens": integers(*lengths), "causal": True}
    caches = (k, v)
    if page_size:
        count = batch * capacity // page_size
        shuffle = torch.randperm(count, device="cuda")
        caches = tuple(paged(x, page_size, shuffle) for x in caches)
        options["page_table"] = shuffle.to(I32).view(batch, -1)
    out = attention_with_kvcache(q, *caches, **options)
    for (b, h), want in sampled_reference(q, k, v, lengths, [0, 37]).items():
        error = (out[b, :, h].double() - want).norm() / want.norm()
        assert error < 4e-3, f"item {b}, head {h}: {error:.2e}"
    invariant = attention_with_kvcache(q, *caches, batch_invariant=True, **options)
    torch.testing.assert_close(invariant, out, rtol=2e-2, atol=2e-3)


def test_latent_vectors():
    """576 dims with 512 values in the same memory, 128 query heads over one."""
    latent = randn(4, 4096, 1, 576)
    q = randn(4, 1, 128, 576)
    used = integers(4096, 1000, 17, 2049)
    out = attention_with_kvcache(q, latent, latent[..., :512], cache_seqlens=used)
    for (b, h), want in sampled_reference(q, latent, latent[..., :512], used.tolist(), [0, 127]).items():
        error = (out[b, :, h].double() - want).norm() / want.norm()
        assert error < 4e-3


@pytest.mark.parametrize("page_size", [0, 16])
def test_float8(page_size):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("float8 needs compute capability 8.9")
    q, k, v = randn(2, 3, 8, 128), randn(2, 512, 2, 128).to(torch.float8_e4m3fn), randn(2, 512, 2, 128).to(torch.float8_e4m3fn)
    options = {
        "cache_seqlens": integers(512, 77),
        "k_descale": torch.rand(2, device="cuda") + 0.5,
        "v_descale": torch.rand(2, 2, device="cuda"),
    }
    want, *_ = reference.attention_with_kvcache(q, k.bfloat16(), v.bfloat16(), causal=True, **options)
    if page_size:
        shuffle = torch.randperm(64, device="cuda")
        k, v = paged(k, page_size, shuffle), paged(v, page_size, shuffle)
        options["page_table"] = shuffle.to(I32).view(2, -1)
    out = attention_with_kvcache(q, k, v, causal=True, **options)
    torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=1e-2)


@report(124)
def test_neighbours_do_not_change_the_bits(report):
    """Alone, with others before and after it, in a larger cache, in pages."""
    q, k, v = randn(5, 4, 32, 128), randn(5, 5000, 8, 128), randn(5, 5000, 8, 128)
    used = integers(5000, 1, 0, 1024, 3333)
    together = attention_with_kvcache(q, k, v, cache_seqlens=used, causal=True, batch_invariant=True)
    for b in range(5):
        part = slice(b, b + 1)
        alone = attention_with_kvcache(q[part], k[part], v[part], cache_seqlens=used[part], causal=True, batch_invariant=True)
        assert torch.equal(alone, together[part]), b
    wider = [torch.cat([x, x], 1) for x in (k, v)]
    assert torch.equal(attention_with_kvcache(q, *wider, cache_seqlens=used, causal=True, batch_invariant=True), together)
    shuffle = torch.randperm(5 * 5000 // 8, device="cuda")
    pages = [paged(x, 8, shuffle) for x in (k, v)]
    table = shuffle.to(I32).view(5, -1)
    got = attention_with_kvcache(q, *pages, page_table=table, cache_seqlens=used, causal=True, batch_invariant=True)
    assert torch.equal(got, together)


@pytest.mark.parametrize("splits", [1, 2, 7, 100])
def test_the_split_changes_nothing_but_rounding(splits):
    q, k, v = randn(2, 1, 16, 64), randn(2, 3000, 4, 64), randn(2, 3000, 4, 64)
    options = {"cache_seqlens": integers(3000, 40), "learnable_sink": torch.randn(16, device="cuda"), "return_aux": "lse"}
    out, aux = attention_with_kvcache(q, k, v, num_splits=splits, **options)
    want, want_lse, *_ = reference.attention_with_kvcache(q, k, v, **{name: x for name, x in options.items() if name != "return_aux"})
    torch.testing.assert_close(out.double(), want, rtol=1e-2, atol=2e-3)
    torch.testing.assert_close(aux.lse.double(), want_lse, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------------------------------------------- graphs and compilation


@report(142)
@pytest.mark.parametrize("page_size", [0, 16])
def test_a_captured_step_replays_with_other_lengths_and_tables(report, page_size):
    q, k, v = randn(3, 2, 8, 64), randn(3, 2, 2, 64), randn(3, 2, 2, 64)
    shape = (3, 512) if not page_size else (100, page_size)
    caches = randn(2, *shape, 2, 64)
    used, options = integers(3, 100, 510), {}
    angles = torch.randn(512, 16, device="cuda")
    if page_size:
        options["page_table"] = torch.randperm(96, device="cuda").to(I32).view(3, 32)
    options |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "causal": True, "cache_seqlens": used}
    graph, out = capture(lambda: attention_with_kvcache(q, *caches, k, v, **options))
    for lengths in ([3, 100, 510], [0, 0, 0], [509, 77, 256]):
        for x in (q, k, v, caches):
            x.copy_(torch.randn_like(x))
        used.copy_(torch.tensor(lengths))
        if page_size:
            options["page_table"].copy_(torch.randperm(96).view(3, 32))
        eager_caches = caches.clone()
        graph.replay()
        replayed = out.clone()
        want = attention_with_kvcache(q, *eager_caches, k, v, check_values=True, **options)
        assert torch.equal(replayed, want) and torch.equal(caches, eager_caches)
        used += 2  # as a serving loop would, on the device
        assert not torch.equal(used, torch.tensor(lengths, device="cuda"))


@report(134)
def test_a_compiled_loop_never_copies_a_cache(report):
    """Peak memory of a compiled step stays far below one cache."""
    caches = torch.zeros(2, 4, 32768, 8, 128, dtype=torch.bfloat16, device="cuda")

    @torch.compile(fullgraph=True)
    def step(q: Tensor, k: Tensor, v: Tensor, caches: Tensor, used: Tensor) -> Tensor:
        return attention_with_kvcache(q * 2, caches[0], caches[1], k + 1, v, cache_seqlens=used, causal=True).flatten(2)

    q, k, v, used = randn(4, 1, 32, 128), randn(4, 1, 8, 128), randn(4, 1, 8, 128), integers(0, 7, 30000, 32767)
    step(q, k, v, caches, used)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = step(q, k, v, caches, used)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < caches[0].nbytes / 10
    torch.testing.assert_close(out, attention_with_kvcache(q * 2, *caches, cache_seqlens=used + 1, causal=True).flatten(2), rtol=0, atol=0)


def test_lengths_do_not_reach_the_compiled_kernel():
    def call(batch: int, capacity: int, used: int) -> None:
        k, v = randn(batch, capacity, 2, 64), randn(batch, capacity, 2, 64)
        new = [randn(batch, 1, 2, 64) for _ in range(2)]
        attention_with_kvcache(randn(batch, 1, 8, 64), k, v, *new, cache_seqlens=integers(*[used] * batch), num_splits=2)

    call(2, 1024, 5)
    assert new_specializations(lambda: [call(1, 1000, 17), call(3, 16 * 77, 900), call(16, 2048, 1)]) == 0


def test_nothing_waits_for_the_device():
    q, k, v = randn(2, 1, 8, 64), randn(2, 256, 2, 64), randn(2, 256, 2, 64)
    new, used = [randn(2, 1, 2, 64) for _ in range(2)], integers(5, 255)
    attention_with_kvcache(q, k, v, *new, cache_seqlens=used)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for mask in (None, masks.Chunked(32)):
            attention_with_kvcache(q, k, v, *new, cache_seqlens=used, causal=True, mask=mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# -------------------------------------------------------------------------------------------------------------- large, strange


@report(82, 83)
def test_offsets_are_64_bit(report):
    """Rows of the cache more than 2^31 elements apart."""
    flat = torch.empty((1 << 31) + (1 << 22), dtype=torch.bfloat16, device="cuda")
    k = flat.as_strided((2, 512, 2, 64), (1 << 31, 128, 64, 1))
    k.copy_(torch.randn(k.shape))
    v, q, new = randn(2, 512, 2, 64), randn(2, 1, 4, 64), randn(2, 1, 2, 64)
    options = {"cache_seqlens": integers(9, 511)}
    want = attention_with_kvcache(q, k.contiguous(), v.clone(), new, new, **options)
    assert torch.equal(attention_with_kvcache(q, k, v, new, new, **options), want)
    assert torch.equal(k[1, 511], new[1, 0])


@report(94, 95)
def test_65600_items(report):
    q, k, v = randn(65600, 1, 2, 16), randn(65600, 4, 1, 16), randn(65600, 4, 1, 16)
    out = attention_with_kvcache(q, k, v)
    p = torch.einsum("bihd,bjd->bhij", q.float(), k[:, :, 0].float()).mul(0.25).softmax(-1)
    torch.testing.assert_close(out.float(), torch.einsum("bhij,bjd->bihd", p, v[:, :, 0].float()), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("how", ["heads first", "one element in", "every second", "slice of packed"])
def test_strides(how):
    given = {"q": randn(2, 2, 8, 64), "k_cache": randn(2, 128, 2, 64), "v_cache": randn(2, 128, 2, 64)}
    want = attention_with_kvcache(**given, cache_seqlens=integers(128, 50), causal=True)
    for name in given:
        seen = {**given, name: restride(given[name], how)}
        torch.testing.assert_close(attention_with_kvcache(**seen, cache_seqlens=integers(128, 50), causal=True), want, rtol=1e-2, atol=1e-2)


def test_values_out_of_range_stay_inside():
    """Buffers of exactly the caches' size between walls: whatever lengths and tables say, the walls stand and results are finite.

    Under the compute sanitizer this test shows that nothing outside is read either.
    """
    walls = torch.full((3, 40, 16, 2, 64), 7.0, dtype=torch.bfloat16, device="cuda")
    k, v = walls[1], randn(40, 16, 2, 64)
    q, new = randn(4, 3, 8, 64), randn(4, 3, 2, 64)
    for table, lengths in (
        ([[-1, 2**30], [39, 40], [-(2**31), 0], [41, 2**31 - 1]], [2**31 - 1, -1, -(2**31), 29]),
        ([[0, 1], [2, 3], [4, 5], [6, 7]], [30, 31, 32, 33]),
    ):
        options = {"page_table": torch.tensor(table, dtype=I32, device="cuda"), "cache_seqlens": integers(*lengths)}
        out = attention_with_kvcache(q, k, v, new, new, causal=True, cache_leftpad=integers(-5, 2**31 - 1, 3, 0), **options)
        assert torch.isfinite(out).all()
    rows = walls.view(3, 40, 16, 2, 64)[1]
    for index, lengths in (([-1, 40, 2**31 - 1, 3], [14, 15, -7, 2**31 - 1]),):
        options = {"cache_batch_idx": integers(*index), "cache_seqlens": integers(*lengths)}
        assert torch.isfinite(attention_with_kvcache(q, rows, v, new, new, **options)).all()
    torch.cuda.synchronize()
    assert bool((walls[0] == 7.0).all()) and bool((walls[2] == 7.0).all())


def test_packed_queries():
    """Prefill, decoding and nothing, in one call over pages."""
    k, v = randn(64, 16, 2, 64), randn(64, 16, 2, 64)
    table = torch.randperm(64, device="cuda").to(I32).view(4, 16)
    counts, used = [100, 0, 1, 7], integers(200, 50, 256, 7)
    offsets = integers(0, 100, 100, 101, 108)
    q = randn(1, 110, 8, 64)
    out, lse = ops.attention_cached(
        q=q, k_cache=k, v_cache=v, cu_seqlens_q=offsets, cache_seqlens=used, page_table=table, softmax_scale=0.125, window_right=0
    )
    start = 0
    for b, count in enumerate(counts):
        rows, item = slice(start, start + count), slice(b, b + 1)
        want, want_lse, *_ = reference.attention_with_kvcache(
            q[:, rows], k, v, cache_seqlens=used[item], page_table=table[item], causal=True
        )
        torch.testing.assert_close(out[:, rows].double(), want, rtol=1e-2, atol=4e-3)
        torch.testing.assert_close(lse[:, rows].double(), want_lse[0], rtol=1e-5, atol=1e-4)
        start += count
    assert not out[:, 108:].any() and bool((lse[:, 108:] == float("-inf")).all())


def test_a_mixed_batch_at_real_sizes():
    """Two prompts of some hundred tokens beside thirty decoding ones, 32 query heads over 8 kv heads, pages of 16."""
    counts = [700, 1, 300] + [1] * 29
    used = [700, 4000, 2300] + [100 * b + 5 for b in range(29)]
    k, v = randn(8192, 16, 8, 128), randn(8192, 16, 8, 128)
    table = torch.randperm(8192, device="cuda").to(I32).view(32, 256)
    offsets = torch.tensor([0, *counts], device="cuda").cumsum(0).to(I32)
    q = randn(sum(counts), 32, 128)
    out = attention_varlen(q, k, v, offsets, None, page_table=table, seqused_k=integers(*used), causal=True)
    for b, start in enumerate(offsets[:-1].tolist()):
        keys, values = (x[table[b].long()].flatten(0, 1)[None] for x in (k, v))
        rows = q[None, start : start + counts[b]]
        for (_, h), want in sampled_reference(rows, keys, values, [used[b]], [0, 31]).items():
            error = (out[start : start + counts[b], h].double() - want).norm() / want.norm()
            assert error < 4e-3, f"item {b}, head {h}: {error:.2e}"


def test_the_kernels_say_why_they_decline():
    from tilewise import plan

    t = ops.CacheOperands(*(torch.empty(1, 1, 1, 8, dtype=torch.float64, device="cuda") for _ in range(3)))
    assert "float64" in (cache.why_not(t, ops.CacheRules(1.0), plan.target_of(t.q.device)) or "")


@pytest.mark.parametrize("queries", [16, 64, 200])
@pytest.mark.parametrize("window", [{"causal": True}, {}, {"causal": True, "window_size": (300, -1)}], ids=["causal", "all", "window"])
@pytest.mark.parametrize("more", ["", "append", "softcap and sink", "slopes", "lse in float32"])
def test_many_queries_over_a_contiguous_cache(queries: int, window: dict[str, Any], more: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the Hopper kernel where there is one, as the portable kernel reads the cache, which other tests compare with the specification,
    and whatever lies behind the lengths. Again and again with other lengths in the same tensors."""
    torch.manual_seed(0)
    items, capacity, heads = 3, 1000, 16
    q = torch.randn(items, queries, heads, 128, device="cuda", dtype=torch.bfloat16)
    new = [torch.randn(items, queries, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    options: dict[str, Any] = dict(window)
    if more == "softcap and sink":
        options |= {"softcap": 20.0, "learnable_sink": torch.randn(heads, device="cuda")}
    elif more == "slopes":
        options |= {"alibi_slopes": torch.rand(items, heads, device="cuda") / 50}
    elif more == "lse in float32":
        options |= {"return_aux": "lse", "out_dtype": torch.float32}
    lengths = torch.empty(items, dtype=torch.int32, device="cuda")
    for step in range(4):
        lengths.copy_(torch.tensor([0, 37 + 101 * step, capacity - queries], dtype=torch.int32))
        caches = [torch.randn(items, capacity, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        behind = torch.arange(capacity, device="cuda")[None] >= lengths[:, None]
        for x in caches:
            x.masked_fill_(behind[..., None, None], float("nan"))
        copies = [x.clone() for x in caches]
        given = [*new] if more == "append" else []
        served = []
        with monkeypatch.context() as patch:
            backend = ops.backend
            patch.setattr(ops, "backend", lambda t, r, backend=backend, served=served: served.append(m := backend(t, r)) or m)
            got = attention_with_kvcache(q, *caches, *given, cache_seqlens=lengths, **options)
        with monkeypatch.context() as patch:
            patch.setattr(ops, "backend", lambda t, r: cache)
            repeats.forget()
            expected = attention_with_kvcache(q, *copies, *given, cache_seqlens=lengths, **options)
            repeats.forget() if step % 2 else None
        if served and torch.cuda.get_device_capability() == (9, 0):
            assert served[0].__name__.endswith("over_cache")
        pairs = [(got, expected)] if torch.is_tensor(got) else [(got[0], expected[0]), (got[1].lse, expected[1].lse)]
        for x, y in pairs:
            assert x.dtype == y.dtype and not x.isnan().any()
            torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)
            assert torch.equal(x.isinf(), y.isinf())


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("queries", [1, 2, 4])
def test_as_many_walks_as_multiprocessors(dim: int, queries: int) -> None:
    """Nearly one program each, which then need not share its keys, with lengths from nothing to everything and garbage behind them."""
    torch.manual_seed(0)
    items, capacity, heads = torch.cuda.get_device_properties(0).multi_processor_count // 4, 1100, 32
    q = randn(items, queries, heads, dim)
    k, v = randn(items, capacity, 4, dim), randn(items, capacity, 4, dim)
    lengths = torch.linspace(0, capacity, items, device="cuda").to(I32)
    behind = torch.arange(capacity, device="cuda")[None] >= lengths[:, None]
    for x in (k, v):
        x.masked_fill_(behind[..., None, None], float("nan"))
    options: dict[str, Any] = {"cache_seqlens": lengths, "causal": True, "learnable_sink": torch.randn(heads, device="cuda")}
    want, want_lse, *_ = reference.attention_with_kvcache(q, k.nan_to_num(), v.nan_to_num(), **options)
    for splits in (0, 3):
        out, aux = attention_with_kvcache(q, k, v, num_splits=splits, return_aux="lse", **options)
        torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=1e-2)
        torch.testing.assert_close(aux.lse.double(), want_lse, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("queries, by_hopper", [(1, False), (2, False), (4, True), (9, True)])
def test_many_heads_over_one_key_head(queries: int, by_hopper: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hopper kernel's tiles have at most 16 heads: few queries of 64 would leave them nearly empty."""
    torch.manual_seed(0)
    q, k, v = randn(2, queries, 64, 128), randn(2, 2000, 1, 128), randn(2, 2000, 1, 128)
    used, served, backend = integers(2000, 333), [], ops.backend
    monkeypatch.setattr(ops, "backend", lambda t, r: served.append(m := backend(t, r)) or m)
    out = attention_with_kvcache(q, k, v, cache_seqlens=used, causal=True)
    if torch.cuda.get_device_capability() == (9, 0):
        assert served[0].__name__.endswith("over_cache") == by_hopper
    for (b, h), want in sampled_reference(q, k, v, used.tolist(), [0, 17, 63]).items():
        assert (out[b, :, h].double() - want).norm() / want.norm() < 4e-3
