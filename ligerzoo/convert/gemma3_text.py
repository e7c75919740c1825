"""Converter for text-only Gemma 3 checkpoints. Tensor names match ours.

`hidden_act` and `attn_logit_softcapping` are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ligerzoo.convert.architecture import GELU_TANH, Architecture
from ligerzoo.convert.fields import object_entry, rope_fields
from ligerzoo.errors import ConfigError
from ligerzoo.models.gemma3_text import Gemma3Text, Gemma3TextConfig


def read_rope(raw: Mapping[str, Any], default_theta: float) -> dict[str, Any]:
    """Reads `rope_theta`, `rope_scaling` and `rope_local_base_freq` from either spelling.

    transformers 4 writes entries of these names. transformers 5 writes `rope_parameters`, an object per layer type,
    which takes precedence over `rope_theta` and `rope_local_base_freq`, but not over `rope_scaling`.
    """
    both = object_entry(raw, "rope_parameters")
    full = {**object_entry(both, "full_attention"), **object_entry(raw, "rope_scaling")}
    sliding = {"rope_scaling": object_entry(both, "sliding_attention"), "rope_theta": raw.get("rope_local_base_freq")}
    local = rope_fields(sliding, Gemma3TextConfig.rope_local_base_freq)
    if local["rope_scaling"] is not None:
        raise ConfigError(
            "not supported",
            where="rope_parameters, sliding_attention",
            got=local["rope_scaling"],
            expected='rope_type "default"',
        )
    return {
        **rope_fields({"rope_scaling": full, "rope_theta": raw.get("rope_theta")}, default_theta),
        "rope_local_base_freq": local["rope_theta"],
    }


ARCHITECTURE = Architecture(
    "gemma3_text",
    "Gemma3ForCausalLM",
    Gemma3Text,
    Gemma3TextConfig,
    activations={"hidden_activation": (GELU_TANH,)},
    read_rope=read_rope,
    classifier_class="Gemma3TextForSequenceClassification",
)
