"""The names of a model's weights in adapters: those of transformers' modules, today's and of versions before 5.0."""

from collections.abc import Iterator, Sequence
from functools import cached_property

from torch import nn

from ligerzoo.convert import architecture_of_model
from ligerzoo.convert.tensor_slices import Shape, TensorSlice
from ligerzoo.layers.lora import LoRALayer
from ligerzoo.models.language_model import LanguageModel


def lora_layers(model: nn.Module) -> dict[str, LoRALayer]:
    """Returns the layers with low-rank updates, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoRALayer)}


class ModuleNames:
    """Where transformers' modules have the weights of a model, and all names of these modules.

    Args:
        model: its parameters, without those of updates, decide which names there are.

    Attributes:
        shapes: shapes of the model's tensors without those of updates, by name.
    """

    def __init__(self, model: LanguageModel) -> None:
        self._architecture, self._config = architecture_of_model(model), model.config
        self._layout = self._architecture.module_layout(model.config)
        own = {f"{name}.{key}" for name, layer in lora_layers(model).items() for key in layer.update_parameters()}
        state = model.state_dict().items()
        self.shapes: dict[str, Shape] = {name: tuple(tensor.shape) for name, tensor in state if name not in own}

    def slices(self, name: str) -> Iterator[TensorSlice]:
        """Yields the slices of transformers' tensors that make up our parameter."""
        return self._layout.slices_of(name, self.shapes)

    def module_of(self, name: str) -> str:
        """Returns transformers' module that holds our parameter."""
        return next(self.slices(name)).stored_name.rpartition(".")[0]

    def interleaves(self, name: str) -> bool:
        """Returns whether transformers' modules interleave our parameter with others."""
        return self._architecture.interleaves(self._config, name)

    @cached_property
    def _names(self) -> dict[str, list[str]]:
        """All names of each module and parameter of transformers, today's first."""
        names: dict[str, list[str]] = {}

        def add(current: str, old: Sequence[str]) -> None:
            listed = names.setdefault(current, [current])
            listed += [name for name in old if name not in listed]

        for name in self.shapes:
            current, *others = self._architecture.module_names(self._config, name, self.shapes)
            add(current, others)
            module, _, leaf = current.rpartition(".")
            add(module, [other.removesuffix(f".{leaf}") for other in others if other.endswith(f".{leaf}")])
        return names

    @cached_property
    def _current(self) -> dict[str, str]:
        return {old: name for name, others in self._names.items() for old in others[1:]}

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
