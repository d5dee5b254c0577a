"""The tangent of the backward pass, in three launches: numbers of each query (`rows`), then how dQ (`dq`) and how dK and dV (`dkdv`) move.

As in the backward pass, kernels share nothing while they run: each recomputes its tiles from the saved LSE, nothing of size N x N is kept,
and every result is the same bits on every run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton

from ..backward_pass import reduce_into
from ..configs import DKDV, DQ, ROW_BLOCK
from ..launch import Launch, alignment, contiguous, matrix_alignment, matrix_strides, strides
from ..lse_rest import lse_rest_of
from .configs import ROWS, config_of
from .dkdv import attention_dkdv_tangent
from .dq import attention_dq_tangent
from .rows import MovingRows, row_tangents

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ....plan import Cotangents, Gradients, Operands, Rules, Saved, Tangents
    from ..configs import Config


def backward_jvp(t: Operands, r: Rules, u: Tangents, saved: Saved, cot: Cotangents, tcot: Cotangents, tangents: Gradients) -> None:
    """Fill the tangents that are not None, on the current stream of the tensors' device."""
    if saved.lse.numel() == 0:
        for x in (tangents.dq, tangents.dk, tangents.dv, tangents.dbias, tangents.dalibi_slopes, tangents.dsink):
            if x is not None:
                x.zero_()
        return
    MovingBackward(t, r, u, saved, cot, tcot).fill(tangents)


class MovingBackward:
    """One call: what its three kernels share."""

    def __init__(self, t: Operands, r: Rules, u: Tangents, saved: Saved, cot: Cotangents, tcot: Cotangents) -> None:
        self.call, self.t, self.u, self.saved = Launch(t, r), t, u, saved
        self.dlse, self.tdlse = contiguous(cot.dlse), contiguous(tcot.dlse)

        def operand(x: Tensor | None) -> Tensor | None:
            """Read again and again: rows that do not start on 16 bytes would cost more than one copy."""
            if x is None:
                return None
            x = x.to(t.q.dtype)
            return x.contiguous() if alignment(x) == 1 else x

        self.moving = (t.q, t.k, t.v, *map(operand, (cot.dout, u.tq, u.tk, u.tv, tcot.dout)))

    def fill(self, tangents: Gradients) -> None:
        call = self.call
        batch, heads, size_q, size_k = call.batch, call.heads, call.size_q, call.size_k
        dbias = tangents.dbias
        bias_rows = bias_cols = bias_tiles = slope_rows = None
        if tangents.dalibi_slopes is not None:
            slope_rows = self.saved.lse.new_empty(batch, heads, size_q)
        if dbias is not None and dbias.shape[3] == 1:
            bias_rows = self.saved.lse.new_empty(batch, heads, size_q, 1)
        elif dbias is not None and dbias.shape[2] == 1:
            bias_cols = self.saved.lse.new_empty(batch, heads, 1, size_k)
        elif dbias is not None:
            bias_tiles = dbias.zero_()  # tiles that nothing sees are not visited
        with call.device_guard():
            rows = self.rows(tangents.dsink)
            if any(x is not None for x in (tangents.dq, bias_rows, slope_rows, bias_tiles)):
                self.dq(rows, tangents.dq, bias_rows, slope_rows, bias_tiles)
            if size_k > 0 and any(x is not None for x in (tangents.dk, tangents.dv, bias_cols)):
                self.dkdv(rows, tangents.dk, tangents.dv, bias_cols)
            for partial in (bias_rows, bias_cols):
                if dbias is not None and partial is not None:
                    reduce_into(dbias, partial)
            if tangents.dalibi_slopes is not None and slope_rows is not None:
                reduce_into(tangents.dalibi_slopes, slope_rows.sum(2))

    def rows(self, dsink: Tensor | None) -> MovingRows:
        call, lse = self.call, self.saved.lse
        config = config_of(call, ROWS)
        programs = call.rows_padded // config.block_m * call.batch * call.heads
        rest = lse_rest_of(call, self.t, lse)
        rows = MovingRows(
            lse=lse.new_empty(call.batch, call.heads, call.rows_padded),
            rest=rest,
            tlse=lse.new_empty(call.batch, call.heads, call.rows_padded),
            delta=lse.new_empty(call.batch, call.heads, call.rows_padded),
            tdelta=lse.new_empty(call.batch, call.heads, call.rows_padded),
        )
        partial = None if dsink is None else lse.new_empty(call.batch, call.heads, call.rows_padded // config.block_m)
        out = self.saved.out
        given = (out, lse, rest, self.dlse, self.tdlse, rows.lse, rows.tlse, rows.delta, rows.tdelta, partial)
        sinks = {"sink_ptr": contiguous(self.t.sink), "tsink_ptr": contiguous(self.u.tsink)}
        self.run(row_tangents, config, programs, given, (out,), sinks)
        if dsink is not None and partial is not None:
            dsink.copy_(partial.sum((0, 2)))
        return rows

    def dq(self, rows: MovingRows, tdq: Tensor | None, bias_rows: Tensor | None, slope_rows: Tensor | None, dbias: Tensor | None) -> None:
        call, config = self.call, config_of(self.call, DQ)
        programs = triton.cdiv(call.size_q, config.block_m) * call.batch * call.heads
        align = matrix_alignment(dbias)
        outer = dict(zip("bhmn", matrix_strides(dbias, align), strict=True))
        named = {"dbias_ptr": dbias, "DBIAS_ALIGN": align, **{f"stride_dbias_{dim}": stride for dim, stride in outer.items()}}
        given = (tdq, rows.lse, rows.rest, rows.tlse, rows.delta, rows.tdelta, bias_rows, slope_rows)
        self.run(attention_dq_tangent, config, programs, given, (tdq,), named)

    def dkdv(self, rows: MovingRows, tdk: Tensor | None, tdv: Tensor | None, bias_cols: Tensor | None) -> None:
        call, config = self.call, config_of(self.call, DKDV)
        programs = triton.cdiv(call.size_k, config.block_n) * call.batch * call.heads_k
        given = (tdk, tdv, rows.lse, rows.rest, rows.tlse, rows.delta, rows.tdelta, bias_cols)
        self.run(attention_dkdv_tangent, config, programs, given, (tdk, tdv), {"GROUPED": call.heads != call.heads_k})

    def run(
        self,
        kernel: Any,
        config: Config,
        programs: int,
        given: Sequence[Tensor | None],
        further: Sequence[Tensor | None],
        named: dict[str, Any],
    ) -> None:
        """Launch a kernel that takes the operands with their tangents, then `given`, then the strides of the operands and of `further`."""
        call, u = self.call, self.u
        own = [x for name, x in named.items() if name.endswith("_ptr")]
        others = (u.tbias, u.talibi_slopes, *(None if any(x is y for y in call.tensors) else x for x in own))
        if call.repeat(kernel, (*self.moving[3:], *given, *others), config):
            return
        heads = (*self.moving, *further)
        align = alignment(*(x for x in heads if x is not None))
        slopes = u.talibi_slopes
        every = {
            **call.rule_arguments,
            **call.constants(config, align, False),
            **named,
            "FRUGAL": config.frugal,
            "row_blocks": call.rows_padded // ROW_BLOCK,
            "tbias_ptr": u.tbias,
            **{f"stride_tbias_{dim}": stride for dim, stride in zip("bhmn", matrix_strides(u.tbias), strict=True)},
            "tslopes_ptr": slopes,
            "stride_tslopes_b": 0 if slopes is None or slopes.shape[0] == 1 else slopes.stride(0),
            "stride_tslopes_h": 0 if slopes is None else slopes.stride(1),
        }
        places = [stride for x in heads for stride in strides(x, align)]
        names = {*kernel.arg_names, "num_warps", "num_stages", "enable_fp_fusion"}
        wanted = {name: value for name, value in every.items() if name in names}
        call.run(kernel, programs, *self.moving, *given, *places, **wanted)
