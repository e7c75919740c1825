"""Gemma's checkpoints. Tensors on disk have our names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import refuse, rope_fields, shared_fields, written_fields
from ligerzoo.models.gemma import Gemma, GemmaConfig


def config_from_hf(raw: Mapping[str, Any]) -> GemmaConfig:
    """config.json -> GemmaConfig; an absent entry means what it means in transformers' GemmaConfig.

    The first Gemmas' `"hidden_act": "gelu"` means the approximation by tanh, as their `hidden_activation`, null, does.
    """
    refuse(raw, "hidden_act", unless=(None, "gelu", "gelu_pytorch_tanh"))
    refuse(raw, "use_bidirectional_attention", unless=(None, False))
    return GemmaConfig(**{**shared_fields(raw, GemmaConfig), **rope_fields(raw)})


def config_to_hf(config: GemmaConfig) -> dict[str, Any]:
    """GemmaConfig -> the entries of config.json: transformers 5 reads the first of the two activations, 4 the other."""
    return {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", **written_fields(config)}


ARCHITECTURE = Architecture(
    model_type="gemma",
    hf_class="GemmaForCausalLM",
    model_class=Gemma,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
)
