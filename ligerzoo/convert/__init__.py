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


def architecture_of(model_type: object) -> Architecture:
    """The architecture of a config.json's `model_type`.

    Raises:
        ConfigError: there is none.
    """
    if model_type not in MODEL_TYPES:
        raise ConfigError(
            "no such architecture",
            where="model_type",
            got=repr(model_type),
            expected=" or ".join(MODEL_TYPES),
        )
    architecture: Architecture = import_module(f"ligerzoo.convert.{model_type}").ARCHITECTURE
    return architecture


def architecture_for(model_class: type) -> Architecture:
    """The architecture of one of our model classes (or a subclass of one).

    Raises:
        ConfigError: it is none of the zoo's, so its checkpoints have no known layout.
    """
    by_class = {architecture.model_class: architecture for architecture in map(architecture_of, reversed(MODEL_TYPES))}
    for known in model_class.__mro__:  # nearest first: one architecture's class may be a subclass of another's
        if known in by_class:
            return by_class[known]
    raise ConfigError(
        "no checkpoint layout is known for this class",
        where=model_class.__name__,
        expected="a class of ligerzoo.models",
        remedy="Save the state_dict of a model of your own with safetensors.torch.save_model.",
    )
