"""Converter for Qwen2-VL checkpoints, and the parts that Qwen2.5-VL shares.

config.json holds the decoder's entries at the top level (hub, transformers 4) or in `text_config` (transformers 5, and
some files of transformers 4, whose top-level entries are then ignored). Checkpoints use other names for the vision
tower's tensors, and store its query, key and value projections as one tensor. Both parts have other prefixes in files
that transformers 5 saves in its in-memory layout.
"""

from functools import partial

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import first_given, refuse, rope_entry, rope_fields
from ligerzoo.convert.layout import Fused, Layout, ModuleRules, Rename
from ligerzoo.entries import Entries, flag_entry, object_entry
from ligerzoo.models.vision_lm import QwenVisionLMConfig

VISION_TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def _read_entries(raw: Entries, *, activations: tuple[str, ...]) -> dict[str, object]:
    """Returns the entries of all levels of config.json under the names of our fields.

    The head is tied if either level sets `tie_word_embeddings`.

    Args:
        raw: config.json.
        activations: accepted `hidden_act` entries of the vision tower; all name the activation it uses.
    """
    text = raw if raw.get("text_config") is None else object_entry(raw, "text_config")
    vision = object_entry(raw, "vision_config")
    refuse(vision, "hidden_act", unless=(None, *activations))
    refuse_other_tower_rotation(vision)
    tokens = {name: raw[name] for name in VISION_TOKENS if raw.get(name) is not None}
    ties = [flag_entry(level, "tie_word_embeddings") for level in (raw, text)]
    return {**text, **tokens, "vision_config": vision, "tie_word_embeddings": any(ties)}


def refuse_other_tower_rotation(vision: Entries) -> None:
    """Raises ConfigError if the rotary embedding in `vision_config` is not the one of Qwen's towers."""
    rope = object_entry(vision, "rope_parameters")
    refuse(rope, "rope_type", unless=(None, "axial"))
    refuse(rope, "rope_theta", unless=(None, 10000.0))


def read_sectioned_rope(raw: Entries, default_theta: float) -> Entries:
    """Reads `rope_theta`, `rope_scaling` and `mrope_section`.

    config.json holds `mrope_section` inside the scaling entry. A rope type of "mrope" there means no scaling.
    """
    entry = dict(rope_entry(raw))
    sections = {name: entry.pop(name) for name in ("mrope_section",) if name in entry}
    if first_given(entry, "rope_type", "type") == "mrope":
        entry["rope_type"] = "default"
    rope = rope_fields({**raw, "rope_scaling": entry, "rope_parameters": None}, default_theta)
    return {**rope, **sections}


def _write_entries(config: QwenVisionLMConfig, entries: dict[str, object], *, activation: str) -> dict[str, object]:
    """Returns the entries of config.json from those named like the fields of the config.

    All entries of the decoder are at the top level.

    Args:
        config: the config to write.
        entries: entries named like its fields.
        activation: `hidden_act` of the vision tower.
    """
    del entries["mrope_section"]
    scaling = {**(config.rope_scaling or {"type": "mrope"}), "mrope_section": list(config.mrope_section)}
    vision = {"hidden_act": activation, **object_entry(entries, "vision_config")}
    return {**entries, "rope_scaling": scaling, "vision_config": vision}


TOWER_RULES = (
    Rename("patch_embed.proj", "patch_embed"),
    Rename("norm1", "input_layernorm"),
    Fused("attn.qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    Rename("attn.proj", "self_attn.o_proj"),
    Rename("norm2", "post_attention_layernorm"),
)
"""Rules for the vision tower that all models of the family share."""

RULES = (
    ModuleRules(
        "visual.",
        (
            *TOWER_RULES,
            Rename("merger.ln_q", "merger.norm"),
            Rename("merger.mlp.0", "merger.mlp.fc1"),
            Rename("merger.mlp.2", "merger.mlp.fc2"),
        ),
    ),
)
FILES = (("model.", "model.", "model.language_model.", "language_model."), ("visual.", "visual.", "model.visual."))
MODULES = (("model.", "model.language_model."), ("visual.", "model.visual."))


def qwen2_vision(model_type: str, hf_class: str, activations: tuple[str, ...]) -> Architecture:
    """Returns an architecture whose checkpoints have this format.

    Args:
        model_type: `model_type` in config.json.
        hf_class: class in transformers.
        activations: accepted `hidden_act` entries of the vision tower. The first is written.
    """
    return Architecture(
        model_type,
        hf_class,
        read_entries=partial(_read_entries, activations=activations),
        read_rope=read_sectioned_rope,
        write_entries=partial(_write_entries, activation=activations[0]),
        layouts=lambda config: (Layout(RULES, FILES), Layout(RULES, MODULES)),
    )


ARCHITECTURE = qwen2_vision("qwen2_vl", "Qwen2VLForConditionalGeneration", activations=("quick_gelu",))
