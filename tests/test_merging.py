"""`merge`: attention over parts of the keys, put together, is attention over all of them, with its gradients."""

import itertools

import pytest
import torch

import tilewise
from tilewise import reference

from .helpers import make_inputs
from .reports import report


def parts_of(x, cuts, layout, grads=False):
    """Attention over the keys between the cuts, each part by the reference."""
    seq = 1 if layout == "bshd" else 2
    bounds = list(zip([0, *cuts], [*cuts, x["k"].shape[seq]], strict=True))
    results = [reference.attention(x["q"], x["k"].narrow(seq, a, b - a), x["v"].narrow(seq, a, b - a), layout=layout) for a, b in bounds]
    return [out for out, _ in results], [lse for _, lse in results]


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("cuts", [(4,), (0, 3, 3, 9), (13,)], ids=str)
def test_parts_make_the_whole(layout, cuts):
    x = make_inputs(seqlen_q=7, seqlen_k=13, dtype=torch.float64, layout=layout)
    out, lse = tilewise.merge(*parts_of(x, cuts, layout), layout=layout)
    want_out, want_lse = reference.attention(**x, layout=layout)
    torch.testing.assert_close(out, want_out)
    torch.testing.assert_close(lse, want_lse)


def test_order_of_parts_does_not_matter():
    x = make_inputs(seqlen_q=5, seqlen_k=12, dtype=torch.float64)
    outs, lses = parts_of(x, (3, 8), "bshd")
    one, other = tilewise.merge(outs, lses), tilewise.merge(outs[::-1], lses[::-1])
    torch.testing.assert_close(one, other)


def test_gradients_flow_through_every_part():
    x = make_inputs(seqlen_q=4, seqlen_k=6, heads=2, dtype=torch.float64)
    x = {name: t.requires_grad_() for name, t in x.items()}
    g, gl = torch.randn(2, 4, 2, 16, dtype=torch.float64), torch.randn(2, 2, 4, dtype=torch.float64)
    got = torch.autograd.grad(tilewise.merge(*parts_of(x, (2,), "bshd")), list(x.values()), (g, gl))
    want = torch.autograd.grad(reference.attention(**x), list(x.values()), (g, gl))
    torch.testing.assert_close(got, want)


def test_gradcheck_with_an_empty_row_in_one_part():
    outs = [torch.randn(1, 3, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    lses = [torch.randn(1, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]

    def fn(a, b, x, y):
        hidden = torch.zeros(1, 2, 3, dtype=torch.bool)
        hidden[0, 0, 1] = True
        return tilewise.merge([a, b], [x.masked_fill(hidden, float("-inf")), y])

    assert torch.autograd.gradcheck(fn, (*outs, *lses))


def test_rows_that_no_part_sees_and_parts_that_hold_nan():
    out = torch.full((1, 2, 1, 4), float("nan"))
    empty = torch.full((1, 1, 2), float("-inf"))
    merged, lse = tilewise.merge([out, out], [empty, empty])
    assert merged.eq(0).all() and lse.eq(float("-inf")).all()
    real, real_lse = torch.randn(1, 2, 1, 4), torch.randn(1, 1, 2)
    merged, lse = tilewise.merge([out, real], [empty, real_lse])
    torch.testing.assert_close((merged, lse), (real, real_lse))


def test_packed_outputs_have_rank_three():
    outs, lses = [torch.randn(5, 2, 4) for _ in range(2)], [torch.randn(2, 5) for _ in range(2)]
    out, lse = tilewise.merge(outs, lses)
    dense, dense_lse = tilewise.merge([o[None] for o in outs], [x[None] for x in lses])
    torch.testing.assert_close((out, lse), (dense[0], dense_lse[0]))


def test_the_error_does_not_grow_with_the_number_of_float32_parts():
    x = make_inputs(seqlen_q=16, seqlen_k=64, dtype=torch.float32)
    want, _ = reference.attention(**x)
    for count in (2, 8, 32):
        cuts = list(range(64 // count, 64, 64 // count))
        outs, lses = parts_of(x, cuts, "bshd")
        out, _ = tilewise.merge([o.float() for o in outs], [s.float() for s in lses])
        assert (out - want).abs().max() < 1e-6


@report(167, 169)
def test_errors_of_16_bit_inputs_do_not_grow_with_the_number_of_chunks(report):
    """Keys in chunks of unequal lengths, as on the ranks of a ring: partial outputs are float32, and so is the sum of dq where each chunk
    has a 16-bit copy of a float32 q. (The gradient of one 16-bit q would be added up in 16 bits: 2.4 times the error with 8 chunks.)"""
    seqlen = 509
    x = make_inputs(1, seqlen, heads=2, dtype=torch.bfloat16)
    exact = [t.double().requires_grad_() for t in x.values()]
    out, _ = reference.attention(*exact)
    dout = torch.randn_like(out).bfloat16()
    want = [out.detach(), *torch.autograd.grad(out, exact, dout.double())]

    def errors(chunks: int) -> list[float]:
        q, k, v = leaves = [t.float().requires_grad_() for t in x.values()]
        bounds = [seqlen * i // chunks for i in range(chunks + 1)]
        outs, lses = [], []
        for start, stop in itertools.pairwise(bounds):
            given = (q, k[:, start:stop], v[:, start:stop])
            part, aux = tilewise.attention(*(t.bfloat16() for t in given), out_dtype=torch.float32, return_aux="lse")
            outs.append(part)
            lses.append(aux.lse)
        merged, _ = tilewise.merge(outs, lses)
        got = [merged.detach(), *torch.autograd.grad(merged, leaves, dout.float())]
        return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, want, strict=True)]

    whole = errors(1)
    for chunks in (2, 4, 8):
        assert all(error <= 1.2 * least for error, least in zip(errors(chunks), whole, strict=True)), (chunks, errors(chunks), whole)


@pytest.mark.parametrize(
    ("outs", "lses", "layout", "says"),
    [
        ([], [], "bshd", "0 outs"),
        ([torch.zeros(1, 2, 3, 4)], [], "bshd", "1 outs and 0 lses"),
        ([torch.zeros(1, 2, 3, 4)], [torch.zeros(1, 2, 3)], "bshd", "lses[0] has shape (1, 2, 3)"),
        ([torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 5)], [torch.zeros(1, 3, 2)] * 2, "bshd", "outs[1] has shape"),
        ([torch.zeros(2, 3)], [torch.zeros(2)], "bshd", "rank 4"),
        ([torch.zeros(1, 2, 3, 4)], [torch.zeros(1, 3, 2)], "bsdh", "layout is 'bsdh'"),
    ],
)
def test_misuse_is_named(outs, lses, layout, says):
    with pytest.raises(ValueError) as error:
        tilewise.merge(outs, lses, layout=layout)
    assert says in str(error.value)
