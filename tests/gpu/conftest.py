"""Every test in this folder needs a CUDA device, runs on each GPU backend that is there, and gives its memory back."""

from pathlib import Path

import pytest
import torch

from tilewise import UnsupportedAttention

from .common import BACKENDS, skip_refused

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    skip = pytest.mark.skip(reason=f"needs a CUDA device, and torch {torch.__version__} sees none")
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(skip)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """What the Hopper kernels are known to refuse skips a test that is for every backend."""
    try:
        return (yield)
    except UnsupportedAttention as error:
        skip_refused(pyfuncitem.callspec.params.get("backend", "") if hasattr(pyfuncitem, "callspec") else "", error)


@pytest.fixture(params=BACKENDS)
def backend(request):
    """The GPU backends by name: what a test does for one, it does for each."""
    return request.param


@pytest.fixture(autouse=True)
def memory_given_back():
    """Several processes share the card, so none keeps gigabytes that it no longer uses."""
    yield
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > 2 << 30:
        torch.cuda.empty_cache()
