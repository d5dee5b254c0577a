"""Documents one after the other, given as a rule, run as packed sequences wherever that means the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise import BlockMask, attention, explain, given_rules, masks
from tilewise.api import prepare
from tilewise.ops import FORWARD_ARGS

from .comparing import compare
from .helpers import make_inputs

OFFSETS = torch.tensor([0, 5, 5, 17, 12, 40])
RULES: dict[str, Any] = {
    "documents": lambda d: d,
    "causal": lambda d: d & masks.Causal(),
    "window": lambda d: masks.SlidingWindow(3, 2) & d,
    "causal in a window": lambda d: masks.Causal() & (d & masks.SlidingWindow(7, -1)),
}


def document(total: int = 48) -> masks.Document:
    return masks.Document.from_cu_seqlens(OFFSETS, total)


def inputs(total: int = 48, **changes: Any) -> dict[str, Any]:
    return make_inputs(1, total, total, heads=4, kv_heads=2, head_dim=8, dtype=torch.float32, **changes)


def is_packed(**call: Any) -> bool:
    arguments = prepare(**call).op_arguments
    packed = arguments["cu_seqlens_q"] is not None
    assert packed != bool(arguments["mask_mod"]) or not packed
    return packed


@pytest.mark.parametrize("blocked", [False, True], ids=["rule", "block mask"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("name", RULES)
def test_it_means_the_same(name: str, layout: str, blocked: bool) -> None:
    rule = RULES[name](document())
    call = inputs()
    if layout == "bhsd":
        call |= {key: call[key].transpose(1, 2) for key in "qkv"} | {"layout": layout}
    call["mask"] = BlockMask(rule, 48, block_size=16) if blocked else rule
    assert is_packed(**call)
    compare(call)


@pytest.mark.parametrize(
    "more",
    [
        {"causal": True},
        {"window_size": (2, 9)},
        {"softcap": 2.0, "learnable_sink": torch.randn(4)},
        {"alibi_slopes": torch.rand(4)},
    ],
    ids=lambda more: ", ".join(more),
)
def test_what_goes_with_it(more: dict[str, Any]) -> None:
    call = inputs() | {"mask": document() & masks.SlidingWindow(11, 4), **more}
    assert is_packed(**call)
    compare(call)


def test_every_output_has_its_shape() -> None:
    call = inputs() | {"mask": document() & masks.Causal()}
    names = ("lse", "max_logits", "key_mass", "entropy")
    out, aux = attention(**call, return_aux=names)
    expected_out, expected = attention(**call, return_aux=names, backend="reference")
    assert is_packed(**call)
    torch.testing.assert_close(out, expected_out)
    for name in names:
        torch.testing.assert_close(getattr(aux, name), getattr(expected, name))


@pytest.mark.parametrize(
    "call",
    [
        lambda: inputs() | {"mask": masks.Document(document().ids) & masks.Causal()},
        lambda: inputs() | {"mask": document() | masks.Causal()},
        lambda: inputs() | {"mask": ~document()},
        lambda: inputs() | {"mask": document() & masks.Chunked(16)},
        lambda: inputs() | {"mask": document() & document()},
        lambda: inputs() | {"mask": document(), "bias": torch.randn(48, 48)},
        lambda: inputs() | {"mask": document(), "score_mod": lambda score, b, h, q_idx, kv_idx: score + q_idx},
        lambda: inputs() | {"mask": document(), "alibi_slopes": torch.rand(1, 4)},
        lambda: inputs() | {"mask": document(), "seqused_k": torch.tensor([30], dtype=torch.int32)},
        lambda: make_inputs(2, 48, 48, heads=2, head_dim=8, dtype=torch.float32) | {"mask": document()},
        lambda: inputs() | {"mask": masks.Document.from_cu_seqlens(OFFSETS, 48, OFFSETS, 48)},
    ],
    ids=[
        "numbers given", "or", "not", "chunks", "twice", "bias", "score function", "slopes of items", "lengths", "two items", "keys apart",
    ],
)  # fmt: skip
def test_what_else_goes_the_ordinary_way_and_means_the_same(call: Any) -> None:
    given_ = call()
    assert not is_packed(**given_)
    compare(given_)


def test_dropout_is_keyed_by_the_place_in_the_row() -> None:
    call = inputs() | {"mask": document(), "dropout_p": 0.3, "dropout_seed": 7}
    assert not is_packed(**call)
    compare(call)


def test_a_rule_that_somebody_writes_to_is_read_again() -> None:
    rule = document()
    assert is_packed(**inputs(), mask=rule)
    rule.ids[0, 10:] = 99
    assert not is_packed(**inputs(), mask=rule)
    compare(inputs() | {"mask": rule})


def test_offsets_that_change_later_do_not_change_the_rule() -> None:
    offsets = OFFSETS.clone()
    rule = masks.Document.from_cu_seqlens(offsets, 48)
    call = inputs()
    before = attention(**call, mask=rule)
    offsets[2] = 30
    assert is_packed(**call, mask=rule) and torch.equal(attention(**call, mask=rule), before)


def test_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="build it for this length"):
        attention(**inputs(32), mask=document())
    with pytest.raises(ValueError, match="was built for 48 queries"):
        attention(**inputs(32), mask=BlockMask(document(), 48))


def test_what_one_document_holds_never_reaches_another() -> None:
    call = inputs() | {"mask": document() & masks.Causal()}
    clean = attention(**call)
    for name in ("q", "k", "v"):
        call[name] = call[name].clone()
        call[name][:, 5:17] = float("nan")
    out = attention(**call)
    outside = torch.ones(48, dtype=torch.bool)
    outside[5:17] = False
    assert torch.equal(out[:, outside], clean[:, outside]) and out[:, ~outside].isnan().all()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(-3, 50), min_size=1, max_size=7), st.sampled_from(sorted(RULES)), st.integers(1, 50))
def test_any_offsets(offsets: list[int], name: str, total: int) -> None:
    rule = RULES[name](masks.Document.from_cu_seqlens(torch.tensor(offsets), total))
    call = inputs(total) | {"mask": rule}
    assert is_packed(**call)
    compare(call)


@pytest.mark.parametrize("inside", [True, False], ids=["rule made inside", "rule made before"])
def test_compiled_it_is_packed_where_the_graph_makes_the_rule(inside: bool) -> None:
    """Of a rule that was made before, the numbers are read whenever the graph runs."""
    call, offsets, made = inputs(), OFFSETS.clone(), document()
    packed: list[bool] = []

    def keep(graph: Any, _: Any) -> Any:
        (op,) = (node for node in graph.graph.nodes if node.target is torch.ops.tilewise.attention_forward.default)
        packed.append(op.args[FORWARD_ARGS.index("cu_seqlens_q")] is not None)
        return graph

    @torch.compile(backend=keep, fullgraph=True)
    def compiled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        rule = masks.Document.from_cu_seqlens(offsets, 48) if inside else made
        return attention(q, k, v, mask=rule & masks.Causal())

    for other in (OFFSETS, torch.tensor([0, 9, 20, 21, 33, 34])):
        rule = masks.Document.from_cu_seqlens(other, 48)
        offsets.copy_(other)
        made.ids.data.copy_(rule.ids)  # which PyTorch does not count
        torch.testing.assert_close(compiled(**call, offsets=offsets), attention(**call, mask=rule & masks.Causal()))
    assert packed == [inside]


def test_explain_says_so() -> None:
    q = torch.empty(1, 4096, 4, 128, dtype=torch.bfloat16, device="meta")
    rule = masks.Document.from_cu_seqlens(torch.tensor([0, 100, 4096], device="meta"), 4096) & masks.Causal()
    assert explain(q, q, q, mask=rule, device="NVIDIA H200").backend == "hopper"
    assert explain(q, q, q, mask=rule, device="NVIDIA H200", pass_="bwd").backend == "hopper"


def test_where_the_tiled_path_would_look_at_every_key_it_stays_as_it_is() -> None:
    """On a device that is no CPU, with what no kernel for packed sequences serves."""

    def packed(dtype: torch.dtype = torch.bfloat16, head_dim: int = 64, device: str = "meta", **more: Any) -> bool:
        q = torch.empty(1, 48, 4, head_dim, dtype=dtype, device=device)
        rule = masks.Document.from_cu_seqlens(OFFSETS.to(device), 48) & masks.SlidingWindow(9, 0)
        return is_packed(q=q, k=q, v=q, mask=rule, **more)

    assert packed() and packed(torch.float32) and packed(return_aux=("lse", "max_logits")) and packed(backend="triton")
    ordinary: tuple[dict[str, Any], ...] = (
        {"dtype": torch.float64}, {"head_dim": 320}, {"backend": "tiled"}, {"return_aux": "entropy"}, {"return_aux": ["lse", "key_mass"]},
    )  # fmt: skip
    for case in ordinary:
        assert not packed(**case)
        assert packed(**case, device="cpu")
    with torch.autograd.forward_ad.dual_level():
        assert not packed()


# ------------------------------------------------------------------------------------------------- rules that are not documents


@pytest.mark.parametrize(
    "rule, found",
    [
        (lambda: masks.Causal() & masks.Chunked(8), True),
        (lambda: masks.Document(torch.arange(48)[None] // 7), True),
        (lambda: masks.Custom(lambda b, h, q_idx, kv_idx: q_idx - kv_idx < 5), True),
        (lambda: masks.Causal(), False),  # a window, whose tiles are skipped without lists
        (lambda: masks.Custom(lambda b, h, q_idx, kv_idx: q_idx - kv_idx < 5 * h), False),
        (lambda: masks.Dense(torch.rand(48, 48) < 0.5), False),
        (lambda: masks.PrefixLM(torch.tensor([3, 9])), False),
    ],
)
def test_tiles_of_long_rules_are_found_without_a_block_mask(rule: Any, found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    items = 2 if isinstance(rule(), masks.PrefixLM) else 1
    call = make_inputs(items, 48, 48, heads=4, kv_heads=2, head_dim=8, dtype=torch.float32) | {"mask": rule()}
    assert not prepare(**call).op_arguments["blocks"]
    monkeypatch.setattr(given_rules, "MANY", 48 * 48)
    assert bool(prepare(**call).op_arguments["blocks"]) == found
    compare(call)
    with monkeypatch.context() as patch:
        patch.setattr(given_rules.tile_cache, "LARGEST", 15)  # bytes: one tile of 128 x 128 may stand in four lists
        assert not prepare(**call).op_arguments["blocks"]
    lengths = torch.full((items,), 30, dtype=torch.int32)
    assert not prepare(**call, seqused_k=lengths).op_arguments["blocks"]


def test_tiles_of_a_long_rule_that_reads_a_device_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tensors may be written to without a new version, which nothing would notice."""
    monkeypatch.setattr(given_rules, "MANY", 0)
    q = torch.empty(1, 48, 4, 8, device="meta")
    ids = torch.arange(48)[None] // 7
    assert not prepare(q, q, q, mask=masks.Document(ids.to("meta"))).op_arguments["blocks"]
    assert prepare(q, q, q, mask=masks.Chunked(8)).op_arguments["blocks"]
