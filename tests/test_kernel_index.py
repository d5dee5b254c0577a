"""The index of compiled kernels: what it finds in a new process, what it must not find any more, and what must not disturb a call."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tilewise.kernels import kernel_cache
from tilewise.kernels.triton import kernel_index

FACTS = ("add_one", "bf16", (1, True))


@triton.jit
def add_one(x_ptr, pair, BLOCK: tl.constexpr):
    """A kernel with a nested argument."""
    offsets = tl.arange(0, BLOCK)
    tl.store(x_ptr + offsets, tl.load(x_ptr + offsets) + pair[0] + pair[1][0])


def compiled():
    signature = {"x_ptr": "*fp32", "pair": ("i32", ("fp32",)), "BLOCK": "constexpr"}
    source = ASTSource(add_one, signature, {(2,): 128}, {(0,): [["tt.divisibility", 16]]})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32))


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory):
    """A cache of its own, in which the kernel lies; compiled once for all tests."""
    path = tmp_path_factory.getbasetemp() / "triton"
    monkeypatch.setattr(knobs.cache, "dir", str(path))
    remembered = (kernel_index._sources, kernel_index._compiler)
    for function in remembered:
        function.cache_clear()
    yield path
    for function in remembered:
        function.cache_clear()
    for entry in path.glob("tilewise/*"):
        entry.unlink()


@pytest.fixture
def kernel(folder: Path):
    kernel = compiled()
    kernel_index.keep(kernel, *FACTS, numbers=(7, 2048))
    return kernel


def entry_of(folder: Path) -> Path:
    (path,) = (folder / "tilewise").iterdir()
    return path


def test_a_kept_kernel_is_found_with_its_numbers(kernel) -> None:
    found = kernel_index.find(*FACTS)
    assert found is not None and found.numbers == (7, 2048)
    assert found.kernel.asm["cubin"] == kernel.asm["cubin"] and found.kernel.asm["ptx"] == kernel.asm["ptx"]
    assert found.kernel.src.signature == kernel.src.signature and list(found.kernel.src.signature) == list(kernel.src.signature)
    assert found.kernel.metadata == kernel.metadata and found.kernel.packed_metadata == kernel.packed_metadata
    assert found.kernel.hash == kernel.hash and found.kernel.name == kernel.name
    assert kernel_index.find("add_one", "fp16", (1, True)) is None


def test_another_process_finds_it_without_triton_s_key(kernel, folder: Path) -> None:
    script = f"""
    from triton.runtime import cache, jit
    from tilewise.kernels.triton import kernel_index

    def never(*_):
        raise AssertionError("asked Triton")

    cache.triton_key = cache.get_cache_key = never
    jit.JITCallable.cache_key = property(never)
    print(kernel_index.find(*{FACTS!r}).kernel.hash)
    """
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == kernel.hash, done.stderr


def test_a_kernel_found_is_one_that_triton_can_keep_again(kernel, folder: Path) -> None:
    """After a moved folder, say: entries name files by the folder that they are in."""
    found = kernel_index.find(*FACTS)
    moved = folder.with_name("moved")
    folder.rename(moved)
    try:
        assert kernel_index.find(*FACTS) is None
        knobs.cache.dir = str(moved)
        again = kernel_index.find(*FACTS)
        assert again is not None and again.kernel.asm == found.kernel.asm
        kernel_index.keep(again.kernel, "other facts")
        assert kernel_index.find("other facts") is not None
    finally:
        moved.rename(folder)


# ------------------------------------------------------------------------------------------------------------------ nothing stale


def test_edited_sources_find_nothing(kernel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "hopper").mkdir()
    monkeypatch.setattr(kernel_index, "SOURCES", tmp_path)
    for content, file in (("x = 1", "hopper/a.py"), ("x = 2", "hopper/a.py"), ("x = 2", "hopper/b.py")):
        (tmp_path / file).write_text(content)
        monkeypatch.setattr(kernel_index, "FIRST_IMPORT", time.time() + 60)  # as in a process that begins now
        kernel_index._sources.cache_clear()
        assert kernel_index.find(*FACTS) is None
        kernel_index.keep(kernel, *FACTS)
        assert kernel_index.find(*FACTS) is not None


@pytest.mark.parametrize("replaced", ["written", "moved into place", "linked into place"])
def test_a_process_whose_sources_are_replaced_leaves_the_index_alone(
    kernel, replaced: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What it compiles may be the old text, or half of it, and what others keep is for the launchers of the new one."""
    monkeypatch.setattr(kernel_index, "SOURCES", tmp_path / "package")
    source, other = tmp_path / "package" / "a.py", tmp_path / "a.py"
    source.parent.mkdir()
    for path in (source, other):
        path.write_text("x = 1")
        os.utime(path, (0, 0))
    time.sleep(0.05)  # a file's times are as coarse as the kernel's clock
    monkeypatch.setattr(kernel_index, "FIRST_IMPORT", time.time())
    time.sleep(0.05)
    kernel_index._sources.cache_clear()
    kernel_index.keep(kernel, *FACTS)
    assert kernel_index.find(*FACTS) is not None
    if replaced == "written":
        source.write_text("x = 2")
    elif replaced == "moved into place":
        os.replace(other, source)
    else:
        source.unlink()
        os.link(other, source)
    kernel_index.keep(kernel, "another kernel")
    assert kernel_index.find(*FACTS) is None
    monkeypatch.setattr(kernel_index, "FIRST_IMPORT", time.time() + 60)
    assert kernel_index.find("another kernel") is None, "an entry was written"


@pytest.mark.parametrize("what", ["version", "file", "size", "linked backend"])
def test_another_triton_finds_nothing(kernel, what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library, backend = tmp_path / "triton" / "libtriton.so", tmp_path / "backend" / "compiler.py"
    for path in (library, backend):
        path.parent.mkdir()
        path.write_text("machine code")
    (library.parent / "backend").symlink_to(backend.parent)
    monkeypatch.setattr(triton, "__file__", str(library.parent / "__init__.py"))
    kernel_index._compiler.cache_clear()
    kernel_index.keep(kernel, *FACTS)
    assert kernel_index.find(*FACTS) is not None
    if what == "version":
        monkeypatch.setattr(triton, "__version__", "3.99.0")
    elif what == "file":
        os.utime(library, (1, 1))
    elif what == "linked backend":
        os.utime(backend, (1, 1))
    else:
        times = os.stat(library)
        library.write_text("other machine code")
        os.utime(library, ns=(times.st_atime_ns, times.st_mtime_ns))
    kernel_index._compiler.cache_clear()
    assert kernel_index.find(*FACTS) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [("DISABLE_PTXAS_OPT", "1"), ("TRITON_PTXAS_PATH", sys.executable), ("TRITON_NOT_YET_KNOWN", "1"), ("DISABLE_LLVM_OPT", "1")],
)
def test_other_settings_in_the_environment_find_nothing(kernel, name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert kernel_index.find(*FACTS) is None
    kernel_index.keep(kernel, *FACTS)
    assert kernel_index.find(*FACTS) is not None
    monkeypatch.delenv(name)
    assert kernel_index.find(*FACTS) is not None


def test_another_tool_at_the_same_place_finds_nothing(kernel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "ptxas"
    tool.write_text("one")
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(tool))
    kernel_index.keep(kernel, *FACTS)
    assert kernel_index.find(*FACTS) is not None
    tool.write_text("another")
    assert kernel_index.find(*FACTS) is None


def test_settings_made_in_python_find_nothing(kernel) -> None:
    with knobs.nvidia.scope():
        knobs.nvidia.disable_ptxas_opt = True
        assert kernel_index.find(*FACTS) is None
    with knobs.runtime.scope():
        knobs.runtime.debug = not knobs.runtime.debug
        assert kernel_index.find(*FACTS) is None
    assert kernel_index.find(*FACTS) is not None


@pytest.mark.parametrize("name", ["override", "dump_ir", "always_compile", "use_ir_loc", "listener"])
def test_it_stands_aside_where_compilations_are_watched_or_changed(kernel, name: str) -> None:
    with knobs.compilation.scope():
        setattr(knobs.compilation, name, (lambda **_: None) if name == "listener" else "ttgir" if name == "use_ir_loc" else True)
        assert kernel_index.find(*FACTS) is None
    with knobs.runtime.scope():
        knobs.runtime.jit_cache_hook = lambda **_: None
        assert kernel_index.find(*FACTS) is None
    assert kernel_index.find(*FACTS) is not None


def test_facts_that_another_process_cannot_have_are_not_kept(kernel, folder: Path) -> None:
    before = set((folder / "tilewise").iterdir())
    kernel_index.keep(kernel, object())
    assert set((folder / "tilewise").iterdir()) == before


def outside(source: str, depth: int) -> set[str]:
    """Names that functions for the device use although they come from outside the hashed sources, directly or through constants.

    What only the host uses may come from anywhere.
    """
    tree = ast.parse(source)
    foreign: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.level > depth or (node.module or "").startswith("tilewise")):
            foreign |= {name.asname or name.name for name in node.names}
        elif isinstance(node, ast.Assign) and foreign & names_in(node.value):
            foreign |= {name for target in node.targets for name in names_in(target)}
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    compiled = [
        node for node in functions if any(word in ast.unparse(x) for x in node.decorator_list for word in ("jit", "constexpr_function"))
    ]
    return foreign & {name for node in compiled for name in names_in(node)}


def names_in(node: ast.AST) -> set[str]:
    return {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}


def test_kernels_use_nothing_from_outside_the_sources_that_are_hashed() -> None:
    """But types, and texts that are facts: the programs of score functions."""
    for path in kernel_index.SOURCES.rglob("*.py"):
        depth = len(path.relative_to(kernel_index.SOURCES).parts)
        assert not outside(path.read_text(), depth), path


def test_what_kernels_use_from_outside_is_noticed() -> None:
    kernel = "@triton.jit\ndef f(x):\n    return x + SIZE\n"
    assert outside("from ...plan import SIZE\n" + kernel, 2) == {"SIZE"} == outside("from tilewise.plan import SIZE\n" + kernel, 2)
    assert outside("from ...plan import MOST\nSIZE = tl.constexpr(2 * MOST)\n" + kernel, 2) == {"SIZE"}
    assert not outside("from ..triton import SIZE\n" + kernel, 2) and not outside("from ...plan import Operands\n" + kernel, 2)


# ------------------------------------------------------------------------------------------------------------- nothing disturbs


@pytest.mark.parametrize("damage", ["empty", "cut", "not an entry", "file gone", "binary changed", "folder gone"])
def test_damage_costs_a_look_up(kernel, damage: str, folder: Path) -> None:
    path = entry_of(folder)
    entry = json.loads(path.read_text())
    binary = folder / entry["folder"] / "add_one.cubin"
    content = binary.read_bytes()
    if damage == "file gone":
        binary.unlink()
    elif damage == "binary changed":
        binary.write_bytes(content[:-1] + b"?")
    elif damage == "folder gone":
        path.write_text(json.dumps({**entry, "folder": "elsewhere"}))
    else:
        path.write_text({"empty": "", "cut": path.read_text()[:40], "not an entry": "[]"}[damage])
    assert kernel_index.find(*FACTS) is None
    binary.write_bytes(content)
    kernel_index.keep(kernel, *FACTS)
    assert kernel_index.find(*FACTS) is not None


def test_surprises_in_triton_cost_a_look_up(kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(*_):
        raise TypeError("takes other arguments")

    monkeypatch.setattr("triton.compiler.CompiledKernel", changed)
    assert kernel_index.find(*FACTS) is None
    monkeypatch.setattr(kernel_index, "_compiler", changed)
    assert kernel_index.find(*FACTS) is None
    kernel_index.keep(kernel, *FACTS)
    kernel_index.keep(object(), *FACTS)


def test_a_folder_that_cannot_be_written_keeps_nothing(kernel, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_args, **_named):
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refused)
        kernel_index.keep(kernel, "new")
        patch.setattr(os, "makedirs", refused)
        kernel_index.keep(kernel, "new")
    assert kernel_index.find("new") is None and kernel_index.find(*FACTS) is not None
    assert len(list((folder / "tilewise").iterdir())) == 1, "half an entry is left"
    monkeypatch.setattr(knobs.cache, "dir", str(folder / "missing"))
    assert kernel_index.find(*FACTS) is None


def test_kernels_of_a_read_only_folder_are_found(kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_cache.prepare.cache_clear()
    monkeypatch.setattr(kernel_cache, "_why_not_writable", lambda folder: "Read-only file system")
    before = knobs.cache.dir
    with pytest.warns(UserWarning, match="Read-only file system"):
        kernel_cache.prepare()
    kernel_cache.prepare.cache_clear()
    found = kernel_index.find(*FACTS)
    assert knobs.cache.dir != before
    assert found is not None and found.numbers == (7, 2048)


def test_writers_and_readers_at_once_see_whole_entries(kernel) -> None:
    seen: list[bool] = []

    def work() -> None:
        for _ in range(20):
            kernel_index.keep(kernel, *FACTS, numbers=(7, 2048))
            found = kernel_index.find(*FACTS)
            seen.append(found is not None and found.numbers == (7, 2048))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(seen) == 80 and all(seen)


# ----------------------------------------------------------------------------------------------------------------- who uses it


def test_hopper_kernels_are_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.kernels.hopper import backward_compiling, backward_configs, backward_launch, compiling, configs, launch

    made: list[str] = []

    def forward(*_):
        made.append("forward")
        return compiled(), configs.Addresses(4096, 512)

    def backward(*_):
        made.append("backward")
        return compiled(), 1024

    monkeypatch.setattr(compiling, "compile_forward", forward)
    monkeypatch.setattr(backward_compiling, "compile_backward", backward)
    variant = configs.Variant(configs.TILES["128"], "bf16", 128, 1, 128, right=True)
    other = backward_configs.BackwardVariant(backward_configs.TILES["128"], "bf16", 128, 128)
    for _ in range(2):
        _, addresses = launch.build(variant, "bf16", "fp32", "fp32")
        assert addresses == configs.Addresses(4096, 512)
        _, address = backward_launch.build(other, "fp32")
        assert address == 1024
    assert made == ["forward", "backward"]
    launch.build(variant, "fp32", "fp32", "fp32")
    assert made == ["forward", "backward", "forward"]


def test_portable_kernels_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from tilewise.kernels import replay
    from tilewise.kernels.triton import recipes

    compilations, launches = [], []

    def compile_and_launch(self, *given, grid, warmup, **named):
        compilations.append((grid, given, named))
        return compiled()

    monkeypatch.setattr(triton.JITFunction, "run", compile_and_launch)
    monkeypatch.setattr(replay, "start", lambda kernel, *values: launches.append((kernel.name, values)))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    x, pair, capability = torch.zeros(128), (1, (2.0,)), (9, 0)

    def in_a_new_process(num_warps: int = 4) -> None:
        monkeypatch.setattr(recipes, "_compiled", {})
        recipes.run(add_one, 3, x, pair, BLOCK=128, num_warps=num_warps)

    in_a_new_process()
    assert len(compilations) == 1 and not launches
    in_a_new_process()
    assert len(compilations) == 1 and launches == [("add_one", (3, x, pair, 128))]
    in_a_new_process(num_warps=8)
    assert len(compilations) == 2
    capability = (8, 0)
    in_a_new_process()
    assert len(compilations) == 3


def test_a_call_whose_kernels_are_kept_does_not_import_their_language() -> None:
    script = """
    import sys
    from tilewise.kernels.hopper import backward_launch, launch
    print([x for x in sys.modules if "experimental.gluon" in x or x.endswith(("forward_pass", "backward_pass"))])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
