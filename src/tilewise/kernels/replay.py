"""Passes that come again: what a pass allocates and launches is written down once, and done again with other tensors of the same layout.

What a small call costs on the host is not its launches but the way to them: checks, choices, some hundred arguments. All of it follows from
the layouts of its tensors and from its rules, so it need not be worked out twice. `record` runs a pass and watches it: every operator of
torch, through a dispatch mode, and every launch, which all go through `start`. A pass that does anything else than allocate, look at
tensors and launch is not kept.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from .triton.launching import Launch

ALIGNMENT = 512  # bytes, between the parts of a workspace: what torch's allocator gives tensors of their own
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
    """``function(device)``, a tensor that every pass must ask for itself: its answer depends on the stream."""
    tensor = function(device)
    recording = getattr(_running, "recording", None)
    if recording is not None:
        recording.questions.append((tensor.data_ptr(), function))
    return tensor


def addresses_of(tensors: Sequence[Tensor]) -> list[int] | None:
    """Where tensors lie, if a pass over them may be recorded or played: at multiples of 16 bytes, which is what its choices may rest on,
    and no two at the same place (or at none, without elements), where an address would not say which is meant."""
    addresses = [x.data_ptr() for x in tensors]
    low = 0
    for address in addresses:
        low |= address
    return addresses if low & 15 == 0 and 0 not in addresses and len(set(addresses)) == len(addresses) else None


class Recording(TorchDispatchMode):
    """What a pass does, for as long as this mode is active."""

    def __init__(self, addresses: Sequence[int]) -> None:
        super().__init__()
        self.inputs = {address: index for index, address in enumerate(addresses)}
        self.made: list[Tensor] = []  # kept, so that no address stands for two of them
        self.questions: list[tuple[int, Callable[[torch.device], Tensor]]] = []
        self.launches: list[tuple[Any, int, list[Any], dict[int, tuple[str, int, int]]]] = []
        self.refused = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            self.made.append(result)
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
        launches = []
        for kernel, programs, arguments, places in self.launches:
            where = {index: (slots[kind, i][0], slots[kind, i][1] + offset) for index, (kind, i, offset) in places.items()}
            launches.append(Launch(kernel, programs, arguments, where))
        shapes = [(tuple(x.shape), x.stride(), x.dtype) for x in results]
        return Pass(tuple(function for _, function in self.questions), shapes, bytes_used, launches)


class Pass:
    """What a recorded pass does: ask, allocate, launch."""

    __slots__ = ("launches", "questions", "results", "workspace")

    def __init__(
        self,
        questions: tuple[Callable[[torch.device], Tensor], ...],
        results: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]],
        workspace: int,
        launches: list[Launch],
    ) -> None:
        self.questions, self.results, self.workspace, self.launches = questions, results, workspace, launches

    def play(self, addresses: list[int], device: torch.device) -> list[Tensor]:
        """The results of the pass on inputs at `addresses`, on the current stream of `device`, which is the current device."""
        for question in self.questions:
            addresses.append(question(device).data_ptr())
        results = []
        for shape, stride, dtype in self.results:
            x = torch.empty_strided(shape, stride, dtype=dtype, device=device)
            results.append(x)
            addresses.append(x.data_ptr())
        if self.workspace:
            workspace = torch.empty_strided((self.workspace,), (1,), dtype=torch.uint8, device=device)
            addresses.append(workspace.data_ptr())
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        for launch in self.launches:
            launch(addresses, stream)
        return results


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
        device = inputs[0].device
        addresses = addresses_of(inputs)
        if addresses is None or known == self.ATTEMPTS or not self.here(device):
            return ordinary()
        if isinstance(known, Pass):
            return known.play(addresses, device)
        results, recorded = record(ordinary, addresses)
        self.known[key] = known + 1 if recorded is None else recorded
        return results

    def here(self, device: torch.device) -> bool:
        """Whether launches go to `device` at once: they are not captured in a graph, and nobody listens to them."""
        return torch.cuda.current_device() == device.index and not torch.cuda.is_current_stream_capturing() and not _listener()()


@functools.cache
def _listener() -> Callable[[], bool]:
    """What says whether somebody listens to launches; without Triton there are none."""
    if find_spec("triton") is None:
        return bool
    from .triton.launching import watched

    return watched


def record(ordinary: Callable[[], Sequence[Tensor]], addresses: Sequence[int]) -> tuple[Sequence[Tensor], Pass | None]:
    """What `ordinary` returns, and the pass that it ran if that can be played."""
    recording = Recording(addresses)
    _running.recording = recording
    try:
        with recording:
            results = ordinary()
    finally:
        _running.recording = None
    return results, recording.finished([x for x in results if x is not None])
