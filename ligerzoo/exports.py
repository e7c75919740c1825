"""What packages export: names that are imported at first use, and hints for names that a package does not have."""

from __future__ import annotations

import opcode
import sys
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from types import FrameType, ModuleType
from typing import Any, NoReturn

from ligerzoo.foreign_names import MODULES, our_public_name


def renamed(module: str, names: Mapping[str, str] | None = None) -> Callable[[str], NoReturn]:
    """Returns the `__getattr__` of a module: it raises an AttributeError with our name for an old or a foreign one.

    Args:
        module: the module's `__name__`.
        names: the new name by the old one.
    """

    def __getattr__(name: str) -> NoReturn:
        caller, new = sys._getframe(1), names.get(name) if names else None
        _raise_missing(module, name, f"It is {new} now" if new else _remedy(name, caller), caller)

    return __getattr__


def lazy(
    package: str, modules: Mapping[str, str], submodules: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns `__getattr__` and `__dir__` of a package that imports what it exports at first use.

    Args:
        package: the package's `__name__`.
        modules: the module of each name.
        submodules: modules of the package that are attributes, too.
    """

    def __getattr__(name: str) -> Any:
        if name in modules:
            return getattr(import_module(modules[name]), name)
        if name in submodules:
            return import_module(f"{package}.{name}")
        caller = sys._getframe(1)
        _raise_missing(package, name, _remedy(name, caller), caller)

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules, *submodules})

    return __getattr__, __dir__


def foreign_modules(package: str) -> None:
    """Registers modules of liger-kernel that a package does not have: imports from them raise errors with our names.

    They are empty, and not attributes of the package. `from ligerzoo.transformers import LigerRMSNorm` then names
    `ligerzoo.layers.RMSNorm`, where Python would only say that there is no module `ligerzoo.transformers`.
    """
    for name in MODULES:
        module = ModuleType(f"{package}.{name}", f"liger_kernel.{name}: nothing is here, see docs/coming-from.md.")
        vars(module)["__getattr__"] = _foreign(module.__name__)
        sys.modules[module.__name__] = module


_EXPORTING = "models layers kernels losses generate adapters hub memory parallel train.optimizers"


def _remedy(name: str, caller: FrameType) -> str | None:
    """Returns where a name is that another package exports, or our name for a foreign one; None if neither is known."""
    if name.startswith("_") or caller.f_code.co_filename.startswith("<frozen importlib"):  # looks for a submodule
        return None
    for package in _EXPORTING.split():
        module = import_module(f"ligerzoo.{package}")
        if name in getattr(module, "__all__", vars(module)):
            return f"It is in ligerzoo.{package}"
    return our_public_name(name)


def _foreign(module: str) -> Callable[[str], NoReturn]:
    def __getattr__(name: str) -> NoReturn:
        hint = our_public_name(name) or "ligerzoo has no such module, which is of liger-kernel"
        _raise_missing(module, name, f"{hint}. docs/coming-from.md has all names of liger-kernel", sys._getframe(1))

    return __getattr__


def _raise_missing(module: str, name: str, hint: str | None, caller: FrameType) -> NoReturn:
    message = f"module {module!r} has no attribute {name!r}"
    if hint is None:
        raise AttributeError(message, name=name, obj=sys.modules[module])  # Python adds the nearest name
    if opcode.opname[caller.f_code.co_code[caller.f_lasti]] == "IMPORT_FROM":  # hides an AttributeError's message
        raise ImportError(f"{message}. {hint}", name=module)
    raise AttributeError(f"{message}. {hint}", name=name)
