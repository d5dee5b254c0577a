"""The ladder: every rung equals float64 softmax, and the merge rule is associative, commutative and safe at its edges."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise import softmax
from tilewise.softmax import State

scores = st.lists(st.one_of(st.floats(-1e4, 1e4), st.just(float("-inf"))), max_size=12)


@pytest.mark.parametrize("rung", [softmax.safe_three_pass, softmax.online_two_pass, lambda x: softmax.blocked(x, 3)])
@given(x=scores)
@settings(max_examples=50, deadline=None)
def test_rung_equals_softmax(rung, x):
    x = torch.tensor(x, dtype=torch.float64)
    got = rung(x)
    empty = x.numel() == 0 or bool((x == float("-inf")).all())
    want = torch.zeros_like(x) if empty else torch.softmax(x, 0)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-300)


def test_naive_equals_softmax_where_it_can():
    x = torch.randn(50, dtype=torch.float64)
    torch.testing.assert_close(softmax.naive(x), torch.softmax(x, 0))


@given(parts=st.lists(scores, min_size=2, max_size=5), order=st.randoms())
@settings(max_examples=100, deadline=None)
def test_merge_is_associative_and_ignores_order(parts, order):
    whole = State.of(torch.tensor(list(itertools.chain(*parts)), dtype=torch.float64))
    states = [State.of(torch.tensor(part, dtype=torch.float64)) for part in parts]
    order.shuffle(states)
    while len(states) > 1:  # merge random neighbours: any grouping
        at = order.randrange(len(states) - 1)
        states[at : at + 2] = [states[at].merge(states[at + 1])]
    assert states[0].m == whole.m
    torch.testing.assert_close(states[0].l, whole.l, rtol=1e-12, atol=0.0)


def test_empty_and_masked_blocks_are_the_identity():
    block = State.of(torch.tensor([0.5, -2.0]))
    for nothing in (State.of(torch.empty(0)), State.of(torch.full((3,), float("-inf")))):
        assert nothing == (float("-inf"), 0.0)
        assert nothing.merge(block) == block == block.merge(nothing)
        assert nothing.merge(nothing) == nothing


@pytest.mark.parametrize(("integer", "fits"), [(11, True), (12, False)])
def test_first_integer_whose_exponential_overflows_float16(integer, fits):
    x = torch.tensor([float(integer), 0.0], dtype=torch.float16)
    assert bool(softmax.naive(x).isfinite().all()) is fits
    assert softmax.safe_three_pass(x).isfinite().all() and softmax.online_two_pass(x).isfinite().all()


def test_large_scores_that_the_formula_cannot_take():
    x = torch.tensor([1000.0, 1000.0])
    assert softmax.naive(x).isnan().all()
    assert softmax.online_two_pass(x).tolist() == [0.5, 0.5]
