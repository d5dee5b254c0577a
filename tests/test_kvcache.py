"""`attention_with_kvcache` on the CPU: meaning, validation, compilation, and the public bug reports of sections D, F, H, I and K."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import tilewise
from tilewise import UnsupportedAttention, attention, attention_varlen, attention_with_kvcache, cost, masks
from tilewise.kernels import tiled_cache
from tilewise.kvcache import reference
from tilewise.kvcache.packed import attention_over_pages, varlen_over_pages

from . import cache_cases
from .reports import ALL_DTYPES, I32, VIEWS, as_view, report


@pytest.fixture(autouse=True)
def small_key_tiles(monkeypatch):
    monkeypatch.setattr(tiled_cache, "TILE_KEYS", 16)
    monkeypatch.setattr(tiled_cache, "TILE_SCORES", 16 * 4 * 5)


def lengths(*values: int) -> Tensor:
    return torch.tensor(values, dtype=I32)


def cached(batch: int = 2, capacity: int = 24, heads: int = 4, kv_heads: int = 2, dim: int = 16, size_q: int = 1, dim_v: int = 0) -> dict:
    """A plain call without append: q and full caches by name."""
    return {
        "q": torch.randn(batch, size_q, heads, dim),
        "k_cache": torch.randn(batch, capacity, kv_heads, dim),
        "v_cache": torch.randn(batch, capacity, kv_heads, dim_v or dim),
    }


def check(arguments: dict[str, Any], **options: Any) -> None:
    names = ("q", "k_cache", "v_cache", "k", "v")
    cache_cases.check(cache_cases.Call(*(arguments.get(name) for name in names), options, {}))


@pytest.mark.parametrize("seed", range(80))
def test_random_calls_equal_the_specification(seed):
    cache_cases.check(cache_cases.random_call(seed, tuple(ALL_DTYPES)))


def test_the_whole_sequence_at_once_and_token_by_token():
    """Prefill and decoding in steps of 1, 3 and 8 tokens give what dense causal attention gives."""
    q, k, v = torch.randn(2, 24, 4, 16), torch.randn(2, 24, 2, 16), torch.randn(2, 24, 2, 16)
    want = attention(q, k, v, causal=True)
    for step in (1, 3, 8, 24):
        caches = torch.full((2, 2, 24, 2, 16), float("nan"))
        parts = []
        for start in range(0, 24, step):
            part = slice(start, start + step)
            parts.append(
                attention_with_kvcache(
                    q[:, part], *caches, k[:, part], v[:, part], cache_seqlens=lengths(start, start), causal=True, check_values=True
                )
            )
        torch.testing.assert_close(torch.cat(parts, 1), want)


def test_a_bare_number_stands_for_all_lengths():
    given = cached()
    assert torch.equal(attention_with_kvcache(**given, cache_seqlens=7), attention_with_kvcache(**given, cache_seqlens=lengths(7, 7)))


def counted(call: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    assert set(counter.get_flop_counts()["Global"]) == {torch.ops.tilewise.attention_cached}
    return counter.get_total_flops()


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (6, 0), (3, 2)])
def test_counted_operations_are_those_of_full_caches(window):
    """Exact for caches that are full, whatever holds them, and never less than what shorter ones compute."""

    def computed(length: int, size_q: int = 5) -> int:
        left, right = window
        problem = cost.Problem(
            batch=1, heads=4, kv_heads=2, seqlen_q=size_q, seqlen_k=length, head_dim=16, head_dim_v=8, window_left=left, window_right=right
        )
        return cost.flops(problem)

    rules = {"window_size": window}
    dense = cached(size_q=5, dim_v=8)
    pages = dict(zip(("k_cache", "v_cache"), (dense[name].reshape(6, 8, 2, -1) for name in ("k_cache", "v_cache")), strict=True))
    table = torch.arange(6, dtype=I32).reshape(2, 3)
    for _ in range(2):  # the second call is a repeated one
        assert counted(lambda: attention_with_kvcache(**dense, **rules)) == 2 * computed(24)
    assert counted(lambda: attention_with_kvcache(dense["q"], **pages, page_table=table, **rules)) == 2 * computed(24)
    for short in (0, 3, 11):
        full = counted(lambda short=short: attention_with_kvcache(**dense, cache_seqlens=lengths(short, short), **rules))
        assert full == 2 * computed(24) >= 2 * computed(short)

    def packed(*sizes: int) -> int:
        q = torch.randn(sum(sizes), 4, 16)
        ends = torch.tensor([0, *sizes]).cumsum(0).to(I32)
        return counted(lambda: attention_over_pages(q, *pages.values(), ends, table[: len(sizes)], **rules))

    assert packed(5) == computed(24)
    assert packed(2, 7) >= computed(24, 2) + computed(24, 7)


def test_merge_of_two_halves():
    given = cached(capacity=32)
    halves = [{"q": given["q"]} | {name: given[name][:, part] for name in ("k_cache", "v_cache")} for part in (slice(16), slice(16, 32))]
    outs, auxs = zip(*(attention_with_kvcache(**half, return_aux="lse", out_dtype=torch.float32) for half in halves), strict=True)
    out, lse = tilewise.merge(outs, [aux.lse for aux in auxs])
    whole, aux = attention_with_kvcache(**given, return_aux="lse")
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(lse, aux.lse)


def test_latent_cache_whose_values_are_part_of_the_keys():
    latent = torch.randn(2, 24, 1, 24)
    given = {"q": torch.randn(2, 1, 8, 24), "k_cache": latent, "v_cache": latent[..., :16], "k": torch.randn(2, 1, 1, 24)}
    out = attention_with_kvcache(**given, cache_seqlens=lengths(3, 9))
    assert torch.equal(latent[1, 9], given["k"][1, 0])
    want, *_ = reference.attention_with_kvcache(given["q"], latent, latent[..., :16], cache_seqlens=lengths(4, 10))
    torch.testing.assert_close(out, want.float())
    with pytest.raises(ValueError, match="k was given without v"):
        attention_with_kvcache(given["q"], latent, torch.randn(2, 24, 1, 16), given["k"], cache_seqlens=lengths(3, 9))


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_float8_caches_are_read_with_scales(paged):
    given = cached(capacity=24)
    options: dict[str, Any] = {"cache_seqlens": lengths(24, 5)}
    if paged:
        given |= {name: given[name].reshape(12, 4, 2, 16) for name in ("k_cache", "v_cache")}
        options["page_table"] = torch.arange(12, dtype=I32).view(2, 6)
    given |= {name: given[name].to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}
    scales = {"k_descale": torch.rand(2) + 0.5, "v_descale": torch.rand(2, 2) + 0.5}
    out = attention_with_kvcache(**given, **options, **scales)
    wide = {name: x.float() if name != "q" else x for name, x in given.items()}
    want, *_ = reference.attention_with_kvcache(**wide, **options, **scales)
    torch.testing.assert_close(out, want.float())
    with pytest.raises(UnsupportedAttention, match="read, not written"):
        attention_with_kvcache(**given, **options, k=torch.randn(2, 1, 2, 16), v=torch.randn(2, 1, 2, 16))
    with pytest.raises(UnsupportedAttention, match="scales belong to caches in float8"):
        attention_with_kvcache(**wide, **options, k_descale=scales["k_descale"])


PACKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "rule": {"mask": masks.Chunked(7)},
    "window": {"window_size": (5, 0), "softcap": 2.0},
}


@pytest.mark.parametrize("options", PACKED.values(), ids=PACKED)
def test_packed_queries_over_pages(options):
    """A mixed batch of prefill and decoding: each sequence gets what it gets alone, rows of nobody get 0."""
    pages = torch.randn(2, 20, 4, 2, 16)
    table = torch.randperm(20)[:18].view(3, 6).int()
    counts, used = [5, 0, 1], lengths(9, 3, 24)
    q, slopes = torch.randn(8, 4, 16), torch.rand(3, 4)  # rows 6 and 7 belong to nobody
    options |= {"causal": True, "alibi_slopes": slopes}
    out, aux = attention_over_pages(q, *pages, lengths(0, 5, 5, 6), table, used, return_aux="lse", check_values=True, **options)
    start = 0
    for b, count in enumerate(counts):
        rows, item = slice(start, start + count), slice(b, b + 1)
        alone = {**options, "alibi_slopes": slopes[item], "cache_seqlens": used[item], "page_table": table[item]}
        want, want_lse, *_ = reference.attention_with_kvcache(q[None, rows], *pages, **alone)
        torch.testing.assert_close(out[rows], want[0].float())
        torch.testing.assert_close(aux.lse[:, rows], want_lse[0].float())
        start += count
    assert not out[6:].any() and bool((aux.lse[:, 6:] == float("-inf")).all())
    odd = attention_over_pages(q, *pages, lengths(0, 5, 3, 100), table, used, **options)
    torch.testing.assert_close(odd[:5], out[:5])  # the second sequence then has no rows, the third those from 5 to the end


def test_packed_queries_are_checked():
    pages, table, offsets, q = torch.randn(2, 20, 4, 2, 16), torch.zeros(2, 3, dtype=I32), lengths(0, 3, 5), torch.randn(5, 4, 16)
    for arguments, error, words in (
        ((q[None], *pages, offsets, table), ValueError, "packed queries have rank 3"),
        ((q, *pages, offsets.long(), table), ValueError, "cu_seqlens_q is torch.int64"),
        ((q, *pages, offsets, table[:1]), ValueError, r"\(B, n\) with B = 2"),
        ((q, *pages, lengths(0, 4, 3), table), ValueError, "must not decrease"),
        ((q, *pages, offsets, table, lengths(1, 13)), ValueError, "is 13"),
    ):
        with pytest.raises(error, match=words):
            attention_over_pages(*arguments, check_values=True)
    with pytest.raises(UnsupportedAttention, match="a mask is a rule"):
        attention_over_pages(q, *pages, offsets, table, mask=torch.ones(1, dtype=torch.bool))


def test_the_varlen_call_over_pages():
    pages, table, offsets, q = torch.randn(2, 20, 4, 2, 16), torch.arange(6, dtype=I32).view(2, 3), lengths(0, 3, 5), torch.randn(5, 4, 16)
    plain = {"bias": None, "score_mod": None, "dropout_p": 0.0, "seqused_q": None, "q_descale": None, "backend": "auto", "causal": True}
    given = plain | {"seqused_k": lengths(4, 12), "mask": masks.Chunked(3)}
    want = attention_over_pages(q, *pages, offsets, table, lengths(4, 12), causal=True, mask=masks.Chunked(3))
    assert torch.equal(varlen_over_pages(q, *pages, offsets, None, table, **given), want)
    for changes, error, words in (
        ({"bias": torch.zeros(1)}, UnsupportedAttention, "takes no bias"),
        ({"dropout_p": 0.5}, UnsupportedAttention, "takes no dropout_p"),
        ({"mask": masks.Custom(lambda b, h, i, j: i >= j)}, UnsupportedAttention, "numbers the queries"),
    ):
        with pytest.raises(error, match=words):
            varlen_over_pages(q, *pages, offsets, None, table, **(given | changes))
    del given["seqused_k"]
    assert torch.equal(tilewise.attention_varlen(q, *pages, offsets, lengths(0, 4, 16), page_table=table, **given), want)
    both = tilewise.attention_varlen(q, *pages, offsets, lengths(0, 9, 21), page_table=table, seqused_k=lengths(4, 12), **given)
    assert torch.equal(both, want)


# ------------------------------------------------------------------------------------------------------- values on the device


def test_values_out_of_range_are_errors_when_checked():
    given = cached() | {"k": torch.randn(2, 1, 2, 16), "v": torch.randn(2, 1, 2, 16)}
    paged = given | {name: given[name].reshape(12, 4, 2, 16) for name in ("k_cache", "v_cache")}
    table = torch.arange(12, dtype=I32).view(2, 6)
    broken = table.clone()
    broken[1, 2] = 12
    shared = table.clone()
    shared[1, 0] = 0
    for arguments, options, words in (
        (given, {"cache_seqlens": lengths(3, 24)}, r"cache_seqlens\[1\] is 24"),
        (given, {"cache_seqlens": lengths(-1, 3)}, r"cache_seqlens\[0\] is -1"),
        (given, {"cache_seqlens": lengths(1, 3), "cache_batch_idx": lengths(0, 2)}, r"cache_batch_idx\[1\] is 2"),
        (given, {"cache_seqlens": lengths(5, 5), "cache_batch_idx": lengths(1, 1)}, "items 0 and 1 both append to slot 5 of row 1"),
        (given, {"cache_seqlens": lengths(1, 3), "cache_leftpad": lengths(0, 5)}, r"cache_leftpad\[1\] is 5"),
        (paged, {"cache_seqlens": lengths(3, 9), "page_table": broken}, r"page_table\[1, 2\] is 12"),
        (paged, {"cache_seqlens": lengths(3, 3), "page_table": shared}, "both append to slot 3 of page 0"),
    ):
        with pytest.raises(ValueError, match=words):
            attention_with_kvcache(**arguments, **options, check_values=True)
    entries_past_the_length_do_not_matter = {"cache_seqlens": lengths(3, 7), "page_table": broken}
    attention_with_kvcache(**paged, **entries_past_the_length_do_not_matter, check_values=True)


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_values_out_of_range_touch_nothing_else(paged):
    """Unchecked, tokens without a slot are dropped and reads stay inside: the other item, and memory around the caches, are as before."""
    around = torch.full((6, 8, 2, 16), 7.0)
    k_cache = around[2:4] if not paged else around[1:5].reshape(8, 4, 2, 16)[2:6].clone()
    v_cache = torch.randn_like(k_cache)
    before = around.clone()
    k, v, q = torch.randn(2, 3, 2, 16), torch.randn(2, 3, 2, 16), torch.randn(2, 3, 4, 16)
    if paged:
        options = {"cache_seqlens": lengths(2, 6), "page_table": torch.tensor([[-5, 1], [2, 99]], dtype=I32)}
    else:
        options = {"cache_seqlens": lengths(7, 1_000_000), "cache_batch_idx": lengths(0, -3)}
    out = attention_with_kvcache(q, k_cache, v_cache, k, v, causal=True, **options)
    assert torch.isfinite(out).all()
    if paged:
        assert torch.equal(k_cache[1, 0], k[0, 2])  # the one token of item 0 whose page exists
        assert bool((k_cache[[0, 2, 3]] == 7.0).all())
    else:
        assert torch.equal(k_cache[0, 7], k[0, 0])
        before[2, 7] = k[0, 0]
        assert torch.equal(around, before)


# -------------------------------------------------------------------------------------------------------------- refusals


def new(batch: int = 2, size: int = 1, **changes: Any) -> dict:
    return {"k": torch.randn(batch, size, 2, 16), "v": torch.randn(batch, size, 2, 16), "cache_seqlens": lengths(*[3] * batch)} | changes


REFUSED: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (ValueError, "k was given without cache_seqlens", new(cache_seqlens=None)),
    (ValueError, "v was given without k", new(k=None)),
    (ValueError, r"k has shape \(2, 1, 1, 16\)", new(k=torch.randn(2, 1, 1, 16))),
    (TypeError, "k has dtype torch.float16", new(k=torch.randn(2, 1, 2, 16).half())),
    (TypeError, "cache_seqlens has dtype torch.int64", {"cache_seqlens": torch.tensor([1, 2])}),
    (ValueError, r"cache_seqlens has shape \(3,\)", {"cache_seqlens": lengths(1, 2, 3)}),
    (ValueError, "cache_seqlens is 25", {"cache_seqlens": 25}),
    (ValueError, "page_table is torch.int64", {"page_table": torch.zeros(2, 3, dtype=torch.int64)}),
    (UnsupportedAttention, "index the table instead", {"page_table": torch.zeros(2, 3, dtype=I32), "cache_batch_idx": lengths(0, 1)}),
    (ValueError, "belong together", {"rotary_cos": torch.zeros(24, 4)}),
    (ValueError, "room for 24 keys", {"rotary_cos": torch.zeros(23, 4), "rotary_sin": torch.zeros(23, 4)}),
    (ValueError, "R must be in", {"rotary_cos": torch.zeros(24, 9), "rotary_sin": torch.zeros(24, 9)}),
    (ValueError, "window_size has left = -4", {"window_size": (-4, 0)}),
    (ValueError, "does not broadcast", {"mask": torch.ones(2, 4, 1, 23, dtype=torch.bool)}),
    (TypeError, "mask is function", {"mask": lambda b, h, i, j: i >= j}),
    (ValueError, "build it for this length", {"mask": masks.Document(torch.zeros(1, 23, dtype=torch.int64))}),
    (ValueError, "alibi_slopes has shape", {"alibi_slopes": torch.rand(3)}),
    (ValueError, "num_splits is -1", {"num_splits": -1}),
    (ValueError, "softcap is -1", {"softcap": -1.0}),
    (ValueError, "out_dtype is torch.float16", {"out_dtype": torch.float16}),
    (UnsupportedAttention, "a cache call returns 'lse' only", {"return_aux": "entropy"}),
    (TypeError, "causal is 1", {"causal": 1}),
]


@pytest.mark.parametrize(("error", "words", "options"), REFUSED, ids=[words[:30] for _, words, _ in REFUSED])
def test_refusals_are_in_words(error, words, options):
    with pytest.raises(error, match=words):
        attention_with_kvcache(**cached(), **options)


def test_shapes_and_dtypes_of_caches_are_checked():
    given = cached()
    for changes, error, words in (
        ({"k_cache": given["k_cache"][:1], "v_cache": given["v_cache"][:1]}, ValueError, "cache_batch_idx must name the row"),
        ({"v_cache": given["v_cache"][:, 1:]}, ValueError, "only their last dimensions may differ"),
        ({"q": given["q"][..., :8]}, ValueError, "q has head dim 8 but k_cache has 16"),
        ({"q": given["q"][:, :, :3]}, ValueError, "no multiple of the 2 heads of the caches"),
        ({"q": given["q"].half()}, TypeError, "a cache is never converted"),
        ({"q": given["q"][0]}, ValueError, "rank 4"),
        ({"k_cache": given["k_cache"].to("meta")}, ValueError, "k_cache is on meta"),
    ):
        with pytest.raises(error, match=words):
            attention_with_kvcache(**{**given, **changes})


def test_an_input_that_requires_grad_raises():
    given = cached()
    for name in ("q", "k_cache", "v_cache"):
        with pytest.raises(UnsupportedAttention, match=f"{name} requires grad"):
            attention_with_kvcache(**{**given, name: given[name].clone().requires_grad_()})
    sink = torch.nn.Parameter(torch.zeros(4))
    with pytest.raises(UnsupportedAttention, match="learnable_sink requires grad"):
        attention_with_kvcache(**given, learnable_sink=sink)
    with torch.no_grad():
        assert not attention_with_kvcache(**given, learnable_sink=sink).requires_grad


def over_pages(q: Tensor, k_cache: Tensor, v_cache: Tensor, **options: Tensor) -> Tensor:
    """One query a sequence, each row of the cache being one page."""
    starts, used, table = torch.arange(3, dtype=I32), torch.full((2,), 9, dtype=I32), torch.arange(2, dtype=I32)[:, None]
    return attention_varlen(q[:, 0], k_cache, v_cache, starts, None, seqused_k=used, page_table=table, **options)


def jvp(call, x: Tensor, u: Tensor) -> Tensor:
    return torch.func.jvp(call, (x,), (u,))[1]


def dual(call, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return call(forward_ad.make_dual(x, x))


@pytest.mark.parametrize(
    "way",
    [
        lambda call, x: jvp(call, x, x),
        lambda call, x: torch.no_grad()(jvp)(call, x, x),
        dual,
        lambda call, x: torch.func.grad(lambda s: jvp(call, x * s, x).sum())(torch.ones(())),
        lambda call, x: torch.func.vmap(lambda s: jvp(call, x, x * s))(torch.ones(2)),
    ],
    ids=["jvp", "jvp without grad", "dual tensors", "grad of jvp", "vmap of jvp"],
)
@pytest.mark.parametrize("function", [attention_with_kvcache, over_pages])
@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "alibi_slopes", "learnable_sink"])
def test_an_input_with_a_tangent_raises(name: str, function, way):
    """An operator without a rule for forward mode gives a tangent of zeros in torch.func, and no error."""
    given = {**cached(), "alibi_slopes": torch.rand(4), "learnable_sink": torch.randn(4)}
    with pytest.raises(UnsupportedAttention, match=f"^{name.replace('_cache', '(_cache)?')} (carries a tangent|requires grad)"):
        way(lambda x: function(**{**given, name: x}), given[name])


def test_a_mapped_length_table_or_mask_raises_in_words():
    """Not only what has a derivative may be mapped: the operators have no rule for any of it."""
    q, cache, pages = torch.randn(2, 1, 2, 4), torch.randn(2, 6, 1, 4), torch.randn(3, 3, 1, 4)
    rows = torch.zeros(3, 2, dtype=I32)
    calls = {
        "cache_seqlens": (lambda x: attention_with_kvcache(q, cache, cache, cache_seqlens=x), rows),
        "cache_batch_idx": (lambda x: attention_with_kvcache(q, cache, cache, cache_batch_idx=x), rows),
        "cache_leftpad": (lambda x: attention_with_kvcache(q, cache, cache, cache_leftpad=x), rows),
        "page_table": (lambda x: attention_with_kvcache(q, pages, pages, page_table=x), rows[:, :, None]),
        "mask": (lambda x: attention_with_kvcache(q, cache, cache, mask=x), torch.ones(3, 6, dtype=torch.bool)),
        "seqused_k": (lambda x: attention_over_pages(q[:, 0], pages, pages, rows.new_tensor([0, 1, 2]), rows[0, :, None], x), rows),
        "cu_seqlens_q": (lambda x: attention_over_pages(q[:, 0], pages, pages, x, rows[0, :, None]), torch.zeros(3, 3, dtype=I32)),
    }
    for name, (call, x) in calls.items():
        with pytest.raises(UnsupportedAttention, match=f"^{name} is mapped by torch.vmap"):
            torch.func.vmap(call)(x)


# ----------------------------------------------------------------------------------------------------------- bug reports: D


@report(44)
def test_one_token_is_its_own_value(report):
    q, k, v = torch.randn(1, 1, 1, 16).half() * 3, torch.randn(1, 1, 1, 16).half(), torch.randn(1, 1, 1, 16).half()
    out = attention_with_kvcache(q, torch.empty(1, 4, 1, 16).half(), torch.empty(1, 4, 1, 16).half(), k, v, cache_seqlens=0, causal=True)
    assert torch.equal(out, v)


@report(49, 50)
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_no_keys(report, dtype):
    given = {name: x.to(dtype) for name, x in cached().items()}
    out, aux = attention_with_kvcache(**given, cache_seqlens=lengths(0, 5), return_aux="lse")
    assert not out[0].any() and bool((aux.lse[0] == float("-inf")).all()) and bool(torch.isfinite(aux.lse[1]).all())
    sink = torch.randn(4)
    aux = attention_with_kvcache(**given, cache_seqlens=lengths(0, 5), learnable_sink=sink, return_aux="lse")[1]
    torch.testing.assert_close(aux.lse[0, :, 0], sink.to(aux.lse.dtype))


@report(52, 56)
def test_sizes_of_zero(report):
    assert attention_with_kvcache(**cached(batch=0)).shape == (0, 1, 4, 16)
    assert attention_with_kvcache(**cached(size_q=0)).shape == (2, 0, 4, 16)
    assert attention_with_kvcache(**cached(heads=0, kv_heads=0)).shape == (2, 1, 0, 16)
    assert not attention_with_kvcache(**cached(capacity=0)).any()
    given = cached(dim_v=16) | {"q": torch.empty(2, 1, 4, 0), "k_cache": torch.empty(2, 24, 2, 0)}
    mean = given["v_cache"].mean(1).repeat_interleave(2, 1)[:, None]
    torch.testing.assert_close(attention_with_kvcache(**given), mean)
    empty = {"k": torch.empty(2, 0, 2, 16), "v": torch.empty(2, 0, 2, 16)}
    given = cached()
    assert torch.equal(attention_with_kvcache(**given, **empty, cache_seqlens=3), attention_with_kvcache(**given, cache_seqlens=3))


@report(53, 58, 59, 65)
@pytest.mark.parametrize("dims", [(60, 60), (1, 1), (128, 128), (64, 128), (192, 128)], ids=str)
def test_head_dims(report, dims):
    given = cached(dim=dims[0], dim_v=dims[1])
    if dims[0] == 128:
        given["q"][..., :64] = 0.0
    check(given, cache_seqlens=lengths(24, 11))


@report(61)
def test_lengths_that_no_tile_divides(report):
    """Keys past the length are NaN: reading one would show."""
    k_cache, v_cache = (torch.full((1, 2, 64, 16), float("nan")).transpose(1, 2) for _ in range(2))
    q = torch.randn(1, 1, 4, 16)
    for length in (1, 15, 16, 17, 31, 33, 47, 63, 64):
        k_cache[:, :length], v_cache[:, :length] = torch.randn(2, 1, length, 2, 16)
        got = attention_with_kvcache(q, k_cache, v_cache, cache_seqlens=length)
        torch.testing.assert_close(got, attention(q, k_cache[:, :length], v_cache[:, :length]))


@report(46, 47, 62, 64)
@pytest.mark.parametrize("heads", [(3, 1), (10, 2), (24, 4), (28, 4), (71, 1)], ids=str)
def test_every_group_size(report, heads):
    check(cached(heads=heads[0], kv_heads=heads[1], size_q=2), cache_seqlens=lengths(24, 9), causal=True)


@report(55, 139)
def test_a_mask_for_another_length_is_an_error(report):
    for mask in (masks.Document(torch.zeros(1, 20, dtype=torch.int64)), masks.Blocks(torch.ones(1, 1, 2, 2, dtype=torch.bool), 16)):
        with pytest.raises(ValueError, match=r"Document|Blocks"):
            attention_with_kvcache(**cached(capacity=40), mask=mask)


# ------------------------------------------------------------------------------------------------- bug reports: F, H, I, K


@report(77, 82, 83, 86)
@pytest.mark.parametrize("how", VIEWS)
def test_views(report, how):
    given = cached() | new()
    seqlens = given.pop("cache_seqlens")
    want = attention_with_kvcache(**{n: x.clone() for n, x in given.items()}, cache_seqlens=seqlens)
    seen = {name: as_view(x, how) for name, x in given.items()}
    torch.testing.assert_close(attention_with_kvcache(**seen, cache_seqlens=seqlens), want)
    assert torch.equal(seen["k_cache"][:, 3], given["k"][:, 0])


@report(92)
@pytest.mark.parametrize("length", [32767, 32769, 65537])
def test_long_caches(report, length, monkeypatch):
    monkeypatch.setattr(tiled_cache, "TILE_KEYS", 4096)
    cache = torch.zeros(1, length, 1, 8)
    out = attention_with_kvcache(torch.zeros(1, 1, 1, 8), cache, cache)
    assert not out.any()


@report(115, 116)
def test_capacity_is_only_a_bound(report):
    """What lies past the lengths, finite or not, changes nothing, and a larger cache gives the same numbers."""
    given = cached(capacity=40)
    want = attention_with_kvcache(given["q"], given["k_cache"][:, :20], given["v_cache"][:, :20], cache_seqlens=lengths(13, 20))
    spoiled = {name: x.clone() for name, x in given.items()}
    for name in ("k_cache", "v_cache"):
        spoiled[name][0, 13:], spoiled[name][1, 20:] = float("nan"), float("inf")
    assert torch.equal(attention_with_kvcache(**spoiled, cache_seqlens=lengths(13, 20)), want)


@report(119)
def test_left_padding(report):
    q, k, v = torch.randn(2, 6, 4, 16), torch.randn(2, 9, 2, 16), torch.randn(2, 9, 2, 16)
    spoiled = [x.clone() for x in (k, v)]
    for x in spoiled:
        x[1, :3] = float("nan")
    out = attention_with_kvcache(q, *spoiled, cache_leftpad=lengths(0, 3), causal=True)
    torch.testing.assert_close(out[0], attention(q, k, v, causal=True)[0])
    torch.testing.assert_close(out[1], attention(q[1:], k[1:, 3:], v[1:, 3:], causal=True)[0])


@report(124)
def test_a_slice_equals_a_length(report):
    given = cached(capacity=64)
    full = attention_with_kvcache(**given, cache_seqlens=37)
    sliced = attention_with_kvcache(given["q"], given["k_cache"][:, :37], given["v_cache"][:, :37])
    torch.testing.assert_close(full, sliced)


@report(121)
def test_neighbours_do_not_change_the_bits(report):
    """batch_invariant: alone, with others before or after it, in other rows of the cache, on other pages."""
    given = cached(batch=5, capacity=48, size_q=3)
    used = lengths(48, 7, 33, 0, 20)
    together = attention_with_kvcache(**given, cache_seqlens=used, causal=True, batch_invariant=True)
    for item in range(5):
        part = slice(item, item + 1)
        alone = attention_with_kvcache(
            **{name: x[part] for name, x in given.items()}, cache_seqlens=used[part], causal=True, batch_invariant=True
        )
        assert torch.equal(alone, together[part])
    pages = {name: given[name].reshape(60, 4, 2, 16)[torch.arange(59, -1, -1)] for name in ("k_cache", "v_cache")}
    table = 59 - torch.arange(60, dtype=I32).view(5, 12)
    paged = attention_with_kvcache(given["q"], **pages, page_table=table, cache_seqlens=used, causal=True, batch_invariant=True)
    assert torch.equal(paged, together)


@report(134, 137, 140)
def test_a_decode_loop_compiles_whole_and_never_copies_a_cache(report):
    """One graph for any length; in the generated code the caches appear in the two operators and nowhere else."""
    from torch._inductor.utils import run_and_get_code

    def step(q: Tensor, k: Tensor, v: Tensor, caches: Tensor, seqlens: Tensor) -> tuple[Tensor, Tensor]:
        out, aux = attention_with_kvcache(
            q, caches[0], caches[1], k, v, cache_seqlens=seqlens, causal=True, mask=masks.Chunked(7), return_aux="lse"
        )
        return out.flatten(2), aux.lse

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True)
    q, k, v = torch.randn(3, 2, 1, 2, 16)
    caches = torch.zeros(2, 2, 24, 2, 16)
    eager_caches = caches.clone()
    (out, lse), code = run_and_get_code(compiled, q, k, v, caches, lengths(3, 5))
    want, want_lse = step(q, k, v, eager_caches, lengths(3, 5))
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)
    assert torch.equal(caches, eager_caches)
    body = code[0][code[0].index("def call(") :]
    assert "cache_append.default" in body and "attention_cached.default" in body
    assert "empty_strided" not in body and "copy_" not in body, "something was allocated or copied"
    compiles = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    compiled(q, k, v, caches, lengths(6, 9))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiles


@report(136)
def test_symbolic_sizes(report):
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, kc, vc, k, v, n: attention_with_kvcache(q, kc, vc, k, v, cache_seqlens=n), fullgraph=True, backend="eager", dynamic=True
    )
    for batch, capacity, size in ((2, 24, 2), (3, 40, 3)):
        given = cached(batch=batch, capacity=capacity, size_q=size) | new(batch, size)
        n = given.pop("cache_seqlens")
        want = attention_with_kvcache(**{name: x.clone() for name, x in given.items()}, cache_seqlens=n)
        torch.testing.assert_close(compiled(*(given[x] for x in ("q", "k_cache", "v_cache", "k", "v")), n), want)


@report(134, 137)
def test_the_operators_are_well_behaved(report):
    given = cached() | new()
    n = given.pop("cache_seqlens")
    append = (given["k_cache"], given["v_cache"], given["k"], given["v"], n, None, None, None, None, True)
    torch.library.opcheck(torch.ops.tilewise.cache_append.default, append)
    seen = (None,) * 12
    read = (given["q"].transpose(1, 2).contiguous().transpose(1, 2), given["k_cache"], given["v_cache"], *seen, [])
    rules = (0.25, 0.0, -1, 0, 0, True, 0, False, "", None)
    torch.library.opcheck(torch.ops.tilewise.attention_cached.default, read + rules)


def test_autocast_casts_what_is_new():
    given = {name: x.bfloat16() for name, x in cached().items()} | new()
    given["q"] = given["q"].float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention_with_kvcache(**given)
    want = attention_with_kvcache(**{name: x if name == "cache_seqlens" else x.bfloat16() for name, x in given.items()})
    assert torch.equal(out, want) and out.dtype == torch.bfloat16
