"""ligerzoo: transformer architectures composed from fused Triton layers, loading Hugging Face checkpoints."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ligerzoo.hub import AutoModel as AutoModel
    from ligerzoo.hub import AutoModelForSequenceClassification as AutoModelForSequenceClassification
    from ligerzoo.hub import from_transformers as from_transformers
    from ligerzoo.text.tokenizer import Tokenizer as Tokenizer
    from ligerzoo.vision.processor import Processor as Processor

__version__ = "0.1.0"

# Imported at first use, so that `import ligerzoo` is fast.
_MODULES = {
    "AutoModel": "ligerzoo.hub",
    "AutoModelForSequenceClassification": "ligerzoo.hub",
    "Processor": "ligerzoo.vision.processor",
    "Tokenizer": "ligerzoo.text.tokenizer",
    "from_transformers": "ligerzoo.hub",
}

__all__ = [
    "AutoModel",
    "AutoModelForSequenceClassification",
    "Processor",
    "Tokenizer",
    "__version__",
    "from_transformers",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'ligerzoo' has no attribute {name!r}")
