"""Converter for Ministral checkpoints.

Tensor names match ours. config.json uses our field names, except for the rotary embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import refuse, rope_fields, shared_fields
from ligerzoo.models.ministral import Ministral, MinistralConfig


def config_from_hf(raw: Mapping[str, Any]) -> MinistralConfig:
    """Builds the config from config.json. Without `layer_types` a `sliding_window` applies to every layer."""
    refuse(raw, "hidden_act", unless=(None, "silu", "swish"))
    return MinistralConfig(**{**shared_fields(raw, MinistralConfig), **rope_fields(raw)})


def config_to_hf(config: MinistralConfig) -> dict[str, Any]:
    """Returns the entries of config.json. `head_dim` is always set, since transformers does not derive it."""
    return {"hidden_act": "silu", **asdict(config), "head_dim": config.head_size}


ARCHITECTURE = Architecture(
    model_type="ministral",
    hf_class="MinistralForCausalLM",
    model_class=Ministral,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
)
