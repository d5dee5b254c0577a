"""What the arguments of FlashAttention's functions, versions 2 and 3, mean to tilewise."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .. import masks
from ..checks import check_window
from ..errors import UnsupportedAttention


def options(
    *,
    causal: bool,
    window_size: Sequence[int],
    softmax_scale: float | None,
    softcap: float | None,
    s_aux: Tensor | None,
    learnable_sink: Tensor | None,
    sm_margin: int = 0,
    attention_chunk: int = 0,
    qv: Tensor | None = None,
    scheduler_metadata: Any = None,
) -> dict[str, Any]:
    """The arguments that tilewise's three functions share. Raises UnsupportedAttention, in words, for what it cannot honour."""
    if qv is not None:
        raise UnsupportedAttention("qv (a second query that meets the values) is not supported; concatenate q with qv and k with v instead")
    if sm_margin:
        raise UnsupportedAttention(f"sm_margin={sm_margin}: tilewise cannot leave multiprocessors to another kernel; pass 0")
    if scheduler_metadata is not None:
        raise UnsupportedAttention("scheduler_metadata was made by another library; pass None, tilewise plans each call by itself")
    return dict(
        causal=causal,
        window_size=check_window(_window(window_size)),
        mask=masks.Chunked(attention_chunk) if attention_chunk else None,
        softmax_scale=softmax_scale,
        softcap=softcap or 0.0,
        learnable_sink=one_of(s_aux=s_aux, learnable_sink=learnable_sink),
    )


def training(
    *,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    alibi_slopes: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> dict[str, Any]:
    """The further arguments of `attention` and `attention_varlen`. `deterministic=False` leaves the choice to torch's own switch."""
    return dict(
        dropout_p=dropout_p,
        deterministic=deterministic or None,
        alibi_slopes=alibi_slopes,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
    )


def one_of(**names: Any) -> Any:
    """The value of an argument that has two names."""
    (first, a), (second, b) = names.items()
    if a is not None and b is not None and a is not b:
        raise ValueError(f"{first} and {second} are two names of one argument; pass one of them")
    return b if a is None else a


def bound(max_seqlen: Any) -> Any:
    """A bound of the lengths. No result needs one, so a tensor, which would have to be read from its device, is left out."""
    if isinstance(max_seqlen, Tensor):
        return None
    if not isinstance(max_seqlen, bool) and isinstance(max_seqlen, numbers.Integral):
        return int(max_seqlen)  # NumPy's, too
    return max_seqlen


def _window(window_size: Any) -> Any:
    """With -1 for None, which is unlimited in FlashAttention-4."""
    if isinstance(window_size, (tuple, list)):
        return tuple(-1 if side is None else side for side in window_size)
    return window_size


def refuse_probabilities(return_attn_probs: bool, dropout_p: float) -> None:
    if return_attn_probs and dropout_p > 0:
        raise UnsupportedAttention(
            "return_attn_probs=True with dropout asks for the (Sq, Sk) matrix of probabilities, which never exists here; with dropout_p=0 "
            "it returns (out, softmax_lse, None)"
        )
