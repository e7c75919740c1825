"""Converter for Llama checkpoints.

Tensor names match ours. config.json uses our field names, except for the rotary embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import refuse, rope_fields, shared_fields
from ligerzoo.models.llama import Llama, LlamaConfig


def config_from_hf(raw: Mapping[str, Any]) -> LlamaConfig:
    """Builds the config from config.json. Missing entries take the defaults of transformers' LlamaConfig."""
    refuse(raw, "hidden_act", unless=(None, "silu", "swish"))
    return LlamaConfig(**{**shared_fields(raw, LlamaConfig), **rope_fields(raw)})


def config_to_hf(config: LlamaConfig) -> dict[str, Any]:
    """Returns the entries of config.json, in a spelling that transformers 4 and 5 and vLLM read."""
    return {"hidden_act": "silu", **asdict(config)}


ARCHITECTURE = Architecture(
    model_type="llama",
    hf_class="LlamaForCausalLM",
    model_class=Llama,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
)
