"""Calls of attention that together use each pair of features at least once (a covering array of strength two).

A choice names one level for every factor; `build` turns it into tensors and options. The same choices serve tiny shapes, which
the element-by-element oracle can follow, and larger ones that span several tiles.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Choice = dict[str, str]

FACTORS: dict[str, list[str]] = {
    "lengths": ["square", "more_keys", "more_queries", "one_query"],
    "heads": ["mha", "gqa", "mqa"],
    "dims": ["same", "value_wider", "value_narrower"],
    "position": ["none", "causal", "window", "causal_window", "left_only", "right_only"],
    "seqused": ["none", "keys", "queries", "both"],
    "mask": ["none", "full", "key_padding", "per_head", "empty_rows"],
    "bias": ["none", "full", "scalar", "per_head", "per_key", "per_query", "per_batch", "minus_inf"],
    "score_mod": ["none", "relative", "smooth"],
    "scale": ["default", "positive", "negative", "zero"],
    "softcap": ["none", "tight"],
    "alibi": ["none", "per_head", "per_batch"],
    "sink": ["none", "finite"],
    "dropout": ["none", "drop"],
    "layout": ["bshd", "bhsd"],
    "strides": ["contiguous", "transposed", "offset", "inner_two"],
}
OFF: Choice = {factor: levels[0] for factor, levels in FACTORS.items()}


def pairs_of(choice: Choice) -> set[frozenset[tuple[str, str]]]:
    """Every pair of (factor, level) that one choice exercises."""
    return {frozenset(pair) for pair in itertools.combinations(choice.items(), 2)}


def all_pairs(factors: dict[str, list[str]]) -> set[frozenset[tuple[str, str]]]:
    """Every pair of levels of two different factors."""
    settings = [[(factor, level) for level in levels] for factor, levels in factors.items()]
    return {frozenset(pair) for a, b in itertools.combinations(settings, 2) for pair in itertools.product(a, b)}


def covering_array(factors: dict[str, list[str]], candidates: int = 30, seed: int = 0) -> list[Choice]:
    """Greedy: start each row from a pair that is still missing, fill it level by level, keep the best of some candidates."""
    draw = random.Random(seed)
    missing = all_pairs(factors)
    ordered = sorted(missing, key=sorted)
    rows: list[Choice] = []
    while missing:
        first = next(pair for pair in ordered if pair in missing)
        best: Choice = {}
        gain = -1
        for _ in range(candidates):
            row = dict(first)
            rest = [factor for factor in factors if factor not in row]
            draw.shuffle(rest)
            for factor in rest:
                levels = draw.sample(factors[factor], len(factors[factor]))
                row[factor] = max(
                    levels,
                    key=lambda level: sum(frozenset(((factor, level), old)) in missing for old in row.items()),
                )
            found = len(pairs_of(row) & missing)
            if found > gain:
                best, gain = row, found
        missing -= pairs_of(best)
        rows.append({factor: best[factor] for factor in factors})
    return rows


CHOICES = covering_array(FACTORS)
SINGLES = [OFF] + [{**OFF, factor: level} for factor, levels in FACTORS.items() for level in levels[1:]]


def name(choice: Choice) -> str:
    """A readable test id: the features that are on."""
    return "-".join(f"{factor}={level}" for factor, level in choice.items() if level != OFF[factor]) or "plain"


def relative(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """A score function that adds a term of position (its constants are powers of two: exact in every precision)."""
    return score + 0.0625 * (q_idx - kv_idx)


def smooth(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """A score function whose derivative depends on the score, which keeps -inf, and which reads all four indices."""
    return score + 0.5 * torch.tanh(score) - 0.03125 * kv_idx + 0.0078125 * h * q_idx - 0.0625 * b


SCORE_MODS: dict[str, Callable[..., Any]] = {"relative": relative, "smooth": smooth}


@dataclass
class Call:
    """The arguments of one call; `options` holds everything that is given by keyword."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any] = field(default_factory=dict)

    def differentiable(self) -> dict[str, Tensor]:
        """The tensors that have a gradient, by argument name."""
        tensors = {"q": self.q, "k": self.k, "v": self.v}
        for key in ("bias", "alibi_slopes", "learnable_sink"):
            if self.options.get(key) is not None:
                tensors[key] = self.options[key]
        return tensors

    def map(self, change: Callable[[str, Tensor], Tensor]) -> Call:
        """The same call with `change(name, tensor)` in place of each differentiable tensor."""
        new = {key: change(key, tensor) for key, tensor in self.differentiable().items()}
        q, k, v = new.pop("q"), new.pop("k"), new.pop("v")
        return Call(q, k, v, {**self.options, **new})


def restride(x: Tensor, how: str) -> Tensor:
    """The same values behind other strides."""
    if how == "transposed":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "offset":
        flat = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
        flat[1:] = x.reshape(-1)
        return flat[1:].view(x.shape)
    if how == "inner_two":
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), float("nan"), dtype=x.dtype, device=x.device)
        wide[..., ::2] = x
        return wide[..., ::2]
    return x


def build(choice: Choice, *, tiny: bool = False, dtype: torch.dtype = torch.float64, device: str = "cpu", seed: int = 0) -> Call:
    """The tensors and options of one choice. Tiny shapes have a handful of elements, the others span several tiles."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, to: torch.dtype = dtype, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(device=device, dtype=to)

    # The second size of each pair is no multiple of any tile, and long enough that a query tile meets hidden, cut and full tiles.
    sizes = {"square": (4, 4), "more_keys": (3, 5), "more_queries": (5, 3), "one_query": (1, 5)}
    large = {"square": (37, 37), "more_keys": (21, 70), "more_queries": (70, 21), "one_query": (1, 67)}
    size_q, size_k = (sizes if tiny else large)[choice["lengths"]]
    batch = 2
    heads, heads_k = {"mha": (2, 2), "gqa": (4, 2), "mqa": (3, 1)}[choice["heads"]]
    dim = 3 if tiny else 20
    dim_v = {"same": dim, "value_wider": dim + 2, "value_narrower": dim - 1 if tiny else 9}[choice["dims"]]

    def place(x: Tensor) -> Tensor:
        return restride(x.transpose(1, 2) if choice["layout"] == "bhsd" else x, choice["strides"])

    q = place(normal(batch, size_q, heads, dim, scale=1.5))
    k = place(normal(batch, size_k, heads_k, dim, scale=1.5).contiguous())
    v = place(normal(batch, size_k, heads_k, dim_v))
    options: dict[str, Any] = {"layout": choice["layout"]}

    left, right = (1, 1) if tiny else (9, 5)
    match choice["position"]:
        case "causal":
            options["causal"] = True
        case "window":
            options["window_size"] = (left, right)
        case "causal_window":
            options |= {"causal": True, "window_size": (left, right)}
        case "left_only":
            options["window_size"] = (left, -1)
        case "right_only":
            options["window_size"] = (-1, 0)

    lengths_q = torch.tensor([size_q - 1, size_q], dtype=torch.int32, device=device)
    lengths_k = torch.tensor([size_k - (1 if tiny else 6), size_k // 2], dtype=torch.int32, device=device)
    if choice["seqused"] in ("queries", "both"):
        options["seqused_q"] = lengths_q
    if choice["seqused"] in ("keys", "both"):
        options["seqused_k"] = lengths_k

    if choice["mask"] != "none":
        mask_shape = {
            "full": (batch, heads, size_q, size_k),
            "key_padding": (batch, 1, 1, size_k),
            "per_head": (heads, size_q, size_k),
            "empty_rows": (batch, 1, size_q, 1),
        }[choice["mask"]]
        mask = torch.rand(mask_shape, generator=generator) < (0.5 if choice["mask"] == "empty_rows" else 0.7)
        options["mask"] = mask.to(device)

    if choice["bias"] != "none":
        bias_shape: tuple[int, ...] = {
            "full": (batch, heads, size_q, size_k),
            "minus_inf": (batch, heads, size_q, size_k),
            "scalar": (),
            "per_head": (heads, 1, 1),
            "per_key": (1, 1, 1, size_k),
            "per_query": (1, 1, size_q, 1),
            "per_batch": (batch, 1, size_q, size_k),
        }[choice["bias"]]
        bias = normal(*bias_shape)
        if choice["bias"] == "minus_inf":
            bias[(torch.rand(bias_shape, generator=generator) < 0.3).to(device)] = -torch.inf
        options["bias"] = bias

    if choice["score_mod"] != "none":
        options["score_mod"] = SCORE_MODS[choice["score_mod"]]
    if choice["scale"] != "default":
        options["softmax_scale"] = {"positive": 0.7, "negative": -0.3, "zero": 0.0}[choice["scale"]]
    if choice["softcap"] != "none":
        options["softcap"] = 1.5
    if choice["alibi"] != "none":
        shape = (heads,) if choice["alibi"] == "per_head" else (batch, heads)
        options["alibi_slopes"] = normal(*shape, scale=0.1).abs()
    if choice["sink"] != "none":
        options["learnable_sink"] = normal(heads)
    if choice["dropout"] != "none":
        options |= {"dropout_p": 0.3, "dropout_seed": 0x1234_5678_9ABC_DEF0}
    return Call(q, k, v, options)
