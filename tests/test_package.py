"""What a user's first minute depends on: import time, no Triton at import, a small pure wheel, metadata that agrees with the code."""

from __future__ import annotations

import importlib.metadata
import re
import statistics
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import tilewise

ROOT = Path(__file__).parents[1]


def run(script: str) -> str:
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_import_brings_no_triton_and_no_optional_package() -> None:
    loaded = run(
        """
        import sys, torch
        before = set(sys.modules)
        import tilewise
        print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
        """
    ).split()
    assert "tilewise" in loaded
    assert not {"triton", "typer", "rich", "matplotlib", "numpy", "transformers"} & set(loaded)


def test_import_adds_under_150_ms_to_torch(tmp_path: Path) -> None:
    """Processor time with the bytecode that an installer leaves, the least over some fresh processes.

    What else the machine does can only add to it. The bytecode has a folder of its own: an editable install gets none from its installer,
    and where Python may not write any, each process would compile the sources anew, which takes longer than everything else.
    """
    script = f"""
        import sys, time, torch
        sys.dont_write_bytecode, sys.pycache_prefix = False, {str(tmp_path)!r}
        start = time.process_time()
        import tilewise
        print(time.process_time() - start)
    """
    run(script)
    assert list(tmp_path.rglob("api.*.pyc")), "no bytecode was written"
    times: list[float] = []
    while len(times) < 8 and min(times, default=1.0) >= 0.15:
        times.append(float(run(script)))
    assert min(times) < 0.15, f"median {statistics.median(times):.3f} s, least {min(times):.3f} s"


def test_attention_works_where_triton_is_absent() -> None:
    printed = run(
        """
        import sys
        sys.modules["triton"] = None
        import torch, tilewise
        q, k, v = (torch.randn(2, 33, 4, 16, requires_grad=True) for _ in range(3))
        out = tilewise.attention(q, k, v, causal=True, softcap=5.0)
        out.sum().backward()
        print(out.isfinite().all().item() and q.grad.isfinite().all().item())
        """
    )
    assert printed == "True"


def test_public_names_are_what_the_package_says() -> None:
    assert all(hasattr(tilewise, name) for name in tilewise.__all__)
    assert importlib.metadata.version("tilewise") == tilewise.__version__
    assert f"version: {tilewise.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_torch_is_the_only_requirement() -> None:
    requirements = [line for line in importlib.metadata.requires("tilewise") or [] if "extra ==" not in line]
    assert requirements == ["torch>=2.11"]
    assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)


def test_install_lines_install() -> None:
    """The pages install what lies in the folder, as nothing is published yet; messages name extras of what is installed already, which pip
    takes without an index."""
    texts = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "src" / "tilewise").rglob("*.py")]
    named = set()
    for path in texts:
        lines = re.findall(r"pip install (?:--upgrade )?'?([^'`\s]+)", path.read_text())
        named |= set(lines) if path.suffix == ".py" else set()
        if path.suffix == ".md":
            assert set(lines) <= {".", ".[demo]", "dist/tilewise-*.whl"}, (path.name, lines)
    extras = {name for line in named for name in re.findall(r"^tilewise\[(\w+)\]$", line)}
    declared = importlib.metadata.metadata("tilewise").get_all("Provides-Extra") or []
    assert extras and extras <= set(declared)
    assert "tilewise" not in named


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of what setuptools reads, with the setuptools that is installed."""
    import shutil

    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    script = "import setuptools.build_meta as backend; print(backend.build_wheel('dist'))"
    subprocess.run([sys.executable, "-c", script], cwd=folder, check=True, capture_output=True, timeout=120)
    return next((folder / "dist").glob("*.whl"))


def test_the_wheel_is_pure_python_and_small(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    assert wheel.stat().st_size < 1_000_000


def test_the_wheel_holds_every_module_and_table(wheel: Path) -> None:
    import zipfile

    names = set(zipfile.ZipFile(wheel).namelist())
    source = ROOT / "src"
    wanted = {
        str(path.relative_to(source))
        for path in (source / "tilewise").rglob("*")
        if path.suffix in (".py", ".json", ".csv", ".typed") and "__pycache__" not in path.parts
    }
    assert wanted <= names
    assert "tilewise/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_ci_runs_what_a_developer_runs() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert re.search(r"^make test$", script.read_text(), re.MULTILINE)


@pytest.mark.parametrize("target", ["demo", "test", "lint", "gpu", "compile-all", "wheel", "tables", "docs", "release-check"])
def test_make_knows_its_targets(target: str) -> None:
    result = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout


def test_one_module_names_gluon() -> None:
    """Its spelling differs between Triton's releases: what changes is changed in one place."""
    sources = {path.relative_to(ROOT / "src").as_posix(): path.read_text() for path in (ROOT / "src").rglob("*.py")}
    named = [name for name, text in sources.items() if re.search(r"^\s*(from|import) triton\.experimental", text, re.M)]
    assert named == ["tilewise/kernels/hopper/gluon_api.py"]
