"""Converter for Granite checkpoints. Names of tensors and config.json entries match ours."""

from ligerzoo.convert.architecture import Architecture
from ligerzoo.models.granite import Granite, GraniteConfig

ARCHITECTURE = Architecture("granite", "GraniteForCausalLM", Granite, GraniteConfig)
