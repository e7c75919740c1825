"""Converter for Qwen3 checkpoints. Names of tensors and config.json entries match ours."""

from ligerzoo.convert.architecture import Architecture
from ligerzoo.models.qwen3 import Qwen3, Qwen3Config

ARCHITECTURE = Architecture("qwen3", "Qwen3ForCausalLM", Qwen3, Qwen3Config, quantized_formats=frozenset({"fp8"}))
