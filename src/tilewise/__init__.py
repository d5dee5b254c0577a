"""tilewise: exact attention for PyTorch, computed tile by tile so that the N x N matrix never exists."""

from . import masks
from .api import Aux, attention
from .block_mask import BlockMask
from .errors import UnsupportedAttention
from .explaining import explain
from .kvcache import attention_with_kvcache
from .merging import merge

__version__ = "0.1.0"
__all__ = ["Aux", "BlockMask", "UnsupportedAttention", "__version__", "attention", "attention_with_kvcache", "explain", "masks", "merge"]
