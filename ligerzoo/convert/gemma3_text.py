"""Converter for text-only Gemma 3 checkpoints. Tensor names match ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import object_entry, refuse, rope_fields, shared_fields, written_fields
from ligerzoo.errors import ConfigError
from ligerzoo.models.gemma3_text import Gemma3Text, Gemma3TextConfig


def config_from_hf(raw: Mapping[str, Any]) -> Gemma3TextConfig:
    """Builds the config from config.json. Missing entries take the defaults of transformers' Gemma3TextConfig.

    `hidden_act` and `attn_logit_softcapping` are ignored.
    """
    refuse(raw, "hidden_activation", unless=(None, "gelu_pytorch_tanh"))
    return Gemma3TextConfig(**{**shared_fields(raw, Gemma3TextConfig), **two_ropes_fields(raw)})


def two_ropes_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Reads `rope_theta`, `rope_scaling` and `rope_local_base_freq` from either spelling.

    transformers 4 writes entries of these names. transformers 5 writes `rope_parameters`, an object per layer type,
    which takes precedence over `rope_theta` and `rope_local_base_freq`, but not over `rope_scaling`.
    """
    both = object_entry(raw, "rope_parameters")
    full = {**object_entry(both, "full_attention"), **object_entry(raw, "rope_scaling")}
    sliding = {"rope_scaling": object_entry(both, "sliding_attention"), "rope_theta": raw.get("rope_local_base_freq")}
    local = rope_fields(sliding, 1e4)
    if local["rope_scaling"] is not None:
        raise ConfigError(
            "not supported",
            where="rope_parameters, sliding_attention",
            got=local["rope_scaling"],
            expected='rope_type "default"',
        )
    return {
        **rope_fields({"rope_scaling": full, "rope_theta": raw.get("rope_theta")}, 1e6),
        "rope_local_base_freq": local["rope_theta"],
    }


def config_to_hf(config: Gemma3TextConfig) -> dict[str, Any]:
    """Returns the entries of config.json, in a spelling that transformers 4 and 5 and vLLM read."""
    return {"hidden_activation": "gelu_pytorch_tanh", **written_fields(config)}


ARCHITECTURE = Architecture(
    model_type="gemma3_text",
    hf_class="Gemma3ForCausalLM",
    model_class=Gemma3Text,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
)
