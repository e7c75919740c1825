"""Converter for Arcee checkpoints. Names of tensors and config.json entries match ours."""

from ligerzoo.convert.architecture import Architecture
from ligerzoo.models.arcee import Arcee, ArceeConfig

ARCHITECTURE = Architecture("arcee", "ArceeForCausalLM", Arcee, ArceeConfig, activations={"hidden_act": ("relu2",)})
