"""Converter for Mistral checkpoints.

Tensor names match ours. config.json uses our field names, except for the rotary embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import refuse, rope_fields, shared_fields
from ligerzoo.models.mistral import Mistral, MistralConfig


def config_from_hf(raw: Mapping[str, Any]) -> MistralConfig:
    """Builds the config from config.json. A missing `sliding_window` means 4096; null means full attention.

    `layer_types` selects the window per layer, as in Ministral; so does transformers' AutoConfig.
    """
    refuse(raw, "hidden_act", unless=(None, "silu", "swish"))
    return MistralConfig(**{**shared_fields(raw, MistralConfig), **rope_fields(raw)})


def config_to_hf(config: MistralConfig) -> dict[str, Any]:
    """Returns the entries of config.json."""
    entries = {"hidden_act": "silu", **asdict(config)}
    if config.layer_types is None:
        del entries["layer_types"]
    return entries


ARCHITECTURE = Architecture(
    model_type="mistral",
    hf_class="MistralForCausalLM",
    model_class=Mistral,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
)
