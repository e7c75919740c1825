"""Converter for Qwen2-VL checkpoints, and the parts that Qwen2.5-VL shares.

config.json holds the decoder's entries at the top level (hub, transformers 4) or in `text_config` (transformers 5, and
some files of transformers 4, whose top-level entries are then ignored). Checkpoints use other names for the vision
tower's tensors, and store its query, key and value projections as one tensor. Both parts have other prefixes in files
that transformers 5 saves in its in-memory layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import (
    first_told,
    flag_entry,
    object_entry,
    refuse,
    rope_entry,
    rope_fields,
    shared_fields,
    written_fields,
)
from ligerzoo.convert.weights import Fused, Layout, Rename, Under
from ligerzoo.models.qwen2_vl import Qwen2VL, Qwen2VLConfig, Qwen2VLVisionConfig
from ligerzoo.models.vision_lm import VisionLMConfig, VisionTowerConfig

Config = TypeVar("Config", bound=VisionLMConfig)

_OF_BOTH = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def config_from_hf(raw: Mapping[str, Any]) -> Qwen2VLConfig:
    """Builds the config from config.json. Missing entries take the defaults of transformers' two configs."""
    return vision_lm_config(raw, Qwen2VLConfig, Qwen2VLVisionConfig, ("quick_gelu",))


def config_to_hf(config: Qwen2VLConfig) -> dict[str, Any]:
    """Returns the entries of config.json; see `vision_lm_entries`."""
    return vision_lm_entries(config, "quick_gelu")


def vision_lm_config(
    raw: Mapping[str, Any],
    config_class: type[Config],
    tower_class: type[VisionTowerConfig],
    activations: tuple[str, ...],
) -> Config:
    """Builds the config from config.json. The head is tied if either level sets `tie_word_embeddings`.

    Args:
        raw: config.json.
        config_class: class of the config to return.
        tower_class: class of its `vision_config`.
        activations: accepted `hidden_act` entries of the vision tower; all name the activation it uses.
    """
    text = raw if raw.get("text_config") is None else object_entry(raw, "text_config")
    vision = object_entry(raw, "vision_config")
    rope = object_entry(vision, "rope_parameters")
    refuse(text, "hidden_act", unless=(None, "silu", "swish"))
    refuse(vision, "hidden_act", unless=(None, *activations))
    refuse(rope, "rope_type", unless=(None, "axial"))
    refuse(rope, "rope_theta", unless=(None, 10000.0))
    top = {name: raw[name] for name in _OF_BOTH if raw.get(name) is not None}
    return config_class(
        **{
            **shared_fields({**text, **top}, config_class),
            **mrope_fields(text, config_class.rope_theta),
            "vision_config": tower_class(**shared_fields(vision, tower_class)),
            "tie_word_embeddings": any(
                [flag_entry(raw, "tie_word_embeddings"), flag_entry(text, "tie_word_embeddings")]
            ),
        }
    )


def mrope_fields(raw: Mapping[str, Any], default_theta: float) -> dict[str, Any]:
    """Reads `rope_theta`, `rope_scaling` and `mrope_section`.

    config.json holds `mrope_section` inside the scaling entry. A rope type of "mrope" there means no scaling.
    """
    entry = dict(rope_entry(raw))
    sections = {name: entry.pop(name) for name in ("mrope_section",) if name in entry}
    if first_told(entry, "rope_type", "type") == "mrope":
        entry["rope_type"] = "default"
    rope = rope_fields({**raw, "rope_scaling": entry, "rope_parameters": None}, default_theta)
    return {**rope, **sections}


def vision_lm_entries(config: VisionLMConfig, activation: str) -> dict[str, Any]:
    """Returns the entries of config.json, in a spelling that transformers 4 and 5 and vLLM read.

    All entries of the decoder are at the top level.

    Args:
        config: the config to write.
        activation: `hidden_act` of the vision tower.
    """
    entries = written_fields(config)
    scaling = {**(config.rope_scaling or {"type": "mrope"}), "mrope_section": list(entries.pop("mrope_section"))}
    vision = {"hidden_act": activation, **entries["vision_config"]}
    return {"hidden_act": "silu", **entries, "rope_scaling": scaling, "vision_config": vision}


LAYOUTS = (
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
                    Rename("merger.ln_q", "merger.norm"),
                    Rename("merger.mlp.0", "merger.mlp.fc1"),
                    Rename("merger.mlp.2", "merger.mlp.fc2"),
                ),
            ),
        )
    ),
)
PREFIXES = {
    "model.": ("model.", "model.language_model.", "language_model."),
    "visual.": ("visual.", "model.visual."),
}

ARCHITECTURE = Architecture(
    model_type="qwen2_vl",
    hf_class="Qwen2VLForConditionalGeneration",
    model_class=Qwen2VL,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    layouts=LAYOUTS,
    prefixes=PREFIXES,
)
