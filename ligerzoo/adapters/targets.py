"""The weights that can have low-rank updates, with the names of transformers' modules, which PEFT's files have."""

from dataclasses import dataclass

from torch import nn

from ligerzoo.adapters.module_names import ModuleNames, lora_layers
from ligerzoo.convert.tensor_slices import Shape
from ligerzoo.layers import Experts
from ligerzoo.layers.adapt import adaptable_parameters
from ligerzoo.layers.routers import Router
from ligerzoo.models.language_model import LanguageModel


@dataclass(frozen=True)
class Target:
    """A weight that can have an update.

    Attributes:
        module: name of our module.
        parameter: name of its parameter.
        shape: shape of the parameter.
        stored_parameter: name of transformers' parameter, of which ours may be some rows.
        stored_shape: its shape, as (..., outputs, inputs).
        rows: first and last row, exclusive, of our parameter in it.
        is_interleaved: the rows of our gate and up projections alternate in it.
        kind: the layer's class without update.
    """

    module: str
    parameter: str
    shape: Shape
    stored_parameter: str
    stored_shape: Shape
    rows: tuple[int, int]
    is_interleaved: bool
    kind: type

    @property
    def name(self) -> str:
        """The name that patterns match: the module's; of experts, the parameter's."""
        return f"{self.module}.{self.parameter}" if self.is_experts else self.module

    @property
    def stored_module(self) -> str:
        """Name of transformers' module."""
        return self.stored_parameter.rpartition(".")[0]

    @property
    def stored_name(self) -> str:
        """As `name`, in transformers."""
        return self.stored_parameter if self.is_experts else self.stored_module

    @property
    def is_part(self) -> bool:
        """Whether transformers fuses the weight with others."""
        return self.shape != self.stored_shape

    @property
    def is_experts(self) -> bool:
        """Whether the weight stacks those of experts."""
        return issubclass(self.kind, Experts)

    @property
    def is_embedding(self) -> bool:
        """Whether the weight is that of an embedding."""
        return issubclass(self.kind, nn.Embedding)

    @property
    def is_parameter(self) -> bool:
        """Whether PEFT lists the weight in `target_parameters`: transformers' module is not a linear layer."""
        return self.is_experts or issubclass(self.kind, Router)


def targets_of(model: LanguageModel, names: ModuleNames | None = None) -> list[Target]:
    """Returns all weights of a model that have updates or can have some, in the order of its modules.

    Without those that transformers interleaves, such as Qwen3-Next's `in_proj_qkv` and `in_proj_z`: PEFT's files could
    not describe their updates.

    Args:
        model: the model.
        names: its names in transformers, if they are known already.
    """
    names, updated = names or ModuleNames(model), lora_layers(model)
    found = []
    for module_name, module in model.named_modules():
        layer = updated.get(module_name)
        if layer is None and not adaptable_parameters(module):
            continue
        kind = type(module) if layer is None else layer.plain_class
        for parameter in module.projections if isinstance(module, Experts) else ("weight",):
            name = f"{module_name}.{parameter}"
            if names.interleaves(name):
                continue
            shape, (part, *others) = names.shapes[name], names.slices(name)
            first = part.stored_index[0].start if part.stored_index else 0
            *stack, outputs, inputs = part.stored_shape
            stored = part.stored_name, (*stack, inputs, outputs) if part.transposed else part.stored_shape
            found.append(Target(module_name, parameter, shape, *stored, (first, first + shape[0]), bool(others), kind))
    return found
