"""tilewise.compat.flex against the reference and against torch's own flex_attention, on the public examples of both."""

import copy
import inspect

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from tilewise import BlockMask, UnsupportedAttention, masks, reference
from tilewise.compat import flex
from tilewise.compat.flex import AuxRequest, and_masks, create_block_mask, flex_attention, noop_mask, or_masks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
B, H, S, D = 2, 2, 96, 16


def causal(b, h, q, k):
    return q >= k


def window(b, h, q, k):
    return (q - k).abs() <= 20


def prefix(lengths):
    return lambda b, h, q, k: k < lengths[b]


def document(ids):
    return lambda b, h, q, k: ids[q] == ids[k]


def neighbourhood(width, reach):
    """A picture of `width` columns in reading order: rows and columns at most `reach` apart."""
    return lambda b, h, q, k: ((q // width - k // width).abs() <= reach) & ((q % width - k % width).abs() <= reach)


def spans(starts, stops):
    """Both directions inside the pictures of a text, as in Transfusion (Zhou et al. 2024)."""

    def mask_mod(b, h, q, k):
        inside = (q >= starts[0]) & (q < stops[0]) & (k >= starts[0]) & (k < stops[0])
        for start, stop in zip(starts[1:], stops[1:], strict=True):
            inside = inside | ((q >= start) & (q < stop) & (k >= start) & (k < stop))
        return inside

    return mask_mod


def alibi(slopes):
    return lambda score, b, h, q, k: score - slopes[h] * (q - k).abs()


def softcap(score, b, h, q, k):
    return 8.0 * torch.tanh(score / 8.0)


def relative_table(table):
    return lambda score, b, h, q, k: score + table[h, q - k + S - 1]


IDS = torch.arange(S) // 37
EXAMPLES = {
    "noop": (noop_mask, None),
    "causal": (causal, None),
    "window": (and_masks(causal, window), None),
    "prefix-LM": (or_masks(causal, prefix(torch.tensor([10, 50]))), None),
    "document": (and_masks(causal, document(IDS)), None),
    "alibi": (causal, alibi(torch.tensor([0.5, 0.25]))),
    "softcap": (None, softcap),
    "relative position": (None, relative_table(torch.linspace(-1, 1, 2 * (2 * S - 1)).view(2, -1))),
    "neighbourhood": (neighbourhood(12, 2), None),
    "transfusion": (or_masks(causal, spans([5, 40], [30, 90])), None),
}


def inputs(heads_k: int = H, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, heads, S, D, generator=generator, dtype=dtype).requires_grad_() for heads in (H, heads_k, heads_k)]


def results(function, inputs, **arguments):
    out, lse = function(*inputs, return_lse=True, **arguments)
    cotangents = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out), torch.ones_like(lse)
    return [out, lse, *torch.autograd.grad((out, lse), inputs, cotangents)]


@pytest.mark.parametrize("name", EXAMPLES)
def test_public_examples(name: str) -> None:
    mask_mod, score_mod = EXAMPLES[name]
    sizes = (B if name == "prefix-LM" else None, None, S, S)
    own = None if mask_mod is None else create_block_mask(mask_mod, *sizes, device="cpu", BLOCK_SIZE=16)
    theirs = None if mask_mod is None else torch_flex.create_block_mask(mask_mod, *sizes, device="cpu", BLOCK_SIZE=16)
    if own is not None:
        own.verify()
        for ours, torchs in (("kv_num", "kv_num_blocks"), ("kv_full_num", "full_kv_num_blocks"), ("q_num", "q_num_blocks")):
            assert torch.equal(getattr(own.lists, ours), getattr(theirs, torchs)), ours
    x = inputs()
    found = results(flex_attention, x, score_mod=score_mod, block_mask=own)

    wide = [t.detach().double().requires_grad_() for t in x]
    rule = None if mask_mod is None else masks.Custom(mask_mod)
    exact = reference.attention(*wide, mask=rule, score_mod=score_mod, layout="bhsd")
    cotangents = torch.linspace(-1, 1, found[0].numel()).view(found[0].shape).double(), torch.ones_like(exact[1])
    for ours, right in zip(found, (*exact, *torch.autograd.grad(exact, wide, cotangents)), strict=True):
        torch.testing.assert_close(ours.double(), right, rtol=2e-5, atol=2e-5)

    torch._dynamo.reset()
    fixed = [t.detach() for t in x]  # on a CPU torch's own has no backward pass
    eager = torch_flex.flex_attention(*fixed, score_mod=score_mod, block_mask=theirs, return_lse=True)
    for ours, torchs in zip(found, eager, strict=False):
        torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-5)
    if theirs is not None:  # and its masks are taken as they are
        for ours, again in zip(found, results(flex_attention, x, score_mod=score_mod, block_mask=theirs), strict=True):
            torch.testing.assert_close(ours, again, rtol=1e-5, atol=1e-5)


def test_signatures() -> None:
    for name in ("flex_attention", "create_block_mask", "create_mask", "and_masks", "or_masks", "noop_mask"):
        ours, theirs = (inspect.signature(getattr(module, name)).parameters for module in (flex, torch_flex))
        assert [(p.name, p.kind, p.default) for p in ours.values()] == [(p.name, p.kind, p.default) for p in theirs.values()], name


def test_gradients_of_captured_tensors() -> None:
    table = torch.zeros(2, 2 * S - 1, requires_grad=True)
    flex_attention(*inputs(), score_mod=relative_table(table)).square().sum().backward()
    assert table.grad is not None and table.grad.abs().sum() > 0


def test_grouped_heads_and_broadcast_batch() -> None:
    q, k, v = inputs(1)
    with pytest.raises(ValueError, match="enable_gqa=True"):
        flex_attention(q, k, v)
    expected, _ = reference.attention(q, k, v, layout="bhsd")
    torch.testing.assert_close(flex_attention(q, k, v, enable_gqa=True).double(), expected, rtol=1e-5, atol=1e-5)
    mask = create_block_mask(prefix(torch.tensor([10, 50])), B, None, S, S, device="cpu")
    shared = [x[:1] for x in inputs()[1:]]
    out = flex_attention(q, *shared, block_mask=mask)
    torch.testing.assert_close(out, flex_attention(q, *(x.expand(B, -1, -1, -1) for x in shared), block_mask=mask))
    with pytest.raises(ValueError, match="batch size 2 and key 1"):
        flex_attention(q, *shared)


def test_a_row_that_sees_nothing() -> None:
    x = inputs()
    mask = create_block_mask(lambda b, h, q, k: (q >= k) & (q > 3), None, None, S, S, device="cpu")
    out, aux = flex_attention(*x, block_mask=mask, return_aux=AuxRequest(lse=True))
    assert not out[:, :, :4].any() and (aux.lse[:, :, :4] == -torch.inf).all() and aux.max_scores is None
    (dq,) = torch.autograd.grad(out.sum(), x[:1])
    assert not dq[:, :, :4].any() and dq.isfinite().all()


def test_compiled() -> None:
    x = inputs()

    def step(q, k, v, ids):
        mask = create_block_mask(and_masks(causal, document(ids)), None, None, S, S, device="cpu", BLOCK_SIZE=16)
        return flex_attention(q, k, v, block_mask=mask, score_mod=softcap)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(*x, IDS)
    torch.testing.assert_close(compiled, step(*x, IDS))


def test_options_and_refusals() -> None:
    x = inputs()
    plain = flex_attention(*x)
    assert torch.equal(flex_attention(*x, kernel_options={"BLOCK_M": 64, "fwd_num_stages": 2, "PRESCALE_QK": True}), plain)
    out, aux = flex_attention(*x, return_aux=AuxRequest())
    assert torch.equal(out, plain) and aux == (None, None)
    with pytest.raises(UnsupportedAttention, match="kernel_options has 'SKIP_MASK_SCORE'"):
        flex_attention(*x, kernel_options={"SKIP_MASK_SCORE": True})
    with pytest.raises(UnsupportedAttention, match="max_logits"):
        flex_attention(*x, return_aux=AuxRequest(max_scores=True))
    with pytest.raises(ValueError, match="both given"):
        flex_attention(*x, return_lse=True, return_aux=AuxRequest())
    with pytest.raises(TypeError, match="create_block_mask"):
        flex_attention(*x, block_mask=torch.ones(S, S))
    with pytest.raises(ValueError, match="rank 4"):
        flex_attention(x[0][0], *x[1:])
    with pytest.raises(ValueError, match="built for 64 queries"):
        flex_attention(*x, block_mask=create_block_mask(causal, None, None, 64, 64, device="cpu"))
    with pytest.raises(TypeError, match="no mask function"):
        and_masks(causal, True)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedAttention):
        create_block_mask(lambda b, h, q, k: torch.cumsum(q, 0) > k, None, None, S, S, device="cpu")


def test_tilewise_masks_are_block_masks_too() -> None:
    x = inputs()
    expected = flex_attention(*x, block_mask=create_block_mask(causal, None, None, S, S, device="cpu"))
    for mask in (BlockMask(masks.Causal(), S), masks.Causal()):
        torch.testing.assert_close(flex_attention(*x, block_mask=mask), expected)


@pytest.mark.parametrize("name", [name for name, (mask_mod, _) in EXAMPLES.items() if mask_mod is not None])
def test_a_mask_answers_to_the_names_of_torch_s(name: str) -> None:
    sizes = (B if name == "prefix-LM" else None, None, S, S)
    own, theirs = (module.create_block_mask(EXAMPLES[name][0], *sizes, device="cpu", BLOCK_SIZE=16) for module in (flex, torch_flex))
    for attribute in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(own, attribute), getattr(theirs, attribute)), attribute
    assert (own.shape, own.seq_lengths, own.BLOCK_SIZE, own.mask_mod) == (theirs.shape, (S, S), (16, 16), theirs.mask_mod)
    assert own.sparsity() == theirs.sparsity() and own.numel() == theirs.numel()
    assert torch.equal(own.to_dense(), theirs.to_dense())
    for part in (slice(0, 3), slice(None)):
        assert torch.equal(own[:, :, part].to_dense(), theirs[:, :, part].to_dense())
    x = inputs()
    expected = flex_attention(*x, block_mask=own)
    assert torch.equal(flex_attention(*x, block_mask=own.as_torch()), expected)
    for again in (copy.deepcopy(own), own.to("cpu")):
        assert isinstance(again, flex.BlockMask) and torch.equal(flex_attention(*x, block_mask=again), expected)
    shorter = [x[0][:, :, :40], *x[1:]]
    torch.testing.assert_close(flex_attention(*shorter, block_mask=own._adjust(40, S)), expected[:, :, :40])


def test_what_a_mask_does_not_have() -> None:
    mask = create_block_mask(causal, None, None, S, S, device="cpu")
    with pytest.raises(AttributeError, match="no attribute 'kv_blocks'"):
        mask.kv_blocks  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'mask_mod'"):
        flex.BlockMask(masks.Causal(), S).mask_mod  # noqa: B018
    lists = mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices
    made = flex.BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=128, mask_mod=causal, seq_lengths=(S, S))
    assert torch.equal(flex_attention(*inputs(), block_mask=made), flex_attention(*inputs(), block_mask=mask))
