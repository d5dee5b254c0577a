"""Every misuse raises before any kernel runs, in one sentence: the argument, what was given, what is allowed, what to do."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tilewise
from tilewise import BlockMask, UnsupportedAttention, masks, merge

from .reports import report

B, SQ, SK, HQ, HK, D, DV = 2, 5, 7, 4, 2, 8, 6

KERNEL_OPS = re.compile(r"tilewise::|::(b?mm|addmm|baddbmm|matmul|einsum|softmax|_softmax|exp|_scaled_dot_product.*)$")


class Launches(TorchDispatchMode):
    """Records every operator that would compute part of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if KERNEL_OPS.search(func._schema.name):
            self.seen.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def inputs(dtype: torch.dtype = torch.float32, **changes: Any) -> dict[str, Any]:
    """A call that works, with some arguments replaced."""
    torch.manual_seed(0)
    q, k, v = torch.randn(B, SQ, HQ, D), torch.randn(B, SK, HK, D), torch.randn(B, SK, HK, DV)
    return {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype), **changes}


@contextmanager
def refusal(kinds: type[Exception] | tuple[type[Exception], ...], *pieces: str, launches_op: bool = False) -> Iterator[Any]:
    """Expects an exception whose message is one sentence with all the given pieces, and no kernel before it."""
    with Launches() as launches, pytest.raises(kinds) as caught:
        yield caught
    if not launches_op:
        assert launches.seen == []
    message = str(caught.value)
    for piece in pieces:
        assert re.search(piece, message), f"{piece!r} is not in: {message}"
    assert "\n" not in message.strip(), f"more than one line: {message}"
    assert not re.search(r"[.!?] +[A-Z]", message), f"more than one sentence: {message}"
    assert len(message) > 30, f"too short to say what is allowed: {message}"


def call(arguments: dict[str, Any]) -> Any:
    return tilewise.attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


def test_the_base_call_works() -> None:
    assert call(inputs()).shape == (B, SQ, HQ, DV)


rand = torch.rand
I32 = torch.int32

# id: (the changed arguments, exception, what the message must contain: the argument's name, what was given, what is allowed)
SHAPES = {
    "q_rank_3": ({"q": rand(SQ, HQ, D)}, ValueError, [r"\bq\b", r"5, 4, 8|\b3\b"]),
    "k_rank_3": ({"k": rand(SK, HK, D)}, ValueError, [r"\bk\b", r"7, 2, 8|\b3\b"]),
    "v_rank_5": ({"v": rand(B, SK, HK, DV, 1)}, ValueError, [r"\bv\b", r"2, 7, 2, 6, 1|\b5\b"]),
    "lengths_of_k_and_v": ({"v": rand(B, SK + 1, HK, DV)}, ValueError, [r"\bk\b", r"\bv\b", "7", "8"]),
    "heads_of_k_and_v": ({"v": rand(B, SK, HK + 2, DV)}, ValueError, [r"\bk\b", r"\bv\b", "2", "4"]),
    "batch_of_q_and_k": ({"q": rand(B + 1, SQ, HQ, D)}, ValueError, [r"\bq\b", r"\bk\b", "3", "2"]),
    "batch_of_k_and_v": ({"v": rand(B + 1, SK, HK, DV)}, ValueError, [r"\bv\b", "3", "2"]),
    "head_dims_of_q_and_k": ({"k": rand(B, SK, HK, D + 1)}, ValueError, [r"\bq\b", r"\bk\b", "8", "9"]),
    "heads_do_not_divide": ({"q": rand(B, SQ, 5, D)}, ValueError, ["head", "5", "2", "multiple|divid"]),
    "more_kv_heads_than_q_heads": ({"q": rand(B, SQ, 1, D)}, ValueError, ["head", "1", "2", "multiple|divid"]),
    "no_kv_heads": ({"k": rand(B, SK, 0, D), "v": rand(B, SK, 0, DV)}, ValueError, ["head", "0", "4"]),
    "bhsd_passed_as_bshd": ({"q": rand(B, HQ, SQ, D)}, ValueError, ["head|layout", "5"]),
}
KINDS = {
    "q_list": ({"q": [[1.0]]}, TypeError, [r"\bq\b", "list", "[Tt]ensor"]),
    "q_numpy": ({"q": rand(B, SQ, HQ, D).numpy()}, TypeError, [r"\bq\b", "ndarray", "Tensor"]),
    "window_set": ({"window_size": {1, 2}}, TypeError, ["window_size", r"\{1, 2\}", "pair"]),
    "padding_mask": ({"mask": torch.ones(B, SK) > 0}, ValueError, ["mask", r"\(2, 7\)", "batch item", r"mask\[:, None, None, :\]"]),
    "score_mod_of_one_argument": (
        {"score_mod": lambda s: s},
        TypeError,
        [r"score_mod\(score, b, h, q_idx, kv_idx\)", "of these 5 arguments"],
    ),
    "mask_function_of_two": (
        {"mask": masks.Custom(lambda i, j: i >= j)},
        TypeError,
        [r"mask function\(b, h, q_idx, kv_idx\)", "of these 4 arguments"],
    ),
    "causal_of_numpy": ({"causal": np.bool_(True)}, TypeError, ["causal", "numpy", "must be a bool"]),
    "q_sparse": ({"q": rand(B, SQ, HQ, D).to_sparse()}, TypeError, [r"\bq\b", "sparse_coo", "dense"]),
    "k_nested": ({"k": torch.nested.nested_tensor([rand(SK, HK, D)] * B)}, TypeError, [r"\bk\b", "nested", "dense"]),
    "mask_sparse": ({"mask": torch.ones(SQ, SK, dtype=torch.bool).to_sparse()}, TypeError, ["mask", "sparse_coo", "dense"]),
    "v_none": ({"v": None}, TypeError, [r"\bv\b", "None", "[Tt]ensor"]),
    "integers": ({n: torch.ones(1, 2, 1, 4, dtype=torch.int64) for n in "qkv"}, TypeError, ["int64", "float32"]),
    "complex": ({n: torch.ones(1, 2, 1, 4, dtype=torch.complex64) for n in "qkv"}, TypeError, ["complex64", "float32"]),
    "bool_inputs": ({n: torch.ones(1, 2, 1, 4, dtype=torch.bool) for n in "qkv"}, TypeError, ["bool", "float32"]),
    "q_k_wider_than_v": ({"v": rand(B, SK, HK, DV).bfloat16()}, TypeError, ["float32", "bfloat16", r"\bv\b", r"\bq\b", r"\bk\b"]),
    "three_dtypes": (
        {"q": rand(B, SQ, HQ, D).half(), "k": rand(B, SK, HK, D).bfloat16()},
        TypeError,
        ["float16", "bfloat16", "float32", r"\bq\b", r"\bk\b", r"\bv\b"],
    ),
    "k_on_another_device": (
        {"k": torch.empty(B, SK, HK, D, device="meta")},
        (ValueError, RuntimeError),
        [r"\bk\b", "meta", "cpu"],
    ),
    "mask_on_another_device": (
        {"mask": torch.ones(SQ, SK, dtype=torch.bool, device="meta")},
        (ValueError, RuntimeError),
        ["mask", "meta", "cpu"],
    ),
    "bias_on_another_device": ({"bias": torch.ones(SQ, SK, device="meta")}, (ValueError, RuntimeError), ["bias", "meta", "cpu"]),
    "sink_on_another_device": (
        {"learnable_sink": torch.ones(HQ, device="meta")},
        (ValueError, RuntimeError),
        ["learnable_sink", "meta", "cpu"],
    ),
    "lengths_on_another_device": (
        {"seqused_k": torch.ones(B, dtype=I32, device="meta")},
        (ValueError, RuntimeError),
        ["seqused_k", "meta", "cpu"],
    ),
    "slopes_on_another_device": (
        {"alibi_slopes": torch.ones(HQ, device="meta")},
        (ValueError, RuntimeError),
        ["alibi_slopes", "meta", "cpu"],
    ),
}
WINDOWS = {
    "left_below_minus_one": ({"window_size": (-4, 0)}, ValueError, ["window_size", "-4", "-1"]),
    "right_below_minus_one": ({"window_size": (3, -2)}, ValueError, ["window_size", "-2", "-1"]),
    "one_number": ({"window_size": 3}, (TypeError, ValueError), ["window_size", "3", "left"]),
    "one_element": ({"window_size": (3,)}, (TypeError, ValueError), ["window_size", r"\(3,\)"]),
    "three_elements": ({"window_size": (1, 2, 3)}, (TypeError, ValueError), ["window_size", r"1, 2, 3"]),
    "fractions": ({"window_size": (1.5, 0)}, (TypeError, ValueError), ["window_size", "1.5", "int"]),
    "causal_is_text": ({"causal": "yes"}, TypeError, ["causal", "yes", "bool|True"]),
}
MASKS = {
    "mask_too_long": ({"mask": torch.ones(SQ, SK + 1, dtype=torch.bool)}, ValueError, ["mask", "5, 8", "5, 7"]),
    "mask_cut_short": ({"mask": torch.ones(SQ, SK - 1, dtype=torch.bool)}, ValueError, ["mask", "5, 6", "5, 7"]),
    "mask_of_kv_heads": ({"mask": torch.ones(B, HK, SQ, SK, dtype=torch.bool)}, ValueError, ["mask", "2, 2, 5, 7", "2, 4, 5, 7"]),
    "mask_rank_5": ({"mask": torch.ones(1, 1, 1, SQ, SK, dtype=torch.bool)}, ValueError, ["mask", "1, 1, 1, 5, 7"]),
    "mask_batch_of_keys": ({"mask": torch.ones(B, SK, dtype=torch.bool)}, ValueError, ["mask", "2, 7", "2, 4, 5, 7"]),
    "mask_of_floats": ({"mask": torch.zeros(SQ, SK)}, (TypeError, ValueError), ["mask", "float32", "bool", "bias"]),
    "mask_of_bytes": ({"mask": torch.ones(SQ, SK, dtype=torch.uint8)}, (TypeError, ValueError), ["mask", "uint8", "bool"]),
    "mask_is_text": ({"mask": "causal"}, TypeError, ["mask", "causal|str", "bool"]),
    "bias_too_long": ({"bias": rand(SQ, SK + 1)}, ValueError, ["bias", "5, 8", "5, 7"]),
    "bias_of_kv_heads": ({"bias": rand(HK, SQ, SK)}, ValueError, ["bias", "2, 5, 7", "2, 4, 5, 7"]),
    "bias_rank_5": ({"bias": rand(1, 1, 1, SQ, SK)}, ValueError, ["bias", "1, 1, 1, 5, 7"]),
    "bias_larger_than_batch": ({"bias": rand(B + 1, 1, SQ, SK)}, ValueError, ["bias", "3, 1, 5, 7", "2, 4, 5, 7"]),
    "bias_of_bools": ({"bias": torch.ones(SQ, SK, dtype=torch.bool)}, (TypeError, ValueError), ["bias", "bool", "mask"]),
    "bias_of_integers": ({"bias": torch.ones(SQ, SK, dtype=torch.int64)}, (TypeError, ValueError), ["bias", "int64", "float"]),
    "bias_of_fp8": ({"bias": rand(SQ, SK).to(torch.float8_e4m3fn)}, TypeError, ["bias", "float8", "bfloat16"]),
    "bias_is_a_number": ({"bias": 0.5}, TypeError, ["bias", "0.5|float", "[Tt]ensor"]),
    "score_mod_not_callable": ({"score_mod": 3}, TypeError, ["score_mod", "3|int", "function|callable"]),
}
NUMBERS = {
    "scale_nan": ({"softmax_scale": math.nan}, ValueError, ["softmax_scale", "nan", "finite"]),
    "scale_inf": ({"softmax_scale": math.inf}, ValueError, ["softmax_scale", "inf", "finite"]),
    "scale_beyond_float": ({"softmax_scale": 10**400}, ValueError, ["softmax_scale", "1000", "finite"]),
    "scale_text": ({"softmax_scale": "auto"}, TypeError, ["softmax_scale", "auto|str", "number|float|None"]),
    "softcap_negative": ({"softcap": -1.0}, ValueError, ["softcap", "-1", "0"]),
    "softcap_nan": ({"softcap": math.nan}, ValueError, ["softcap", "nan", "finite|0"]),
    "dropout_negative": ({"dropout_p": -0.1, "dropout_seed": 1}, ValueError, ["dropout_p", "-0.1", "0", "1"]),
    "dropout_one": ({"dropout_p": 1.0, "dropout_seed": 1}, ValueError, ["dropout_p", r"1\.0", "0"]),
    "dropout_above_one": ({"dropout_p": 1.5, "dropout_seed": 1}, ValueError, ["dropout_p", r"1\.5", "0"]),
    "dropout_nan": ({"dropout_p": math.nan, "dropout_seed": 1}, ValueError, ["dropout_p", "nan", "finite|0"]),
    "seed_fraction": ({"dropout_p": 0.1, "dropout_seed": 0.5}, TypeError, ["dropout_seed", "0.5|float", "int"]),
    "seed_vector": (
        {"dropout_p": 0.1, "dropout_seed": torch.zeros(2, dtype=torch.int64)},
        (TypeError, ValueError),
        ["dropout_seed", r"\(2,\)|\[2\]", "0-d|scalar"],
    ),
    "seed_of_floats": (
        {"dropout_p": 0.1, "dropout_seed": torch.tensor(0.5)},
        (TypeError, ValueError),
        ["dropout_seed", "float32", "int64"],
    ),
    "seed_beyond_64_bits": (
        {"dropout_p": 0.1, "dropout_seed": 2**64},
        (ValueError, OverflowError),
        ["dropout_seed", "1844674407", "64"],
    ),
}
PER_HEAD = {
    "slopes_of_kv_heads": ({"alibi_slopes": rand(HK)}, ValueError, ["alibi_slopes", r"\b2\b", r"\b4\b"]),
    "slopes_transposed": ({"alibi_slopes": rand(HQ, B)}, ValueError, ["alibi_slopes", "4, 2", "2, 4"]),
    "slopes_rank_3": ({"alibi_slopes": rand(B, HQ, 1)}, ValueError, ["alibi_slopes", "2, 4, 1", "2, 4"]),
    "slopes_of_integers": (
        {"alibi_slopes": torch.ones(HQ, dtype=torch.int64)},
        (TypeError, ValueError),
        ["alibi_slopes", "int64", "float"],
    ),
    "slopes_list": ({"alibi_slopes": [0.5] * HQ}, TypeError, ["alibi_slopes", "list", "[Tt]ensor"]),
    "sink_of_kv_heads": ({"learnable_sink": rand(HK)}, ValueError, ["learnable_sink", r"\b2\b", r"\b4\b"]),
    "sink_per_batch": ({"learnable_sink": rand(B, HQ)}, ValueError, ["learnable_sink", "2, 4", r"\b4\b"]),
    "sink_of_integers": (
        {"learnable_sink": torch.ones(HQ, dtype=I32)},
        (TypeError, ValueError),
        ["learnable_sink", "int32", "float"],
    ),
}
LENGTHS = {
    "seqused_k_int64": ({"seqused_k": torch.tensor([3, 4])}, (TypeError, ValueError), ["seqused_k", "int64", "int32"]),
    "seqused_q_float": ({"seqused_q": torch.tensor([3.0, 4.0])}, (TypeError, ValueError), ["seqused_q", "float32", "int32"]),
    "seqused_k_too_many": ({"seqused_k": torch.ones(B + 1, dtype=I32)}, ValueError, ["seqused_k", "3", "2"]),
    "seqused_q_rank_2": ({"seqused_q": torch.ones(B, 1, dtype=I32)}, ValueError, ["seqused_q", "2, 1", "2"]),
    "seqused_k_list": ({"seqused_k": [3, 4]}, TypeError, ["seqused_k", "list", "[Tt]ensor"]),
    "checked_negative": (
        {"seqused_k": torch.tensor([-1, 3], dtype=I32), "check_values": True},
        ValueError,
        ["seqused_k", "-1", "7"],
    ),
    "checked_too_long": (
        {"seqused_q": torch.tensor([5, 6], dtype=I32), "check_values": True},
        ValueError,
        ["seqused_q", "6", "5"],
    ),
}
CHOICES = {
    "layout": ({"layout": "sbhd"}, ValueError, ["layout", "sbhd", "bshd", "bhsd"]),
    "backend": ({"backend": "cuda"}, ValueError, ["backend", "cuda", "auto", "tiled"]),
    "deterministic": ({"deterministic": "yes"}, TypeError, ["deterministic", "yes", "True, False, or None"]),
    "out_dtype_narrower": ({"out_dtype": torch.float16}, (TypeError, ValueError), ["out_dtype", "float16", "float32"]),
    "check_values_number": ({"check_values": 3}, TypeError, ["check_values", "3", "bool"]),
    "out_dtype_integer": ({"out_dtype": torch.int32}, (TypeError, ValueError), ["out_dtype", "int32", "float32"]),
    "aux_unknown": (
        {"return_aux": ("lse", "probs")},
        ValueError,
        ["return_aux", "probs", "lse", "max_logits", "key_mass", "entropy"],
    ),
    "aux_true": ({"return_aux": True}, (TypeError, ValueError), ["return_aux", "True|bool", "lse"]),
    "aux_misspelt": ({"return_aux": "LSE"}, ValueError, ["return_aux", "LSE", "lse"]),
}
ALL = {**SHAPES, **KINDS, **WINDOWS, **MASKS, **NUMBERS, **PER_HEAD, **LENGTHS, **CHOICES}


@pytest.mark.parametrize("name", ALL)
def test_misuse_raises_in_words(name: str) -> None:
    changes, kinds, pieces = ALL[name]
    with refusal(kinds, *pieces):
        call(inputs(**changes))


@pytest.mark.parametrize("name", ["q_descale", "k_descale", "v_descale"])
def test_descales_are_reserved(name: str) -> None:
    with refusal(UnsupportedAttention, name, "fp8"):
        call(inputs(**{name: torch.ones(B, HK)}))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_inputs_are_refused(dtype: torch.dtype) -> None:
    """B28: no fp8 path yet, so no backward of one that could give NaN."""
    with refusal((TypeError, UnsupportedAttention), "float8", "bfloat16"):
        call({name: torch.ones(1, 2, 1, 16).to(dtype) for name in "qkv"})


def test_options_are_keyword_only() -> None:
    q, k, v = inputs().values()
    with pytest.raises(TypeError):
        tilewise.attention(q, k, v, True)  # type: ignore[misc]
    with pytest.raises(TypeError, match="is_causal"):
        tilewise.attention(q, k, v, is_causal=True)  # type: ignore[call-arg]


@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_named_backend_serves_or_raises(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU tensors no GPU backend can run; a named backend never falls back."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with refusal(UnsupportedAttention, backend, "cpu|CPU", "tiled|reference|auto|cuda|CUDA", launches_op=True):
        call(inputs(backend=backend))


def test_unsupported_is_one_exception_that_existing_handlers_catch() -> None:
    assert issubclass(UnsupportedAttention, NotImplementedError)


@report(155)
def test_autocast_off_does_not_cast(report: str) -> None:
    """B155: float32 q and k beside a bfloat16 v name all three dtypes."""
    arguments = inputs()
    arguments["v"] = arguments["v"].bfloat16()
    with refusal(TypeError, r"\bq\b.*float32", r"\bk\b.*float32|float32.*\bk\b", r"\bv\b.*bfloat16|bfloat16.*\bv\b"):
        call(arguments)


@report(55)
def test_sizes_that_only_sometimes_matter_are_checked_always(report: str) -> None:
    """B55: a mask built for 20 keys raises at every other length, also the shorter ones that would index inside it."""
    mask = torch.ones(2, 1, 4, 20, dtype=torch.bool)
    q = torch.rand(2, 4, 1, 8)
    for size in [*range(2, 20), 21]:
        k = torch.rand(2, size, 1, 8)
        with refusal(ValueError, "mask", "20", str(size)):
            tilewise.attention(q, k, k, mask=mask)


@pytest.mark.parametrize(
    "sizes", [dict(B=0), dict(SQ=0), dict(SK=0), dict(H=0), dict(D=0), dict(DV=0), dict(B=0, SQ=0, SK=0, H=0, D=0, DV=0)]
)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_zero_sizes_work(sizes: dict[str, int], layout: str) -> None:
    size = {"B": 2, "SQ": 3, "SK": 5, "H": 2, "D": 4, "DV": 6, **sizes}
    shapes = [(size["B"], size["SQ"], size["H"], size["D"])] + [(size["B"], size["SK"], size["H"], size[d]) for d in ("D", "DV")]
    q, k, v = (torch.randn(s).transpose(1, 2) if layout == "bhsd" else torch.randn(s) for s in shapes)
    q, k, v = (x.contiguous().requires_grad_() for x in (q, k, v))
    out, aux = tilewise.attention(q, k, v, layout=layout, return_aux=("lse", "max_logits", "key_mass", "entropy"))
    expected = (size["B"], size["SQ"], size["H"], size["DV"])
    assert (out.transpose(1, 2) if layout == "bhsd" else out).shape == expected
    assert aux.lse.shape == aux.entropy.shape == (size["B"], size["H"], size["SQ"])
    assert aux.key_mass.shape == (size["B"], size["H"], size["SK"])
    assert aux.max_logits.shape == (size["H"],)
    (out.sum() + aux.lse.nan_to_num(neginf=0.0).sum()).backward()
    for x in (q, k, v):
        assert isinstance(x.grad, Tensor)
        assert x.grad.shape == x.shape
        assert x.grad.isfinite().all()


@pytest.mark.parametrize(("name", "shape"), [("v", (6, HK, DV)), ("v", (7, 1, DV)), ("k", (7, 3, D))])
def test_packed_sequences_have_no_layout(name: str, shape: tuple[int, ...]) -> None:
    tensors = {"q": rand(7, HQ, D), "k": rand(7, HK, D), "v": rand(7, HK, DV)} | {name: rand(shape)}
    offsets = torch.tensor([0, 7], dtype=I32)
    with refusal(ValueError, r"\bk\b", r"\bv\b") as caught:
        tilewise.attention_varlen(**tensors, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    assert "layout" not in str(caught.value)


def test_a_wrong_operation_in_a_function_is_not_called_its_arity() -> None:
    with refusal(TypeError, "score_mod", r"abs\(\)") as caught:
        call(inputs(score_mod=lambda score, b, h, q, k: score * abs(q, k)))
    assert "give a function" not in str(caught.value)


def test_backward_inside_a_dual_level_says_to_leave_it() -> None:
    q, k, v = (torch.randn(1, 3, 2, 4, requires_grad=True) for _ in range(3))
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(tilewise.attention(q, forward_ad.make_dual(k, torch.ones_like(k)), v)).tangent
        with refusal(NotImplementedError, "first and second derivatives", r"leave the level before backward\(\)", launches_op=True):
            tangent.sum().backward()
    tangent.sum().backward()
    assert q.grad is not None and q.grad.isfinite().all()


def test_misuse_beside_attention() -> None:
    out = torch.ones(1, 2, 3, 4)
    with refusal(TypeError, r"lses\[1\]", "None", "Tensor"):
        merge([out, out], [torch.zeros(1, 3, 2), None])
    with refusal(TypeError, r"lses\[0\]", "int64", "floating"):
        merge([out], [torch.zeros(1, 3, 2, dtype=torch.int64)])
    with refusal(TypeError, "BlockMask", "seqlen_q", "64.0", "int"):
        BlockMask(masks.Causal(), 64.0)
    with refusal(ValueError, "BlockMask", "seqlen_k", "-1", "0 or more"):
        BlockMask(masks.Causal(), 64, -1)
    pages, table = torch.ones(3, 4, HK, D), torch.zeros(2, 1, dtype=I32)
    offsets = torch.tensor([0, 1, 2], dtype=I32)
    for cu_seqlens_k, seqused_k, words in (([0, 4], None, "cu_seqlens_k 1"), ([0, 4, 8], torch.ones(1, dtype=I32), "seqused_k")):
        with refusal(ValueError, words, "sequence"):
            tilewise.attention_varlen(
                torch.ones(2, HQ, D), pages, pages, offsets, torch.tensor(cu_seqlens_k, dtype=I32), page_table=table, seqused_k=seqused_k
            )
