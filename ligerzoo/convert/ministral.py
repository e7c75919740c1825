"""Converter for Ministral checkpoints. Names of tensors and config.json entries match ours."""

from ligerzoo.convert.architecture import Architecture
from ligerzoo.models.ministral import Ministral, MinistralConfig

ARCHITECTURE = Architecture("ministral", "MinistralForCausalLM", Ministral, MinistralConfig)
