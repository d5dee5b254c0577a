"""Launches that come again: what to pass is worked out once for every layout of a call, and only the tensors are put in anew.

Working out sixty arguments in Python takes longer than a small kernel runs, and Triton's own binding of them as long again. In training and
serving the same shapes, strides and rules come on every step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import triton

from . import kernel_index, meanwhile
from .launching import Descriptor

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

MOST = 4096  # kept at a time

_compiled: dict[tuple[Any, ...], Any] = {}


def run(kernel: Any, programs: int, *given: Any, **named: Any) -> Any:
    """``kernel[(programs,)](*given, **named)``, with a short way to the compiled kernel when the same types come again.

    Triton binds and hashes all sixty arguments on every launch, which takes longer than a small kernel runs. What a compiled kernel of
    ours depends on is less: types, 16-byte alignment of pointers, and compile-time values, as no integer is specialised on. Returns the
    compiled kernel, None in the interpreter.
    """
    import torch

    from .. import replay  # which needs torch, and compiling kernels does not

    if not isinstance(kernel, triton.JITFunction) or torch.version.hip is not None:  # on AMD the extent of a tensor counts too
        replay.note(None, programs, given)
        return kernel[(programs,)](*given, **named)
    names, exact = parameters(kernel)
    values = [*given, *[named[name] for name in names[len(given) :]]]
    options = [(name, named[name]) for name in named if name not in exact]
    key = (kernel.__name__, torch.cuda.current_device(), *[kind(x, exact[n]) for x, n in zip(values, names, strict=True)], *options)
    found = _compiled.get(key)
    if found is None:
        facts = (kernel.__module__, torch.cuda.get_device_capability(), key[0], *key[2:])
        kept = kernel_index.find(*facts)
        if kept is not None:
            found = kept.kernel
        else:
            found = kernel.warmup(*given, grid=(programs,), **named) if meanwhile.rehearsing() else kernel[(programs,)](*given, **named)
            kernel_index.keep(found, *facts)
        if not meanwhile.rehearsing():
            _compiled[key] = found
            if kept is None:
                replay.note(found, programs, values)
                return found
    meanwhile.start(found, programs, *values)
    return found


_parameters: dict[str, tuple[list[str], dict[str, bool]]] = {}


def parameters(kernel: Any) -> tuple[list[str], dict[str, bool]]:
    """The names of a kernel's arguments, and of each whether what is compiled depends on its value."""
    found = _parameters.get(kernel.__name__)
    if found is None:
        exact = {x.name: x.is_constexpr or not x.do_not_specialize for x in kernel.params}
        found = _parameters[kernel.__name__] = (kernel.arg_names, exact)
    return found


def kind(x: Any, exact: bool) -> Any:
    """What a compiled kernel knows of an argument."""
    if x is None or type(x) is float:
        return x is None
    if type(x) is int:
        return x if exact else "i32" if -(1 << 31) <= x < 1 << 31 else "i64"
    if hasattr(x, "data_ptr"):
        return x.dtype, x.data_ptr() % 16 == 0
    if type(x) is tuple:  # what programs read: the tensors themselves must not be kept
        return tuple(kind(part, exact) for part in x)
    if hasattr(x, "block_shape"):  # a descriptor
        return x.base.dtype, *x.block_shape
    return x


class Layout(NamedTuple):
    """All that the arguments of a launch take from a tensor, apart from where it lies."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    aligned: bool


def layout(x: Tensor | None) -> Layout | None:
    return None if x is None else Layout(x.dtype, x.shape, x.stride(), x.data_ptr() % 16 == 0)


class Recipe(NamedTuple):
    """A compiled kernel, its grid and arguments, and which of them are tensors of the call (or descriptors of those)."""

    kernel: Any
    programs: int
    values: list[Any]
    tensors: list[tuple[int, int]]  # argument, tensor
    descriptors: list[tuple[int, int, list[int], list[int]]]  # argument, tensor, shape, strides

    def launch(self, pool: Sequence[Tensor | None]) -> None:
        from .. import replay

        values = self.values.copy()
        for argument, tensor in self.tensors:
            values[argument] = pool[tensor]
        for argument, tensor, shape, strides in self.descriptors:
            values[argument] = Descriptor(pool[tensor], shape, strides)
        replay.start(self.kernel, self.programs, *values)


def recipe_of(kernel: Any, programs: int, values: list[Any], pool: Sequence[Tensor | None]) -> Recipe | None:
    """None where an argument is a tensor that the call made itself or was given twice, or holds several."""
    plain = list(values)
    tensors: list[tuple[int, int]] = []
    descriptors: list[tuple[int, int, list[int], list[int]]] = []
    for argument, x in enumerate(values):
        if hasattr(x, "data_ptr"):
            tensors.append((argument, index_of(x, pool)))
            plain[argument] = None
        elif hasattr(x, "block_shape"):
            descriptors.append((argument, index_of(x.base, pool), list(x.shape), list(x.strides)))
            plain[argument] = None
        elif isinstance(x, tuple):
            return None
    if any(index < 0 for _, index in tensors) or any(x[1] < 0 for x in descriptors):
        return None
    return Recipe(kernel, programs, plain, tensors, descriptors)


def index_of(x: Tensor, pool: Sequence[Tensor | None]) -> int:
    """Which tensor of the call this is: itself, or a view of all its bytes under another dtype. -1 where none is, or more than one: which
    of q and k a kernel was given cannot be told in a call where they are the same tensor, and in the next call they need not be."""
    found = [
        index
        for index, y in enumerate(pool)
        if y is x or (y is not None and y.data_ptr() == x.data_ptr() != 0 and y.nbytes == x.nbytes and y.dtype != x.dtype)
    ]
    return found[0] if len(found) == 1 else -1


class Launcher:
    """The launches of one call with the operands `tensors`. `rules` are whatever else decides about arguments; with None, none is kept."""

    recipes: dict[tuple[Any, ...], Recipe] = {}  # noqa: RUF012 (shared by all calls on purpose)

    def __init__(self, tensors: Sequence[Tensor | None], rules: tuple[Any, ...] | None) -> None:
        import torch

        self.tensors = tensors
        self.keeps = rules is not None
        self.key = () if rules is None else (*rules, torch.cuda.current_device(), *map(layout, tensors))
        self.pending: tuple[tuple[Any, ...], tuple[Tensor | None, ...]] | None = None

    def repeat(self, kernel: Any, further: Sequence[Tensor | None], choice: Any = None) -> bool:
        """Launch `kernel` as it was for the same layouts of the operands and `further` tensors and the same `choice`, if it ever was."""
        if not self.keeps:
            return False
        key = (kernel.__name__, choice, *self.key, *map(layout, further))
        pool = (*self.tensors, *further)
        found = self.recipes.get(key)
        if found is None:
            self.pending = key, pool
            return False
        found.launch(pool)
        return True

    def run(self, kernel: Any, programs: int, *given: Any, **named: Any) -> None:
        """`run`, kept for `repeat` if that was asked just before."""
        compiled = run(kernel, programs, *given, **named)
        if self.pending is None or self.pending[0][0] != kernel.__name__:
            return
        (key, pool), self.pending = self.pending, None
        values = [*given, *[named[name] for name in kernel.arg_names[len(given) :]]]
        recipe = recipe_of(compiled, programs, values, pool)
        if recipe is not None:
            if len(self.recipes) >= MOST:
                self.recipes.clear()
            self.recipes[key] = recipe
