"""Model architectures, one file each, named after the Hugging Face `model_type`."""

from importlib import import_module
from typing import Any

from ligerzoo.models.registry import ARCHITECTURES, VISION_CONFIGS

# Imported at first use, so that a model imports only its own modules. Type checkers read __init__.pyi, which
# `python -m tools.architectures` writes from this table.
_MODULES = {
    **VISION_CONFIGS,
    **{name: module for module, cls in ARCHITECTURES.items() for name in (cls, f"{cls}Config")},
    "CausalLM": "causal_lm",
    "CausalLMOutput": "output",
    "Labels": "sequence_classifier",
    "SequenceClassifier": "sequence_classifier",
    "SequenceClassifierOutput": "output",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    if name in _MODULES.values() or name == "config":
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
