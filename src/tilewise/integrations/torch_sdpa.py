"""tilewise as PyTorch's own `scaled_dot_product_attention`, through the extension point of `torch.nn.attention`.

    from tilewise.integrations import torch_sdpa

    torch_sdpa.register()
    torch.nn.attention.activate_flash_attention_impl("tilewise")
    ...
    torch.nn.attention.restore_flash_attention_impl()

While it is active every `F.scaled_dot_product_attention` call of the process, masks and grouped heads included, means what torch's
documentation says and is computed by tilewise: eager, under autocast and inference mode, and in what torch.compile traces from then on.
Two kinds of calls stay torch's: those inside `sdpa_kernel(...)` without `SDPBackend.FLASH_ATTENTION`, and those inside `torch.func`
transforms (call `tilewise.compat.sdpa` there). A call that tilewise refuses raises `UnsupportedAttention`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..compat.sdpa import scaled_dot_product_attention
from ..errors import UnsupportedAttention

NAME = "tilewise"
_DEVICES = ("CPU", "CUDA", "XPU", "MPS")
_operator = torch.ops.aten.scaled_dot_product_attention.default


def register() -> None:
    """Make "tilewise" known to `torch.nn.attention.activate_flash_attention_impl`. Activates nothing; calling it again changes nothing.

    Raises:
        UnsupportedAttention: this torch has no such extension point.
    """
    add = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if add is None:
        raise UnsupportedAttention(
            f"torch {torch.__version__} has no torch.nn.attention.register_flash_attention_impl, so plain F.scaled_dot_product_attention "
            "cannot be given to tilewise; call tilewise.compat.sdpa.scaled_dot_product_attention, which takes the same arguments"
        )
    add(NAME, register_fn=_Active)


class _Active:
    """Lives as long as the implementation is active; torch calls `remove` when another one, or its own, takes over."""

    def __init__(self) -> None:
        # The operator as a whole, not the flash kernel under it: torch sends masks and float32 past that kernel.
        self._library: Any = torch.library.Library("aten", "IMPL")
        for device in _DEVICES:
            for key in (device, f"Autograd{device}"):
                self._library.impl("scaled_dot_product_attention", _dispatch, key)
        _forget()

    def remove(self) -> None:
        self._library._destroy()
        _forget()


def _forget() -> None:
    """What traces keeps, beside the dispatcher, which kernel served the operator: a trace from before must not answer for those to come."""
    getattr(_operator, "_dispatch_cache", {}).clear()


def _dispatch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    options: dict[str, Any] = dict(attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    if not torch.backends.cuda.flash_sdp_enabled() or torch._C._are_functorch_transforms_active():
        return _operator.decompose(query, key, value, **options)
    return scaled_dot_product_attention(query, key, value, **options)
