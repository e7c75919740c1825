"""OLMo 2's checkpoints. Tensors on disk have our names; config.json has our field names, but for the rotary
embedding's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import refuse, rope_fields, shared_fields, written_fields
from ligerzoo.models.olmo2 import Olmo2, Olmo2Config


def config_from_hf(raw: Mapping[str, Any]) -> Olmo2Config:
    """config.json -> Olmo2Config; an absent entry means what it means in transformers' Olmo2Config."""
    refuse(raw, "hidden_act", unless=(None, "silu", "swish"))
    return Olmo2Config(**{**shared_fields(raw, Olmo2Config), **rope_fields(raw)})


def config_to_hf(config: Olmo2Config) -> dict[str, Any]:
    """Olmo2Config -> the entries of config.json."""
    return {"hidden_act": "silu", **written_fields(config)}


ARCHITECTURE = Architecture(
    model_type="olmo2",
    hf_class="Olmo2ForCausalLM",
    model_class=Olmo2,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
)
