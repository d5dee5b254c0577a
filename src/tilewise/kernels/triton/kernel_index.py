"""Which compiled kernel in Triton's cache is wanted, found without the key that Triton gives it.

That key takes a new process longer than all else that it does before a launch: Triton hashes its whole compiler, a library of half a
gigabyte among it, and walks the syntax trees of all functions that a kernel calls. The functions have to be imported for that, and each
reads its own source again. An index beside Triton's files knows a kernel by what is quickly read: the bytes of all sources of kernels,
the sizes and times of the compiler's files, every setting that Triton reads, and what the kernel is specialised on. It holds where the
files are and what a launcher asks of a kernel's source; the files stay Triton's.

Nothing depends on the index. Without a fitting and sound entry a kernel is found or compiled the ordinary way; so it is whenever somebody
has asked Triton to report or change compilations. Sources are read from the disk: a program that replaces a kernel or a constant of one in
memory has to set Triton's ``knobs.compilation.always_compile``.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import FIRST_IMPORT, meanwhile

SOURCES = Path(__file__).parents[1]
FOLDER = "tilewise"  # in Triton's cache
FORMAT = 1  # of an entry
READ = (".json", ".ptx", ".cubin")  # of a kernel's files; the stages before PTX are megabytes that no launch needs
_ADDRESS = " at 0x"  # in the text of an object that has none of its own, and so says nothing to another process


class Source:
    """What a compiled kernel and its launcher ask of the source that it came from."""

    def __init__(self, name: str, signature: dict[str, Any]) -> None:
        self.name, self.signature = name, signature
        self.constants: dict[Any, Any] = {}
        self.attrs: dict[Any, Any] = {}


class Kept(NamedTuple):
    """A compiled kernel, and numbers that were kept with it."""

    kernel: Any
    numbers: tuple[int, ...]


def find(*facts: Any) -> Kept | None:
    """The kernel that was kept under the same facts by this or another process, None where there is none to be trusted."""
    try:
        path = _path_of(facts)
        return None if path is None else _read(path)
    except Exception:  # whatever is wrong with files or new in Triton costs time, not a call
        return None


def keep(kernel: Any, *facts: Any, numbers: Sequence[int] = ()) -> None:
    """Lets `find` know what Triton has compiled or found. The facts, by their text, and this package's sources determine the kernel."""
    with contextlib.suppress(Exception):
        path = _path_of(facts)
        if path is not None:
            _write(path, kernel, numbers)


def _path_of(facts: tuple[Any, ...]) -> str | None:
    from triton import knobs

    settings, (paths, sources) = _settings(), _sources()
    text = repr((FORMAT, sources, _compiler(), settings, facts))
    if settings is None or _ADDRESS in text or _changed(paths):
        return None
    return os.path.join(knobs.cache.dir, FOLDER, hashlib.sha256(text.encode()).hexdigest() + ".json")


def _read(path: str) -> Kept | None:
    from triton.compiler import CompiledKernel

    if not os.path.exists(path):
        return None
    entry = json.loads(Path(path).read_text())
    folder = os.path.join(os.path.dirname(os.path.dirname(path)), entry["folder"])
    files = {name: os.path.join(folder, name) for name in entry["files"]}
    if not all(map(os.path.exists, files.values())):
        return None
    source = Source(entry["name"], {name: _tuples(kind) for name, kind in entry["signature"]})
    kernel = CompiledKernel(source, files, entry["hash"])
    if hashlib.sha256(kernel.kernel).hexdigest() != entry["binary"]:
        return None
    if _on_device() and not meanwhile.rehearsing():
        kernel.run  # noqa: B018 (loads it: if this Triton's launcher asks for more than an entry has, that shows here)
    return Kept(kernel, tuple(entry["numbers"]))


def _write(path: str, kernel: Any, numbers: Sequence[int]) -> None:
    folders = {os.path.dirname(file) for file in kernel.metadata_group.values()}
    folder = folders.pop()
    if folders or os.path.dirname(folder) != os.path.dirname(os.path.dirname(path)):
        return
    entry = {
        "name": kernel.src.name,
        "hash": kernel.hash,
        "folder": os.path.basename(folder),
        "files": [name for name in kernel.metadata_group if name.endswith(READ)],
        "binary": hashlib.sha256(kernel.kernel).hexdigest(),
        "signature": list(kernel.src.signature.items()),
        "numbers": list(numbers),
    }
    os.makedirs(os.path.dirname(path), exist_ok=True)
    temporary = Path(f"{path}.{uuid.uuid4().hex}")
    try:
        temporary.write_text(json.dumps(entry))
        os.replace(temporary, path)  # another process, which may read or write the same entry now, sees all of this one or nothing
    finally:
        temporary.unlink(missing_ok=True)


def _tuples(kind: Any) -> Any:
    """Nested types, which JSON makes lists of."""
    return tuple(map(_tuples, kind)) if isinstance(kind, list) else kind


def _on_device() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def _changed(paths: Sequence[Path]) -> bool:
    """Whether any source may be another than the one that this process has imported, or will: what it compiles is then not what another
    process would, and what another has kept is not for its launchers. A file that an installer moves or links into place brings an older
    time of modification along, but not of its last change of any kind.
    """
    times = [(status.st_mtime, status.st_ctime) for status in map(os.stat, paths)]
    return max(map(max, times)) >= FIRST_IMPORT


@functools.cache
def _sources() -> tuple[list[Path], str]:
    """This package's kernels, and what chooses and launches them: where they are, and a hash."""
    digest = hashlib.sha256()
    paths = sorted(SOURCES.rglob("*.py"))
    for path in paths:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(SOURCES)} {len(content)}\n".encode())
        digest.update(content)
    return paths, digest.hexdigest()


@functools.cache
def _compiler() -> tuple[Any, ...]:
    """What tells one build of Triton and its tools from another, without reading them."""
    import triton

    top = os.path.dirname(triton.__file__)
    files = []
    for folder, below, names in os.walk(top, followlinks=True):  # an editable installation has links to its backends
        below[:] = sorted(set(below) - {"__pycache__", "include"})
        for name in sorted(names):
            path = os.path.join(folder, name)
            status = os.stat(path)
            files.append(f"{path} {status.st_size} {status.st_mtime_ns}")
    listed = hashlib.sha256("\n".join(files).encode()).hexdigest()
    return triton.__version__, sys.version, listed


def _settings() -> str | None:
    """Everything that the environment and this process tell Triton, None if any of it is about compilations as events."""
    from triton import knobs
    from triton._C.libtriton import get_cache_invalidating_env_vars

    compilation, runtime = knobs.compilation, knobs.runtime
    reported = (compilation.override, compilation.dump_ir, compilation.always_compile, compilation.use_ir_loc, compilation.listener)
    hooks = [getattr(runtime, f"{name}_hook", None) for name in ("jit_cache", "jit_post_compile", "add_stages_inspection")]
    if any(x not in (None, False, "") for x in (*reported, *hooks, runtime.interpret, knobs.cache.manager_class)):
        return None
    groups = [x for x in vars(knobs).values() if isinstance(x, knobs.base_knobs) and x is not knobs.cache]
    names = {knob.key for group in groups for knob in group.knob_descriptors.values()}
    names |= {name for name in os.environ if name.startswith("TRITON_")} - {"TRITON_CACHE_DIR", "TRITON_HOME"}
    given = {name: os.environ[name] for name in sorted(names) if name in os.environ}
    tools = [(path, os.stat(path).st_size, os.stat(path).st_mtime_ns) for path in given.values() if os.path.isfile(path)]
    return repr((given, tools, [sorted(vars(group).items()) for group in groups], sorted(get_cache_invalidating_env_vars().items())))
