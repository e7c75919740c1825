"""Parts of models with the modules and names that they have in transformers, so that adapters and weights fit both.

transformers fuses projections (Phi-3, GLM), keeps the weight of a patch embedding in a convolution, and has other names
for some modules and parameters, or has modules in other ones: those of BERT's attention in `attention.self` and
`attention.output`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from operator import attrgetter
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


class Container(nn.Module):
    """A module of transformers that ligerzoo does not have: it holds modules of ours."""


class Renamed(nn.Module):
    """Mixin for modules whose children and parameters have the names of transformers, also in other modules.

    Attributes:
        stored_names: these names by ours, which are attributes too.
        moved: by our name, a module that has a child of this one, None for this one; and its dotted path there.
    """

    stored_names: dict[str, str]
    moved: dict[str, tuple[nn.Module | None, str]]

    def __getattr__(self, name: str) -> Any:
        own = vars(self)
        if name in own.get("moved", ()):
            owner, path = self.moved[name]
            return attrgetter(path)(self if owner is None else owner)
        return super().__getattr__(own.get("stored_names", {}).get(name, name))

    def __reduce__(self) -> tuple[object, ...]:
        return _new_renamed, (type(self).__bases__[1],), vars(self)


@cache
def _renamed_class(module_class: type[nn.Module]) -> type[Renamed]:
    return type(module_class.__name__, (Renamed, module_class), {"__module__": module_class.__module__})


def _new_renamed(module_class: type[nn.Module]) -> nn.Module:
    renamed_class = _renamed_class(module_class)  # type: ignore[arg-type]
    return renamed_class.__new__(renamed_class)


def _rename(model: nn.Module, path: str, stored_path: str) -> None:
    """Renames what has the dotted path in any module of the model, or moves it to where transformers has it."""
    names, stored_names = path.split("."), stored_path.split(".")
    for module in [module for module in model.modules() if not isinstance(module, Container)]:
        chain: list[Any] = [module]
        for name in names:
            chain.append(getattr(chain[-1], name, None))
        if not isinstance(chain[-1], nn.Module | nn.Parameter):
            continue
        pairs = list(zip(chain, names, stored_names, strict=False))
        if len(names) == len(stored_names) and all(_can_rename(*pair) for pair in pairs):
            for parent, name, stored_name in pairs:
                if name != stored_name:
                    _rename_child(parent, name, stored_name)
        elif isinstance(chain[-1], nn.Module):
            depth = 0  # of the module that has both paths
            while depth < len(names) - 1 and _name_in(chain[depth], names[depth]) == stored_names[depth]:
                depth += 1
            _move(chain[depth], names[depth:], stored_names[depth:])


def _name_in(parent: nn.Module, name: str) -> str:
    """Returns the name under which a module has its child with one of our names."""
    return vars(parent).get("stored_names", {}).get(name, name)


def _can_rename(parent: nn.Module, name: str, stored_name: str) -> bool:
    """Whether a child has the stored name, or its own and no other child has the stored one."""
    now = _name_in(parent, name)
    return now == stored_name or (now == name and stored_name not in parent._modules)


def _rename_child(parent: Any, name: str, stored_name: str) -> None:
    for children in (parent._modules, parent._parameters):
        if name in children:
            _become_renamed(parent)
            parent.stored_names[name] = stored_name
            renamed = {stored_name if key == name else key: child for key, child in children.items()}
            children.clear()
            children.update(renamed)


def _move(owner: nn.Module, names: list[str], stored_names: list[str]) -> None:
    """Moves a module within `owner` to another path, into modules that hold nothing else of ours."""
    *parents, name = names
    parent: Any = attrgetter(".".join(parents))(owner) if parents else owner
    child, holder = getattr(parent, name), owner
    for stored_name in stored_names[:-1]:
        if stored_name not in holder._modules:
            after = _name_in(owner, names[0]) if holder is owner else None
            _insert(holder, stored_name, Container(), after)
        holder = holder.get_submodule(stored_name)
    del parent._modules[_name_in(parent, name)]
    holder.add_module(stored_names[-1], child)
    _become_renamed(parent)
    parent.moved[name] = (None if parent is owner else owner, ".".join(stored_names))


def _insert(module: nn.Module, name: str, child: nn.Module, after: str | None) -> None:
    """Adds a child after another one, or as the last."""
    module.add_module(name, child)
    keys = list(module._modules)
    if after in keys:
        for key in keys[keys.index(after) + 1 : -1]:
            module._modules[key] = module._modules.pop(key)


def _become_renamed(module: Any) -> None:
    if not isinstance(module, Renamed):
        module.__class__ = _renamed_class(type(module))  # type: ignore[arg-type]
        module.stored_names, module.moved = {}, {}
