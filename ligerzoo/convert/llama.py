"""Converter for Llama checkpoints. Names of tensors and config.json entries match ours."""

from ligerzoo.convert.architecture import Architecture
from ligerzoo.models.llama import Llama, LlamaConfig

ARCHITECTURE = Architecture("llama", "LlamaForCausalLM", Llama, LlamaConfig)
