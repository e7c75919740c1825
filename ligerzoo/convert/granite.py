"""Converter for Granite checkpoints.

Tensor names match ours. config.json uses our field names, except for the rotary embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import refuse, rope_fields, shared_fields, written_fields
from ligerzoo.models.granite import Granite, GraniteConfig


def config_from_hf(raw: Mapping[str, Any]) -> GraniteConfig:
    """Builds the config from config.json. Missing entries take the defaults of transformers' GraniteConfig."""
    refuse(raw, "hidden_act", unless=(None, "silu", "swish"))
    return GraniteConfig(**{**shared_fields(raw, GraniteConfig), **rope_fields(raw)})


def config_to_hf(config: GraniteConfig) -> dict[str, Any]:
    """Returns the entries of config.json."""
    return {"hidden_act": "silu", **written_fields(config)}


ARCHITECTURE = Architecture(
    model_type="granite",
    hf_class="GraniteForCausalLM",
    model_class=Granite,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
)
