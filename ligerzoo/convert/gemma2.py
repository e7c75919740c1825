"""Converter for Gemma 2 checkpoints. Tensor names match ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import refuse, rope_fields, shared_fields, written_fields
from ligerzoo.models.gemma2 import Gemma2, Gemma2Config


def config_from_hf(raw: Mapping[str, Any]) -> Gemma2Config:
    """Builds the config from config.json. Missing entries take the defaults of transformers' Gemma2Config.

    `hidden_act` is ignored.
    """
    refuse(raw, "hidden_activation", unless=(None, "gelu_pytorch_tanh"))
    refuse(raw, "use_bidirectional_attention", unless=(None, False))
    return Gemma2Config(**{**shared_fields(raw, Gemma2Config), **rope_fields(raw)})


def config_to_hf(config: Gemma2Config) -> dict[str, Any]:
    """Returns the entries of config.json."""
    return {"hidden_activation": "gelu_pytorch_tanh", **written_fields(config)}


ARCHITECTURE = Architecture(
    model_type="gemma2",
    hf_class="Gemma2ForCausalLM",
    model_class=Gemma2,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
)
