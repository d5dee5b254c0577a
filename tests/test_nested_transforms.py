"""Function transforms inside one another, over any argument, against the reference in float64; what is beyond raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.utils._pytree import tree_leaves

from tilewise import attention, attention_varlen

SHAPES = {"q": (1, 3, 2, 4), "k": (1, 4, 1, 4), "v": (1, 4, 1, 3), "bias": (2, 3, 4), "learnable_sink": (2,), "alibi_slopes": (2,)}
PAIRS = [("q", "bias"), ("learnable_sink", "k"), ("alibi_slopes", "v")]


def arguments() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}


def of(*names: str, backend: str, scalar: bool = True) -> Callable[..., Tensor]:
    """Attention, or a number made of it, as a function of the named arguments."""
    rest = {name: x for name, x in arguments().items() if name not in names}

    def call(*given: Tensor) -> Tensor:
        out = attention(**rest, **dict(zip(names, given, strict=True)), causal=True, backend=backend)
        return out.sin().sum() if scalar else out

    return call


def stack(x: Tensor, n: int = 2) -> Tensor:
    return torch.stack([x * (1 + 0.3 * i) + 0.1 * i for i in range(n)])


# f is a number of two arguments a and b, g the tensor that it is made of.
NESTED: dict[str, Callable[..., Any]] = {
    "vmap of vmap": lambda f, g, a, b: vmap(vmap(g, (0, None)), (None, 0))(stack(a), stack(b, 3)),
    "vmap of vmap of grad": lambda f, g, a, b: vmap(vmap(grad(f, (0, 1)), (0, None)), (None, 0))(stack(a), stack(b, 3)),
    "grad of vmap": lambda f, g, a, b: grad(lambda x, y: vmap(g, (0, None))(x, y).square().sum(), (0, 1))(stack(a), b),
    "jacrev of vmap": lambda f, g, a, b: jacrev(vmap(g, (None, 0)), (0, 1))(a, stack(b)),
    "jacfwd of vmap": lambda f, g, a, b: jacfwd(vmap(g, (None, 0)), (0, 1))(a, stack(b)),
    "vmap of jacfwd": lambda f, g, a, b: vmap(jacfwd(f, (0, 1)), (None, 0))(a, stack(b)),
    "vmap of hessian": lambda f, g, a, b: vmap(hessian(f, (0, 1)), (None, 0))(a, stack(b)),
    "vmap of jvp of grad": lambda f, g, a, b: vmap(lambda x, y: jvp(grad(f, (0, 1)), (x, y), (x, y))[1], (0, None))(stack(a), b),
    "jacrev of jacrev": lambda f, g, a, b: jacrev(jacrev(f, 0), 1)(a, b),
    "jacfwd of jacrev": lambda f, g, a, b: jacfwd(jacrev(f, 0), 1)(a, b),
    "jacrev of jacfwd": lambda f, g, a, b: jacrev(jacfwd(f, 0), 1)(a, b),
    "vjp of vjp": lambda f, g, a, b: vjp(lambda x: vjp(lambda y: g(x, y), b)[1](torch.ones_like(g(a, b)))[0], a)[1](torch.ones_like(b)),
}


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("name", NESTED)
def test_two_arguments_at_once(name: str, pair: tuple[str, str]) -> None:
    a, b = (arguments()[argument] for argument in pair)
    got, expected = (
        NESTED[name](of(*pair, backend=backend), of(*pair, backend=backend, scalar=False), a, b) for backend in ("tiled", "reference")
    )
    for mine, theirs in zip(tree_leaves(got), tree_leaves(expected), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-10)


def test_linearize() -> None:
    """One trace of the tangent, applied to others."""
    a, b = arguments()["q"], arguments()["bias"]
    tangents = [linearize(of("q", "bias", backend=backend, scalar=False), a, b)[1](a * 2, b) for backend in ("tiled", "reference")]
    torch.testing.assert_close(*tangents, rtol=1e-8, atol=1e-10)


def slope(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A number made of the gradient of f."""
    return lambda x: grad(f)(x).sin().sum()


BEYOND: dict[str, Callable[..., Any]] = {
    "grad of grad of grad": lambda f, x: grad(slope(slope(f)))(x),
    "vmap of grad of grad of grad": lambda f, x: vmap(grad(slope(slope(f))))(stack(x)),
    "jvp of jvp": lambda f, x: jvp(lambda x: jvp(f, (x,), (x,))[1], (x,), (x,)),
    "jvp of jvp of grad": lambda f, x: jvp(lambda x: jvp(grad(f), (x,), (x,))[1], (x,), (x,)),
    "jacfwd of jacfwd": lambda f, x: jacfwd(jacfwd(f))(x),
    "jvp of hessian": lambda f, x: jvp(hessian(f), (x,), (x,)),
    "jacrev of hessian": lambda f, x: jacrev(hessian(f))(x),
    "grad of jvp of grad of jvp": lambda f, x: grad(
        lambda x: jvp(grad(lambda x: jvp(f, (x,), (torch.ones_like(x),))[1]), (x,), (torch.ones_like(x),))[1].sum()
    )(x),
}


@pytest.mark.parametrize("argument", ["q", "v", "bias", "learnable_sink"])
@pytest.mark.parametrize("name", BEYOND)
def test_what_lies_beyond_raises_whichever_way_it_is_asked_for(name: str, argument: str) -> None:
    """Never a silent zero."""
    with pytest.raises(NotImplementedError, match=r"first and second derivatives.*backend='reference'"):
        BEYOND[name](of(argument, backend="tiled"), arguments()[argument])


@pytest.mark.parametrize("name", ["vmap of vmap of grad", "jacrev of vmap", "vmap of hessian", "vjp of vjp"])
def test_packed_sequences(name: str) -> None:
    v = arguments()["v"][0]
    offsets_q, offsets_k = torch.tensor([0, 2, 3], dtype=torch.int32), torch.tensor([0, 1, 4], dtype=torch.int32)

    def packed(backend: str, scalar: bool) -> Callable[..., Tensor]:
        def call(q: Tensor, k: Tensor) -> Tensor:
            out = attention_varlen(q[0], k[0], v, offsets_q, offsets_k, causal=True, backend=backend)
            return out.sin().sum() if scalar else out

        return call

    a, b = arguments()["q"], arguments()["k"]
    got, expected = (NESTED[name](packed(backend, True), packed(backend, False), a, b) for backend in ("tiled", "reference"))
    for mine, theirs in zip(tree_leaves(got), tree_leaves(expected), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-10)
