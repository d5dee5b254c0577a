"""What exact attention must cost: operations, bytes, memory and the time at the roofline. Pure functions of a `Problem`.

Conventions. A multiply-add is two operations. Only visible (query, key) pairs count, so causal self attention of length N does
N(N+1)/2 of the N^2 products. Forward computes S = QK^T and O = PV; backward recomputes S and computes dP = dO V^T, dV = P^T dO,
dQ = dS K and dK = dS^T Q (Dao et al. 2022, "FlashAttention", Algorithm 4), which for Dv = D is 2.5 times the forward count.
Bytes are the least that device memory must move: each input read once, each output written once.
"""

from __future__ import annotations

from dataclasses import dataclass

PASSES = ("fwd", "bwd", "fwd+bwd")


@dataclass(frozen=True, slots=True)
class Problem:
    """One attention problem: q (batch, heads, seqlen_q, head_dim) against kv_heads heads of seqlen_k keys.

    `window_left` and `window_right` limit how far a query at position i + seqlen_k - seqlen_q looks to either side, -1 for
    no limit; causal is `window_right=0`. `bias_elements` and `mask_elements` are the stored sizes of an additive bias and
    a boolean mask.

    >>> Problem(batch=1, heads=16, seqlen_q=16384, head_dim=128, window_right=0).seqlen_k
    16384
    """

    batch: int
    heads: int
    seqlen_q: int
    head_dim: int
    kv_heads: int = 0  # 0: as many as query heads
    seqlen_k: int = -1  # -1: as long as the queries
    head_dim_v: int = 0  # 0: as wide as the keys
    itemsize: int = 2
    window_left: int = -1
    window_right: int = -1
    bias_elements: int = 0
    mask_elements: int = 0
    pairs: int = -1  # computed (query, key) pairs of an item and head where tile lists say so; -1: what the window shows

    def __post_init__(self) -> None:
        if self.kv_heads == 0:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.seqlen_k == -1:
            object.__setattr__(self, "seqlen_k", self.seqlen_q)
        if self.head_dim_v == 0:
            object.__setattr__(self, "head_dim_v", self.head_dim)


@dataclass(frozen=True, slots=True)
class Device:
    """One device: its ceilings in operations and bytes a second (0 where unknown), and what kernels ask about it.

    `source` says whether the ceilings were measured. `shared_memory` is what one block may use, in bytes.
    """

    name: str
    matmul: dict[str, float]  # by dtype: float16, bfloat16, float32, float64, tf32
    bandwidth: float
    exponentials: float = 0.0
    memory_bytes: int = 0
    capability: tuple[int, int] = (0, 0)
    shared_memory: int = 0
    hip: bool = False
    source: str = "datasheet"

    def matmul_rate(self, dtype: str, allow_tf32: bool = False) -> float:
        """Matrix-product ceiling for `dtype` ("bfloat16", ...); float32 uses the TF32 rate where products may use it."""
        return self.matmul.get("tf32" if dtype == "float32" and allow_tf32 else dtype, 0.0)


def _rates(half: float, tf32: float, float32: float, float64: float = 0.0) -> dict[str, float]:
    """Matrix-product ceilings by dtype, from TFLOP/s."""
    by_dtype = {"float16": half, "bfloat16": half, "tf32": tf32, "float32": float32, "float64": float64}
    return {dtype: rate * 1e12 for dtype, rate in by_dtype.items()}


# Measured: the median of a large bf16 product (8192^3) and of a large device-to-device copy (read + write). Exponentials:
# 16 a cycle and multiprocessor (Shah et al. 2024, "FlashAttention-3", section 3.1, gives 3.9e12 a second for Hopper).
_SM80, _SM89, _SM90, _GFX942 = 166_912, 101_376, 232_448, 65_536
_GB = 10**9
DEVICES = (
    Device("NVIDIA H200", _rates(783, 494, 67, 67), 4.30e12, 3.9e12, 141 * _GB, (9, 0), _SM90, source="measured"),
    Device("NVIDIA H100", _rates(989, 494, 67, 67), 3.35e12, 3.9e12, 80 * _GB, (9, 0), _SM90),
    Device("NVIDIA A100", _rates(312, 156, 19.5, 19.5), 2.04e12, 2.4e12, 80 * _GB, (8, 0), _SM80),
    Device("NVIDIA GeForce RTX 4090", _rates(165, 82.6, 82.6), 1.01e12, 5.2e12, 24 * _GB, (8, 9), _SM89),
    Device("NVIDIA L40S", _rates(362, 183, 91.6), 0.864e12, 5.7e12, 48 * _GB, (8, 9), _SM89),
    Device("NVIDIA B200", _rates(2250, 1100, 75, 40), 8.0e12, 0.0, 180 * _GB, (10, 0), _SM90),
    Device("AMD Instinct MI300X", _rates(1307, 654, 163, 163), 5.3e12, 0.0, 192 * _GB, (9, 4), _GFX942, hip=True),
)


def device_named(name: str) -> Device | None:
    """The table's entry whose name starts `name` (as `torch.cuda.get_device_name()` gives it), else None.

    >>> device_named("NVIDIA H200").source
    'measured'
    """
    return next((device for device in DEVICES if name.startswith(device.name)), None)


def visible_pairs(problem: Problem) -> int:
    """Visible (query, key) pairs of one batch item and one query head, by the window rules alone: an exact count. Or `pairs`, if given.

    >>> visible_pairs(Problem(batch=1, heads=1, seqlen_q=4, head_dim=8, window_right=0))
    10
    """
    if problem.pairs >= 0:
        return problem.pairs
    return _pairs(problem.seqlen_q, problem.seqlen_k, problem.window_left, problem.window_right)


def _pairs(len_q: int, len_k: int, left: int, right: int) -> int:
    """Sum over positions p of the length of [p - left, p + right] cut to the keys: a difference of two clipped ramps."""
    if len_q <= 0 or len_k <= 0:
        return 0
    first = len_k - len_q  # position of query 0

    def ramp(start: int) -> int:
        """Sum over the queries of clip(start + i, 0, len_k), for i from 0 to len_q - 1."""
        low = min(max(0, -start), len_q)  # queries below the ramp contribute 0
        high = min(max(low, len_k - start), len_q)  # queries from here on contribute len_k
        return (high - low) * start + (high * (high - 1) - low * (low - 1)) // 2 + (len_q - high) * len_k

    ends = len_q * len_k if right < 0 else ramp(first + right + 1)
    starts = 0 if left < 0 else ramp(first - left)
    if left >= 0 and right >= 0 and left + right + 1 <= 0:
        return 0
    return ends - starts


def flops(problem: Problem, pass_: str = "fwd") -> int:
    """Operations of the matrix products over the visible pairs.

    >>> flops(Problem(batch=2, heads=4, seqlen_q=128, head_dim=64)) == 4 * 2 * 4 * 128 * 128 * 64
    True
    """
    pairs = problem.batch * problem.heads * visible_pairs(problem)
    forward = 2 * pairs * (problem.head_dim + problem.head_dim_v)
    backward = 2 * pairs * (3 * problem.head_dim + 2 * problem.head_dim_v)
    return _by_pass(pass_, forward, backward)


def tangent_flops(problem: Problem, pass_: str = "fwd") -> int:
    """Operations of the tangent of a pass, everything moving: S and the products of its tangent, then those of each result's.

    Forward: tq k^T + q tk^T, tP V + P tV. Backward: those and dO V^T, tdO V^T + dO tV^T, and two products for each of tdQ, tdK, tdV.

    >>> tangent_flops(Problem(batch=1, heads=1, seqlen_q=2, seqlen_k=3, head_dim=4))
    240
    """
    pairs = problem.batch * problem.heads * visible_pairs(problem)
    forward = 2 * pairs * (3 * problem.head_dim + 2 * problem.head_dim_v)
    backward = 2 * pairs * (7 * problem.head_dim + 5 * problem.head_dim_v)
    return _by_pass(pass_, forward, backward)


def attention_flops(pass_: str, **shape: int) -> int:
    """`flops` of the problem with these fields: the formula that torch's FLOP counter uses.

    >>> attention_flops("fwd", batch=1, heads=1, seqlen_q=2, seqlen_k=3, head_dim=4)
    96
    """
    return flops(Problem(**shape), pass_)


def exponentials(problem: Problem, pass_: str = "fwd") -> int:
    """Exponentials of the softmax, one a visible pair; backward recomputes P and needs as many again."""
    pairs = problem.batch * problem.heads * visible_pairs(problem)
    return _by_pass(pass_, pairs, pairs)


def least_bytes(problem: Problem, pass_: str = "fwd") -> int:
    """The fewest bytes through device memory: inputs once, outputs once, the LSE in float32 (float64 for 8-byte inputs)."""
    q, k, v, out = _tensor_bytes(problem)
    lse = state_bytes(problem)
    extras = problem.bias_elements * problem.itemsize + problem.mask_elements
    forward = q + k + v + out + lse + extras
    # q, k, v, out, dout and the LSE are read; dq, dk, dv and the bias's gradient are written.
    backward = 2 * (q + k + v) + 2 * out + lse + extras + problem.bias_elements * problem.itemsize
    return _by_pass(pass_, forward, backward)


def state_bytes(problem: Problem) -> int:
    """Bytes of one number a query row in the accumulator's dtype: the LSE, or delta of the backward pass."""
    return problem.batch * problem.heads * problem.seqlen_q * (8 if problem.itemsize == 8 else 4)


def output_bytes(problem: Problem, pass_: str = "fwd") -> int:
    """Bytes of what a pass returns: the output, or the gradients of q, k, v and the bias."""
    q, k, v, out = _tensor_bytes(problem)
    return _by_pass(pass_, out, q + k + v + problem.bias_elements * problem.itemsize)


def extra_bytes(problem: Problem, pass_: str = "fwd") -> int:
    """Memory beyond inputs and outputs that tiled attention needs: the LSE forward, delta beside it backward; O(N)."""
    return state_bytes(problem) * (1 if pass_ == "fwd" else 2)


def unfused_bytes(problem: Problem, pass_: str = "fwd") -> int:
    """Memory of the N x N matrices that unfused attention holds at its peak, in the input dtype.

    Forward: the scores and what is computed from them, two at a time. Backward: the saved P, dP, and dS.
    """
    matrix = problem.batch * problem.heads * problem.seqlen_q * problem.seqlen_k * problem.itemsize
    return matrix * (2 if pass_ == "fwd" else 3)


@dataclass(frozen=True, slots=True)
class Roofline:
    """The floor of a problem's time on a device: the largest of three times (seconds), and which resource sets it."""

    matmul: float
    memory: float
    exponentials: float

    @property
    def seconds(self) -> float:
        return max(self.matmul, self.memory, self.exponentials)

    @property
    def bound(self) -> str:
        times = {"matrix products": self.matmul, "memory": self.memory, "exponentials": self.exponentials}
        return max(times, key=lambda name: times[name])


def roofline(problem: Problem, device: Device, dtype: str, pass_: str = "fwd", allow_tf32: bool = False) -> Roofline:
    """Time floor of `problem` on `device` for inputs of `dtype` ("bfloat16", ...); a ceiling the table lacks counts as infinite.

    >>> floor = roofline(Problem(batch=1, heads=16, seqlen_q=16384, head_dim=128), device_named("NVIDIA H200"), "bfloat16")
    >>> round(floor.seconds * 1e3, 2), floor.bound
    (2.81, 'matrix products')
    """

    def time(amount: float, rate: float) -> float:
        return amount / rate if rate else 0.0

    return Roofline(
        matmul=time(flops(problem, pass_), device.matmul_rate(dtype, allow_tf32)),
        memory=time(least_bytes(problem, pass_), device.bandwidth),
        exponentials=time(exponentials(problem, pass_), device.exponentials),
    )


def _tensor_bytes(problem: Problem) -> tuple[int, int, int, int]:
    rows_q = problem.batch * problem.heads * problem.seqlen_q
    rows_k = problem.batch * problem.kv_heads * problem.seqlen_k
    widths = (rows_q * problem.head_dim, rows_k * problem.head_dim, rows_k * problem.head_dim_v, rows_q * problem.head_dim_v)
    q, k, v, out = (width * problem.itemsize for width in widths)
    return q, k, v, out


def _by_pass(pass_: str, forward: int, backward: int) -> int:
    if pass_ not in PASSES:
        raise ValueError(f"pass_ must be one of {', '.join(PASSES)}, got {pass_!r}")
    return {"fwd": forward, "bwd": backward, "fwd+bwd": forward + backward}[pass_]
