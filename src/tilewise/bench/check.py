"""Is a result right? Slices of it against float64, row block by row block, so that the check of a long sequence stays cheap.

The arithmetic here is written out from the definition and shared with no implementation under test.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .cases import Case
from .masked import case_mask
from .provider import Inputs

# How many times the error of the unfused computation in the same dtype an implementation may show.
TIMES_UNFUSED = 3.0


def slice_of(
    case: Case, inputs: Inputs, item: int, kv_head: int, dtype: torch.dtype, gradients: bool, rows: Tensor | None = None
) -> dict[str, Tensor]:
    """Output and gradients of one batch item and the query heads of one key head, with every operation in `dtype`.

    `rows` limits the queries (forward only). Returns out (G, R, Dv) and, with `gradients`, dq (G, S, D), dk (Sk, D), dv (Sk, Dv)
    and dbias (G, S, Sk) where there is a bias; G query heads share the key head.
    """
    group = case.heads // case.kv_heads
    first = kv_head * group
    k, v = inputs.k[item, :, kv_head].to(dtype), inputs.v[item, :, kv_head].to(dtype)
    key = torch.arange(case.seqlen_k, device=k.device)
    length = case.key_lengths()[item]
    left, right = case.window[0], 0 if case.causal else case.window[1]
    scale = case.head_dim**-0.5
    queries = torch.arange(case.seqlen_q, device=k.device) if rows is None else rows
    mask = case_mask(case.mask, case.seqlen_q, str(k.device)).function if case.mask else None
    block = max(1, (1 << 26) // max(1, case.seqlen_k))

    out = torch.empty(group, len(queries), case.head_dim_v, dtype=dtype, device=k.device)
    results = {"out": out}
    if gradients:
        results["dq"] = torch.empty(group, len(queries), case.head_dim, dtype=dtype, device=k.device)
        results["dk"] = torch.zeros(case.seqlen_k, case.head_dim, dtype=torch.float64, device=k.device)
        results["dv"] = torch.zeros(case.seqlen_k, case.head_dim_v, dtype=torch.float64, device=k.device)
        if inputs.bias is not None:
            results["dbias"] = torch.empty(group, len(queries), case.seqlen_k, dtype=dtype, device=k.device)
    for g in range(group):
        for start in range(0, len(queries), block):
            here = slice(start, start + block)
            i = queries[here]
            position = (i + length - case.seqlen_q)[:, None] if case.padded else (i + case.seqlen_k - case.seqlen_q)[:, None]
            q = inputs.q[item, i, first + g].to(dtype)
            s = scale * (q @ k.T)
            squashed = torch.tanh(s / case.softcap) if case.softcap else None
            if squashed is not None:
                s = case.softcap * squashed
            if inputs.bias is not None:
                s = s + inputs.bias[item % inputs.bias.shape[0], (first + g) % inputs.bias.shape[1], i].to(dtype)
            visible = key < length
            if left >= 0:
                visible = visible & (key >= position - left)
            if right >= 0:
                visible = visible & (key <= position + right)
            if mask is not None:
                visible = visible & mask(item, first + g, i[:, None], key)
            p = torch.where(visible, s, float("-inf")).softmax(-1)
            o = p @ v
            out[g, here] = o
            if not gradients:
                continue
            do = inputs.dout[item, i, first + g].to(dtype)
            results["dv"] += (p.T @ do).double()
            ds = p * (do @ v.T - (do * o).sum(-1, keepdim=True))
            if "dbias" in results:
                results["dbias"][g, here] = ds
            if squashed is not None:
                ds = ds * (1 - squashed * squashed)
            results["dq"][g, here] = scale * (ds @ k)
            results["dk"] += (scale * (ds.T @ q)).double()
    return results


class Oracle:
    """The float64 answer of a case on a few slices, and how far the unfused computation in the case's dtype is from it.

    Checked are the first batch item and key head, and the last ones, with all their rows; with `sampled`, only the output, on 256
    rows that include the first and the last 64.
    """

    def __init__(self, case: Case, inputs: Inputs, gradients: bool, sampled: bool = False) -> None:
        self.case, self.gradients = case, gradients
        self.rows: Tensor | None = None
        if sampled and case.seqlen_q > 256:
            inner = torch.randperm(case.seqlen_q - 65, generator=torch.Generator().manual_seed(0))[:191] + 1
            self.rows = torch.cat([torch.zeros(1, dtype=torch.long), inner.sort().values, torch.arange(-64, 0) + case.seqlen_q])
            self.rows = self.rows.to(inputs.q.device)
        slices = dict.fromkeys([(0, 0), (case.batch - 1, case.kv_heads - 1)])
        self.expected = {place: self._slice(inputs, place, torch.float64) for place in slices}
        unfused = {place: self._slice(inputs, place, case.torch_dtype) for place in slices}
        self.shared_bias = case.bias is not None and case.bias[0] == 1 and case.batch > 1
        if self.shared_bias and gradients:
            for answers, dtype in ((self.expected, torch.float64), (unfused, case.torch_dtype)):
                for (item, kv_head), answer in answers.items():
                    others = [other for other in range(case.batch) if other != item]
                    parts = [self._slice(inputs, (other, kv_head), dtype)["dbias"].double() for other in others]
                    answer["dbias"] = answer["dbias"].double() + sum(parts)
        self.unfused_error = {
            name: max(relative_error(unfused[place][name], self.expected[place][name]) for place in slices)
            for name in next(iter(self.expected.values()))
        }

    def _slice(self, inputs: Inputs, place: tuple[int, int], dtype: torch.dtype) -> dict[str, Tensor]:
        return slice_of(self.case, inputs, *place, dtype, self.gradients and self.rows is None, self.rows)

    def limit(self, name: str) -> float:
        """The largest relative error that still counts as right: a multiple of the unfused one, plus the output's rounding."""
        return TIMES_UNFUSED * self.unfused_error[name] + torch.finfo(self.case.torch_dtype).eps / 4

    def judge(self, results: dict[str, Tensor]) -> tuple[float, bool]:
        """The largest relative error over the given results ("out", "dq", "dk", "dv", "dbias", in the inputs' layout), and whether
        each is within its limit."""
        worst, right = 0.0, True
        group = self.case.heads // self.case.kv_heads
        for (item, kv_head), expected in self.expected.items():
            heads = slice(kv_head * group, (kv_head + 1) * group)
            for name, value in results.items():
                if name not in expected:
                    continue
                if name in ("dk", "dv"):
                    part = value[item, :, kv_head]
                elif name == "dbias":
                    part = value[item % value.shape[0], heads]
                else:
                    part = value[item, :, heads].transpose(0, 1)
                    part = part if self.rows is None else part[:, self.rows]
                error = relative_error(part, expected[name])
                right = right and error <= self.limit(name)  # a NaN is never within its limit
                worst = error if error != error else max(worst, error)
        return worst, right


def relative_error(value: Tensor, expected: Tensor) -> float:
    """The Frobenius norm of the difference over that of the expected values, in float64."""
    expected = expected.double()
    norm = float(expected.norm())
    difference = float((value.double() - expected).norm())
    return difference / norm if norm else difference
