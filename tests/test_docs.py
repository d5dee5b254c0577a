"""The documentation: every Python block of README.md and docs/ runs, and the site builds with every link checked."""

from __future__ import annotations

import contextlib
import doctest
import importlib.util
import inspect
import io
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "benchmarks" / "README.md", ROOT / "CONTRIBUTING.md"]
NEEDS_GPU = "<!-- needs a GPU -->"  # on the line before a block: it is compiled, and run only where there is a GPU
FENCE = re.compile(
    r"^(?P<indent> *)(?P<ticks>```+)(?P<language>[\w-]*)[^\n]*\n(?P<body>.*?)^(?P=indent)(?P=ticks)\s*$", re.DOTALL | re.MULTILINE
)


class Block(NamedTuple):
    """A fenced block of Python: the line it starts on, its text, and whether it needs a GPU."""

    line: int
    text: str
    needs_gpu: bool


def blocks(page: str) -> list[Block]:
    """The Python blocks of a page, in order."""
    found = []
    for match in FENCE.finditer(page):
        if match["language"] not in ("python", "py", "pycon"):
            continue
        before = page[: match.start()].rstrip().splitlines()
        text = re.sub(rf"^{match['indent']}", "", match["body"], flags=re.MULTILINE)
        found.append(Block(page.count("\n", 0, match.start("body")) + 1, text, bool(before) and before[-1].strip() == NEEDS_GPU))
    return found


def run(page: str, name: str) -> int:
    """Runs the blocks of a page in one namespace, as a reader would in one session; returns how many ran."""
    namespace: dict = {"__name__": "__main__"}
    ran = 0
    for block in blocks(page):
        if ">>>" in block.text:
            example = doctest.DocTestParser().get_doctest(block.text, namespace, name, name, block.line - 1)
            said: list[str] = []
            outcome = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=said.append, clear_globs=False)
            assert not outcome.failed, "".join(said)
            namespace.update(example.globs)
        else:
            code = compile("\n" * (block.line - 1) + block.text, name, "exec")  # so that a traceback names the page's own line
            if block.needs_gpu and not torch.cuda.is_available():
                continue
            with contextlib.redirect_stdout(io.StringIO()):
                exec(code, namespace)
        ran += 1
    return ran


# lab.md is a notebook as well and runs as one in tests/test_lab.py; README.md runs in tests/test_readme.py, block by block.
@pytest.mark.parametrize(
    "path",
    [p for p in PAGES if blocks(p.read_text()) and p.name not in ("lab.md", "README.md")],
    ids=lambda p: p.relative_to(ROOT).as_posix(),
)
def test_blocks_run(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "import transformers" in path.read_text():
        pytest.importorskip("transformers", reason="the page shows transformers: pip install transformers")
    monkeypatch.chdir(ROOT)
    with warnings.catch_warnings():
        assert run(path.read_text(), path.relative_to(ROOT).as_posix())


def test_no_block_hides_its_language() -> None:
    """A block with an unknown language could hold Python that nobody runs."""
    known = {"python", "pycon", "", "text", "bash", "sh", "json", "toml", "yaml", "html"}
    for path in PAGES:
        for match in FENCE.finditer(path.read_text()):
            assert match["language"] in known, f"{path.name}: a block of {match['language']}"
            if not match["language"]:
                assert "import " not in match["body"], f"{path.name}: mark this block as python\n{match['body']}"


def test_a_wrong_page_fails() -> None:
    assert run("```python\nx = 1\n```\ntext\n```python\n>>> x + 1\n2\n\n```", "page") == 2
    with pytest.raises(AssertionError, match="Expected"):
        run("```python\n>>> 1 + 1\n3\n\n```", "page")
    with pytest.raises(NameError):
        run("```python\nundefined\n```", "page")
    with pytest.raises(SyntaxError):
        run(f"{NEEDS_GPU}\n```python\nnot valid Python\n```", "page")
    if not torch.cuda.is_available():
        assert run(f"{NEEDS_GPU}\n```python\nundefined\n```", "page") == 0


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "scripts" / "docs_hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_menu_has_every_page(hooks) -> None:
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")} | set(hooks.COPIED)
    listed = [page for section in hooks.menu(pages | {"new.md"}) for found in section.values() for page in found]
    assert sorted(listed) == sorted(pages | {"new.md"})
    assert {"More": ["new.md"]} in hooks.menu({"index.md", "new.md"})


def test_doctests_of_docstrings_are_shown_as_sessions() -> None:
    pytest.importorskip("griffe", reason="the API pages are made with mkdocstrings: pip install 'tilewise[docs]'")
    spec = importlib.util.spec_from_file_location("docs_doctests", ROOT / "scripts" / "docs_doctests.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert doctest.testmod(module).attempted and not doctest.testmod(module).failed


def test_the_site_builds_and_every_link_leads_somewhere(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="the site is built with MkDocs Material: pip install 'tilewise[docs]'")
    pytest.importorskip("mkdocstrings", reason="the API pages are made with mkdocstrings: pip install 'tilewise[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    api = (tmp_path / "api" / "index.html").read_text()
    import tilewise

    for name in set(tilewise.__all__) - {"__version__"}:
        anchor = f'id="tilewise.{name}.' if inspect.ismodule(getattr(tilewise, name)) else f'id="tilewise.{name}"'
        assert anchor in api, f"docs/api.md does not show {name}"
    for page in tmp_path.rglob("*.html"):
        assert not re.findall(r'(?:src|href)="https?://[^"]*\.(?:js|css|woff2?)"', page.read_text()), f"{page} loads from another server"
