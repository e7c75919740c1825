"""Ministral's checkpoints. Tensors on disk have our names; config.json has our field names, but for the rotary
embedding's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import refuse, rope_fields, shared_fields
from ligerzoo.models.ministral import Ministral, MinistralConfig


def config_from_hf(raw: Mapping[str, Any]) -> MinistralConfig:
    """config.json -> MinistralConfig. Without `layer_types` all layers slide, if there is a window."""
    refuse(raw, "hidden_act", unless=(None, "silu", "swish"))
    return MinistralConfig(**{**shared_fields(raw, MinistralConfig), **rope_fields(raw)})


def config_to_hf(config: MinistralConfig) -> dict[str, Any]:
    """MinistralConfig -> the entries of config.json; with the size of a head, for transformers does not make it out."""
    return {"hidden_act": "silu", **asdict(config), "head_dim": config.head_size}


ARCHITECTURE = Architecture(
    model_type="ministral",
    hf_class="MinistralForCausalLM",
    model_class=Ministral,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
)
