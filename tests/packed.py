"""Packed calls that the tests of all devices share, and their comparison with the specification."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise import attention_varlen, masks, reference

from .helpers import DIFFERENTIABLE, Answer, run_on_leaves, run_with_grads

I32 = torch.int32


class Size(NamedTuple):
    """How large a case is."""

    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    heads: int
    kv_heads: int

    def shape(self, letters: str) -> tuple[int, ...]:
        """The shape that one letter a dimension spells: sequences, query heads, queries, keys, or 1."""
        named = {"s": len(self.lengths_q), "h": self.heads, "q": max(self.lengths_q), "k": max(self.lengths_k), "1": 1}
        return tuple(named[letter] for letter in letters)


SIZE = Size((5, 0, 70, 1, 37), (6, 33, 0, 64, 40), heads=4, kv_heads=2)
LARGE = Size((129, 0, 333, 1, 300, 64), (200, 33, 0, 64, 513, 64), heads=4, kv_heads=2)  # more than a tile of each Hopper kernel
SMALL = Size((5, 0, 35, 1, 9), (6, 13, 0, 34, 20), heads=2, kv_heads=1)  # a few tiles of the interpreter


def offsets(*lengths: int, device: str = "cpu") -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=I32, device=device)


def parity(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """A mask function that reads every index."""
    return (q_idx + b + h) % 3 != kv_idx % 3


def slanted(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """A score function that reads every index; its constants are exact in every precision."""
    return score + 0.0625 * b - 0.03125 * (q_idx - kv_idx) * h


# What is given by keyword, tensors by their shape (see `Size.shape`) or, of lengths, by their values.
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (9, 5)},
    "causal_window_softcap": {"causal": True, "window_size": (9, -1), "softcap": 1.5},
    "alibi_of_sequences": {"causal": True, "alibi_slopes": "sh"},
    "alibi_sink": {"alibi_slopes": "h", "learnable_sink": "h"},
    "bias_of_sequences": {"bias": "shqk"},
    "bias_shared": {"bias": "hqk", "causal": True, "learnable_sink": "h"},
    "bias_of_keys": {"bias": "s11k"},
    "bias_of_queries": {"bias": "1hq1", "window_size": (20, 20)},
    "bias_of_heads": {"bias": "h11"},
    "mask": {"mask": torch.bool, "alibi_slopes": "h"},
    "dropout": {"dropout_p": 0.4, "dropout_seed": 0x1234_5678_9ABC_DEF0, "causal": True},
    "lengths": {"seqused_q": (3, 9, 30, 1, 0), "seqused_k": (6, 40, 3, 25, 2), "learnable_sink": "h", "causal": True},
    "prefix": {"mask": "prefix", "softcap": 2.0},
    "documents": {"mask": "documents", "causal": True},
    "mask_function": {"mask": "function"},
    "score_mod": {"score_mod": slanted},
}


def build(
    name: str, dtype: torch.dtype = torch.float64, device: str = "cpu", size: Size = SIZE, head_dims: tuple[int, int] = (20, 17)
) -> dict[str, Any]:
    """The arguments of one case, with some rows that belong to no sequence, q, k and v among them. `head_dims`: of keys, of values."""
    generator = torch.Generator().manual_seed(len(name))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device=device, dtype=dtype)

    (most_q,), (most_k,), (sequences,) = map(size.shape, "qks")
    total_q, total_k = sum(size.lengths_q) + 3, sum(size.lengths_k) + 2
    arguments: dict[str, Any] = {
        "q": normal(total_q, size.heads, head_dims[0]),
        "k": normal(total_k, size.kv_heads, head_dims[0]),
        "v": normal(total_k, size.kv_heads, head_dims[1]),
        "cu_seqlens_q": offsets(*size.lengths_q, device=device),
        "cu_seqlens_k": offsets(*size.lengths_k, device=device),
        "max_seqlen_q": most_q,
        "max_seqlen_k": most_k,
    }
    for key, value in CASES[name].items():
        if key in ("bias", "alibi_slopes", "learnable_sink"):
            arguments[key] = normal(*size.shape(value)) * (0.1 if key == "alibi_slopes" else 1.0)
        elif key in ("seqused_q", "seqused_k"):
            arguments[key] = torch.tensor(value, dtype=I32, device=device)
        elif value is torch.bool:
            arguments[key] = (torch.rand(size.shape("s1qk"), generator=generator) < 0.6).to(device)
        elif value == "prefix":
            arguments[key] = masks.PrefixLM(lengths=torch.tensor([2, 5, 9, 20, 7], device=device))
        elif value == "documents":
            ids = [torch.randint(0, 2, (sequences, most), generator=generator).to(device) for most in (most_q, most_k)]
            arguments[key] = masks.Document(*ids)
        elif value == "function":
            arguments[key] = masks.Custom(parity)
        else:
            arguments[key] = value
    return arguments


def specification(**arguments: Any) -> tuple[Tensor, Tensor]:
    full = reference.attention_varlen_full(**arguments)
    return full.out, full.lse


def specified_with_grads(arguments: dict[str, Any], dout: Tensor, dlse: Tensor, compute_dtype: torch.dtype) -> Answer:
    return run_on_leaves(
        lambda **given: specification(**given, compute_dtype=compute_dtype),
        arguments,
        dout,
        dlse,
        lambda x: x.detach().to(compute_dtype).requires_grad_(),
    )


def answers(arguments: dict[str, Any], backend: str, **fixed: Any) -> tuple[Answer, Answer, Answer]:
    """Of `backend`, of the specification in float64 and of the unfused computation in the inputs' dtype."""

    def call(**given: Any) -> tuple[Tensor, Tensor]:
        out, aux = attention_varlen(**given, **fixed, backend=backend, return_aux="lse")
        return out, aux.lse

    q, v = arguments["q"], arguments["v"]
    generator = torch.Generator().manual_seed(7)
    dout, dlse = (torch.randn(shape, generator=generator).to(q.device) for shape in ((*q.shape[:2], v.shape[2]), q.shape[1::-1]))
    got = run_with_grads(call, arguments, dout.to(q.dtype), dlse)
    exact = specified_with_grads(arguments, dout.to(q.dtype), dlse, torch.float64)
    return got, exact, specified_with_grads(arguments, dout.to(q.dtype), dlse, q.dtype)


PARAMETERS = tuple(name for name in DIFFERENTIABLE if name not in ("q", "k", "v"))


def check(arguments: dict[str, Any], backend: str, **fixed: Any) -> Answer:
    """Output, LSE and all gradients, also that of the LSE, as close to float64 as the unfused computation.

    A parameter's gradient sums terms of order one that cancel, each with the rounding of the float32 LSE that its probability is
    recomputed from: those sums, and the differences of nearly equal numbers in dq and dk where few keys are seen, get a wider bound.
    """
    from .helpers import assert_close_to_reference

    got, exact, unfused = answers(arguments, backend, **fixed)
    for name in [name for name in exact.grads if name not in ("v",)]:
        want, size = exact.grads.pop(name), 1.0
        if not want.numel():
            continue
        error, allowed = ((x.grads[name].double() - want).abs().max().item() for x in (got, unfused))
        size = max(1.0, want.abs().max().item())
        eps = max(torch.finfo(got.grads[name].dtype).eps, torch.finfo(torch.float32).eps)
        assert error <= 8.0 * (allowed + eps * size), f"d{name}: error {error:.3e}, unfused {allowed:.3e}"
    assert_close_to_reference(got, exact, unfused)
    return got
