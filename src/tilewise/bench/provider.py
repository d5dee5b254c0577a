"""What a provider is: one of the implementations that are compared.

It turns a `Case` and its `Inputs` into a `Prepared` call on tensors of shape (batch, sequence, heads, dim), or raises `Unsupported` with
the reason. Whatever may be set up once (masks, plans, compilation) is set up there, outside the timed call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .cases import Case

Call = Callable[..., Tensor]  # (q, k, v, bias or None) -> out
DETERMINISTIC = "deterministic"  # the variant of ours whose every run gives the same bits


class Unsupported(Exception):
    """A provider cannot serve a case; the message says why."""


@dataclass(slots=True)
class Inputs:
    """The tensors of a case: what every provider receives."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    bias: Tensor | None = None
    seqused_k: Tensor | None = None

    @staticmethod
    def make(case: Case, seed: int = 0) -> Inputs:
        """Standard normal q, k, v, dout and bias."""
        generator = torch.Generator(case.device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device=case.device, dtype=case.torch_dtype, generator=generator)

        lengths = torch.tensor(case.key_lengths(), dtype=torch.int32, device=case.device) if case.padded else None
        q = normal(case.batch, case.seqlen_q, case.heads, case.head_dim)
        k = normal(case.batch, case.seqlen_k, case.kv_heads, case.head_dim)
        return Inputs(
            q=q,
            k=k,
            v=k[..., : case.head_dim_v] if case.latent else normal(case.batch, case.seqlen_k, case.kv_heads, case.head_dim_v),
            dout=normal(case.batch, case.seqlen_q, case.heads, case.head_dim_v),
            bias=normal(*case.bias) if case.bias is not None else None,
            seqused_k=lengths,
        )

    def leaves(self) -> list[Tensor]:
        """Fresh tensors over the same memory that take part in differentiation: q, k, v and the bias, if there is one."""
        tensors = [self.q, self.k, self.v] + ([] if self.bias is None else [self.bias])
        return [x.detach().requires_grad_() for x in tensors]


@dataclass(slots=True)
class Prepared:
    """A call ready to be timed, the context it must run in, and which of our backends serves its forward and its backward pass."""

    call: Call
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    backend: str | None = None
    backward_backend: str | None = None

    def serving(self, pass_: str) -> str | None:
        """The backend that a row of this pass is filed under; both passes together go by the forward's."""
        return self.backward_backend if pass_ == "bwd" else self.backend


@dataclass(frozen=True, slots=True)
class Provider:
    """One implementation. `name` is its name in results files, `backend` the variant of ours (a backend, "deterministic", or empty)."""

    name: str
    prepare: Callable[[Case, Inputs], Prepared] = field(repr=False)
    backend: str = ""
    backward: bool = True

    @property
    def label(self) -> str:
        return f"{self.name}:{self.backend}" if self.backend else self.name


def refuse(case: Case, **limits: bool) -> None:
    """Raises for features that a peer lacks: each keyword names one, True where the case uses it and the peer does not have it."""
    missing = [name for name, used in limits.items() if used]
    if missing:
        raise Unsupported(f"no {', '.join(missing)}")


def in_pages(case: Case, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor | None]:
    """The keys and values of a case as caches, and the page table of paged ones: pages in random order."""
    if not case.page_size:
        return inputs.k, inputs.v, None
    count = case.batch * case.seqlen_k // case.page_size
    order = torch.randperm(count, device=case.device, generator=torch.Generator(case.device).manual_seed(0))
    pages = []
    for x in (inputs.k, inputs.v):
        cache = torch.empty(count, case.page_size, *x.shape[2:], dtype=x.dtype, device=x.device)
        cache[order] = x.reshape(cache.shape)
        pages.append(cache)
    return pages[0], pages[1], order.to(torch.int32).view(case.batch, -1)
