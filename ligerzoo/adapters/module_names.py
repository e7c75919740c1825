"""The names of transformers' modules in adapters: today's, and those that versions before 5.0 and 4.52 gave them."""

from __future__ import annotations

from collections.abc import Sequence

from ligerzoo.adapters.targets import base_shapes
from ligerzoo.convert import architecture_of_model
from ligerzoo.models.language_model import LanguageModel


class ModuleNames:
    """All names of the modules and parameters of a model.

    Args:
        model: its parameters decide which names there are.
    """

    def __init__(self, model: LanguageModel) -> None:
        architecture, shapes = architecture_of_model(model), base_shapes(model)
        self._names: dict[str, list[str]] = {}
        for name in shapes:
            current, *others = architecture.module_names(model.config, name, shapes)
            self._add(current, others)
            module, _, leaf = current.rpartition(".")
            self._add(module, [other.removesuffix(f".{leaf}") for other in others if other.endswith(f".{leaf}")])
        self._current = {old: name for name, others in self._names.items() for old in others[1:]}

    def _add(self, current: str, old: Sequence[str]) -> None:
        names = self._names.setdefault(current, [current])
        names += [name for name in old if name not in names]

    def all_of(self, name: str) -> list[str]:
        """Returns all names of a module or parameter, today's first."""
        return self._names.get(name, [name])

    def current(self, name: str) -> str:
        """Returns the name of a tensor with today's name of its module, the longest beginning that names one."""
        parts = name.split(".")
        for module in (".".join(parts[:end]) for end in range(len(parts), 0, -1)):
            if module in self._names:
                return name
            if module in self._current:
                return self._current[module] + name.removeprefix(module)
        return name
