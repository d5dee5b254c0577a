"""`explain`: which kernels a call would use and why, what it must cost, and the time at the roofline. Runs nothing."""

from __future__ import annotations

import inspect
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from . import cost, ops, plan
from .api import attention, prepare


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `explain` found. ``str()`` prints it; ``as_dict()`` gives plain numbers and strings.

    ``backend`` is one of hopper, triton, torch (PyTorch's own fused CPU kernel), tiled, reference; ``declined`` holds a reason for every
    faster backend; ``tiles`` is the kernel's tile as text, empty where it has none. Operations, bytes and seconds as in `tilewise.cost`;
    ``roofline_ms`` is None on a device whose ceilings are not in the table.
    """

    pass_: str
    backend: str
    tiles: str
    declined: tuple[tuple[str, str], ...]
    device: str
    dtype: str
    flops: int
    bytes: int
    extra_bytes: int
    unfused_bytes: int
    roofline_ms: float | None
    bound: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"declined": dict(self.declined)}

    def __str__(self) -> str:
        lines = [
            f"{'pass':14}{self.pass_}",
            f"{'backend':14}{self.backend}" + (f", {self.tiles}" if self.tiles else ""),
            *(f"{'not ' + name:14}{reason}" for name, reason in self.declined),
            f"{'device':14}{self.device}, {self.dtype}",
            f"{'work':14}{self.flops:.4g} FLOP over the visible tiles, {_size(self.bytes)} at least through memory",
            f"{'extra memory':14}{_size(self.extra_bytes)} (unfused attention: {_size(self.unfused_bytes)})",
        ]
        if self.roofline_ms is not None:
            lines.append(f"{'roofline':14}{self.roofline_ms:.4g} ms, set by {self.bound}")
        else:
            lines.append(f"{'roofline':14}unknown: the ceilings of this device are not in the table")
        return "\n".join(lines)


def explain(
    q: Tensor, k: Tensor, v: Tensor, *, pass_: str = "fwd", device: str | torch.device | None = None, **arguments: Any
) -> Explanation:
    """Explains what ``attention(q, k, v, **arguments)`` would run, without running it.

    Args:
        q: as `attention` takes it; meta tensors (``device="meta"``) will do, and cost nothing.
        k: see ``q``.
        v: see ``q``.
        pass_: ``"fwd"``, or ``"bwd"`` with gradients of every output that has one but the LSE, for the tensors that require one; for q, k
            and v where none does.
        device: the device to explain for: a torch device such as ``"cpu"`` or ``"cuda:0"``, or a GPU named in `tilewise.cost`, such as
            ``"NVIDIA H200"``. Default: that of q; for meta tensors, the current CUDA device where there is one, else the CPU.
        **arguments: every keyword of `attention`.

    Returns:
        An `Explanation`, which prints well.

    Raises:
        TypeError: a keyword that `attention` does not take.
        UnsupportedAttention: and whatever else `attention` would raise for the same arguments.

    Example:
        >>> q = torch.empty(1, 16384, 16, 128, dtype=torch.bfloat16, device="meta")
        >>> print(explain(q, q, q, causal=True, device="NVIDIA H200").bound)
        matrix products
    """
    if pass_ not in ("fwd", "bwd"):
        raise ValueError(f"pass_ is {pass_!r}; it must be 'fwd' or 'bwd'")
    unknown = [name for name in arguments if name not in inspect.signature(attention).parameters]
    if unknown:
        raise TypeError(f"explain got {unknown[0]!r}, which is no argument of attention")
    prepared = prepare(q, k, v, **arguments)
    args = prepared.op_arguments
    t = ops.operands(args)
    r = ops.rules(args, ops.float32_precision_allows_tf32())
    target, ceilings = _target(device, t.q.device)
    request = _request(args, t, pass_ == "bwd")
    if args["backend"] == "reference":
        chosen = plan.Plan("reference")
    else:
        chosen = plan.select(t, r, args["backend"], request=request, target=target, warn=False)
    batch, heads, seqlen_q, head_dim = t.q.shape
    problem = cost.Problem(
        batch=batch,
        heads=heads,
        seqlen_q=seqlen_q,
        head_dim=head_dim,
        kv_heads=t.k.shape[1],
        seqlen_k=t.k.shape[2],
        head_dim_v=t.v.shape[3],
        itemsize=t.q.element_size(),
        window_left=r.window_left,
        window_right=r.window_right,
        bias_elements=0 if t.bias is None else t.bias.numel(),
        mask_elements=0 if t.mask is None else t.mask.numel(),
        pairs=-1 if t.blocks is None else _listed_pairs(t),
    )
    dtype = str(t.q.dtype).removeprefix("torch.")
    floor = cost.roofline(problem, ceilings, dtype, pass_, r.allow_tf32) if ceilings and ceilings.matmul_rate(dtype, r.allow_tf32) else None
    return Explanation(
        pass_=pass_,
        backend=chosen.backend,
        tiles=_tiles(chosen, t, r, request, target),
        declined=chosen.declined,
        device=target.name or target.type,
        dtype=dtype,
        flops=cost.flops(problem, pass_),
        bytes=cost.least_bytes(problem, pass_),
        extra_bytes=_extra_bytes(chosen, t, r, request, problem, target),
        unfused_bytes=cost.unfused_bytes(problem, pass_),
        roofline_ms=floor.seconds * 1e3 if floor else None,
        bound=floor.bound if floor else "",
    )


def _request(args: dict[str, Any], t: plan.Operands, backward: bool) -> plan.Request:
    """What the pass asks of its backend, as `ops` asks it."""
    aux = ops.wanted_aux(args["aux"])
    if not backward:
        return plan.Request(aux=aux, out_dtype=args["out_dtype"])
    needs = frozenset(name for name in ops.DIFFERENTIABLE if args[name] is not None and args[name].requires_grad)
    needs |= {"captured"} if any(x.requires_grad for x in t.captured) else frozenset()
    return plan.Request(True, aux & {"key_mass", "entropy"}, args["out_dtype"], needs=needs or frozenset("qkv"))


def _listed_pairs(t: plan.Operands) -> int:
    """The pairs in listed tiles, on average over the batch items and heads with lists of their own; -1 for tensors without values."""
    lists = t.blocks
    assert lists is not None
    if lists.kv_num.device.type == "meta":
        return -1
    tiles = (lists.kv_num + lists.kv_full_num).double().sum((0, 1, 2)).item() / max(lists.kv_num.shape[0] * lists.kv_num.shape[1], 1)
    return min(round(tiles * lists.block_m * lists.block_n), t.q.shape[2] * t.k.shape[2])


def _target(device: str | torch.device | None, own: torch.device) -> tuple[plan.Target, cost.Device | None]:
    named = cost.device_named(device) if isinstance(device, str) else None
    if named is not None:
        return plan.Target("cuda", named.capability, named.name, hip=named.hip, shared_memory=named.shared_memory), named
    if device is None and own.type == "meta":
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        target = plan.target_of(torch.device(device) if device is not None else own)
    except RuntimeError as error:  # torch's own parser: no such device, or none of that kind here
        known = ", ".join(repr(one.name) for one in cost.DEVICES)
        raise ValueError(f"device is {device!r}; it must be a torch device of this machine, such as 'cpu', or one of {known}") from error
    return target, cost.device_named(target.name) if target.name else None


def _tiles(chosen: plan.Plan, t: plan.Operands, r: plan.Rules, request: plan.Request, target: plan.Target) -> str:
    if chosen.backend not in ("triton", "hopper"):
        return ""
    return chosen.kernels().describe(t, r, request, target)


def _extra_bytes(
    chosen: plan.Plan, t: plan.Operands, r: plan.Rules, request: plan.Request, problem: cost.Problem, target: plan.Target
) -> int:
    if chosen.backend == "hopper":
        return cost.state_bytes(problem) + chosen.kernels().workspace_bytes(t, r, request, target)
    return cost.extra_bytes(problem, "bwd" if request.backward else "fwd")


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"
