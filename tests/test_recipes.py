"""Launches that come again: the right tensors in the right places, and nothing kept that another layout or rule would need anew."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tilewise.kernels.triton import recipes
from tilewise.kernels.triton.launch import as_bytes, source


class Kernel:
    """Stands for a jitted function: records what it is launched with, as itself and as what it compiles to."""

    __name__ = "kernel"
    arg_names = ("a", "b", "n", "BLOCK")
    params = [SimpleNamespace(name=name, is_constexpr=name.isupper(), do_not_specialize=True) for name in arg_names]  # noqa: RUF012

    def __init__(self) -> None:
        self.launches: list[list[Any]] = []
        self.compilations = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        if len(grid) == 3:
            return lambda *values: self.launches.append(list(values))

        def compile_and_launch(*given: Any, **named: Any) -> Kernel:
            self.compilations += 1
            self.launches.append([*given, *(named[name] for name in self.arg_names[len(given) :])])
            return self

        return compile_and_launch


@pytest.fixture(autouse=True)
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(recipes.Launcher, "recipes", {})


def launch(kernel: Kernel, a: Any, b: Any, given: Any, scale: float = 1.0, choice: Any = None) -> None:
    """One call whose operand is `a`, with a further tensor `b`; `given` is what its code passes for the two."""
    call = recipes.Launcher((a,), (scale,))
    if not call.repeat(kernel, (b,), choice):
        call.run(kernel, 3, *given(a, b), n=a.shape[0], BLOCK=16)


def test_the_second_launch_passes_the_tensors_of_the_second_call() -> None:
    kernel = Kernel()
    for _ in range(3):
        a, b = torch.randn(4, 8), torch.randn(2)
        launch(kernel, a, b, lambda a, b: (a, b))
        assert kernel.launches[-1][0] is a and kernel.launches[-1][1] is b and kernel.launches[-1][2:] == [4, 16]
    assert kernel.compilations == 1
    assert not any(isinstance(x, torch.Tensor) for kept in recipes.Launcher.recipes.values() for x in kept.values), "memory stays alive"


def test_views_as_bytes_and_descriptors_follow_their_tensor() -> None:
    kernel = Kernel()
    for _ in range(2):
        mask, x = torch.ones(4, 16, dtype=torch.bool), torch.randn(1, 1, 4, 16).half()
        launch(kernel, mask, x, lambda mask, x: (as_bytes(mask), source(x, 16, 16, True)))
        assert kernel.launches[-1][0].data_ptr() == mask.data_ptr()
        descriptor = kernel.launches[-1][1]
        assert descriptor.base is x and list(descriptor.shape) == [1, 1, 4, 16] and list(descriptor.strides)[2:] == [16, 1]
    assert kernel.compilations == 1


@pytest.mark.parametrize("change", ["shape", "stride", "dtype", "alignment", "rule", "choice", "absence"])
def test_anything_that_decides_about_arguments_is_worked_out_anew(change: str) -> None:
    kernel = Kernel()
    a, b = torch.randn(4, 8), torch.randn(9)
    launch(kernel, a, b, lambda a, b: (a, b))
    options: dict[str, Any] = {}
    if change == "shape":
        a = torch.randn(5, 8)
    elif change == "stride":
        a = torch.randn(8, 4).T
    elif change == "dtype":
        a = a.half()
    elif change == "alignment":
        b = torch.randn(10)[1:]
    elif change == "absence":
        b = None
    else:
        options = {"scale": 2.0} if change == "rule" else {"choice": 1}
    launch(kernel, a, b, lambda a, b: (a, b), **options)
    assert kernel.compilations == 2 and kernel.launches[-1][0] is a


def test_a_tensor_given_twice_does_not_stand_for_two_that_differ_later() -> None:
    """After q = k, which of the two an argument was cannot be told."""
    kernel = Kernel()
    x = torch.randn(4, 8)
    for a, b in ((x, x), (x, torch.randn(4, 8)), (torch.randn(4, 8), x)):
        launch(kernel, a, b, lambda a, b: (b, a))
        assert kernel.launches[-1][0] is b and kernel.launches[-1][1] is a


def test_a_tensor_that_the_call_makes_is_never_taken_from_an_earlier_call() -> None:
    kernel = Kernel()
    for _ in range(2):
        a, b = torch.randn(4, 8), torch.randn(6)[::2]
        launch(kernel, a, b, lambda a, b: (a, b.contiguous()))
        assert torch.equal(kernel.launches[-1][1], b)
    assert kernel.compilations == 2 and not recipes.Launcher.recipes
