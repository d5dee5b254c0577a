"""Calls of `attention` that other libraries were reported in public to get wrong, with an answer that is written here.

The answer is plain attention over the whole matrix of scores and shares nothing with `tilewise.reference`. A case names the fault and the
public report of it; what may be seen is a bool tensor that the case builds from the meaning of its arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

NEG_INF = -math.inf
I32 = torch.int32


@dataclass
class Case:
    """Arguments of `attention`, and what they mean: who sees whom, and what a score function does to the whole matrix."""

    arguments: dict[str, Any]
    visible: Tensor | None = None
    score: Callable[[Tensor], Tensor] | None = None
    views: dict[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)  # what becomes of a leaf on its way into the call

    def call(self, function: Callable[..., tuple[Tensor, Tensor]], **given: Any) -> tuple[Tensor, Tensor]:
        return function(**{name: self.views[name](x) if name in self.views else x for name, x in given.items()})

    def answer(self, **given: Any) -> tuple[Tensor, Tensor]:
        names = ("q", "k", "v", "bias", "alibi_slopes", "learnable_sink", "softmax_scale", "softcap", "layout", "seqused_q")
        return self.call(
            lambda **g: definition(**{n: g[n] for n in names if n in g}, visible=self.visible, score=self.score), **given
        )  # fmt: skip


def definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    visible: Tensor | None = None,
    score: Callable[[Tensor], Tensor] | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    layout: str = "bshd",
    seqused_q: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) in the dtype of q, from the whole matrix of scores. The bias is widened first, as is a slope."""
    if layout == "bshd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT * (q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    num_queries, num_keys = scores.shape[2:]
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if alibi_slopes is not None:
        p, j = torch.arange(num_queries)[:, None] + num_keys - num_queries, torch.arange(num_keys)
        slopes = alibi_slopes.to(scores.dtype)
        scores = scores - (slopes[:, None, None] if slopes.ndim == 1 else slopes[:, :, None, None]) * (p - j).abs()
    if score is not None:
        scores = score(scores)
    seen = torch.ones_like(scores, dtype=torch.bool) if visible is None else visible.expand(scores.shape)
    seen = seen & (scores != NEG_INF)
    logits = scores.masked_fill(~seen, NEG_INF)
    if learnable_sink is not None:
        rows = learnable_sink.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        logits = torch.cat([logits, rows], 3)
    empty = (logits == NEG_INF).all(3, keepdim=True) if logits.shape[3] else torch.ones_like(logits.sum(3, keepdim=True), dtype=torch.bool)
    if seqused_q is not None:
        empty = empty | (torch.arange(num_queries)[:, None] >= seqused_q.view(-1, 1, 1, 1))
    safe = torch.where(empty, 0.0, logits)
    p = torch.where(empty, 0.0, torch.softmax(safe, 3))[..., :num_keys]
    p = torch.where(seen, p, 0.0)
    lse = torch.where(empty[..., 0], NEG_INF, torch.logsumexp(safe, 3) if logits.shape[3] else safe.sum(3))
    out = p @ v
    return (out.transpose(1, 2) if layout == "bshd" else out), lse


CASES: dict[str, Callable[[], Case]] = {}


def case(name: str) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    def keep(build: Callable[[], Case]) -> Callable[[], Case]:
        assert name not in CASES
        CASES[name] = build
        return build

    return keep


def qkv(
    batch: int = 2, seqlen_q: int = 9, seqlen_k: int | None = None, heads: int = 4, kv_heads: int | None = None, dim: int = 8,
    dim_v: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Random q, k, v of float64; the test casts them."""
    seqlen_k, kv_heads, dim_v = seqlen_k or seqlen_q, kv_heads or heads, dim_v or dim
    shapes = {"q": (batch, seqlen_q, heads, dim), "k": (batch, seqlen_k, kv_heads, dim), "v": (batch, seqlen_k, kv_heads, dim_v)}
    return {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}


def wide(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def coin(*shape: int) -> Tensor:
    return torch.rand(shape) > 0.4


def causal(num_queries: int, num_keys: int) -> Tensor:
    return torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)


def window(num_queries: int, num_keys: int, left: int, right: int) -> Tensor:
    distance = torch.arange(num_keys) - (torch.arange(num_queries)[:, None] + num_keys - num_queries)
    return ((distance >= -left) | (left < 0)) & ((distance <= right) | (right < 0))


# ------------------------------------------------------------------------------------------------------ strides and broadcasts


for _length in (33, 65):

    @case(f"keys expanded over heads, 32n+1 of them, beside a mask: {_length} (pytorch/pytorch#191937)")
    def _(length: int = _length) -> Case:
        visible = coin(2, 1, 8, length)
        views = dict.fromkeys("kv", lambda x: x.expand(-1, -1, 4, -1))
        return Case(qkv(2, 8, length, kv_heads=1) | {"mask": visible}, visible, views=views)


@case("a batch of one expanded over items (openvinotoolkit/openvino#28763)")
def _() -> Case:
    arguments = qkv(1, 9, 12)
    arguments["q"] = wide(3, 9, 4, 8)
    return Case(arguments, views=dict.fromkeys("kv", lambda x: x.expand(3, -1, -1, -1)))


@case("one dimension that is not 1, turned (pytorch/pytorch#116333)")
def _() -> Case:
    return Case(qkv(1, 1, 1, heads=1, dim=2), views=dict.fromkeys("qkv", lambda x: x.transpose(1, 3)))


@case("permuted views of three tokens and dim 64 (pytorch/pytorch#181133)")
def _() -> Case:
    return Case({**qkv(12, 3, heads=3, dim=64), "layout": "bhsd"}, views=dict.fromkeys("qkv", lambda x: x.permute(0, 2, 1, 3)))


@case("permuted views of as many tokens as a tile has (torch-spyre/torch-spyre#4331)")
def _() -> Case:
    return Case({**qkv(1, 64, heads=2), "layout": "bhsd"}, views=dict.fromkeys("qkv", lambda x: x.transpose(1, 2)))


@case("a mask padded by the caller and sliced back (facebookresearch/xformers#813)")
def _() -> Case:
    visible = torch.nn.functional.pad(coin(2, 1, 9, 11), (0, 5, 0, 7), value=True)[:, :, :9, :11].expand(-1, 4, -1, -1)
    return Case(qkv(2, 9, 11) | {"mask": visible}, visible)


@case("columns of a bias for more keys (facebookresearch/xformers#788)")
def _() -> Case:
    return Case(qkv(2, 9, 9) | {"bias": wide(2, 4, 9, 13)}, views={"bias": lambda x: x[..., :9]})


@case("a bias whose queries are turned with its heads (flagos-ai/FlagAttention#5)")
def _() -> Case:
    return Case(qkv(2, 9, 11) | {"bias": wide(2, 9, 11, 4)}, views={"bias": lambda x: x.permute(0, 3, 1, 2)})


@case("slopes that are every second of a longer list (flashinfer-ai/flashinfer#5101)")
def _() -> Case:
    return Case(qkv() | {"alibi_slopes": wide(8).abs()}, views={"alibi_slopes": lambda x: x[1::2]})


@case("slopes of 16 bits for heads that are no power of two (ggml-org/llama.cpp#20031)")
def _() -> Case:
    return Case(qkv(1, 9, heads=12, kv_heads=3) | {"alibi_slopes": (wide(12).abs() / 4).half()})


# -------------------------------------------------------------------------------------------------------------------- masks


@case("padding of items beside grouped heads (ml-explore/mlx-lm#1467)")
def _() -> Case:
    visible = causal(9, 9) & (torch.arange(9) >= torch.tensor([0, 3])[:, None, None, None])
    return Case(qkv(2, 9, heads=10, kv_heads=2) | {"mask": visible}, visible)


@case("a row of keys for each item and no bias (jax-ml/jax#28974)")
def _() -> Case:
    visible = torch.arange(12) < torch.tensor([5, 12])[:, None, None, None]
    return Case(qkv(2, 9, 12) | {"mask": visible}, visible)


@case("lengths of keys without lengths of queries (jax-ml/jax#23349)")
def _() -> Case:
    lengths = torch.tensor([5, 12], dtype=I32)
    return Case(qkv(2, 9, 12) | {"seqused_k": lengths}, torch.arange(12) < lengths[:, None, None, None])


@case("lengths of queries alone (jax-ml/jax#23415)")
def _() -> Case:
    return Case(qkv(2, 9, 12) | {"seqused_q": torch.tensor([5, 9], dtype=I32)})


@case("a window to the right with more keys than queries and no mask (jax-ml/jax#32300)")
def _() -> Case:
    return Case(qkv(2, 20, 24) | {"window_size": (0, 3)}, window(20, 24, 0, 3))


@case("a window of both sides beside a mask (jax-ml/jax#32300)")
def _() -> Case:
    visible = coin(2, 1, 20, 24)
    return Case(qkv(2, 20, 24) | {"window_size": (2, 3), "mask": visible}, visible & window(20, 24, 2, 3))


@case("a window of no key but one's own (fla-org/flash-linear-attention#824)")
def _() -> Case:
    return Case(qkv(1, 20) | {"window_size": (0, 0)}, torch.eye(20, dtype=torch.bool))


@case("a mask that varies along the queries alone, and a bias that does (google-research/tabfm#40)")
def _() -> Case:
    visible = coin(2, 1, 40, 1)
    return Case(qkv(2, 40, 33) | {"mask": visible, "bias": wide(1, 4, 40, 1)}, visible)


@case("half of the queries hidden from all keys (ml-explore/mlx#2626)")
def _() -> Case:
    visible = torch.zeros(9, 9, dtype=torch.bool)
    visible[:4, :4] = True
    return Case(qkv() | {"mask": visible}, visible)


@case("valid rows of a causal mask, later rows like the last (Ascend/pytorch#88)")
def _() -> Case:
    visible = causal(32, 32) & (torch.arange(32) < 25)
    return Case(qkv(1, 32) | {"mask": visible}, visible)


@case("padding and a mask that between them hide rows (pytorch/pytorch#41508)")
def _() -> Case:
    kept = torch.tensor([[1, 1, 1, 0, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1, 1, 1, 1]]).bool()[:, None, None]
    near = window(9, 9, 2, 0)
    return Case(qkv() | {"mask": kept, "window_size": (2, 0)}, kept & near)


@case("items of 5, 4, 1 and 0 keys (pytorch/pytorch#27968)")
def _() -> Case:
    visible = torch.arange(5) < torch.tensor([5, 4, 1, 0])[:, None, None, None]
    return Case(qkv(4, 5) | {"mask": visible}, visible)


@case("a head that sees nothing (pytorch/pytorch#160064)")
def _() -> Case:
    visible = torch.tensor([True, False, True, False]).view(4, 1, 1)
    return Case(qkv() | {"mask": visible}, visible)


@case("one matrix for each item and head, and padding (pytorch/pytorch#63271)")
def _() -> Case:
    visible = (coin(8, 9, 9).view(2, 4, 9, 9)) & (torch.arange(9) < torch.tensor([9, 8])[:, None, None, None])
    return Case(qkv() | {"mask": visible}, visible)


@case("a floating mask without a zero is added, not taken for a boolean one (pytorch/pytorch#107084)")
def _() -> Case:
    return Case(qkv() | {"bias": wide(9, 9) + 5.0})


@case("padding of queries hides their rows and no key (hyunwoongko/transformer#40)")
def _() -> Case:
    real = torch.tensor([[1] * 9, [1] * 4 + [0] * 5]).bool()[:, None, :, None]
    return Case(qkv() | {"mask": real, "causal": True}, real & causal(9, 9))


@case("blocks of 16 that see some blocks of 16 (pytorch/pytorch#141126)")
def _() -> Case:
    from tilewise import masks

    bits = torch.tensor([[1, 0, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0], [1, 1, 0, 1]]).bool()
    visible = bits.repeat_interleave(16, 0).repeat_interleave(16, 1)
    return Case(qkv(1, 64, heads=2) | {"mask": masks.Blocks(bits[None, None], 16)}, visible)


@case("noisy and clean halves of block diffusion (kuleshov-group/bd3lms#23)")
def _() -> Case:
    from tilewise import masks

    def rule(b: Any, h: Any, q: Any, k: Any) -> Any:
        clean_q, clean_k = q >= 20, k >= 20
        block_q, block_k = torch.where(clean_q, q - 20, q) // 5, torch.where(clean_k, k - 20, k) // 5
        own = (block_q == block_k) & (clean_q == clean_k)
        return own | ((block_q > block_k) & clean_k & ~clean_q) | ((block_q >= block_k) & clean_k & clean_q)

    q, k = torch.arange(40)[:, None], torch.arange(40)
    return Case(qkv(1, 40, heads=2) | {"mask": masks.Custom(rule)}, rule(0, 0, q, k))


@case("a table of queries and a length that no block divides (pytorch/pytorch#137801)")
def _() -> Case:
    from tilewise import BlockMask, masks

    shown = coin(37)
    rule = masks.Custom(lambda b, h, q, k: shown[q])
    return Case(qkv(2, 37) | {"mask": BlockMask(rule, 37, block_size=16)}, shown[:, None])


@case("queries and keys whose lengths have no divisor in common (meta-pytorch/attention-gym#71)")
def _() -> Case:
    from tilewise import BlockMask, masks

    ids, kv_ids = torch.arange(37)[None] // 9, torch.arange(50)[None] // 12
    mask = BlockMask(masks.Document(ids, kv_ids), 37, 50, block_size=(16, 32))
    return Case(qkv(1, 37, 50) | {"mask": mask}, ids.mT == kv_ids)


@case("a start of its own for each item (meta-pytorch/attention-gym#97)")
def _() -> Case:
    from tilewise import masks

    starts = torch.tensor([[3], [7]])
    rule = masks.Custom(lambda b, h, q, k: q + starts[b, 0] >= k)
    return Case(qkv(2, 4, 12) | {"mask": rule}, torch.arange(4)[:, None] + starts.view(2, 1, 1, 1) >= torch.arange(12))


@case("documents that differ from item to item (facebookresearch/xformers#760)")
def _() -> Case:
    from tilewise import masks

    ids = torch.tensor([[0, 0, 1, 1, 1, 2, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 1, 2]])
    return Case(qkv() | {"mask": masks.Document(ids), "causal": True}, (ids[:, None, :, None] == ids[:, None, None]) & causal(9, 9))


@case("a mask that was moved is still causal (facebookresearch/xformers#1185)")
def _() -> Case:
    from tilewise import BlockMask, masks

    ids = torch.tensor([[0, 0, 1, 1]])
    rule = (masks.Causal() & masks.Document(ids)).to("cpu")
    return Case(qkv(1, 4) | {"mask": BlockMask(rule, 4, block_size=16).to("cpu")}, (ids.mT == ids) & causal(4, 4))


@case("tree of drafted tokens below the diagonal (PaddlePaddle/FastDeploy#3514)")
def _() -> Case:
    tree = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]).bool()
    visible = torch.cat([torch.ones(5, 12, dtype=torch.bool), tree], 1)
    return Case(qkv(2, 5, 17) | {"mask": visible, "causal": True}, visible)


@case("new tokens behind a cache see it whole (pytorch/pytorch#110144)")
def _() -> Case:
    return Case(qkv(1, 2, 6) | {"causal": True}, torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]]).bool())


for _alignment, _sizes in (("top_left", (4, 2)), ("top_left", (2, 4)), ("bottom_right", (4, 2)), ("bottom_right", (2, 4))):

    @case(f"{_alignment} alignment of {_sizes} (apache/tvm#14907)")
    def _(alignment: str = _alignment, sizes: tuple[int, int] = _sizes) -> Case:
        from tilewise import masks

        offset = sizes[1] - sizes[0] if alignment == "bottom_right" else 0
        visible = torch.ones(sizes, dtype=torch.bool).tril(offset)
        return Case(qkv(1, *sizes) | {"mask": masks.Causal(align=alignment)}, visible)


# ----------------------------------------------------------------------------------------------- order of the terms, values


@case("the bias comes after the scale (facebookresearch/xformers#576)")
def _() -> Case:
    return Case(qkv(1, 9, 11) | {"bias": wide(1, 4, 9, 11) * 3, "softmax_scale": 0.1})


@case("the cap comes before the mask (flashinfer-ai/flashinfer#350)")
def _() -> Case:
    arguments = qkv(1, 20)
    arguments["q"] = arguments["q"] * 12
    return Case(arguments | {"softcap": 3.0, "causal": True}, causal(20, 20))


@case("cap and window together (sgl-project/sglang#33915)")
def _() -> Case:
    arguments = qkv(1, 40, heads=4, kv_heads=2)
    arguments["q"] = arguments["q"] * 12
    return Case(arguments | {"softcap": 5.0, "window_size": (7, 0)}, window(40, 40, 7, 0))


@case("a cap beside a bias that passes it (HKUSTDial/flash-sparse-attention#199)")
def _() -> Case:
    return Case(qkv(1, 9) | {"softcap": 50.0, "bias": wide(9, 9) * 80})


@case("all logits far below 0 and a cut last tile (tracel-ai/cubecl#920)")
def _() -> Case:
    arguments = qkv(1, 9, 17, heads=2)
    arguments["q"][..., 0], arguments["k"][..., 0] = 10.0, -10.0
    return Case(arguments)


for _length in (64, 192):

    @case(f"an LSE below ln of the least float, 128n+64 keys: {_length} (pytorch/pytorch#196678)")
    def _(length: int = _length) -> Case:
        arguments = qkv(1, length, heads=1, dim=16)
        arguments["q"], arguments["k"] = arguments["q"] * 0.1, arguments["k"] * 0.1
        arguments["q"][..., 0], arguments["k"][..., 0] = 1.0, -120.0 * 4
        return Case(arguments | {"mask": causal(length, length)}, causal(length, length))


@case("one query whose LSE is far below 0 (NVIDIA/cudnn-frontend#1072)")
def _() -> Case:
    arguments = qkv(1, 1, 128, heads=2, dim=16)
    arguments["q"][..., 0], arguments["k"][..., 0] = 4.0, -128.0
    return Case(arguments)


@case("zeros: the keys have no gradient (pytorch/pytorch#146377)")
def _() -> Case:
    arguments = qkv(1, 33, heads=2)
    arguments["q"], arguments["k"] = torch.zeros_like(arguments["q"]), torch.zeros_like(arguments["k"])
    return Case({**arguments, "layout": "bshd"}, views={"k": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)})


@case("tiny calls of ordinary numbers (pytorch/pytorch#166211)")
def _() -> Case:
    return Case(qkv(20, 4, heads=4, dim=32))


@case("a tile that fits exactly, with a bias and causal order (bledden/triton-msl#7)")
def _() -> Case:
    return Case(qkv(1, 64, heads=2) | {"bias": wide(1, 2, 64, 64), "causal": True}, causal(64, 64))


@case("a bias of more bits than the inputs (jax-ml/jax#32242)")
def _() -> Case:
    return Case(qkv(3, 20) | {"bias": wide(1, 4, 20, 20).float()})


@case("a bias of its own for each item has its gradient (jax-ml/jax#30593)")
def _() -> Case:
    return Case(qkv(3, 9) | {"bias": wide(3, 4, 9, 9)})


@case("values of another head dim (lucidrains/flash-attention-jax#15)")
def _() -> Case:
    return Case(qkv(2, 9, 11, dim=12, dim_v=20))


@case("slopes behind a cap, seen by grouped heads (Dao-AILab/flash-attention#2876)")
def _() -> Case:
    arguments = qkv(2, 9, 13, heads=4, kv_heads=2) | {"alibi_slopes": wide(2, 4).abs(), "softcap": 2.0, "causal": True}
    return Case(arguments, causal(9, 13))


@case("a table that is shorter than the keys where the mask hides (pytorch/pytorch#150321)")
def _() -> Case:
    from tilewise import masks

    table = wide(32)
    full = torch.cat([table, torch.zeros(1, dtype=torch.float64)])
    rule = masks.Custom(lambda b, h, q, k: (k < 32) & (q >= k))
    return Case(
        qkv(1, 33, heads=2) | {"mask": rule, "score_mod": lambda s, b, h, q, k: s + table[k]},
        causal(33, 33) & (torch.arange(33) < 32),
        score=lambda s: s + full.to(s.dtype),
    )


# -------------------------------------------------------------------------------------------------------------------- sinks


@case("a sink above every score is in the LSE (Dao-AILab/flash-attention#2752)")
def _() -> Case:
    return Case(qkv() | {"learnable_sink": torch.full((4,), 100.0, dtype=torch.float64)})


@case("no keys but a sink (Dao-AILab/flash-attention#2752)")
def _() -> Case:
    arguments = qkv(2, 9, 12) | {"learnable_sink": wide(4), "seqused_k": torch.tensor([0, 7], dtype=I32)}
    return Case(arguments, torch.arange(12) < torch.tensor([0, 7])[:, None, None, None])


@case("a sink under causal order with rows that see nothing (Dao-AILab/flash-attention#2706)")
def _() -> Case:
    return Case(qkv(2, 12, 9) | {"learnable_sink": wide(4), "causal": True}, causal(12, 9))


@case("a sink that takes most of every row (NVIDIA/TransformerEngine#3551)")
def _() -> Case:
    return Case(qkv(2, 33) | {"learnable_sink": wide(4) + 6.0, "window_size": (5, 0)}, window(33, 33, 5, 0))


@case("a sink is not capped (ROCm/rocm-libraries#12227)")
def _() -> Case:
    return Case(qkv(1, 20) | {"learnable_sink": wide(4) * 9, "softcap": 1.5, "causal": True}, causal(20, 20))
