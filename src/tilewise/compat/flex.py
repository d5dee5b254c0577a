"""`torch.nn.attention.flex_attention` with the same names, arguments and meaning, computed by tilewise, with or without torch.compile.

    from tilewise.compat.flex import create_block_mask, flex_attention

Differences, all of them: no `torch.compile` is needed for speed or memory, and inside it both functions work too. Rows that see no key
are 0 with an LSE of -inf and gradients of 0. `return_aux.max_scores` cannot be served (`tilewise.attention(return_aux="max_logits")` has
the maximum of a head). Score functions must be traceable: an operation outside the list raises and says so. Options for torch's own
kernels are refused, except those that change no result.

Source of the interface: Dong et al. 2024, "Flex Attention: a programming model for generating optimized attention kernels".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import api
from ..block_mask import BlockMask as TilewiseBlockMask
from ..block_mask import served
from ..errors import UnsupportedAttention
from ..masks import Custom, Mask
from .flex_mask import BlockMask

try:
    from torch.nn.attention.flex_attention import AuxOutput, AuxRequest
except ImportError:  # torch before 2.9
    from typing import NamedTuple

    class AuxRequest(NamedTuple):  # type: ignore[no-redef]
        """Which auxiliary outputs to return."""

        lse: bool = False
        max_scores: bool = False

    class AuxOutput(NamedTuple):  # type: ignore[no-redef]
        """Auxiliary outputs, None for what was not asked for."""

        lse: Tensor | None = None
        max_scores: Tensor | None = None


__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "and_masks",
    "create_block_mask",
    "create_mask",
    "flex_attention",
    "noop_mask",
    "or_masks",
]

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

# What torch's kernels are told about tiles, stages and rounding. Tilewise chooses its own tiles, and is never less exact.
_IGNORED = (
    "BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2", "PRESCALE_QK", "ROWS_GUARANTEED_SAFE", "BLOCKS_ARE_CONTIGUOUS",
    "WRITE_DQ", "FORCE_USE_FLEX_ATTENTION", "USE_TMA", "num_warps", "num_stages", "kpack", "matrix_instr_nonkdim", "waves_per_eu",
    "BACKEND", "OUTPUT_LOGSUMEXP", "OUTPUT_MAX",
)  # fmt: skip


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | Any | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Any:
    """Attention with a function of the scores and a block mask, as `torch.nn.attention.flex_attention.flex_attention`.

    Args:
        query: ``(B, Hq, L, E)``; float16, bfloat16 or float32 (float64 on CPU).
        key: ``(Bkv, Hkv, S, E)``. Bkv is B, or 1 with a block mask of batch size B.
        value: ``(Bkv, Hkv, S, Ev)``.
        score_mod: ``f(score, b, h, q_idx, kv_idx) -> score``; may read tensors, whose gradients flow.
        block_mask: from this module's or torch's own `create_block_mask`, or any `tilewise.BlockMask`.
        scale: default ``1 / sqrt(E)``.
        enable_gqa: allows Hq to be a multiple of Hkv.
        return_lse: also return the LSE ``(B, Hq, L)``, natural logarithm. Deprecated by torch in favour of ``return_aux``.
        kernel_options: options of torch's kernels; those that only tune are ignored, others raise.
        return_aux: ``AuxRequest(lse=True)`` makes the result ``(out, AuxOutput)``.

    Returns:
        ``out`` ``(B, Hq, L, Ev)``, alone or with what was asked for.

    Raises:
        ValueError: shapes that do not fit. UnsupportedAttention: an option or a function that cannot be served.

    Example:
        >>> q, k, v = (torch.randn(1, 2, 64, 16) for _ in range(3))
        >>> mask = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 64, 64, device="cpu")
        >>> flex_attention(q, k, v, block_mask=mask).shape
        torch.Size([1, 2, 64, 16])
    """
    if return_lse and return_aux is not None:
        raise ValueError("return_lse and return_aux are both given; return_lse is the old name of return_aux=AuxRequest(lse=True)")
    if return_aux is not None and return_aux.max_scores:
        raise UnsupportedAttention(
            "return_aux asks for max_scores, which are one number a query; tilewise.attention(return_aux='max_logits') has one a head. "
            "ask for AuxRequest(lse=True)"
        )
    _check_options(kernel_options)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor) or x.ndim != 4:
            raise ValueError(f"{name} must be a tensor of rank 4, (B, H, L, E)")
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(f"query has {query.shape[1]} heads and key {key.shape[1]}; pass enable_gqa=True if that is meant")
    if key.shape[0] == 1 and query.shape[0] > 1:
        if block_mask is None:
            raise ValueError(f"query has batch size {query.shape[0]} and key 1; give key the same, or a block mask that tells items apart")
        key, value = (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
    mask = None if block_mask is None else _own(block_mask)
    arguments = dict(mask=mask, score_mod=score_mod, softmax_scale=scale, layout="bhsd", return_aux="lse")
    out, aux = api.attention(query, key, value, **arguments)  # type: ignore[arg-type]
    if return_aux is not None:
        return out, AuxOutput(lse=aux.lse if return_aux.lse else None, max_scores=None)
    return (out, aux.lse) if return_lse else out


def create_block_mask(
    mask_mod: MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:
    """The tiles of `mask_mod(b, h, q_idx, kv_idx)`, as torch's function of that name; builds no N x N tensor on any device.

    Args:
        mask_mod: True where a query sees a key; q_idx and kv_idx count from 0 in both sequences.
        B: batch size, None where the function does not tell items apart.
        H: query heads, None likewise.
        Q_LEN: number of queries.
        KV_LEN: number of keys.
        device: default: the current accelerator, else the CPU.
        BLOCK_SIZE: 16 to 256 (powers of two), one number or a pair for queries and keys. Other multiples of 16 are cut into such tiles.
        _compile: without effect, as nothing needs compiling.
        separate_full_blocks: without effect on results.
        compute_dq_write_order: without effect: ``tilewise.attention(deterministic=True)`` is how to ask for one order.
        dq_kv_order: likewise.

    Returns:
        A `tilewise.BlockMask`, which answers to the names of torch's as well: see `flex_mask.py`.

    Raises:
        UnsupportedAttention: the function uses an operation that cannot be traced, or blocks that are no multiple of 16.

    Example:
        >>> create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 512, 512, device="cpu").counts()
        {'empty': 6, 'partial': 4, 'full': 6}
    """
    if device is None:
        accelerator = getattr(torch, "accelerator", None)
        device = (accelerator.current_accelerator() if accelerator is not None else None) or "cpu"
    size = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else (BLOCK_SIZE[0], BLOCK_SIZE[1])
    return BlockMask(Custom(mask_mod), Q_LEN, KV_LEN, batch=B or 1, heads=H or 1, block_size=served(size), device=device)


def create_mask(
    mod_fn: MaskMod | ScoreMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
) -> Tensor:
    """The bool tensor (B, H, Q_LEN, KV_LEN) of a mask function, N x N: for looking and for tests.

    >>> create_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 2, 3).int()[0, 0]
    tensor([[1, 0, 0],
            [1, 1, 0]], dtype=torch.int32)
    """
    batch, heads = B or 1, H or 1
    dense = Custom(mod_fn).dense(batch, heads, Q_LEN, KV_LEN, device="cpu" if device is None else device)
    return dense.expand(batch, heads, Q_LEN, KV_LEN)


def and_masks(*mask_mods: MaskMod) -> MaskMod:
    """The mask function that shows what all of these show."""
    _check_callable(mask_mods)

    def and_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        visible = noop_mask(b, h, q_idx, kv_idx)
        for mask_mod in mask_mods:
            visible = visible & mask_mod(b, h, q_idx, kv_idx)
        return visible

    return and_mask


def or_masks(*mask_mods: MaskMod) -> MaskMod:
    """The mask function that shows what any of these shows."""
    _check_callable(mask_mods)

    def or_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        visible = kv_idx < 0
        for mask_mod in mask_mods:
            visible = visible | mask_mod(b, h, q_idx, kv_idx)
        return visible

    return or_mask


def noop_mask(batch: Tensor, head: Tensor, token_q: Tensor, token_kv: Tensor) -> Tensor:
    """Shows everything."""
    return token_kv >= 0


def _check_callable(mask_mods: tuple[Any, ...]) -> None:
    for mask_mod in mask_mods:
        if not callable(mask_mod):
            raise TypeError(f"{mask_mod!r} is no mask function; give functions f(b, h, q_idx, kv_idx) -> bool")


def _check_options(kernel_options: Mapping[str, Any] | None) -> None:
    for name in kernel_options or ():
        if name.removeprefix("fwd_").removeprefix("bwd_") not in _IGNORED:
            raise UnsupportedAttention(
                f"kernel_options has {name!r}, which tilewise does not know; leave it out (tiles are chosen from a table; "
                "tilewise.explain shows them)"
            )


def _own(block_mask: Any) -> TilewiseBlockMask | Mask:
    """A tilewise.BlockMask from whatever block mask was given."""
    if isinstance(block_mask, (TilewiseBlockMask, Mask)):
        return block_mask
    if not hasattr(block_mask, "kv_num_blocks"):
        raise TypeError(f"block_mask is {type(block_mask).__name__}; it must come from create_block_mask, or be a tilewise.BlockMask")
    return TilewiseBlockMask.from_flex(block_mask)
