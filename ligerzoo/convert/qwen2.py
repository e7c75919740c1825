"""Converter for Qwen2 checkpoints. Names of tensors and config.json entries match ours."""

from ligerzoo.convert.architecture import Architecture
from ligerzoo.models.qwen2 import Qwen2, Qwen2Config

ARCHITECTURE = Architecture("qwen2", "Qwen2ForCausalLM", Qwen2, Qwen2Config)
