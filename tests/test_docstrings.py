"""Every example in a docstring of the package runs, in a session that has imported what a reader would."""

import doctest
import importlib
import importlib.util
from pathlib import Path

import pytest
import torch

import tilewise
from tilewise import masks

SOURCES = Path(tilewise.__file__).parent
MODULES = sorted(
    ".".join(("tilewise", *path.relative_to(SOURCES).with_suffix("").parts))
    for path in SOURCES.rglob("*.py")
    if ">>>" in path.read_text(encoding="utf-8")
)
SESSION = {
    "torch": torch,
    "tilewise": tilewise,
    **{name: getattr(tilewise, name) for name in tilewise.__all__},
    **{name: getattr(masks, name) for name in masks.__all__},
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.filterwarnings("ignore:Sparse BSR tensor support")
def test_examples_run(name: str) -> None:
    if name.startswith(("tilewise.kernels.triton.", "tilewise.kernels.hopper.")) and importlib.util.find_spec("triton") is None:
        pytest.skip("a kernel's module needs Triton")
    module = importlib.import_module(name)
    names = {key: value for key, value in SESSION.items() if not hasattr(module, key)}  # what the module defines stays its own
    result = doctest.testmod(module, extraglobs=names)
    assert result.attempted and not result.failed
