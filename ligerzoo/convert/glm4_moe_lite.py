"""Converter for GLM-4.7-Flash checkpoints, which are those of DeepSeek-V3 with other entries in config.json.

transformers ignores `first_k_dense_replace`, and takes one dense layer unless `mlp_layer_types` says otherwise. So
other numbers are written as types.
"""

from dataclasses import replace

from ligerzoo.convert.families import FAMILIES
from ligerzoo.models.glm4_moe_lite import MLP_TYPES, Glm4MoeLiteConfig

_DEEPSEEK = FAMILIES["deepseek_v3"]


def _write_entries(config: Glm4MoeLiteConfig, entries: dict[str, object]) -> dict[str, object]:
    if config.mlp_layer_types is None and config.first_k_dense_replace != 1:
        types = [MLP_TYPES[config.has_mixture(layer)] for layer in range(config.num_hidden_layers)]
        entries = {**entries, "mlp_layer_types": types}
    return _DEEPSEEK.write_entries(config, entries)


ARCHITECTURE = replace(
    _DEEPSEEK,
    model_type="glm4_moe_lite",
    class_name="Glm4MoeLiteForCausalLM",
    write_entries=_write_entries,
    quantized_formats=frozenset(),
)
