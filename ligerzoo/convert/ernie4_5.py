"""Converter for dense ERNIE 4.5 checkpoints. Names of tensors and config.json entries match ours."""

from ligerzoo.convert.architecture import Architecture
from ligerzoo.models.ernie4_5 import Ernie4_5, Ernie4_5Config

ARCHITECTURE = Architecture(
    "ernie4_5", "Ernie4_5ForCausalLM", Ernie4_5, Ernie4_5Config, accepted={"compression_ratio": (1.0,)}
)
