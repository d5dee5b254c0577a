"""Public reports of faults in other attention libraries, as inputs to this one: empty rows, extreme values, alignment.

The number of the report is in the test's id. Each test covers neighbours too: dtypes, the output, the LSE and every gradient.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional

from tilewise import attention

from .comparing import compare
from .helpers import make_inputs, reference_with_grads, run_with_grads
from .reports import I32, LOW_DTYPES, NEG_INF, both_backends, dtypes, report

# ----------------------------------------------------------------- A. empty rows, log-sum-exp, NaN hygiene


@report(1)
@dtypes
@both_backends
def test_rows_that_a_mask_hides_are_zero(report: str, dtype: torch.dtype, backend: str) -> None:
    x = make_inputs(1, 8, heads=1, head_dim=8, dtype=dtype)
    mask = torch.ones(8, 8, dtype=torch.bool)
    mask[4:] = False
    got = compare({**x, "mask": mask}, backend)
    assert (got["out"][:, 4:] == 0).all() and (got["lse"][..., 4:] == NEG_INF).all() and (got["dq"][:, 4:] == 0).all()


@report(2)
@dtypes
@both_backends
def test_a_padded_item_leaves_its_neighbour_alone(report: str, dtype: torch.dtype, backend: str) -> None:
    x = make_inputs(2, 4, heads=1, head_dim=8, dtype=dtype)
    mask = torch.tensor([True, False]).view(2, 1, 1, 1).expand(2, 1, 1, 4)
    leaves = [t.requires_grad_() for t in x.values()]
    attention(*leaves, mask=mask, backend=backend)[0].sum().backward()
    alone = [t.detach()[:1].requires_grad_() for t in leaves]
    attention(*alone, backend=backend).sum().backward()
    for padded, single in zip(leaves, alone, strict=True):
        torch.testing.assert_close(padded.grad[:1], single.grad)
        assert (padded.grad[1] == 0).all()


@report(4)
@both_backends
@dtypes
def test_a_row_of_finfo_min_is_finite(report: str, dtype: torch.dtype, backend: str) -> None:
    x = make_inputs(1, 3, 4, heads=1, head_dim=8, dtype=dtype)
    bias = torch.ones(3, 4, dtype=dtype)
    bias[0] = torch.finfo(dtype).min
    leaves = [t.requires_grad_() for t in (*x.values(), bias)]
    out = attention(*leaves[:3], bias=bias, backend=backend)
    torch.testing.assert_close(out[:, 1:], attention(*leaves[:3], backend=backend)[:, 1:], rtol=2e-2, atol=2e-2)
    assert out.isfinite().all()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), leaves))


@report(4)
@both_backends
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("low", ["finfo.min", "-1e9", "-1e30"])
def test_a_row_of_low_finite_biases_has_the_gradients_of_its_average(report: str, low: str, dtype: torch.dtype, backend: str) -> None:
    """The LSE of such a row rounds away the logarithm of the number of keys; the probabilities in backward must sum to 1 all the same."""
    x = make_inputs(1, 3, 40, heads=1, head_dim=8, dtype=dtype)
    bias = torch.zeros(3, 40, dtype=dtype)
    bias[0] = torch.finfo(dtype).min if low == "finfo.min" else float(low)
    compare({**x, "bias": bias}, backend, with_lse=False)


@report(5)
@both_backends
@dtypes
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("how", ["mask", "length", "causal"])
def test_a_hidden_key_poisons_nothing(report: str, how: str, poison: float, dtype: torch.dtype, backend: str) -> None:
    x = make_inputs(1, 2, heads=1, head_dim=8, dtype=dtype)
    hidden = 1
    options: dict[str, Any] = {"mask": torch.tensor([True, False])}
    if how == "length":
        options = {"seqused_k": torch.tensor([1], dtype=I32)}
    if how == "causal":  # one more key than any query sees
        options = {"window_size": (-1, -1), "mask": torch.ones(2, 3).tril().bool()}
        x |= {name: functional.pad(x[name], (0, 0, 0, 0, 0, 1)) for name in ("k", "v")}
        hidden = 2
    clean = run_with_grads(lambda **a: (attention(**a, backend=backend), torch.zeros(())), {**x, **options}, torch.ones_like(x["q"]))
    for name in ("k", "v"):
        x[name] = x[name].clone()
        x[name][:, hidden] = poison
    poisoned = run_with_grads(lambda **a: (attention(**a, backend=backend), torch.zeros(())), {**x, **options}, torch.ones_like(x["q"]))
    assert torch.equal(clean.out, poisoned.out)
    for name, grad in clean.grads.items():
        assert torch.equal(grad, poisoned.grads[name]), name


@report(7)
@both_backends
@pytest.mark.parametrize("via", ["bias", "mask", "window"])
@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
def test_leading_key_blocks_hidden_from_later_rows(report: str, dtype: torch.dtype, via: str, backend: str) -> None:
    """A band: for late rows whole blocks of keys come first in which every score is -inf."""
    x = make_inputs(1, 640, heads=1, head_dim=4, dtype=dtype)
    band = torch.ones(640, 640).tril().triu(-9).bool()
    options: dict[str, Any] = {"bias": torch.zeros(640, 640, dtype=dtype).masked_fill(~band, NEG_INF)}
    if via == "mask":
        options = {"mask": band}
    if via == "window":
        options = {"window_size": (9, 0)}
    compare({**x, **options}, backend)


@report(8)
@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
def test_blocks_equal_separate_calls(report: str, dtype: torch.dtype, small_tiles: None) -> None:
    x = make_inputs(1, 75, heads=2, head_dim=20, dtype=dtype)
    blocks = [(0, 16), (16, 32), (32, 48), (68, 75)]
    mask = torch.zeros(75, 75, dtype=torch.bool)
    for a, b in blocks:
        mask[a:b, a:b] = True
    got = compare({**x, "mask": mask}, "tiled")
    for a, b in blocks:
        alone = attention(*(t[:, a:b] for t in x.values()), backend="tiled")
        torch.testing.assert_close(got["out"][:, a:b], alone)
    assert (got["out"][:, 48:68] == 0).all() and (got["dk"][:, 48:68] == 0).all()


@report(10)
@dtypes
def test_document_resets_in_an_additive_bias(report: str, dtype: torch.dtype, small_tiles: None) -> None:
    x = make_inputs(1, 64, heads=1, head_dim=32, dtype=dtype)
    document = torch.arange(64) // 16
    visible = (document[:, None] == document) & torch.ones(64, 64).tril().bool()
    bias = torch.zeros(1, 1, 64, 64, dtype=dtype).masked_fill(~visible, NEG_INF)
    got = compare({**x, "bias": bias}, "tiled")
    assert (got["dbias"][0, 0][~visible] == 0).all()


@report(11, 13)
@both_backends
@dtypes
@pytest.mark.parametrize("why", ["no_keys", "more_queries", "mask", "window", "length"])
def test_attention_over_no_keys_has_one_meaning(report: str, why: str, dtype: torch.dtype, backend: str) -> None:
    x = make_inputs(2, 4, 0 if why == "no_keys" else 3, heads=2, head_dim=8, dtype=dtype)
    options: dict[str, dict[str, Any]] = {
        "no_keys": {},
        "more_queries": {"mask": torch.zeros(4, 1).bool(), "causal": True},
        "mask": {"mask": torch.zeros(2, 1, 1, 3).bool()},
        "window": {"window_size": (0, 0), "seqused_k": torch.zeros(2, dtype=I32)},
        "length": {"seqused_k": torch.zeros(2, dtype=I32)},
    }
    leaves = [t.requires_grad_() for t in x.values()]
    out, aux = attention(*leaves, **options[why], backend=backend, return_aux="lse")
    assert (out == 0).all() and (aux.lse == NEG_INF).all()
    for grad in torch.autograd.grad([out, aux.lse], leaves, [torch.ones_like(out), torch.ones_like(aux.lse)]):
        assert (grad == 0).all()


@report(14)
@both_backends
@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
@pytest.mark.parametrize("size", [16, 300])
def test_very_low_logits_are_no_sentinel(report: str, dtype: torch.dtype, size: int, backend: str) -> None:
    q = torch.full((1, 3, 1, 64), -87.0, dtype=dtype)
    k = torch.full((1, size, 1, 64), 87.0, dtype=dtype)
    v = torch.randn(1, size, 1, 64).to(dtype)
    out, aux = attention(q, k, v, backend=backend, return_aux="lse")
    torch.testing.assert_close(out.float(), v.float().mean(1, keepdim=True).expand_as(out), rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(aux.lse, torch.full_like(aux.lse, -87.0 * 87.0 * 8 + math.log(size)))


@report(16)
@both_backends
def test_deterministic_mode_changes_no_number(report: str, backend: str) -> None:
    """That mode fills new buffers with NaN: nothing may be read before it is written, or left unwritten."""
    x = make_inputs(2, 64, heads=2, head_dim=16)
    lengths = torch.tensor([64, 60], dtype=I32)
    results = []
    for mode in (False, True):
        torch.use_deterministic_algorithms(mode)
        leaves = [t.detach().clone().requires_grad_() for t in x.values()]
        with torch.autocast("cpu", torch.bfloat16):
            out = attention(*leaves, seqused_q=lengths, seqused_k=lengths, backend=backend)
        results.append([out, *torch.autograd.grad(out.sum(), leaves)])
    for plain, deterministic in zip(*results, strict=True):
        torch.testing.assert_close(plain, deterministic)
        assert deterministic.isfinite().all()


# ----------------------------------------------------------------- B. extreme values and precision


@report(17)
@both_backends
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1, 5])
def test_very_large_inputs(report: str, dtype: torch.dtype, size: int, backend: str) -> None:
    x = torch.full((1, 1, size, 64), 133120.0, dtype=dtype, requires_grad=True)
    out = attention(x, x, x, layout="bhsd", backend=backend)
    assert (out == 133120.0).all()
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert grad.isfinite().all()


@report(19)
@both_backends
@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
def test_large_identical_keys_have_no_gradient(report: str, dtype: torch.dtype, backend: str) -> None:
    size = 60.0 if dtype == torch.float16 else 125.0
    x = {"q": torch.full((2, 50, 3, 64), size), "k": torch.full((2, 50, 3, 64), size), "v": torch.randn(2, 50, 3, 64)}
    x = {name: t.to(dtype) for name, t in x.items()}
    leaves = [t.requires_grad_() for t in x.values()]
    out = attention(*leaves, backend=backend)
    torch.testing.assert_close(out.float(), x["v"].float().mean(1, keepdim=True).expand_as(out), rtol=1e-2, atol=2e-3)
    dq, dk, dv = torch.autograd.grad(out.sum(), leaves)
    # dS sums to zero over a row of identical keys: what remains in dq is the rounding of out, times the size of the keys.
    assert dq.abs().max() <= size * 64 * torch.finfo(dtype).eps
    exact = reference_with_grads({name: t.detach() for name, t in x.items()}, torch.ones_like(out)).grads
    for grad, name in ((dk, "k"), (dv, "v")):
        assert (grad - exact[name]).abs().max() <= 0.05 * exact[name].abs().max(), name


# ----------------------------------------------------------------- C. causal alignment, windows, ALiBi


@report(34, 35, 37)
@both_backends
@dtypes
@pytest.mark.parametrize("size", [(2, 5), (1, 8), (5, 2), (3, 7), (70, 33), (33, 70), (2048 // 32, 1024 // 32)], ids=str)
def test_causal_with_unequal_lengths(report: str, size: tuple[int, int], dtype: torch.dtype, backend: str) -> None:
    sq, sk = size
    x = make_inputs(1, sq, sk, heads=2, head_dim=8, dtype=dtype)
    got = compare({**x, "causal": True}, backend)
    empty = max(sq - sk, 0)
    assert (got["out"][:, :empty] == 0).all() and (got["lse"][..., :empty] == NEG_INF).all() and (got["dq"][:, :empty] == 0).all()
    assert got["lse"][..., empty:].isfinite().all()


@report(38)
@both_backends
@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
def test_a_window_as_wide_as_the_keys_is_causal(report: str, dtype: torch.dtype, backend: str) -> None:
    x = make_inputs(1, 256, heads=1, head_dim=32, dtype=dtype)
    compare({**x, "causal": True}, backend)
    for window in ((-1, 0), (256, 0), (255, 0)):
        compare({**x, "window_size": window}, backend)


@report(40)
@both_backends
def test_a_window_counts_keys_inclusively(report: str, backend: str) -> None:
    q = k = torch.zeros(1, 8, 1, 8)
    v = torch.eye(8).view(1, 8, 1, 8)
    seen = attention(q, k, v, causal=True, window_size=(3, -1), backend=backend)[0, :, 0] > 0
    for i in range(8):
        assert seen[i].nonzero().flatten().tolist() == list(range(max(0, i - 3), i + 1))


@report(41)
@pytest.mark.parametrize("window", [(-4, 0), (0, -2), (-2, -1), (-(2**31), 0)], ids=str)
def test_a_negative_window_is_no_unlimited_one(report: str, window: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="window_size"):
        attention(**make_inputs(1, 8, heads=1), window_size=window)


@report(43)
@both_backends
@dtypes
@pytest.mark.parametrize("per_batch", [False, True])
@pytest.mark.parametrize("size", [(5, 9), (9, 5)], ids=str)
def test_alibi_slopes_of_both_shapes(report: str, per_batch: bool, size: tuple[int, int], dtype: torch.dtype, backend: str) -> None:
    x = make_inputs(2, *size, heads=3, head_dim=8, dtype=dtype)
    slopes = (torch.rand(2, 3) if per_batch else torch.rand(3)).to(dtype)
    compare({**x, "alibi_slopes": slopes, "causal": True}, backend)
