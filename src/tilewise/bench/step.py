"""A training step of one transformer block around somebody's attention: forward, loss, backward and the optimiser's update.

The block and its loss are one compiled graph, whoever serves the attention inside; the update is AdamW's. Nothing but the attention
differs between contestants, so that a difference in time or memory is theirs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .cases import Case
from .check import TIMES_UNFUSED, relative_error
from .provider import Call, Prepared

# Width of the MLP over that of the block: GPT-2's, and Llama 3's, whose MLP has a gate.
MLP = {"gpt2": 4.0, "llama": 3.5}
ROTARY_BASE = 500_000.0  # Llama 3's


class Block(nn.Module):
    """One pre-norm block of GPT-2 (LayerNorm, GELU, biases) or of Llama (RMSNorm, rotary embedding, gated SiLU, no biases).

    `attend` is called with q (B, S, Hq, D) and k, v (B, S, Hk, D) and returns (B, S, Hq, D); it applies the causal order itself.
    """

    def __init__(self, case: Case, attend: Call, dtype: torch.dtype) -> None:
        super().__init__()
        self.attend, self.head_dim, self.llama = attend, case.head_dim, case.block == "llama"
        width, keys = case.heads * case.head_dim, case.kv_heads * case.head_dim
        inner = round(MLP[case.block] * width)

        def linear(inputs: int, outputs: int, bias: bool = not self.llama) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias, case.device, dtype)

        norm = nn.RMSNorm if self.llama else nn.LayerNorm
        self.before_attention = norm(width, device=case.device, dtype=dtype)
        self.before_mlp = norm(width, device=case.device, dtype=dtype)
        self.q, self.v, self.o = linear(width, width), linear(width, keys), linear(width, width)
        self.k = linear(width, keys, bias=False)  # would add the same to all scores of a query: its gradient is rounding alone
        self.up, self.down = linear(width, inner), linear(inner, width)
        self.gate = linear(width, inner) if self.llama else None
        if self.llama:
            frequencies = ROTARY_BASE ** (-torch.arange(0, case.head_dim, 2, device=case.device).double() / case.head_dim)
            angles = torch.arange(case.seqlen_q, device=case.device)[:, None, None] * frequencies  # (S, 1, D/2)
            wide = torch.promote_types(dtype, torch.float32)
            self.cos, self.sin = angles.cos().to(wide), angles.sin().to(wide)

    def draw(self, seed: int) -> None:
        """Weights whose products have unit variance, so that scores spread as trained ones do; the rest stays 1 or 0."""
        generator = torch.Generator(self.q.weight.device).manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5, generator=generator)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def turned(self, x: Tensor) -> Tensor:
        """Rotary embedding by position, halves of a head paired: (B, S, H, D) in and out."""
        first, second = x.to(self.cos.dtype).chunk(2, -1)
        return torch.cat([first * self.cos - second * self.sin, second * self.cos + first * self.sin], -1).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, width) in and out."""
        y = self.before_attention(x)
        q, k, v = (project(y).unflatten(-1, (-1, self.head_dim)) for project in (self.q, self.k, self.v))
        if self.llama:
            q, k = self.turned(q), self.turned(k)
        x = x + self.o(self.attend(q, k, v).flatten(2))
        y = self.before_mlp(x)
        inner = F.gelu(self.up(y), approximate="tanh") if self.gate is None else F.silu(self.gate(y)) * self.up(y)
        return x + self.down(inner)


def loss_of(block: Block, x: Tensor, target: Tensor) -> Tensor:
    """Mean squared distance of the block's output from a target, in float32 or wider."""
    return (block(x) - target).to(torch.promote_types(x.dtype, torch.float32)).square().mean()


def unfused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention from its definition in the inputs' dtype; one head of keys after another, each N x N matrix computed anew for the
    backward pass, so that a long sequence fits."""
    group = q.shape[2] // k.shape[2]
    hidden = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).triu(1)

    def one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # (group, S, D), (S, D), (S, D)
        scores = q.shape[-1] ** -0.5 * (q @ k.T)
        return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v

    def item(b: int) -> Tensor:
        heads = [
            checkpoint(one, q[b, :, h * group : (h + 1) * group].transpose(0, 1), k[b, :, h], v[b, :, h], use_reentrant=False)
            for h in range(k.shape[2])
        ]
        return torch.cat(heads).transpose(0, 1)  # (S, Hq, D)

    return torch.stack([item(b) for b in range(q.shape[0])])


def drawn(case: Case, seed: int) -> tuple[Tensor, Tensor]:
    """Standard normal input and target, (B, S, width); the input takes part in differentiation, as that of a block inside a model does."""
    generator = torch.Generator(case.device).manual_seed(seed + 1)
    shape = (case.batch, case.seqlen_q, case.heads * case.head_dim)
    x, target = (torch.randn(shape, device=case.device, dtype=case.torch_dtype, generator=generator) for _ in range(2))
    return x.requires_grad_(), target


def gradients_of(block: Block, x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Each gradient that a backward pass has left, by name."""
    for name, parameter in itertools.chain([("x", x)], block.named_parameters()):
        assert parameter.grad is not None, name
        yield f"d {name}", parameter.grad


class Training:
    """A block with an attention of its own, ready to be trained: a call is one step."""

    def __init__(self, case: Case, prepared: Prepared, seed: int = 0) -> None:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            # Entered inside the graph: neither the compiler's guards nor the keys of its caches know which kernel SDPA may take.
            with prepared.context():
                return prepared.call(q, k, v)

        self.block = Block(case, attend, case.torch_dtype)
        self.block.draw(seed)
        self.x, self.target = drawn(case, seed)
        self.optimiser = torch.optim.AdamW(self.block.parameters(), lr=1e-4, fused=case.device == "cuda" or None)
        self.loss = torch.compile(loss_of, fullgraph=True, dynamic=False)

    def backward(self) -> None:
        """Forward pass, loss and gradients."""
        self.loss(self.block, self.x, self.target).backward()

    def update(self) -> None:
        """Moves the parameters along their gradients and lets go of these."""
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.x.grad = None

    def checked(self) -> dict[str, Tensor]:
        """The first step, which compiles, and its gradients for the check."""
        # FlexAttention's adapter turns this off for the whole process; a step runs each graph's backward pass once, as training does.
        with torch._functorch.config.patch(donated_buffer=True):
            self.backward()
        found = {name: gradient.clone() for name, gradient in gradients_of(self.block, self.x)}
        self.update()
        return found

    def __call__(self) -> None:
        self.backward()
        self.update()


class StepOracle:
    """The gradients of a step in float64 with unfused attention, and how far the same step in the case's dtype is from them."""

    rows = None  # gradients are checked whole

    def __init__(self, case: Case, seed: int = 0) -> None:
        torch._dynamo.reset()  # contestants share one function, of which the compiler keeps a limited number of versions
        self.eps = torch.finfo(case.torch_dtype).eps
        x, target = drawn(case, seed)
        block = Block(case, unfused, case.torch_dtype)
        block.draw(seed)
        exact = Block(case, unfused, torch.float64)
        exact.load_state_dict(block.state_dict())
        exact_x = x.detach().double().requires_grad_()
        loss_of(exact, exact_x, target.double()).backward()
        self.expected = dict(gradients_of(exact, exact_x))
        loss_of(block, x, target).backward()
        self.unfused_error = {name: relative_error(gradient, self.expected[name]) for name, gradient in gradients_of(block, x)}

    def limit(self, name: str) -> float:
        """The largest relative error that still counts as right, as in `check.Oracle`."""
        return TIMES_UNFUSED * self.unfused_error[name] + self.eps / 4

    def judge(self, results: dict[str, Tensor]) -> tuple[float, bool]:
        """The relative error of all gradients of a step as one vector, and whether each of them is within its own limit: those of the
        norms are sums over all tokens that nearly cancel, so that one may be far off in any 16-bit computation."""
        errors = {name: relative_error(results[name], expected) for name, expected in self.expected.items()}
        norms = {name: float(expected.norm()) for name, expected in self.expected.items()}
        whole = math.hypot(*(errors[name] * norms[name] for name in errors)) / math.hypot(*norms.values())
        return whole, all(errors[name] <= self.limit(name) for name in errors)  # a NaN is never within its limit
