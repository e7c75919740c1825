"""The architectures: one file each, named by Hugging Face's `model_type`."""

from ligerzoo.models.causal_lm import CausalLM, CausalLMOutput
from ligerzoo.models.llama import Llama, LlamaConfig

__all__ = ["CausalLM", "CausalLMOutput", "Llama", "LlamaConfig"]
