"""The architectures: one file each, named by Hugging Face's `model_type`."""

from ligerzoo.models.causal_lm import CausalLM, CausalLMOutput
from ligerzoo.models.gemma import Gemma, GemmaConfig
from ligerzoo.models.gemma2 import Gemma2, Gemma2Config
from ligerzoo.models.gemma3_text import Gemma3Text, Gemma3TextConfig
from ligerzoo.models.granite import Granite, GraniteConfig
from ligerzoo.models.llama import Llama, LlamaConfig
from ligerzoo.models.olmo2 import Olmo2, Olmo2Config

__all__ = [
    "CausalLM",
    "CausalLMOutput",
    "Gemma",
    "Gemma2",
    "Gemma2Config",
    "Gemma3Text",
    "Gemma3TextConfig",
    "GemmaConfig",
    "Granite",
    "GraniteConfig",
    "Llama",
    "LlamaConfig",
    "Olmo2",
    "Olmo2Config",
]
