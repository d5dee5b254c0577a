"""`attn_implementation="tilewise"` for models of the `transformers` library.

    from tilewise.integrations import transformers as tilewise_transformers

    tilewise_transformers.register()
    model = AutoModel.from_pretrained(path, attn_implementation="tilewise")

Masks are built by the library's own boolean builder, the one that its `sdpa` implementation uses, so padding, packing and windows mean
what they mean there. A query that sees no key (left padding) gives zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tilewise.api import attention
from tilewise.errors import UnsupportedAttention

NAME = "tilewise"


def register() -> None:
    """Make `attn_implementation="tilewise"` known to `transformers`. Calling it again changes nothing.

    Raises ImportError, in words, when `transformers` is missing or has no attention interface.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise ImportError(
            "tilewise.integrations.transformers needs transformers 5: install it with `pip install 'tilewise[transformers]'`"
        ) from error
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention of one layer, as `transformers` calls it.

    query (B, Hq, Sq, D), key (B, Hk, Sk, D), value (B, Hk, Sk, Dv); attention_mask is boolean (True = visible) or a floating bias, with
    at least Sk columns; position_bias is added to the scores; s_aux (Hq,) holds the logits of learnable sinks. Returns
    ((B, Sq, Hq, Dv), None), as the probabilities never exist. Raises UnsupportedAttention for what the call cannot express.
    """
    _refuse(attention_mask, kwargs)
    num_queries = query.shape[2]
    causal_module = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    # The builder returns no mask in two cases: every key is visible, or causal order alone decides. A single query is the newest token.
    causal = bool(causal_module) and attention_mask is None and num_queries > 1
    if causal and key.shape[2] > num_queries:
        # An empty preallocated cache is being filled: the slots after the queries hold nothing yet.
        key, value = key[:, :, :num_queries], value[:, :, :num_queries]
        position_bias = None if position_bias is None else position_bias[..., :num_queries]
    num_keys = key.shape[2]

    mask, bias = None, position_bias
    if attention_mask is not None:
        attention_mask = attention_mask[..., :num_keys]
        if attention_mask.dtype == torch.bool:
            mask = attention_mask
        else:
            bias = attention_mask if bias is None else bias + attention_mask

    window_size = (-1, -1)
    if sliding_window is not None and attention_mask is None and num_keys > sliding_window:
        if not causal_module:
            raise UnsupportedAttention(
                f"sliding_window={sliding_window} came without a mask to a layer that is not causal, and models differ in what it "
                "means there; build the mask with transformers.masking_utils.create_bidirectional_sliding_window_mask"
            )
        window_size = (sliding_window - 1, -1)  # there the count includes the query's own key

    out = attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        causal=causal,
        window_size=window_size,
        mask=mask,
        bias=bias,
        softmax_scale=scaling,
        softcap=softcap or 0.0,
        learnable_sink=s_aux,
        dropout_p=dropout,
    )
    return out, None


def _refuse(attention_mask: Any, kwargs: dict[str, Any]) -> None:
    """Raise for arguments that would otherwise be ignored."""
    if attention_mask is not None and not isinstance(attention_mask, Tensor):
        raise UnsupportedAttention(
            f"attention_mask is of type {type(attention_mask).__name__}; tilewise takes a boolean or floating tensor of shape "
            "(B, 1 or Hq, Sq, Sk), which is what its registered mask builder returns"
        )
    if kwargs.get("output_attentions"):
        raise UnsupportedAttention(
            "output_attentions=True asks for the probabilities, which tilewise never stores; load the model with "
            'attn_implementation="eager" to look at them'
        )
    if kwargs.get("head_mask") is not None:
        raise UnsupportedAttention('head_mask is not supported; load the model with attn_implementation="eager" to use it')
    lengths = kwargs.get("cu_seq_lens_q")
    if lengths is not None and len(lengths) > 2 and attention_mask is None:
        raise UnsupportedAttention(
            f"cu_seq_lens_q packs {len(lengths) - 1} sequences, but no mask separates them; pass position_ids that start again at 0 "
            "for each sequence, from which transformers builds that mask"
        )
