"""What is measured: attention problems as data, in named groups."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from typing import Any

import torch

from ..cost import Problem, flops, least_bytes
from .masked import density, document_lengths, serving_lengths

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TRAINING = ("fwd", "bwd", "fwd+bwd")


@dataclass(frozen=True, slots=True)
class Bar:
    """A promise: our speed over the peer's, for one pass, is at least `ratio` (the median over the rounds)."""

    pass_: str
    peer: str
    ratio: float


@dataclass(frozen=True, slots=True)
class Case:
    """One problem and how it is measured.

    `kind` is "speed" (device time, on the CPU wall time), "host" (time until a call returns), "memory" (peak of one call),
    "first_call" (in a fresh process, without and with the kernel caches of an earlier one) or "step" (time and peak of a training step of
    `block`, "gpt2" or "llama", whose attention is this problem; a bar is then one of memory, too). `window` is (left, right) as in
    `tilewise.attention`. `padded` gives the batch items lengths from 1/batch of seqlen_k up to all of it. `cached`: the keys are a cache
    that new queries read, in pages of `page_size` if that is not 0; `latent`: the values are the first dims of the keys.
    """

    group: str
    label: str
    seqlen_q: int
    heads: int
    head_dim: int
    batch: int = 1
    kv_heads: int = 0
    seqlen_k: int = -1
    head_dim_v: int = 0
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    bias: tuple[int, int, int, int] | None = None
    padded: bool = False
    mask: str = ""  # a mask of `masked.case_mask`; "": none
    packed: bool = False  # its documents are given to those who take packed sequences as such
    dtype: str = "bf16"
    passes: tuple[str, ...] = TRAINING
    kind: str = "speed"
    device: str = "cuda"
    bars: tuple[Bar, ...] = field(default=())
    peak_limit: int = 0  # bytes, 0: none
    providers: tuple[str, ...] = ()  # whom it is about; empty: everybody
    cached: bool = False
    page_size: int = 0
    latent: bool = False
    block: str = ""

    def __post_init__(self) -> None:
        if self.kv_heads == 0:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.seqlen_k == -1:
            object.__setattr__(self, "seqlen_k", self.seqlen_q)
        if self.head_dim_v == 0:
            object.__setattr__(self, "head_dim_v", self.head_dim)

    @property
    def id(self) -> str:
        return f"{self.group}/{self.label}"

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def density(self) -> float | None:
        """The share of tiles in a block-sparse case, 1 in the dense one beside them; None in all others."""
        if self.group != "blocks":
            return None
        return round(density(self.mask, self.seqlen_q), 4) if self.mask else 1.0

    def key_lengths(self) -> list[int]:
        """How many keys each batch item has."""
        if not self.padded:
            return [self.seqlen_k] * self.batch
        return [max(1, self.seqlen_k * (item + 1) // self.batch) for item in range(self.batch)]

    def problem(self) -> Problem:
        """The whole case as one problem of `cost`, padding counted as keys."""
        left, right = self.window
        bias_elements = 0 if self.bias is None else self.bias[0] * self.bias[1] * self.bias[2] * self.bias[3]
        return Problem(
            batch=self.batch,
            heads=self.heads,
            seqlen_q=self.seqlen_q,
            head_dim=self.head_dim,
            kv_heads=self.kv_heads,
            seqlen_k=self.seqlen_k,
            head_dim_v=self.head_dim_v,
            itemsize=self.torch_dtype.itemsize,
            window_left=left,
            window_right=0 if self.causal else right,
            bias_elements=bias_elements,
        )

    def _items(self) -> list[Problem]:
        if not self.padded:
            return [self.problem()]
        return [replace(self.problem(), batch=1, seqlen_k=length) for length in self.key_lengths()]

    def flops(self, pass_: str) -> int:
        """Useful operations: visible pairs within the lengths."""
        share = density(self.mask, self.seqlen_q) if self.mask else 1.0
        return round(share * sum(flops(item, pass_) for item in self._items()))

    def bytes(self, pass_: str) -> int:
        """The least traffic, within the lengths; of a cache nearly all is its keys and values."""
        values = sum(self.key_lengths()) * self.kv_heads * self.head_dim_v * self.torch_dtype.itemsize
        return sum(least_bytes(item, pass_) for item in self._items()) - (values if self.latent else 0)


def _mask_name(causal: bool) -> str:
    return "causal" if causal else "full"


# Against FlashAttention-2 through SDPA at 16k, the floors that the portable kernels promise on an H200.
_BARS = {
    (128, False): (Bar("fwd", "sdpa_flash", 1.35), Bar("bwd", "sdpa_flash", 1.20)),
    (128, True): (Bar("fwd", "sdpa_flash", 1.38), Bar("bwd", "sdpa_flash", 1.10)),
    (64, False): (Bar("fwd", "sdpa_flash", 1.35), Bar("bwd", "sdpa_flash", 1.08)),
}
# What is sparse or biased, against FlexAttention: the floor that the portable kernels promise.
_OVER_FLEX = (Bar("fwd", "flex", 1.1), Bar("bwd", "flex", 1.1))
_PACKED_OVER_FLEX = (Bar("fwd", "flex", 1.2), Bar("bwd", "flex", 1.2))


def _paper(group: str, lengths: Iterable[int]) -> list[Case]:
    """The grid of the FlashAttention papers: 16,384 tokens, heads x head dim = 2048. Longest first."""
    return [
        Case(
            group,
            f"d{dim}-{_mask_name(causal)}-{n}",
            seqlen_q=n,
            batch=16384 // n,
            heads=2048 // dim,
            head_dim=dim,
            causal=causal,
            bars=_BARS.get((dim, causal), ()) if n == 16384 else (),
        )
        for n in lengths
        for dim in (128, 64, 256)
        for causal in (False, True)
    ]


def _models() -> list[Case]:
    def case(label: str, **fields: Any) -> Case:
        return Case("models", label, **fields)

    return [
        case("llama3-8b", seqlen_q=8192, heads=32, kv_heads=8, head_dim=128, causal=True),
        case("llama3-70b", seqlen_q=8192, heads=64, kv_heads=8, head_dim=128, causal=True),
        case("gpt2", seqlen_q=1024, batch=16, heads=12, head_dim=64, causal=True),
        case("vit-l16", seqlen_q=197, batch=64, heads=16, head_dim=64),
        case("bert-base-padded", seqlen_q=512, batch=32, heads=12, head_dim=64, padded=True),
        case("wan-14b-video", seqlen_q=32760, heads=40, head_dim=128),
        case("deepseek-v3-prefill", seqlen_q=4096, heads=128, head_dim=192, head_dim_v=128, causal=True),
        case("gemma2-9b-local", seqlen_q=8192, heads=16, kv_heads=8, head_dim=256, causal=True, window=(4095, -1), softcap=50.0),
    ]


def _cpu(n: int) -> list[Case]:
    shape: dict[str, Any] = dict(seqlen_q=n, heads=8, head_dim=64, dtype="fp32", device="cpu", passes=("fwd", "fwd+bwd"))
    handed = tuple(Bar(pass_, "sdpa_flash", 1 / 1.1) for pass_ in ("fwd", "fwd+bwd"))
    cases = [Case("cpu", f"{_mask_name(causal)}-{n}", causal=causal, bars=handed, **shape) for causal in (False, True)]
    if n >= 2048:
        unfused = (Bar("fwd+bwd", "eager", 1.0),)
        cases += [
            Case("cpu", f"softcap-{n}", softcap=20.0, bars=unfused, **shape),
            Case("cpu", f"bias-{n}", bias=(1, 8, n, n), bars=unfused, **shape),
            Case("cpu", f"window-{n}", causal=True, window=(255, -1), bars=unfused, **shape),
        ]
    return cases


def _caches() -> list[Case]:
    """New queries over a cache: one, a few speculative ones, pages of 16 keys, latent vectors, prompts beside them; a tiny call's time."""
    model: dict[str, Any] = dict(heads=64, kv_heads=8, head_dim=128, passes=("fwd",), cached=True)
    latent: dict[str, Any] = dict(heads=128, kv_heads=1, head_dim=576, head_dim_v=512, passes=("fwd",), cached=True, latent=True)
    best = (Bar("fwd", "sdpa_cudnn", 1.0), Bar("fwd", "fa3", 1.0))
    sizes = {"16x8k": (16, 8192), "4x64k": (4, 65536), "1x128k": (1, 131072)}
    total_q, total_k = (sum(lengths) for lengths in serving_lengths(64))
    step: dict[str, Any] = dict(kv_heads=8, seqlen_k=total_k, passes=("fwd",), bars=(Bar("fwd", "fa3", 0.95),))
    step["providers"] = ("tilewise", "fa2", "fa3", "fa4")  # those who take packed sequences
    return [
        *(Case("decode", name, seqlen_q=1, batch=b, seqlen_k=n, bars=best, **model) for name, (b, n) in sizes.items()),
        *(Case("paged", name, seqlen_q=1, batch=b, seqlen_k=n, page_size=16, **model) for name, (b, n) in sizes.items()),
        *(
            Case("speculative", f"{b}x32k-{queries}", seqlen_q=queries, batch=b, seqlen_k=32768, causal=queries > 1, **model)
            for b in (1, 4)
            for queries in (1, 4, 16, 64)
        ),
        Case("serving", "8-prompts-64-decodes", total_q, 32, 128, mask="serving-64", packed=True, **step),
        *(Case("mla_decode", f"{b}x{n // 1024}k", seqlen_q=1, batch=b, seqlen_k=n, **latent) for b, n in ((16, 8192), (2, 65536))),
        Case("decode_host", "tiny", seqlen_q=1, seqlen_k=128, heads=8, head_dim=64, kind="host", passes=("fwd",), cached=True),
    ]


def _steps() -> list[Case]:
    """Training steps of one block, beside each kernel that SDPA may pick."""
    peers = ("sdpa_flash", "sdpa_cudnn", "sdpa_efficient")
    step: dict[str, Any] = dict(causal=True, kind="step", passes=("fwd+bwd",), providers=("tilewise", *peers))
    step["bars"] = tuple(Bar("fwd+bwd", peer, 1.0) for peer in peers)
    return [
        Case("step", "gpt2-medium", seqlen_q=1024, batch=16, heads=16, head_dim=64, block="gpt2", **step),
        Case("step", "llama3-8b", seqlen_q=8192, heads=32, kv_heads=8, head_dim=128, block="llama", **step),
    ]


def _all_cases() -> list[Case]:
    grid = _paper("paper", (16384, 4096, 1024))
    features = [
        Case("gqa", "32-over-4-d128-8192", seqlen_q=8192, batch=2, heads=32, kv_heads=4, head_dim=128, causal=True),
        Case("window", "d128-1024-of-16384", seqlen_q=16384, heads=16, head_dim=128, causal=True, window=(1023, -1), bars=_OVER_FLEX),
        *(
            Case("blocks", f"d128-{percent}-16384", seqlen_q=16384, heads=16, head_dim=128, mask=f"blocks-{percent}", bars=_OVER_FLEX)
            for percent in (6, 11, 26, 50)
        ),
        Case("blocks", "d128-dense-16384", seqlen_q=16384, heads=16, head_dim=128),
        *(
            Case("documents", f"d128-{count}-16384", seqlen_q=16384, heads=16, head_dim=128, mask=f"documents-{count}", bars=_OVER_FLEX)
            for count in (4, 16, 64)
        ),
        Case("varlen", "d128-16-documents", sum(document_lengths(16)), 16, 128, mask="lengths-16", packed=True, bars=_PACKED_OVER_FLEX),
        *(
            Case("mla", f"192-128-{n}", seqlen_q=n, batch=16384 // n, heads=16, head_dim=192, head_dim_v=128, causal=True)
            for n in (4096, 16384)
        ),
        *(
            Case("short", f"d64-{_mask_name(causal)}-512", seqlen_q=512, batch=32, heads=32, head_dim=64, causal=causal)
            for causal in (False, True)
        ),
        Case("bias", "d64-2048", seqlen_q=2048, batch=4, heads=16, head_dim=64, bias=(1, 16, 2048, 2048), bars=_OVER_FLEX),
        *(
            Case("fp32", f"d64-{_mask_name(causal)}-4096", seqlen_q=4096, batch=2, heads=32, head_dim=64, causal=causal, dtype="fp32")
            for causal in (False, True)
        ),
        Case("host", "tiny", seqlen_q=128, heads=8, head_dim=64, kind="host", passes=("fwd", "fwd+bwd")),
        *(
            Case("memory", f"d64-{n}", seqlen_q=n, heads=16, head_dim=64, kind="memory", passes=("fwd", "fwd+bwd"))
            for n in (2048, 4096, 8192, 16384, 32768, 65536, 131072)
        ),
    ]
    compiled = ("tilewise", "fa4", "flex", "sdpa_cudnn")
    first: dict[str, Any] = dict(causal=True, kind="first_call", passes=("fwd", "fwd+bwd"), providers=compiled)
    one_pass: dict[str, Any] = dict(heads=8, head_dim=64, dtype="fp32", device="cpu", passes=("fwd+bwd",))
    cpu = [  # something of every kind within the first minute, the longest at the end
        *_cpu(1024),
        Case("cpu_first_call", "d64-256", 256, kind="first_call", **one_pass),
        *_cpu(2048),
        # A window is served tile by tile; without one PyTorch's own kernel may be.
        Case("cpu_memory", "window-32768", 32768, window=(2047, -1), causal=True, kind="memory", peak_limit=1_500_000_000, **one_pass),
        *_cpu(4096),
        Case("cpu_memory", "causal-32768", 32768, causal=True, kind="memory", peak_limit=1_500_000_000, **one_pass),
    ]
    lengths = _paper("lengths", (8192, 2048, 512))
    return [
        *grid,
        *features,
        *_models(),
        *lengths,
        *_caches(),
        *_steps(),
        Case("first_call", "d128-causal-4096", 4096, 16, 128, **first),
        *cpu,
    ]


CASES: tuple[Case, ...] = tuple(_all_cases())
GROUPS: tuple[str, ...] = tuple(dict.fromkeys(case.group for case in CASES))


def select(patterns: str, device: str) -> list[Case]:
    """The cases of `device` ("cuda" or "cpu") that a comma-separated list of groups or shell patterns over ids names.

    Patterns keep their order, so the first ones are measured first. "all" or an empty text takes every case of the device.

    >>> [case.id for case in select("paper/d64-full-1*", "cuda")]
    ['paper/d64-full-16384', 'paper/d64-full-1024']
    """
    mine = [case for case in CASES if case.device == device]
    chosen: dict[str, Case] = {}
    for pattern in (patterns or "all").split(","):
        found = [c for c in mine if pattern in ("all", c.group) or fnmatch(c.id, pattern)]
        if not found:
            groups = ", ".join(dict.fromkeys(c.group for c in mine))
            raise ValueError(f"no case for {device} matches {pattern!r}; groups: {groups}; an id is GROUP/LABEL, say {mine[0].id}")
        chosen |= {case.id: case for case in found}
    return list(chosen.values())
