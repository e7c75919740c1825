"""Converter for SmolLM3 checkpoints.

Tensor names match ours. config.json uses our field names, except for the rotary embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import refuse, rope_fields, shared_fields, written_fields
from ligerzoo.models.smollm3 import SmolLM3, SmolLM3Config


def config_from_hf(raw: Mapping[str, Any]) -> SmolLM3Config:
    """Builds the config from config.json. Missing entries take the defaults of transformers' SmolLM3Config."""
    refuse(raw, "hidden_act", unless=(None, "silu", "swish"))
    rope = rope_fields(raw, default_theta=SmolLM3Config.rope_theta)
    return SmolLM3Config(**{**shared_fields(raw, SmolLM3Config), **rope})


def config_to_hf(config: SmolLM3Config) -> dict[str, Any]:
    """Returns the entries of config.json, in a spelling that transformers 4 and 5 and vLLM read."""
    return {"hidden_act": "silu", **written_fields(config)}


ARCHITECTURE = Architecture(
    model_type="smollm3",
    hf_class="SmolLM3ForCausalLM",
    model_class=SmolLM3,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
)
