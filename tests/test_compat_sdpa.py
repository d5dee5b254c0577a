"""`compat.sdpa` and the registered implementation of torch, against torch's own `scaled_dot_product_attention` in float64."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention import bias

from tilewise import UnsupportedAttention, attention, reference
from tilewise.compat.sdpa import scaled_dot_product_attention
from tilewise.integrations import torch_sdpa


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def same_as_torch(q, k, v, **arguments) -> None:
    """Outputs and gradients in float64, where both compute the same real numbers."""
    results = []
    for function in (F.scaled_dot_product_attention, scaled_dot_product_attention):
        out = function(q, k, v, **arguments)
        leaves = [x for x in (q, k, v, arguments.get("attn_mask")) if x is not None and x.requires_grad]
        results.append((out, *torch.autograd.grad((out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum(), leaves)))
    for ours, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-10)


SHAPES = {
    "one head": ((5, 8), (7, 8), (7, 8)),
    "unbatched": ((3, 5, 8), (3, 7, 8), (3, 7, 8)),
    "usual": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 6)),
    "more queries": ((2, 3, 9, 8), (2, 3, 4, 8), (2, 3, 4, 8)),
    "two batch dims": ((2, 2, 3, 5, 8), (2, 2, 3, 7, 8), (2, 2, 3, 7, 8)),
    "shared batch": ((2, 3, 5, 8), (1, 3, 7, 8), (1, 3, 7, 8)),
    "shared heads": ((2, 3, 5, 8), (2, 1, 7, 8), (2, 1, 7, 8)),
    "query shared by heads": ((2, 1, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
    "ranks differ": ((5, 8), (2, 3, 7, 8), (3, 7, 8)),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_shapes_and_top_left_causal(name: str, causal: bool) -> None:
    same_as_torch(*tensors(*SHAPES[name]), is_causal=causal, scale=0.3)


@pytest.mark.parametrize("shape", [(5, 7), (1, 7), (5, 1), (3, 1, 7), (2, 1, 5, 7), (1, 3, 5, 7), (2, 3, 1, 1)])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_of_any_broadcast_shape(shape: tuple[int, ...], kind: str) -> None:
    q, k, v = tensors((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8))
    mask = torch.rand(shape) > 0.3 if kind == "bool" else tensors(shape)[0]
    same_as_torch(q, k, v, attn_mask=mask)


@pytest.mark.parametrize("kv_heads", [6, 3])
@pytest.mark.parametrize("shape", [(5, 7), *((a, b, c, 5, 7) for a in (1, 2) for b in (1, 4) for c in (1, 6))])
def test_masks_beside_two_batch_dimensions(shape: tuple[int, ...], kv_heads: int) -> None:
    q, k, v = tensors((2, 4, 6, 5, 8), (2, 4, kv_heads, 7, 8), (2, 4, kv_heads, 7, 8))
    same_as_torch(q, k, v, attn_mask=tensors(shape)[0], enable_gqa=True)
    mask = torch.rand(shape) > 0.2
    same_as_torch(q, k, v, attn_mask=mask.expand(2, 4, 6, 5, 7), enable_gqa=True)


def test_a_mask_that_would_be_copied_is_refused() -> None:
    q, k, v = tensors((2, 2, 3, 5, 8), (2, 2, 3, 7, 8), (2, 2, 3, 7, 8))
    with pytest.raises(UnsupportedAttention, match=r"attn_mask\.contiguous\(\)"):
        scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(2, 3, 2, 5, 7, dtype=torch.bool).transpose(1, 2))
    with pytest.raises(ValueError, match="does not broadcast"):
        scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(4, 1, 3, 5, 7, dtype=torch.bool))


@pytest.mark.parametrize("shapes", [((2, 6, 5, 8), (2, 2, 7, 8)), ((6, 5, 8), (3, 7, 8)), ((2, 2, 6, 5, 8), (2, 2, 2, 7, 8))])
def test_grouped_heads(shapes) -> None:
    q, k, v = tensors(shapes[0], shapes[1], shapes[1])
    same_as_torch(q, k, v, enable_gqa=True, is_causal=True)
    mask = torch.rand(*shapes[0][:-1], 7) > 0.3
    same_as_torch(q, k, v, enable_gqa=True, attn_mask=mask)
    with pytest.raises(ValueError, match="enable_gqa=True"):
        scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("sizes", [(5, 5), (3, 7), (7, 3)], ids=str)
@pytest.mark.parametrize("make", [bias.causal_upper_left, bias.causal_lower_right], ids=lambda f: f.__name__)
def test_torch_s_causal_biases(make, sizes: tuple[int, int], heads: int) -> None:
    """Tensors without contents: `torch.nn.attention.bias` makes them for this argument alone."""
    q, k, v = tensors((2, heads, sizes[0], 8), (2, heads, sizes[1], 8), (2, heads, sizes[1], 8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of rows without keys, which are zeros here
        triangle = make(*sizes)
    visible = torch.ones(sizes, dtype=torch.bool).tril(0 if make is bias.causal_upper_left else sizes[1] - sizes[0])
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, attn_mask=triangle), expected, atol=1e-12, rtol=1e-10)
    causal = F.scaled_dot_product_attention(q, k, v, attn_mask=visible & torch.ones_like(visible).tril())
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, triangle, is_causal=True), causal, atol=1e-12, rtol=1e-10)
    with pytest.raises(ValueError, match="causal bias of 4 queries and 9 keys"):
        scaled_dot_product_attention(q, k, v, attn_mask=make(4, 9))
    for name in ("mask", "bias"):
        with pytest.raises(TypeError, match=f"{name} is torch's CausalBias; give causal=True"):
            attention(q, k, v, **{name: triangle}, layout="bhsd")


def test_a_query_whose_keys_are_all_masked_gives_zeros() -> None:
    q, k, v = tensors((1, 2, 3, 8), (1, 2, 4, 8), (1, 2, 4, 8))
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[1] = False
    same_as_torch(q, k, v, attn_mask=mask)
    assert scaled_dot_product_attention(q, k, v, attn_mask=mask)[0, :, 1].eq(0).all()


def test_mask_and_causal_together_are_anded() -> None:
    q, k, v = tensors((1, 2, 4, 8), (1, 2, 6, 8), (1, 2, 6, 8))
    mask = torch.rand(4, 6) > 0.2
    mask[:, 0] = True
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask & torch.ones(4, 6, dtype=torch.bool).tril())
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=True), expected)


def test_dropout_drops_a_share_and_keeps_the_mean() -> None:
    q, k, v = torch.randn(4, 8, 64, 16), torch.randn(4, 8, 64, 16), torch.eye(64).expand(4, 8, 64, 64)
    torch.manual_seed(1)
    dropped = scaled_dot_product_attention(q, k, v, dropout_p=0.25)  # v is the identity: the output is P
    kept = scaled_dot_product_attention(q, k, v)
    share = dropped.eq(0).double().mean().item()
    assert abs(share - 0.25) < 4 * (0.25 * 0.75 / dropped.numel()) ** 0.5
    torch.testing.assert_close(torch.where(dropped == 0, kept, 0.75 * dropped), kept)
    torch.manual_seed(1)
    assert torch.equal(dropped, scaled_dot_product_attention(q, k, v, dropout_p=0.25))


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (((8,), (7, 8), (7, 8)), "query has shape"),
        (((2, 3, 5, 8), (3, 3, 7, 8), (3, 3, 7, 8)), "must broadcast"),
        (((2, 3, 5, 8), (2, 3, 7, 8), (2, 2, 7, 8)), "value has 2"),
    ],
)
def test_shapes_that_do_not_fit(shapes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        scaled_dot_product_attention(*(torch.randn(shape) for shape in shapes))


# ------------------------------------------------------------------------------------------------- torch's extension point


@pytest.fixture
def active(monkeypatch: pytest.MonkeyPatch):
    """tilewise as torch's implementation; yields the calls that reach it."""
    calls = []
    ours = torch_sdpa.scaled_dot_product_attention
    monkeypatch.setattr(torch_sdpa, "scaled_dot_product_attention", lambda *a, **kw: calls.append(kw) or ours(*a, **kw))
    torch_sdpa.register()
    torch.nn.attention.activate_flash_attention_impl("tilewise")
    yield calls
    torch.nn.attention.restore_flash_attention_impl(_raise_warn=False)


def test_plain_sdpa_uses_tilewise_until_restored(active: list) -> None:
    q, k, v = (torch.randn(2, 4, 40, 16, requires_grad=True) for _ in range(3))
    mask = torch.rand(40, 40) > 0.3
    ours = [F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.2), F.scaled_dot_product_attention(q, k, v, attn_mask=mask)]
    grads = torch.autograd.grad(sum(out.sum() for out in ours), (q, k, v))
    assert len(active) == 2 and "tilewise" in torch.nn.attention.list_flash_attention_impls()
    assert torch.nn.attention.current_flash_attention_impl() == "tilewise"

    torch.nn.attention.restore_flash_attention_impl()
    theirs = [F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.2), F.scaled_dot_product_attention(q, k, v, attn_mask=mask)]
    expected = torch.autograd.grad(sum(out.sum() for out in theirs), (q, k, v))
    assert len(active) == 2
    for x, y in zip((*ours, *grads), (*theirs, *expected), strict=True):
        torch.testing.assert_close(x, y, atol=2e-6, rtol=1e-5)

    torch.nn.attention.activate_flash_attention_impl("tilewise")
    F.scaled_dot_product_attention(q, k, v)
    assert len(active) == 3


def test_sdpa_modes_under_the_registered_implementation(active: list) -> None:
    q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
    expected = reference.attention(q, k, v, layout="bhsd")[0].float()
    with torch.inference_mode():
        torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert F.scaled_dot_product_attention(q, k, v).dtype == torch.bfloat16
    grouped = F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True)
    torch.testing.assert_close(grouped, reference.attention(q, k[:, :1], v[:, :1], layout="bhsd")[0].float())
    assert len(active) == 3
    # A caller who excludes flash attention gets what they ask for, and function transforms keep torch's own rules.
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        F.scaled_dot_product_attention(q, k, v)
    torch.func.grad(lambda q: F.scaled_dot_product_attention(q, k, v).sum())(q)
    assert len(active) == 3


@pytest.fixture
def traced_before() -> None:
    torch.compile(lambda x: F.scaled_dot_product_attention(x, x, x), backend="aot_eager", fullgraph=True)(torch.randn(1, 2, 8, 16))


def test_compiled_modules_contain_the_tilewise_op(traced_before: None, active: list) -> None:
    """Also where torch has traced its own attention before: it remembers which kernel that took."""
    seen = []

    def look(graph, inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    backend = aot_autograd(fw_compiler=look)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 6, 16, requires_grad=True)
    eager = layer(x)
    compiled = torch.compile(layer, backend=backend, fullgraph=True)(x)
    torch.testing.assert_close(compiled, eager)
    assert "tilewise.attention_forward.default" in seen


def test_a_torch_without_the_extension_point_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.attention, "register_flash_attention_impl")
    with pytest.raises(UnsupportedAttention, match=r"compat\.sdpa"):
        torch_sdpa.register()


@pytest.mark.parametrize("shape", [(), (7,), (1,), (5, 1)])
@pytest.mark.parametrize("leading", [(3,), (2, 3), (2, 2, 3)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_masks_of_few_dimensions(shape: tuple[int, ...], leading: tuple[int, ...], causal: bool) -> None:
    q, k = tensors((*leading, 5, 8), (*leading, 7, 8))
    mask = torch.linspace(-1, 1, 35, dtype=torch.float64)[: torch.Size(shape).numel()].view(shape)
    got = scaled_dot_product_attention(q, k, k, mask, is_causal=causal)
    triangle = torch.zeros(5, 7, dtype=torch.float64).masked_fill(torch.ones(5, 7).triu(1).bool(), float("-inf"))
    want = F.scaled_dot_product_attention(q, k, k, (mask + triangle if causal else mask + torch.zeros_like(triangle)))
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("sizes", [(0, 2, 5), (2, 0, 5), (2, 2, 0)])
def test_empty_dimensions_with_a_mask_of_rank_5(sizes: tuple[int, int, int]) -> None:
    first, second, queries = sizes
    q, k = tensors((first, second, 3, queries, 8), (first, second, 3, 4, 8))
    out = scaled_dot_product_attention(q, k, k, torch.zeros(first, 1, 3, 1, 4, dtype=torch.float64))
    assert out.shape == q.shape
    out.sum().backward()
    assert not k.grad.any()


@pytest.mark.parametrize("causal", [False, True])
def test_misuse_is_named_as_the_user_named_it(causal: bool) -> None:
    q, k = tensors((2, 4, 5, 8), (2, 4, 7, 8))
    with pytest.raises(ValueError, match=r"attn_mask has shape \(5, 6\).* \(2, 4, 5, 7\)"):
        scaled_dot_product_attention(q, k, k, torch.ones(5, 6, dtype=torch.bool), is_causal=causal)
    with pytest.raises(TypeError, match=r"attn_mask has dtype torch\.int32"):
        scaled_dot_product_attention(q, k, k, torch.ones(5, 7, dtype=torch.int32), is_causal=causal)
    with pytest.raises(ValueError, match=r"^scale is nan"):
        scaled_dot_product_attention(q, k, k, is_causal=causal, scale=float("nan"))
