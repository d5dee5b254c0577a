"""Which implementations are compared, ours among them. Peers are found at run time; none is required."""

from __future__ import annotations

import importlib
import os
import site

from torch.nn.attention import SDPBackend

from .adapters import eager, flash, flash_3, flashinfer, flex, sdpa, xformers
from .ours import prepare_tilewise
from .provider import Provider


def _load(provider: str) -> Provider:
    """The provider of an installed package; ImportError (or what its import raises) where it is not there."""
    if provider == "fa2":
        package = importlib.import_module("flash_attn")
        return Provider("fa2", flash(package.flash_attn_func, -1, varlen=package.flash_attn_varlen_func))
    if provider == "fa3":
        try:
            full = importlib.import_module("flash_attn_interface")
            return Provider("fa3", flash_3(full))
        except ImportError:
            forward = importlib.import_module("fa3_fwd_interface")
            return Provider("fa3", flash_3(forward), backward=False)
    if provider == "fa4":
        package = importlib.import_module("flash_attn.cute")
        lists = importlib.import_module("flash_attn.cute.block_sparsity").BlockSparseTensorsTorch
        return Provider("fa4", flash(package.flash_attn_func, None, varlen=package.flash_attn_varlen_func, lists=lists))
    if provider == "xformers":
        ops = importlib.import_module("xformers.ops")
        return Provider("xformers", xformers(ops.memory_efficient_attention, ops.LowerTriangularMask))
    return Provider("flashinfer", flashinfer(importlib.import_module("flashinfer")), backward=False)


def _ours(backend: str) -> Provider:
    return Provider("tilewise", prepare_tilewise(backend), backend=backend)


BUILT_IN: dict[str, Provider] = {
    "tilewise": _ours(""),
    "eager": Provider("eager", eager),
    "sdpa_flash": Provider("sdpa_flash", sdpa(SDPBackend.FLASH_ATTENTION)),
    "sdpa_cudnn": Provider("sdpa_cudnn", sdpa(SDPBackend.CUDNN_ATTENTION)),
    "sdpa_efficient": Provider("sdpa_efficient", sdpa(SDPBackend.EFFICIENT_ATTENTION)),
    "sdpa_math": Provider("sdpa_math", sdpa(SDPBackend.MATH)),
    "flex": Provider("flex", flex),
}
INSTALLED = ("fa2", "fa3", "fa4", "xformers", "flashinfer")
NAMES = (*BUILT_IN, *INSTALLED)
ON_CPU = ("tilewise", "eager", "sdpa_flash")


def find(names: str, device: str) -> tuple[list[Provider], dict[str, str]]:
    """The providers that are there, and why each other one is not.

    Args:
        names: comma-separated names, ours also with a backend ("tilewise:triton") or as "tilewise:deterministic"; empty takes all that
            make sense on `device`.
        device: "cuda" or "cpu".

    The environment variable FA4_DIR names a folder of unpacked FlashAttention-4 packages, which is then searched as well.
    """
    if os.environ.get("FA4_DIR"):
        site.addsitedir(os.environ["FA4_DIR"])
    wanted = names.split(",") if names else list(NAMES if device == "cuda" else ON_CPU)
    found: list[Provider] = []
    missing: dict[str, str] = {}
    for name in wanted:
        base, _, backend = name.partition(":")
        if base == "tilewise":
            found.append(_ours(backend))
        elif name in BUILT_IN:
            found.append(BUILT_IN[name])
        elif name in INSTALLED:
            try:
                found.append(_load(name))
            except Exception as error:  # a broken binary package raises anything from OSError to AttributeError
                missing[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        else:
            raise ValueError(f"no provider is named {name!r}; there are {', '.join(NAMES)}")
    return found, missing
