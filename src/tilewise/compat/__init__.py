"""The functions that users already call, with their exact signatures, computed by tilewise.

`sdpa` is torch's scaled_dot_product_attention; `flash_attn`, `bert_padding` and `flash_attn_interface` are FlashAttention 2 and 3.
`install()` lets code that says `import flash_attn` find them.
"""

from .installing import install, uninstall

__all__ = ["install", "uninstall"]
