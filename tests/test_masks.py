"""Mask rules against a double loop of their meaning in plain Python, and everything else that a rule promises."""

import copy
import doctest
import math
import pathlib
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

from tilewise import UnsupportedAttention, attention, mask_base, masks
from tilewise.masks import (
    Blocks,
    Causal,
    Chunked,
    Custom,
    Dense,
    Dilated,
    Document,
    FirstKeys,
    Full,
    PrefixLM,
    SlidingWindow,
    lower,
)
from tilewise.score_mod import Program

pytestmark = pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")

# ------------------------------------------------------------------------------------------------------------------- the meaning


def sees(rule, b, h, i, j, p):
    """Whether query i at position p sees key j: the definition of each rule, with Python numbers only."""
    at = {"b": b, "h": h}

    def item(tensor, axis, name):
        return 0 if tensor.shape[axis] == 1 else at[name]

    match rule:
        case mask_base.And(first, second):
            return sees(first, b, h, i, j, p) and sees(second, b, h, i, j, p)
        case mask_base.Or(first, second):
            return sees(first, b, h, i, j, p) or sees(second, b, h, i, j, p)
        case mask_base.Not(inner):
            return not sees(inner, b, h, i, j, p)
        case Full():
            return True
        case Causal(align):
            return j <= (p if align == "bottom_right" else i)
        case SlidingWindow(left, right):
            return (left == -1 or p - left <= j) and (right == -1 or j <= p + right)
        case Chunked(size):
            return math.floor(p / size) == math.floor(j / size)
        case FirstKeys(n):
            return j < n
        case Dilated(step, left):
            return any(j == p - t * step for t in range(200) if left == -1 or t * step <= left)
        case PrefixLM() if rule.lengths is not None:
            return j <= p or j < rule.lengths.tolist()[item(rule.lengths, 0, "b")]
        case PrefixLM():
            spans = rule.spans.tolist()[item(rule.spans, 0, "b")]
            return j <= p or any(start <= p < stop and start <= j < stop for start, stop in spans)
        case Document():
            keys = rule.ids if rule.kv_ids is None else rule.kv_ids
            return rule.ids.tolist()[item(rule.ids, 0, "b")][i] == keys.tolist()[item(keys, 0, "b")][j]
        case Blocks(bits, size):
            return bits.tolist()[item(bits, 0, "b")][item(bits, 1, "h")][i // size][j // size]
        case Dense(visible):
            return visible.expand(2, 2, *visible.shape[-2:]).tolist()[b][h][i if visible.shape[-2] > 1 else 0][j]
        case Custom(function):
            return bool(function(*(torch.tensor(index) for index in (b, h, i, j))))
    raise AssertionError(rule)


def neighbours(b, h, q, k):
    """Positions of a picture four wide that touch."""
    return ((q // 4 - k // 4).abs() <= 1) & ((q % 4 - k % 4).abs() <= 1)


def per_head_and_item(b, h, q, k):
    return (q - k <= h + 1) & (k >= b)


def leaves(batch, heads, seqlen_q, seqlen_k):
    def bits(*shape):
        return st.lists(st.booleans(), min_size=math.prod(shape), max_size=math.prod(shape)).map(
            lambda values: torch.tensor(values, dtype=torch.bool).view(shape)
        )

    def numbers(low, high, *shape):
        return st.lists(st.integers(low, high), min_size=math.prod(shape), max_size=math.prod(shape)).map(
            lambda values: torch.tensor(values, dtype=torch.int64).view(shape)
        )

    some_batch, some_heads = st.sampled_from([1, batch]), st.sampled_from([1, heads])
    reach = st.integers(-1, seqlen_k + 1)
    return st.one_of(
        st.just(Full()),
        st.sampled_from([Causal(), Causal(align="top_left")]),
        st.builds(SlidingWindow, reach, reach),
        st.builds(Chunked, st.integers(1, 5)),
        st.builds(FirstKeys, st.integers(0, seqlen_k)),
        st.builds(Dilated, st.integers(1, 3), reach),
        some_batch.flatmap(lambda n: numbers(0, seqlen_k, n)).map(PrefixLM),
        some_batch.flatmap(lambda n: numbers(0, seqlen_k + 1, n, 2, 2)).map(lambda spans: PrefixLM(spans=spans.sort(2).values)),
        st.tuples(some_batch, some_batch).flatmap(
            lambda n: st.builds(Document, numbers(0, 2, n[0], seqlen_q), numbers(0, 2, n[1], seqlen_k))
        ),
        st.tuples(some_batch, some_heads, st.integers(1, 4)).flatmap(
            lambda n: st.builds(Blocks, bits(n[0], n[1], -(-seqlen_q // n[2]), -(-seqlen_k // n[2])), st.just(n[2]))
        ),
        st.sampled_from([(seqlen_q, seqlen_k), (1, heads, 1, seqlen_k), (batch, 1, seqlen_q, seqlen_k)]).flatmap(
            lambda shape: bits(*shape).map(Dense)
        ),
        st.sampled_from([Custom(neighbours), Custom(per_head_and_item)]),
    )


@st.composite
def calls(draw):
    batch, heads = 2, 2
    seqlen_q, seqlen_k = draw(st.integers(1, 7)), draw(st.integers(1, 9))
    rule = draw(
        st.recursive(
            leaves(batch, heads, seqlen_q, seqlen_k),
            lambda inner: st.one_of(
                st.builds(lambda a, b: a & b, inner, inner), st.builds(lambda a, b: a | b, inner, inner), st.builds(lambda a: ~a, inner)
            ),
            max_leaves=4,
        )
    )
    lengths = [draw(st.none() | st.lists(st.integers(0, n), min_size=batch, max_size=batch)) for n in (seqlen_q, seqlen_k)]
    return rule, batch, heads, seqlen_q, seqlen_k, *lengths


def double_loop(rule, batch, heads, seqlen_q, seqlen_k, len_q, len_k):
    result = torch.zeros(batch, heads, seqlen_q, seqlen_k, dtype=torch.bool)
    for b in range(batch):
        queries, keys = (seqlen_q if len_q is None else len_q[b]), (seqlen_k if len_k is None else len_k[b])
        for h in range(heads):
            for i in range(queries):
                for j in range(keys):
                    result[b, h, i, j] = sees(rule, b, h, i, j, i + keys - queries)
    return result


def environment(batch, heads, seqlen_q, seqlen_k, len_q=None, len_k=None):
    keys = torch.full((batch,), seqlen_k) if len_k is None else len_k
    queries = torch.full((batch,), seqlen_q) if len_q is None else len_q
    rows = torch.arange(seqlen_q).view(1, 1, -1, 1)
    return {
        "b": torch.arange(batch).view(-1, 1, 1, 1),
        "h": torch.arange(heads).view(1, -1, 1, 1),
        "q_idx": rows,
        "kv_idx": torch.arange(seqlen_k).view(1, 1, 1, -1),
        "p": rows + (keys - queries).view(-1, 1, 1, 1),
    }


def within(visible, batch, seqlen_q, seqlen_k, len_q, len_k):
    if len_q is not None:
        visible = visible & (torch.arange(seqlen_q).view(1, 1, -1, 1) < len_q.view(-1, 1, 1, 1))
    if len_k is not None:
        visible = visible & (torch.arange(seqlen_k) < len_k.view(-1, 1, 1, 1))
    return visible


@settings(max_examples=120, deadline=None)
@given(calls())
def test_every_form_of_a_rule_means_the_double_loop(call):
    rule, batch, heads, seqlen_q, seqlen_k, len_q, len_k = call
    expected = double_loop(*call)
    len_q, len_k = (None if n is None else torch.tensor(n, dtype=torch.int32) for n in (len_q, len_k))
    sizes = (batch, seqlen_q, seqlen_k, len_q, len_k)
    env = environment(batch, heads, seqlen_q, seqlen_k, len_q, len_k)

    dense = rule.dense(batch, heads, seqlen_q, seqlen_k, len_q, len_k)
    assert dense.dtype == torch.bool and dense.shape[2:] == expected.shape[2:]
    assert torch.equal(dense.expand(expected.shape), expected)

    text, captured = rule.program(seqlen_q, seqlen_k)
    assert torch.equal(within(Program.parse(text).evaluate(env, captured), *sizes).expand(expected.shape), expected), text

    low = lower(rule, batch=batch, heads=heads, seqlen_q=seqlen_q, seqlen_k=seqlen_k, device="cpu")
    assert min(low.window_left, low.window_right) >= -1
    visible = torch.ones(1, 1, seqlen_q, seqlen_k, dtype=torch.bool)
    if low.window_left >= 0:
        visible = visible & (env["kv_idx"] >= env["p"] - low.window_left)
    if low.window_right >= 0:
        visible = visible & (env["kv_idx"] <= env["p"] + low.window_right)
    if low.program_text:
        visible = visible & Program.parse(low.program_text).evaluate(env, low.captured)
    if low.dense is not None:
        visible = visible & low.dense
    assert torch.equal(within(visible, *sizes).expand(expected.shape), expected), low

    window = rule.window()
    if window is not None:
        assert torch.equal(expected, double_loop(SlidingWindow(*window), *call[1:]))

    share = rule.density(seqlen_q, seqlen_k, batch=batch, heads=heads, len_q=len_q, len_k=len_k)
    assert share == pytest.approx(expected.double().mean().item())

    tiles = rule.tile_range(2, 3, seqlen_q=seqlen_q, seqlen_k=seqlen_k, len_q=len_q, len_k=len_k)
    if tiles is not None:
        first, stop = (ends.expand(batch, -1).tolist() for ends in tiles)
        for b in range(batch):
            for tile in range(-(-seqlen_q // 2)):
                columns = expected[b, :, 2 * tile : 2 * tile + 2].any(0).any(0).nonzero().view(-1).tolist()
                wanted = (columns[0] // 3, columns[-1] // 3 + 1) if columns else (0, 0)
                assert (first[b][tile], stop[b][tile]) == wanted

    rule.verify(seqlen_q, seqlen_k, batch=batch, heads=heads)


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(3, 5), (5, 3), (1, 4), (4, 1), (0, 3), (3, 0)])
def test_ranges_of_rules_made_of_intervals(seqlen_q, seqlen_k):
    for rule in (Causal(), Causal("top_left") & FirstKeys(2), Chunked(2) & SlidingWindow(1, 1), PrefixLM(torch.tensor([2]))):
        first, stop = rule.tile_range(2, 2, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
        assert first.shape == stop.shape == (1, -(-seqlen_q // 2))
        visible = rule.dense(1, 1, seqlen_q, seqlen_k)[0, 0]
        for tile in range(first.shape[1]):
            columns = visible[2 * tile : 2 * tile + 2].any(0).nonzero().view(-1).tolist()
            assert (first[0, tile], stop[0, tile]) == ((columns[0] // 2, columns[-1] // 2 + 1) if columns else (0, 0))
    ids = Document(*(torch.zeros(1, length, dtype=torch.int64) for length in (seqlen_q, seqlen_k)))
    for rule in (ids, ~Causal(), Dilated(2, 4)):
        assert rule.tile_range(2, 2, seqlen_q=seqlen_q, seqlen_k=seqlen_k) is None


# -------------------------------------------------------------------------------------------------------- what the kernels get


def low(rule, batch=1, heads=1, seqlen_q=8, seqlen_k=8, **options):
    return lower(rule, batch=batch, heads=heads, seqlen_q=seqlen_q, seqlen_k=seqlen_k, device="cpu", **options)


@pytest.mark.parametrize(
    "rule, window",
    [
        (Full(), (-1, -1)),
        (Causal(), (-1, 0)),
        (SlidingWindow(4, 2), (4, 2)),
        (Causal() & SlidingWindow(4, 2), (4, 0)),
        (SlidingWindow(-1, 3) & SlidingWindow(2, -1), (2, 3)),
        (SlidingWindow(1, 0) | SlidingWindow(0, 3), (1, 3)),
        (Dilated(1, 5), (5, 0)),
    ],
)
def test_windows_need_no_program(rule, window):
    assert low(rule) == (*window, "", [], None)


def test_windows_that_a_rule_implies_are_added():
    assert low(Chunked(4))[:3] == (3, 3, "(p // 4) == (kv_idx // 4)")
    assert low(Causal() & Chunked(4))[:3] == (3, 0, "(p // 4) == (kv_idx // 4)")
    assert low(Chunked(4) | SlidingWindow(1, 6))[:2] == (3, 6)
    assert low(Causal() | FirstKeys(2))[:2] == (-1, -1)
    assert low(~Causal())[:3] == (-1, -1, "~(kv_idx <= p)")


def test_a_dense_tensor_passes_as_the_view_that_it_is():
    visible = torch.rand(3, 8, 2, 8).permute(0, 2, 1, 3) > 0.5  # odd strides
    result = low(Causal() & Dense(visible), batch=3, heads=2)
    assert result.dense.data_ptr() == visible.data_ptr() and result.dense.stride() == visible.stride()
    assert result[:3] == (-1, 0, "")
    row = torch.ones(8, dtype=torch.bool)
    assert low(Dense(row)).dense.shape == (1, 1, 1, 8)
    both = low(Dense(row) & Dense(visible) & FirstKeys(3), batch=3, heads=2)
    assert both.dense.data_ptr() == row.data_ptr()
    assert both.program_text == "b0[b, h, q_idx, kv_idx] & (kv_idx < 3)" and both.captured[0].data_ptr() == visible.data_ptr()
    inside_or = low(Dense(row) | FirstKeys(3))
    assert inside_or.dense is None and inside_or.program_text == "b0[0, 0, 0, kv_idx] | (kv_idx < 3)"


def test_one_tensor_used_twice_is_captured_once():
    ids = torch.zeros(1, 8, dtype=torch.int64)
    result = low(Document(ids) & ~Custom(lambda b, h, q, k: ids[0, q] > k))
    assert result.program_text == "t0 = i0[0, q_idx]\n(t0 == i0[0, kv_idx]) & (~(t0 > kv_idx))" and len(result.captured) == 1


def test_spans_cost_one_read_a_pair_however_many_they_are():
    spans = torch.stack([torch.arange(0, 1000, 10), torch.arange(4, 1004, 10)], 1)[None]
    text, captured = PrefixLM(spans=spans).program(1000, 1000)
    assert text.count("i0[") == 1 and captured[0].shape == (1, 1001)


# --------------------------------------------------------------------------------------------------------- positions and reuse


def test_custom_counts_from_the_start_and_causal_to_the_end():
    custom = Custom(lambda b, h, q, k: q >= k)
    assert custom.dense(1, 1, 2, 4)[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0]]
    assert Causal().dense(1, 1, 2, 4)[0, 0].int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert torch.equal(custom.dense(1, 1, 2, 4), Causal("top_left").dense(1, 1, 2, 4))
    assert torch.equal(custom.dense(1, 1, 4, 4), Causal().dense(1, 1, 4, 4))


def test_lengths_limit_after_not():
    visible = (~Full() | Full()).dense(2, 1, 3, 4, len_k=torch.tensor([2, 4]), len_q=torch.tensor([3, 0]))
    assert visible[0, 0].int().tolist() == [[1, 1, 0, 0]] * 3 and not visible[1].any()


def test_a_rule_serves_every_length_or_refuses():
    for rule in (Causal() & SlidingWindow(3, 0), Chunked(4), PrefixLM(torch.tensor([3])), PrefixLM(spans=torch.tensor([[[2, 5]]]))):
        for size in (4, 8, 20):
            rule.verify(size, size)
    for rule, message in (
        (Document(torch.zeros(1, 8, dtype=torch.int64)), "ids has 8 entries in a row but the sequence has 6"),
        (Blocks(torch.ones(1, 1, 2, 2, dtype=torch.bool), 4), "need 3 x 3"),
        (Dense(torch.ones(8, 8, dtype=torch.bool)), "must broadcast"),
    ):
        low(rule)
        size = 12 if isinstance(rule, Blocks) else 6
        with pytest.raises(ValueError, match=message):
            low(rule, seqlen_q=size, seqlen_k=size)
        with pytest.raises(ValueError, match=message):
            (Causal() & ~rule).dense(1, 1, size, size)


def test_documents_from_boundaries():
    document = Document.from_cu_seqlens(torch.tensor([0, 3, 3, 5], dtype=torch.int32), 5)
    assert document.ids.tolist() == [[0, 0, 0, 2, 2]]
    crossed = Document.from_cu_seqlens(torch.tensor([0, 1, 2]), 2, torch.tensor([0, 2, 5]), 6)
    assert crossed.dense(1, 1, 2, 6)[0, 0].int().tolist() == [[1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 1, 0]]
    with pytest.raises(ValueError, match="together"):
        Document.from_cu_seqlens(torch.tensor([0, 2]), 2, torch.tensor([0, 2]))


# ------------------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "build, error, message",
    [
        (lambda: SlidingWindow(-2, 0), ValueError, "left is -2; it must be at least -1; -1 is unlimited"),
        (lambda: SlidingWindow(0, 1.5), TypeError, "right is 1.5 of type float"),
        (lambda: SlidingWindow(True, 0), TypeError, "left is True"),
        (lambda: Causal("bottom"), ValueError, "'bottom_right' or 'top_left'"),
        (lambda: Chunked(0), ValueError, "size is 0; it must be at least 1"),
        (lambda: FirstKeys(-1), ValueError, "n is -1"),
        (lambda: Dilated(0, 4), ValueError, "step is 0"),
        (lambda: Dilated(2, -2), ValueError, "left is -2"),
        (lambda: PrefixLM(), ValueError, "either lengths"),
        (lambda: PrefixLM(torch.tensor([1]), torch.tensor([[[0, 1]]])), ValueError, "not both"),
        (lambda: PrefixLM(torch.tensor([1.0])), TypeError, "torch.float32"),
        (lambda: PrefixLM([3]), TypeError, "list"),
        (lambda: PrefixLM(torch.tensor([[1]])), ValueError, r"shape \(1, 1\)"),
        (lambda: PrefixLM(spans=torch.zeros(1, 2, 3, dtype=torch.int64)), ValueError, "start and stop"),
        (lambda: Document(torch.zeros(4, dtype=torch.int64)), ValueError, r"\(B or 1, S\)"),
        (lambda: Document(torch.zeros(1, 4, dtype=torch.bool)), TypeError, "torch.bool"),
        (lambda: Blocks(torch.zeros(1, 1, 2, 2), 4), TypeError, "torch.float32"),
        (lambda: Blocks(torch.zeros(2, 2, dtype=torch.bool), 4), ValueError, "query blocks, key blocks"),
        (lambda: Dense(torch.zeros(2, 2)), TypeError, "torch.bool"),
        (lambda: Dense(torch.zeros(1, 1, 1, 2, 2, dtype=torch.bool)), ValueError, "broadcast"),
        (lambda: Custom(3), TypeError, "int"),
    ],
)
def test_constructors_refuse_in_words(build, error, message):
    with pytest.raises(error, match=message):
        build()


@pytest.mark.parametrize(
    "rule, sizes, message",
    [
        (Document(torch.zeros(1, 8, dtype=torch.int64)), dict(seqlen_k=9), "8 queries and 9 keys but only one set of ids"),
        (Document(torch.zeros(3, 8, dtype=torch.int64)), dict(batch=2), "serves 3 batch items; the batch has 2"),
        (PrefixLM(torch.zeros(3, dtype=torch.int64)), dict(batch=2), "serves 3 batch items"),
        (Blocks(torch.ones(1, 3, 1, 1, dtype=torch.bool), 8), dict(heads=2), "serves 3 heads; there are 2 query heads"),
        (Blocks(torch.ones(1, 1, 1, 1, dtype=torch.bool), 4), {}, "1 x 1 blocks; 8 queries and 8 keys in blocks of 4 need 2 x 2"),
        (Dense(torch.ones(3, 1, 8, 8, dtype=torch.bool)), dict(batch=2), r"\(2, 1, 8, 8\)"),
        (Document(torch.zeros(1, 8, dtype=torch.int64, device="meta")), {}, r"is on meta .* mask.to\('cpu'\)"),
    ],
)
def test_rules_that_do_not_fit_are_refused_at_use(rule, sizes, message):
    with pytest.raises(ValueError, match=message):
        low(rule, **sizes)


def test_functions_that_are_no_masks_are_refused():
    with pytest.raises(UnsupportedAttention, match="kind int; return a boolean"):
        low(Custom(lambda b, h, q, k: q - k))
    with pytest.raises(UnsupportedAttention, match="write torch"):
        low(Custom(lambda b, h, q, k: q >= k and k > 2))
    with pytest.raises(UnsupportedAttention, match="returned NoneType"):
        low(Custom(lambda b, h, q, k: None))
    with pytest.raises(UnsupportedAttention, match="packed sequences"):
        low(Causal() & ~Blocks(torch.ones(1, 1, 1, 1, dtype=torch.bool), 8), ragged=True)
    with pytest.raises(TypeError, match="no truth value"):
        bool(Causal() and FirstKeys(2))
    with pytest.raises(TypeError):
        Causal() & 3


def test_verify_finds_a_function_that_is_no_function_of_its_arguments():
    answers = iter([True, False] * 10)
    with pytest.raises(AssertionError, match="its program and the predicate disagree at b=0, h=0, q_idx=0, kv_idx=0"):
        Custom(lambda b, h, q, k: next(answers)).verify(2, 2)


# --------------------------------------------------------------------------------------------------------------------- objects


EXAMPLES = [
    (Full(), "Full()"),
    (Causal(), "Causal()"),
    (Causal(align="top_left"), "Causal(align='top_left')"),
    (~(Causal() & SlidingWindow(3, 0)) | FirstKeys(2), "~(Causal() & SlidingWindow(left=3, right=0)) | FirstKeys(n=2)"),
    ((Chunked(4) | Dilated(2, 8)) & ~Causal(), "(Chunked(size=4) | Dilated(step=2, left=8)) & ~Causal()"),
    (PrefixLM(torch.tensor([3])), "PrefixLM(lengths=<int64 (1,)>)"),
    (PrefixLM(spans=torch.tensor([[[1, 5]]])), "PrefixLM(spans=<int64 (1, 1, 2)>)"),
    (Document(torch.arange(8).view(1, 8) // 3), "Document(ids=<int64 (1, 8)>)"),
    (Blocks(torch.eye(2, dtype=torch.bool).view(1, 1, 2, 2), 4), "Blocks(bits=<bool (1, 1, 2, 2)>, block_size=4)"),
    (Dense(torch.eye(8, dtype=torch.bool)), "Dense(visible=<bool (8, 8)>)"),
    (Custom(neighbours), "Custom(function=neighbours)"),
]


@pytest.mark.parametrize("rule, shown", EXAMPLES, ids=[shown for _, shown in EXAMPLES])
def test_rules_are_plain_frozen_objects(rule, shown):
    assert repr(rule) == shown
    expected = rule.dense(1, 1, 8, 8)
    for other in (pickle.loads(pickle.dumps(rule)), copy.deepcopy(rule), copy.copy(rule), rule.to("cpu"), ~~rule):
        assert repr(other) == shown and torch.equal(other.dense(1, 1, 8, 8), expected)
    with pytest.raises(AttributeError):
        rule.size = 3
    assert rule.to("meta").program(8, 8)[0] == rule.program(8, 8)[0]


def test_rules_without_tensors_are_equal_by_value():
    assert Causal() & Chunked(4) == Causal() & Chunked(4) and hash(Chunked(4)) == hash(Chunked(4))
    assert Causal() != Causal("top_left") and Chunked(4) != FirstKeys(4)


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(6, 10), (700, 1300)])
def test_pictures(seqlen_q, seqlen_k):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    rule = Causal() & SlidingWindow(seqlen_q // 2, 0)
    ax = rule.plot(seqlen_q, seqlen_k)
    picture = torch.tensor(ax.images[0].get_array())
    cell = -(-seqlen_k // 512)
    assert picture.shape == (-(-seqlen_q // cell), -(-seqlen_k // cell))
    dense = rule.dense(1, 1, seqlen_q, seqlen_k)[0, 0].float()
    assert picture[1, 2] == pytest.approx(dense[cell : 2 * cell, 2 * cell : 3 * cell].mean().item())
    assert picture[-1, -1] == pytest.approx(dense[(len(picture) - 1) * cell :, (picture.shape[1] - 1) * cell :].mean().item())
    assert ax.get_title() == repr(rule) and ax.get_xlabel() == "key j"
    matplotlib.pyplot.close("all")


# ------------------------------------------------------------------------------------------------------- documents, torch.compile


def test_the_page_of_matrices():
    page = pathlib.Path(__file__).parent.parent / "docs" / "conventions.md"
    found = doctest.testfile(str(page), module_relative=False)
    assert found.attempted > 50 and not found.failed


def test_rules_inside_a_full_graph_serve_every_length_with_one_compilation():
    ids, spans = torch.randint(0, 3, (1, 32)), torch.tensor([[[1, 9]]])

    def visible(x):
        rule = Causal() & Document(ids[:, : x.shape[0]] + 1) | PrefixLM(spans=spans) & Custom(lambda b, h, q, k: ids[0, k] > 0)
        low = lower(rule, batch=1, heads=1, seqlen_q=x.shape[0], seqlen_k=x.shape[0], device=x.device)
        return apply_program(x, low.program_text, low.captured)

    counter = CompileCounter()
    compiled = torch.compile(visible, fullgraph=True, dynamic=True, backend=counter)
    for length in (12, 20, 32):
        x = torch.zeros(length)
        assert torch.equal(compiled(x), visible(x)) and visible(x).any()
    assert counter.frame_count == 1


@torch.library.custom_op("tilewise_test::apply_program", mutates_args=())
def apply_program(x: torch.Tensor, text: str, captured: list[torch.Tensor]) -> torch.Tensor:
    return Program.parse(text).evaluate(environment(1, 1, len(x), len(x)), captured).float().view(len(x), len(x))


@apply_program.register_fake
def _(x, text, captured):
    return x.new_empty(x.shape[0], x.shape[0])


def test_negation_within_a_compiled_function() -> None:
    """torch.compile traces no `~` of objects, so a rule's negation is written without."""
    x = torch.randn(1, 9, 2, 8)
    later, negated = ~masks.Causal(), masks.Custom(lambda b, h, i, j: torch.logical_not(i >= j))
    for rule in (later, later & masks.Chunked(4), negated):
        compiled = torch.compile(lambda q, rule=rule: attention(q, q, q, mask=rule), fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x), attention(x, x, x, mask=later & rule))
    function = masks.Custom(lambda b, h, i, j: ~(i >= j))
    torch.testing.assert_close(attention(x, x, x, mask=function), attention(x, x, x, mask=later))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="invert"):
        torch.compile(lambda q: attention(q, q, q, mask=function), fullgraph=True, backend="eager")(x)
