"""Converter for Qwen2 checkpoints.

Tensor names match ours. config.json uses our field names, except for the rotary embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import refuse, rope_fields, shared_fields, written_fields
from ligerzoo.models.qwen2 import Qwen2, Qwen2Config


def config_from_hf(raw: Mapping[str, Any]) -> Qwen2Config:
    """Builds the config from config.json. Missing entries take the defaults of transformers' Qwen2Config."""
    refuse(raw, "hidden_act", unless=(None, "silu", "swish"))
    return Qwen2Config(**{**shared_fields(raw, Qwen2Config), **rope_fields(raw)})


def config_to_hf(config: Qwen2Config) -> dict[str, Any]:
    """Returns the entries of config.json, in a spelling that transformers 4 and 5 and vLLM read."""
    return {"hidden_act": "silu", **written_fields(config)}


ARCHITECTURE = Architecture(
    model_type="qwen2",
    hf_class="Qwen2ForCausalLM",
    model_class=Qwen2,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
)
