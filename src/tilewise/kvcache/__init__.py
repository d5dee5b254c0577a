"""Attention over a cache of keys and values, for inference: one file the call, one its meaning, one its operators."""

from .api import attention_with_kvcache

__all__ = ["attention_with_kvcache"]
