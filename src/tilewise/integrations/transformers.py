"""`attn_implementation="tilewise"` for models of the `transformers` library.

    from tilewise.integrations import transformers as tilewise_transformers

    tilewise_transformers.register()
    model = AutoModel.from_pretrained(path, attn_implementation="tilewise")

Attention and masks are both registered: causal order, windows, padding, packed sequences and caches reach the kernels as rules
(`transformers_masks.py`), softcap, sinks and position biases as what they are. A query that sees no key (left padding) gives zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tilewise.api import attention
from tilewise.errors import UnsupportedAttention
from tilewise.varlen import attention_varlen

from .transformers_masks import RuleMask, build_mask

NAME = "tilewise"


def register() -> None:
    """Make `attn_implementation="tilewise"` known to `transformers`. Calling it again changes nothing.

    Raises ImportError, in words, when `transformers` is missing or has no attention interface.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError(
            "tilewise.integrations.transformers needs transformers 5: install it with `pip install 'tilewise[transformers]'`"
        ) from error
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, build_mask)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | RuleMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention of one layer, as `transformers` calls it.

    query (B, Hq, Sq, D), key (B, Hk, Sk, D), value (B, Hk, Sk, Dv); attention_mask is what `build_mask` made, or boolean (True = visible)
    or a floating bias with at least Sk columns; position_bias is added to the scores; s_aux (Hq,) holds the logits of learnable sinks;
    cu_seq_lens_* (sequences + 1,) are the offsets of packed sequences, which then share one row. Returns ((B, Sq, Hq, Dv), None), as the
    probabilities never exist. Raises UnsupportedAttention for what the call cannot express.
    """
    _refuse(attention_mask, kwargs)
    if (cu_seq_lens_q is None) != (cu_seq_lens_k is None):
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k belong together: with one alone, packed sequences would see each other")
    num_queries, num_keys = query.shape[2], key.shape[2]
    causal = getattr(module, "is_causal", None) if is_causal is None else is_causal
    offsets = None if cu_seq_lens_q is None or cu_seq_lens_k is None else (cu_seq_lens_q, cu_seq_lens_k)
    rules: dict[str, Any] = {}
    if isinstance(attention_mask, RuleMask) and attention_mask.shape[2:] != (num_queries, num_keys):
        attention_mask = attention_mask.dense()  # rules count from the last key, and it is not the one they were made for
    if isinstance(attention_mask, RuleMask):
        rules = attention_mask.arguments()
        offsets = None if attention_mask.documents is None or position_bias is not None else offsets or attention_mask.offsets
    elif attention_mask is not None:
        offsets = None  # the mask separates the sequences, and says more
        attention_mask = attention_mask[..., :num_keys]
        if attention_mask.stride(2) == 0:  # padding alone: one row serves every query
            attention_mask = attention_mask[:, :, :1]
        rules["mask" if attention_mask.dtype == torch.bool else "bias"] = attention_mask
    else:
        # The caller built no mask: causal order alone decides, where the layer has one. A single query is the newest token.
        if causal is None and num_queries > 1 and not type(module).__module__.startswith("transformers."):
            raise UnsupportedAttention(
                f"attention_mask is None, and {type(module).__name__} does not say whether it is causal: set its is_causal, or pass one"
            )
        # Those of the library that do not say so are encoders: build_mask gives every causal layer a mask.
        causal = bool(causal)
        ordered = causal and (num_queries > 1 or offsets is not None)
        if ordered and offsets is None and num_keys > num_queries:
            # An empty preallocated cache is being filled: the slots after the queries hold nothing yet.
            num_keys = num_queries
            key, value = key[:, :, :num_keys], value[:, :, :num_keys]
            position_bias = None if position_bias is None else position_bias[..., :num_keys]
        rules["window_size"] = (_left(sliding_window, causal, num_keys), 0 if ordered else -1)

    if position_bias is not None:
        if offsets is not None:
            raise UnsupportedAttention("position_bias with cu_seq_lens_q: its rows count in the packed row, not in each sequence")
        rules["bias"] = position_bias if rules.get("bias") is None else position_bias + rules["bias"]
    rules |= dict(softmax_scale=scaling, softcap=softcap or 0.0, learnable_sink=s_aux, dropout_p=dropout)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if offsets is None:
        return attention(q, k, v, **rules), None
    rules = {name: value for name, value in rules.items() if name not in ("mask", "seqused_k")}  # the offsets say what these say
    out = attention_varlen(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), *offsets, **rules)
    return out.view(*q.shape[:3], v.shape[3]), None


def _left(sliding_window: int | None, causal: bool, num_keys: int) -> int:
    """How many keys before its own a query sees, in a call that came without a mask."""
    if sliding_window is None:
        return -1
    if isinstance(sliding_window, bool) or not isinstance(sliding_window, int) or sliding_window < 1:
        raise ValueError(
            f"sliding_window is {sliding_window!r}; it must be how many keys a query sees, its own included: 1 or more, or None for all"
        )
    if num_keys <= sliding_window:
        return -1
    if not causal:
        raise UnsupportedAttention(
            f"sliding_window={sliding_window} came without a mask to a layer that is not causal, and models differ in what it "
            "means there; build the mask with transformers.masking_utils.create_bidirectional_sliding_window_mask"
        )
    return sliding_window - 1  # there the count includes the query's own key


def _refuse(attention_mask: Any, kwargs: dict[str, Any]) -> None:
    """Raise for arguments that would otherwise be ignored."""
    if attention_mask is not None and not isinstance(attention_mask, (Tensor, RuleMask)):
        raise UnsupportedAttention(
            f"attention_mask is of type {type(attention_mask).__name__}; tilewise takes a boolean or floating tensor of shape "
            "(B, 1 or Hq, Sq, Sk), or what its registered mask builder returns"
        )
    if isinstance(attention_mask, Tensor) and (
        attention_mask.ndim != 4 or not (attention_mask.dtype == torch.bool or attention_mask.is_floating_point())
    ):
        raise UnsupportedAttention(
            f"attention_mask is {attention_mask.dtype} of shape {tuple(attention_mask.shape)}; it must be boolean, True = visible, or "
            "floating and added to the scores, and (B, 1 or Hq, Sq, Sk): a padding mask (B, Sk) is attention_mask.bool()[:, None, None]"
        )
    if kwargs.get("output_attentions"):
        raise UnsupportedAttention(
            "output_attentions=True asks for the probabilities, which tilewise never stores; load the model with "
            'attn_implementation="eager" to look at them'
        )
    if kwargs.get("head_mask") is not None:
        raise UnsupportedAttention('head_mask is not supported; load the model with attn_implementation="eager" to use it')
