"""tilewise: exact attention for PyTorch, computed tile by tile so that the N x N matrix never exists."""

from . import masks, packing
from .api import Aux, attention
from .block_mask import BlockMask
from .errors import UnsupportedAttention
from .explaining import explain
from .kvcache import attention_with_kvcache
from .merging import merge
from .varlen import attention_varlen
from .versions import check as _check_versions

__version__ = "0.1.0"
_check_versions()
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
