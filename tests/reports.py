"""What the tests of public bug reports share."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

NEG_INF = float("-inf")
I32 = torch.int32
ALL_DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
LOW_DTYPES = ALL_DTYPES[:3]

both_backends = pytest.mark.parametrize("backend", ["tiled", "auto"])
dtypes = pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)


def report(*numbers: int) -> Any:
    """Puts the numbers of the reports into the test's id."""
    return pytest.mark.parametrize("report", ["-".join(f"B{number:02d}" for number in numbers)])


def as_view(x: Tensor, how: str) -> Tensor:
    """The same values behind strides of another kind."""
    if how == "transposed":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "offset":
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    if how == "inner_two":
        return torch.stack([x, torch.full_like(x, math.nan)], -1).flatten(-2)[..., ::2]
    if how == "channels_first":
        return x.mT.contiguous().mT
    if how == "sliced":
        return functional.pad(x, (3, 5, 0, 0, 1, 2), value=math.nan)[:, 1:-2, :, 3:-5]
    return x


VIEWS = ["transposed", "offset", "inner_two", "channels_first", "sliced"]
