"""Phi-3's checkpoints.

config.json has our field names, but for the rotary embedding's. On disk one tensor holds the projections to queries,
keys and values, and one the gate and up projections.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import partial_rotary_factor, refuse, rope_fields, shared_fields, written_fields
from ligerzoo.convert.weights import Fused, Layout
from ligerzoo.models.phi3 import Phi3, Phi3Config

_LONGROPE = ("longrope", "su", "yarn")
"""Its rope types: all mean LongRoPE, under the names that the first files had for it."""


def config_from_hf(raw: Mapping[str, Any]) -> Phi3Config:
    """config.json -> Phi3Config; an absent entry means what it means in transformers' Phi3Config."""
    refuse(raw, "hidden_act", unless=(None, "silu", "swish"))
    rope = rope_fields(raw)
    if rope["rope_scaling"] is not None:
        rope["rope_scaling"].pop("original_max_position_embeddings", None)  # what stands beside it counts
        if rope["rope_scaling"]["rope_type"] in _LONGROPE:
            rope["rope_scaling"]["rope_type"] = "longrope"
    partial = partial_rotary_factor(raw, Phi3Config.partial_rotary_factor)
    return Phi3Config(**{**shared_fields(raw, Phi3Config), **rope, "partial_rotary_factor": partial})


def config_to_hf(config: Phi3Config) -> dict[str, Any]:
    """Phi3Config -> the entries of config.json, spelled so that transformers 4 and 5 and vLLM read them."""
    entries = {"hidden_act": "silu", **written_fields(config)}
    if config.rope_scaling is not None:  # transformers 4 knows the type as `type`, and no entry but it and the factors
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
