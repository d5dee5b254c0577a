"""A byte-level GPT whose attention is an argument, and the unfused attention that it is compared with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Causal attention of q, k, v (B, S, H, D), each; returns (B, S, H, D)."""


def eager_attention(q: Tensor, k: Tensor, v: Tensor, *, reverse_keys: bool = False) -> Tensor:
    """Unfused causal attention: every score of the N×N matrix exists in memory.

    q, k, v (B, S, H, D). `reverse_keys` visits the keys from the last to the first: the same mathematics, summed in another order.
    """
    if reverse_keys:
        k, v = k.flip(1), v.flip(1)
    n = q.shape[1]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, S, D)
    visible = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
    if reverse_keys:
        visible = visible.flip(1)
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)  # (B, H, S, S)
    probabilities = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return (probabilities @ v).transpose(1, 2)


class Block(nn.Module):
    """Pre-norm transformer block with rotary positions."""

    def __init__(self, width: int, heads: int, attention: Attention) -> None:
        super().__init__()
        self.heads = heads
        self.attention = attention
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False))

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:  # x (B, S, width)
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)  # (B, S, H, D) each
        out = self.attention(rotate(q, rotary), rotate(k, rotary), v)
        x = x + self.project(out.flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class ByteGPT(nn.Module):
    """Next-byte model: bytes (B, S) to logits (B, S, 256)."""

    def __init__(self, attention: Attention, *, width: int = 128, heads: int = 4, layers: int = 4) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, heads, attention) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, 256, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        rotary = rotary_angles(tokens.shape[1], self.head_dim, tokens.device)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, rotary)
        return self.head(self.norm(x))


def rotary_angles(length: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines (S, 1, D/2) of rotary position embedding (Su et al. 2021, section 3.4)."""
    frequencies = 10_000.0 ** -(torch.arange(0, head_dim, 2, device=device) / head_dim)
    angles = torch.outer(torch.arange(length, device=device), frequencies)[:, None]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (x[d], x[d + D/2]) of x (B, S, H, D) by its position's angle."""
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
