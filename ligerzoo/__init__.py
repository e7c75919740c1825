"""ligerzoo: transformer architectures composed from fused Triton layers, loading Hugging Face checkpoints."""

from typing import TYPE_CHECKING

from ligerzoo.exports import foreign_modules, lazy

if TYPE_CHECKING:
    from ligerzoo.hub import AutoModel as AutoModel
    from ligerzoo.hub import AutoModelForEmbedding as AutoModelForEmbedding
    from ligerzoo.hub import AutoModelForMaskedLM as AutoModelForMaskedLM
    from ligerzoo.hub import AutoModelForSequenceClassification as AutoModelForSequenceClassification
    from ligerzoo.hub import AutoModelForTokenClassification as AutoModelForTokenClassification
    from ligerzoo.hub import from_transformers as from_transformers
    from ligerzoo.text.tokenizer import Tokenizer as Tokenizer
    from ligerzoo.vision.processor import Processor as Processor

__version__ = "0.1.0"

# Imported at first use, so that `import ligerzoo` is fast.
_MODULES = {
    "AutoModel": "ligerzoo.hub",
    "AutoModelForEmbedding": "ligerzoo.hub",
    "AutoModelForMaskedLM": "ligerzoo.hub",
    "AutoModelForSequenceClassification": "ligerzoo.hub",
    "AutoModelForTokenClassification": "ligerzoo.hub",
    "Processor": "ligerzoo.vision.processor",
    "Tokenizer": "ligerzoo.text.tokenizer",
    "from_transformers": "ligerzoo.hub",
}

__all__ = [
    "AutoModel",
    "AutoModelForEmbedding",
    "AutoModelForMaskedLM",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "Processor",
    "Tokenizer",
    "__version__",
    "from_transformers",
]

_PACKAGES = "adapters convert generate hub integrations kernels layers losses memory models parallel text train vision"

__getattr__, __dir__ = lazy(__name__, _MODULES, submodules=_PACKAGES.split())

foreign_modules(__name__)
