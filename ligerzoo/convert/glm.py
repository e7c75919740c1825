"""Converter for GLM-4 checkpoints.

config.json uses our field names, except for the rotary embedding. Checkpoints store the gate and up projections as one
tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import partial_rotary_factor, refuse, rope_fields, shared_fields
from ligerzoo.convert.weights import Fused, Layout
from ligerzoo.models.glm import Glm, GlmConfig

GATE_UP = Fused("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj"))


def config_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `GlmConfig` that config.json sets."""
    refuse(raw, "hidden_act", unless=(None, "silu", "swish"))
    partial = partial_rotary_factor(raw, GlmConfig.partial_rotary_factor)
    return {**shared_fields(raw, GlmConfig), **rope_fields(raw), "partial_rotary_factor": partial}


def config_from_hf(raw: Mapping[str, Any]) -> GlmConfig:
    """Builds the config from config.json. Missing entries take the defaults of transformers' GlmConfig."""
    return GlmConfig(**config_fields(raw))


def config_to_hf(config: GlmConfig) -> dict[str, Any]:
    """Returns the entries of config.json, in a spelling that transformers 4 and 5 and vLLM read."""
    sizes = {"head_dim": config.head_size, "num_key_value_heads": config.kv_heads}  # transformers accepts no null here
    return {"hidden_act": "silu", **asdict(config), **sizes}


ARCHITECTURE = Architecture(
    model_type="glm",
    hf_class="GlmForCausalLM",
    model_class=Glm,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    layouts=(Layout((GATE_UP,)),),
)
