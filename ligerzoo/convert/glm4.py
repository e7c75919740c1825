"""Converter for GLM-4-0414 checkpoints.

config.json is that of GLM-4. Checkpoints store the gate and up projections as one tensor, and call the norm before the
MLP post_attention_layernorm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ligerzoo.convert import glm
from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.weights import Layout, Rename
from ligerzoo.models.glm4 import Glm4, Glm4Config


def config_from_hf(raw: Mapping[str, Any]) -> Glm4Config:
    """Builds the config from config.json. Missing entries take the defaults of transformers' Glm4Config."""
    return Glm4Config(**glm.config_fields(raw))


ARCHITECTURE = Architecture(
    model_type="glm4",
    hf_class="Glm4ForCausalLM",
    model_class=Glm4,
    config_from_hf=config_from_hf,
    config_to_hf=glm.config_to_hf,
    layouts=(
        Layout(
            (
                glm.GATE_UP,
                Rename("post_self_attn_layernorm", "post_attention_layernorm"),
                Rename("post_attention_layernorm", "pre_feedforward_layernorm"),
                Rename("post_mlp_layernorm", "post_feedforward_layernorm"),
            )
        ),
    ),
)
