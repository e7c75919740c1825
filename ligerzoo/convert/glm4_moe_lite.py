"""Converter for GLM-4.7-Flash checkpoints, which are those of DeepSeek-V3 with other entries in config.json.

transformers ignores `first_k_dense_replace`, and takes one dense layer unless `mlp_layer_types` says otherwise. So
other numbers are written as types.
"""

from __future__ import annotations

from typing import Any

from ligerzoo.convert import deepseek_v3
from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.glm4_moe import ROUTER_ENTRIES, read_entries
from ligerzoo.convert.qwen2_moe import LAYOUTS
from ligerzoo.models.glm4_moe_lite import MLP_TYPES, Glm4MoeLite, Glm4MoeLiteConfig


def write_entries(config: Glm4MoeLiteConfig, entries: dict[str, Any]) -> dict[str, Any]:
    """Returns the entries of config.json from those named like the fields of the config."""
    if config.mlp_layer_types is None and config.first_k_dense_replace != 1:
        types = [MLP_TYPES[config.has_mixture(layer)] for layer in range(config.num_hidden_layers)]
        entries = {**entries, "mlp_layer_types": types}
    return deepseek_v3.write_entries(config, entries)


ARCHITECTURE = Architecture(
    "glm4_moe_lite",
    "Glm4MoeLiteForCausalLM",
    Glm4MoeLite,
    Glm4MoeLiteConfig,
    accepted={**ROUTER_ENTRIES, "partial_rotary_factor": (1.0,)},
    read_entries=read_entries,
    write_entries=write_entries,
    layouts=LAYOUTS,
    keeps_extra_layers=True,
)
