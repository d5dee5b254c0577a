"""tilewise: exact attention for PyTorch, computed tile by tile so that the N x N matrix never exists."""

from typing import TYPE_CHECKING, Any

from .versions import check as _check_versions

_check_versions()  # before imports that an unsupported torch may not survive

from . import masks, packing
from .api import Aux, attention
from .block_mask import BlockMask
from .errors import UnsupportedAttention
from .kvcache import attention_with_kvcache
from .merging import merge
from .varlen import attention_varlen

if TYPE_CHECKING:
    from .explaining import explain

__version__ = "0.1.0"
__all__ = [
    "Aux",
    "BlockMask",
    "UnsupportedAttention",
    "__version__",
    "attention",
    "attention_varlen",
    "attention_with_kvcache",
    "explain",
    "masks",
    "merge",
    "packing",
]


def __getattr__(name: str) -> Any:
    """`explain` and what it computes with are loaded when asked for: a training run or a server does without."""
    if name != "explain":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .explaining import explain

    globals()[name] = explain
    return explain
