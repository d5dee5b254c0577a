"""Every test starts from one seed and from memory that holds NaN: a result that reads or leaves unwritten memory fails."""

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poisoned_memory(request):
    """New tensors are filled with NaN (integers with their maximum) by torch's own deterministic-fill switch.

    The switch acts only in deterministic mode, which is also how ``deterministic=None`` is decided. Where that matters, as on a GPU, tests
    say ``deterministic=False``; those that need None to mean it carry the marker ``unpoisoned``.
    """
    if request.node.get_closest_marker("unpoisoned"):
        yield
        return
    fill, mode = torch.utils.deterministic.fill_uninitialized_memory, torch.are_deterministic_algorithms_enabled()
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(mode)
    torch.utils.deterministic.fill_uninitialized_memory = fill


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles so small that small inputs have hidden, cut and full ones, in several rows and columns, and heads in several chunks."""
    from tilewise.kernels import tiled

    monkeypatch.setattr(tiled, "CPU_TILES", tiled.TileSizes(block_m=16, block_n=16, scores=2 * 16 * 16))
