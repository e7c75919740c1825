"""The only place that knows other people's names: config.json to our configs, their tensors to ours, and back."""

from __future__ import annotations

from importlib import import_module

from ligerzoo.convert.architecture import Architecture
from ligerzoo.errors import ConfigError

MODEL_TYPES = (
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "glm",
    "glm4",
    "granite",
    "llama",
    "ministral",
    "ministral3",
    "mistral",
    "mixtral",
    "mllama",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen2_5_vl",
    "qwen2_moe",
    "qwen2_vl",
    "qwen3",
    "qwen3_moe",
    "smollm3",
)
"""Every `model_type`. Each has a file here of the same name with its ARCHITECTURE, imported when it is asked for."""


_REGISTERED: dict[str, Architecture] = {}
"""Architectures of users' own classes, by `model_type`."""


def architecture_of(model_type: object) -> Architecture:
    """Returns the architecture that config.json's `model_type` names.

    Raises:
        ConfigError: No architecture has this name.
    """
    if isinstance(model_type, str) and model_type in _REGISTERED:
        return _REGISTERED[model_type]
    if model_type not in MODEL_TYPES:
        raise ConfigError(
            "no such architecture",
            where="model_type",
            got=repr(model_type),
            expected=" or ".join((*MODEL_TYPES, *_REGISTERED)),
            remedy="If it is a class of your own, call AutoModel.register first.",
        )
    architecture: Architecture = import_module(f"{__name__}.{model_type}").ARCHITECTURE
    return architecture


def architecture_for(model_class: type) -> Architecture:
    """Returns the architecture of a model class, or of the nearest base class that has one.

    Raises:
        ConfigError: Neither the class nor a base class is registered or part of ligerzoo.models.
    """
    for base in model_class.__mro__:
        for architecture in _REGISTERED.values():
            if architecture.model_class is base:
                return architecture
        package, _, module = base.__module__.rpartition(".")
        if package == "ligerzoo.models" and module in MODEL_TYPES and architecture_of(module).model_class is base:
            return architecture_of(module)
    raise ConfigError(
        "the class is not registered, so it cannot be saved or loaded",
        where=model_class.__name__,
        expected="a class of ligerzoo.models, a subclass of one, or a registered class",
        remedy=f'Call AutoModel.register(<config class>, {model_class.__name__}, model_type="...").',
    )
