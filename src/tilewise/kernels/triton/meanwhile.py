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
def compiler_hashed() -> Iterator[None]:
    """What Triton does once before a process compiles, while the caller does something else: hash its compiler, in a thread, which mostly
    reads; and make its driver, in this thread, as two must not make it at once.
    """
    from triton.runtime import driver

    hashing = _begun(_hash, "tilewise compiler hash")
    try:
        with contextlib.suppress(Exception):  # no device: the caller only compiles
            _ = driver.active.utils
        yield
    finally:
        if hashing is not None:
            hashing.join()


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
