"""Qwen2-VL's checkpoints.

config.json has the decoder's entries at the top level (the hub, transformers 4) or in `text_config` (transformers 5,
and some of 4 beside those at the top level, which don't count then). The tower's tensors have names of their own on
disk, and one tensor holds the projections to queries, keys and values. Either part's names may begin otherwise in files
that transformers 5 wrote as it holds a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import object_entry, refuse, rope_entry, rope_fields, shared_fields, written_fields
from ligerzoo.convert.weights import Fused, Layout, Rename, Under
from ligerzoo.models.qwen2_vl import Qwen2VL, Qwen2VLConfig, Qwen2VLVisionConfig

_OF_BOTH = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def config_from_hf(raw: Mapping[str, Any]) -> Qwen2VLConfig:
    """config.json -> Qwen2VLConfig; an absent entry means what it means in transformers' configs of the two parts. The
    head is tied if either level says so."""
    text = object_entry(raw, "text_config") or raw
    refuse(text, "hidden_act", unless=(None, "silu", "swish"))
    top = {name: raw[name] for name in _OF_BOTH if raw.get(name) is not None}
    return Qwen2VLConfig(
        **{
            **shared_fields({**text, **top}, Qwen2VLConfig),
            **mrope_fields(text, Qwen2VLConfig.rope_theta),
            "vision_config": _vision_config(object_entry(raw, "vision_config")),
            "tie_word_embeddings": raw.get("tie_word_embeddings") or text.get("tie_word_embeddings") or False,
        }
    )


def _vision_config(raw: Mapping[str, Any]) -> Qwen2VLVisionConfig:
    refuse(raw, "hidden_act", unless=(None, "quick_gelu"))
    rope = object_entry(raw, "rope_parameters")
    refuse(rope, "rope_type", unless=(None, "axial"))
    refuse(rope, "rope_theta", unless=(None, 10000.0))
    return Qwen2VLVisionConfig(**shared_fields(raw, Qwen2VLVisionConfig))


def mrope_fields(raw: Mapping[str, Any], default_theta: float) -> dict[str, Any]:
    """`rope_theta`, `rope_scaling` and `mrope_section` of our config: the sections stand among the entries of the
    scaling, whose type may be called "mrope" where there is none."""
    entry = dict(rope_entry(raw))
    sections = {name: entry.pop(name) for name in ("mrope_section",) if name in entry}
    if entry.get("rope_type", entry.get("type")) == "mrope":
        entry["rope_type"] = "default"
    rope = rope_fields({**raw, "rope_scaling": entry, "rope_parameters": None}, default_theta)
    return {**rope, **sections}


def config_to_hf(config: Qwen2VLConfig) -> dict[str, Any]:
    """Qwen2VLConfig -> the entries of config.json, spelled so that transformers 4 and 5 and vLLM read them: all of the
    decoder's at the top level."""
    entries = written_fields(config)
    scaling = {**(config.rope_scaling or {"type": "mrope"}), "mrope_section": list(entries.pop("mrope_section"))}
    vision = {"hidden_act": "quick_gelu", **entries["vision_config"]}
    return {"hidden_act": "silu", **entries, "rope_scaling": scaling, "vision_config": vision}


ARCHITECTURE = Architecture(
    model_type="qwen2_vl",
    hf_class="Qwen2VLForConditionalGeneration",
    model_class=Qwen2VL,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    layouts=(
        Layout(
            (
                Under(
                    "visual.",
                    (
                        Rename("patch_embed.proj", "patch_embed"),
                        Rename("norm1", "input_layernorm"),
                        Fused("attn.qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
                        Rename("attn.proj", "self_attn.o_proj"),
                        Rename("norm2", "post_attention_layernorm"),
                        Rename("merger.mlp.0", "merger.mlp.fc1"),
                        Rename("merger.mlp.2", "merger.mlp.fc2"),
                    ),
                ),
            )
        ),
    ),
    prefixes={
        "model.": ("model.", "model.language_model.", "language_model."),
        "visual.": ("visual.", "model.visual."),
    },
)
