"""Who stands between a call and its kernels: modes, profilers, transforms, and what they make of tensors."""

from __future__ import annotations

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor


def watched() -> bool:
    """Whether something listens to operators: a mode (fake tensors, FLOP counter, checkpointing, tracing) or a profiler."""
    return bool(torch._C._len_torch_dispatch_stack() or torch.autograd._profiler_enabled() or torch._C._is_tracing())


def ordinary() -> bool:
    """Whether nothing differentiates, transforms or watches a backward pass: it needs no dispatcher then."""
    transformed = forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()
    return not (torch.is_grad_enabled() or transformed or watched())


def hooks_see_what_is_saved() -> bool:
    """Whether hooks get what is saved for a backward pass. A checkpoint compares, in number and shape, what a call saved with what it saves
    when it is run again; of packed sequences that is not what the operator saves, which serves one of the two where something watches it.
    """
    try:
        return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    except (AttributeError, TypeError):  # a torch that does not say
        return True


def batched_by_autograd(x: Tensor) -> bool:
    """Whether x is mapped by the vmap of `torch.autograd.grad(is_grads_batched=True)`."""
    return torch._C._functorch.is_legacy_batchedtensor(x)


def lies_as_it_is(x: Tensor) -> bool:
    """Whether x is what its memory holds: of no subclass, not mapped by autograd, without the bit of ``z.conj().imag``, whose sign the
    dispatcher turns, and with memory, which the zeros of some derivatives of torch have not."""
    plain = (type(x) is Tensor or type(x) is torch.nn.Parameter) and not batched_by_autograd(x)
    return plain and not x.is_neg() and not x._is_zerotensor()
