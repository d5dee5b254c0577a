"""Passes that come again: what a pass allocates and launches is written down once, and done again with other tensors of the same layout.

What a small call costs on the host is not its launches but the way to them: checks, choices, some hundred arguments. All of it follows from
the layouts of its tensors and from its rules, so it need not be worked out twice. `record` runs a pass and watches it: every operator of
torch, through a dispatch mode, and every launch, which all go through `start`. A pass that does anything else than allocate, look at
tensors, zero its own and launch is not kept. What is kept is played as Python without a loop or a branch (`Pass.source`): going through
lists of places takes as long as the launches.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from .triton.launching import Launch

ALIGNMENT = 512  # bytes, between the parts of a workspace: what torch's allocator gives tensors of their own
SPACE = 1 << 20  # bytes that are kept for workspaces; passes that need more take so long that they do not wait for the host
_ALLOCATIONS = (
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
)
_running = threading.local()


def start(kernel: Any, programs: int, *arguments: Any) -> None:
    """Launches a compiled kernel on so many programs, and tells the recording of this thread, if there is one."""
    kernel[(programs, 1, 1)](*arguments)
    note(kernel, programs, arguments)


def note(kernel: Any, programs: int, arguments: Sequence[Any]) -> None:
    """Tells the recording of this thread, if there is one, about a launch; None stands for a kernel that cannot be launched again."""
    recording = getattr(_running, "recording", None)
    if recording is not None:
        recording.launched(kernel, programs, arguments)


def asked(function: Callable[[torch.device], Tensor], device: torch.device) -> Tensor:
    """``function(device)``, memory that belongs to the current stream as long as there are calls: each stream asks for its own, once."""
    tensor = function(device)
    recording = getattr(_running, "recording", None)
    if recording is not None:
        recording.questions.append((tensor.data_ptr(), function))
    return tensor


class OfStreams(dict[int, int]):
    """The address of what ``function(device)`` gives, by stream; the stream that asks is the current one of `device`."""

    def __init__(self, function: Callable[[torch.device], Tensor], device: torch.device) -> None:
        self.function, self.device = function, device
        self.tensors: list[Tensor] = []

    def __missing__(self, stream: int) -> int:
        tensor = self.function(self.device)
        self.tensors.append(tensor)
        self[stream] = tensor.data_ptr()
        return self[stream]


of_streams = functools.lru_cache(maxsize=64)(OfStreams)


class Spaces(dict[int, list[Tensor]]):
    """Memory for small workspaces, by stream: what no pass is about to launch on. A pass takes one out and puts it back after its last
    launch. So nobody launches on it in between, neither another thread nor a finalizer of this one, and what is launched on it later runs
    after the pass, being on the same stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __missing__(self, stream: int) -> list[Tensor]:
        return self.setdefault(stream, [])

    def more(self) -> Tensor:
        return torch.empty(SPACE, dtype=torch.uint8, device=self.device)


spaces = functools.lru_cache(maxsize=64)(Spaces)


def addresses_of(tensors: Sequence[Tensor]) -> list[int] | None:
    """Where tensors lie, if a pass over them may be recorded: at multiples of 16 bytes, which is what its choices may rest on, and no two
    at the same place (or at none, without elements), where an address would not say which is meant. `Pass.source` asks the same."""
    addresses = [x.data_ptr() for x in tensors]
    aligned = not any(address % 16 for address in addresses)
    return addresses if aligned and len({0, *addresses}) == len(addresses) + 1 else None


class Recording(TorchDispatchMode):
    """What a pass does, for as long as this mode is active."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch would wrap the method below in what keeps torch.compile from tracing it, which imports all of torch.compile, two
        seconds, when it is first called. Nothing is traced while a mode like this one is active."""
        return False

    def __init__(self, inputs: Sequence[Tensor], addresses: Sequence[int]) -> None:
        super().__init__()
        self.device = inputs[0].device
        self.layouts = [(x.shape, x.stride(), x.dtype) for x in inputs]
        self.inputs = {address: index for index, address in enumerate(addresses)}
        self.made: list[Tensor] = []  # kept, so that no address stands for two of them
        self.questions: list[tuple[int, Callable[[torch.device], Tensor]]] = []
        self.launches: list[tuple[Any, int, list[Any], dict[int, tuple[str, int, int]]]] = []  # of no kernel: what is cleared
        self.refused = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            self.made.append(result)
        elif func is torch.ops.aten.zero_.default and result.is_contiguous():
            self.launches.append((None, result.nbytes, [], {0: self.place_of(result.data_ptr())}))
        elif not func.is_view:
            self.refused = self.refused or f"it calls {func}"
        return result

    def launched(self, kernel: Any, programs: int, arguments: Sequence[Any]) -> None:
        from .triton.launching import DESCRIPTOR, POINTER, Descriptor, types

        if kernel is None:
            self.refused = "a kernel of it goes through all of Triton's own launcher"
            return
        kept, places = list(arguments), {}
        for index, (kind, x) in enumerate(zip(types(kernel), arguments, strict=True)):
            if isinstance(kind, tuple) or (isinstance(x, Tensor) and not kind.startswith(POINTER)):
                self.refused = self.refused or "it passes tensors as something else than pointers"
            elif kind.startswith(POINTER) and x is not None:
                places[index] = self.place_of(x if isinstance(x, int) else x.data_ptr())
                kept[index] = None
            elif kind.startswith(DESCRIPTOR):
                places[index] = self.place_of(x.base.data_ptr())
                kept[index] = Descriptor(None, list(x.shape), list(x.strides))
        self.launches.append((kernel, programs, kept, places))

    def place_of(self, address: int) -> tuple[str, int, int]:
        """Of what kind the tensor at an address is, which of them, and how many bytes behind its start."""
        if address in self.inputs:
            return "input", self.inputs[address], 0
        for index, (start, _) in enumerate(self.questions):
            if start == address:
                return "question", index, 0
        for index, x in enumerate(self.made):
            if x.data_ptr() <= address < x.data_ptr() + x.nbytes:
                return "made", index, address - x.data_ptr()
        self.refused = self.refused or "it reads a tensor that is none of its own"
        return "input", 0, 0

    def finished(self, results: Sequence[Tensor]) -> Pass | None:
        """The pass, None where it cannot be played. `results` are what it returns, each allocated by itself."""
        made = {x.data_ptr(): index for index, x in enumerate(self.made)}
        returned = [made.get(x.data_ptr(), -1) for x in results]
        if self.refused or not self.launches or -1 in returned or len(set(returned)) < len(returned):
            return None
        from .triton.launching import Launch

        # The addresses of a pass: inputs, answers, results, and one workspace that holds everything else.
        first_answer = len(self.inputs)
        first_result = first_answer + len(self.questions)
        workspace, bytes_used = first_result + len(results), 0
        slots = {("input", index): (index, 0) for index in range(first_answer)}
        slots |= {("question", index): (first_answer + index, 0) for index in range(len(self.questions))}
        for index, x in enumerate(self.made):
            if index in returned:
                slots["made", index] = first_result + returned.index(index), 0
            else:
                slots["made", index] = workspace, bytes_used
                bytes_used += -(-x.nbytes // ALIGNMENT) * ALIGNMENT
        launches: list[Launch | Clearing] = []
        for kernel, programs, arguments, places in self.launches:
            where = {index: (slots[kind, i][0], slots[kind, i][1] + offset) for index, (kind, i, offset) in places.items()}
            if kernel is not None:
                launches.append(Launch(kernel, programs, arguments, where))
            elif where[0][0] == workspace:
                launches.append(Clearing("work", where[0][1], programs))
            elif (result := where[0][0] - first_result) >= 0 and results[result].nbytes == programs:
                launches.append(Clearing(f"y{result}"))
            else:
                return None
        layouts = [(x.shape, x.stride(), x.dtype) for x in results]
        questions = [of_streams(function, self.device) for _, function in self.questions]
        return Pass(self.device, self.layouts, questions, layouts, bytes_used, launches)


class Clearing(NamedTuple):
    """Zeroes where others add: a result, or so many bytes of the workspace."""

    name: str
    start: int = 0
    size: int | None = None

    def written(self, named: Callable[[Any], str]) -> str:
        """As Python, in the place of a launch."""
        return f"{self.name}.zero_()" if self.size is None else f"{self.name}[{self.start}:{self.start + self.size}].zero_()"


Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]


class Pass:
    """What a recorded pass does on inputs of its layouts: ``play(*inputs)`` are its results, None where it must be worked out."""

    __slots__ = ("launches", "names", "play", "source", "workspace")

    def __init__(
        self,
        device: torch.device,
        layouts: Sequence[Layout],
        questions: Sequence[OfStreams],
        results: Sequence[Layout],
        workspace: int,
        launches: Sequence[Launch | Clearing],
    ) -> None:
        self.workspace, self.launches = workspace, launches
        self.names: dict[str, Any] = {"empty_like": torch.empty_like, "empty_strided": torch.empty_strided, "here": here}
        self.names["raw_stream"] = torch._C._cuda_getCurrentRawStream
        index = -1 if device.index is None else device.index
        inputs = [f"x{i}" for i in range(len(layouts))]
        pointers = [f"p{i}" for i in range(len(layouts) + len(questions) + len(results) + 1)]
        made = iter(pointers[len(layouts) :])
        given = ", ".join(pointers[: len(layouts)])
        lines = [f"{p} = {x}.data_ptr()" for p, x in zip(pointers, inputs, strict=False)]
        lines += [f"if ({given.replace(', ', ' | ')}) & 15 or len({{0, {given}}}) != {len(inputs) + 1} or not here({index}): return None"]
        lines += [f"stream = raw_stream({index})"]
        lines += [f"{next(made)} = {self.named(question)}[stream]" for question in questions]
        for i, (shape, stride, dtype) in enumerate(results):
            contiguous = torch.empty(shape, device="meta").stride() == stride  # then what torch makes like it lies as it does
            if contiguous and (shape, stride, dtype) in layouts:
                lines += [f"y{i} = empty_like(x{layouts.index((shape, stride, dtype))})"]
            else:
                layout = f"{tuple(shape)}, {stride}, dtype={self.named(dtype)}, device={self.named(device)}"
                lines += [f"y{i} = empty_strided({layout})"]
            lines += [f"{next(made)} = y{i}.data_ptr()"]
        small = 0 < workspace <= SPACE
        if small:
            free = spaces(device)
            lines += [f"free = {self.named(free)}[stream]"]
            lines += ["try: work = free.pop()", f"except IndexError: work = {self.named(free.more)}()"]  # threads may take at once
        elif workspace:
            lines += [f"work = empty_strided(({workspace},), (1,), dtype={self.named(torch.uint8)}, device={self.named(device)})"]
        if workspace:
            lines += [f"{next(made)} = work.data_ptr()"]
        lines += [launch.written(self.named) for launch in launches]
        lines += ["free.append(work)"] if small else []
        lines += [f"return ({' '.join(f'y{i},' for i in range(len(results)))})"]
        self.source = "\n    ".join([f"def play({', '.join(inputs)}):", *lines])
        exec(compile(self.source, "<a recorded pass of tilewise>", "exec"), self.names)
        self.play: Callable[..., tuple[Tensor, ...] | None] = self.names.pop("play")

    def named(self, x: Any) -> str:
        """How the source writes a constant: as a literal where that is exact, else by a name."""
        if x is None or type(x) in (bool, int):
            return repr(x)
        name = f"c{len(self.names)}"
        self.names[name] = x
        return name


def here(device: int) -> bool:
    """Whether launches go to a device at once: it is the current one, they are not captured in a graph, and nobody listens to them."""
    return torch._C._cuda_getDevice() == device and not torch._C._cuda_isCurrentStreamCapturing() and not _listener()()


class Passes:
    """The recorded passes of one function, by what they follow from. Recording takes longer than the pass itself, so it begins when a key
    comes again; a pass that could not be kept a few times is not watched any more."""

    ATTEMPTS = 3  # the first pass on a stream makes what later ones find

    def __init__(self, most: int = 16) -> None:
        self.most = most  # kept at a time
        self.known: dict[Any, Pass | int] = {}

    def run(self, key: Any, inputs: Sequence[Tensor], ordinary: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        """What `ordinary` returns, which must follow from `key`, from the layouts of `inputs`, which `key` contains, and from what they
        hold. All of it is on one CUDA device."""
        known = self.known.get(key)
        if known is None:
            if len(self.known) >= self.most:
                self.known.clear()
            self.known[key] = 0
            return ordinary()
        if isinstance(known, Pass):
            results = known.play(*inputs)
            return ordinary() if results is None else results
        addresses = addresses_of(inputs)
        if addresses is None or known == self.ATTEMPTS or not here(inputs[0].get_device()):
            return ordinary()
        computed, recorded = record(ordinary, inputs, addresses)
        self.known[key] = known + 1 if recorded is None else recorded
        return computed


@functools.cache
def _listener() -> Callable[[], bool]:
    """What says whether somebody listens to launches; without Triton there are none."""
    if find_spec("triton") is None:
        return bool
    from .triton.launching import watched

    return watched


def record(
    ordinary: Callable[[], Sequence[Tensor]], inputs: Sequence[Tensor], addresses: Sequence[int]
) -> tuple[Sequence[Tensor], Pass | None]:
    """What `ordinary` returns, and the pass that it ran on `inputs`, which lie at `addresses`, if that can be played."""
    recording = Recording(inputs, addresses)
    _running.recording = recording
    try:
        with recording:
            results = ordinary()
    finally:
        _running.recording = None
    return results, recording.finished([x for x in results if x is not None])
