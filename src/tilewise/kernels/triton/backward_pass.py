"""The backward pass: nothing of size N x N is kept, every tile of probabilities is recomputed from the saved LSE.

The split follows FlashAttention-2 (Dao 2023, arXiv:2307.08691, section 3.2), but its kernels share nothing while they run: `dkdv` owns a
tile of keys and walks queries, `dq` owns a tile of queries and walks keys. That is two more products a tile than one kernel with atomic
additions to dQ needs, and it makes every gradient the same bits on every run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .bias_gradient import launch_bias_gradient
from .dkdv import launch_dkdv
from .dq import launch_dq
from .finite import nonfinite_flag, worth_a_flag
from .launch import Launch, alignment
from .packed import by_place, by_sequence, sequence_records
from .row_terms import row_terms_of

if TYPE_CHECKING:
    from torch import Tensor

    from ...plan import Cotangents, Gradients, Operands, Rules, Saved


def backward(t: Operands, r: Rules, saved: Saved, cot: Cotangents, grads: Gradients) -> None:
    """Fill the gradients that are not None, on the current stream of the tensors' device."""
    call = Launch(t, r)
    dout, dbias = cot.dout, grads.dbias
    if dout is None:
        dout = saved.out.new_zeros(1).expand(saved.out.shape)
    batch, heads, size_q, size_k = call.batch, call.heads, call.size_q, call.size_k
    bias_rows = bias_cols = bias_tiles = slope_rows = None
    if grads.dalibi_slopes is not None:
        slope_rows = saved.lse.new_empty(batch, heads, size_q)
    if dbias is not None and dbias.shape[3] == 1:
        bias_rows = saved.lse.new_empty(batch, heads, size_q, 1)
    elif dbias is not None and dbias.shape[2] == 1:
        bias_cols = saved.lse.new_empty(batch, heads, 1, size_k)
    elif dbias is not None and dbias.shape[:2] == (call.items, heads):
        bias_tiles = dbias
        cut = (t.seqused_q, t.seqused_k, t.cu_seqlens_q, t.blocks)
        if r.window_left >= 0 or r.window_right >= 0 or any(x is not None for x in cut):
            dbias.zero_()  # tiles that nothing sees are not visited

    with call.device_guard():
        rows = row_terms_of(call, t, saved, dout, cot.dlse, grads.dsink)
        # The kernels below read dO again and again: rows that do not start on 16 bytes would cost more than one copy.
        dout = dout.to(t.q.dtype)
        if alignment(dout) == 1:
            dout = dout.contiguous()
        flag = nonfinite_flag(t.q, t.k, dout) if worth_a_flag(call) else None  # dkdv multiplies zeros with Q and dO, dq with K
        if grads.dk is not None or grads.dv is not None or bias_cols is not None:
            launch_dkdv(call, t, dout, rows, flag, grads, bias_cols)
        for x in grads.dcaptured:
            if x is not None:
                x.zero_()
        if any(x is not None for x in (grads.dq, bias_rows, slope_rows, bias_tiles, *grads.dcaptured)):
            launch_dq(call, t, dout, rows, flag, grads.dq, bias_rows, slope_rows, bias_tiles, grads.dcaptured)
        sequences = None if dbias is None and slope_rows is None else sequence_records(call)
        if dbias is not None and all(x is None for x in (bias_rows, bias_cols, bias_tiles)):
            launch_bias_gradient(call, t, dout, rows, dbias, sequences)
        for partial in (bias_rows, bias_cols):
            if dbias is not None and partial is not None:
                reduce_into(dbias, partial if sequences is None else unpacked(partial, sequences, dbias))
        if grads.dalibi_slopes is not None and slope_rows is not None:
            reduce_into(grads.dalibi_slopes, slope_rows.sum(2) if sequences is None else by_sequence(slope_rows, sequences))


def unpacked(partial: Tensor, sequences: Tensor, dbias: Tensor) -> Tensor:
    """Sums over packed queries (1, H, total, 1), or keys (1, H, 1, total), with a row for each item and place that `dbias` tells apart."""
    groups, _, size_q, size_k = dbias.shape
    if size_k > 1:
        return by_place(partial[:, :, 0], sequences, groups, size_k, keys=True)[:, :, None]
    if size_q > 1:
        return by_place(partial[..., 0], sequences, groups, size_q, keys=False)[..., None]
    return by_sequence(partial[..., 0], sequences)[..., None, None]


def reduce_into(target: Tensor, partial: Tensor) -> None:
    """Sum over the dimensions in which ``target`` has size 1: always in the same order, as torch's sums are."""
    dims = [dim for dim, size in enumerate(target.shape) if size != partial.shape[dim]]
    target.copy_(partial.sum(dims, keepdim=True) if dims else partial)
