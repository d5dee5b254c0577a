"""What a first call does side by side: threads that work ahead while a kernel compiles.

Most of a compilation runs outside of Python's lock, in LLVM and in ptxas. So while the forward kernel of a call compiles, its backward pass
is rehearsed in a thread: gone through on meta tensors, which have layouts and no memory, with every launch left out and every kernel
compiled. The pass itself then finds its kernels on the disk. A rehearsal touches neither memory nor streams of the device, so that a
capture which begins meanwhile is not disturbed. What goes wrong in it goes wrong again, and is told, in the pass.

A process that ends waits for these threads: one that came back from LLVM to an interpreter that is gone would take the process down.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

_here = threading.local()
_rehearsals: list[threading.Thread] = []


def rehearsing() -> bool:
    """Whether this thread only rehearses."""
    return getattr(_here, "rehearsing", False)


def rehearse(pass_: Callable[[], Any], device: int) -> None:
    """Begins to go through a pass that will run on a CUDA device later; it must not read or write values."""
    import torch

    def run() -> None:
        _here.rehearsing = True
        with contextlib.suppress(Exception), torch.cuda.device(device):
            pass_()

    thread = _begun(run, "tilewise rehearsal")
    if thread is not None:
        _rehearsals.append(thread)


def wait() -> None:
    """Returns when nothing is rehearsed any more: what the caller would compile may just be compiled."""
    if rehearsing():
        return
    for thread in tuple(_rehearsals):
        thread.join()
        with contextlib.suppress(ValueError):  # another thread has waited for it, too
            _rehearsals.remove(thread)


def start(kernel: Any, programs: int, *arguments: Any) -> None:
    """`replay.start`; in a rehearsal only what Triton does before: it makes a launcher, on 3.6 a library that it compiles for each list of
    types."""
    from .. import replay  # which needs torch, and compiling kernels does not

    if not rehearsing():
        replay.start(kernel, programs, *arguments)
        return
    from triton.runtime import driver

    with contextlib.suppress(Exception):
        driver.active.launcher_cls(kernel.src, kernel.metadata)


@contextlib.contextmanager
def compiler_made() -> Iterator[None]:
    """What Triton does once before a process compiles, while the caller does something else: hash its compiler, which mostly reads, and
    make its driver, on 3.6 a library that it compiles from C."""
    threads = [_begun(_hash, "tilewise compiler hash"), _begun(_make_driver, "tilewise driver")]
    try:
        yield
    finally:
        for thread in threads:
            if thread is not None:
                thread.join()


@contextlib.contextmanager
def launcher_made(source: Any) -> Iterator[None]:
    """While the caller compiles `source`: the launcher of its kernel, on 3.6 a library of C, too, which follows from the types of the
    arguments alone."""
    thread = _begun(lambda: _make_launcher(source), "tilewise launcher")
    try:
        yield
    finally:
        if thread is not None:
            thread.join()


def _begun(work: Callable[[], None], name: str) -> threading.Thread | None:
    """A thread that works ahead; None where none can be had, as when the interpreter ends: the work is then done when it is due."""
    # Said, as a thread is a daemon where the one that makes it is, and autograd's threads are: a recomputed forward pass runs in one.
    thread = threading.Thread(target=work, name=name, daemon=False)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


def _hash() -> None:
    with contextlib.suppress(Exception):
        from triton.runtime.cache import triton_key

        triton_key()


_driver = threading.Lock()  # two threads must not make it at once


def _make_driver() -> None:
    with contextlib.suppress(Exception), _driver:  # no device: the caller only compiles
        from triton.runtime import driver

        _ = driver.active.utils


def _make_launcher(source: Any) -> None:
    """Asked with a compiled kernel's metadata, of which the text of the library takes that each descriptor is one of the hardware's."""
    with contextlib.suppress(Exception):
        from triton.runtime import driver

        descriptors = sum(isinstance(kind, str) and kind.startswith("tensordesc") for kind in source.signature.values())
        driver.active.launcher_cls(source, _Metadata(descriptors))


class _Metadata:
    """What a launcher reads of a compiled kernel's metadata; no kernel is launched with it."""

    def __init__(self, descriptors: int) -> None:
        self.tensordesc_meta: list[dict[str, Any]] = [{} for _ in range(descriptors)]

    def __getattr__(self, name: str) -> int:
        return 0
