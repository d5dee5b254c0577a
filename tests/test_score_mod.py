"""Traced score and mask functions against the functions themselves, their derivative against autograd, and what is refused."""

import math
import pickle
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention

from tilewise import UnsupportedAttention, evaluation
from tilewise.operations import SUPPORTED
from tilewise.score_mod import Program, trace_mask_mod, trace_score_mod

B, H, SQ, SK = 2, 4, 6, 8
pytestmark = pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")


@pytest.fixture(autouse=True)
def double_precision():
    """What a function makes of integers alone (h / 4, say) is then as exact in torch as in a program on a float64 tile."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def indices():
    rows = torch.arange(SQ).view(1, 1, -1, 1)
    return {
        "b": torch.arange(B).view(-1, 1, 1, 1),
        "h": torch.arange(H).view(1, -1, 1, 1),
        "q_idx": rows,
        "kv_idx": torch.arange(SK).view(1, 1, 1, -1),
        "p": rows + SK - SQ,
    }


def everywhere(function, *score):
    """The function applied to every (b, h, q_idx, kv_idx), each a scalar to it."""
    axes = torch.broadcast_tensors(*(indices()[name] for name in ("b", "h", "q_idx", "kv_idx")))
    flat = [x.reshape(-1) for x in (*score, *axes)]
    return torch.vmap(lambda *x: torch.as_tensor(function(*x)))(*flat).reshape(axes[0].shape)


def param(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def scores():
    return torch.randn(B, H, SQ, SK, dtype=torch.float64)


TABLE, SLOPES, GATES, BIAS, POINT = param(H, SQ + SK), param(H, seed=1), param(B, H, seed=2), param(B, H, SQ, SK, seed=3), param(seed=4)
WRAPPED = param(SQ + SK, seed=5)
DOCS = torch.tensor([[0, 0, 1, 1, 2, 2, 3, 3], [0, 1, 1, 1, 1, 1, 1, 2]])
KEEP = torch.rand(SQ, SK, generator=torch.Generator().manual_seed(6)) > 0.4


class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor([0.3, -0.5, 0.7, 1.0], dtype=torch.float64))

    def modify(self, score, b, h, q_idx, kv_idx):
        score += self.scale[h] * kv_idx
        return score


MODULE = Module()
PARAMETERS = (TABLE, SLOPES, GATES, BIAS, POINT, WRAPPED, MODULE.scale)
SCORE_FUNCTIONS = {
    "identity": lambda s, b, h, q, k: s,
    "alibi": lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs(),
    "alibi computed": lambda s, b, h, q, k: s + torch.exp2(-((h + 1) * 8.0 / H)) * (k - q),
    "alibi by power": lambda s, b, h, q, k: s + (2 ** (-8.0 * (h + 1) / H)) * (k - q) + 3.0 ** (q / 4) + 0.5**h,
    "relative position": lambda s, b, h, q, k: s + TABLE[h, q - k + SK - 1],
    "relative position, negative indices": lambda s, b, h, q, k: s + WRAPPED[q - k],
    "chained indexing": lambda s, b, h, q, k: s + BIAS[b][h][q][k] * BIAS[b, h][q, 0],
    "causal": lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")),
    "causal in mask's words": lambda s, b, h, q, k: s.masked_fill(~(q >= k), float("-inf")),
    "softcap": lambda s, b, h, q, k: 2.0 * torch.tanh(s / 2.0),
    "gate per head": lambda s, b, h, q, k: s * torch.sigmoid(GATES[b, h]) + POINT,
    "gate on one side": lambda s, b, h, q, k: torch.where(q - k < 3, POINT * s, SLOPES[h]),
    "table used twice": lambda s, b, h, q, k: SLOPES[h] * s + SLOPES[(h + 1) % H] * SLOPES[h].square(),
    "tensor on the left": lambda s, b, h, q, k: POINT - (POINT * s) / (POINT.detach() ** 2 + 1),
    "bound method": MODULE.modify,
    "elementary": lambda s, b, h, q, k: (
        torch.exp(s * 0.3) + torch.log(s.abs() + 1) + torch.sqrt(s * s + 1) + torch.rsqrt(s.square() + 2) + torch.sin(s) * s.cos()
    ),
    "more": lambda s, b, h, q, k: torch.exp2(s) - torch.log2(s * s + 0.5) + torch.erf(s) + 1 / (s * s + 1) + s**3 + (s.abs() + 1) ** 1.7,
    "powers": lambda s, b, h, q, k: s**2 + (s * s + 1) ** 0.5 + (s * s + 1) ** -0.5 + (s * s + 1) ** -1 + torch.pow(s, 4) + q**2,
    "extrema": lambda s, b, h, q, k: torch.minimum(s, SLOPES[h]) + torch.maximum(s, 0.3 * s) + torch.clamp(s, -0.5, 0.5) + s.relu(),
    "clamps": lambda s, b, h, q, k: s.clamp(min=-1) * s.clamp_max(0.7) + torch.clip(k - q, -2, 2) + torch.clamp(s, max=SLOPES[h]),
    "rounding": lambda s, b, h, q, k: (
        s * torch.floor(s * 3) + torch.ceil(s) + torch.div(s, 0.5, rounding_mode="floor") + s % 0.7 + torch.sign(s) * s
    ),
    "integers": lambda s, b, h, q, k: s * (((q + 3) // 2 - k % 3) ^ 5) + ((q << 1) & 6 | (k >> 1)) / 4 + torch.bitwise_not(q) + abs(k - q),
    "integers below zero": lambda s, b, h, q, k: s + (q - k) // 3 + (q - k) % 3 - torch.div(q - 2 * k, 3, rounding_mode="floor"),
    "casts": lambda s, b, h, q, k: (
        s.double() * q.to(torch.float64) + (s * 3).to(torch.int64) + (q > k).to(s.dtype) + (q > k).long() * k.type_as(s)
    ),
    "booleans": lambda s, b, h, q, k: torch.where(((q > 1) + (k > 2)) * (q != k) | (h == b) ^ (q <= k), s, 2 * s),
    "logical": lambda s, b, h, q, k: torch.where(torch.logical_and(q > 1, ~(k < 3)).logical_or(torch.logical_not(h)), s, -s),
    "documents": lambda s, b, h, q, k: torch.where(DOCS[b, q] == DOCS[b, k], s, s - 5),
    "constants like": lambda s, b, h, q, k: (
        torch.where(KEEP[q, k], s, torch.full_like(s, 0.5)) + torch.zeros_like(s) + s.new_tensor(2.0) + q.new_tensor(3)
    ),
    "constants of another kind": lambda s, b, h, q, k: (
        s * torch.full_like(q, 0.5, dtype=torch.float64)
        + torch.where(torch.ones_like(k, dtype=torch.bool) & (q >= k), k.new_full((), 0.25, dtype=torch.float64), s.new_zeros(()))
    ),
    "constant": lambda s, b, h, q, k: 1.5,
    "integer result": lambda s, b, h, q, k: q - k,
    "shared": lambda s, b, h, q, k: (lambda x: x * x + (x * x + 1).log())(torch.tanh(s) + SLOPES[h]),
    "distance to a power": lambda s, b, h, q, k: s - (POINT.abs() * (q - k)) ** 2 / torch.tensor(3.0, dtype=s.dtype, device=s.device),
}


@pytest.mark.parametrize("name", SCORE_FUNCTIONS)
def test_programs_compute_the_function_and_its_gradients(name):
    function, score = SCORE_FUNCTIONS[name], scores().requires_grad_()
    text, captured = trace_score_mod(function, "cpu")
    program = Program.parse(text)
    env = {"score": score.detach(), **indices()}
    values = [x.detach() for x in captured]

    expected = everywhere(function, score * 1).to(torch.float64)  # a function may change its score in place
    result = program.evaluate(env, values)
    assert result.shape == score.shape and result.dtype == torch.float64
    torch.testing.assert_close(result, expected.detach(), rtol=1e-12, atol=1e-12)

    grad = torch.where(result == -math.inf, 0.0, torch.randn_like(score))
    dscore, dcaptured = program.vjp(env, values, grad)
    assert all((found is None) == (not tensor.is_floating_point()) for tensor, found in zip(captured, dcaptured, strict=True))
    assert_same_gradients(score, expected, grad, dscore, captured, dcaptured)


@pytest.mark.parametrize("name", SCORE_FUNCTIONS)
def test_memory_that_is_used_again_changes_nothing(name, monkeypatch):
    monkeypatch.setattr(evaluation, "_LARGE", 0)
    text, captured = trace_score_mod(SCORE_FUNCTIONS[name], "cpu")
    program, values, memory = Program.parse(text), [x.detach() for x in captured], evaluation.Memory()
    env, grad = {"score": scores(), **indices()}, torch.randn(B, H, SQ, SK, dtype=torch.float64)
    expected = program.evaluate(env, values), program.vjp(env, values, grad)
    for _ in range(2):
        torch.testing.assert_close(program.evaluate(env, values, memory), expected[0], rtol=0, atol=0)
        found = program.vjp(env, values, grad, memory=memory)
        torch.testing.assert_close(found[0], expected[1][0], rtol=0, atol=0)
        for one, other in zip(found[1], expected[1][1], strict=True):
            assert (one is None) == (other is None) and (one is None or torch.equal(one, other))
    made = len(memory.all)
    program.evaluate(env, values, memory)
    assert len(memory.all) == made


def assert_same_gradients(score, expected, grad, dscore, captured, dcaptured):
    """Against autograd through the function, down to the parameters: what a program captures may be computed from these."""
    leaves = [score, *PARAMETERS]
    connected = expected + sum(0 * x.sum() for x in leaves)
    wanted = torch.autograd.grad(connected, leaves, grad)
    ends = [(dscore * score).sum(), *((d * x).sum() for d, x in zip(dcaptured, captured, strict=True) if x.requires_grad)]
    found = torch.autograd.grad(sum(ends) + sum(0 * x.sum() for x in leaves), leaves)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9 * max(1.0, other.abs().max().item()))


@pytest.mark.parametrize("name", SCORE_FUNCTIONS)
def test_texts_are_stable(name):
    text, captured = trace_score_mod(SCORE_FUNCTIONS[name])
    again, same = trace_score_mod(SCORE_FUNCTIONS[name])
    assert text == again and len(captured) == len(same)
    assert Program.parse(text) is Program.parse(again)
    shifted, _ = trace_score_mod(SCORE_FUNCTIONS[name], first=3)
    moved = Program.parse(shifted)
    result = moved.evaluate({"score": (s := scores()), **indices()}, [None, None, None, *captured])
    torch.testing.assert_close(result, Program.parse(text).evaluate({"score": s, **indices()}, captured), equal_nan=True)
    totals = moved.vjp({"score": s, **indices()}, [None] * 3 + captured, torch.ones_like(s))[1]
    assert len(totals) == 3 + len(captured) and totals[:3] == [None] * 3


MASK_FUNCTIONS = {
    "causal": lambda b, h, q, k: q >= k,
    "window": lambda b, h, q, k: (q - k).abs() <= 2,
    "prefix": lambda b, h, q, k: (q >= k) | (k < 3),
    "document": lambda b, h, q, k: (DOCS[b, q] == DOCS[b, k]) & (k <= q),
    "neighbourhood": lambda b, h, q, k: ((q // 4 - k // 4).abs() <= 1) & ((q % 4 - k % 4).abs() <= 1),
    "spans of images in text": lambda b, h, q, k: (q >= k) | ((DOCS[b, q] == DOCS[b, k]) & (DOCS[b, q] > 0)),
    "per head": lambda b, h, q, k: (q - k) <= h,
    "tensor": lambda b, h, q, k: KEEP[q, k],
    "threshold": lambda b, h, q, k: SLOPES.detach()[h] * (q - k) > 0.25,
    "always": lambda b, h, q, k: True,
    "always, in torch's words": flex_attention.noop_mask,
    "torch's and": flex_attention.and_masks(lambda b, h, q, k: q >= k, lambda b, h, q, k: KEEP[q, k]),
    "torch's or": flex_attention.or_masks(lambda b, h, q, k: q > k, flex_attention.and_masks(lambda b, h, q, k: k < b)),
    "captured loop": lambda b, h, q, k: sum((k == 2 * n for n in range(3)), k > q) > 0,
}


@pytest.mark.parametrize("name", MASK_FUNCTIONS)
def test_masks_agree_with_the_function(name):
    text, captured = trace_mask_mod(MASK_FUNCTIONS[name], "cpu")
    visible = Program.parse(text).evaluate(indices(), captured)
    assert visible.dtype == torch.bool
    assert torch.equal(visible.expand(B, H, SQ, SK), everywhere(MASK_FUNCTIONS[name]))


def test_texts_read_as_what_they_compute():
    assert trace_score_mod(SCORE_FUNCTIONS["relative position"])[0] == "score + f0[h, ((q_idx - kv_idx) + 8) - 1]"
    assert trace_score_mod(SCORE_FUNCTIONS["causal"])[0] == "where(q_idx >= kv_idx, score, -inf)"
    assert trace_score_mod(SCORE_FUNCTIONS["shared"])[0] == "t0 = tanh(score) + f0[h]\nt1 = t0 * t0\nt1 + log(t1 + 1.0)"
    assert trace_mask_mod(MASK_FUNCTIONS["document"])[0] == "(i0[b, q_idx] == i0[b, kv_idx]) & (kv_idx <= q_idx)"
    both = flex_attention.and_masks(MASK_FUNCTIONS["causal"], flex_attention.or_masks(MASK_FUNCTIONS["window"]))
    assert trace_mask_mod(both)[0] == "(q_idx >= kv_idx) & (abs(q_idx - kv_idx) <= 2)"
    program = Program.parse("score * f0")
    assert pickle.loads(pickle.dumps(program)) == program


# random expressions over everything that has a derivative
_LEAVES = st.sampled_from(["s", "s", "SLOPES[h]", "TABLE[h, q + k]", "(q - k)", "0.7", "POINT"])
_EXPRESSIONS = st.recursive(
    _LEAVES,
    lambda x: st.one_of(
        st.builds("({} + {})".format, x, x),
        st.builds("({} - {})".format, x, x),
        st.builds("({} * {})".format, x, x),
        st.builds("({} / (2 + torch.cos(s + {})))".format, x, x),
        st.builds("torch.tanh(s * {})".format, x),
        st.builds("torch.where(q >= k, s + {}, {} * s)".format, x, x),
        st.builds("torch.minimum(s * {}, s + {})".format, x, x),
        st.builds("torch.log(1 + (s + {}) ** 2)".format, x),
        st.builds("torch.sigmoid(s + {})".format, x),
    ),
    max_leaves=8,
)


@settings(max_examples=80, deadline=None)
@given(_EXPRESSIONS)
def test_random_expressions(source):
    function = eval(f"lambda s, b, h, q, k: {source}", globals())
    score = scores().requires_grad_()
    text, captured = trace_score_mod(function)
    expected = everywhere(function, score).to(torch.float64)
    values = [x.detach() for x in captured]
    env = {"score": score.detach(), **indices()}
    torch.testing.assert_close(Program.parse(text).evaluate(env, values), expected.detach(), rtol=1e-10, atol=1e-10)
    grad = torch.randn_like(score)
    dscore, dcaptured = Program.parse(text).vjp(env, values, grad)
    assert_same_gradients(score, expected, grad, dscore, captured, dcaptured)


# ------------------------------------------------------------------------------------------------------------- hidden values


def test_a_gradient_of_zero_meets_no_inf_and_no_nan():
    """Where the gradient of the result is 0 (a hidden pair), neither the score's nor a table's gradient sees what these hold."""
    table = torch.tensor([1.0, math.nan, 0.0, math.inf], dtype=torch.float64)
    functions = [
        lambda s, b, h, q, k: s * table[h],
        lambda s, b, h, q, k: s / table[h],
        lambda s, b, h, q, k: torch.log(table[h]) + torch.sqrt(table[h] - 1) * torch.exp(s * 1e9),
        lambda s, b, h, q, k: torch.where(h == 0, s, torch.log(table[h] - 1) * s),
        lambda s, b, h, q, k: torch.tanh(s * table[h]) + torch.rsqrt(table[h]) + table[h] ** -1.5,
    ]
    score = scores()
    score[:, 1:] = math.nan
    grad = torch.zeros_like(score)
    grad[:, 0] = torch.randn(B, SQ, SK)
    for function in functions[:2] + functions[3:]:
        text, captured = trace_score_mod(function)
        dscore, (dtable,) = Program.parse(text).vjp({"score": score, **indices()}, captured, grad)
        assert dscore[:, 0].isfinite().all() and (dscore[:, 1:] == 0).all()
        assert dtable[0].isfinite() and (dtable[1:] == 0).all()
    text, captured = trace_score_mod(functions[2])
    dscore, (dtable,) = Program.parse(text).vjp({"score": score, **indices()}, captured, torch.zeros_like(grad))
    assert not dscore.any() and not dtable.any()


def test_selection_keeps_the_other_branch_out():
    """torch's own derivative of this function is NaN where the logarithm is not chosen: 0 / 0."""
    text, _ = trace_score_mod(lambda s, b, h, q, k: torch.where(s > 0, torch.log(s), s))
    score = torch.tensor([2.0, 0.0, -1.0], dtype=torch.float64).view(1, 1, 1, 3)
    assert Program.parse(text).vjp({"score": score, **indices()}, [], torch.ones_like(score))[0].tolist() == [[[[0.5, 1.0, 1.0]]]]


def test_an_index_outside_a_table_shows_and_has_no_gradient():
    table, flags = torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.bool)
    text, captured = trace_score_mod(lambda s, b, h, q, k: torch.where(flags[k], s, 0) + table[k - 1])
    env = {"score": torch.zeros(1, 1, 1, SK, dtype=torch.float64), **indices(), "q_idx": torch.zeros(1, 1, 1, 1, dtype=torch.int64)}
    assert Program.parse(text).evaluate(env, captured).isnan().view(-1).tolist() == [False] * 4 + [True] * 4
    dtable = Program.parse(text).vjp(env, captured, torch.ones_like(env["score"]))[1][1]
    assert dtable.tolist() == [1.0, 1.0, 2.0]  # kv_idx 0 reads the last one
    empty, none = trace_score_mod(lambda s, b, h, q, k: s + torch.ones(0, dtype=torch.float64)[k])
    assert Program.parse(empty).evaluate(env, none).isnan().all()
    assert Program.parse(empty).vjp(env, none, torch.ones_like(env["score"]))[1][0].shape == (0,)


def test_gradients_add_into_buffers_and_skip_what_nobody_needs():
    text, captured = trace_score_mod(lambda s, b, h, q, k: s * GATES[b, h] + SLOPES[h])
    env, grad = {"score": scores(), **indices()}, torch.randn(B, H, SQ, SK, dtype=torch.float64)
    fresh = Program.parse(text).vjp(env, captured, grad)[1]
    buffer = torch.ones(H, dtype=torch.float64)
    totals = Program.parse(text).vjp(env, captured, grad, into=[None, buffer])[1]
    assert totals[0] is None and totals[1] is buffer
    torch.testing.assert_close(buffer, fresh[1] + 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_arithmetic_is_that_of_the_accumulator(dtype):
    """Tables of any dtype are read into, and their gradients returned in, the dtype of the score tile."""
    torch.set_default_dtype(torch.float32)
    table = torch.randn(H).to(dtype)
    text, captured = trace_score_mod(lambda s, b, h, q, k: (s.to(torch.bfloat16) * table[h]).half() + k / 3)
    score = torch.randn(B, H, SQ, SK)
    env = {"score": score, **indices()}
    result = Program.parse(text).evaluate(env, captured)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, score * table.float().view(1, -1, 1, 1) + torch.arange(SK) / 3)
    assert Program.parse(text).vjp(env, captured, score)[1][0].dtype == torch.float32


# ------------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "function, message",
    [
        (lambda s, b, h, q, k: torch.cumsum(s, 0), "'cumsum' cannot be traced.*supported are.*tanh"),
        (lambda s, b, h, q, k: s.view(1), "'view' cannot be traced"),
        (lambda s, b, h, q, k: torch.nn.functional.softmax(s, 0), "'softmax' cannot be traced"),
        (lambda s, b, h, q, k: s.add_(1), "'add_' cannot be traced"),
        (lambda s, b, h, q, k: s.new_ones(1), "has size .., not 1"),
        (lambda s, b, h, q, k: s + q.new_zeros((2,)), "has size .., not .2,"),
        (lambda s, b, h, q, k: s + q.new_zeros(2, 3), "has size .., not .2, 3."),
        (lambda s, b, h, q, k: s if q > k else 0.0, "decides in Python.*torch.where"),
        (lambda s, b, h, q, k: s * (q > k and k > 1), "decides in Python"),
        (lambda s, b, h, q, k: max(s, 0), "torch.maximum"),
        (lambda s, b, h, q, k: s * math.sqrt(q), "into a Python number"),
        (lambda s, b, h, q, k: s * q.item(), "into a Python number"),
        (lambda s, b, h, q, k: sum(s for _ in range(q)), "into a Python number"),
        (lambda s, b, h, q, k: s + SLOPES, r"shape \(4,\) is used whole"),
        (lambda s, b, h, q, k: s + TABLE[h], "only 1 of its 2 dimensions indexed"),
        (lambda s, b, h, q, k: s + TABLE[h, q:k], "one integer for each dimension|into a Python number"),
        (lambda s, b, h, q, k: s + TABLE[..., h], "one integer for each dimension"),
        (lambda s, b, h, q, k: s + SLOPES[s], "indexed by integers, not by a float"),
        (lambda s, b, h, q, k: s + SLOPES[q > k], "indexed by integers, not by a bool"),
        (lambda s, b, h, q, k: s + torch.ones(2, dtype=torch.complex64)[h], "complex"),
        (lambda s, b, h, q, k: s & 1, "bitwise_and needs booleans or integers"),
        (lambda s, b, h, q, k: s**q, "constant exponent"),
        (lambda s, b, h, q, k: torch.div(s, 2, rounding_mode="trunc"), "rounding_mode='trunc'"),
        (lambda s, b, h, q, k: (s, s), "returned tuple"),
        (lambda s, b, h, q, k: None, "returned NoneType"),
        (lambda s, b, h, q, k: s + "1", "type str"),
    ],
)
def test_what_cannot_be_traced_is_refused_in_words(function, message):
    with pytest.raises(UnsupportedAttention, match=message):
        trace_score_mod(function)


def test_errors_of_the_function_itself_pass_through():
    with pytest.raises(IndexError, match=r"too many indices.*\(4,\)"):
        trace_score_mod(lambda s, b, h, q, k: s + SLOPES[h, q])
    with pytest.raises(ZeroDivisionError):
        trace_score_mod(lambda s, b, h, q, k: s + q // 0)
    with pytest.raises(TypeError):
        trace_score_mod(lambda s, b: s)
    with pytest.raises(ValueError, match=r"is on meta.* inputs are on cpu"):
        trace_score_mod(lambda s, b, h, q, k: s + torch.ones(4, device="meta")[h], "cpu")


@pytest.mark.parametrize(
    "text", ["", "score +", "__import__('os')", "x", "score.sum()", "t0 = score", "score < 1 < 2", "open(score)", "[score]"]
)
def test_only_programs_are_parsed(text):
    with pytest.raises(ValueError, match="not the text of a traced program"):
        Program.parse(text)


def test_every_supported_name_is_pytorchs():
    for name in SUPPORTED:
        assert hasattr(torch, name) or hasattr(torch.Tensor, name), name


# --------------------------------------------------------------------------------------------------- torch.compile, cost, import


@torch.library.custom_op("tilewise_test::apply_score_mod", mutates_args=())
def apply_score_mod(score: torch.Tensor, text: str, captured: list[torch.Tensor]) -> torch.Tensor:
    return Program.parse(text).evaluate({"score": score, **indices()}, captured).clone()


@apply_score_mod.register_fake
def _(score, text, captured):
    return torch.empty_like(score)


def _save(ctx, inputs, output):
    ctx.text = inputs[1]
    ctx.save_for_backward(inputs[0], *inputs[2])


@torch.library.custom_op("tilewise_test::apply_score_mod_backward", mutates_args=())
def apply_score_mod_backward(grad: torch.Tensor, score: torch.Tensor, text: str, captured: list[torch.Tensor]) -> list[torch.Tensor]:
    dscore, rest = Program.parse(text).vjp({"score": score, **indices()}, captured, grad)
    return [dscore.clone(), *rest]


@apply_score_mod_backward.register_fake
def _(grad, score, text, captured):
    return [torch.empty_like(score), *(torch.empty_like(x) for x in captured)]


def _backward(ctx, grad):
    score, *captured = ctx.saved_tensors
    dscore, *rest = apply_score_mod_backward(grad, score, ctx.text, captured)
    return dscore, None, rest


apply_score_mod.register_autograd(_backward, setup_context=_save)


@pytest.mark.parametrize("number", range(5))
def test_closures_over_graph_inputs_in_a_full_graph(number):
    """Inside torch.compile the text is a constant of the graph and the captured tensors are its values, with gradient."""

    def modified(score, table, slopes):
        gates = torch.sigmoid(slopes)
        function = (
            lambda s, b, h, q, k: s + table[h, q - k],
            lambda s, b, h, q, k: torch.where(q >= k, s * gates[h], table[h][k] + s.tanh()),
            lambda s, b, h, q, k: gates[h] * s + table[0, k] / 2,
            lambda s, b, h, q, k: table[h, q + 1].exp() - gates.sum() * s,
            lambda s, b, h, q, k: s + table[h, q - k + score.shape[2]] / score.shape[3],
        )[number]
        text, captured = trace_score_mod(function, score.device)
        return apply_score_mod(score, text, captured)

    inputs = [x.detach().requires_grad_() for x in (scores(), TABLE, SLOPES)]
    results = []
    for run in (modified, torch.compile(modified, fullgraph=True, dynamic=True, backend="aot_eager")):
        out = run(*inputs)
        results.append([out.detach(), *torch.autograd.grad(out.sin().sum(), inputs, allow_unused=True)])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)


def test_tracing_takes_less_than_a_millisecond():
    function = SCORE_FUNCTIONS["relative position"]
    trace_score_mod(function)
    times = []
    for _ in range(50):
        start = time.perf_counter()
        trace_score_mod(function)
        times.append(time.perf_counter() - start)
    assert min(times) < 1e-3
