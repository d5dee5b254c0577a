"""Tile lists against the rule's own predicate, and attention with them against the reference."""

import copy
import pickle
import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from tilewise import BlockMask, UnsupportedAttention, attention, explain, masks, reference, tile_cache, tile_status
from tilewise.kernels import chunks, tiled
from tilewise.masks import Blocks, Causal, Custom, Dense, Dilated, Document, FirstKeys, Full, PrefixLM, SlidingWindow
from tilewise.plan import Operands, Rules

from .comparing import compare


def per_head(b, h, q, k):
    return (q - k + 7 * h) % 40 < 20


def cu(n: int) -> Tensor:
    return torch.tensor([0, n // 3, n // 3, n // 2])


def rules_for(sq: int, sk: int) -> dict[str, masks.Mask]:
    packed = Document.from_cu_seqlens(cu(sq), sq, cu(sk), sk)
    ids_q, ids_k = torch.randint(0, 3, (2, sq)), torch.randint(0, 3, (1, sk))
    blocks = {size: Blocks(torch.rand(1, 3, -(-sq // size), -(-sk // size)) < 0.4, size) for size in (5, 16, 32, 128)}
    return {
        "full": Full(),
        "causal": Causal(),
        "top left": Causal(align="top_left"),
        "window": SlidingWindow(20, 5),
        "diagonal": SlidingWindow(0, 0),
        "left only": SlidingWindow(3, -1),
        "right only": SlidingWindow(-1, 3),
        "chunked": masks.Chunked(20),
        "first keys": FirstKeys(17),
        "dilated": Dilated(3, 50),
        "prefix": PrefixLM(torch.tensor([3, 40])),
        "spans": PrefixLM(spans=torch.tensor([[[3, 9], [50, 80]]])),
        "per head": Custom(per_head),
        "per item": Custom(lambda b, h, q, k: q >= k + b),
        "chunked causal": Causal() & masks.Chunked(30),
        "sink and window": FirstKeys(4) | SlidingWindow(33, 0),
        "future": ~Causal(),
        "dilated out": Causal() & ~SlidingWindow(10, 0),
        "neither": ~(FirstKeys(40) | Causal()),
        "dense": Dense(torch.rand(2, 1, sq, sk) < 0.5),
        "dense keys": Dense(torch.rand(1, sk) < 0.5),
        "sorted documents": Document(ids_q.sort(1).values, ids_k.sort(1).values),
        "documents": Document(ids_q, ids_k),
        "packed": packed,
        "packed causal": packed & Causal(),
        "nothing": ~Full(),
        **{f"blocks {size}": rule for size, rule in blocks.items()},
        **{f"blocks {size} causal": rule & Causal() for size, rule in blocks.items()},
        **{f"blocks {size} or window": rule | SlidingWindow(9, 9) for size, rule in blocks.items()},
    }


@pytest.mark.parametrize("block_size", [16, (32, 16), (16, 64), 128], ids=str)
@pytest.mark.parametrize("sizes", [(100, 100), (37, 150), (150, 37), (1, 70)], ids=str)
def test_every_rule_at_every_size(sizes: tuple[int, int], block_size: int | tuple[int, int]) -> None:
    torch.manual_seed(sum(sizes))
    for rule in rules_for(*sizes).values():
        BlockMask(rule, *sizes, batch=2, heads=3, block_size=block_size).verify()


def test_verify_names_a_wrong_tile() -> None:
    mask = BlockMask(SlidingWindow(3, 0), 64, block_size=16)
    mask.lists.kv_num[0, 0, 2] = 1
    with pytest.raises(AssertionError, match=r"list of keys has tile \(2, 2\) of b=0, h=0 as empty; it is partial"):
        mask.verify()
    mask = copy.deepcopy(BlockMask(SlidingWindow(4, 0), 64, block_size=16))
    mask.lists.q_num[0, 0, 2] = 1
    with pytest.raises(AssertionError, match="list of queries"):
        mask.verify()


def test_programs_give_the_same_status_on_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU looks at the unknown tiles only, other devices at all of them, some rows at a time."""
    monkeypatch.setattr(tile_status, "DEVICE_PAIRS", 1 << 13)
    for rule in (SlidingWindow(33, 2), Custom(per_head), PrefixLM(torch.tensor([3, 40])), Dilated(3, 30)):
        grid = tile_status.Grid(150, 90, 32, 16, *rule.implied_window())
        text, captured = rule.program(150, 90)
        unknown = torch.full((2, 3, grid.rows, grid.width), tile_status.UNKNOWN, dtype=torch.uint8)
        on_device = tile_status._evaluate_rows(text, captured, unknown, grid)
        assert torch.equal(on_device, tile_status._evaluate_unknown(text, captured, unknown, grid))


def test_lists_ascend_and_are_as_short_as_the_window() -> None:
    lists = BlockMask(SlidingWindow(255, 0), 65536, block_size=64).lists
    assert all(x.dtype == torch.int32 and x.is_contiguous() for x in lists.tensors())
    assert lists.kv_idx.shape[3] <= 2 and lists.kv_full_idx.shape[3] <= 4
    assert sum(x.numel() for x in lists.tensors()) < 20 * 65536 // 64
    mask = BlockMask(Custom(per_head), 256, heads=2, block_size=16)
    for number, index in ((mask.lists.kv_num, mask.lists.kv_idx), (mask.lists.q_full_num, mask.lists.q_full_idx)):
        for row, count in zip(index.flatten(0, 2).tolist(), number.flatten().tolist(), strict=True):
            assert row[:count] == sorted(set(row[:count]))


def test_lists_are_shared_where_nothing_tells_items_and_heads_apart() -> None:
    assert BlockMask(Causal(), 64, batch=4, heads=8, block_size=16).shape == (1, 1, 4, 4)
    assert BlockMask(Custom(per_head), 64, batch=4, heads=8, block_size=16).shape == (1, 8, 4, 4)
    assert BlockMask(Document(torch.zeros(4, 64, dtype=torch.long)), 64, heads=8, block_size=16).shape == (4, 1, 4, 4)
    with pytest.raises(ValueError, match="tells heads apart and says nowhere how many"):
        BlockMask(Custom(per_head), 64)


def test_no_square_tensor_for_a_window() -> None:
    """A window over 262,144 tokens takes memory for its own tiles only."""
    started = time.process_time()
    mask = BlockMask(SlidingWindow(1023, 0), 262_144)
    assert time.process_time() - started < 5
    assert sum(x.numel() for x in mask.lists.tensors()) < 40 * 2048
    assert mask.counts()["full"] + mask.counts()["partial"] <= 9 * 2048


# ------------------------------------------------------------------------------------------------------------ constructors


def test_from_dense_bsr_and_topk_agree_with_their_source() -> None:
    torch.manual_seed(0)
    bits = torch.rand(1, 2, 7, 5) < 0.4
    dense = bits.repeat_interleave(16, 2).repeat_interleave(16, 3)[..., :100, :75]
    from_dense = BlockMask.from_dense(dense, block_size=16)
    from_dense.verify()
    chosen = torch.where(bits, torch.arange(5), -1)
    from_topk = BlockMask.from_topk(chosen, 100, 75, block_size=16)
    from_topk.verify()
    assert torch.equal(from_dense.status(), from_topk.status())
    bsr = bits[0, 0].repeat_interleave(16, 0).repeat_interleave(16, 1).float().to_sparse_bsr((16, 16))
    from_bsr = BlockMask.from_bsr(bsr.crow_indices(), bsr.col_indices(), 100, 75, block_size=16)
    assert torch.equal(from_bsr.status()[0, 0], from_topk.status()[0, 0])
    within = BlockMask.from_topk(chosen, 100, 75, block_size=16, within=Causal())
    within.verify()
    assert within.counts()["partial"] > 0


@pytest.mark.parametrize("size", [128, 64, (128, 64), 512], ids=str)
def test_from_flex(size: int | tuple[int, int]) -> None:
    def mask_mod(b, h, q, k):
        return (q >= k) & (q - k < 150 + 50 * h)

    flex = torch_flex.create_block_mask(mask_mod, None, 2, 600, 500, device="cpu", BLOCK_SIZE=size)
    mask = BlockMask.from_flex(flex)
    mask.verify()
    assert torch.equal(mask.dense(1, 2, 600, 500), Custom(mask_mod).dense(1, 2, 600, 500))


def test_from_flex_takes_lists_that_no_function_made() -> None:
    """`from_kv_blocks` may list any blocks; what is not listed stays hidden although the mask function shows it."""
    number, index = torch.tensor([[[1, 1]]]), torch.tensor([[[[1, 0], [0, 1]]]])
    flex = torch_flex.BlockMask.from_kv_blocks(number, index, BLOCK_SIZE=128, mask_mod=lambda b, h, q, k: q >= 0)
    mask = BlockMask.from_flex(flex)
    assert mask.status()[0, 0].gt(0).int().tolist() == [[0, 1], [1, 0]]
    mask.verify()


# -------------------------------------------------------------------------------------------------------- what masks promise


def test_cached_by_content() -> None:
    tile_cache.clear()
    ids = torch.zeros(1, 64, dtype=torch.long)
    first = BlockMask(Document(ids), 64, block_size=16)
    assert BlockMask(Document(ids.clone()), 64, block_size=16).lists is first.lists
    ids[0, 30:] = 1
    second = BlockMask(Document(ids), 64, block_size=16)
    assert second.lists is not first.lists and second.counts() != first.counts()
    assert BlockMask(Document(ids), 64, block_size=32).lists is not second.lists
    assert BlockMask(Custom(lambda b, h, q, k: q >= k), 64).lists is BlockMask(Custom(lambda b, h, i, j: torch.ge(i, j)), 64).lists


def test_another_call_is_right_or_an_error_in_words() -> None:
    q, k, v = torch.randn(3, 2, 64, 2, 8)
    causal, own = BlockMask(Causal(), 64, block_size=16), BlockMask(Custom(per_head), 64, heads=2, block_size=16)
    assert attention(q, k, v, mask=causal).shape == q.shape  # any batch, any heads
    with pytest.raises(ValueError, match=r"built for 64 queries and 64 keys, and the call has 32 and 64; build it for these"):
        attention(q[:, :32], k, v, mask=causal)
    with pytest.raises(ValueError, match="built for 2 heads, and the call has 1"):
        attention(q[:, :, :1], k[:, :, :1], v[:, :, :1], mask=own)
    with pytest.raises(ValueError, match="built for 1 heads, and the call has 2"):
        attention(q, k, v, mask=BlockMask(Custom(per_head), 64, heads=1))
    lengths = torch.tensor([64, 30], dtype=torch.int32)
    for backend in ("auto", "reference"):
        with pytest.raises(UnsupportedAttention, match="depends on the query's position"):
            attention(q, k, v, mask=BlockMask(Causal() & Dilated(2, 8), 64), seqused_k=lengths, backend=backend)
    compare(dict(q=q, k=k, v=v, mask=own, seqused_k=lengths, seqused_q=lengths))  # no position in it: lengths may vary
    with pytest.raises(ValueError, match=r"move it with mask\.to"):
        attention(q, k, v, mask=BlockMask(Custom(per_head), 64, heads=2).to("meta"))


def test_bad_input_in_words() -> None:
    with pytest.raises(TypeError, match=r"use masks\.Custom"):
        BlockMask(per_head, 64)  # type: ignore[arg-type]
    for size in (0, 24, 512, True, (16,), (16, 8)):
        with pytest.raises(ValueError, match="it must be one of 16, 32, 64, 128, 256"):
            BlockMask(Causal(), 64, block_size=size)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="need \\(5,\\)"):
        BlockMask.from_bsr(torch.tensor([0, 1]), torch.tensor([0]), 64, block_size=16)
    with pytest.raises(TypeError, match="int32 or int64"):
        BlockMask.from_topk(torch.zeros(1, 1, 4, 1), 64, block_size=16)
    with pytest.raises(ValueError, match=r"need \(B or 1, H or 1, 4, k\)"):
        BlockMask.from_topk(torch.zeros(1, 1, 3, 1, dtype=torch.long), 64, block_size=16)
    with pytest.raises(UnsupportedAttention, match="multiples of 16"):
        BlockMask.from_flex(torch_flex.create_block_mask(per_head, None, 2, 80, 80, device="cpu", BLOCK_SIZE=40))
    with pytest.raises(TypeError, match=r"tilewise\.BlockMask"):
        attention(*torch.randn(3, 1, 4, 1, 4), mask="causal")


def test_pickle_copy_and_device() -> None:
    mask = BlockMask(Causal() & Document(torch.arange(64)[None] // 20), 64, block_size=16)
    for again in (pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask), mask.to("cpu")):
        assert repr(again) == repr(mask) and torch.equal(again.status(), mask.status())
    assert mask.to("meta").lists.kv_idx.device.type == "meta"


def test_picture(tmp_path) -> None:
    mask = BlockMask(Causal(), 100, block_size=16)
    axes = mask.plot()
    axes.figure.savefig(tmp_path / "mask.png")
    assert axes.get_title() == "Causal(): 57.1% of tiles"


# ------------------------------------------------------------------------------------------------------------ in attention


@pytest.mark.parametrize("name", ["per head", "dense", "blocks 16", "blocks 16 causal", "sink and window", "packed causal", "nothing"])
def test_attention_with_lists_equals_the_reference(name: str) -> None:
    torch.manual_seed(3)
    rule = rules_for(100, 150)[name]
    mask = BlockMask(rule, 100, 150, batch=2, heads=3, block_size=16)
    q = torch.randn(2, 100, 3, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, 150, 1, 8, dtype=torch.float64)
    plain = dict(q=q, k=k, v=v)
    compare(plain | dict(mask=mask))
    compare(plain | dict(mask=mask, causal=True, dropout_p=0.3, dropout_seed=5, softcap=2.0, bias=torch.randn(3, 100, 150).double()))
    compare(
        plain
        | dict(
            mask=mask,
            window_size=(60, 9),
            bias=torch.randn(2, 1, 1, 150).double(),
            alibi_slopes=torch.rand(3).double(),
            learnable_sink=torch.randn(3).double(),
            score_mod=lambda s, b, h, i, j: 1.25 * s + 0.0625 * (i - j),
        )
    )


def test_auxiliary_outputs_with_lists() -> None:
    torch.manual_seed(4)
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 80, 2, 8, dtype=torch.float64))
    mask = BlockMask(Blocks(torch.rand(1, 2, 5, 5) < 0.5, 16), 80, heads=2, block_size=16)
    _, aux = attention(q, k, v, mask=mask, return_aux=("key_mass", "entropy", "max_logits"))
    exact = reference.attention_full(q, k, v, mask=mask)
    torch.testing.assert_close(aux.max_logits, exact.max_logits)
    losses = [(x.key_mass.square().sum() + x.entropy.sum()) for x in (aux, exact)]
    for ours, theirs in zip(*(torch.autograd.grad(loss, (q, k)) for loss in losses), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("seed", range(6))
def test_listed_tiles_are_visited_once_and_no_others(seed: int) -> None:
    torch.manual_seed(seed)
    bits = torch.rand(1 + seed % 2, (1, 4)[seed // 2 % 2], 7, 10) < 0.3
    rule = Blocks(bits, 16) if seed < 4 else Blocks(bits, 16) & Causal()
    mask = BlockMask(rule, 100, 150, block_size=16, batch=2, heads=4)
    q, k = torch.randn(2, 4, 100, 8), torch.randn(2, 4, 150, 8)
    low = mask.lowered
    r = Rules(1.0, window_left=low.window_left, window_right=low.window_right, mask_mod=low.program_text)
    t = Operands(q, k, k, captured=tuple(low.captured), blocks=mask.lists)
    seen = torch.zeros(2, 4, 100, 150, dtype=torch.int64)
    computed = together = 0
    for c in chunks.chunks(t, r, chunks.TileSizes(16, 32, 1 << 12)):
        for i in chunks.query_tiles(c):
            for j, hidden in chunks.key_tiles(c, i):
                for n, run, span in j.spans():
                    tile = seen[c.b, c.heads, i.runs[n], run]
                    several = len(i.runs) > 1
                    shape = (len(i.runs) if several else tile.shape[0], *tile.shape[1:3], j.width)
                    own = slice(n, n + 1) if several else slice(None)
                    tile += 1 if hidden is None else (~hidden).long().expand(shape)[own, ..., span]
                    computed += tile.numel()
                    together = max(together, len(i.runs))
    assert torch.equal(seen, rule.dense(2, 4, 100, 150).long().expand_as(seen))
    pairs = mask.status().gt(0).repeat_interleave(16, 2).repeat_interleave(16, 3)[..., :100, :150]
    assert computed <= pairs.expand_as(seen).sum()
    assert together > 1 or bits.shape[1] == 1


SLOPES = torch.linspace(0.1, 0.9, 4, dtype=torch.float64)


@pytest.mark.parametrize("per_head", [False, True], ids=["shared lists", "lists a head"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": (2, 4, 100, 150), "dropout_p": 0.3, "dropout_seed": 3},
        {"bias": (4, 1, 150), "softcap": 2.0, "learnable_sink": (4,), "kv_heads": 2},
        {"bias": (100, 1), "causal": True, "alibi_slopes": (4,), "kv_heads": 1},
        {"window_size": (40, 10), "seqused_q": torch.tensor([90, 31]), "seqused_k": torch.tensor([150, 70]), "dense": True},
        {"score_mod": lambda s, b, h, q, k: s * SLOPES[h] + (q - k) * 0.125, "kv_heads": 2},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_blocks_of_queries_that_stand_side_by_side(options: dict[str, Any], per_head: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that see equally many keys are one step: outputs and gradients are the reference's, tangents those of blocks one by one."""
    torch.manual_seed(len(options))
    given = dict(options)
    heads = given.pop("kv_heads", 4)
    q, k, v = (torch.randn(2, n, h, 6, dtype=torch.float64) for n, h in ((100, 4), (150, heads), (150, heads)))
    for name in ("bias", "alibi_slopes", "learnable_sink"):
        if name in given:
            given[name] = torch.rand(given[name], dtype=torch.float64)
    given |= {name: given[name].int() for name in ("seqused_q", "seqused_k") if name in given}
    rule = Blocks(torch.rand(1, 4 if per_head else 1, 7, 10).argsort(-1) < 3, 16)  # three of ten in each row
    given["mask"] = rule & Dense(torch.rand(100, 150) < 0.8) if given.pop("dense", False) else rule
    sizes, widest = [], chunks.TileSizes(64, 64, 1 << 13)
    step = tiled.forward_tile
    monkeypatch.setattr(tiled, "forward_tile", lambda c, i, out: (sizes.append(len(i.runs)), step(c, i, out)))
    monkeypatch.setattr(tiled, "CPU_TILES", widest)
    compare({"q": q, "k": k, "v": v, **given}, "tiled")
    assert max(sizes) > 1 or "causal" in given

    def tangents(tiles: chunks.TileSizes) -> list[Tensor]:
        monkeypatch.setattr(tiled, "CPU_TILES", tiles)
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out, aux = attention(*inputs, **given, backend="tiled", return_aux=("key_mass", "entropy"))
        first = torch.autograd.grad((out.sin().sum() + aux.key_mass.square().sum() + aux.entropy.sum()), inputs, create_graph=True)
        second = torch.autograd.grad(sum(x.square().sum() for x in first), inputs)
        return [out.detach(), aux.key_mass.detach(), aux.entropy.detach(), *(x.detach() for x in first), *second]

    for together, alone in zip(tangents(widest), tangents(chunks.TileSizes(64, 64, 1)), strict=True):
        torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-10)


def test_hidden_values_in_skipped_tiles_change_nothing() -> None:
    torch.manual_seed(5)
    bits = torch.rand(1, 1, 4, 4) < 0.5
    bits[..., 2] = False
    q, k, v = torch.randn(3, 1, 64, 1, 8)
    clean = attention(q, k, v, mask=Blocks(bits, 16))
    k[:, 32:48], v[:, 32:48] = torch.nan, torch.inf
    assert torch.equal(attention(q, k, v, mask=Blocks(bits, 16)), clean)


def test_blocks_bring_their_lists_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """B98's kind: `Blocks` by itself, without a BlockMask, already skips tiles."""
    seen = []
    forward = tiled.forward
    monkeypatch.setattr(tiled, "forward", lambda t, r, out: (seen.append(t.blocks), forward(t, r, out)))
    q, k, v = torch.randn(3, 1, 64, 1, 8)
    bits = torch.eye(4, dtype=torch.bool)[None, None]
    attention(q, k, v, mask=Blocks(bits, 16))
    attention(q, k, v, mask=Blocks(bits, 16) & Causal(), causal=True)
    attention(q, k, v, mask=Blocks(torch.eye(8, dtype=torch.bool)[None, None], 8))  # smaller than a tile
    assert [None if lists is None else (lists.block_m, int(lists.kv_full_num.sum())) for lists in seen] == [(16, 4), (16, 0), None]


@pytest.mark.parametrize("rule", [Causal(), Blocks(torch.eye(4, dtype=torch.bool)[None, None], 16), Custom(per_head)], ids=repr)
def test_compiled_without_graph_breaks(rule: masks.Mask) -> None:
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 2, 64, 2, 8))
    mask = BlockMask(rule, 64, heads=2, block_size=16)

    def step(q, k, v, mask):
        return attention(q, k, v, mask=mask)

    out = torch.compile(step, fullgraph=True, backend="aot_eager")(q, k, v, mask)
    expected = step(q, k, v, mask)
    torch.testing.assert_close(out, expected)
    ours, theirs = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, expected))
    torch.testing.assert_close(ours, theirs)


def test_built_inside_a_compiled_function() -> None:
    q, k, v = torch.randn(3, 2, 64, 2, 8)

    def step(q, k, v, bits, ids):
        mask = BlockMask(Document(ids) & Causal() & Blocks(bits, 16), 64, block_size=16)
        return attention(q, k, v, mask=mask)

    inputs = q, k, v, torch.rand(1, 1, 4, 4) < 0.6, torch.arange(64)[None] // 20
    torch.testing.assert_close(torch.compile(step, fullgraph=True, backend="aot_eager")(*inputs), step(*inputs))


def test_transforms_and_opcheck() -> None:
    q, k, v = torch.randn(3, 3, 2, 64, 2, 8)
    shared = BlockMask(Blocks(torch.eye(4, dtype=torch.bool)[None, None], 16), 64, block_size=16)
    own = BlockMask(Blocks(torch.rand(2, 2, 4, 4) < 0.5, 16), 64, block_size=16)
    for mask in (shared, own):
        vmapped = torch.vmap(lambda q, k, v, mask=mask: attention(q, k, v, mask=mask))(q, k, v)
        looped = torch.stack([attention(*one, mask=mask) for one in zip(q, k, v, strict=True)])
        torch.testing.assert_close(vmapped, looped)

        def loss(q, mask=mask):
            return attention(q, k[0], v[0], mask=mask).square().sum()

        eager = q[0].clone().requires_grad_()
        loss(eager).backward()
        torch.testing.assert_close(torch.func.grad(loss)(q[0]), eager.grad)
        torch.testing.assert_close(torch.vmap(torch.func.grad(loss))(q)[0], eager.grad)

    from tilewise import ops
    from tilewise.api import prepare

    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    arguments = prepare(*(x[0].requires_grad_() for x in (q, k, v)), mask=own).op_arguments
    torch.library.opcheck(
        torch.ops.tilewise.attention_forward.default, tuple(arguments[name] for name in ops.FORWARD_ARGS), test_utils=utils
    )
    text, captured = Custom(per_head).program(64, 64)
    unknown = torch.full((1, 2, 4, 4), tile_status.UNKNOWN, dtype=torch.uint8)
    grid = tile_status.Grid(64, 80, 16, 16, 20, 3)
    torch.library.opcheck(torch.ops.tilewise.tile_status.default, (text, captured, unknown, 64, 64, 16, 16, -1, -1))
    torch.library.opcheck(torch.ops.tilewise.tile_status_of_ranges.default, (*torch.randint(0, 80, (2, 3, 64)), *grid.numbers))
    status = torch.randint(0, 3, (1, 2, grid.rows, grid.width), dtype=torch.uint8)
    torch.library.opcheck(torch.ops.tilewise.tile_lists.default, (status, False, *grid.numbers))
    torch.library.opcheck(torch.ops.tilewise.tile_lists.default, (status[:0, 0, 0, 0], True, *grid.numbers))


def test_explain_takes_a_block_mask() -> None:
    q = torch.empty(1, 64, 2, 8)
    found = explain(q, q, q, mask=BlockMask(Blocks(torch.eye(4, dtype=torch.bool)[None, None], 16), 64, block_size=16))
    assert found.backend == "tiled" and found.flops == explain(q, q, q).flops // 4


def test_a_mask_says_when_its_tensors_were_written_to() -> None:
    """Its lists of tiles would hide what the rule now shows."""
    ids = torch.arange(64)[None] // 32
    x = torch.randn(1, 64, 2, 8)
    threshold = torch.tensor([40])
    for written, rule in ((ids, masks.Document(ids)), (threshold, masks.Custom(lambda b, h, i, j: j < threshold[0]))):
        mask = BlockMask(rule, 64, block_size=16)
        copied = copy.deepcopy(mask)
        attention(x, x, x, mask=mask)
        written.zero_()
        refused = r"mask was built from tensors that were written to since.*build it again"
        with pytest.raises(ValueError, match=refused):
            attention(x, x, x, mask=mask)
        attention(x, x, x, mask=copied)
        copied.lowered.captured[0].zero_()
        with pytest.raises(ValueError, match=refused):
            attention(x, x, x, mask=copied)
        again = attention(x, x, x, mask=BlockMask(rule, 64, block_size=16))
        torch.testing.assert_close(again, attention(x, x, x, mask=rule))
