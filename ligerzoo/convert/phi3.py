"""Converter for Phi-3 checkpoints.

config.json uses our field names, except for the rotary embedding. Checkpoints store the query, key and value
projections as one tensor, and the gate and up projections as another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import partial_rotary_factor, refuse, rope_fields, shared_fields, written_fields
from ligerzoo.convert.weights import Fused, Layout
from ligerzoo.models.phi3 import Phi3, Phi3Config

_LONGROPE = ("longrope", "su", "yarn")
"""Rope types that all mean LongRoPE: early checkpoints call it `su` or `yarn`."""


def config_from_hf(raw: Mapping[str, Any]) -> Phi3Config:
    """Builds the config from config.json. Missing entries take the defaults of transformers' Phi3Config."""
    refuse(raw, "hidden_act", unless=(None, "silu", "swish"))
    rope = rope_fields(raw)
    if rope["rope_scaling"] is not None:
        rope["rope_scaling"].pop("original_max_position_embeddings", None)  # the top-level entry applies
        if rope["rope_scaling"]["rope_type"] in _LONGROPE:
            rope["rope_scaling"]["rope_type"] = "longrope"
    partial = partial_rotary_factor(raw, Phi3Config.partial_rotary_factor)
    return Phi3Config(**{**shared_fields(raw, Phi3Config), **rope, "partial_rotary_factor": partial})


def config_to_hf(config: Phi3Config) -> dict[str, Any]:
    """Returns the entries of config.json, in a spelling that transformers 4 and 5 and vLLM read."""
    entries = {"hidden_act": "silu", **written_fields(config)}
    if config.rope_scaling is not None:  # transformers 4 accepts only `type` and the two lists of factors
        scaling = dict(config.rope_scaling)
        entries["rope_scaling"] = {"type": scaling.pop("rope_type"), **scaling}
    return entries


ARCHITECTURE = Architecture(
    model_type="phi3",
    hf_class="Phi3ForCausalLM",
    model_class=Phi3,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    layouts=(
        Layout(
            (
                Fused("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
                Fused("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
            )
        ),
    ),
)
