"""Small calls for NVIDIA's compute-sanitizer: `scripts/sanitizer.sh` runs each in a process of its own.

    python scripts/sanitizer_cases.py            # the names
    python scripts/sanitizer_cases.py NAME       # one call, forward and backward; exit status 0: finite, and by the kernels that it names

Inputs are drawn on the host, so that the sanitizer meets as few of torch's own kernels as can be. Sizes end inside tiles. What is checked
here is only that the right kernels ran; whether they compute the right numbers is what tests/gpu is for.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tilewise import attention, attention_varlen, attention_with_kvcache, masks

DEVICE = "cuda"
BF16, FP32 = torch.bfloat16, torch.float32


def randn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape).to(dtype).to(DEVICE)


def bits(*shape: int) -> Tensor:
    return (torch.rand(shape) < 0.6).to(DEVICE)


def integers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32).to(DEVICE)


def watch(backend: str) -> list[str]:
    """The passes that the kernels of a backend will have served."""
    module, passes = importlib.import_module(f"tilewise.kernels.{backend}"), []
    for name in ("forward", "backward"):

        def noted(*given: Any, kernel: Callable[..., None] = getattr(module, name), name: str = name) -> None:
            passes.append(name)
            kernel(*given)

        setattr(module, name, noted)
    return passes


def differentiate(call: Callable[..., Tensor], backend: str, given: dict[str, Any]) -> None:
    """The call and the gradients of its 16- and 32-bit inputs, all by `backend`."""
    passes = watch(backend)
    names = [name for name, x in given.items() if isinstance(x, Tensor) and x.is_floating_point()]
    leaves = {name: given[name].requires_grad_() for name in names}
    out = call(**{"deterministic": False, **given}, backend=backend)
    grads = torch.autograd.grad(out, list(leaves.values()), randn(*out.shape, dtype=out.dtype))
    if not all(bool(x.isfinite().all()) for x in (out, *grads)):
        raise SystemExit("not finite")
    if passes != ["forward", "backward"]:
        raise SystemExit(f"{backend} served {passes} alone")


def dense(
    backend: str, *, dim: int = 64, dim_v: int = 0, queries: int = 200, keys: int = 333, heads: int = 2, kv_heads: int = 2, **more: Any
) -> None:
    dtype = more.pop("dtype", BF16)
    q, k = randn(1, queries, heads, dim, dtype=dtype), randn(1, keys, kv_heads, dim, dtype=dtype)
    differentiate(attention, backend, {"q": q, "k": k, "v": randn(1, keys, kv_heads, dim_v or dim, dtype=dtype), **more})


def packed(backend: str, *, dim: int = 128, **more: Any) -> None:
    """Sequences of no query, of no key and of neither multiple of a tile; rows behind the last one belong to none."""
    counts_q, counts_k = (70, 0, 129, 5), (64, 33, 140, 0)
    cu_q, cu_k = (integers(0, *accumulate(counts)) for counts in (counts_q, counts_k))
    q, k, v = randn(210, 2, dim), randn(240, 1, dim), randn(240, 1, dim)
    differentiate(attention_varlen, backend, {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, **more})


def lists(backend: str, *, dim: int = 128, **more: Any) -> None:
    dense(backend, dim=dim, queries=300, keys=428, mask=masks.Blocks(bits(1, 1, 3, 4), 128), **more)


def cache(*, paged: bool) -> None:
    """Appends to a cache and attends to it; lengths, left padding, rows and pages lie out of range, by a little and by all of 32 bits."""
    warnings.simplefilter("error", UserWarning)  # by which a call says that plain PyTorch serves it
    k, v, q, new = randn(40, 16, 2, 64), randn(40, 16, 2, 64), randn(4, 3, 8, 64), randn(4, 3, 2, 64)
    if paged:
        table = integers(-1, 2**30, 39, 40, -(2**31), 0, 41, 2**31 - 1).view(4, 2)
        options = {"page_table": table, "cache_leftpad": integers(-5, 2**31 - 1, 3, 0), "causal": True}
        lengths = (integers(2**31 - 1, -1, -(2**31), 29), integers(30, 31, 32, 33))
    else:
        options = {"cache_batch_idx": integers(-1, 40, 2**31 - 1, 3)}
        lengths = (integers(14, 15, -7, 2**31 - 1), integers(16, 13, 0, 1))
    for used in lengths:
        if not bool(attention_with_kvcache(q, k, v, new, new, cache_seqlens=used, **options).isfinite().all()):
            raise SystemExit("not finite")


def slopes() -> Tensor:
    return randn(2, dtype=FP32).abs() * 0.1


CASES: dict[str, Callable[[], None]] = {
    "hopper causal 64": lambda: dense("hopper", causal=True),
    "hopper causal 128": lambda: dense("hopper", dim=128, causal=True),
    "hopper causal 256": lambda: dense("hopper", dim=256, causal=True),
    "hopper causal 192 and 128": lambda: dense("hopper", dim=192, dim_v=128, causal=True),
    "hopper three consumers 64": lambda: dense("hopper", queries=1540, keys=200, heads=1, kv_heads=1),
    "hopper few queries in parts 128": lambda: dense("hopper", dim=128, queries=20, keys=2100, heads=4),
    "hopper window 128": lambda: dense("hopper", dim=128, window_size=(100, 30)),
    "hopper lengths 64": lambda: dense("hopper", causal=True, seqused_q=integers(150), seqused_k=integers(77)),
    "hopper dropout 128": lambda: dense("hopper", dim=128, causal=True, dropout_p=0.2, dropout_seed=7),
    "hopper ordered dQ 128": lambda: dense("hopper", dim=128, causal=True, deterministic=True),
    "hopper ordered dQ 256": lambda: dense("hopper", dim=256, deterministic=True),
    "hopper shared heads 128": lambda: dense("hopper", dim=128, heads=8, causal=True),
    "hopper softcap, slopes, sink 64": lambda: dense("hopper", softcap=3.0, alibi_slopes=slopes(), learnable_sink=randn(2, dtype=FP32)),
    "hopper packed 128": lambda: packed("hopper", causal=True),
    "hopper packed, ordered dQ 64": lambda: packed("hopper", dim=64, causal=True, deterministic=True),
    "hopper block lists 128": lambda: lists("hopper"),
    "hopper block lists, causal 64": lambda: lists("hopper", dim=64, causal=True),
    "hopper shared bias 64": lambda: dense("hopper", keys=336, bias=randn(1, 1, 200, 336)),
    "hopper own bias 128": lambda: dense("hopper", dim=128, keys=336, bias=randn(1, 2, 200, 336)),
    "hopper bias read by threads 64": lambda: dense("hopper", bias=randn(1, 1, 200, 333, dtype=FP32)),
    "hopper mask 128": lambda: dense("hopper", dim=128, keys=336, mask=bits(1, 1, 200, 336)),
    "portable causal 128": lambda: dense("triton", dim=128, causal=True, heads=4),
    "portable float32 40": lambda: dense("triton", dim=40, dtype=FP32, window_size=(100, 30)),
    "portable bias, mask, dropout 64": lambda: dense(
        "triton", bias=randn(1, 1, 200, 333), mask=bits(1, 2, 200, 333), dropout_p=0.2, dropout_seed=7
    ),
    "portable packed 64": lambda: packed("triton", dim=64, causal=True, deterministic=True),
    "portable block lists 64": lambda: lists("triton", dim=64),
    "cache, pages out of range": lambda: cache(paged=True),
    "cache, rows out of range": lambda: cache(paged=False),
}


def main(arguments: list[str]) -> int:
    if not arguments:
        print("\n".join(CASES))
        return 0
    torch.manual_seed(0)
    CASES[arguments[0]]()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
