"""The exact combination of attention over parts of the keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .checks import typed
from .plan import accumulator_dtype


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor], *, layout: str = "bshd") -> tuple[Tensor, Tensor]:
    """Combines attention over disjoint sets of keys into attention over their union.

    Each part i gives ``outs[i]`` and ``lses[i]``; the result is ``sum_i exp(lse_i - lse) * out_i`` with ``lse = log sum_i exp(lse_i)``:
    the merge rule of softmax (Milakov & Gimelshein 2018) applied to outputs, as in Flash-Decoding. The order of the parts does not
    matter. Give a learnable sink to one part only, since each LSE contains the sink of its own call.

    Args:
        outs: tensors of one shape, ``(B, S, H, Dv)`` or, with ``layout="bhsd"``, ``(B, H, S, Dv)``; rank 3 is packed, ``(total, H, Dv)``.
            Ask `attention` for ``out_dtype=torch.float32`` to lose nothing between the parts.
        lses: ``(B, H, S)``, or ``(H, total)`` for packed outputs; natural logarithm, -inf for rows that see no key of that part.
        layout: ``"bshd"`` or ``"bhsd"``, of the rank-4 outputs.

    Returns:
        ``(out, lse)`` in the shapes of the parts; ``out`` in the dtype of ``outs[0]``, ``lse`` in float32 (float64 for float64).
        Rows that no part sees are 0 and -inf. Differentiable in every argument.

    Raises:
        ValueError: no parts, differing counts, shapes that do not match, or an unknown layout.
        TypeError: a part that is no floating tensor.

    Example:
        >>> from tilewise import attention, merge
        >>> q, k, v = (torch.randn(1, 8, 2, 16) for _ in range(3))
        >>> parts = [attention(q, k[:, s], v[:, s], return_aux="lse") for s in (slice(0, 3), slice(3, 8))]
        >>> out, lse = merge([o for o, _ in parts], [aux.lse for _, aux in parts])
        >>> torch.allclose(out, attention(q, k, v), atol=1e-6)
        True
    """
    if layout not in ("bshd", "bhsd"):
        raise ValueError(f"layout is {layout!r}; it must be 'bshd' or 'bhsd'")
    outs, lses = tuple(outs), tuple(lses)
    if not outs or len(outs) != len(lses):
        raise ValueError(f"merge got {len(outs)} outs and {len(lses)} lses; give one lse for each out, at least one of each")
    for index, part in enumerate(zip(outs, lses, strict=True)):
        for name, x in zip(("outs", "lses"), part, strict=True):
            if not typed(f"{name}[{index}]", x, Tensor).is_floating_point():
                raise TypeError(f"{name}[{index}] has dtype {x.dtype}; it must be floating")
    first = outs[0]
    if first.ndim not in (3, 4):
        raise ValueError(f"outs[0] has shape {tuple(first.shape)}; it must have rank 4 (dense) or 3 (packed)")
    to_out = _lse_to_out(first.ndim, layout)
    for index, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if not out.device == lse.device == first.device:
            raise ValueError(
                f"outs[{index}] is on {out.device}, lses[{index}] on {lse.device} and outs[0] on {first.device}; move them to one device"
            )
        if out.shape != first.shape:
            raise ValueError(f"outs[{index}] has shape {tuple(out.shape)} but outs[0] has {tuple(first.shape)}; all parts must agree")
        if lse.ndim != first.ndim - 1 or to_out(lse).shape[:-1] != first.shape[:-1]:
            raise ValueError(
                f"lses[{index}] has shape {tuple(lse.shape)}, which does not fit outs of shape {tuple(first.shape)} in layout "
                f"{layout!r}; it must be (B, H, S), or (H, total) for packed outputs"
            )

    accumulate = accumulator_dtype(first.dtype)
    stacked = torch.stack([lse.to(accumulate) for lse in lses])
    m = stacked.detach().amax(0)
    m = torch.where(m == float("-inf"), 0.0, m)
    total = torch.exp(stacked - m).sum(0)
    empty = total == 0
    lse = torch.where(empty, float("-inf"), m + torch.log(torch.where(empty, 1.0, total)))
    weights = torch.exp(stacked - torch.where(empty, 0.0, lse))
    merged = torch.zeros_like(first, dtype=accumulate)
    for out, weight in zip(outs, weights, strict=True):
        w = to_out(weight)
        # A part without keys adds nothing, whatever it holds; a weight that is NaN, of an LSE that is no logarithm of a sum, shows.
        merged = merged + torch.where(w == 0, 0.0, w * out.to(accumulate))
    return merged.to(first.dtype), lse


def _lse_to_out(ndim: int, layout: str) -> Callable[[Tensor], Tensor]:
    """How an LSE is turned to broadcast against an output."""
    if ndim == 4 and layout == "bhsd":
        return lambda lse: lse[..., None]
    return lambda lse: lse.transpose(-1, -2)[..., None]
