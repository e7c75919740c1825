"""Converter for Qwen3-MoE checkpoints, whose tensors are stored as in Qwen2-MoE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import first_told, refuse, rope_fields, shared_fields, switched_window
from ligerzoo.convert.qwen2_moe import LAYOUTS, config_to_hf
from ligerzoo.models.qwen3_moe import Qwen3Moe, Qwen3MoeConfig


def config_from_hf(raw: Mapping[str, Any]) -> Qwen3MoeConfig:
    """Builds the config from config.json.

    `num_local_experts`, written by transformers 5, takes precedence over `num_experts`.
    """
    refuse(raw, "hidden_act", unless=(None, "silu", "swish"))
    raw = {**raw, "num_experts": first_told(raw, "num_local_experts", "num_experts")}
    return Qwen3MoeConfig(**{**shared_fields(raw, Qwen3MoeConfig), **rope_fields(raw), **switched_window(raw)})


ARCHITECTURE = Architecture(
    model_type="qwen3_moe",
    hf_class="Qwen3MoeForCausalLM",
    model_class=Qwen3Moe,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    layouts=LAYOUTS,
)
