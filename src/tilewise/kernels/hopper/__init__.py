"""Attention on Hopper GPUs (sm_90): TMA, wgmma and warp specialisation, written in Gluon.

`why_not` says what these kernels cannot serve; such a call goes to the portable Triton kernels, with the same meaning.
"""

from __future__ import annotations

import importlib.util
import re
from functools import cache, lru_cache
from typing import TYPE_CHECKING

import torch

from ...late import imported

if TYPE_CHECKING:
    from torch import Tensor

    from ...plan import Cotangents, Gradients, Operands, Outputs, Request, Rules, Saved, Target

HEAD_DIM_LIMIT = 256
LISTED = 128  # queries and keys that make the blocks of lists


@cache
def _gluon_missing() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    version = imported("triton").__version__
    release = tuple(int(part) for part in version.split(".")[:2])
    return None if release >= (3, 6) else f"Triton {version} is older than 3.6"


def why_not(t: Operands, r: Rules, request: Request, target: Target) -> str | None:
    """Why this backend cannot serve a call, in words; None if it can. Reads no values: meta tensors will do."""
    if target.type != "cuda" or target.hip or target.capability != (9, 0):
        return "it needs a Hopper GPU (compute capability 9.0)"
    missing = _gluon_missing()
    if missing is not None:
        return missing
    return (
        _unserved_rule(t, r, request) or _unserved_tensor(t, request) or (_unserved_gradient(t, r, request) if request.backward else None)
    )


def _unserved_rule(t: Operands, r: Rules, request: Request) -> str | None:
    if t.cu_seqlens_q is not None and t.k.shape[2] == 0:
        return "its packed sequences need a key"
    for name, x in (("bias", t.bias), ("mask", t.mask)):
        refusal = None if x is None else _unserved_matrix(name, x, t, request)
        if refusal is not None:
            return refusal
    if r.dropout_p > 0 and r.window_left >= 0 and t.cu_seqlens_q is not None:
        # Tiles would start at multiples of four keys, before the window, and V may hold anything there.
        return "beside dropout it does not cut packed sequences at a left window"
    if request.aux:
        return f"it does not return {', '.join(sorted(request.aux))}"
    if r.score_mod or (r.mask_mod and t.blocks is None):
        return "it does not run score or mask functions"
    if t.blocks is not None:
        return _unserved_lists(t, r)
    return None


# What `masks.Blocks` becomes: one look-up, the same for all pairs of a block.
_ONE_LOOK_UP = re.compile(r"b0\[(?:0|b), (?:0|h), q_idx // (\d+), kv_idx // (\d+)\]")


def _unserved_lists(t: Operands, r: Rules) -> str | None:
    blocks = t.blocks
    assert blocks is not None
    sizes = f"{blocks.block_m} x {blocks.block_n}"
    if blocks.block_m % LISTED or blocks.block_n % LISTED:
        return f"it visits listed blocks of multiples of {LISTED}, not {sizes}"
    found = _ONE_LOOK_UP.fullmatch(r.mask_mod)
    if found is None or int(found[1]) % blocks.block_m or int(found[2]) % blocks.block_n:
        return "it does not run mask functions inside listed blocks: it visits those of masks.Blocks, which are visible entirely"
    if r.dropout_p > 0:
        return "it does not draw dropout for listed blocks: it draws before it knows which comes next"
    if t.seqused_q is not None or t.seqused_k is not None:
        return "it does not cut listed blocks at seqused_q or seqused_k"
    if r.window_left >= 0 or r.window_right > 0:
        return "it cuts listed blocks at a causal diagonal, not at windows"
    # A key beyond the diagonal of every query of a tile would be read with it, and may be hidden from all others too.
    if r.window_right == 0 and (blocks.block_n != LISTED or (t.k.shape[2] - t.q.shape[2]) % LISTED):
        return f"it cuts listed blocks at a causal diagonal where blocks have {LISTED} keys and the lengths differ by a multiple of that"
    return None


def _unserved_matrix(name: str, x: Tensor, t: Operands, request: Request) -> str | None:
    if request.backward and values_a_head(t):
        return f"its backward pass shares K and V between heads that a {name} tells apart"
    if t.cu_seqlens_q is not None:
        return f"it does not read a {name} of packed sequences"
    if t.blocks is not None:
        return f"it does not read a {name} beside listed blocks"
    if max(t.q.shape[3], t.v.shape[3]) > 128:
        return f"it reads a {name} with head dims up to 128"
    if x.dtype == torch.float64:
        return f"it does not read a {name} in float64"
    if x.shape[3] > 1 and x.stride(3) not in (0, 1):
        return f"{name} has an inner stride of {x.stride(3)}: it needs 1"
    return None


@lru_cache(maxsize=4096)
def sizes_used(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes, with 1 for a dimension that is broadcast, by its size or its stride."""
    return tuple(1 if step == 0 else size for size, step in zip(shape, stride, strict=True))


def values_a_head(t: Operands) -> bool:
    """Whether a bias or mask may hide a value from some of the query heads that share it."""
    return t.q.shape[1] != t.k.shape[1] and any(x is not None and sizes_used(x.shape, x.stride())[1] > 1 for x in (t.bias, t.mask))


def values_are_copied(t: Operands, r: Rules) -> bool:
    """Whether tiles of the forward pass hold values that no query sees, so that it needs a copy in which those are finite: any that a bias
    or mask hides, where the copy is filled if it turns out to be needed; beside dropout, which draws for four keys at a time, also up to
    three before the first window."""
    if t.bias is not None or t.mask is not None:
        return True
    lengths = t.seqused_q is not None or t.seqused_k is not None
    return r.dropout_p > 0 and r.window_left >= 0 and (lengths or t.k.shape[2] - t.q.shape[2] > r.window_left)


def _unserved_tensor(t: Operands, request: Request) -> str | None:
    if t.q.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 and float16, not {t.q.dtype}"
    if request.out_dtype not in (None, t.q.dtype, torch.float32):
        return f"it writes {t.q.dtype} or float32, not {request.out_dtype}"
    for name, x in (("q", t.q), ("v", t.v)):
        dim = x.shape[3]
        if dim % 8 or not 8 <= dim <= HEAD_DIM_LIMIT:
            return f"{name} has head dim {dim}: it needs a multiple of 8 from 8 to {HEAD_DIM_LIMIT}"
    for name, x in (("q", t.q), ("k", t.k), ("v", t.v)):
        refusal = tma_refusal(x)
        if refusal is not None:
            return f"{name} has {refusal}"
    sequences = 0 if t.cu_seqlens_q is None else t.cu_seqlens_q.shape[0] + 1
    tiles = (-(-t.q.shape[2] // 64) + sequences) * t.q.shape[0] * t.q.shape[1]
    if max(tiles, t.q.shape[2] + t.k.shape[2]) >= 1 << 30:
        return "it counts tiles and positions in 32 bits"
    return None


def _unserved_gradient(t: Operands, r: Rules, request: Request) -> str | None:
    blocks = t.blocks
    if blocks is not None:
        if r.deterministic:
            return "its backward pass adds the parts of dq in no fixed order where blocks are listed"
        if r.window_right == 0 and blocks.block_m != LISTED:
            return f"its backward pass cuts listed blocks at a causal diagonal where they have {LISTED} queries"
        if max(blocks.q_idx.numel(), blocks.q_full_idx.numel()) >= 1 << 31:
            return "its backward pass counts listed blocks in 32 bits"
    items = t.q.shape[0] if t.cu_seqlens_q is None else t.cu_seqlens_q.shape[0]  # each may end in a block of its own
    if (t.q.shape[2] * t.q.shape[0] + (LISTED if blocks is None else blocks.block_m) * items) * t.q.shape[1] >= 1 << 31:
        return "its backward pass counts the queries of all heads in 32 bits"
    if request.needs and not ("q" in request.needs and request.needs & {"k", "v"}):
        return "its backward pass computes the gradients of q, k and v together, and not all are asked for"
    return None


def bias_gradient_of(t: Operands, r: Rules) -> str:
    """How the backward kernel gives the gradient of a bias, in the bias's own dtype; "": the portable kernels give it.

    "stored": one that is not shared, where TMA can write dS as the kernel rounds it for its products.
    "added": of a bias that is full in queries and keys and shared by batch items or heads: sums in float32, added in no fixed order.
    """
    from .launch import form_of

    if t.bias is None:
        return ""
    if t.bias.shape == (*t.q.shape[:3], t.k.shape[2]):
        stored = t.bias.dtype == t.q.dtype and t.k.shape[2] % 8 == 0 and r.softcap == 0  # which is in dS, too
        return "stored" if stored else ""
    shared = t.bias.shape[:2] != t.q.shape[:2]
    return "added" if shared and not r.deterministic and form_of(t.bias) in ("tma", "full") else ""


def tma_refusal(x: Tensor) -> str | None:
    """Why TMA cannot address a (B, H, S, D) view, or None."""
    *strides, inner = x.stride()
    size = x.element_size()
    if inner != 1:
        return f"an inner stride of {inner}: TMA needs 1"
    for extent, stride in zip(x.shape, strides, strict=False):
        if extent > 1 and (stride <= 0 or stride * size % 16 or stride * size >= 1 << 40):
            return f"a stride of {stride} elements: TMA needs positive multiples of 16 bytes"
    if x.device.type != "meta" and x.data_ptr() % 16:
        return "a first element that is not aligned to 16 bytes"
    return None


def describe(t: Operands, r: Rules, request: Request, target: Target) -> str:
    """The tile that would serve a call, for people."""
    if request.backward:
        from .backward_launch import variant_of

        v = variant_of(t, r, "alibi_slopes" in request.needs)
        copied = "; Q, K, V and dO are copied first, without what is not finite and nobody sees" if v.bias or v.mask else ""
        if t.bias is not None and "bias" in request.needs:
            where = {"added": "added up in float32 beside them", "stored": "stored beside them", "": "computed by the portable kernels"}
            copied += f"; the gradient of the bias is {where[bias_gradient_of(t, r)]}"
        rest = "; each query head has its own, whose dk and dv are added up in float32" if v.apart else copied
        return f"tiles of {v.block_m} x {v.block_n}, 2 computing warp groups, a loading and two adding warps, {v.stages} stages{rest}"
    from .configs import ROWS
    from .launch import tile_of
    from .parts import cut_of, multiprocessors_of

    chosen = cut_of(t, r, multiprocessors_of(target))
    tile = tile_of(t, r, chosen.merged)
    shape = f"{ROWS * tile.warpgroups} x {tile.block_n}"
    copied = ""
    if t.bias is not None or t.mask is not None:
        copied = "; if O is not finite, V is copied without what is not finite and nobody sees, and O computed again"
    elif values_are_copied(t, r):
        copied = "; V is copied first, without what is not finite and nobody sees"
    cut = f"; queries of {chosen.heads} heads in each" if chosen.heads > 1 else ""
    cut += f"; its keys in {chosen.parts} parts, which are merged" if chosen.parts > 1 else ""
    return f"tiles of {shape}, {tile.warpgroups} consumer warp groups and a producer warp, {tile.stages} stages{cut}{copied}"


def workspace_bytes(t: Operands, r: Rules, request: Request, target: Target) -> int:
    """Device memory that a pass takes beside its results and what the forward pass saved: forward, the state of parts where few tiles are
    cut; backward, dQ in float32 and two numbers a query, and dK and dV where query heads that share keys have tiles of their own; with a
    bias or mask also copies, forward of V (room for one, at least), backward of all that is read; see `values_are_copied`."""
    if request.backward:
        from .backward_launch import workspace_bytes

        return workspace_bytes(t, r, "bias" in request.needs)
    from .parts import cut_of, floats, multiprocessors_of

    chosen = cut_of(t, r, multiprocessors_of(target))
    state = 4 * floats(t, chosen.parts) if chosen.merged else 0
    if not values_are_copied(t, r):
        return state
    return state + t.v.numel() * t.v.element_size() * (t.q.shape[1] // t.k.shape[1] if values_a_head(t) else 1)


def forward(t: Operands, r: Rules, out: Outputs) -> None:
    """Fill out.out (B, Hq, Sq, Dv) and out.lse (B, Hq, Sq) on the current stream of t.q's device. `why_not` must have said None.

    Method: FlashAttention (Dao et al. 2022, 2023) as laid out for Hopper by Shah et al. 2024; see docs/hopper-forward.md.
    """
    if out.lse.numel() == 0:
        return
    if t.k.shape[2] == 0:
        out.out.zero_()
        out.lse.fill_(float("-inf"))
        if t.sink is not None:
            out.lse.copy_(t.sink.view(1, -1, 1).expand_as(out.lse))
            if t.seqused_q is not None:
                rows = torch.arange(out.lse.shape[2], device=out.lse.device)
                beyond = rows >= t.seqused_q.view(-1, 1, 1)
                out.lse.masked_fill_(beyond, float("-inf"))
        return
    launch = imported(f"{__name__}.launch")
    if torch.cuda.current_device() == t.q.device.index:
        launch.launch(t, r, out)
    else:
        with torch.cuda.device(t.q.device):
            launch.launch(t, r, out)


def backward(t: Operands, r: Rules, saved: Saved, cot: Cotangents, grads: Gradients) -> None:
    """Fill the gradients that are not None, on the current stream of t.q's device. `why_not` must have said None.

    Method: FlashAttention's backward pass (Dao 2023, section 3.1.2) as laid out for Hopper by Shah et al. 2024;
    see docs/hopper-backward.md.
    """
    backward_launch = imported(f"{__name__}.backward_launch")
    if torch.cuda.current_device() == t.q.device.index:
        backward_launch.launch(t, r, saved, cot, grads)
    else:
        with torch.cuda.device(t.q.device):
            backward_launch.launch(t, r, saved, cot, grads)
