"""Model architectures, one file each, named after the Hugging Face `model_type`."""

from ligerzoo.exports import lazy
from ligerzoo.models.registry import MODEL_CLASSES, VISION_CONFIGS, module_of

# Imported at first use, so that a model imports only its own modules. Type checkers read __init__.pyi, which
# `python -m tools.architectures` writes from this table.
_MODULES = {
    **VISION_CONFIGS,
    **{name: module_of(model_type) for model_type, cls in MODEL_CLASSES.items() for name in (cls, f"{cls}Config")},
    "CausalLM": "causal_lm",
    "CausalLMOutput": "output",
    "DenseStage": "embedding",
    "EmbeddingModel": "embedding",
    "EmbeddingSettings": "embedding",
    "NormalizeStage": "embedding",
    "PoolingStage": "embedding",
    "MaskedLM": "masked_lm",
    "MaskedLMOutput": "output",
    "Labels": "classifier",
    "SequenceClassifier": "sequence_classifier",
    "SequenceClassifierOutput": "output",
    "TokenClassifier": "token_classifier",
    "TokenClassifierOutput": "output",
}

__all__ = sorted(_MODULES)

__getattr__, __dir__ = lazy(
    __name__,
    {name: f"{__name__}.{module}" for name, module in _MODULES.items()},
    submodules={*_MODULES.values(), "config"},
)
