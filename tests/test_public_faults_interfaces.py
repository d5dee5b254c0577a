"""Faults around attention that users of other libraries reported in public: derivatives, transforms, functions, messages.

An id says what went wrong and where it was reported.
"""

from __future__ import annotations

import copy
import math
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import bias as torch_bias
from torch.nn.attention import flex_attention as torch_flex

import tilewise
from tilewise import BlockMask, attention, masks, merge
from tilewise.compat import flash_attn, flash_attn_interface, flex
from tilewise.compat.sdpa import scaled_dot_product_attention as sdpa
from tilewise.integrations.transformers import attention_forward
from tilewise.integrations.transformers_masks import RuleMask

from .public_faults import I32, causal, coin, definition, qkv, wide


def report(*names: str) -> Any:
    return pytest.mark.parametrize("report", ["-".join(names)])


def leaves(**sizes: Any) -> list[Tensor]:
    return [x.requires_grad_() for x in qkv(**sizes).values()]


def close(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-9)


# ---------------------------------------------------------------------------------------------------------------- derivatives

BATCHED = {
    "plain": {}, "causal": {"causal": True}, "dropout": {"dropout_p": 0.3, "dropout_seed": 5}, "lengths": {"seqused_k": [7, 3]},
    "function": {"score_mod": lambda s, b, h, q, k: s * (h + 1)},
}  # fmt: skip


@report("pytorch/pytorch#49562", "pytorch/pytorch#102457")
@pytest.mark.parametrize("options", BATCHED)
def test_many_cotangents_in_one_backward_pass(report: str, options: str) -> None:
    given = {name: torch.tensor(x, dtype=I32) if isinstance(x, list) else x for name, x in BATCHED[options].items()}
    x, sink = leaves(), wide(4).requires_grad_()
    out, aux = attention(*x, learnable_sink=sink, return_aux=("lse", "entropy"), **given)
    finite = torch.where(aux.lse == -math.inf, 0.0, aux.lse)
    outs, ins = [out, finite, aux.entropy], [*x, sink]
    cotangents = [wide(3, *o.shape) for o in outs]
    got = torch.autograd.grad(outs, ins, cotangents, is_grads_batched=True, retain_graph=True)
    for n in range(3):
        want = torch.autograd.grad(outs, ins, [c[n] for c in cotangents], retain_graph=True)
        close([g[n] for g in got], list(want))


@report("pytorch/pytorch#68538")
def test_a_vectorised_jacobian_and_hessian(report: str) -> None:
    q, k, v = qkv(1, 3, heads=1, dim=2).values()
    jacobian, hessian = torch.autograd.functional.jacobian, torch.autograd.functional.hessian
    close(jacobian(lambda x: attention(x, k, v), q, vectorize=True), jacobian(lambda x: definition(x, k, v)[0], q))
    close(
        hessian(lambda x: attention(x, k, v).square().sum(), q, vectorize=True), hessian(lambda x: definition(x, k, v)[0].square().sum(), q)
    )


@report("jax-ml/jax#36702", "jax-ml/jax#39451")
@pytest.mark.parametrize("mapped", ["q", "bias", "qkv"])
def test_mapped_gradients_of_a_bias_shared_by_heads(report: str, mapped: str) -> None:
    x = qkv(1, 5, heads=2) | {"bias": wide(1, 1, 5, 5)}
    dims = tuple(0 if name in mapped.replace("bias", "") or (mapped == "bias" and name == "bias") else None for name in x)
    args = [torch.stack([x[name], x[name] * 0.5]) if dim == 0 else x[name] for name, dim in zip(x, dims, strict=True)]

    def ours(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return attention(q, k, v, bias=bias).square().sum()

    def plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return definition(q, k, v, bias=bias)[0].square().sum()

    got = torch.vmap(torch.func.grad(ours, (0, 1, 2, 3)), dims)(*args)
    want = torch.vmap(torch.func.grad(plain, (0, 1, 2, 3)), dims)(*args)
    close(got, want)


@report("meta-pytorch/attention-gym#20")
def test_a_learned_factor_of_each_head_and_query(report: str) -> None:
    x, scale = leaves(), wide(4, 1).requires_grad_()

    def factors() -> Tensor:
        return torch.arange(2, 11, dtype=torch.float64).log() * scale

    own = factors()
    out = attention(*x, score_mod=lambda s, b, h, q, k: s * own[h, q])
    want = definition(*x, score=lambda s: s * factors()[:, :, None])[0]
    cotangent = wide(*out.shape)
    close(torch.autograd.grad(out, [*x, scale], cotangent), torch.autograd.grad(want, [*x, scale], cotangent))


@report("pytorch/pytorch#188178")
def test_a_short_table_has_no_gradient_from_hidden_pairs(report: str) -> None:
    x, table = leaves(batch=1, seqlen_q=20, heads=2), wide(15).requires_grad_()
    rule = masks.Custom(lambda b, h, q, k: (k < 15) & (q >= k))
    padded = torch.cat([table, table.new_zeros(5)])
    want = definition(*x, visible=causal(20, 20) & (torch.arange(20) < 15), score=lambda s: s + padded)[0]
    cotangent = wide(*want.shape)
    exact = torch.autograd.grad(want, [*x, table], cotangent)
    for backend in ("tiled", "reference"):
        out = attention(*x, mask=rule, score_mod=lambda s, b, h, q, k: s + table[k], backend=backend)
        close(torch.autograd.grad(out, [*x, table], cotangent), exact)


@report("pytorch/pytorch#152028")
def test_dropout_beside_rows_that_see_nothing(report: str) -> None:
    x, visible = leaves(), torch.zeros(9, 9, dtype=torch.bool)
    visible[3:] = True
    out = attention(*x, mask=visible, dropout_p=0.5)
    grads = torch.autograd.grad(out.sum(), x)
    assert out[:, :3].abs().sum() == 0 and out.isfinite().all() and all(g.isfinite().all() for g in grads)


@report("pytorch/pytorch#41508")
def test_anomaly_mode_finds_nothing_behind_a_mask(report: str) -> None:
    q, k, v = leaves()
    visible = coin(9, 9)
    visible[2], visible[:, 5] = False, False
    with torch.no_grad():
        k[:, 5], v[:, 5] = math.nan, math.inf
    with torch.autograd.set_detect_anomaly(True):
        for backend in ("auto", "tiled", "reference"):
            attention(q, k, v, mask=visible, backend=backend).sum().backward()


@report("fla-org/flash-linear-attention#70")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_backward_pass_outside_autocast(report: str, dtype: torch.dtype) -> None:
    x = [t.detach().float().requires_grad_() for t in qkv().values()]
    with torch.autocast("cpu", dtype):
        out = attention(*x, causal=True)
    out.float().square().mean().backward()
    assert out.dtype == dtype and all(t.grad.dtype == torch.float32 and t.grad.isfinite().all() for t in x)


@report("pytorch/pytorch#136270")
def test_nested_tensors_that_are_parts_of_longer_rows(report: str) -> None:
    base = [wide(3, 9, 2, 4).requires_grad_() for _ in range(3)]
    starts, lengths = torch.tensor([0, 2, 4]), torch.tensor([4, 0, 5])
    first = torch.nested.narrow(base[0], 1, starts, lengths, layout=torch.jagged)
    parts = [first, *(torch.nested.nested_tensor_from_jagged(x.flatten(0, 1), first.offsets(), lengths=first.lengths()) for x in base[1:])]
    out = attention(*parts, causal=True)
    grads = torch.autograd.grad(out.values().sum(), base)
    for b, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        own = [x.detach()[b : b + 1, start : start + length].requires_grad_() for x in base]
        want = torch.autograd.grad(definition(*own, visible=causal(length, length))[0].sum(), own)
        for grad, exact in zip(grads, want, strict=True):
            close(grad[b, start : start + length], exact[0])


@report("Dao-AILab/flash-attention#91", "Dao-AILab/flash-attention#681")
def test_the_losses_of_several_calls_with_cotangents_that_are_slices(report: str) -> None:
    x = leaves()
    outs = [attention(*x, causal=flag) for flag in (False, True)]
    wants = [definition(*x, visible=causal(9, 9) if flag else None)[0] for flag in (False, True)]
    weights = wide(2, 9, 4, 16)
    loss, want = ((torch.cat(parts, 3) * weights).sum() for parts in (outs, wants))
    close(torch.autograd.grad(loss, x), torch.autograd.grad(want, x))


@report("pytorch/pytorch#130117", "pytorch/pytorch#165517")
def test_a_cache_has_no_derivative_and_says_so(report: str) -> None:
    """A zero tangent would be silence."""
    q, k, v = qkv(2, 1, 9).values()

    def read(q: Tensor, k: Tensor = k, v: Tensor = v) -> Tensor:
        return tilewise.attention_with_kvcache(q, k, v)

    for transformed in (lambda: torch.func.jvp(read, (q,), (q,)), lambda: torch.func.jvp(lambda k: read(q, k), (k,), (k,))):
        with pytest.raises(tilewise.UnsupportedAttention, match="carries a tangent"):
            transformed()
    with forward_ad.dual_level(), pytest.raises(tilewise.UnsupportedAttention, match="q carries a tangent"):
        read(forward_ad.make_dual(q, q))
    with pytest.raises(tilewise.UnsupportedAttention, match="q requires grad"):
        torch.func.grad(lambda q: read(q).sum())(q)
    with pytest.raises(tilewise.UnsupportedAttention, match=r"q is mapped by torch.vmap, .* give what is mapped as batch items"):
        torch.vmap(read)(q[None], k[None], v[None])


# -------------------------------------------------------------------------------------------------------------- torch's SDPA

SHAPES = {
    "one query, aligned top-left (pytorch/pytorch#115111)": ((2, 4, 1, 8), (2, 4, 7, 8), {"is_causal": True}),
    "more keys, aligned top-left (pytorch/pytorch#103082)": ((2, 4, 5, 8), (2, 4, 7, 8), {"is_causal": True}),
    "keys of one item for all (ModelTC/LightX2V#1472)": ((2, 4, 5, 8), (1, 4, 7, 8), {}),
    "grouped heads, asked for (pytorch/torchtitan#458)": ((2, 4, 5, 8), (2, 2, 7, 8), {"enable_gqa": True}),
    "grouped heads of rank 3 (pytorch/pytorch#187266)": ((4, 5, 8), (2, 7, 8), {"enable_gqa": True}),
    "no key length in half precision (pytorch/pytorch#141219)": ((3, 2, 0, 7), (3, 2, 0, 7), {"is_causal": True}),
    "a mask of one row that is expanded (pytorch/pytorch#139424)": ((2, 4, 5, 8), (2, 4, 7, 8), {"attn_mask": (2, 1, 1, 7)}),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_sdpa(name: str) -> None:
    query, key, options = SHAPES[name]
    q, k, v = wide(*query), wide(*key), wide(*key)
    if "attn_mask" in options:
        options = {"attn_mask": coin(*options["attn_mask"]).expand(2, 4, 5, 7)}
    close(sdpa(q, k, v, **options), F.scaled_dot_product_attention(q, k, v, **options))


@report("jingyaogong/minimind#382")
def test_mask_and_causal_order_are_both_meant(report: str) -> None:
    q, k, v, shown = *qkv(1, 6).values(), coin(6, 6)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    close(sdpa(q, k, v, shown, is_causal=True), definition(q, k, v, visible=shown & causal(6, 6), layout="bhsd")[0])


@report("pytorch/pytorch#114823")
@pytest.mark.parametrize("sizes", [(5, 7), (7, 5), (6, 6)], ids=str)
def test_torch_s_causal_biases(report: str, sizes: tuple[int, int]) -> None:
    """They hold no values: their memory was never written."""
    q, k, v = (x.transpose(1, 2) for x in qkv(2, *sizes).values())
    lower, upper = torch_bias.causal_lower_right(*sizes), torch_bias.causal_upper_left(*sizes)
    close(sdpa(q, k, v, lower), definition(q, k, v, visible=causal(*sizes), layout="bhsd")[0])
    close(sdpa(q, k, v, upper), definition(q, k, v, visible=torch.ones(sizes, dtype=torch.bool).tril(), layout="bhsd")[0])
    with pytest.raises(ValueError, match="causal bias of 3 queries and 4 keys, and the call has"):
        sdpa(q, k, v, torch_bias.causal_lower_right(3, 4))
    for name in ("bias", "mask"):
        with pytest.raises(TypeError, match=f"{name} is torch's CausalBias; give causal=True"):
            attention(q, k, v, layout="bhsd", **{name: lower})


@report("pytorch/pytorch#138993", "pytorch/pytorch#153472")
@pytest.mark.parametrize("is_causal", [False, True])
def test_sdpa_of_nested_tensors(report: str, is_causal: bool) -> None:
    first = torch.nested.nested_tensor([wide(3, 8), wide(0, 8), wide(5, 8)], layout=torch.jagged)
    q, k, v = (torch.nested.nested_tensor_from_jagged(wide(8, 8), first.offsets()).unflatten(-1, [2, 4]).transpose(1, 2) for _ in range(3))
    out = sdpa(q, k, v, is_causal=is_causal)
    for start, stop in ((0, 3), (3, 8)):
        own = [x.transpose(1, 2).values()[None, start:stop] for x in (q, k, v)]
        want = definition(*own, visible=causal(stop - start, stop - start) if is_causal else None)[0]
        close(out.transpose(1, 2).values()[None, start:stop], want)
    longer = torch.nested.nested_tensor([wide(4, 8), wide(2, 8), wide(1, 8)], layout=torch.jagged).unflatten(-1, [2, 4]).transpose(1, 2)
    out = sdpa(q, longer, longer, is_causal=is_causal).transpose(1, 2)
    keys = longer.transpose(1, 2).values()[None, :4]
    visible = torch.ones(3, 4, dtype=torch.bool).tril() if is_causal else None
    close(out.values()[None, :3], definition(q.transpose(1, 2).values()[None, :3], keys, keys, visible=visible)[0])
    with pytest.raises(tilewise.UnsupportedAttention, match="attn_mask was given with nested tensors; give a rule"):
        sdpa(q, k, v, coin(5, 5))


# ------------------------------------------------------------------------------------------- functions of scores and of masks

FUNCTIONS: dict[str, Any] = {
    "torch's noop_mask (pytorch/pytorch#164702)": torch_flex.noop_mask,
    "torch's and_masks (pytorch/pytorch#140363)": torch_flex.and_masks(lambda b, h, q, k: q >= k, lambda b, h, q, k: q - k < 4),
    "torch's or_masks (pytorch/pytorch#157543)": torch_flex.or_masks(lambda b, h, q, k: q >= k, lambda b, h, q, k: k < 3),
    "ones like an index, of bools (huggingface/transformers#41852)": lambda b, h, q, k: torch.ones_like(q, dtype=torch.bool) & (q >= k),
    "a new tensor of one (huggingface/transformers#41852)": lambda b, h, q, k: q.new_ones((), dtype=torch.bool) & (k <= q),
    "a new tensor of one number (pytorch/pytorch#157543)": lambda b, h, q, k: q - k < q.new_tensor(3),
    "rows and columns of a picture (pytorch/pytorch#158212)": lambda b, h, q, k: (
        ((q // 5 - k // 5).abs() <= 1) & ((q % 5 - k % 5).abs() <= 1)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_mask_functions(name: str) -> None:
    q, k, v = (x.transpose(1, 2) for x in qkv(2, 20, heads=2).values())
    want = definition(q, k, v, visible=torch_flex.create_mask(FUNCTIONS[name], 2, 2, 20, 20, device="cpu"), layout="bhsd")[0]
    for block_mask in (
        flex.create_block_mask(FUNCTIONS[name], None, None, 20, 20, device="cpu", BLOCK_SIZE=16),
        torch_flex.create_block_mask(FUNCTIONS[name], None, None, 20, 20, device="cpu"),
        masks.Custom(FUNCTIONS[name]),
    ):
        close(flex.flex_attention(q, k, v, block_mask=block_mask), want)


@report("huggingface/transformers#41852")
def test_constants_made_in_a_score_function_have_the_dtype_they_ask_for(report: str) -> None:
    x = qkv(1, 6)
    got = attention(
        **x,
        score_mod=lambda s, b, h, q, k: s + torch.full_like(q, 0.5, dtype=s.dtype) + s.new_full((), 0.25) - s.new_zeros(size=()),
        mask=masks.Custom(lambda b, h, q, k: torch.zeros_like(q, dtype=torch.bool) | (k <= q)),
    )
    close(got, definition(**x, visible=causal(6, 6), score=lambda s: s + 0.75)[0])
    with pytest.raises(tilewise.UnsupportedAttention, match=r"a tensor that it makes has size \(\), not 3"):
        attention(**x, score_mod=lambda s, b, h, q, k: s + s.new_zeros(3)[0])


@report("meta-pytorch/attention-gym#70", "pytorch/pytorch#147551")
@pytest.mark.parametrize("where", ["mask", "block_mask", "score_mod", "cache"])
def test_a_table_with_fewer_heads_is_no_table_of_zeros(report: str, where: str) -> None:
    """Read past its end it would say that all tokens are of document 0."""
    x, ids = qkv(2, 20), torch.arange(20).view(1, 1, 20).expand(2, 1, 20) // 5

    def same(b: Any, h: Any, q: Any, k: Any) -> Any:
        return ids[b, h, q] == ids[b, h, k]

    with pytest.raises(ValueError, match=r"shape \(2, 1, 20\) at index h in dimension 1, and h runs to 3; expand the tensor there"):
        if where == "cache":
            tilewise.attention_with_kvcache(x["q"], x["k"], x["v"], mask=masks.Custom(same))
        elif where == "score_mod":
            attention(**x, score_mod=lambda s, b, h, q, k: torch.where(same(b, h, q, k), s, -math.inf))
        else:
            rule = masks.Custom(same)
            attention(**x, mask=rule if where == "mask" else BlockMask(rule, 20, batch=2, heads=4, block_size=16))
    ids = ids.expand(2, 4, 20)
    close(attention(**x, mask=masks.Custom(same)), definition(**x, visible=(ids[:, :, :, None] == ids[:, :, None]))[0])


@report("pytorch/pytorch#143260", "pytorch/pytorch#164702", "meta-pytorch/attention-gym#109")
@pytest.mark.parametrize("position", [0, 40, 63])
def test_a_row_of_a_longer_block_mask_serves_one_query(report: str, position: int) -> None:
    """Decoding with a mask built once: a row of its blocks, its function shifted, its lengths set by hand."""
    whole = torch_flex.create_block_mask(lambda b, h, q, k: (q >= k) & (q - k < 30), 1, 1, 64, 64, device="cpu", BLOCK_SIZE=16)
    q, k, v = (x.transpose(1, 2) for x in qkv(2, 1, 64).values())
    row = whole[:, :, torch.tensor([position // 16])]
    row.mask_mod = lambda b, h, q, k: whole.mask_mod(b, h, q + position, k)
    with pytest.raises(ValueError, match=r"1 rows of blocks, .* it was sliced; set its seq_lengths"):
        flex.flex_attention(q, k, v, block_mask=row)
    row.seq_lengths = (1, 64)
    visible = (torch.arange(64) <= position) & (torch.arange(64) > position - 30)
    close(flex.flex_attention(q, k, v, block_mask=row), definition(q, k, v, visible=visible, layout="bhsd")[0])


@report("pytorch/pytorch#141625")
def test_a_block_mask_adjusted_to_other_lengths(report: str) -> None:
    whole = torch_flex.create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 128, 128, device="cpu", BLOCK_SIZE=32)
    q, k, v = (x.transpose(1, 2) for x in qkv(1, 40, 70, heads=2).values())
    visible = torch.ones(40, 70, dtype=torch.bool).tril()
    close(flex.flex_attention(q, k, v, block_mask=whole._adjust(40, 70)), definition(q, k, v, visible=visible, layout="bhsd")[0])
    with pytest.raises(TypeError, match="from_flex: block_mask is NoneType; it must come from create_block_mask"):
        BlockMask.from_flex(None)


# ---------------------------------------------------------------------------------------------------------------------- parts


@report("vllm-project/vllm#39148", "flashinfer-ai/flashinfer#4051", "vllm-project/vllm#28181")
def test_parts_of_which_none_or_one_sees_a_key(report: str) -> None:
    out, lse = wide(1, 3, 2, 4), wide(1, 2, 3)
    lse[..., 0] = -math.inf
    empty, nothing = torch.full_like(out, math.nan), torch.full_like(lse, -math.inf)
    merged, total = merge([empty, out, empty], [nothing, lse, nothing])
    close(total, lse)
    close(merged, torch.where((lse == -math.inf).transpose(1, 2)[..., None], 0.0, out))
    close(merge([empty, empty], [nothing, nothing]), (torch.zeros_like(out), nothing))


@report("Dao-AILab/flash-attention#978")
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_an_lse_that_is_no_logarithm_of_a_sum_shows(report: str, value: float) -> None:
    """FlashAttention-2 says +inf for a row without keys; weighing it as 0 in `out` while the LSE is NaN would hide that."""
    out, lse = [wide(1, 3, 2, 4) for _ in range(2)], [wide(1, 2, 3) for _ in range(2)]
    lse[1][0, 1, 2] = value
    for merged, total in (merge(out, lse), flash_attn_interface.flash_attn_combine(torch.stack(out), torch.stack(lse).mT)):
        assert merged[0, 2, 1].isnan().all() and merged[:, :2].isfinite().all() and merged[0, 2, 0].isfinite().all()
        assert total.isnan().sum() == 1


@report("meta-pytorch/attention-gym#205")
def test_a_shared_prefix_and_each_item_s_own_keys(report: str) -> None:
    x, prefix = qkv(3, 5), qkv(1, 7)
    shared = [prefix[n].expand(3, -1, -1, -1) for n in "kv"]
    parts = [attention(x["q"], *shared, return_aux="lse"), attention(**x, causal=True, return_aux="lse")]
    whole = [torch.cat([a, x[n]], 1) for n, a in zip("kv", shared, strict=True)]
    visible = torch.cat([torch.ones(5, 7, dtype=torch.bool), causal(5, 5)], 1)
    merged = merge((out for out, _ in parts), (aux.lse for _, aux in parts))  # any iterables
    close(merged, definition(x["q"], *whole, visible=visible))


# ------------------------------------------------------------------------------------------------------------- surroundings


@report("tinygrad/tinygrad#1615")
def test_the_first_call_of_a_process_under_another_default_device(report: str) -> None:
    """What modules make when they are imported lives on the CPU, whatever the default is."""
    code = """
import torch
from tilewise import attention, attention_varlen, attention_with_kvcache, masks
with torch.device("meta"):
    q = torch.randn(2, 9, 4, 8, device="cpu", requires_grad=True)
    lengths = torch.zeros(2, dtype=torch.int32, device="cpu")
    ids = torch.zeros(1, 9, dtype=torch.int64, device="cpu")
    for options in (dict(causal=True), dict(dropout_p=0.1), dict(score_mod=lambda s, b, h, i, j: s * 2), dict(mask=masks.Document(ids))):
        out = attention(q, q, q, **options)
        out.sum().backward()
        assert out.device.type == "cpu" == q.grad.device.type
    k = q.detach()
    assert attention_with_kvcache(k[:, :1], k.clone(), k.clone(), k[:, :1], k[:, :1], cache_seqlens=lengths).device.type == "cpu"
    cu = torch.zeros(3, dtype=torch.int32, device="cpu")
    assert attention_varlen(k[0], k[0], k[0], cu, cu).device.type == "cpu"
"""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-1500:]


@report("facebookresearch/xformers#1185")
def test_rules_and_errors_survive_copies(report: str) -> None:
    ids = torch.tensor([[0, 0, 1, 1, 1]])
    rule = masks.Causal() & (masks.Document(ids) | ~masks.Chunked(2))
    x = qkv(1, 5)
    want = attention(**x, mask=rule)
    for other in (copy.deepcopy(rule), pickle.loads(pickle.dumps(rule)), copy.deepcopy(BlockMask(rule, 5, block_size=16))):
        close(attention(**x, mask=other), want)
    assert str(pickle.loads(pickle.dumps(tilewise.UnsupportedAttention("in words")))) == "in words"


@report("pytorch/pytorch#141710")
def test_one_graph_of_any_length(report: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, window_size=(3, 0)) * 2, backend="aot_eager", dynamic=True, fullgraph=True)
    for length in (5, 12, 33):
        x = qkv(2, length)
        close(compiled(**x), attention(**x, window_size=(3, 0)) * 2)


@report("pytorch/pytorch#193812")
def test_sizes_that_differ_are_named_while_compiling(report: str) -> None:
    compiled = torch.compile(attention, backend="eager")
    x = qkv(2, 8, 16)
    with pytest.raises(Exception, match=r"q has head dim 8 but k has 4"):
        compiled(x["q"], x["k"][..., :4], x["v"])


# -------------------------------------------------------------------------------------------------------------- transformers


class Layer(torch.nn.Module):
    is_causal = True


LAYER: dict[str, Callable[[Any, Any, Any], tuple[Tensor, Tensor | None]]] = {
    "a mask that shows all is not made causal (Dao-AILab/flash-attention#1857)": lambda q, k, v: (
        attention_forward(Layer(), q, k, v, torch.ones(2, 1, 5, 5, dtype=torch.bool))[0], None,
    ),
    "the least float hides, it is not inverted (huggingface/transformers#38094)": lambda q, k, v: (
        attention_forward(Layer(), q, k, v, torch.zeros(2, 1, 5, 5).masked_fill(~causal(5, 5), torch.finfo(torch.float32).min))[0],
        causal(5, 5),
    ),
    "positions of three axes do not pack (huggingface/transformers#47342)": lambda q, k, v: (
        attention_forward(Layer(), q, k, v, None, position_ids=torch.arange(5).expand(3, 2, 5))[0], causal(5, 5),
    ),
    "no mask and a preallocated cache (huggingface/transformers#30437)": lambda q, k, v: (
        attention_forward(Layer(), q, *(F.pad(x, (0, 0, 0, 6), value=math.nan) for x in (k, v)), None)[0], causal(5, 5),
    ),
    "a window counts one's own key (vllm-project/vllm#9679)": lambda q, k, v: (
        attention_forward(Layer(), q, k, v, None, sliding_window=2)[0], causal(5, 5).triu(-1),
    ),
    "an encoder without a mask (huggingface/transformers#37807)": lambda q, k, v: (
        attention_forward(Layer(), q, k, v, None, is_causal=False)[0], None,
    ),
}  # fmt: skip


@report("meta-pytorch/attention-gym#135", "unslothai/unsloth#8516")
def test_a_mask_follows_its_layer_to_another_device(report: str) -> None:
    lengths = torch.tensor([5, 3], dtype=I32)
    mask = RuleMask(torch.Size((2, 1, 5, 5)), torch.device("cpu"), (-1, 0), lengths, documents=torch.zeros(2, 5, dtype=torch.int64))
    moved = mask.to("meta", non_blocking=True)
    assert moved.device.type == moved.length.device.type == moved.documents.device.type == "meta" and moved.window == (-1, 0)
    assert mask.to("cpu") is mask
    with pytest.raises(tilewise.UnsupportedAttention, match=r"converted to torch.float16: this model does not hand its mask"):
        mask.to(torch.float16)


@pytest.mark.parametrize("name", LAYER)
def test_layers_of_transformers(name: str) -> None:
    q, k, v = (x.transpose(1, 2) for x in qkv(2, 5, kv_heads=2).values())
    got, visible = LAYER[name](q, k, v)
    close(got, definition(q, k, v, visible=visible, layout="bhsd")[0].transpose(1, 2))


# ------------------------------------------------------------------------------------------------------------------- messages

X = qkv(2, 5)
HEADS_FIRST = [x.transpose(1, 2) for x in X.values()]


def layer(*mask: Any, **options: Any) -> Any:
    return attention_forward(Layer(), *HEADS_FIRST, *(mask or (None,)), **options)


WORDS: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    "a window of nothing is not one of everything (vllm-project/vllm#29065)": (
        ValueError, "sliding_window is 0; it must be how many keys a query sees", lambda: layer(sliding_window=0),
    ),
    "a window of less than nothing (proger/hippogriff#7)": (
        ValueError, "sliding_window is -1; it must be", lambda: layer(sliding_window=-1),
    ),
    "offsets of one side alone (huggingface/transformers#42801)": (
        ValueError, "cu_seq_lens_q and cu_seq_lens_k belong together", lambda: layer(cu_seq_lens_q=torch.tensor([0, 10], dtype=I32)),
    ),
    "a padding mask of rank 2 (Dao-AILab/flash-attention#1857)": (
        tilewise.UnsupportedAttention, r"attention_mask is torch.int64 of shape \(2, 5\).*\[:, None, None\]",
        lambda: layer(torch.ones(2, 5, dtype=torch.int64)),
    ),
    "a mask of integers of rank 4 (HKUSTDial/flash-sparse-attention#146)": (
        tilewise.UnsupportedAttention, "attention_mask is torch.int64", lambda: layer(torch.ones(2, 1, 5, 5, dtype=torch.int64)),
    ),
    "no key head at all (pytorch/pytorch#191325)": (
        ValueError, "key has 0 heads but value has 4|no multiple of the 0 heads",
        lambda: sdpa(HEADS_FIRST[0], HEADS_FIRST[1][:, :0], HEADS_FIRST[2], enable_gqa=True),
    ),
    "fuzzed shapes (pytorch/pytorch#141229)": (
        ValueError, "q has head dim 9 but k has 2|must broadcast|heads",
        lambda: sdpa(torch.zeros(1, 2, 8, 3, 1, 1, 0, 9), torch.zeros(0, 3, 7, 1, 1, 2), torch.zeros(6, 0, 1, 3)),
    ),
    "a probability of dropping above 1 (pytorch/pytorch#141229)": (
        ValueError, r"dropout_p is 9876540000.0; it must be in \[0, 1\)", lambda: sdpa(*HEADS_FIRST, dropout_p=9.87654e9),
    ),
    "blocks of no size (pytorch/pytorch#133562)": (
        ValueError, r"blocks of \(0, 0\); a block has at least 16",
        lambda: flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, 20, 20, device="cpu", BLOCK_SIZE=0),
    ),
    "a mask for more queries than there are (meta-pytorch/attention-gym#122)": (
        ValueError, "built for 15 queries and 15 keys, and the call has 5 and 5",
        lambda: attention(**X, mask=BlockMask(masks.Causal(), 15)),
    ),
    "a rule beside a tensor (facebookresearch/xformers#790)": (
        TypeError, r"combined by & with Tensor; .* masks.Dense\(tensor\)", lambda: masks.Causal() & coin(5, 5),
    ),
    "a random number in a score function (meta-pytorch/attention-gym#77)": (
        tilewise.UnsupportedAttention, "randn would be drawn once and be the same number for every .* pair; use dropout_p",
        lambda: attention(**X, score_mod=lambda s, b, h, q, k: s + torch.randn(())),
    ),
    "a block that is not there (lucidrains/native-sparse-attention-pytorch#18)": (
        ValueError, "indices holds 9; 128 keys in blocks of 64 have the numbers 0 to 1, and -1 stands for no block",
        lambda: BlockMask.from_topk(torch.tensor([[[[0, 9], [1, -1]]]]), 128, block_size=64),
    ),
    "a column that is not there (lucidrains/native-sparse-attention-pytorch#16)": (
        ValueError, "col_indices holds numbers from 7 to 7; 64 keys in blocks of 64",
        lambda: BlockMask.from_bsr(torch.tensor([0, 1]), torch.tensor([7]), 64, block_size=64),
    ),
    "padding of rank 3 (huggingface/transformers#27539)": (
        ValueError, r"attention_mask has shape \(2, 1, 5\) and hidden_states \(2, 5, 3\); it must be \(B, S\) = \(2, 5\)",
        lambda: flash_attn.bert_padding.unpad_input(wide(2, 5, 3), torch.ones(2, 1, 5)),
    ),
    "more tokens than rows have room for (huggingface/transformers#27539)": (
        ValueError, "pad_input has 5 tokens for 1 rows of 4", lambda: flash_attn.bert_padding.pad_input(wide(5, 3), torch.arange(5), 1, 4),
    ),
    "a layout that is none, with nested tensors (meta-pytorch/segment-anything-fast#99)": (
        ValueError, "layout is 'bsh'; it must be 'bshd'",
        lambda: attention(*[torch.nested.nested_tensor([wide(3, 2, 4)], layout=torch.jagged)] * 3, layout="bsh"),
    ),
    "an integer of more than 64 bits (pytorch/pytorch#187904)": (
        ValueError, "uses the integer 18446744073709551616; its integers have 64 bits",
        lambda: attention(**X, mask=masks.Custom(lambda b, h, q, k: q - k < 2**64)),
    ),
    "an ellipsis in a table (meta-pytorch/attention-gym#97)": (
        tilewise.UnsupportedAttention, "indexed by one integer for each dimension, not by slices, None or ...",
        lambda: attention(**X, score_mod=lambda s, b, h, q, k, t=wide(2, 4, 5, 5): s + t[..., q, k][b, h]),
    ),
    "a tensor in place of a score function (HKUSTDial/flash-sparse-attention#146)": (
        TypeError, "score_mod is of type Tensor; it must be a function", lambda: attention(**X, score_mod=wide(5, 5)),
    ),
    "parts on two devices (zhuzilin/ring-flash-attention#47)": (
        ValueError, r"outs\[1\] is on meta.*move them to one device",
        lambda: merge([wide(1, 4, 2, 8), wide(1, 4, 2, 8).to("meta")], [wide(1, 2, 4)] * 2),
    ),
    "a nested tensor beside dense ones (meta-pytorch/segment-anything-fast#99)": (
        TypeError, r"k is a nested tensor, .* pad it, with k.to_padded_tensor\(0.0\)",
        lambda: attention(X["q"], torch.nested.nested_tensor([wide(3, 8)], layout=torch.jagged), X["v"]),
    ),
    "a bound that is no number (huggingface/transformers#48353)": (
        TypeError, "max_seqlen_q is 5.0 of type float; it must be an int",
        lambda: flash_attn.flash_attn_varlen_func(*(x[0] for x in X.values()), *[torch.tensor([0, 5], dtype=I32)] * 2, 5.0, 5),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WORDS)
def test_messages(name: str) -> None:
    error, words, call = WORDS[name]
    with pytest.raises(error, match=words):
        call()


def test_asking_for_nothing_in_any_way_gives_the_output_alone() -> None:
    for nothing in ((), [], None, set()):
        assert attention(**X, return_aux=nothing).shape == X["q"].shape
        assert (
            tilewise.attention_with_kvcache(**{"q": X["q"], "k_cache": X["k"], "v_cache": X["v"]}, return_aux=nothing).shape == X["q"].shape
        )


def test_numbers_of_numpy_are_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    close(attention(**X, softmax_scale=numpy.float32(0.5), softcap=numpy.float32(2)), definition(**X, softmax_scale=0.5, softcap=2.0)[0])
