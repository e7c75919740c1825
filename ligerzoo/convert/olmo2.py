"""Converter for OLMo 2 checkpoints.

Tensor names match ours. config.json uses our field names, except for the rotary embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import refuse, rope_fields, shared_fields, written_fields
from ligerzoo.models.olmo2 import Olmo2, Olmo2Config


def config_from_hf(raw: Mapping[str, Any]) -> Olmo2Config:
    """Builds the config from config.json. Missing entries take the defaults of transformers' Olmo2Config."""
    refuse(raw, "hidden_act", unless=(None, "silu", "swish"))
    return Olmo2Config(**{**shared_fields(raw, Olmo2Config), **rope_fields(raw)})


def config_to_hf(config: Olmo2Config) -> dict[str, Any]:
    """Returns the entries of config.json."""
    return {"hidden_act": "silu", **written_fields(config)}


ARCHITECTURE = Architecture(
    model_type="olmo2",
    hf_class="Olmo2ForCausalLM",
    model_class=Olmo2,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
)
