"""Modules that are slow to import, and that a user may never need: what waits for them, and how they come."""

from __future__ import annotations

import functools
import gc
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


class _Waiting(importlib.abc.MetaPathFinder):
    """Calls `action` with one module once that has been imported."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self.name, self.action = name, action

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_then_act(module: ModuleType) -> None:
                execute(module)
                self.action(module)

            spec.loader.exec_module = execute_then_act  # type: ignore[method-assign]
        return spec


def when_imported(name: str, action: Callable[[ModuleType], None]) -> None:
    """Calls `action` with the module `name` when it is imported: now, if it has been."""
    if name in sys.modules:
        action(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Waiting(name, action))


@functools.cache
def imported(name: str) -> Any:
    """The module `name`, imported without a pause for garbage. An import makes thousands of objects, nearly all to stay; that these may set
    off a search through all that torch has made takes half as long again as to import Triton."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        if enabled:
            gc.enable()
