"""Converter for Gemma checkpoints. Tensor names match ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import refuse, rope_fields, shared_fields, written_fields
from ligerzoo.models.gemma import Gemma, GemmaConfig


def config_from_hf(raw: Mapping[str, Any]) -> GemmaConfig:
    """Builds the config from config.json. Missing entries take the defaults of transformers' GemmaConfig.

    The first Gemma checkpoints say `"hidden_act": "gelu"` with a null `hidden_activation`; both mean the tanh
    approximation of GELU.
    """
    refuse(raw, "hidden_act", unless=(None, "gelu", "gelu_pytorch_tanh"))
    refuse(raw, "use_bidirectional_attention", unless=(None, False))
    return GemmaConfig(**{**shared_fields(raw, GemmaConfig), **rope_fields(raw)})


def config_to_hf(config: GemmaConfig) -> dict[str, Any]:
    """Returns the entries of config.json.

    Both activation entries are set: transformers 5 reads `hidden_act`, transformers 4 `hidden_activation`.
    """
    return {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", **written_fields(config)}


ARCHITECTURE = Architecture(
    model_type="gemma",
    hf_class="GemmaForCausalLM",
    model_class=Gemma,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
)
