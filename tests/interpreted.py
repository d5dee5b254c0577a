"""The Triton kernels in Triton's interpreter, on the CPU: run by `test_triton_interpret` in processes of their own.

The interpreter must be chosen before Triton is imported, and then serves a whole process; hence the name, which pytest does not collect.
It computes bfloat16 products wrongly, so those are left to the GPU suite. ``TILEWISE_SLICE=i/n`` runs every n-th case from the i-th.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from functools import partial

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import pytest
import torch
from torch import Tensor

import tilewise
from tilewise import BlockMask, masks, reference
from tilewise.kernels import triton as kernels
from tilewise.kernels.triton import configs, launch

from . import cases, helpers, packed, public_faults, test_public_faults

INDEX, COUNT = map(int, os.environ.get("TILEWISE_SLICE", "0/1").split("/"))
CHOICES = cases.SINGLES + cases.CHOICES
HALF_CHOICES = CHOICES[::8]


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch):
    """The kernels decline the CPU; here they are meant to run on it, small calls as large ones do, which first ask whether hidden values
    can show. NumPy warns where a GPU computes infinities in silence."""
    monkeypatch.setattr(kernels, "why_not", lambda *_: None)
    monkeypatch.setattr("tilewise.kernels.triton.finite.LEAST_WORK", 0)
    with np.errstate(all="ignore"):
        yield


def triton_attention(**arguments) -> tuple[Tensor, Tensor]:
    out, aux = tilewise.attention(**arguments, backend="triton", return_aux="lse")
    return out, aux.lse


PARAMETERS = ("bias", "alibi_slopes", "learnable_sink")


def check(arguments: dict) -> None:
    """Output, LSE and all gradients, also that of the LSE, within the derived tolerance.

    A parameter's gradient sums terms of order one that cancel. Each carries the rounding of the float32 LSE that probabilities are
    recomputed from, half an eps of its size, which the unfused computation does not have: those sums get a wider bound.
    """
    with torch.no_grad():
        out, aux = tilewise.attention(**arguments, backend="reference", return_aux="lse")
    dout, dlse = torch.randn(out.shape).to(out.dtype), torch.randn(aux.lse.shape)
    got = helpers.run_with_grads(triton_attention, arguments, dout, dlse)
    exact = helpers.reference_with_grads(arguments, dout, dlse)
    unfused = helpers.unfused_with_grads(arguments, dout, dlse)
    largest = aux.lse.nan_to_num(0.0, 0.0, 0.0).abs().max().item()
    for name in {*PARAMETERS} & {*exact.grads}:
        want = exact.grads.pop(name)
        error, allowed = ((x.grads[name].double() - want).abs().max().item() for x in (got, unfused))
        limit = 8.0 * (allowed + max(1.0, largest / 2) * torch.finfo(got.grads[name].dtype).eps)
        assert error <= limit, f"d{name}: error {error:.3e}, unfused {allowed:.3e}, LSE up to {largest:.1f}"
    helpers.assert_close_to_reference(got, exact, unfused, recomputed=True)


def arguments_of(choice: cases.Choice, dtype: torch.dtype) -> dict:
    call = cases.build(choice, dtype=dtype)
    return {"q": call.q, "k": call.k, "v": call.v, **call.options}


def sliced(values: list) -> list:
    return values[INDEX::COUNT]


def test_choices_cover_every_pair():
    assert set().union(*map(cases.pairs_of, CHOICES)) == cases.all_pairs(cases.FACTORS)


@pytest.mark.parametrize("choice", sliced(CHOICES), ids=cases.name)
def test_float32(choice):
    check(arguments_of(choice, torch.float32))


@pytest.mark.parametrize("choice", sliced(HALF_CHOICES), ids=cases.name)
def test_float16(choice):
    check(arguments_of(choice, torch.float16))


@pytest.mark.parametrize("choice", sliced(cases.CHOICES[::20]), ids=cases.name)
def test_tiles_of_calls_with_many_features(choice, monkeypatch):
    """Long and narrow ones, in loops that keep nothing that a turn can work out."""
    tiles = {configs.DKDV: configs.Config(64, 16, 1, 1, frugal=True)}
    monkeypatch.setattr(launch, "choose", lambda *call: tiles.get(call[3], configs.Config(16, 64, 1, 1, frugal=True)))
    check(arguments_of(choice, torch.float32))


@pytest.mark.parametrize("head_dim", sliced([1, 7, 16, 33]))
def test_head_dims_are_padded_inside(head_dim):
    check(helpers.make_inputs(batch=1, heads=1, seqlen_q=20, head_dim=head_dim, head_dim_v=head_dim + 2))


Leaves = dict[str, Tensor]
# FlexAttention's public examples, and what the language has besides: arguments of a call from its tensors, some of them captured.
PROGRAMS: dict[str, Callable[[Leaves], dict]] = {
    "alibi": lambda x: {"score_mod": lambda s, b, h, i, j: s - x["slopes"][h] * (i - j).abs()},
    "relative table": lambda x: {"score_mod": lambda s, b, h, i, j: s + x["table"][h, i - j + 35]},
    "softcap, causal": lambda x: {"score_mod": lambda s, b, h, i, j: 2.0 * torch.tanh(s / 2.0), "causal": True},
    "causal by -inf": lambda x: {"score_mod": lambda s, b, h, i, j: torch.where(i + 16 >= j, s, -float("inf"))},
    "gates and bias": lambda x: {"score_mod": lambda s, b, h, i, j: s * torch.sigmoid(x["point"]) + x["rows"][i] * x["columns"][b, j]},
    "documents": lambda x: {"mask": masks.Custom(lambda b, h, i, j: (x["documents"][i] == x["documents"][j]) & (i + 16 >= j))},
    "neighbourhood": lambda x: {
        "mask": masks.Custom(lambda b, h, i, j: ((i // 6 - j // 6).abs() <= 1) & ((i % 6 - j % 6).abs() <= 2)),
        "score_mod": lambda s, b, h, i, j: s + x["table"][h, i - j],
    },
    "elementary": lambda x: {
        "score_mod": lambda s, b, h, i, j: (
            torch.exp(0.3 * s) + torch.log(s.abs() + 1) + torch.rsqrt(s * s + 2) + torch.sin(s) * s.cos() + torch.erf(s)
            + (s.abs() + 1) ** 1.7 + (s * s + 1) ** -1.5 + torch.minimum(s, x["slopes"][h]) + torch.clamp(s, -0.5, 0.5)
        )
    },
    "integers": lambda x: {
        "score_mod": lambda s, b, h, i, j: (
            s * (((i + 3) // 2 - j % 3) ^ 5) / 8 + ((i - j) // 3 + (i - j) % 3 + torch.div(i - 2 * j, 5, rounding_mode="floor")) / 16
            + (i - j) ** 3 * 1e-5 + (h << 40) * 2.0**-42
        )
    },
    "constant": lambda x: {"score_mod": lambda s, b, h, i, j: x["slopes"][h]},
}  # fmt: skip


WITH_DTYPES = [(name, "float32") for name in PROGRAMS] + [(name, "float16") for name in list(PROGRAMS)[:4]]


@pytest.mark.parametrize("name,dtype", sliced(WITH_DTYPES))
def test_programs(name, dtype):
    """Output, LSE and the gradients of q, k, v and of everything that a function captures."""
    dtype = getattr(torch, dtype)
    inputs = helpers.make_inputs(batch=1, heads=2, kv_heads=1, seqlen_q=20, seqlen_k=36, dtype=dtype)
    captured = {"slopes": torch.rand(2), "table": torch.randn(2, 56), "point": torch.randn(()), "rows": torch.randn(20)}
    captured["columns"] = torch.randn(36, 1).T.contiguous().T.view(1, 36)
    documents = {"documents": torch.arange(36) // 7}
    dout, dlse = torch.randn(1, 20, 2, 16), torch.randn(1, 2, 20)

    def answer(attention: Callable[..., tuple[Tensor, Tensor]], to: torch.dtype | None) -> helpers.Answer:
        leaves = {key: x.to(to or x.dtype).clone().requires_grad_() for key, x in {**inputs, **captured}.items()}
        arguments = PROGRAMS[name]({**leaves, **documents})
        out, lse = attention(**{key: leaves[key] for key in "qkv"}, **arguments)
        seen = torch.where(lse.isfinite(), lse, 0.0)
        grads = torch.autograd.grad([out, seen], list(leaves.values()), [dout.to(out.dtype), dlse.to(seen.dtype)], allow_unused=True)
        known = {key: torch.zeros_like(x) if grad is None else grad for (key, x), grad in zip(leaves.items(), grads, strict=True)}
        return helpers.Answer(out.detach(), lse.detach(), known)

    got = answer(triton_attention, None)
    exact, unfused = (answer(partial(reference.attention, compute_dtype=to), to) for to in (torch.float64, dtype))
    for key in captured:  # sums of many terms: see `check`
        want = exact.grads.pop(key)
        error, allowed = ((x.grads[key].double() - want).abs().max().item() for x in (got, unfused))
        assert error <= 8.0 * (allowed + torch.finfo(torch.float32).eps), f"d{key}: error {error:.3e}, unfused {allowed:.3e}"
    helpers.assert_close_to_reference(got, exact, unfused)


# (rule, block size, further arguments): lists shared and not, blocks smaller and larger than a tile, and what still cuts a whole block.
LISTED: dict[str, Callable[[], tuple[masks.Mask, int | tuple[int, int], dict]]] = {
    "blocks of each head": lambda: (masks.Blocks(torch.rand(1, 4, 5, 7) < 0.5, 16), 16, {"dropout_p": 0.2, "dropout_seed": 3}),
    "window": lambda: (masks.SlidingWindow(40, 9), (32, 16), {"bias": torch.randn(4, 70, 100)}),
    "documents": lambda: (documents(100) & masks.Causal(), (64, 32), {"score_mod": lambda s, b, h, i, j: s + (i - j) / 64}),
    "causal beside lists": lambda: (masks.Blocks(torch.rand(1, 1, 2, 2) < 0.8, 64), 64, {"causal": True, "window_size": (50, -1)}),
    "lengths": lambda: (masks.Custom(lambda b, h, i, j: i // 32 != j // 32), 32, {"seqused_q": lengths(61), "seqused_k": lengths(93)}),
}


def documents(n: int) -> masks.Document:
    return masks.Document(torch.arange(30, 100)[None] // 40, torch.arange(n)[None] // 40)


@pytest.mark.parametrize("name", sliced(list(LISTED)))
def test_tile_lists(name):
    """The same answer as the rule that the lists came from."""
    rule, block_size, options = LISTED[name]()
    inputs = helpers.make_inputs(batch=1, heads=4, kv_heads=2, seqlen_q=70, seqlen_k=100) | options
    listed = BlockMask(rule, 70, 100, block_size=block_size)
    dout, dlse = torch.randn(1, 70, 4, 16), torch.randn(1, 4, 70)
    got = helpers.run_with_grads(triton_attention, {**inputs, "mask": listed}, dout, dlse)
    exact, unfused = (f({**inputs, "mask": rule}, dout, dlse) for f in (helpers.reference_with_grads, helpers.unfused_with_grads))
    helpers.assert_close_to_reference(got, exact, unfused)


AUX = ("max_logits", "key_mass", "entropy")
AUXILIARY: dict[str, Callable[[], dict]] = {
    "dropout": lambda: dict(causal=True, dropout_p=0.3, dropout_seed=5),
    "window": lambda: dict(window_size=(9, 3), softcap=2.0),
    "bias": lambda: dict(bias=torch.where(torch.rand(4, 40, 70) < 0.5, torch.randn(4, 40, 70) * 3.0, -torch.inf)),
    "low bias": lambda: dict(bias=torch.randn(40, 70) - 1e5),
    "mask": lambda: dict(mask=(torch.rand(40, 70) < 0.3) & (torch.arange(40) != 3)[:, None], softmax_scale=-0.3),
    "sinks": lambda: dict(learnable_sink=torch.tensor([0.5, -1.0, 30.0, -torch.inf]), seqused_q=lengths(33), seqused_k=lengths(41)),
    "no key": lambda: dict(seqused_k=lengths(0), learnable_sink=torch.randn(4)),
    "score_mod": lambda: dict(score_mod=lambda s, b, h, i, j: s + (i - j) * 0.125, learnable_sink=torch.randn(4)),
    "lists": lambda: dict(mask=masks.Blocks(torch.rand(1, 4, 3, 5) < 0.5, 16)),
}


def largest(x: Tensor) -> float:
    """The largest magnitude among the finite elements, 0 without any."""
    return torch.where(x.isfinite(), x, 0.0).abs().amax().item()


def assert_auxiliary(got: tilewise.Aux, exact: reference.Result, unfused: reference.Result) -> None:
    """As close to float64 as the unfused computation, and one rounding of the LSE that key_mass recomputes its probabilities from."""
    eps = torch.finfo(torch.float32).eps
    for name in AUX:
        one, want, eager = (getattr(x, name).double() for x in (got, exact, unfused))
        assert torch.equal(one[~want.isfinite()], want[~want.isfinite()]), name
        error, allowed = (largest(torch.where(want.isfinite(), x - want, 0.0)) for x in (one, eager))
        rounding = 8 * eps * max(1.0, largest(want)) * (max(1.0, largest(exact.lse)) if name == "key_mass" else 1.0)
        assert error <= 1.5 * allowed + rounding, f"{name}: error {error:.3e}, unfused {allowed:.3e}"


@pytest.mark.parametrize("name,dtype", sliced([(name, torch.float32) for name in AUXILIARY] + [("window", torch.float16)]), ids=str)
def test_auxiliary_outputs(name, dtype):
    arguments = helpers.make_inputs(batch=1, heads=4, kv_heads=2, seqlen_q=40, seqlen_k=70, dtype=dtype) | AUXILIARY[name]()
    _, got = tilewise.attention(**arguments, backend="triton", return_aux=AUX)
    assert_auxiliary(got, *(reference.attention_full(**arguments, compute_dtype=to) for to in (torch.float64, dtype)))


@pytest.mark.parametrize("name", sliced(["causal_window_softcap", "bias_shared", "lengths"]))
def test_auxiliary_outputs_of_packed_sequences(name):
    arguments = packed.build(name, torch.float32, size=packed.SMALL)
    _, got = tilewise.attention_varlen(**arguments, backend="triton", return_aux=AUX)
    assert_auxiliary(got, *(reference.attention_varlen_full(**arguments, compute_dtype=to) for to in (torch.float64, torch.float32)))


def test_gradients_of_auxiliary_outputs_come_from_another_backend(monkeypatch):
    """And are those of the specification, from what these kernels saved."""
    refuses = lambda t, r, request, target: "no gradient of these" if request.backward and request.aux else None  # noqa: E731
    monkeypatch.setattr(kernels, "why_not", refuses)
    arguments = helpers.make_inputs(batch=1, heads=2, seqlen_q=20, seqlen_k=36) | {"causal": True, "softcap": 2.0}

    def gradients(backend: str) -> tuple[Tensor, ...]:
        leaves = {name: arguments[name].clone().requires_grad_() for name in "qkv"}
        _, aux = tilewise.attention(**{**arguments, **leaves}, backend=backend, return_aux=("key_mass", "entropy"))
        return torch.autograd.grad(aux.entropy.square().sum() + aux.key_mass.square().sum(), list(leaves.values()), allow_unused=True)

    for got, want in zip(gradients("triton")[:2], gradients("reference")[:2], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_auxiliary_outputs_show_what_is_seen_and_nothing_else():
    arguments = helpers.make_inputs(batch=1, heads=2, seqlen_q=40, seqlen_k=70) | {"mask": torch.arange(70) % 3 != 1}
    hidden, seen = ({name: x.clone() for name, x in arguments.items()} for _ in range(2))
    hidden["k"][:, 1::3], seen["k"][0, 5, 1] = float("nan"), float("nan")
    clean, same, broken = (tilewise.attention(**given, backend="triton", return_aux=AUX)[1] for given in (arguments, hidden, seen))
    for name in AUX:
        assert torch.equal(getattr(clean, name), getattr(same, name)), name
    assert broken.max_logits.isnan().tolist() == [False, True] and broken.entropy.isnan().all(2).tolist() == [[False, True]]
    assert broken.key_mass[0, 1, ::3].isnan().all() and torch.equal(broken.key_mass[:, 0], clean.key_mass[:, 0])
    nothing = {name: arguments[name][:, :0] if name == "q" else arguments[name] for name in "qkv"}
    _, empty = tilewise.attention(**nothing, backend="triton", return_aux=AUX)
    assert (empty.max_logits == -torch.inf).all() and not empty.key_mass.any() and empty.entropy.shape == (1, 2, 0)


GRADIENTS = ("q", "k", "v", "bias", "alibi_slopes", "learnable_sink")


@pytest.mark.parametrize("wanted", sliced([(name,) for name in GRADIENTS] + [("k", "bias"), ("q", "alibi_slopes")]), ids="-".join)
def test_only_needed_gradients_are_computed(wanted):
    """Each gradient is the same when it is asked for alone: the kernels leave out what nobody wants."""
    arguments = helpers.make_inputs(batch=1, heads=2, seqlen_q=20)
    arguments |= {"bias": torch.randn(1, 1, 1, 20), "alibi_slopes": torch.rand(2), "learnable_sink": torch.randn(2)}
    leaves = {name: arguments[name].clone().requires_grad_() for name in GRADIENTS}
    out, _ = triton_attention(**leaves)
    dout = torch.randn_like(out)
    everything = dict(zip(GRADIENTS, torch.autograd.grad(out, list(leaves.values()), dout), strict=True))
    some = {name: x.detach().requires_grad_(name in wanted) for name, x in leaves.items()}
    alone = torch.autograd.grad(triton_attention(**some)[0], [some[name] for name in wanted], dout)
    for name, gradient in zip(wanted, alone, strict=True):
        assert torch.equal(gradient, everything[name]), name


@pytest.mark.parametrize("block_m, block_n", sliced([(16, 16), (64, 32), (32, 64)]))
def test_tile_status(block_m, block_n):
    """What programs show in tiles, against torch's evaluation of the same programs: in a band, per item and head, with captured tensors."""
    from tilewise import tile_status
    from tilewise.kernels.triton.tile_status import evaluate

    ids = torch.arange(50) // 15
    rules = (
        masks.SlidingWindow(33, 2),
        masks.Dilated(3, 30) | masks.FirstKeys(20),
        masks.Custom(lambda b, h, q, k: (q - k + 7 * h + 3 * b) % 40 < 20),
        masks.Custom(lambda b, h, q, k: (ids[k] == b) & (q >= 0)),
        masks.Full(),
    )
    for rule in rules:
        grid = tile_status.Grid(70, 50, block_m, block_n, *rule.implied_window())
        text, captured = rule.program(70, 50)
        status = torch.full((2, 2, grid.rows, grid.width), tile_status.UNKNOWN, dtype=torch.uint8)
        status[1, 1, 0] = tile_status.PARTIAL  # what is known stays
        found = evaluate(text, captured, status, grid)
        assert torch.equal(found, tile_status._evaluate_unknown(text, captured, status, grid)), rule


LIST_SIZES = [(100, 60, 32, 16), (40, 75, 16, 32), (1, 70, 16, 16)]


@pytest.mark.parametrize("sizes", sliced(LIST_SIZES), ids=str)
def test_building_lists(sizes):
    """Statuses from ranges, and the lists from statuses and from windows alone, against torch's."""
    from tilewise import tile_lists, tile_status
    from tilewise.kernels.triton.tile_lists import build
    from tilewise.kernels.triton.tile_status import of_ranges

    def same(status: Tensor | None, grid: tile_status.Grid, expected: list[Tensor]) -> None:
        found = tile_lists._allocate(torch.empty(0) if status is None else status, status is None, *grid.numbers)
        build(status, grid, found)
        for number, index, wanted_number, wanted in zip(found[::2], found[1::2], expected[::2], expected[1::2], strict=True):
            assert torch.equal(number, wanted_number), grid
            listed = torch.arange(index.shape[3]) < number[..., None]
            listed_wanted = torch.arange(wanted.shape[3]) < number[..., None]
            assert torch.equal(index[listed], wanted[listed_wanted]), grid
            assert index.sort(3).values.diff(dim=3).gt(0).all() and index.ge(0).all()  # every block of the band stands in it once

    size_q, size_k, *blocks = sizes
    for window in ((-1, -1), (-1, 0), (20, 5), (3, -1), (1 << 40, 2)):
        grid = tile_status.Grid(size_q, size_k, *blocks, *window)
        same(None, grid, tile_lists._of_window(grid, torch.device("cpu")))
    ids = torch.stack([torch.arange(size_k) // 25, torch.arange(size_k) // 40])
    rules = (
        masks.Chunked(30),
        masks.Causal() & masks.Chunked(20),
        masks.Causal(align="top_left") & masks.SlidingWindow(30, -1),
        masks.PrefixLM(torch.tensor([3, 40])),
        masks.PrefixLM(spans=torch.tensor([[[3, 9], [30, 60]]])),
        masks.Document(ids[:, torch.arange(size_q) % size_k].sort(1).values, ids, _ascending=True) & masks.Causal(),
    )
    for rule in rules:
        grid = tile_status.Grid(size_q, size_k, *blocks, *rule.implied_window())
        q_idx = torch.arange(size_q)
        ranges = torch.broadcast_tensors(*rule.row_ranges(q_idx, (q_idx + grid.offset)[None], size_k))
        status = tile_status._of_ranges(*ranges, grid)
        assert torch.equal(of_ranges(*ranges, grid), status), rule
        same(status, grid, tile_lists._of_status(status, grid))
    grid = tile_status.Grid(size_q, size_k, *blocks)
    status = torch.randint(0, 3, (2, 3, grid.rows, grid.columns), dtype=torch.uint8)
    same(status, grid, tile_lists._of_status(status, grid))


BIAS_SHAPES = [(), (2, 1, 1), (1, 1, 36), (20, 1), (20, 36), (2, 1, 20, 36), (2, 20, 36), (2, 2, 20, 36)]


@pytest.mark.parametrize("shape", sliced(BIAS_SHAPES), ids=str)
def test_bias_gradient_of_every_broadcast_shape(shape):
    check({**helpers.make_inputs(heads=2, seqlen_q=20, seqlen_k=36), "bias": torch.randn(shape), "causal": True})


def hidden_nan(**changes) -> dict:
    """Keys and queries that nothing sees hold NaN and infinity; what remains is compared with the same call on clean inputs."""
    arguments = helpers.make_inputs(batch=1, heads=2, seqlen_q=40, seqlen_k=70)
    return arguments | changes


def lengths(n: int) -> Tensor:
    return torch.tensor([n], dtype=torch.int32)


HIDDEN = {
    "mask": (hidden_nan(mask=torch.arange(70) % 3 != 1), slice(0), slice(1, None, 3)),
    "bias": (hidden_nan(bias=torch.where(torch.arange(70) % 3 != 1, 0.0, -torch.inf)), slice(0), slice(1, None, 3)),
    "lengths": (hidden_nan(seqused_q=lengths(33), seqused_k=lengths(41)), slice(33, None), slice(41, None)),
    "window": (hidden_nan(window_size=(9, 5)), slice(0), slice(0, 20)),
    "softcap": (hidden_nan(mask=torch.arange(70) % 3 != 1, softcap=2.0), slice(0), slice(1, None, 3)),
}  # fmt: skip


@pytest.mark.parametrize("how,asked", sliced([(how, True) for how in HIDDEN] + [("mask", False)]))
def test_hidden_values_reach_nothing(how, asked, monkeypatch):
    """Where the flag says that there is something to hide, and where a small call hides without asking."""
    if not asked:
        monkeypatch.setattr("tilewise.kernels.triton.finite.LEAST_WORK", 1 << 40)
    arguments, queries, keys = HIDDEN[how]
    spoiled = {name: x.clone() if isinstance(x, Tensor) else x for name, x in arguments.items()}
    spoiled["k"][:, keys], spoiled["v"][:, keys], spoiled["q"][:, queries] = float("nan"), float("inf"), float("nan")
    dout = torch.randn(1, 40, 2, 16)
    spoiled_dout = dout.clone()
    spoiled_dout[:, queries] = float("nan")
    clean, got = (
        helpers.run_with_grads(triton_attention, given, cotangent) for given, cotangent in ((arguments, dout), (spoiled, spoiled_dout))
    )
    for one, other in zip((clean.out, clean.lse, *clean.grads.values()), (got.out, got.lse, *got.grads.values()), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", sliced([torch.float16, torch.bfloat16, torch.float32]), ids=str)
def test_the_flag_finds_every_value_that_is_not_finite(dtype):
    from tilewise.kernels.triton.finite import nonfinite_flag

    largest = torch.finfo(dtype).max
    wide = torch.full((2, 70, 2, 2 * 33), float("nan"), dtype=dtype)
    x = wide[..., ::2].transpose(1, 2)  # what lies between the elements is not read
    x.copy_(torch.randn(x.shape) * 1e-3 + largest)
    clean = torch.zeros(1, 1, 5, 16, dtype=dtype)
    assert x.isfinite().all() and nonfinite_flag(x, clean).tolist() == [0] and nonfinite_flag(x[:, :, :0]).tolist() == [0]
    for value, place in ((float("nan"), (1, 1, 69, 32)), (float("inf"), (0, 0, 0, 0)), (-float("inf"), (1, 0, 64, 7))):
        spoiled = x.clone()
        spoiled[place] = value
        assert nonfinite_flag(clean, spoiled, clean).tolist() == [1]


def test_each_launch_under_the_flag_does_all_of_the_work_or_none(monkeypatch):
    """With a flag that lies, hidden NaN shows and hidden numbers do not: the branch that the flag names is the one that ran."""
    from tilewise.kernels.triton import forward_pass

    arguments, _, keys = HIDDEN["mask"]
    spoiled = arguments | {"v": arguments["v"].clone()}
    spoiled["v"][:, keys] = float("nan")
    want = triton_attention(**arguments)[0]
    for flag, given, same in ((0, spoiled, False), (1, spoiled, True), (0, arguments, True), (1, arguments, True)):
        monkeypatch.setattr(forward_pass, "nonfinite_flag", lambda v, flag=flag: torch.tensor([flag], dtype=torch.int32))
        assert torch.equal(triton_attention(**given)[0], want) == same


PACKED = ["causal_window_softcap", "alibi_of_sequences", "bias_shared", "bias_of_keys", "bias_of_queries", "bias_of_sequences"]
PACKED += ["bias_of_heads", "mask", "dropout", "lengths", "documents", "score_mod"]


@pytest.mark.parametrize("name", sliced(PACKED))
def test_packed_sequences(name):
    packed.check(packed.build(name, torch.float32, size=packed.SMALL), "triton")


@pytest.mark.parametrize("name", sliced(["causal", "lengths"]))
def test_packed_sequences_float16(name):
    packed.check(packed.build(name, torch.float16, size=packed.SMALL), "triton")


@pytest.mark.parametrize("over_keys", sliced([False, True]))
@pytest.mark.parametrize("sequences", [1, 65])
def test_every_packed_row_is_in_one_tile(over_keys, sequences):
    """Whatever the offsets hold, the records stay inside, cover every row once, and put the furthest walks first."""
    from tilewise.kernels.triton import packed as kernels_packed
    from tilewise.kernels.triton.launch import Launch
    from tilewise.plan import Operands, Rules

    for lowest, highest in ((0, 200), (-50, 300)):
        cu_q, cu_k = (torch.randint(lowest, highest, (sequences + 1,), dtype=torch.int32) for _ in range(2))
        if lowest == 0:
            cu_q, cu_k = cu_q.sort().values, cu_k.sort().values
        q, k = torch.zeros(1, 1, 200, 8), torch.zeros(1, 1, 190, 8)
        call = Launch(Operands(q, k, k, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k), Rules(1.0))
        tiles, records = kernels_packed.scheduled(call, 16, over_keys, with_sequences=True)
        total = 190 if over_keys else 200
        covered, walks = torch.zeros(total, dtype=torch.int32), []
        *described, (count, *_) = tiles.records.tolist()
        for b, row0, first_q, rows_q, len_q, first_k, rows_k, len_k in described:
            if b < 0:
                continue
            first, rows = (first_k, rows_k) if over_keys else (first_q, rows_q)
            assert 0 <= row0 < rows and first + rows <= total
            covered[first + row0 : first + min(row0 + 16, rows)] += 1
            walks.append(len_q if over_keys else len_k)
        assert (covered == 1).all()
        assert walks == sorted(walks, reverse=True)
        assert count == len(walks) and len(described) - count <= sequences + 2
        assert all(b < 0 for b, *_ in described[count:])
        starts = [x.long().clamp(0, n).cummax(0).values for x, n in ((cu_q, 200), (cu_k, 190))]
        assert torch.equal(records[:, 2].long(), starts[0][:-1]) and torch.equal(records[:, 6].long(), starts[1].diff())


@pytest.mark.parametrize("causal", sliced([False, True]))
def test_listed_tiles_come_by_falling_cost(causal):
    """Every tile once, with the row of its lists, and under a causal window only the blocks that its last query reaches."""
    from tilewise.kernels.hopper.list_records import ranked

    blocks, columns, share = 45, 7, 2
    tiles = blocks * share - 1
    bits = torch.rand(2, 1, blocks, columns, 2) < 0.5  # partial and full

    def compacted(kind):
        listed = bits[..., kind]
        return listed.sum(-1, dtype=torch.int32), listed.int().argsort(dim=-1, descending=True, stable=True).int()

    lists = (*compacted(0), *compacted(1))
    records = ranked(lists, tiles, share, (-3, 1) if causal else None)
    for head in range(2):
        found = records[head, 0].tolist()
        assert sorted(t for t, *_ in found) == list(range(tiles))
        costs = [cut + whole for _, cut, whole, _ in found]
        assert costs == sorted(costs, reverse=True)
        for t, cut, whole, row in found:
            seen = bits[head, 0, t // share, : max(t - 3, 0) if causal else columns]
            assert (cut, whole) == tuple(seen.sum(0).tolist()) and row == head * blocks + t // share


@pytest.mark.parametrize(
    "offset, owners, heads", sliced([(None, (1, 1), (2, 1)), (3, (1, 2), (1, 2)), (-2, (2, 1), (2, 1)), (3, (2, 4), (2, 2))])
)
def test_listed_tiles_of_keys_come_by_falling_cost(offset, owners, heads):
    """Those of a key head by what all its query heads visit, each with lists of its own, from the first block that the diagonal leaves."""
    from tilewise.kernels.hopper.list_records import ranked_keys

    blocks, rows, share, batch, heads_k, group = 35, 9, 2, 2, *heads
    tiles = blocks * share - 1
    bits = torch.rand(*owners, blocks, rows, 2) < 0.5  # partial and full

    def compacted(kind):
        listed = bits[..., kind]
        return listed.sum(-1, dtype=torch.int32), listed.int().argsort(dim=-1, descending=True, stable=True).int()

    lists = (*compacted(0), *compacted(1))
    records = ranked_keys(lists, batch, heads_k, group, tiles, share, offset)
    for b, head_k in itertools.product(range(batch), range(heads_k)):
        found = records[b, head_k].tolist()
        assert sorted(t for t, *_ in found) == list(range(tiles))
        costs = [cost for _, cost, *_ in found]
        assert costs == sorted(costs, reverse=True)
        for t, cost, *fields in found:
            for g in range(group):
                counts, starts = fields[4 * g : 4 * g + 2], fields[4 * g + 2 : 4 * g + 4]
                owner = b % owners[0], (head_k * group + g) % owners[1], t // share
                first = 0 if offset is None else min(max(t // share - offset, 0), rows)
                for kind in range(2):
                    start = starts[kind]
                    visited = lists[2 * kind + 1].flatten()[start : start + counts[kind]].tolist()
                    assert visited == [first + x for x in bits[owner][first:, kind].nonzero().flatten().tolist()]
                    cost -= counts[kind]
            assert cost == 0


def test_scores_near_the_largest_float_survive_a_bias():
    """Subtracting the maximum comes before the change of base: 3e38 * log2(e) would be infinite. A finite minimum hides nothing."""
    arguments = helpers.make_inputs(batch=1, heads=1, seqlen_q=5, seqlen_k=40)
    for level in (3.0e38, torch.finfo(torch.float32).min):
        out, _ = triton_attention(**arguments, bias=torch.full((5, 40), level))
        torch.testing.assert_close(out, arguments["v"].mean(1, keepdim=True).expand_as(out), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("low", [torch.finfo(torch.float32).min, -1e9])
def test_a_row_of_low_finite_biases_has_the_gradients_of_its_average(low):
    """Its LSE has lost the logarithm of the number of keys; probabilities must sum to 1 all the same."""
    arguments = helpers.make_inputs(batch=1, heads=1, seqlen_q=3, seqlen_k=40)
    bias = torch.zeros(3, 40)
    bias[0] = low
    check({**arguments, "bias": bias})


@pytest.mark.parametrize("seqlen", [1, 40])
def test_products_far_outside_the_exponent_range(seqlen):
    """Equal keys give equal weights however large the scores: rounding the maximum in base 2 must not reach the exponentials."""
    x = torch.full((1, seqlen, 1, 64), 60000.0, dtype=torch.float16)
    out, lse = triton_attention(q=x, k=x, v=x)
    assert torch.equal(out, x)
    torch.testing.assert_close(lse, torch.full_like(lse, 64 * 60000.0**2 / 8.0))


def test_sequence_lengths_do_not_reach_the_compiled_kernel():
    """No runtime number may be specialised: Triton would compile anew for a length of 1 or one that 16 divides."""
    from tilewise.kernels.triton import bias_gradient, dkdv, dq, finite, forward_pass, key_mass, launch, lse_rest, row_terms
    from tilewise.kernels.triton import packed as kernels_packed

    modules = (bias_gradient, dkdv, dq, forward_pass, lse_rest, row_terms, kernels_packed, kernels_packed, finite, key_mass)
    names = ("bias_gradient", "attention_dkdv", "attention_dq", "attention_forward", "lse_rest", "row_terms", "schedule", "sum_rows")
    names += ("find_nonfinite", "key_mass")
    for kernel in map(getattr, modules, names):
        names = [name for name, kind in kernel.fn.__annotations__.items() if kind == "tl.constexpr"]
        runtime = [n for n in kernel.arg_names if n not in names and not n.endswith(("_ptr", "_ref"))]
        floats = {"scale", "unit", "unit_exact", "softcap", "keep_scale", "lse_scale"}
        assert set(runtime) - floats <= set(launch.RUNTIME), kernel


def test_tensors_whose_sign_is_still_to_be_turned():
    """The memory of ``z.conj().imag`` holds the opposite of what it means."""
    q, dout = (torch.randn(1, 5, 2, 16, dtype=torch.complex64).conj().imag for _ in range(2))
    bias = torch.randn(5, 7, dtype=torch.complex64).conj().imag
    k = torch.randn(1, 7, 2, 16, requires_grad=True)
    assert q.is_neg() and dout.is_neg() and bias.is_neg()
    results = []
    for x, b, g in ((q, bias, dout), (q.resolve_neg(), bias.resolve_neg(), dout.resolve_neg())):
        out = tilewise.attention(x, k, k, bias=b, backend="triton")
        results.append((out, *torch.autograd.grad(out, k, g)))
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("transform", sliced([torch.func.jacrev, torch.func.jacfwd]), ids=lambda f: f.__name__)
def test_jacobians(transform):
    """Every row of a Jacobian is a sample of its own; all share one forward pass, whose results have a stride of 0 over the samples."""
    x = [torch.randn(1, size, heads, 4) for size, heads in ((2, 2), (3, 1), (3, 1))]

    def call(backend: str, *x: Tensor) -> tuple[Tensor, Tensor]:
        out, aux = tilewise.attention(*x, causal=True, backend=backend, return_aux="lse")
        return out, aux.lse

    got = transform(partial(call, "triton"), argnums=(0, 1, 2))(*x)
    exact = transform(partial(call, "reference"), argnums=(0, 1, 2))(*(t.double() for t in x))
    for a, b in zip(torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(exact), strict=True):
        torch.testing.assert_close(a, b.float(), rtol=1e-5, atol=1e-6)


def behind(x: Tensor, how: str) -> Tensor:
    """x with every second element of a larger tensor, in the opposite order of dimensions, or its first element for all."""
    if how == "steps":
        wide = torch.full([2 * n + 1 for n in x.shape], 99).to(x.dtype)
        inside = wide[tuple(slice(1, None, 2) for _ in x.shape)]
        return inside.copy_(x)
    if how == "turned":
        return x.permute(*reversed(range(x.ndim))).contiguous().permute(*reversed(range(x.ndim)))
    return x.reshape(-1)[:1].view((1,) * x.ndim).expand(x.shape)


I32 = torch.int32
STRIDED = {
    "dense": lambda: dict(
        q=torch.randn(2, 3, 2, 4), k=torch.randn(2, 5, 1, 4), v=torch.randn(2, 5, 1, 3), bias=torch.randn(2, 2, 3, 5),
        mask=torch.rand(2, 2, 3, 5) < 0.8, alibi_slopes=torch.rand(2, 2), learnable_sink=torch.randn(2), table=torch.randn(2, 5),
        seqused_q=torch.tensor([3, 2], dtype=I32), seqused_k=torch.tensor([4, 5], dtype=I32),
    ),
    "packed": lambda: dict(
        q=torch.randn(5, 2, 4), k=torch.randn(8, 1, 4), v=torch.randn(8, 1, 3), bias=torch.randn(2, 2, 3, 5), table=torch.randn(2, 5),
        mask=torch.rand(2, 2, 3, 5) < 0.8, alibi_slopes=torch.rand(2, 2), learnable_sink=torch.randn(2),
        seqused_q=torch.tensor([3, 1], dtype=I32), seqused_k=torch.tensor([3, 4], dtype=I32),
        cu_seqlens_q=torch.tensor([0, 3, 5], dtype=I32), cu_seqlens_k=torch.tensor([0, 4, 8], dtype=I32),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind,how", sliced([("dense", "steps"), ("dense", "shared"), ("packed", "turned")]))
def test_every_tensor_behind_strides(kind, how):
    """The gradients that arrive and captured tensors, too: only the values matter."""
    call = partial(tilewise.attention_varlen, max_seqlen_q=3, max_seqlen_k=5) if kind == "packed" else tilewise.attention
    given = STRIDED[kind]()
    shapes = ((5, 2, 3), (2, 5)) if kind == "packed" else ((2, 3, 2, 3), (2, 2, 3))
    given |= {name: torch.randn(shape) for name, shape in zip(("dout", "dlse"), shapes, strict=True)}
    strided = {name: x if how == "shared" and name.startswith("cu_") else behind(x, how) for name, x in given.items()}
    results = []
    for tensors in (strided, {name: x.clone(memory_format=torch.contiguous_format) for name, x in strided.items()}):
        leaves = {name: x.detach().requires_grad_(x.is_floating_point()) for name, x in tensors.items()}
        dout, dlse, table = (leaves.pop(name) for name in ("dout", "dlse", "table"))
        out, aux = call(**leaves, score_mod=lambda s, b, h, i, j, table=table: s + table[h, j], backend="triton", return_aux="lse")
        wanted = [x for x in (*leaves.values(), table) if x.requires_grad]
        results.append((out, aux.lse, *torch.autograd.grad((out, aux.lse), wanted, (dout.detach(), dlse.detach()))))
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)


FEW_PROGRAMS = [name for name, build in public_faults.CASES.items() if build().arguments["q"].shape[0::2].numel() <= 2]


@pytest.mark.parametrize("name", sliced(FEW_PROGRAMS))
def test_faults_of_other_libraries(name):
    """Calls that other libraries were reported to get wrong, against the answer that each brings along."""
    test_public_faults.check(public_faults.CASES[name](), torch.float32, "triton")
