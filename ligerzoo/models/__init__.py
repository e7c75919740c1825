"""The architectures: one file each, named by Hugging Face's `model_type`."""

from ligerzoo.models.causal_lm import CausalLM, CausalLMOutput
from ligerzoo.models.gemma import Gemma, GemmaConfig
from ligerzoo.models.gemma2 import Gemma2, Gemma2Config
from ligerzoo.models.gemma3_text import Gemma3Text, Gemma3TextConfig
from ligerzoo.models.glm import Glm, GlmConfig
from ligerzoo.models.glm4 import Glm4, Glm4Config
from ligerzoo.models.granite import Granite, GraniteConfig
from ligerzoo.models.llama import Llama, LlamaConfig
from ligerzoo.models.olmo2 import Olmo2, Olmo2Config
from ligerzoo.models.phi3 import Phi3, Phi3Config
from ligerzoo.models.qwen2 import Qwen2, Qwen2Config
from ligerzoo.models.qwen3 import Qwen3, Qwen3Config
from ligerzoo.models.smollm3 import SmolLM3, SmolLM3Config

__all__ = [
    "CausalLM",
    "CausalLMOutput",
    "Gemma",
    "Gemma2",
    "Gemma2Config",
    "Gemma3Text",
    "Gemma3TextConfig",
    "GemmaConfig",
    "Glm",
    "Glm4",
    "Glm4Config",
    "GlmConfig",
    "Granite",
    "GraniteConfig",
    "Llama",
    "LlamaConfig",
    "Olmo2",
    "Olmo2Config",
    "Phi3",
    "Phi3Config",
    "Qwen2",
    "Qwen2Config",
    "Qwen3",
    "Qwen3Config",
    "SmolLM3",
    "SmolLM3Config",
]
