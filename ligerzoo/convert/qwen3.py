"""Converter for Qwen3 checkpoints.

Tensor names match ours. config.json uses our field names, except for the rotary embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import refuse, rope_fields, shared_fields
from ligerzoo.models.qwen3 import Qwen3, Qwen3Config


def config_from_hf(raw: Mapping[str, Any]) -> Qwen3Config:
    """Builds the config from config.json. Missing entries take the defaults of transformers' Qwen3Config."""
    refuse(raw, "hidden_act", unless=(None, "silu", "swish"))
    return Qwen3Config(**{**shared_fields(raw, Qwen3Config), **rope_fields(raw)})


def config_to_hf(config: Qwen3Config) -> dict[str, Any]:
    """Returns the entries of config.json, in a spelling that transformers 4 and 5 and vLLM read."""
    return {"hidden_act": "silu", **asdict(config), "head_dim": config.head_size}  # null is not accepted


ARCHITECTURE = Architecture(
    model_type="qwen3",
    hf_class="Qwen3ForCausalLM",
    model_class=Qwen3,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
)
