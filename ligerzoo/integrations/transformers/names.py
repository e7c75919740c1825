"""Parts of models with the modules and names that they have in transformers, so that adapters and weights fit both.

transformers fuses projections (Phi-3, GLM), keeps the weight of a patch embedding in a convolution, and has other names
for some modules and parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from torch import nn

from ligerzoo.convert.layout import Fused, ModuleRules, Rename, Rule
from ligerzoo.integrations.transformers.modules import fuse_projections, fused_path, separate_convolution


def apply_names(model: nn.Module, rules: tuple[Rule, ...]) -> None:
    """Fuses projections and renames modules and parameters as the rules say, in place.

    Attributes keep our names as well.

    Args:
        model: the model.
        rules: those of `Architecture.module_layout`.
    """
    for rule in rules:
        match rule:
            case ModuleRules():
                apply_names(model.get_submodule(rule.prefix.removesuffix(".")), rule.rules)
            case Fused():
                fuse_projections(model, rule)
                _rename(model, fused_path(rule), rule.stored_path)
            case Rename() if rule.stored_path == f"{rule.path}.proj":
                separate_convolution(model.get_submodule(rule.path))
            case Rename():
                _rename(model, rule.path, rule.stored_path)


def unfused(rules: Iterable[Rule]) -> Iterator[Rule]:
    """Yields rules that name the projections apart that the given ones fuse."""
    for rule in rules:
        match rule:
            case ModuleRules():
                yield replace(rule, rules=tuple(unfused(rule.rules)))
            case Fused():
                parent = rule.stored_path.rpartition(".")[0]
                stored_paths = {path: f"{parent}.{path.rpartition('.')[2]}" for path in rule.paths}
                yield from (Rename(stored, path) for path, stored in stored_paths.items() if stored != path)
            case _:
                yield rule


class Renamed(nn.Module):
    """Mixin for modules whose children and parameters have the names of transformers.

    Attributes:
        stored_names: these names by ours, which are attributes too.
    """

    stored_names: dict[str, str]

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(vars(self).get("stored_names", {}).get(name, name))

    def __reduce__(self) -> tuple[object, ...]:
        return _new_renamed, (type(self).__bases__[1],), vars(self)


@cache
def _renamed_class(module_class: type[nn.Module]) -> type[Renamed]:
    return type(module_class.__name__, (Renamed, module_class), {"__module__": module_class.__module__})


def _new_renamed(module_class: type[nn.Module]) -> nn.Module:
    renamed_class = _renamed_class(module_class)  # type: ignore[arg-type]
    return renamed_class.__new__(renamed_class)


def _rename(model: nn.Module, path: str, stored_path: str) -> None:
    """Renames what has the dotted path in any module of the model."""
    names, stored_names = path.split("."), stored_path.split(".")
    for module in list(model.modules()):
        chain: list[Any] = [module]
        for name in names:
            chain.append(getattr(chain[-1], name, None))
        if isinstance(chain[-1], nn.Module | nn.Parameter):
            for parent, name, stored_name in zip(chain, names, stored_names, strict=False):
                if name != stored_name:
                    _rename_child(parent, name, stored_name)


def _rename_child(parent: Any, name: str, stored_name: str) -> None:
    for children in (parent._modules, parent._parameters):
        if name in children:
            if not isinstance(parent, Renamed):
                parent.__class__ = _renamed_class(type(parent))  # type: ignore[arg-type]
                parent.stored_names = {}
            parent.stored_names[name] = stored_name
            renamed = {stored_name if key == name else key: child for key, child in children.items()}
            children.clear()
            children.update(renamed)
