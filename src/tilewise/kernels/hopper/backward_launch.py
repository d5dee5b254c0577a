"""From a call's backward pass to its launches: the variant that serves it, its compiled kernel, descriptors and workspace.

Three kernels: `prepare_rows`, `attention_backward`, `finish_queries`, and `finish_keys` where query heads that share keys have tiles of
their own. Before, packed sequences are scheduled and what their tiles add to is cleared (`clear_ends`), and tiles with lists are put into
an order (`list_records`). With a bias the portable `row_terms` takes the place of the first. `bias_gradient_of` says whether
`attention_backward` stores the gradient of a bias, or leaves it as sums (`backward_bias`); else portable kernels compute it.
The workspace is O(N): dQ in float32, two numbers a query (with a bias three), one a query block where additions wait for others, dK and dV
in float32 where tiles are apart, and with a bias or mask the copies that `hidden` makes. The sums of a bias's gradient are float32, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...plan import Cotangents, Gradients, Operands, Outputs, Rules, Saved
from ..triton import kernel_index, meanwhile
from ..triton.launch import Launch, alignment, run, strides
from ..triton.launching import Descriptor
from . import bias_gradient_of, sizes_used, tma_refusal
from .backward_bias import BiasSums, sums_of
from .backward_configs import TILES, BackwardVariant, columns, tile_name
from .backward_rows import CLEARED, KEYS, clear_ends, finish_keys, finish_queries, prepare_rows
from .hidden import finite_copy
from .launch import (
    L2_BYTES,
    LOG2_E,
    Lists,
    descriptor,
    dropout_arguments,
    element_type,
    form_of,
    matrix_arguments,
    multiprocessors,
)

TOGETHER = 4  # tiles of one key head that start together where more would be in each other's way
APART_FROM = 4096  # queries and keys from which query heads that share keys have tiles of their own
FIRST_TO = 2048  # keys up to which, at head dim 64, waiting for the first addition to dQ costs less than clearing its accumulator
ROW_PADDING = 128  # the rows of a head are padded to a multiple: no tile of queries is longer


@dataclass(slots=True)
class BackwardProgram:
    """A compiled variant and where its barriers lie."""

    variant: BackwardVariant
    address: int
    kernel: Any


def build(variant: BackwardVariant, slopes: str) -> tuple[Any, int]:
    """The compiled kernel of a variant, and where its barriers lie; `slopes` names the element type of the ALiBi slopes."""
    facts = ("attention_backward", variant, slopes)
    kept = kernel_index.find(*facts)
    if kept is not None:
        return kept.kernel, kept.numbers[0]
    with meanwhile.compiler_made():
        from .backward_compiling import compile_backward  # imports the kernel, which a kept one does not need
    kernel, address = compile_backward(variant, slopes)
    kernel_index.keep(kernel, *facts, numbers=(address,))
    return kernel, address


def described(t: Operands) -> bool:
    """Whether more than rules and lengths says what is visible, or how much."""
    return t.cu_seqlens_q is not None or t.blocks is not None or t.bias is not None or t.mask is not None


def tiles_apart(t: Operands, r: Rules) -> bool:
    """Whether query heads that share keys have tiles of their own, which add to dK and dV in any order: in long causal calls. Tiles for all
    of them would be so long there that they drift apart and meet no more in the L2 cache.
    """
    grouped, causal = t.q.shape[1] > t.k.shape[1], r.window_right >= 0 and r.window_left < 0
    return grouped and causal and min(t.q.shape[2], t.k.shape[2]) >= APART_FROM and not (r.deterministic or described(t))


def order_of(t: Operands, r: Rules) -> str:
    """In which order tiles of keys add to a block of dQ: a fixed one where that is asked for. Else the first one stores, so that nothing
    has to be cleared before, but where that is slower (docs/hopper-backward.md), and where no tile is known to be the first.
    """
    if r.deterministic:
        return "all"
    dim, packed = max(t.q.shape[3], t.v.shape[3]), t.cu_seqlens_q is not None
    if dim > 128 or (described(t) and not packed):
        return ""
    short = not packed and (t.k.shape[2] <= FIRST_TO or r.window_left >= 0)
    return "first" if dim > 64 or (short and t.q.shape[1] == t.k.shape[1]) else ""


def items_follow(t: Operands) -> bool:
    """Whether the batch items of a head share a bias, or else a mask, that is another one for other heads."""
    shared = t.mask if t.bias is None else t.bias
    if shared is None:
        return False
    batch, heads, *_ = sizes_used(shared.shape, shared.stride())
    return batch == 1 and heads > 1


def variant_of(t: Operands, r: Rules, slope_gradient: bool = False, bias_gradient: str = "") -> BackwardVariant:
    """The kernel that serves a call; `why_not` has said that one does."""
    seqlen_q, seqlen_k = t.q.shape[2], t.k.shape[2]
    lengths = t.seqused_q is not None or t.seqused_k is not None
    packed_rows = t.cu_seqlens_q is not None  # beyond a sequence lies another one
    before_first = r.window_left >= 0 and (lengths or seqlen_k - seqlen_q > r.window_left)
    before_keys = r.window_right >= 0 and (lengths or seqlen_q - seqlen_k > r.window_right)
    copied = t.bias is not None or t.mask is not None  # what nobody sees has then been cleared for the whole call
    all_seen = copied or t.blocks is not None  # in listed blocks there is nothing that nobody sees
    tile = TILES[tile_name(t.q.shape[3], t.v.shape[3], r.softcap > 0 or t.alibi_slopes is not None or r.dropout_p > 0 or copied)]
    return BackwardVariant(
        tile=tile,
        dtype=element_type(t.q.dtype),
        dim=columns(t.q.shape[3]),
        dim_v=columns(t.v.shape[3]),
        right=r.window_right >= 0,
        left=r.window_left >= 0,
        lengths_q=t.seqused_q is not None and not packed_rows,
        lengths_k=t.seqused_k is not None and not packed_rows,
        hidden_keys=not all_seen and (packed_rows or t.seqused_k is not None or before_first),
        hidden_rows=not all_seen and (packed_rows or t.seqused_q is not None or before_keys),
        softcap=r.softcap > 0,
        alibi=t.alibi_slopes is not None,
        slope_gradient=slope_gradient,
        # With a loop over the heads, be it over one, ptxas keeps ALiBi's values in uniform registers.
        grouped=(t.q.shape[1] > t.k.shape[1] and not tiles_apart(t, r)) or t.alibi_slopes is not None,
        apart=tiles_apart(t, r),
        order=order_of(t, r),
        packed=packed_rows,
        listed=t.blocks is not None,
        log2_list=0 if t.blocks is None else (t.blocks.block_m // tile.block_m).bit_length() - 1,
        bias=form_of(t.bias),
        bias_dtype="bf16" if t.bias is None else element_type(t.bias.dtype),
        bias_gradient=bias_gradient,
        mask=form_of(t.mask),
        heads_first=items_follow(t),
        dropout=r.dropout_p > 0,
    )


_programs: dict[tuple, BackwardProgram] = {}


def program_for(t: Operands, r: Rules, slope_gradient: bool, bias_gradient: str) -> BackwardProgram:
    """The compiled kernel of a call, kept by everything that it is specialised on."""
    q, slopes = t.q, t.alibi_slopes
    surplus = t.k.shape[2] - q.shape[2]
    key = (
        q.dtype,
        q.shape[3],
        t.v.shape[3],
        r.window_right >= 0,
        r.window_left >= 0,
        0 <= r.window_left < surplus,
        0 <= r.window_right < -surplus,
        t.seqused_q is None,
        t.seqused_k is None,
        t.cu_seqlens_q is None,
        None if t.blocks is None else t.blocks.block_m,
        r.softcap > 0,
        r.dropout_p > 0,
        None if slopes is None else slopes.dtype,
        slope_gradient,
        t.q.shape[1] > t.k.shape[1],
        tiles_apart(t, r),
        order_of(t, r),
        form_of(t.bias),
        None if t.bias is None else t.bias.dtype,
        bias_gradient,
        form_of(t.mask),
        items_follow(t),
        q.device.index,
    )
    found = _programs.get(key)
    if found is None:
        meanwhile.wait()
        variant = variant_of(t, r, slope_gradient, bias_gradient)
        kernel, address = build(variant, "fp32" if slopes is None else element_type(slopes.dtype))
        found = _programs[key] = BackwardProgram(variant, address, kernel)
    return found


def row_blocks_of(t: Operands, block_m: int) -> int:
    """How many blocks the queries of one head take in LSE, delta and the accumulator of dQ; see `backward_rows`."""
    seqlen_q = t.q.shape[2]
    if t.cu_seqlens_q is not None:
        return seqlen_q // block_m + t.cu_seqlens_q.shape[0] - 1
    padding = ROW_PADDING if t.blocks is None else t.blocks.block_m  # the last listed block is visited to its end
    return -(-seqlen_q // padding) * (padding // block_m)


def workspace_bytes(t: Operands, r: Rules, bias_gradient: bool = False) -> int:
    """Device memory that a backward pass takes beside its gradients."""
    variant = variant_of(t, r, bias_gradient=bias_gradient_of(t, r) if bias_gradient else "")
    row_blocks = row_blocks_of(t, variant.block_m)
    rows = t.q.shape[0] * t.q.shape[1] * row_blocks * variant.block_m
    copies = 2 * t.q.numel() // t.q.shape[3] * (t.q.shape[3] + t.v.shape[3]) + 2 * (t.k.numel() + t.v.numel())
    copied = copies + 4 * rows * bool(variant.bias) if variant.bias or variant.mask else 0
    turns = 4 * variant.dq_parts * rows // variant.block_m if variant.order else 0
    sums = sums_of(t, variant, row_blocks) + key_sums_of(t, variant)
    return rows * (4 * variant.dim + 8) + turns + copied + 4 * sums


def key_sums_of(t: Operands, variant: BackwardVariant) -> int:
    """How many numbers dK and dV are added up in."""
    return t.k.shape[0] * t.k.shape[1] * -(-t.k.shape[2] // variant.block_n) * variant.key_numbers if variant.apart else 0


def head_group(heads: int, bytes_per_head: int, key_tiles: int, multiprocessors: int, few: bool) -> int:
    """How many key heads are worked on together: as many as can have their Q, dO and float32 dQ in the L2 cache, and at least so many that
    each multiprocessor has a tile, or else the longest tiles of the last heads start when the others end. `few`: so many that few tiles
    of one head start together, which would wait for one another (dQ added in order), or leave few long tiles to the end (grouped heads).

    >>> head_group(16, 2**24, 128, 132, False), head_group(8, 2**26, 64, 132, False), head_group(16, 2**24, 128, 132, True)
    (2, 3, 16)
    """
    together = min(key_tiles, TOGETHER) if few else key_tiles
    return max(1, min(heads, max(L2_BYTES // bytes_per_head, -(-multiprocessors // together))))


def sum_of_keys(partial: Tensor, sequences: Tensor) -> Tensor:
    """Sum a packed (1, H, total_k) over each sequence's keys: (sequences, H)."""
    from ..triton import packed

    heads, total = partial.shape[1:]
    result = partial.new_empty(sequences.shape[0], heads)
    given = (partial, sequences, result, heads, 0, total, 1)
    run(packed.sum_rows, result.numel(), *given, KEYS=True, KEEP=False, BLOCK=packed.BLOCK, num_warps=4)
    return result


def finish_key_sums(sums: Tensor, t: Operands, r: Rules, variant: BackwardVariant, grads: Gradients) -> None:
    """Fill dk and dv, those that are asked for, from what all query heads added up."""
    batch, heads_k, seqlen_k, dim_v = t.v.shape
    asked = [x for x in (grads.dk, grads.dv) if x is not None]
    align, tiles = alignment(*asked), -(-seqlen_k // variant.block_n) * (variant.block_n // KEYS.value)
    layouts = [(0, 0, 0, None) if x is None else strides(x, align) for x in (grads.dk, grads.dv)]
    run(
        finish_keys, tiles * batch * heads_k,
        sums, grads.dk, grads.dv, r.softmax_scale, 1 / (1 - r.dropout_p), *layouts[0], *layouts[1], heads_k, seqlen_k, tiles,
        ALIGN=align, DIM=t.k.shape[3], DIM_V=dim_v, SUMS=variant.dim, SUMS_V=variant.dim_v, BLOCK_N=variant.block_n,
        SPLIT=2 // variant.tile.key_groups, num_warps=4,
    )  # fmt: skip


def _by_tma(x: Tensor) -> Tensor:
    """x, or a contiguous tensor of its shape where TMA cannot address it."""
    return x if tma_refusal(x) is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)


def launch(t: Operands, r: Rules, saved: Saved, cot: Cotangents, grads: Gradients) -> None:
    """Fill the gradients. Shapes and strides as `why_not` allows them, no dimension of size 0, on the current device."""
    q, k, v = t.q, t.k, t.v
    slopes, sink, lengths_q, lengths_k = (None if x is None else x.contiguous() for x in (t.alibi_slopes, t.sink, t.seqused_q, t.seqused_k))
    batch, heads, seqlen_q, dim = q.shape
    heads_k, seqlen_k, dim_v = v.shape[1:]
    program = program_for(t, r, grads.dalibi_slopes is not None, "" if grads.dbias is None else bias_gradient_of(t, r))
    variant = program.variant
    row_blocks = row_blocks_of(t, variant.block_m)
    rows = batch * heads * row_blocks * variant.block_m
    row_tiles, key_tiles = row_blocks, -(-seqlen_k // variant.block_n)
    row_records = key_records = sequences = None
    lists = Lists.of_keys(t, r, variant.block_n) if variant.listed else None
    if variant.packed:
        from ..triton import packed

        call = Launch(t, r)
        tiles, sequences = packed.scheduled(call, variant.block_m, over_keys=False, with_sequences=grads.dalibi_slopes is not None)
        row_tiles, row_records = tiles.count, tiles.records
        tiles, _ = packed.scheduled(call, variant.block_n, over_keys=True)
        key_tiles, key_records = tiles.count, tiles.records
        lengths_q = lengths_k = None

    dout = cot.dout
    if dout is None:
        dout = torch.zeros(saved.out.shape, dtype=q.dtype, device=q.device)
    if variant.bias or variant.mask:
        q, dout = (finite_copy(x, t, r, keys=False, heads=heads) for x in (q, dout))
        k, v = (finite_copy(x, t, r, keys=True, heads=heads_k) for x in (k, v))
    dout_16 = dout.to(q.dtype)
    if tma_refusal(dout_16) is not None:
        dout_16 = dout_16.contiguous()
    acc = q.new_empty(rows, variant.dim, dtype=torch.float32)
    turns = q.new_empty(rows // variant.block_m * variant.dq_parts, dtype=torch.int32) if variant.order else None
    key_sums = q.new_empty(key_sums_of(t, variant), dtype=torch.float32) if variant.apart else None
    dlse, align = cot.dlse, alignment(saved.out, dout)
    rest: Tensor | None = None
    if variant.bias:
        from ..triton.row_terms import row_terms_of

        # The LSE in natural numbers, and what float32 lost of it; in the order and with the padding of this kernel.
        row_lse, rest, delta = row_terms_of(Launch(t, r), t, saved, dout, dlse, grads.dsink)
        (acc if turns is None else turns).zero_()
    else:
        row_lse, delta = (q.new_empty(rows, dtype=torch.float32) for _ in range(2))
        sinks = None if grads.dsink is None else q.new_empty(batch, heads, row_tiles, dtype=torch.float32)
        run(
            prepare_rows, row_tiles * batch * heads,
            saved.out, dout, saved.lse, dlse, lengths_q, lengths_k, row_records, None if sinks is None else sink, acc, turns, key_sums,
            row_lse, delta, sinks, *strides(saved.out, align), *strides(dout, align), *((0, 0, 0) if dlse is None else dlse.stride()),
            heads, seqlen_q, seqlen_k, min(r.window_right, seqlen_q + seqlen_k), row_tiles, row_blocks,
            0 if key_sums is None else key_sums.numel() // CLEARED.value, ALIGN=align, RIGHT=variant.right, ACC=variant.dim,
            PARTS=variant.dq_parts, DIM_V=dim_v, BLOCK_M=variant.block_m, LISTED=variant.listed, num_warps=4,
        )  # fmt: skip
        if grads.dsink is not None and sinks is not None:
            grads.dsink.copy_(sinks.sum((0, 2)))

    if variant.apart:  # the kernel stores neither, and its descriptors may be those of anything
        dk, dv = k, v
    else:
        dk = k.new_empty(k.shape) if grads.dk is None else _by_tma(grads.dk)
        dv = v.new_empty(v.shape) if grads.dv is None else _by_tma(grads.dv)
    if key_records is not None:
        aligned = alignment(dk, dv)
        run(
            clear_ends, key_tiles * heads_k,
            key_records, dk, dv, *strides(dk, aligned)[1:3], *strides(dv, aligned)[1:3], key_tiles, ALIGN=aligned, DIM=dim, DIM_V=dim_v,
            BLOCK_N=variant.block_n, num_warps=4,
        )  # fmt: skip
    dslopes = None
    if grads.dalibi_slopes is not None:
        make = q.new_empty if key_records is None else q.new_zeros
        dslopes = make(batch, heads, key_tiles if key_records is None else seqlen_k, dtype=torch.float32)
    furthest = seqlen_q + seqlen_k  # a window beyond it hides nothing; keeps positions inside int32
    pointer = delta.data_ptr()
    width = variant.dq_box[1] if variant.lanes else variant.dim
    records = key_records if lists is None else lists.records
    sharing = heads // heads_k if variant.apart else 1
    key_heads, group = heads_k * sharing, heads // heads_k // sharing  # as the kernel is to count them
    processors, few = multiprocessors(q.device.index), variant.ordered or group > 1
    # Batch items of a head follow one another, or key heads of a batch item: the first items of all, then the rest.
    items, others = (batch, key_heads) if variant.heads_first else (key_heads, batch)
    sums = BiasSums.of(t, variant, row_blocks, processors) if variant.bias_gradient == "added" else None
    dbias = grads.dbias if variant.bias_gradient == "stored" else None
    if dbias is not None and (r.window_left >= 0 or r.window_right >= 0 or lengths_q is not None or lengths_k is not None):
        dbias.zero_()  # blocks that nothing sees are not visited
    for first_item, share, stores in ((0, items, False),) if sums is None else sums.shares:
        meanwhile.start(
            program.kernel,
            key_tiles * share * others,
            descriptor(q),
            descriptor(k),
            descriptor(v),
            descriptor(dout_16),
            Descriptor(row_lse, [rows], [1]),
            Descriptor(delta, [rows], [1]),
            Descriptor(acc, [acc.numel() // width, width], [width, 1]),
            descriptor(dk),
            descriptor(dv),
            pointer if lengths_q is None else lengths_q.data_ptr(),
            pointer if lengths_k is None else lengths_k.data_ptr(),
            pointer if slopes is None else slopes.data_ptr(),
            pointer if dslopes is None else dslopes.data_ptr(),
            pointer if turns is None else turns.data_ptr(),
            pointer if records is None else records.data_ptr(),
            r.softmax_scale * 2 * LOG2_E / r.softcap if variant.softcap else r.softmax_scale if variant.bias else 1.0,
            LOG2_E if variant.softcap or variant.bias else r.softmax_scale * LOG2_E,
            r.softcap,
            r.softmax_scale,
            seqlen_q,
            seqlen_k,
            key_heads,
            group,
            head_group(share * others, group * seqlen_q * (6 * dim + 2 * dim_v), key_tiles, processors, few),
            share * others,
            row_blocks,
            key_tiles,
            min(r.window_left, furthest),
            min(r.window_right, furthest),
            0 if slopes is None or slopes.shape[0] == 1 else slopes.stride(0),
            None if rest is None else Descriptor(rest, [rows], [1]),
            *matrix_arguments(t.bias, variant.bias, pointer),
            None if dbias is None else descriptor(dbias),
            *((pointer, 0, 0) if sums is None else (sums.sums.data_ptr(), sums.stride_b, sums.stride_h)),
            share,
            first_item,
            int(stores),
            *matrix_arguments(t.mask, variant.mask, pointer),
            pointer if lists is None else lists.partial.data_ptr(),
            pointer if lists is None else lists.full.data_ptr(),
            *dropout_arguments(t, r, pointer),
            sharing,
            pointer if key_sums is None else key_sums.data_ptr(),
            variant,
            program.address,
        )
    if key_sums is not None:
        finish_key_sums(key_sums, t, r, variant, grads)
    else:
        if grads.dk is not None and dk is not grads.dk:
            grads.dk.copy_(dk)
        if grads.dv is not None and dv is not grads.dv:
            grads.dv.copy_(dv)
    if grads.dalibi_slopes is not None and dslopes is not None:
        one_a_head = dslopes.sum(2) if sequences is None or grads.dalibi_slopes.shape[0] == 1 else sum_of_keys(dslopes, sequences)
        grads.dalibi_slopes.copy_(one_a_head.sum(0, keepdim=True) if grads.dalibi_slopes.shape[0] == 1 else one_a_head)
    if grads.dq is not None:
        align = alignment(grads.dq)
        run(
            finish_queries, row_tiles * batch * heads,
            acc, turns, row_records, grads.dq, r.softmax_scale, *strides(grads.dq, align), heads, seqlen_q, row_tiles, row_blocks,
            ALIGN=align, DIM=dim, ACC=variant.dim, PARTS=variant.dq_parts, BLOCK_M=variant.block_m,
            SPLIT=2 // variant.tile.dq_rows, LANES=variant.lanes, num_warps=4,
        )  # fmt: skip
    if grads.dbias is not None and sums is not None:
        sums.finish(grads.dbias, t, r, variant, row_blocks)
    elif grads.dbias is not None and dbias is None:
        from ..triton.backward_pass import backward as portable_backward

        # The portable kernels recompute its tiles from the same LSE.
        portable_backward(t, r, saved, cot, Gradients(dbias=grads.dbias))


def rehearse(t: Operands, r: Rules, out: Outputs) -> None:
    """Goes through the backward pass of a call on tensors of the device "meta". The gradient that arrives is taken to lie as the output
    does; where it does not, kernels may be compiled that are not needed."""
    slopes, sink = t.alibi_slopes, t.sink
    grads = Gradients(
        t.q,
        t.k,
        t.v,
        dalibi_slopes=slopes.float() if slopes is not None and "alibi_slopes" in out.needs else None,
        dsink=sink.float() if sink is not None and "sink" in out.needs else None,
    )
    launch(t, r, Saved(out.out, out.lse), Cotangents(out.out), grads)
