"""`attention_varlen` on the CPU: against the specification, the specification against single sequences, and what packing adds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import tilewise
from tilewise import UnsupportedAttention, attention, attention_varlen, cost, jagged, masks, ops, packing, reference, varlen
from tilewise.block_mask import BlockMask
from tilewise.kernels import chunks, tiled

from .packed import CASES, I32, SIZE, build, offsets
from .reports import report

EVERY_AUX = ("lse", "max_logits", "key_mass", "entropy")
NEG_INF = float("-inf")


@pytest.fixture(params=["host", "device"])
def placing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where sequences are found: as on a CPU, or as on a device whose values the host must not read."""
    if request.param == "device":
        for module in (chunks, tiled):
            monkeypatch.setattr(module, "host_reads", lambda device: False)
    return request.param


def everything(backend: str, arguments: dict[str, Any]) -> list[Tensor]:
    """All outputs, and the gradients of all that have one."""
    leaves = {n: x.clone().requires_grad_() for n, x in arguments.items() if isinstance(x, Tensor) and x.is_floating_point()}
    out, aux = attention_varlen(**{**arguments, **leaves}, backend=backend, return_aux=EVERY_AUX)
    outs = [out, torch.where(aux.lse.isfinite(), aux.lse, 0.0), aux.key_mass, aux.entropy]
    generator = torch.Generator().manual_seed(3)
    cotangents = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in outs]
    return [out, *aux, *torch.autograd.grad(outs, list(leaves.values()), cotangents)]


@pytest.mark.parametrize("name", CASES)
def test_every_feature_and_gradient(name: str, placing: str) -> None:
    arguments = build(name)
    for got, expected in zip(everything("tiled", arguments), everything("reference", arguments), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-9)
        assert got.is_contiguous()


@pytest.mark.parametrize("name", ["plain", "causal_window_softcap", "bias_of_sequences", "alibi_of_sequences", "mask", "lengths"])
def test_the_specification_is_each_sequence_alone(name: str) -> None:
    arguments = build(name)
    full = reference.attention_varlen_full(**arguments)
    rest = {key: x for key, x in arguments.items() if key not in ("q", "k", "v") and "seqlen" not in key}
    start_q = start_k = 0
    for b, (n, m) in enumerate(zip(SIZE.lengths_q, SIZE.lengths_k, strict=True)):
        own = {key: x[b : b + 1] if isinstance(x, Tensor) and x.shape[0] == len(SIZE.lengths_q) else x for key, x in rest.items()}
        for key in ("bias", "mask"):
            if key in own:
                own[key] = own[key][:, :, :n, :m]
        rows, keys = slice(start_q, start_q + n), slice(start_k, start_k + m)
        alone = reference.attention_full(arguments["q"][None, rows], arguments["k"][None, keys], arguments["v"][None, keys], **own)
        for got, expected in (
            (full.out[rows], alone.out[0]),
            (full.lse[:, rows], alone.lse[0]),
            (full.entropy[:, rows], alone.entropy[0]),
            (full.key_mass[:, keys], alone.key_mass[0]),
        ):
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
        start_q, start_k = start_q + n, start_k + m
    assert (full.out[start_q:] == 0).all() and (full.lse[:, start_q:] == NEG_INF).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_low_precision(dtype: torch.dtype, placing: str) -> None:
    from .packed import check

    check(build("causal", dtype), "tiled")


def small(*lengths: int, heads: int = 2, spare: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(sum(lengths) + spare, heads, 8, dtype=dtype) for _ in range(3)]


@pytest.mark.parametrize("spoiled", ["visible", "outside"])
def test_sequences_do_not_reach_each_other(spoiled: str, placing: str) -> None:
    """NaN that one sequence sees stays in it; NaN in rows of no sequence reaches nothing."""
    cu = torch.tensor([2, 7, 20, 26], dtype=I32)
    clean = [torch.randn(30, 2, 8, requires_grad=True) for _ in range(3)]
    rows = slice(7, 20) if spoiled == "visible" else torch.tensor([0, 1, 26, 27, 28, 29])
    dirty = [x.detach().clone() for x in clean]
    for x in dirty:
        x[rows] = float("nan")
    dirty = [x.requires_grad_() for x in dirty]
    results = []
    for leaves in (clean, dirty):
        out, aux = attention_varlen(*leaves, cu, cu, causal=True, backend="tiled", return_aux="lse")
        results.append([out, aux.lse.T, *torch.autograd.grad(out, leaves, torch.ones_like(out))])
    others = torch.ones(30, dtype=torch.bool)
    if spoiled == "visible":
        others[rows] = False
    for got, expected in zip(results[1], results[0], strict=True):
        assert torch.equal(got[others], expected[others])
    if spoiled == "visible":
        assert results[1][0][rows].isnan().all()
    else:
        assert (results[1][0][rows] == 0).all() and (results[1][1][rows] == NEG_INF).all()
        assert all((grad[rows] == 0).all() for grad in results[1][2:])


def test_no_sequence_and_no_row(placing: str) -> None:
    for total_q, total_k, cu in ((4, 5, [0]), (0, 5, [0, 0, 0]), (4, 0, [0, 0, 0]), (0, 0, [0])):
        x = [torch.randn(n, 2, 8, requires_grad=True) for n in (total_q, total_k, total_k)]
        bounds = torch.tensor(cu, dtype=I32)
        out, aux = attention_varlen(*x, bounds, bounds, backend="tiled", return_aux=EVERY_AUX)
        assert (out == 0).all() and (aux.lse == NEG_INF).all() and (aux.key_mass == 0).all() and (aux.max_logits == NEG_INF).all()
        assert all((grad == 0).all() for grad in torch.autograd.grad(out.sum(), x))


def test_ten_thousand_sequences() -> None:
    lengths = [1] * 9_998 + [7, 0]
    q, k, v = small(*lengths, heads=1, dtype=torch.float32)
    cu = offsets(*lengths)
    out = attention_varlen(q, k, v, cu, cu, causal=True)
    assert torch.equal(out[:9_998], v[:9_998])
    torch.testing.assert_close(out[9_998:], attention(q[None, 9_998:], k[None, 9_998:], v[None, 9_998:], causal=True)[0])


@pytest.mark.parametrize("cu", [[0, 5, 3, 8], [-4, 3, 99, 2], [3, 3, 1, 0], [9, 9, 9, 9], [0, 2, 4, 6]], ids=str)
def test_offsets_that_make_no_sense_stay_inside(cu: list[int], placing: str) -> None:
    """Each counts as the furthest one before it, and none leaves the tensors; the same in every path."""
    x = [torch.randn(9, 2, 8, dtype=torch.float64) for _ in range(3)]
    given = torch.tensor(cu, dtype=I32)
    counted = torch.tensor(cu).clamp(0, 9).cummax(0).values.to(I32)
    expected = attention_varlen(*x, counted, counted, backend="reference")
    for backend in ("tiled", "reference"):
        torch.testing.assert_close(attention_varlen(*x, given, given, backend=backend), expected)


def test_a_bias_hides_what_it_does_not_cover(placing: str) -> None:
    q, k, v = small(6, 3)
    bias = torch.randn(2, 2, 4, 5, dtype=torch.float64)
    arguments = dict(cu_seqlens_q=offsets(6, 3), cu_seqlens_k=offsets(6, 3), max_seqlen_q=4, max_seqlen_k=5, bias=bias)
    expected = attention_varlen(q, k, v, **arguments, backend="reference")
    torch.testing.assert_close(attention_varlen(q, k, v, **arguments, backend="tiled"), expected)
    assert (expected[4:6] == 0).all()
    with pytest.raises(ValueError, match="covers no more"):
        attention_varlen(q, k, v, **arguments, check_values=True)


# ------------------------------------------------------------------------------------------------------------- the operator


def test_operator_checks() -> None:
    arguments = build("alibi_of_sequences")
    given = varlen.prepare_varlen(**arguments).op_arguments | {"backend": "tiled"}
    flat = [given[name] for name in ops.FORWARD_ARGS]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.tilewise.attention_forward, flat, test_utils=tests)
    leaves = [x.requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in flat]
    torch.library.opcheck(torch.ops.tilewise.attention_forward, leaves, test_utils=tests)


@pytest.mark.parametrize("bounds", [{}, {"max_seqlen_q": 9, "max_seqlen_k": 9}], ids=["without", "with bounds"])
def test_one_graph_for_all_lengths(bounds: dict[str, int]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v, cu: attention_varlen(2 * q, k, v, cu, cu, causal=True, **bounds), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    stance = "default"
    for lengths in ((5, 2, 4), (1, 1, 9), (3, 0, 2), (9, 9, 9)):
        x = [t.requires_grad_() for t in small(*lengths)]
        cu = offsets(*lengths)
        with torch.compiler.set_stance(stance):
            got = compiled(*x, cu)
        expected = attention_varlen(2 * x[0], *x[1:], cu, cu, causal=True, **bounds)
        torch.testing.assert_close(got, expected)
        for a, b in zip(*(torch.autograd.grad(o.sin().sum(), x) for o in (got, expected)), strict=True):
            torch.testing.assert_close(a, b)
        stance = "fail_on_recompile"


def test_vmap_is_a_loop() -> None:
    cu = offsets(3, 4)
    q, k, v = (torch.randn(3, 7, 2, 8, dtype=torch.float64) for _ in range(3))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_varlen(q, k, v, cu, cu, causal=True)

    got = torch.vmap(call)(q, k, v)
    torch.testing.assert_close(got, torch.stack([call(*x) for x in zip(q, k, v, strict=True)]))
    grads = torch.vmap(torch.func.grad(lambda *x: call(*x).sin().sum()))(q, k, v)
    expected = [torch.func.grad(lambda *x: call(*x).sin().sum())(*x) for x in zip(q, k, v, strict=True)]
    torch.testing.assert_close(grads, torch.stack(expected))


def test_gradients_are_not_copied_on_their_way_to_the_operator() -> None:
    """What the results are views of costs nothing backward: no tensor of their size is filled or copied around the operator."""
    q, k, v = (x.requires_grad_() for x in small(5, 0, 9, dtype=torch.float32))
    cu = offsets(5, 0, 9)
    out, aux = attention_varlen(q, k, v, cu, cu, causal=True, return_aux=("lse", "entropy"))
    cotangents = [torch.randn_like(x) for x in (out, aux.lse, aux.entropy)]
    seen: list[str] = []

    class Listening(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function.name())
            return function(*args, **kwargs or {})

    with Listening():
        torch.autograd.grad((out, aux.lse, aux.entropy), (q, k, v), cotangents)
    assert "tilewise::attention_backward" in seen
    assert not {name for name in seen if not name.startswith("tilewise::")} - {"aten::unsqueeze", "aten::squeeze.dim", "aten::detach"}


def test_counted_operations_are_a_bound() -> None:
    """Never less than what is computed; exact where all sequences are as long as the bound says."""

    def counted(lengths: list[int], most: int | None, **rules: Any) -> int:
        x = [t.requires_grad_() for t in small(*lengths)]
        with FlopCounterMode(display=False) as counter:
            attention_varlen(*x, offsets(*lengths), offsets(*lengths), most, most, **rules).sum().backward()
        return counter.get_total_flops()

    def computed(lengths: list[int], **rules: Any) -> int:
        one = [cost.Problem(batch=1, heads=2, seqlen_q=n, head_dim=8, **rules) for n in lengths]
        return sum(cost.flops(problem, "fwd+bwd") for problem in one)

    assert counted([16] * 5, 16, causal=True) == computed([16] * 5, window_right=0)
    for lengths in ([3, 40, 5], [1] * 9):
        for most in (None, 40):
            assert counted(lengths, most) >= computed(lengths)
            window = dict(window_left=3, window_right=0)
            assert counted(lengths, most, window_size=(3, 0)) >= computed(lengths, **window)
    assert counted([3, 40, 5], 40) < counted([3, 40, 5], None)


# ---------------------------------------------------------------------------------------------------------------- bad input


def call(**changes: Any) -> Any:
    q, k, v = small(3, 4)
    return attention_varlen(**{**dict(q=q, k=k, v=v, cu_seqlens_q=offsets(3, 4), cu_seqlens_k=offsets(3, 4)), **changes})


BAD = {
    "rank": (dict(q=torch.randn(1, 7, 2, 8)), ValueError, r"q has shape \(1, 7, 2, 8\); packed sequences have rank 3"),
    "dtype of offsets": (dict(cu_seqlens_q=torch.tensor([0, 7])), TypeError, "cu_seqlens_q has dtype torch.int64; it must be int32"),
    "shape of offsets": (dict(cu_seqlens_k=torch.zeros(2, 2, dtype=I32)), ValueError, r"cu_seqlens_k has shape \(2, 2\)"),
    "no offsets": (dict(cu_seqlens_k=torch.zeros(0, dtype=I32)), ValueError, r"it must be \(sequences \+ 1,\)"),
    "sequences": (dict(cu_seqlens_k=offsets(7)), ValueError, "cu_seqlens_q describes 2 sequences and cu_seqlens_k 1"),
    "bound": (dict(max_seqlen_q=-1), ValueError, "max_seqlen_q is -1; it must be 0 or more"),
    "type of bound": (dict(max_seqlen_k=4.0), TypeError, "max_seqlen_k is 4.0"),
    "bias without bounds": (dict(bias=torch.zeros(2, 2, 4, 4)), ValueError, "max_seqlen_q must be given"),
    "mask without bounds": (dict(mask=torch.ones(4, dtype=torch.bool)), ValueError, "max_seqlen_k must be given"),
    "bias of another size": (dict(bias=torch.zeros(7, 7), max_seqlen_q=4, max_seqlen_k=4), ValueError, r"max_seqlen_k\) = \(2, 2, 4, 4\)"),
    "documents without bounds": (dict(mask=masks.Document(torch.zeros(1, 4, dtype=I32))), ValueError, "give max_seqlen_q and max_seqlen_k"),
    "slopes": (dict(alibi_slopes=torch.zeros(3, 2)), ValueError, r"\(Hq,\) or \(sequences, Hq\) = \(2,\) or \(2, 2\)"),
    "used": (dict(seqused_k=torch.zeros(3, dtype=I32)), ValueError, r"it must be \(sequences,\) = \(2,\)"),
    "pages": (dict(page_table=torch.zeros(2, 1, dtype=I32)), ValueError, "with a page_table it must have rank 4"),
    "blocks": (dict(mask=masks.Blocks(torch.ones(1, 1, 1, 1, dtype=torch.bool), 16)), UnsupportedAttention, "packed sequences"),
    "block mask": (dict(mask=BlockMask(masks.Causal(), 7, 7)), UnsupportedAttention, "mask is a BlockMask"),
    "decreasing": (dict(cu_seqlens_q=torch.tensor([0, 5, 2], dtype=I32), check_values=True), ValueError, "decreases from 5 to 2"),
    "beyond": (dict(cu_seqlens_k=torch.tensor([0, 5, 9], dtype=I32), check_values=True), ValueError, "must stay between 0 and 7"),
    "longer than the bound": (dict(max_seqlen_q=3, check_values=True), ValueError, "sequence 1 has length 4, above max_seqlen_q = 3"),
    "too many used": (dict(seqused_q=torch.tensor([3, 5], dtype=I32), check_values=True), ValueError, "seqused_q is 5 for sequence 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_in_words(name: str) -> None:
    changes, error, message = BAD[name]
    with pytest.raises(error, match=message):
        call(**changes)


def test_backends_that_do_not_read_packed_sequences_say_so() -> None:
    with pytest.raises(UnsupportedAttention, match="backend='triton'"):
        call(backend="triton")


# -------------------------------------------------------------------------------------------------------- reported elsewhere


def alone(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, **options: Any) -> Tensor:
    bounds = [list(zip(cu.tolist(), cu.tolist()[1:], strict=False)) for cu in (cu_q, cu_k)]
    parts = [attention(q[None, a:b], k[None, c:d], v[None, c:d], **options)[0] for (a, b), (c, d) in zip(*bounds, strict=True)]
    return torch.cat(parts)


# (report, cu_q, cu_k, query heads, kv heads, head dim)
SHAPES = [
    ("B46", [0, 1, 1, 2], [0, 3, 3, 8], 9, 3, 64),
    ("B47", [0, 0, 0, 0, 1], [0, 0, 0, 0, 1], 21, 7, 120),
    ("B49", [0, 150, 150, 300], [0, 100, 200, 300], 2, 2, 16),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape[0])
def test_shapes_that_failed_elsewhere(shape: tuple[Any, ...]) -> None:
    _, cu_q, cu_k, heads, kv_heads, dim = shape
    cu_q, cu_k = (torch.tensor(cu, dtype=I32) for cu in (cu_q, cu_k))
    leaves = [torch.randn(n, h, dim, requires_grad=True) for n, h in ((cu_q[-1], heads), (cu_k[-1], kv_heads), (cu_k[-1], kv_heads))]
    got, expected = attention_varlen(*leaves, cu_q, cu_k), alone(*leaves, cu_q, cu_k)
    torch.testing.assert_close(got, expected)
    grads = [torch.autograd.grad(out.sin().sum(), leaves) for out in (got, expected)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for start, stop, queries in zip(cu_k.tolist(), cu_k.tolist()[1:], cu_q.diff().tolist(), strict=False):
        assert queries or all((grad[start:stop] == 0).all() for grad in grads[0][1:])


@report(11)
def test_a_sequence_without_keys(report: str) -> None:
    q, k, v = small(4)
    out, aux = attention_varlen(q, k, v, offsets(4), torch.tensor([0, 0], dtype=I32), return_aux="lse")
    assert (out == 0).all() and (aux.lse == NEG_INF).all()


@report(23)
def test_softcap_in_the_backward_pass(report: str) -> None:
    q, k, v = (4 * torch.randn(n, 2, 64, requires_grad=True) for n in (128, 217, 217))
    x = [t.detach().requires_grad_() for t in (q, k, v)]
    cu = torch.tensor([0, 128], dtype=I32), torch.tensor([0, 217], dtype=I32)
    outs = attention_varlen(*x, *cu, causal=True, softcap=15.0), alone(*x, *cu, causal=True, softcap=15.0)
    for a, b in zip(*(torch.autograd.grad(out.sin().sum(), x) for out in outs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@report(77)
def test_slices_of_one_buffer(report: str) -> None:
    buffer = torch.randn(13, 3 * 2 * 8, requires_grad=True)
    q, k, v = (x.unflatten(1, (2, 8)) for x in buffer.split(16, 1))
    cu = offsets(6, 7)
    got, expected = attention_varlen(q, k, v, cu, cu), alone(q, k, v, cu, cu)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(*(torch.autograd.grad(out.sin().sum(), buffer)[0] for out in (got, expected)))


@report(115)
def test_a_bound_that_is_too_low_truncates_nothing(report: str, placing: str) -> None:
    q, k, v = small(128)
    cu = offsets(128)
    torch.testing.assert_close(attention_varlen(q, k, v, cu, cu, 64, 64, backend="tiled"), alone(q, k, v, cu, cu))


@report(116)
def test_rows_of_no_sequence_are_zero(report: str, placing: str) -> None:
    q, k, v = small(3, 4, spare=3)
    assert (attention_varlen(q, k, v, offsets(3, 4), offsets(3, 4), backend="tiled")[7:] == 0).all()


@report(118, 142)
def test_no_value_is_read_where_that_would_wait(report: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device: neither offsets nor anything else becomes a Python number, with and without bounds, forward and backward."""
    for module in (chunks, tiled):
        monkeypatch.setattr(module, "host_reads", lambda device: False)
    x = [t.requires_grad_() for t in small(3, 4)]
    cu = offsets(3, 4)

    def refuse(*_: Any) -> Any:
        raise AssertionError("a value was read on the host")

    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "nonzero", "cpu", "numpy"):
        monkeypatch.setattr(Tensor, name, refuse)
    for most in (None, 4):
        attention_varlen(*x, cu, cu, most, most, causal=True, backend="tiled").sum().backward()


@report(121)
def test_the_same_bits_on_every_run(report: str, placing: str) -> None:
    arguments = build("bias_shared", torch.float32)
    first = everything("tiled", arguments)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(everything("tiled", arguments), first, strict=True))


@report(170)
def test_the_shape_of_an_lse_is_fixed(report: str) -> None:
    q, k, v = small(3, 4)
    out, aux = attention_varlen(q, k, v, offsets(3, 4), offsets(3, 4), return_aux="lse")
    assert aux.lse.shape == (2, 7) and aux.lse.dtype == torch.float64
    halves = [
        attention_varlen(q, k, v, offsets(3, 4), cu, return_aux="lse")
        for cu in (torch.tensor([0, 3, 3], dtype=I32), torch.tensor([3, 3, 7], dtype=I32))
    ]
    merged, lse = tilewise.merge([o for o, _ in halves], [a.lse for _, a in halves])
    torch.testing.assert_close(merged, out)
    torch.testing.assert_close(lse, aux.lse)


@report(119)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_means_its_sequences(report: str, side: str) -> None:
    x = [torch.randn(2, 7, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    real = torch.tensor([7, 4])
    column = torch.arange(7).expand(2, 7)
    mask = column < real[:, None] if side == "right" else column >= 7 - real[:, None]
    parts = [packing.unpad(t, mask) for t in x]
    out = attention_varlen(*(p.values for p in parts), parts[0].cu_seqlens, parts[0].cu_seqlens, causal=True)
    padded = packing.pad(out, parts[0].indices, 2, 7)
    for b in range(2):
        rows = mask[b]
        expected = attention(*(t[b : b + 1, rows] for t in x), causal=True)[0]
        torch.testing.assert_close(padded[b, rows], expected)
        assert (padded[b, ~rows] == 0).all()
    assert all((grad[~mask] == 0).all() for grad in torch.autograd.grad(padded.sum(), x))


# ------------------------------------------------------------------------------------------------------ packing and nesting


@pytest.mark.parametrize("total", [7, 9, 10])
def test_unpadding_into_a_given_room(total: int) -> None:
    x, mask = torch.randn(2, 5, 3), torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]])
    exact, roomy = packing.unpad(x, mask), packing.unpad(x, mask.bool(), total)
    assert (
        roomy.values.shape == (total, 3) and torch.equal(roomy.values[:7], exact.values) and torch.equal(roomy.cu_seqlens, exact.cu_seqlens)
    )
    assert exact.max_seqlen == 5 and torch.equal(packing.lengths(mask), torch.tensor([3, 4], dtype=I32))
    assert torch.equal(packing.pad(exact.values, exact.indices, 2, 5), x * mask[..., None])


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: packing.lengths(torch.ones(3)),
        lambda: packing.cu_seqlens(torch.ones(3)),
        lambda: packing.unpad(torch.ones(2, 4), torch.ones(2, 5, dtype=torch.bool)),
        lambda: packing.unpad(torch.ones(2, 5), torch.ones(2, 5, dtype=torch.bool), total=11),
        lambda: packing.pad(torch.ones(3, 1), torch.arange(2), 2, 5),
    ],
)
def test_packing_refuses_what_does_not_fit(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"must (be|hold)|needs its place"):
        wrong()


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_nested_tensors_are_accepted_as_they_are(layout: str) -> None:
    lengths = [3, 0, 5, 1]
    leaves = [torch.randn(9, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    cu = offsets(*lengths)
    bounds = cu.long()  # one tensor: what is ragged by the same offsets is ragged alike
    nested = [torch.nested.nested_tensor_from_jagged(x, bounds) for x in leaves]
    if layout == "bhsd":
        nested = [x.transpose(1, 2) for x in nested]
    out, aux = attention(*nested, causal=True, layout=layout, return_aux=EVERY_AUX)
    expected, packed_aux = attention_varlen(*leaves, cu, cu, causal=True, return_aux=EVERY_AUX)
    plain = out.transpose(1, 2) if layout == "bhsd" else out
    torch.testing.assert_close(plain.values(), expected)
    for name in ("lse", "key_mass", "entropy"):
        torch.testing.assert_close(getattr(aux, name).transpose(1, 2).values().T, getattr(packed_aux, name))
    for a, b in zip(*(torch.autograd.grad(o.sin().sum(), leaves) for o in (plain.values(), expected)), strict=True):
        torch.testing.assert_close(a, b)


def test_nested_tensors_that_do_not_fit_are_refused() -> None:
    nested = torch.nested.nested_tensor([torch.randn(n, 2, 8) for n in (3, 4)], layout=torch.jagged)
    other = torch.nested.nested_tensor([torch.randn(n, 2, 8) for n in (4, 3)], layout=torch.jagged)
    for q, k, v, message in (
        (nested, torch.randn(2, 4, 2, 8), nested, "k is not a jagged nested tensor"),
        (nested, nested, other, "ragged in different ways"),
        (nested.transpose(1, 2), nested, nested, "q is of rank 4 and ragged in dimension 2"),
    ):
        with pytest.raises(ValueError, match=message):
            attention(q, k, v)
    with pytest.raises(ValueError, match="seqused_k was given with nested tensors"):
        jagged.attention_jagged(nested, nested, nested, seqused_k=torch.zeros(2, dtype=I32))
