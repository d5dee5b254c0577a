"""`install()`: lets `import flash_attn` and `import flash_attn_interface` find tilewise, until `uninstall()`."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from .. import __version__

_VERSION = f"2.8.3+tilewise.{__version__}"  # the interface that is served, and who serves it
# What is importable while installed, and the module that it stands for.
_STANDS_FOR = {
    "flash_attn": "tilewise.compat.flash_attn",
    "flash_attn.flash_attn_interface": "tilewise.compat.flash_attn",
    "flash_attn.bert_padding": "tilewise.compat.bert_padding",
    "flash_attn_interface": "tilewise.compat.flash_attn_interface",
}
_replaced: dict[str, ModuleType | None] = {}


def install() -> None:
    """Make `import flash_attn` and `import flash_attn_interface` resolve to tilewise, `flash_attn.bert_padding` too.

    For this process only, until `uninstall`; nothing is written to disk. An installed FlashAttention is shadowed meanwhile; names that were
    imported from it before stay what they were. Calling it again changes nothing. Checks that ask for the package's metadata
    (`importlib.metadata.version("flash_attn")`) still find what pip installed, or nothing; `docs/compat.md` lists the known ones.

    >>> from tilewise import compat
    >>> compat.install()
    >>> import flash_attn
    >>> flash_attn.flash_attn_func.__module__
    'tilewise.compat.flash_attn'
    >>> compat.uninstall()
    """
    if _replaced:
        return
    for name in [name for name in sys.modules if name.partition(".")[0] in ("flash_attn", "flash_attn_interface")]:
        _replaced[name] = sys.modules.pop(name)
    for name, source in _STANDS_FOR.items():
        _replaced.setdefault(name, None)
        sys.modules[name] = _alias(name, importlib.import_module(source))
    package = sys.modules["flash_attn"]
    for name in ("flash_attn_interface", "bert_padding"):
        setattr(package, name, sys.modules[f"flash_attn.{name}"])


def uninstall() -> None:
    """Undo `install`: what was importable before is importable again. Does nothing when not installed.

    >>> uninstall()
    """
    for name, module in _replaced.items():
        if module is None:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = module
    _replaced.clear()


def _alias(name: str, source: ModuleType) -> ModuleType:
    """A module of another name with the public contents of `source`."""
    module = ModuleType(name, source.__doc__)
    module.__dict__.update({key: value for key, value in vars(source).items() if not key.startswith("_")})
    is_package = name == "flash_attn"
    module.__spec__ = ModuleSpec(name, loader=None, is_package=is_package)
    module.__dict__["__version__"] = _VERSION
    if is_package:
        module.__path__ = []  # submodules that tilewise does not serve are not found, rather than taken from an installed package
    return module
