"""Converter for nanochat checkpoints. Names of tensors and config.json entries match ours."""

from ligerzoo.convert.architecture import Architecture
from ligerzoo.models.nanochat import NanoChat, NanoChatConfig

ARCHITECTURE = Architecture(
    "nanochat", "NanoChatForCausalLM", NanoChat, NanoChatConfig, activations={"hidden_act": ("relu2",)}
)
