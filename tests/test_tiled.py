"""The tiled path from the inside: which tiles it visits, what it may read on a device, how much memory it takes, its numerics.

That it computes the right thing for every feature is the business of test_features.py.
"""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tilewise import attention
from tilewise.kernels import chunks, philox, tiled
from tilewise.plan import Cotangents, Gradients, Operands, Outputs, Rules, Saved

from .comparing import compare

SMALL = chunks.TileSizes(block_m=8, block_n=16, scores=512)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "CPU_TILES", SMALL)


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the host must not look at values."""
    monkeypatch.setattr(chunks, "host_reads", lambda device: False)
    monkeypatch.setattr(tiled, "host_reads", lambda device: False)
    monkeypatch.setattr(philox, "_on_host", lambda seed: False)


def operands(batch: int, heads: int, kv_heads: int, seqlen_q: int, seqlen_k: int, dim: int, dtype=torch.float64, **more: Any) -> Operands:
    shapes = (batch, heads, seqlen_q, dim), (batch, kv_heads, seqlen_k, dim), (batch, kv_heads, seqlen_k, dim)
    return Operands(*(torch.randn(shape, dtype=dtype) for shape in shapes), **more)


def run(t: Operands, r: Rules, needs: str = "qkv") -> tuple[Outputs, Gradients]:
    """Forward and backward with every buffer holding NaN beforehand."""
    batch, heads, seqlen_q, _ = t.q.shape
    wide = torch.float64 if t.q.dtype == torch.float64 else torch.float32

    def nan(*shape: int, dtype: torch.dtype = wide) -> Tensor:
        return torch.full(shape, math.nan, dtype=dtype)

    out = Outputs(nan(batch, heads, seqlen_q, t.v.shape[3], dtype=t.q.dtype), nan(batch, heads, seqlen_q))
    tiled.forward(t, r, out)
    grads = Gradients(**{f"d{name}": nan(*getattr(t, name).shape, dtype=t.q.dtype) for name in needs})
    if t.bias is not None:
        grads.dbias = nan(*t.bias.shape)
    torch.manual_seed(1)
    dout = torch.randn(out.out.shape, dtype=t.q.dtype)
    tiled.backward(t, r, Saved(out.out, out.lse), Cotangents(dout), grads)
    return out, grads


# ------------------------------------------------------------------------------------------------------------ derivatives


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"window_size": (2, 1), "softcap": 1.5},
        {"dropout_p": 0.4, "dropout_seed": 3, "bias": (2, 1, 5, 7)},
        {"alibi_slopes": (2,), "learnable_sink": (2,), "causal": True, "bias": (2, 1, 1)},
        {"alibi_slopes": (2, 2), "softcap": 2.0, "bias": (5, 1)},
    ],
    ids=lambda options: "-".join(options),
)
def test_gradcheck(options: dict[str, Any], kv_heads: int, small_tiles: None) -> None:
    """Every differentiable output with respect to every differentiable input, by finite differences in float64."""
    tensors = {
        "q": torch.randn(2, 5, 2, 3, dtype=torch.float64),
        "k": torch.randn(2, 7, kv_heads, 3, dtype=torch.float64),
        "v": torch.randn(2, 7, kv_heads, 2, dtype=torch.float64),
    }
    fixed = {}
    for name, value in options.items():
        if name in ("bias", "alibi_slopes", "learnable_sink"):
            tensors[name] = torch.rand(value, dtype=torch.float64)
        else:
            fixed[name] = value

    def call(*given: Tensor) -> tuple[Tensor, ...]:
        named = dict(zip(tensors, given, strict=True))
        out, aux = attention(**named, **fixed, backend="tiled", return_aux=("lse", "key_mass", "entropy"))
        seen = torch.isfinite(aux.lse)  # with more queries than keys some rows are empty
        return out, torch.where(seen, aux.lse, 0.0), aux.key_mass, aux.entropy

    torch.autograd.gradcheck(call, [x.requires_grad_() for x in tensors.values()], fast_mode=False)


def test_gradients_that_are_not_needed_change_nothing(small_tiles: None) -> None:
    t = operands(1, 4, 2, 19, 33, 4, bias=torch.randn(1, 1, 19, 33, dtype=torch.float64))
    r = Rules(0.5, softcap=3.0, window_right=0)
    _, every = run(t, r)
    for needs in ("", "q", "k", "v", "qk", "qv", "kv"):
        _, some = run(t, r, needs)
        for name in needs:
            assert torch.equal(getattr(some, f"d{name}"), getattr(every, f"d{name}"))
        assert torch.equal(some.dbias, every.dbias)


def test_the_same_bits_on_every_run() -> None:
    t = operands(2, 4, 2, 130, 257, 16, dtype=torch.float32, bias=torch.randn(1, 4, 1, 257))
    r = Rules(0.25, dropout_p=0.2)
    t.dropout_seed = torch.tensor(8)
    first = run(t, r)
    for _ in range(3):
        again = run(t, r)
        assert torch.equal(again[0].out, first[0].out)
        for name in ("dq", "dk", "dv", "dbias"):
            assert torch.equal(getattr(again[1], name), getattr(first[1], name))


@pytest.mark.parametrize(
    "shape", [(0, 2, 1, 4, 5, 3), (2, 0, 1, 4, 5, 3), (2, 2, 1, 0, 5, 3), (2, 2, 1, 4, 0, 3), (2, 2, 1, 4, 5, 0)], ids=str
)
def test_every_buffer_is_written_when_a_size_is_zero(shape: tuple[int, ...]) -> None:
    t = operands(*shape)
    out, grads = run(t, Rules(1.0))
    assert not out.out.isnan().any() and not out.lse.isnan().any()
    for grad in (grads.dq, grads.dk, grads.dv):
        assert not grad.isnan().any()
    if shape[-1] == 0 or shape[4] == 0:
        return
    if 0 in shape:
        assert not grads.dk.any() and not grads.dv.any()


def test_no_scores_at_all_give_the_mean_of_v() -> None:
    """Head dim 0: every score is 0."""
    t = Operands(torch.empty(1, 1, 4, 0), torch.empty(1, 1, 8, 0), torch.randn(1, 1, 8, 5))
    out = Outputs(torch.empty(1, 1, 4, 5), torch.empty(1, 1, 4))
    tiled.forward(t, Rules(1.0), out)
    torch.testing.assert_close(out.out, t.v.mean(2, keepdim=True).expand(1, 1, 4, 5))
    torch.testing.assert_close(out.lse, torch.full((1, 1, 4), math.log(8)))


# ------------------------------------------------------------------------------------------------------------ visited tiles


def visited(t: Operands, r: Rules) -> tuple[Tensor, int]:
    """How often each (b, h, i, j) is computed and visible, and how many scores are computed in all."""
    seen = torch.zeros(*t.q.shape[:3], t.k.shape[2], dtype=torch.int64)
    computed = 0
    for c in chunks.chunks(t, r, SMALL):
        for i in chunks.query_tiles(c):
            for j, hidden in chunks.key_tiles(c, i):
                assert i.listed is None and j.one_run is not None
                tile = seen[c.b, c.heads, i.runs[0], j.one_run]
                tile += 1 if hidden is None else (~hidden).long()
                computed += tile.numel()
    return seen, computed


@pytest.mark.parametrize("seed", range(30))
def test_each_visible_score_is_visited_once(seed: int) -> None:
    """For random lengths, windows and masks, with and without reading values on the host."""
    draw = random.Random(seed)
    size_q, size_k = draw.choice([1, 7, 40]), draw.choice([1, 16, 50])
    left, right = draw.choice([-1, 0, 3, 20]), draw.choice([-1, 0, 5])
    t = operands(3, 4, draw.choice([1, 2, 4]), size_q, size_k, 2)
    if draw.random() < 0.5:
        t.seqused_q = torch.tensor([draw.randint(0, size_q) for _ in range(3)], dtype=torch.int32)
    if draw.random() < 0.5:
        t.seqused_k = torch.tensor([draw.randint(0, size_k) for _ in range(3)], dtype=torch.int32)
    if draw.random() < 0.5:
        t.mask = torch.rand(draw.choice([1, 3]), draw.choice([1, 4]), size_q, size_k) < draw.choice([0.02, 0.5])

    len_q = torch.full((3,), size_q) if t.seqused_q is None else t.seqused_q
    len_k = torch.full((3,), size_k) if t.seqused_k is None else t.seqused_k
    i, j = torch.arange(size_q).view(-1, 1), torch.arange(size_k)
    len_q, len_k = len_q.view(-1, 1, 1, 1), len_k.view(-1, 1, 1, 1)
    p = i + len_k - len_q
    expected = (i < len_q) & (j < len_k)
    if left >= 0:
        expected = expected & (j >= p - left)
    if right >= 0:
        expected = expected & (j <= p + right)
    if t.mask is not None:
        expected = expected & t.mask
    expected = expected.expand(3, 4, size_q, size_k).long()

    rules = Rules(1.0, window_left=left, window_right=right)
    assert torch.equal(visited(t, rules)[0], expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "host_reads", lambda device: False)
        assert torch.equal(visited(t, rules)[0], expected)


def test_hidden_tiles_are_skipped() -> None:
    t = operands(1, 1, 1, 512, 512, 2)
    everything = 512 * 512
    assert visited(t, Rules(1.0))[1] == everything
    assert visited(t, Rules(1.0, window_right=0))[1] < 0.53 * everything
    assert visited(t, Rules(1.0, window_left=16, window_right=0))[1] < 0.07 * everything
    blocks = torch.arange(512) // 64
    t.mask = (blocks[:, None] == blocks)[None, None]
    assert visited(t, Rules(1.0))[1] == everything / 8
    t.mask, t.seqused_k = None, torch.tensor([32], dtype=torch.int32)
    assert visited(t, Rules(1.0))[1] == 512 * 32


class Watch(TorchDispatchMode):
    """Sees every operation: refuses to hand values to the host, and notes the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.read = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.read |= func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.is_nonzero.default)
        result = func(*args, **(kwargs or {}))
        self.largest = max([self.largest, *(x.untyped_storage().nbytes() for x in tree_leaves(result) if isinstance(x, Tensor))])
        return result


FEATURES: dict[str, dict[str, Any]] = {
    "lengths": {"seqused_q": torch.tensor([21, 40], dtype=torch.int32), "seqused_k": torch.tensor([33, 0], dtype=torch.int32)},
    "keys-causal": {"seqused_k": torch.tensor([33, 17], dtype=torch.int32), "causal": True},
    "queries-window": {"seqused_q": torch.tensor([21, 3], dtype=torch.int32), "window_size": (6, 2)},
    "mask": {"mask": torch.rand(2, 4, 40, 50, generator=torch.Generator().manual_seed(0)) < 0.3},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 5, "causal": True},
}


@pytest.mark.parametrize("sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("feature", FEATURES)
def test_as_on_a_device_whose_values_the_host_does_not_read(feature: str, sink: bool, unread: None, small_tiles: None) -> None:
    """The same answers when nothing is decided by looking at values."""
    options = dict(FEATURES[feature])
    q, k, v = (torch.randn(2, n, h, 6, dtype=torch.float64) for n, h in ((40, 4), (50, 2), (50, 2)))
    if sink:
        options["learnable_sink"] = torch.randn(4, dtype=torch.float64)
    options |= {"alibi_slopes": torch.rand(2, 4, dtype=torch.float64), "bias": torch.randn(4, 1, 50, dtype=torch.float64)}
    compare({"q": q, "k": k, "v": v, **options}, "tiled")


@pytest.mark.parametrize("feature", ["lengths", "mask", "dropout"])
def test_nothing_is_read_on_a_device(feature: str, unread: None, small_tiles: None) -> None:
    given = FEATURES[feature]
    t = operands(2, 4, 2, 40, 50, 6, bias=torch.randn(1, 4, 1, 50, dtype=torch.float64), sink=torch.zeros(4, dtype=torch.float64))
    t.seqused_q, t.seqused_k, t.mask = given.get("seqused_q"), given.get("seqused_k"), given.get("mask")
    t.dropout_seed = torch.tensor(5)
    with Watch() as watch:
        run(t, Rules(1.0, softcap=2.0, window_right=0, dropout_p=given.get("dropout_p", 0.0)))
    assert not watch.read


@pytest.mark.unpoisoned
@pytest.mark.parametrize("rules", [{}, {"window_right": 0}, {"softcap": 5.0}, {"dropout_p": 0.1}], ids=str)
def test_no_tensor_grows_with_the_square_of_the_length(rules: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "CPU_TILES", chunks.TileSizes(block_m=64, block_n=64, scores=1 << 14))
    seqlen, heads, dim = 1024, 2, 8
    t = operands(1, heads, heads, seqlen, seqlen, dim, dtype=torch.float32, alibi_slopes=torch.rand(1, heads))
    t.dropout_seed = torch.tensor(5)
    with Watch() as watch:
        run(t, Rules(1.0, **rules))
    largest_tile, largest_input = 8 * (1 << 14), 4 * heads * seqlen * dim
    assert watch.largest <= max(largest_tile, largest_input) < seqlen * seqlen / 4


# ------------------------------------------------------------------------------------------------------------ numerics


def test_a_key_hidden_from_one_head_of_a_group_does_not_reach_that_head(small_tiles: None) -> None:
    """Two query heads read one key head; a key that only the first may see holds NaN."""
    t = operands(1, 2, 1, 20, 40, 4)
    t.mask = torch.ones(1, 2, 20, 40, dtype=torch.bool)
    t.mask[0, 1, :, 21] = False
    t.k[0, 0, 21], t.v[0, 0, 21] = math.nan, math.nan
    out, grads = run(t, Rules(0.5))
    assert out.out[0, 0].isnan().all()
    assert out.out[0, 1].isfinite().all() and out.lse[0, 1].isfinite().all() and grads.dq[0, 1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hide_selects(dtype: torch.dtype) -> None:
    values = [1.5, -2.0, 0.0, math.inf, -math.inf, math.nan, 1e-40]
    s = torch.tensor([values, values], dtype=dtype).view(1, 1, 2, -1)
    tiled.hide(s, torch.tensor([True, False]).view(1, 1, 2, 1))
    assert torch.equal(s[0, 0, 0], torch.full((len(values),), -math.inf, dtype=dtype))
    torch.testing.assert_close(s[0, 0, 1], torch.tensor(values, dtype=dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_probabilities_have_no_denormals_and_keep_nan(dtype: torch.dtype) -> None:
    s = torch.tensor([0.0, -1.0, -69.0, -71.0, -95.0, -1000.0, -math.inf, math.nan], dtype=dtype)
    expected = s.exp()
    p = tiled.probabilities(s.clone())
    torch.testing.assert_close(p[:3], expected[:3])
    assert not p[3:7].any()
    assert p[7].isnan()


def test_finite_scores_are_never_masked_however_low() -> None:
    """Two keys at -1e30 and one at -3e30: the first two share the row."""
    bias = torch.tensor([-1e30, -3e30, -1e30]).view(1, 1, 1, 3)
    t = Operands(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 3, 4), torch.randn(1, 1, 3, 4), bias=bias)
    out, _ = run(t, Rules(1.0))
    torch.testing.assert_close(out.out[0, 0, 0], (t.v[0, 0, 0] + t.v[0, 0, 2]) / 2)
    torch.testing.assert_close(out.lse, torch.full((1, 1, 2), -1e30))


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 2.0},
        {"bias": (2, 4, 70, 90)},
        {"bias": (4, 1, 90), "softmax_scale": 0.3, "causal": True},
        {"bias": (1, 70, 90), "softcap": 3.0, "learnable_sink": (4,)},
        {"softmax_scale": -0.3, "window_size": (20, 3), "alibi_slopes": (4,)},
        {"softmax_scale": 0.0, "dropout_p": 0.3, "dropout_seed": 5},
    ],
    ids=lambda options: "-".join(options),
)
def test_bfloat16_is_as_exact_as_unfused_attention(options: dict[str, Any], small_tiles: None) -> None:
    tensors = {"bias": torch.bfloat16, "alibi_slopes": torch.float32, "learnable_sink": torch.float32}
    arguments = {name: torch.rand(value).to(tensors[name]) if name in tensors else value for name, value in options.items()}
    q, k, v = (torch.randn(2, n, h, 16).bfloat16() for n, h in ((70, 4), (90, 2), (90, 2)))
    compare({"q": q, "k": k, "v": v, **arguments}, "tiled")


@pytest.mark.parametrize("held", [1.0, 1e30, math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_a_bias_hides_is_selected_away_where_it_must_be(dtype: torch.dtype, held: float, small_tiles: None) -> None:
    """Keys 20 to 39 are hidden from everyone by a bias of -inf, and whatever they hold, nothing moves."""
    bias = torch.randn(1, 2, 30, 40, dtype=dtype)
    bias[..., 20:] = -math.inf
    t = operands(1, 2, 1, 30, 40, 8, dtype=dtype, bias=bias)
    whole = run(t, Rules(0.25))
    t.k[:, :, 20:], t.v[:, :, 20:] = held, held
    assert chunks.tame(t, Rules(0.25)) == (held == 1.0)
    changed = run(t, Rules(0.25))
    for name in ("out", "lse"):
        assert torch.equal(getattr(changed[0], name), getattr(whole[0], name))
    for name in ("dq", "dk", "dv", "dbias"):
        assert torch.equal(getattr(changed[1], name), getattr(whole[1], name))
    assert not changed[1].dk[:, :, 20:].any() and not changed[1].dbias[..., 20:].any()


def test_a_score_function_does_not_bring_back_what_a_bias_hides(small_tiles: None) -> None:
    bias = torch.zeros(30, 40, dtype=torch.float64).masked_fill(torch.rand(30, 40) < 0.5, -math.inf)
    q, k, v = (torch.randn(1, n, 2, 8, dtype=torch.float64) for n in (30, 40, 40))
    compare({"q": q, "k": k, "v": v, "bias": bias, "score_mod": lambda s, b, h, i, j: 2.0 * torch.tanh(s / 2.0)}, "tiled")


def test_a_bias_skips_tiles_that_it_hides() -> None:
    t = operands(
        1, 1, 1, 64, 64, 2, bias=torch.zeros(1, 1, 64, 64, dtype=torch.float64).masked_fill(~torch.ones(64, 64).tril().bool(), -math.inf)
    )
    computed = [
        sum(
            i.rows * j.width
            for c in chunks.chunks(t, Rules(1.0), SMALL, tame=tame)
            for i in chunks.query_tiles(c)
            for j, _ in chunks.key_tiles(c, i)
        )
        for tame in (False, True)
    ]
    assert computed[0] == computed[1] < 0.7 * 64 * 64


def test_pieces_cover_a_range_in_equal_parts() -> None:
    for start, length, size in itertools.product((0, 5), (0, 1, 7, 16, 33), (1, 4, 16, 100)):
        parts = list(chunks.pieces(start, start + length, size))
        assert [x for part in parts for x in range(part.start, part.stop)] == list(range(start, start + length))
        lengths = [part.stop - part.start for part in parts]
        assert len(parts) == math.ceil(length / size) and (not parts or max(lengths) - min(lengths) <= 1)


def test_aux_of_rows_whose_lse_has_lost_its_logarithm() -> None:
    """-1e9 + ln 5 is -1e9 in float32, and the probabilities still sum to 1."""
    bias = torch.tensor([-1e9, 0.0, torch.finfo(torch.float32).min]).view(1, 1, 3, 1)
    q, k = torch.randn(1, 3, 2, 8), torch.randn(1, 5, 2, 8)
    _, aux = attention(q, k, k, bias=bias, backend="tiled", return_aux=("key_mass", "entropy"))
    torch.testing.assert_close(aux.key_mass.sum(-1), torch.full((1, 2), 3.0))
    torch.testing.assert_close(aux.entropy[..., 2], torch.full((1, 2), math.log(5)))


@pytest.mark.parametrize("order", [1, 2])
def test_the_gradient_of_an_entropy_beside_very_low_biases(order: int) -> None:
    """Its factor ln p is about -3e38 where p is 0: times a gradient above 1 that is -inf, and 0 times -inf NaN."""
    bias = torch.where(torch.arange(6) % 2 == 0, torch.finfo(torch.float32).min, 0.0)
    q, k = torch.randn(1, 2, 1, 8, requires_grad=True), torch.randn(1, 6, 1, 8)
    results = []
    for keys, chosen in ((k, bias), (k[:, 1::2], None)):
        _, aux = attention(q, keys, keys, bias=chosen, backend="tiled", return_aux="entropy")
        (grad,) = torch.autograd.grad(3.0 * aux.entropy.sum(), q, create_graph=order == 2)
        results.append(grad if order == 1 else torch.autograd.grad(grad.square().sum(), q)[0])
    torch.testing.assert_close(*results)
