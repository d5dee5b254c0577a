"""The feature matrix on the GPU at real sizes: output, LSE and every gradient against the specification in float64."""

from __future__ import annotations

import pytest
import torch

from tilewise import BlockMask, UnsupportedAttention, attention, masks

from .common import BACKENDS, DTYPES, calling, compare, differentiates, qkv, randn, restride, watched

# Around tile multiples, single elements, lengths that no tile divides, and more queries than keys as well as fewer.
LENGTHS = ((1, 1), (7, 7), (127, 127), (128, 129), (129, 128), (1000, 1000), (1, 1000), (1000, 7))

# (head dim of q and k, of v, dtype, causal): each compiles its own kernels, so every width appears once and the common ones in full.
WIDTHS = [
    (64, 64, "bf16", False),
    (64, 64, "bf16", True),
    (64, 64, "fp16", True),
    (64, 64, "fp32", True),
    (128, 128, "bf16", False),
    (128, 128, "bf16", True),
    (128, 128, "fp16", False),
    (128, 128, "fp32", False),
    (256, 256, "bf16", True),
    (256, 256, "fp32", True),
    (192, 128, "bf16", True),
    (16, 16, "bf16", True),
    (16, 48, "fp32", False),
    (40, 40, "bf16", False),
    (80, 80, "fp16", True),
    (96, 96, "bf16", True),
    (33, 65, "bf16", True),
    (1, 3, "fp32", False),
    (160, 96, "bf16", False),
    (250, 250, "bf16", False),
]


@pytest.mark.parametrize("dim,dim_v,dtype,causal", WIDTHS, ids=lambda value: str(value))
def test_every_length(backend, dim, dim_v, dtype, causal):
    for seqlen_q, seqlen_k in LENGTHS:
        inputs = qkv(2, seqlen_q, seqlen_k, head_dim=dim, head_dim_v=dim_v, dtype=DTYPES[dtype])
        compare({**inputs, "causal": causal}, backend)
    inputs = qkv(1, 4097, 4097, heads=2, kv_heads=1, head_dim=dim, head_dim_v=dim_v, dtype=DTYPES[dtype])
    compare({**inputs, "causal": causal}, backend)


def lengths(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def visible(*shape: int) -> torch.Tensor:
    return torch.rand(shape, device="cuda") < 0.6


def padded(x: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
    """x in rows that start at multiples of 16 bytes, between which lies something else."""
    wide = torch.full((*x.shape[:-1], -(-x.shape[-1] // 16) * 16 + 16), fill, dtype=x.dtype, device=x.device)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


# Arguments beside q (2, 333, 4, 64), k and v (2, 517, 2, 64); built when the test runs.
FEATURES = {
    "window": lambda: dict(window_size=(100, 30)),
    "left window": lambda: dict(window_size=(64, -1)),
    "right window": lambda: dict(window_size=(-1, 5)),
    "causal window": lambda: dict(causal=True, window_size=(128, -1)),
    "window of nothing but itself": lambda: dict(window_size=(0, 0)),
    "softcap": lambda: dict(softcap=2.0),
    "causal softcap": lambda: dict(softcap=5.0, causal=True),
    "scale": lambda: dict(softmax_scale=0.3),
    "negative scale": lambda: dict(softmax_scale=-0.2, causal=True),
    "zero scale": lambda: dict(softmax_scale=0.0),
    "alibi": lambda: dict(alibi_slopes=randn(4, dtype=torch.float32).abs() * 0.1, causal=True),
    "alibi per batch": lambda: dict(alibi_slopes=randn(2, 4, dtype=torch.float32).abs() * 0.1),
    "sink": lambda: dict(learnable_sink=randn(4, dtype=torch.float32), causal=True),
    "sink that dominates": lambda: dict(learnable_sink=randn(4, dtype=torch.float32) + 20),
    "key lengths": lambda: dict(seqused_k=lengths(100, 517)),
    "query lengths": lambda: dict(seqused_q=lengths(333, 50)),
    "both lengths, causal": lambda: dict(seqused_q=lengths(200, 333), seqused_k=lengths(517, 64), causal=True),
    "no keys, no queries": lambda: dict(seqused_q=lengths(333, 0), seqused_k=lengths(0, 517), learnable_sink=randn(4, dtype=torch.float32)),
    "bias": lambda: dict(bias=randn(2, 4, 333, 517)),
    "float32 bias, causal": lambda: dict(bias=randn(2, 4, 333, 517, dtype=torch.float32), causal=True),
    "bias over the batch": lambda: dict(bias=randn(1, 4, 333, 517)),
    "bias over heads": lambda: dict(bias=randn(2, 1, 333, 517)),
    "bias over both": lambda: dict(bias=randn(333, 517)),
    "bias of keys": lambda: dict(bias=randn(2, 1, 1, 517)),
    "bias of queries": lambda: dict(bias=randn(1, 4, 333, 1)),
    "bias of heads": lambda: dict(bias=randn(4, 1, 1)),
    "bias of one number": lambda: dict(bias=randn(1).squeeze()),
    "bias with -inf": lambda: dict(bias=randn(2, 4, 333, 517).masked_fill_(visible(2, 4, 333, 517), float("-inf"))),
    "bias in padded rows": lambda: dict(bias=padded(randn(2, 4, 333, 517), float("nan"))),
    "bias over heads in padded rows, causal": lambda: dict(bias=padded(randn(2, 1, 333, 517), float("nan")), causal=True),
    "bias over both in padded rows, window": lambda: dict(bias=padded(randn(333, 517), float("nan")), window_size=(100, 30)),
    "float16 bias of the batch": lambda: dict(bias=padded(randn(2, 1, 333, 517, dtype=torch.float16))),
    "float32 bias over heads": lambda: dict(bias=randn(2, 1, 333, 517, dtype=torch.float32), window_size=(64, 0)),
    "bias with -inf over heads": lambda: dict(
        bias=padded(randn(2, 1, 333, 517).masked_fill_(visible(2, 1, 333, 517), float("-inf"))),
        learnable_sink=randn(4, dtype=torch.float32),
    ),
    "bias with empty rows": lambda: dict(bias=padded(randn(2, 1, 333, 517).masked_fill_(visible(2, 1, 333, 1), float("-inf")))),
    "bias as low as float32 goes": lambda: dict(
        bias=torch.zeros(2, 1, 1, 517, device="cuda").masked_fill_(visible(2, 1, 1, 517), torch.finfo(torch.float32).min)
    ),
    "bias that is -1e4 everywhere": lambda: dict(bias=padded(randn(2, 1, 333, 517, dtype=torch.float32) - 1e4)),
    "mask in padded rows": lambda: dict(mask=padded(visible(2, 4, 333, 517), True)),
    "mask over heads in padded rows, window": lambda: dict(mask=padded(visible(2, 1, 333, 517), True), window_size=(100, 30)),
    "bias and mask in padded rows": lambda: dict(
        bias=padded(randn(1, 1, 333, 517)),
        mask=padded(visible(2, 1, 333, 517), True),
        causal=True,
        softcap=3.0,
        alibi_slopes=randn(4, dtype=torch.float32).abs() * 0.1,
        seqused_q=lengths(333, 100),
        seqused_k=lengths(100, 517),
    ),
    "mask": lambda: dict(mask=visible(2, 4, 333, 517)),
    "mask over heads, causal": lambda: dict(mask=visible(2, 1, 333, 517), causal=True),
    "key padding": lambda: dict(mask=visible(2, 1, 1, 517)),
    "mask with empty rows": lambda: dict(mask=visible(2, 1, 333, 1) & visible(1, 1, 333, 517)),
    "dropout": lambda: dict(dropout_p=0.3, dropout_seed=0x1234_5678_9ABC_DEF0),
    "causal dropout": lambda: dict(dropout_p=0.1, dropout_seed=-7, causal=True),
    "everything": lambda: dict(
        causal=True,
        window_size=(200, -1),
        softcap=3.0,
        bias=randn(1, 4, 333, 517),
        mask=visible(2, 1, 333, 517),
        alibi_slopes=randn(4, dtype=torch.float32).abs() * 0.05,
        learnable_sink=randn(4, dtype=torch.float32),
        seqused_q=lengths(300, 333),
        seqused_k=lengths(517, 450),
        dropout_p=0.2,
        dropout_seed=11,
        softmax_scale=0.2,
    ),
}


# What tells heads apart that share K and V: there the Hopper kernels leave the backward pass to the portable ones.
OF_HEADS = {
    "bias",
    "float32 bias, causal",
    "bias over the batch",
    "bias of queries",
    "bias of heads",
    "bias with -inf",
    "bias in padded rows",
    "mask in padded rows",
    "mask",
    "everything",
}


@pytest.mark.parametrize("name", FEATURES)
def test_each_feature(backend, name):
    compare({**qkv(), **FEATURES[name]()}, backend, backward="triton" if name in OF_HEADS else "", served=True)


@pytest.mark.parametrize("name", ["bias with -inf", "mask", "everything"])
def test_tensors_of_heads_that_share_nothing(backend, name):
    compare({**qkv(kv_heads=4), **FEATURES[name]()}, backend)


WIDE = (
    "bias in padded rows",
    "bias with -inf over heads",
    "bias of keys",
    "mask over heads in padded rows, window",
    "bias and mask in padded rows",
)


@pytest.mark.parametrize("name", WIDE)
def test_tensors_beside_wide_heads(backend, name):
    compare({**qkv(head_dim=128, kv_heads=4), **FEATURES[name]()}, backend, deterministic=True)


@pytest.mark.parametrize("name", ["window", "softcap", "bias", "everything"])
def test_features_in_float32(backend, name):
    compare({**qkv(dtype=torch.float32), **FEATURES[name]()}, backend)


@pytest.mark.parametrize("heads,kv_heads", [(1, 1), (3, 1), (8, 1), (6, 2), (15, 3), (40, 8), (7, 7)])
def test_head_groups(backend, heads, kv_heads):
    compare({**qkv(1, 130, 200, heads=heads, kv_heads=kv_heads), "causal": True}, backend)


@pytest.mark.parametrize("which", ["q", "k", "v", "all"])
@pytest.mark.parametrize("how", ["heads first", "one element in", "every second", "slice of packed"])
def test_strides_change_nothing(backend, how, which):
    """Each tensor behind other strides, alone and together: the same output and gradients as contiguous inputs, to rounding."""
    plain = qkv(seqlen_q=200, seqlen_k=200)
    dout = randn(2, 200, 4, 64)
    strange = {name: restride(x, how) if which in (name, "all") else x for name, x in plain.items()}

    def results(inputs):
        leaves = {name: x.detach().requires_grad_(differentiates(backend)) for name, x in inputs.items()}
        out, _ = calling(backend)(**leaves, causal=True)
        grads = torch.autograd.grad(out, list(leaves.values()), dout) if differentiates(backend) else ()
        return out.detach(), *grads

    served = how in ("heads first", "slice of packed") or backend == "triton"
    try:
        with watched() as passes:
            got = results(strange)
    except UnsupportedAttention:
        if served:
            pytest.fail(f"{backend} must serve this")
        raise
    assert passes == [f"{backend} forward", f"{backend} backward"][: 1 + differentiates(backend)]
    for mine, expected in zip(got, results(plain), strict=True):
        torch.testing.assert_close(mine, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("how", ["expanded", "transposed", "one element in", "every second"])
def test_any_output_gradient(backend, how):
    inputs = {name: x.requires_grad_() for name, x in qkv(seqlen_q=150, seqlen_k=150).items()}
    dout = {
        "expanded": lambda: randn(1).expand(2, 150, 4, 64),
        "transposed": lambda: randn(2, 4, 150, 64).transpose(1, 2),
        "one element in": lambda: restride(randn(2, 150, 4, 64), how),
        "every second": lambda: restride(randn(2, 150, 4, 64), how),
    }[how]()
    with watched() as passes:
        out = attention(**inputs, backend=backend, deterministic=False)
        got = torch.autograd.grad(out, list(inputs.values()), dout, retain_graph=True)
    assert passes == [f"{backend} forward", f"{backend} backward"]
    expected = torch.autograd.grad(out, list(inputs.values()), dout.contiguous())
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)


def test_layout_bhsd(backend):
    arguments = {name: x.transpose(1, 2).contiguous() for name, x in qkv().items()}
    compare({**arguments, "layout": "bhsd", "causal": True}, backend, served=True)


def test_float32_output_of_16_bit_inputs(backend):
    """An output that is not rounded to 16 bits is closer to the exact one than any that is."""
    inputs = qkv(seqlen_q=256, seqlen_k=256)
    wide, _ = calling(backend, out_dtype=torch.float32)(**inputs)
    narrow, _ = calling(backend)(**inputs)
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(x.double().transpose(1, 2) for x in inputs.values()), enable_gqa=True
    ).transpose(1, 2)
    assert wide.dtype == torch.float32 and narrow.dtype == torch.bfloat16
    assert (wide - exact).abs().max() < (narrow - exact).abs().max()
    torch.testing.assert_close(wide.to(torch.bfloat16), narrow, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("how", ["column", "shared"])
def test_vectors_behind_strides(backend, how):
    """Slopes, sinks and lengths as a column of a table, or one number for all; often enough for what comes again to be played."""

    def behind(x):
        return torch.stack([x + 1, x, x - 1], -1)[..., 1] if how == "column" else x.flatten()[:1].expand(x.shape)

    vectors = {
        "alibi_slopes": randn(3, 4, dtype=torch.float32).abs() * 0.1,
        "learnable_sink": randn(4, dtype=torch.float32),
        "seqused_q": lengths(333, 100, 7),
        "seqused_k": lengths(400, 517, 30),
    }
    inputs = {name: x.detach() for name, x in qkv(3).items()}
    for name, x in vectors.items():
        right = compare({**inputs, name: behind(x), "causal": True}, backend, gradients=False)
        for _ in range(4):
            out, lse = calling(backend)(**inputs, **{name: behind(x)}, causal=True)
            assert torch.equal(out, right.out) and torch.equal(lse, right.lse)


@pytest.mark.parametrize("needed", ["q", "k", "v", "bias", "learnable_sink", "alibi_slopes"])
def test_one_gradient_alone(needed):
    """Whatever single input asks for its gradient, it is the one of the call that computes all."""
    arguments = {
        **qkv(seqlen_q=140, seqlen_k=160),
        "bias": randn(1, 4, 140, 160),
        "learnable_sink": randn(4, dtype=torch.float32),
        "alibi_slopes": randn(4, dtype=torch.float32).abs() * 0.1,
    }
    dout = randn(2, 140, 4, 64)

    def gradient(names):
        leaves = {name: x.detach().requires_grad_(name in names) for name, x in arguments.items()}
        out = attention(**leaves, causal=True, backend="triton", deterministic=True)
        return torch.autograd.grad(out, leaves[needed], dout)[0]

    torch.testing.assert_close(gradient([needed]), gradient(list(arguments)), rtol=0, atol=0)


@pytest.mark.parametrize("needed, server", [("qk", "hopper"), ("qv", "hopper"), ("q", "triton"), ("kv", "triton")])
def test_some_gradients_of_the_hopper_kernels(needed, server):
    """What they do not compute alone, as for keys and values that are not trained, comes from the portable kernels."""
    if "hopper" not in BACKENDS:
        pytest.skip("needs a Hopper GPU")
    inputs, dout = qkv(), randn(2, 333, 4, 64)

    def gradients(names):
        leaves = {name: x.detach().requires_grad_(name in names) for name, x in inputs.items()}
        with watched() as passes:
            out = attention(**leaves, causal=True, backend="hopper", deterministic=True)
            grads = torch.autograd.grad(out, [leaves[name] for name in names], dout)
        return dict(zip(names, grads, strict=True)), passes

    (some, passes), (every, _) = gradients(needed), gradients("qkv")
    assert passes == ["hopper forward", f"{server} backward"]
    for name, got in some.items():
        assert torch.equal(got, every[name]) if server == "hopper" else torch.allclose(got, every[name], rtol=2e-2, atol=2e-2)


# Head dims that share their kernels with others: the tiles of Q, K and V are as wide as the next dim that has some of its own.
OTHER_DIMS = (8, 24, 32, 48, 56, 72, 88, 104, 112, 120, 136, 144, 152, 168, 176, 184, 192, 200, 208, 216, 224, 232, 240, 248)


@pytest.mark.parametrize("dim", OTHER_DIMS)
def test_other_head_dims_of_the_hopper_kernels(dim):
    """With gradients where the dim is the first of those that share tiles."""
    if "hopper" not in BACKENDS:
        pytest.skip("needs a Hopper GPU")
    first = dim in (8, 72, 88, 136, 200)
    compare({**qkv(2, 129, 300, head_dim=dim), "causal": True}, "hopper", gradients=first)


def test_autocast_casts_all_three():
    inputs = qkv(seqlen_q=64, seqlen_k=64, dtype=torch.float32)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = attention(**inputs, backend="triton")
    assert out.dtype == torch.bfloat16
    expected = attention(**{name: x.bfloat16() for name, x in inputs.items()}, backend="triton")
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [dict(seqlen_k=0), dict(seqlen_q=0), dict(batch=0)], ids=str)
def test_empty_sizes(backend, shape):
    inputs = {name: x.requires_grad_(differentiates(backend)) for name, x in qkv(**shape).items()}
    out, lse = calling(backend)(**inputs, causal=True)
    assert torch.all(out == 0) and torch.all(lse == float("-inf"))
    if differentiates(backend):
        for grad in torch.autograd.grad(out.sum(), list(inputs.values())):
            assert torch.all(grad == 0)


PROGRAMS = {
    "relative table": lambda x: dict(score_mod=lambda s, b, h, i, j: s + x["table"][h, i - j + 516]),
    "negative indices": lambda x: dict(score_mod=lambda s, b, h, i, j: s + x["table"][h, i - j], causal=True),
    "gates": lambda x: dict(score_mod=lambda s, b, h, i, j: s * torch.sigmoid(x["slopes"][h]) + x["columns"][b, j] * x["rows"][i]),
    "alibi": lambda x: dict(score_mod=lambda s, b, h, i, j: s - x["slopes"][h] * (i - j).abs(), softcap=5.0),
    "elementary": lambda x: dict(
        score_mod=lambda s, b, h, i, j: torch.exp(0.3 * s) + torch.sin(s) * s.cos() + torch.erf(s) + (s.abs() + 1) ** 1.7 + torch.tanh(s)
    ),
    "documents": lambda x: dict(mask=masks.Custom(lambda b, h, i, j: (i // 100 == j // 100) & ((i ^ j) % 7 != 3))),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_and_what_they_capture(name):
    """Output and every gradient against float64, those of captured tensors within float32 sums of their terms."""
    inputs = qkv()
    captured = {"slopes": randn(4, dtype=torch.float32).abs(), "table": randn(4, 850, dtype=torch.float32)}
    captured |= {"columns": randn(2, 517, dtype=torch.float32), "rows": randn(333, dtype=torch.float32)}
    dout = randn(2, 333, 4, 64)

    def answer(to: torch.dtype | None, **options):
        leaves = {key: x.to(to or x.dtype).clone().requires_grad_() for key, x in {**inputs, **captured}.items()}
        out = attention(*(leaves[key] for key in "qkv"), **PROGRAMS[name](leaves), **options)
        return out, torch.autograd.grad(out, list(leaves.values()), dout.to(out.dtype), allow_unused=True)

    # Gradients of captured tensors are summed in the order of arrival, which deterministic calls leave to the tiled path.
    got, exact = answer(None, backend="triton", deterministic=False), answer(torch.float64, backend="reference")
    torch.testing.assert_close(got[0].double(), exact[0], rtol=2e-2, atol=2e-2)
    for mine, theirs in zip(got[1], exact[1], strict=True):
        if theirs is not None and mine is not None:
            size = theirs.abs().max().item()
            assert (mine.double() - theirs).abs().max() <= 2e-2 * max(size, 1e-3)


RULES = {
    "blocks": lambda: masks.Blocks(torch.rand(2, 4, 6, 9, device="cuda") < 0.4, 64),
    "window": lambda: masks.SlidingWindow(150, 20),
    "documents": lambda: masks.Document(torch.arange(333, device="cuda")[None] // 90, torch.arange(517, device="cuda")[None] // 90),
}


@pytest.mark.parametrize("block_size", [16, 64, 128, (256, 32)], ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_tile_lists(rule, block_size):
    """With lists the kernels visit fewer tiles and compute the same: output and gradients of the same rule without them."""
    mask = RULES[rule]()
    listed = BlockMask(mask, 333, 517, batch=2, heads=4, block_size=block_size, device="cuda")
    inputs = {name: x.requires_grad_() for name, x in qkv().items()}
    dout = randn(2, 333, 4, 64)

    def answer(which):
        out = attention(**inputs, mask=which, backend="triton")
        return out, *torch.autograd.grad(out, list(inputs.values()), dout)

    for mine, theirs in zip(answer(listed), answer(mask.dense(2, 4, 333, 517, device="cuda")), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)
