"""Converter for DeepSeek-V3 checkpoints, and those of Kimi-K2, which has another `model_type`.

Experts are stored as in Qwen2-MoE. config.json calls our `num_experts` `n_routed_experts`.
"""

from __future__ import annotations

from typing import Any

from ligerzoo.convert import glm4_moe
from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.qwen2_moe import expert_layouts
from ligerzoo.models.deepseek_v3 import DeepseekV3Config


def _write_entries(config: DeepseekV3Config, entries: dict[str, Any]) -> dict[str, Any]:
    """Readers have other defaults of the number of key-value heads, which is that of the heads."""
    return {**glm4_moe.ARCHITECTURE.write_entries(config, entries), "num_key_value_heads": config.num_attention_heads}


ARCHITECTURE = Architecture(
    "deepseek_v3",
    accepted={**glm4_moe.ROUTER_ENTRIES, "partial_rotary_factor": (1.0,)},
    read_entries=glm4_moe.ARCHITECTURE.read_entries,
    write_entries=_write_entries,
    layouts=expert_layouts,
    keeps_extra_layers=True,
    quantized_formats=frozenset({"fp8"}),
)
