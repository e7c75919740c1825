"""Converter for OLMo 2 checkpoints. Names of tensors and config.json entries match ours."""

from ligerzoo.convert.architecture import Architecture
from ligerzoo.models.olmo2 import Olmo2, Olmo2Config

ARCHITECTURE = Architecture("olmo2", "Olmo2ForCausalLM", Olmo2, Olmo2Config)
