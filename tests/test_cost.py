"""`cost.py` against counts made the slow way."""

import itertools

import pytest

from tilewise import cost
from tilewise.cost import Problem


def count_pairs(len_q: int, len_k: int, left: int, right: int) -> int:
    """Visible pairs, one by one."""
    visible = 0
    for i in range(len_q):
        position = i + len_k - len_q
        for j in range(len_k):
            visible += (left < 0 or j >= position - left) and (right < 0 or j <= position + right)
    return visible


@pytest.mark.parametrize("len_q,len_k", [(0, 3), (3, 0), (1, 1), (1, 7), (7, 1), (5, 5), (5, 9), (9, 5)])
def test_visible_pairs_equal_the_enumeration(len_q, len_k):
    for left, right in itertools.product((-1, 0, 1, 3, 20), repeat=2):
        problem = Problem(1, 1, len_q, 8, seqlen_k=len_k, window_left=left, window_right=right)
        assert cost.visible_pairs(problem) == count_pairs(len_q, len_k, left, right), (left, right)


def test_flops_are_the_fields_formula():
    full = Problem(batch=2, heads=16, seqlen_q=4096, head_dim=128)
    assert cost.flops(full) == 4 * 2 * 16 * 4096**2 * 128
    assert cost.flops(full, "bwd") * 2 == cost.flops(full) * 5
    assert cost.flops(full, "fwd+bwd") == cost.flops(full) + cost.flops(full, "bwd")
    causal = Problem(batch=2, heads=16, seqlen_q=4096, head_dim=128, window_right=0)
    assert cost.flops(causal) / cost.flops(full) == pytest.approx(0.5, rel=1 / 4096)


def test_flops_of_unequal_head_dims_count_each_product():
    problem = Problem(batch=1, heads=1, seqlen_q=2, head_dim=192, head_dim_v=128)
    assert cost.flops(problem) == 2 * 4 * (192 + 128)
    assert cost.flops(problem, "bwd") == 2 * 4 * (3 * 192 + 2 * 128)


def test_bytes_are_inputs_and_outputs_once():
    problem = Problem(batch=1, heads=4, seqlen_q=10, head_dim=8, kv_heads=2, seqlen_k=20, head_dim_v=6, bias_elements=200)
    q, k, v, out = 4 * 10 * 8 * 2, 2 * 20 * 8 * 2, 2 * 20 * 6 * 2, 4 * 10 * 6 * 2
    assert cost.least_bytes(problem) == q + k + v + out + 4 * 10 * 4 + 400
    assert cost.least_bytes(problem, "bwd") == 2 * (q + k + v + out) + 4 * 10 * 4 + 800
    assert cost.output_bytes(problem) == out
    assert cost.output_bytes(problem, "bwd") == q + k + v + 400


def test_extra_memory_is_linear_and_unfused_memory_is_quadratic():
    for pass_ in ("fwd", "bwd"):
        short, long = (Problem(batch=1, heads=8, seqlen_q=n, head_dim=64) for n in (1024, 4096))
        assert cost.extra_bytes(long, pass_) == 4 * cost.extra_bytes(short, pass_)
        assert cost.unfused_bytes(long, pass_) == 16 * cost.unfused_bytes(short, pass_)
    float32 = Problem(batch=1, heads=8, seqlen_q=32768, head_dim=64, itemsize=4)
    assert cost.unfused_bytes(float32) / 2 == pytest.approx(34e9, rel=0.02)


def test_roofline_names_what_binds():
    h200 = cost.device_named("NVIDIA H200")
    assert h200 is not None
    long = cost.roofline(Problem(batch=1, heads=16, seqlen_q=16384, head_dim=128), h200, "bfloat16")
    assert long.bound == "matrix products"
    assert long.seconds == pytest.approx(4 * 16 * 16384**2 * 128 / 783e12)
    decode = cost.roofline(Problem(batch=16, heads=64, seqlen_q=1, head_dim=128, kv_heads=8, seqlen_k=8192), h200, "bfloat16")
    assert decode.bound == "memory"
    narrow = cost.roofline(Problem(batch=1, heads=16, seqlen_q=16384, head_dim=16), h200, "bfloat16")
    assert narrow.bound == "exponentials"
    assert cost.device_named("a device nobody knows") is None


def test_unknown_passes_are_refused_in_words():
    with pytest.raises(ValueError, match=r"fwd, bwd, fwd\+bwd, got 'forward'"):
        cost.flops(Problem(1, 1, 1, 1), "forward")
