"""From a call to a launch: the variant that serves it, its compiled kernel, descriptors, and the tile counter.

Everything that depends on dtypes, head dims and features is prepared once and kept; a call with the same ones costs a dictionary
look-up, four descriptors and a launch. Lengths are ordinary arguments: a new one never compiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...plan import Operands, Outputs, Request, Rules, target_of
from .. import replay
from ..triton import kernel_index, meanwhile
from ..triton.launch import as_bytes, broadcast_strides
from ..triton.launching import Descriptor
from . import parts, sizes_used, tma_refusal, values_a_head, values_are_copied
from .configs import MOST_PROGRAMS, TILES, Addresses, Tile, Variant, tile_columns, tile_name, value_columns
from .hidden import finite_copy
from .parts import Cut

L2_BYTES = 32 * 1024 * 1024  # of the 50 MB: what K and V of concurrently running heads may take
LOG2_E = 1.4426950408889634
WHOLE = Cut()
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}


def element_type(dtype: torch.dtype) -> str:
    """Triton's name of a dtype."""
    return _DTYPES[dtype]


@dataclass(slots=True)
class Program:
    """A compiled variant and what its launches share."""

    variant: Variant
    addresses: Addresses
    kernel: Any


def build(variant: Variant, out: str, slopes: str, sink: str, ahead: Callable[[], None] | None = None) -> tuple[Any, Addresses]:
    """The compiled kernel of a variant, and where its shared memory lies; out, slopes and sink name the element types of theirs. `ahead`
    begins what may go on while the kernel compiles, if it has to."""
    facts = ("attention_forward", variant, out, slopes, sink)
    kept = kernel_index.find(*facts)
    if kept is not None:
        return kept.kernel, Addresses(*kept.numbers)
    with meanwhile.compiler_made():
        from .compiling import compile_forward  # imports the kernel, which a kept one does not need
    if ahead is not None:
        ahead()
    kernel, addresses = compile_forward(variant, out, slopes, sink)
    kernel_index.keep(kernel, *facts, numbers=(addresses.barriers, addresses.values))
    return kernel, addresses


def form_of(x: Tensor | None) -> str:
    """How the kernels read a bias or mask of rank 4, one of the forms in `matrices`."""
    if x is None:
        return ""
    return _form(x.shape, x.stride(), 1 if x.dtype == torch.bool else x.element_size(), x.device.type == "meta" or x.data_ptr() % 16 == 0)


@lru_cache(maxsize=4096)
def _form(shape: tuple[int, ...], stride: tuple[int, ...], element: int, aligned: bool) -> str:
    *outer, rows, keys = sizes_used(shape, stride)
    if rows == 1 or keys == 1:
        return "keys" if keys > 1 else "rows" if rows > 1 else "one"
    steps = (step * element for size, step in zip((*outer, rows), stride, strict=False) if size > 1)
    by_tma = element <= 2 and aligned and all(step % 16 == 0 and step < 1 << 40 for step in steps)
    return "tma" if by_tma else "full"


def tile_of(t: Operands, r: Rules, cut: bool = False) -> Tile:
    """The tile that serves a call, by its shape and rules; `cut`: for a merge, which only tiles with two consumers have kernels for."""
    transforms = r.softmax_scale <= 0 or r.softcap > 0 or t.alibi_slopes is not None
    lengths = t.seqused_q is not None or t.seqused_k is not None or t.cu_seqlens_q is not None
    further = t.blocks is not None or t.bias is not None or t.mask is not None
    further = further or t.sink is not None or r.dropout_p > 0
    plain = not (cut or r.window_left >= 0 or transforms or lengths or further) and r.window_right <= 0
    sizes = (t.q.shape[3], t.v.shape[3], t.q.shape[2], t.k.shape[2])
    return TILES[tile_name(*sizes, r.window_right >= 0, plain, form_of(t.bias), form_of(t.mask))]


def variant_of(t: Operands, r: Rules, out: Outputs, cut: Cut = WHOLE) -> Variant:
    """The kernel that serves a call; `why_not` has said that one does."""
    chunk, chunks = tile_columns(t.q.shape[3])
    packed = t.cu_seqlens_q is not None
    tile = tile_of(t, r, cut.merged)
    return Variant(
        tile=tile,
        dtype=_DTYPES[t.q.dtype],
        chunk=chunk,
        chunks=chunks,
        dim_v=value_columns(t.v.shape[3]),
        right=r.window_right >= 0,
        left=r.window_left >= 0,
        lengths_q=t.seqused_q is not None or packed,
        lengths_k=t.seqused_k is not None or packed,
        scale_first=r.softmax_scale <= 0 or r.softcap > 0 or t.alibi_slopes is not None or t.bias is not None,
        softcap=r.softcap > 0,
        alibi=t.alibi_slopes is not None,
        sink=t.sink is not None,
        packed=packed,
        listed=t.blocks is not None,
        log2_list=0 if t.blocks is None else (t.blocks.block_n // tile.block_n).bit_length() - 1,
        parts=cut.merged,
        heads=cut.heads,
        store_tma=not cut.merged and out.out.dtype == t.q.dtype and tma_refusal(out.out) is None,
        bias=form_of(t.bias),
        bias_dtype="bf16" if t.bias is None else _DTYPES[t.bias.dtype],
        mask=form_of(t.mask),
        dropout=r.dropout_p > 0,
        values_a_head=values_a_head(t),
    )


_programs: dict[tuple, Program] = {}


def program_for(t: Operands, r: Rules, out: Outputs, cut: Cut = WHOLE) -> Program:
    """The compiled kernel of a call, kept by everything that it is specialised on."""
    slopes, sink = t.alibi_slopes, t.sink
    tile = tile_of(t, r, cut.merged)
    key = (
        tile,
        cut.merged,
        cut.heads,
        t.q.dtype,
        t.q.shape[3],
        t.v.shape[3],
        r.window_right >= 0,
        r.window_left >= 0,
        t.cu_seqlens_q is None,
        None if t.blocks is None else t.blocks.block_n,
        t.seqused_q is None,
        t.seqused_k is None,
        r.softmax_scale <= 0,
        r.softcap > 0,
        r.dropout_p > 0,
        None if slopes is None else slopes.dtype,
        None if sink is None else sink.dtype,
        out.out.dtype,
        tma_refusal(out.out) is None,
        form_of(t.bias),
        None if t.bias is None else t.bias.dtype,
        form_of(t.mask),
        values_a_head(t),
        t.q.device.index,
    )
    found = _programs.get(key)
    if found is None:
        variant = variant_of(t, r, out, cut)
        kernel, addresses = build(
            variant,
            "fp32" if cut.merged else _DTYPES[out.out.dtype],
            "fp32" if slopes is None else _DTYPES[slopes.dtype],
            "fp32" if sink is None else _DTYPES[sink.dtype],
            None if not out.needs else lambda: rehearse_backward(t, r, out),
        )
        found = _programs[key] = Program(variant, addresses, kernel)
    return found


def rehearse_backward(t: Operands, r: Rules, out: Outputs) -> None:
    """Lets the kernels of the backward pass compile in a thread, where these kernels will serve all of it."""
    from . import why_not

    request = Request(backward=True, out_dtype=out.out.dtype, needs=out.needs)
    whole = t.blocks is None and t.bias is None and t.mask is None
    if not whole or why_not(t, r, request, target_of(t.q.device)) is not None:
        return
    # The thread must keep no memory alive.
    given: dict[str, Any] = {name: bare(x) for name in Operands.__slots__ if isinstance(x := getattr(t, name), Tensor)}
    bare_t, bare_out = Operands(**given), Outputs(bare(out.out), bare(out.lse), needs=out.needs)

    def pass_() -> None:
        from .backward_launch import rehearse

        rehearse(bare_t, r, bare_out)

    meanwhile.rehearse(pass_, t.q.device.index)


def bare(x: Tensor) -> Tensor:
    """A tensor without memory, otherwise like x."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def descriptor(x: Tensor) -> Descriptor:
    """A (B, H, S, D) view for TMA, tile by tile of one head; the stride of a dimension of size 1 is replaced by a legal one."""
    shape = x.shape
    b, h, s, _ = x.stride()
    return Descriptor(x, [*shape], [b if shape[0] > 1 else 8, h if shape[1] > 1 else 8, s if shape[2] > 1 else 8, 1])


def matrix_arguments(x: Tensor | None, form: str, pointer: int) -> tuple[Any, ...]:
    """The descriptor, address and (batch, head, query) strides of a bias or mask."""
    if x is None:
        return None, pointer, 0, 0, 0
    steps = broadcast_strides(x)[:3]
    if form != "tma":
        return None, x.data_ptr(), *steps
    # In a dimension that is broadcast every index is 0, and its stride only has to be legal.
    b, h, m, n = sizes_used(x.shape, x.stride())
    return Descriptor(as_bytes(x), [b, h, m, n], [steps[0] or 16, steps[1] or 16, steps[2], 1]), x.data_ptr(), *steps


def items_side_by_side(t: Operands) -> int:
    """Of how many batch items the tiles of a head that have the same queries are neighbours: of all that share a bias or mask which heads
    do not share, for it is then read from memory once; else 1."""
    for x in (t.bias, t.mask):
        if x is not None and form_of(x) in ("tma", "full"):
            items, heads, *_ = sizes_used(x.shape, x.stride())
            if items == 1 and heads > 1:
                return t.q.shape[0]
    return 1


def dropout_arguments(t: Operands, r: Rules, pointer: int) -> tuple[int, int, float]:
    """Where the seed lies, the threshold in the bits of an int32, and the factor of what is kept."""
    if r.dropout_p == 0:
        return pointer, 0, 1.0
    assert t.dropout_seed is not None
    threshold = math.floor(r.dropout_p * 2**32)
    return t.dropout_seed.data_ptr(), threshold - (threshold >> 31 << 32), 1.0 / (1.0 - r.dropout_p)


_NO_LISTS = (0, 0, 0, 0)
_counters: dict[tuple[int, int], Tensor] = {}


def counter(device: torch.device) -> Tensor:
    """Two int32 zeros: the next tile, and how many CTAs have left (the last one zeroes both again).

    Launches on one stream run one after the other, so they share a pair. A captured graph may be replayed on any stream at any time: it
    gets a pair of its own, zeroed inside the graph.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    key = (device.index, torch._C._cuda_getCurrentRawStream(device.index))
    pair = _counters.get(key)
    if pair is None:
        pair = _counters[key] = torch.zeros(2, dtype=torch.int32, device=device)
    return pair


@lru_cache(maxsize=64)
def multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def head_group(heads: int, group: int, seqlen_k: int, bytes_per_key: int, ranked: bool) -> int:
    """How many query heads run together: the largest power of two whose K and V fit into the L2 cache, or nearly.

    Tiles of a head run side by side and read the same blocks at about the same time, so long sequences need not fit as a whole, and
    crowding all CTAs onto the keys of one or two heads costs more than it saves. Measured with dense causal calls of 1k to 16k keys.
    """
    room = L2_BYTES * (1.0 if ranked else max(1.0, math.sqrt(seqlen_k / 1024)))
    size = 1
    while size < heads and size * 2 * seqlen_k * bytes_per_key <= room * group:
        size *= 2
    return size


def packed_records(t: Operands, r: Rules, queries: int) -> Tensor:
    """int32 (room for the tiles of a head + 1, 8): where each tile of packed sequences lies, the longest walks first."""
    from ..triton.launch import Launch
    from ..triton.packed import scheduled

    tiles, _ = scheduled(Launch(t, r), queries, over_keys=False)
    assert tiles.records is not None
    return tiles.records


@dataclass(frozen=True, slots=True)
class Lists:
    """The lists of blocks of keys that tiles visit, and where the device says which tile has which."""

    records: Tensor
    partial: Tensor
    full: Tensor

    @classmethod
    def of(cls, t: Operands, r: Rules, block_m: int) -> Lists:
        from .list_records import ranked

        blocks = t.blocks
        assert blocks is not None
        num, partial, full_num, full = (x.contiguous() for x in (blocks.kv_num, blocks.kv_idx, blocks.kv_full_num, blocks.kv_full_idx))
        tiles = -(-t.q.shape[2] // block_m)
        offset = (t.k.shape[2] - t.q.shape[2]) // blocks.block_n
        step = block_m // blocks.block_n
        ends = (offset + step, step) if r.window_right >= 0 else None
        return cls(ranked((num, partial, full_num, full), tiles, blocks.block_m // block_m, ends), partial, full)

    @classmethod
    def of_keys(cls, t: Operands, r: Rules, block_n: int) -> Lists:
        """The transposed ones: of blocks of queries, for tiles of keys."""
        from .list_records import ranked_keys

        blocks = t.blocks
        assert blocks is not None
        num, partial, full_num, full = (x.contiguous() for x in (blocks.q_num, blocks.q_idx, blocks.q_full_num, blocks.q_full_idx))
        batch, heads_k, seqlen_k, _ = t.k.shape
        offset = (seqlen_k - t.q.shape[2]) // blocks.block_m if r.window_right >= 0 else None
        heads = batch, heads_k, t.q.shape[1] // heads_k
        return cls(
            ranked_keys((num, partial, full_num, full), *heads, -(-seqlen_k // block_n), blocks.block_n // block_n, offset), partial, full
        )

    def arguments(self) -> tuple[int, int, int, int]:
        """Entries from one block of queries to the next in both lists; heads from one batch item and from one head to the next."""
        batch, heads = self.records.shape[:2]
        return self.partial.shape[3], self.full.shape[3], 0 if batch == 1 else heads, 0 if heads == 1 else 1


def launch(t: Operands, r: Rules, out: Outputs) -> None:
    """Fill out.out and out.lse. Shapes and strides as `why_not` allows them, no dimension of size 0, on the current device."""
    q, k, v = t.q, t.k, t.v
    batch, heads, seqlen_q, _ = q.shape
    heads_k, seqlen_k = k.shape[1], k.shape[2]
    device = q.device
    slopes, sink = t.alibi_slopes, t.sink
    cut = parts.cut_of(t, r, multiprocessors(device.index))
    prepared = program_for(t, r, out, cut)
    variant = prepared.variant
    if values_are_copied(t, r) and not variant.guarded:
        v = finite_copy(v, t, r, keys=True, heads=heads_k)
    q_desc, k_desc, v_desc = descriptor(q), descriptor(k), descriptor(v)
    o_desc = descriptor(out.out) if variant.store_tma else v_desc
    group = heads // heads_k
    row_blocks = -(-seqlen_q // variant.queries)
    tile_heads = -(-group // variant.heads)  # tiles that share K and V for the same queries
    records: Tensor | None = None
    lists: Lists | None = None
    if variant.packed:
        records = packed_records(t, r, variant.queries)
        row_blocks = records.shape[0] - 1
    elif variant.listed:
        lists = Lists.of(t, r, variant.block_m)
        records = lists.records
    tiles = row_blocks * batch * heads_k * tile_heads * cut.parts
    tickets = replay.asked(counter, device)
    exp_scale = LOG2_E if variant.scale_first else r.softmax_scale * LOG2_E
    furthest = seqlen_q + seqlen_k  # a window beyond it hides nothing; keeps positions inside int32
    pointer, out_pointer = out.lse.data_ptr(), out.out.data_ptr()
    work: Tensor | None = None
    if variant.parts:
        work = parts.workspace(t, cut.parts)
        out_pointer = work.data_ptr()
        pointer = out_pointer + parts.state_offset(t, cut.parts)
    programs = min(multiprocessors(device.index), tiles, MOST_PROGRAMS)
    found = q.new_empty(programs, dtype=torch.int32) if variant.guarded else None
    others = (
        o_desc,
        pointer,
        out_pointer,
        tickets.data_ptr(),
        pointer if t.seqused_q is None else t.seqused_q.data_ptr(),
        pointer if t.seqused_k is None else t.seqused_k.data_ptr(),
        pointer if slopes is None else slopes.data_ptr(),
        pointer if sink is None else sink.data_ptr(),
        pointer if records is None else records.data_ptr(),
        pointer if lists is None else lists.partial.data_ptr(),
        pointer if lists is None else lists.full.data_ptr(),
        r.softmax_scale * 2 * LOG2_E / r.softcap if variant.softcap else r.softmax_scale,
        exp_scale,
        r.softcap,
        seqlen_q,
        seqlen_k,
        heads,
        group,
        row_blocks,
        batch * heads,
        tiles,
        *(_NO_LISTS if lists is None else lists.arguments()),
        head_group(batch * heads_k * tile_heads, tile_heads, seqlen_k, (q.shape[3] + v.shape[3]) * q.element_size(), variant.ranked),
        min(r.window_left, furthest),
        min(r.window_right, furthest),
        0 if slopes is None or slopes.shape[0] == 1 else slopes.stride(0),
        v.shape[3],
        *out.out.stride()[:3],
        *matrix_arguments(t.bias, variant.bias, pointer),
        *matrix_arguments(t.mask, variant.mask, pointer),
        *dropout_arguments(t, r, pointer),
        cut.parts,
        pointer if found is None else found.data_ptr(),
    )
    last = (items_side_by_side(t), variant, prepared.addresses)
    replay.start(prepared.kernel, programs, q_desc, k_desc, v_desc, *others, 0, *last)
    if found is not None:  # only the device knows whether there is anything to do: see `guard`
        copy = finite_copy(v, t, r, keys=True, heads=heads if variant.values_a_head else heads_k, found=found)
        replay.start(prepared.kernel, programs, q_desc, k_desc, descriptor(copy), *others, 1, *last)
    if work is not None:
        parts.merge(work, cut.parts, exp_scale, out)
