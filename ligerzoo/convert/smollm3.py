"""Converter for SmolLM3 checkpoints. Names of tensors and config.json entries match ours."""

from ligerzoo.convert.architecture import Architecture
from ligerzoo.models.smollm3 import SmolLM3, SmolLM3Config

ARCHITECTURE = Architecture("smollm3", "SmolLM3ForCausalLM", SmolLM3, SmolLM3Config)
