"""Public reports of faults in other attention libraries, as inputs to block masks. The number of the report is in the test's id."""

from __future__ import annotations

import itertools

import pytest
import torch

from tilewise import BlockMask, attention, masks
from tilewise.compat.flex import create_block_mask, flex_attention

from .comparing import compare
from .helpers import make_inputs
from .reports import LOW_DTYPES, NEG_INF, report


def pieces(bounds: list[tuple[int, int]]) -> masks.Mask:
    """Blocks on the diagonal, everything else hidden."""

    def inside(b, h, q, k):
        seen = (q >= bounds[0][0]) & (q < bounds[0][1]) & (k >= bounds[0][0]) & (k < bounds[0][1])
        for start, stop in bounds[1:]:
            seen = seen | ((q >= start) & (q < stop) & (k >= start) & (k < stop))
        return seen

    return masks.Custom(inside)


# ------------------------------------------------------------------------------------------- A. empty rows, NaN hygiene


@report(1, 2, 13)
@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
def test_rows_and_items_without_a_tile_are_zero(report: str, dtype: torch.dtype) -> None:
    x = make_inputs(2, 48, heads=1, head_dim=8, dtype=dtype)
    bits = torch.ones(2, 1, 3, 3, dtype=torch.bool)
    bits[0, :, 1], bits[1] = False, False
    got = compare({**x, "mask": BlockMask(masks.Blocks(bits, 16), 48, block_size=16)})
    assert not got["out"][1].any() and not got["out"][0, 16:32].any() and (got["lse"][1] == NEG_INF).all()
    assert not any(got[name][1].any() for name in ("dq", "dk", "dv"))


@report(5)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_in_empty_and_in_partial_tiles_stay_hidden(report: str, value: float) -> None:
    x = make_inputs(1, 48, heads=1, head_dim=8, dtype=torch.float32)
    rule = masks.Custom(lambda b, h, q, k: (k != 5) & (k < 32))
    mask = BlockMask(rule, 48, block_size=16)
    assert mask.counts() == {"empty": 3, "partial": 3, "full": 3}
    clean = compare({**x, "mask": mask})
    for name in ("k", "v"):
        x[name][:, 5], x[name][:, 32:] = value, value
    for name, grad in compare({**x, "mask": mask}).items():
        assert torch.equal(grad, clean[name]), name


@report(7)
def test_a_band_whose_leading_tiles_are_hidden_from_later_rows(report: str) -> None:
    x = make_inputs(1, 640, heads=1, head_dim=4, dtype=torch.float32)
    rule = masks.Custom(lambda b, h, q, k: (k <= q) & (k > q - 10))
    mask = BlockMask(rule, 640, block_size=64)
    assert mask.counts()["empty"] == 81
    compare({**x, "mask": mask})


@report(8, 10)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_each_block_on_the_diagonal_is_attention_of_its_own(report: str, dtype: torch.dtype) -> None:
    bounds = [(0, 128), (128, 256), (256, 384), (543, 600)]
    q, k, v = torch.randn(3, 1, 600, 2, 40).to(dtype)
    for block_size in (128, 64, 16):
        out = attention(q, k, v, mask=BlockMask(pieces(bounds), 600, block_size=block_size))
        for start, stop in bounds:
            part = slice(start, stop)
            torch.testing.assert_close(out[:, part], attention(q[:, part], k[:, part], v[:, part]), rtol=1e-2, atol=1e-2)
        assert not out[:, 384:543].any()


@report(25)
@pytest.mark.parametrize("keep", [580, 590])
def test_a_long_hidden_tail_costs_no_accuracy(report: str, keep: int) -> None:
    x = {name: 5 * t for name, t in make_inputs(1, 1, 1000, heads=1, head_dim=64, dtype=torch.bfloat16).items()}
    mask = BlockMask(masks.Custom(lambda b, h, q, k: k < keep), 1, 1000)
    assert mask.counts() == {"empty": 3, "partial": 1, "full": 4}
    compare({**x, "mask": mask})


# --------------------------------------------------------------------------------------------------- C. windows, E. strides


@report(38)
def test_windows_that_reach_everything_equal_causal(report: str) -> None:
    q, k, v = torch.randn(3, 1, 256, 1, 16)
    expected = attention(q, k, v, causal=True, backend="tiled")
    for left in (-1, 256, 255):
        mask = BlockMask(masks.SlidingWindow(left, 0), 256, block_size=64)
        mask.verify()
        torch.testing.assert_close(attention(q, k, v, mask=mask, backend="tiled"), expected)


@report(67)
def test_views_with_a_block_mask_equal_their_copies(report: str) -> None:
    q, k, v = torch.randn(3, 2, 2, 100, 8).transpose(2, 3)
    wide = torch.rand(1, 1, 1, 300) < 0.5
    visible = wide.expand(2, 2, 100, 300)[..., ::3]
    out = attention(q, k, v, mask=BlockMask.from_dense(visible, block_size=16))
    assert torch.equal(out, attention(*(x.contiguous() for x in (q, k, v)), mask=BlockMask.from_dense(visible.clone(), block_size=16)))


# ---------------------------------------------------------------------------------------------------------- G. gradients


@report(97)
def test_every_option_with_a_block_mask_is_in_the_backward_pass(report: str) -> None:
    x = make_inputs(1, 40, heads=2, head_dim=8, dtype=torch.float64)
    options = {
        "bias": torch.randn(2, 40, 40, dtype=torch.float64),
        "alibi_slopes": torch.tensor([0.5, 0.25], dtype=torch.float64),
        "score_mod": lambda s, b, h, q, k: s + 0.125 * (q - k),
        "softcap": 2.0,
        "causal": True,
        "learnable_sink": torch.tensor([0.5, -1.0], dtype=torch.float64),
    }
    mask = BlockMask(masks.Custom(lambda b, h, q, k: (q + k) % 37 < 20), 40, block_size=16)
    for pair in itertools.combinations(options, 2):
        compare({**x, "mask": mask, **{name: options[name] for name in pair}})


@report(98, 173)
@pytest.mark.parametrize("dim", [64, 128])
def test_blocks_equal_to_causal_and_to_dense_have_its_gradients(report: str, dim: int) -> None:
    leaves = [t.requires_grad_() for t in make_inputs(1, 256, heads=1, head_dim=dim, dtype=torch.float32).values()]
    everything = torch.ones(1, 1, 2, 2, dtype=torch.bool)
    causal = masks.Custom(lambda b, h, q, k: q >= k)
    for mask, plain in ((masks.Blocks(everything, 128), {}), (BlockMask(causal, 256), {"causal": True})):
        ours, theirs = (attention(*leaves, **given).square().sum() for given in ({"mask": mask}, plain))
        for found, right in zip(torch.autograd.grad(ours, leaves), torch.autograd.grad(theirs, leaves), strict=True):
            torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


@report(55, 104, 139)
def test_a_mask_of_another_length_is_refused(report: str) -> None:
    q, k, v = torch.randn(3, 1, 130, 1, 8)
    mask = BlockMask(masks.Causal(), 4096)
    for call in (lambda: attention(q, k, v, mask=mask), lambda: flex_attention(*(x.mT for x in (q, k, v)), block_mask=mask)):
        with pytest.raises(ValueError, match="built for 4096 queries and 4096 keys"):
            call()
    for n in (1, 17):
        with pytest.raises(ValueError, match=f"has {n} and {n}; build it"):
            attention(q[:, :n], k[:, :n], v[:, :n], mask=BlockMask(masks.Causal(), 20, block_size=16))


@report(109)
def test_keys_that_nobody_attends_have_no_gradient(report: str) -> None:
    x = make_inputs(1, 96, heads=1, head_dim=8, dtype=torch.float32)
    mask = BlockMask(masks.Custom(lambda b, h, q, k: (k % 3 != 0) & (k < 64)), 96, block_size=16)
    got = compare({**x, "mask": mask})
    assert not got["dk"][:, ::3].any() and not got["dv"][:, 64:].any()


@report(110)
def test_a_length_that_is_no_multiple_of_the_tile_with_a_score_function(report: str) -> None:
    x = make_inputs(1, 257, heads=1, head_dim=16, dtype=torch.bfloat16)
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 257, 257, device="cpu")
    compare({**x, "mask": mask, "score_mod": lambda s, b, h, q, k: s + (q - k)})


@report(112)
def test_a_mask_that_was_built_and_not_used_leaves_nothing_behind(report: str) -> None:
    def rule(b, h, q, k):
        return (q >= k) & (q - k < 90)

    BlockMask(masks.Custom(rule), 71, block_size=16)
    x = make_inputs(1, 148, heads=1, head_dim=8, dtype=torch.float32)
    compare({**x, "mask": BlockMask(masks.Custom(rule), 148, block_size=16)})


# ----------------------------------------------------------------------------------------- K. compile, L. memory, M. sparse


@report(146, 148)
def test_masks_over_96000_tokens_are_lists_of_tiles(report: str) -> None:
    bounds = torch.arange(0, 96_001, 6_000)
    for rule, most in ((masks.SlidingWindow(1023, 0), 100_000), (masks.Document.from_cu_seqlens(bounds, 96_000), 750 * 750 * 4)):
        assert sum(x.numel() for x in BlockMask(rule, 96_000).lists.tensors()) <= most


@report(158)
def test_a_block_mask_and_causal_are_joined(report: str) -> None:
    x = make_inputs(1, 40, heads=1, head_dim=8, dtype=torch.float64)
    mask = BlockMask(masks.Custom(lambda b, h, q, k: k >= 0), 40, block_size=16)
    assert mask.counts() == {"empty": 0, "partial": 0, "full": 9}
    torch.testing.assert_close(compare({**x, "mask": mask, "causal": True})["out"], attention(**x, causal=True))


@report(172)
@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
def test_every_block_size_at_a_length_that_is_no_multiple(report: str, block_size: int) -> None:
    torch.manual_seed(block_size)
    count = -(-300 // block_size)
    x = make_inputs(1, 300, heads=1, head_dim=8, dtype=torch.float32)
    bits = torch.rand(1, 1, count, count) < 0.6
    for mask in (masks.Blocks(bits, block_size), BlockMask(masks.Blocks(bits, block_size), 300, block_size=block_size)):
        compare({**x, "mask": mask})
