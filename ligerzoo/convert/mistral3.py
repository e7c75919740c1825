"""Converter for checkpoints of Mistral Small 3.1 and Ministral 3 with images.

config.json holds the decoder's entries in `text_config`, those of Mistral or Ministral 3, and the vision tower's in
`vision_config`. As in transformers, a missing entry of either has the default of Mistral, Ministral 3 or Pixtral, and
without an object that of Mistral Small 3.1. Only the entry `tie_word_embeddings` of the top level counts. The prefixes
of tensor names differ between versions of transformers.
"""

from dataclasses import fields

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.families import FAMILIES
from ligerzoo.convert.fields import first_given, refuse, rope_entry, rope_fields, shared_fields
from ligerzoo.convert.layout import Layout, ModuleRules, Rename
from ligerzoo.convert.ministral3 import ARCHITECTURE as MINISTRAL3
from ligerzoo.entries import Entries, object_entry
from ligerzoo.models.mistral3 import Mistral3Config
from ligerzoo.models.mistral3_vision import Mistral3VisionConfig

_TEXTS = {"mistral": FAMILIES["mistral"], "ministral3": MINISTRAL3}
_TOP_LEVEL = (
    "spatial_merge_size",
    "vision_feature_layer",
    "projector_hidden_act",
    "multimodal_projector_bias",
    "tie_word_embeddings",
)
_GROWTH = "llama_4_scaling_beta"


def _read_entries(raw: Entries) -> dict[str, object]:
    """Returns the entries of all levels of config.json under the names of our fields."""
    top = {name: raw.get(name) for name in _TOP_LEVEL}
    match top["vision_feature_layer"]:
        case [layer]:
            top["vision_feature_layer"] = layer
    entries = {**_text(raw), **top, "image_token_id": first_given(raw, "image_token_id", "image_token_index")}
    return {**entries, **({} if raw.get("vision_config") is None else {"vision_config": _vision(raw)})}


def _text(raw: Entries) -> dict[str, object]:
    """Returns the fields of the decoder; none without `text_config`."""
    text = object_entry(raw, "text_config")
    if raw.get("text_config") is None:
        return {}
    refuse(text, "model_type", unless=(None, *_TEXTS))
    refuse(text, "layer_types", unless=(None,))
    kind = "ministral3" if text.get("model_type") == "ministral3" else "mistral"
    if kind == "mistral":
        refuse(rope_entry(text), _GROWTH, unless=(None,))
    config = _TEXTS[kind].config_from_hf(text)
    return {field.name: getattr(config, field.name) for field in fields(config)}


def _vision(raw: Entries) -> Mistral3VisionConfig:
    """Returns the config of the vision tower."""
    vision = object_entry(raw, "vision_config")
    refuse(vision, "model_type", unless=(None, "pixtral"))
    refuse(rope_entry(vision), "rope_type", unless=(None, "axial", "default"))
    values = {**shared_fields(vision, Mistral3VisionConfig), "rope_theta": rope_fields(vision)["rope_theta"]}
    config = Mistral3VisionConfig(**values)  # type: ignore[arg-type]
    refuse(vision, "head_dim", unless=(None, config.hidden_size // config.num_attention_heads))
    return config


def _read_rope(entries: Entries, default_theta: float) -> Entries:
    """Returns the fields of the rotary embedding, which `_text` has read."""
    return {name: entries[name] for name in ("rope_theta", "rope_scaling") if name in entries}


def _write_entries(config: Mistral3Config, entries: dict[str, object]) -> dict[str, object]:
    kind = "ministral3" if _GROWTH in (config.rope_scaling or {}) else "mistral"
    vision = {"model_type": "pixtral", **object_entry(entries, "vision_config")}
    others = {*_TOP_LEVEL[:-1], "image_token_id", "vision_config"}
    text = {name: value for name, value in entries.items() if name not in others}
    return {
        "image_token_index": config.image_token_id,
        **{name: entries[name] for name in _TOP_LEVEL},
        "text_config": {"model_type": kind, **_TEXTS[kind].write_entries(config, text)},
        "vision_config": vision,
    }


_RULES = (
    ModuleRules(
        "vision_tower.",
        (
            Rename("attention_norm", "input_layernorm"),
            Rename("attention", "self_attn"),
            Rename("ffn_norm", "post_attention_layernorm"),
            Rename("feed_forward", "mlp"),
        ),
    ),
)
_FILES = (
    ("model.", "language_model.model.", "model.language_model.", "language_model."),
    ("lm_head.", "language_model.lm_head.", "lm_head."),
    ("vision_tower.", "vision_tower.", "model.vision_tower."),
    ("multi_modal_projector.", "multi_modal_projector.", "model.multi_modal_projector."),
)
_MODULES = (
    ("model.", "model.language_model."),
    ("vision_tower.", "model.vision_tower."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
)

ARCHITECTURE = Architecture(
    "mistral3",
    "Mistral3ForConditionalGeneration",
    read_entries=_read_entries,
    read_rope=_read_rope,
    write_entries=_write_entries,
    layouts=lambda config: (Layout(_RULES, _FILES), Layout(_RULES, _MODULES)),
)
