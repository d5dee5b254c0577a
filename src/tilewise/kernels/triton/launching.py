"""The one place that knows Triton's launcher below its public call: a launch of which only addresses change.

``kernel[grid](*arguments)`` expands every tensor descriptor in Python and encodes its map for the hardware anew, asks for the current
device and stream, and calls two chains of hooks. A `Launch` has all of that done: what is left is one call of the launcher in C, with
addresses among constants. Triton 3.6 and 3.9 call it differently; where neither way fits, a `Launch` takes the public one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from triton import knobs

MOST_MAPS = 128  # kept of one descriptor
POINTER = "*"
DESCRIPTOR = "tensordesc"


class Descriptor:
    """What Triton's launcher reads of a host tensor descriptor; the checks of its own class were done once for the call."""

    __slots__ = ("base", "shape", "strides")
    padding = "zero"
    round_f32_to_tf32 = False

    def __init__(self, base: Any, shape: list[int], strides: list[int]) -> None:
        self.base, self.shape, self.strides = base, shape, strides


class Address(NamedTuple):
    """Stands for a tensor of which nothing is wanted but where it lies."""

    value: int

    def data_ptr(self) -> int:
        return self.value


class Maps:
    """What a kernel is given for one descriptor, by address. An encoded map is a function of the layout, which is fixed here, and of the
    address alone: whose memory lies there does not matter, and allocators give out the same addresses again and again."""

    __slots__ = ("known", "make", "shape", "strides")

    def __init__(self, shape: Sequence[int], strides: Sequence[int], make: Callable[[Descriptor], Any]) -> None:
        self.shape, self.strides, self.make = list(shape), list(strides), make
        self.known: dict[int, Any] = {}

    def __call__(self, address: int) -> Any:
        found = self.known.get(address)
        if found is None:
            if len(self.known) >= MOST_MAPS:
                self.known.clear()
            found = self.known[address] = self.make(Descriptor(Address(address), self.shape, self.strides))
        return found


def watched() -> bool:
    """Whether somebody listens to launches: hooks of a profiler. An empty chain does not; whatever else was put in its place does."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool((enter is not None and getattr(enter, "calls", True)) or (leave is not None and getattr(leave, "calls", True)))


def types(kernel: Any) -> list[Any]:
    """The Triton types of a compiled kernel's arguments, in order."""
    return list(kernel.src.signature.values())


class Entry(NamedTuple):
    """How a compiled kernel is launched: ``call(programs, 1, 1, stream, *before, *values)``, with one list of values if not `spread`."""

    call: Callable[..., Any]
    before: tuple[Any, ...] = ()
    spread: bool = True


class Launch:
    """A compiled kernel on `programs` programs with `arguments`, some of which lie at addresses that each call brings.

    `places` says for each of these, pointers and descriptors, which address it is and how many bytes behind it.
    """

    __slots__ = ("described", "entry", "pointers", "programs", "values")

    def __init__(self, kernel: Any, programs: int, arguments: Sequence[Any], places: dict[int, tuple[int, int]]) -> None:
        direct = _direct(kernel)
        metadata = _of_descriptors(kernel) if direct is not None else []
        self.values: list[Any] = []
        self.pointers: list[tuple[int, int, int]] = []  # value, address, offset
        self.described: list[tuple[int, int, int, Maps]] = []
        for index, x in enumerate(arguments):
            if isinstance(x, Descriptor):
                make = _as_it_is if direct is None else _encoder(metadata.pop(0))
                self.described.append((len(self.values), *places[index], Maps(x.shape, x.strides, make)))
                self.values += [None] if direct is None else [None, *x.shape, *x.strides]
                continue
            if index in places:
                self.pointers.append((len(self.values), *places[index]))
            self.values.append(x)
        self.programs = programs
        self.entry = direct if direct is not None else Entry(_public(kernel))

    def written(self, named: Callable[[Any], str]) -> str:
        """The launch as Python, with ``stream`` and ``p0``, ``p1``, ... for the addresses; `named` gives objects a name there."""
        texts = [named(x) for x in self.values]
        for place, address, offset in self.pointers:
            texts[place] = f"p{address} + {offset}" if offset else f"p{address}"
        for place, address, offset, maps in self.described:
            where = f"p{address} + {offset}" if offset else f"p{address}"
            texts[place] = f"{named(maps.known.get)}({where}) or {named(maps)}({where})"
        values = ", ".join(texts) if self.entry.spread else f"[{', '.join(texts)}]"
        return ", ".join([f"{named(self.entry.call)}({self.programs}, 1, 1, stream", *map(named, self.entry.before), values]) + ")"


def _of_descriptors(kernel: Any) -> list[Any]:
    """How a compiled kernel wants each of its descriptors encoded; nothing where the hardware has none and they come in parts."""
    return list(getattr(kernel.metadata, "tensordesc_meta", None) or ())


def _as_it_is(descriptor: Descriptor) -> Descriptor:
    return descriptor


def _encoder(metadata: Any) -> Callable[[Descriptor], Any]:
    """What encodes a map for a descriptor of the kind that a compiled kernel expects."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    further = make_tensordesc_arg.__code__.co_argcount - 2  # 3.9 also passes the arguments of the whole launch
    return lambda descriptor: make_tensordesc_arg(descriptor, metadata, *[None] * further)[0]


def _public(kernel: Any) -> Callable[..., None]:
    return lambda x, y, z, stream, *values: kernel[(x, y, z)](*values, stream=stream)


@functools.lru_cache(maxsize=1024)
def _direct(kernel: Any) -> Entry | None:
    """The launcher in C and all that it takes before the values of a launch, None where this Triton has another one."""
    try:
        run, function, packed = kernel.run, kernel.function, kernel.packed_metadata
        cooperative, dependent, wrapped = run.launch_cooperative_grid, run.launch_pdl, run.launch
        if run.global_scratch_size or run.profile_scratch_size or getattr(run, "gsan_enabled", False):
            return None
        described = sum(isinstance(x, str) and x.startswith(DESCRIPTOR) for x in types(kernel))
        if len(_of_descriptors(kernel)) != described:
            return None
        compiled = inspect.getclosurevars(wrapped).nonlocals["launcher"] if inspect.isfunction(wrapped) else wrapped
        if not hasattr(run, "arg_annotations"):
            return Entry(compiled, (function, cooperative, dependent, None, None, packed, None, None, None))
        before = (function, cooperative, dependent, packed, None, None, None, None, None, run.arg_annotations, run.kernel_signature)
        return Entry(compiled, before, spread=False)
    except (AttributeError, KeyError):
        return None
