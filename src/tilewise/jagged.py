"""`attention` of `torch.nested` tensors of layout ``torch.jagged``: packed sequences under another name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .api import Aux
from .checks import check_layout
from .varlen import attention_varlen


def attention_jagged(q: Any, k: Any, v: Any, layout: str = "bshd", **arguments: Any) -> Any:
    """`attention` of nested q ``(B, j, Hq, D)``, k and v, the ragged dimension first (second with ``layout="bhsd"``).

    The output has q's structure, and so have lse and entropy (B, Hq, j); key_mass has that of k. Lengths come from the tensors.
    """
    check_layout(layout)
    ragged = 2 if layout == "bhsd" else 1
    for name, x in (("q", q), ("k", k), ("v", v)):
        jagged = isinstance(x, Tensor) and x.is_nested and x.layout == torch.jagged
        if not jagged or x.ndim != 4 or x._ragged_idx != ragged:
            got = f"of rank {x.ndim} and ragged in dimension {x._ragged_idx}" if jagged else "not a jagged nested tensor"
            raise ValueError(
                f"{name} is {got}; where q is nested, q, k and v must all be so (layout=torch.jagged), of rank 4 and ragged in dimension "
                f"{ragged} for layout {layout!r}"
            )
    if k.shape[ragged] != v.shape[ragged]:
        raise ValueError("k and v are ragged in different ways; each key needs one value: build both from the same offsets")
    for name in ("seqused_q", "seqused_k"):
        if arguments.get(name) is not None:
            raise ValueError(f"{name} was given with nested tensors, whose lengths are their own; leave it out")
    q, k, v = ((x.transpose(1, 2) if layout == "bhsd" else x) for x in (q, k, v))
    result = attention_varlen(
        q.values(),
        k.values(),
        v.values(),
        q.offsets().to(torch.int32),
        k.offsets().to(torch.int32),
        q._maybe_max_seqlen,
        k._maybe_max_seqlen,
        **arguments | {"seqused_q": _lengths(q), "seqused_k": _lengths(k)},
    )
    if not isinstance(result, tuple):
        return _like(q, result, layout)
    out, aux = result

    def per_head(x: Tensor | None, like: Tensor) -> Tensor | None:
        return None if x is None else _like(like, x.transpose(0, 1).contiguous(), "bhsd")

    return _like(q, out, layout), Aux(per_head(aux.lse, q), aux.max_logits, per_head(aux.key_mass, k), per_head(aux.entropy, q))


def _lengths(x: Any) -> Tensor | None:
    lengths = x.lengths()
    return None if lengths is None else lengths.to(torch.int32)


def _like(x: Any, values: Tensor, layout: str) -> Tensor:
    """Packed values as a nested tensor ragged as x is."""
    bounds = {"min_seqlen": x._maybe_min_seqlen, "max_seqlen": x._maybe_max_seqlen}
    nested = torch.nested.nested_tensor_from_jagged(values, x.offsets(), lengths=x.lengths(), **bounds)
    return nested.transpose(1, 2) if layout == "bhsd" else nested
