"""Random calls over a cache, and their comparison with the specification: shared by the tests of every implementation."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewise import attention_with_kvcache, masks
from tilewise.kvcache import reference

Dims = tuple[tuple[int, int], ...]
SMALL_DIMS: Dims = ((16, 16), (8, 24), (20, 4), (40, 16))


@dataclass
class Call:
    """One call: the five tensors, the options that carry meaning, and those that must not change the result."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None
    v: Tensor | None
    options: dict[str, Any]
    neutral: dict[str, Any]

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.q, self.k_cache, self.v_cache, self.k, self.v


def random_call(seed: int, dtypes: tuple[torch.dtype, ...], dims: Dims = SMALL_DIMS, device: str = "cpu") -> Call:
    """Every feature appears in some of the calls, and by chance with every other one."""
    choose = random.Random(seed)
    torch.manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device)

    def integers(values: Any) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int32, device=device)

    batch, kv_heads, group = choose.choice([1, 2, 3]), choose.choice([1, 2]), choose.choice([1, 2, 3])
    size_q, (dim, dim_v), dtype = choose.choice([1, 1, 2, 5, 17]), choose.choice(dims), choose.choice(dtypes)
    heads, page_size, pages = kv_heads * group, choose.choice([1, 3, 4, 16]), choose.choice([5, 9])
    options: dict[str, Any] = {}
    if choose.random() < 0.5:
        capacity, rows, slots = page_size * pages, batch * pages + 2, page_size
        options["page_table"] = integers(torch.randperm(rows)[: batch * pages].view(batch, pages))
    else:
        capacity = rows = slots = choose.choice([20, 40, 65])
        rows = batch
        if choose.random() < 0.4:
            rows = batch + 2
            options["cache_batch_idx"] = integers(torch.randperm(rows)[:batch])
    appended = choose.choice([0, size_q, 1, 3])
    appended = min(appended, capacity)
    lengths = [choose.randint(0, capacity - appended) for _ in range(batch)]
    if appended or choose.random() < 0.8:
        options["cache_seqlens"] = integers(lengths)
    else:
        lengths = [capacity] * batch
    if choose.random() < 0.3:
        options["cache_leftpad"] = integers([choose.randint(0, length + appended) for length in lengths])
    # A query that stands before the first key has no angle, and no number in a rule's tensors.
    inside = all(length + appended >= size_q for length in lengths)
    if choose.random() < 0.4 and inside:
        angles = torch.randn(capacity + 3, choose.choice([1, 2, dim // 2]), device=device)
        options |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "rotary_interleaved": choose.random() < 0.5}
    options["causal"] = choose.random() < 0.5
    if choose.random() < 0.4:
        options["window_size"] = (choose.choice([-1, 0, 3, 12]), choose.choice([-1, 0, 2]))
    rule = choose.choice(["none", "none", "tensor", "window", "chunks", "custom", "documents"])
    if rule == "tensor":
        shape = choose.choice([1, batch]), choose.choice([1, heads]), choose.choice([1, size_q]), choose.choice([1, capacity])
        options["mask"] = torch.rand(shape, device=device) > 0.3
    elif rule == "window":
        options["mask"] = masks.SlidingWindow(9, 0)
    elif rule == "chunks":
        options["mask"] = masks.Chunked(7)
    elif rule == "custom":
        options["mask"] = masks.Causal() & masks.Custom(lambda b, h, i, j: (i + j + h + b) % 3 != 0)
    elif rule == "documents" and inside:
        options["mask"] = masks.Document(torch.randint(0, 3, (batch, capacity), device=device))
    if choose.random() < 0.3:
        options["softcap"] = choose.choice([1.0, 5.0])
    if choose.random() < 0.3:
        options["alibi_slopes"] = torch.rand((heads,) if choose.random() < 0.5 else (batch, heads), device=device)
    if choose.random() < 0.3:
        options["learnable_sink"] = randn(heads)
    if choose.random() < 0.2:
        options["softmax_scale"] = choose.choice([0.0, -0.3, 0.7])
    neutral = {"num_splits": choose.choice([0, 0, 1, 2, 5]), "batch_invariant": choose.random() < 0.3}
    new = [randn(batch, appended, kv_heads, d).to(dtype) if appended else None for d in (dim, dim_v)]
    q = (randn(batch, size_q, heads, dim) * choose.choice([1.0, 3.0])).to(dtype)
    return Call(q, randn(rows, slots, kv_heads, dim).to(dtype), randn(rows, slots, kv_heads, dim_v).to(dtype), *new, options, neutral)


def check(call: Call, **extra: Any) -> None:
    """Output, LSE and caches of one call against the float64 specification.

    The yardstick is the specification in the computing dtype (float32 for 16-bit inputs) on the same inputs, plus the rounding of the
    output; a 16-bit rotary embedding is rounded once more, which moves every score by one last digit of q.
    """
    q, k_cache, v_cache, k, v = call.tensors()
    exact = reference.attention_with_kvcache(*call.tensors(), **call.options)
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    unfused = reference.attention_with_kvcache(*call.tensors(), **call.options, compute_dtype=compute)
    k_own, v_own = k_cache.clone(), v_cache.clone()
    given = {"check_values": True, **call.options, **call.neutral, **extra}
    out, aux = attention_with_kvcache(q, k_own, v_own, k, v, return_aux="lse", **given)

    dtype_eps, eps = torch.finfo(q.dtype).eps, torch.finfo(compute).eps
    largest = q.abs().max().double() * q.shape[3] ** 0.5 * 4 if q.numel() else torch.tensor(1.0)
    turned = dtype_eps * largest.item() if "rotary_cos" in call.options else 0.0
    for name, got, want, eager, rounding in (
        ("out", out, exact[0], unfused[0], dtype_eps + 32 * eps + turned),
        ("lse", aux.lse, exact[1], unfused[1], 32 * eps + turned),
    ):
        assert got.shape == want.shape, name
        infinite = torch.isinf(want)
        assert torch.equal(got[infinite].double(), want[infinite].double()), f"{name}: infinities differ"
        got, want, eager = (torch.where(infinite, 0.0, x.double()) for x in (got, want, eager))
        if want.numel():
            size = max(1.0, want.abs().max().item())
            error, allowed = (got - want).abs().max().item(), (eager - want).abs().max().item()
            assert error <= 1.5 * allowed + rounding * size, f"{name}: error {error:.3e}, unfused {allowed:.3e}"
    torch.testing.assert_close(k_own, exact[2], atol=2 * dtype_eps, rtol=2 * dtype_eps)
    assert torch.equal(v_own, exact[3])
