"""Converter for Muse Glimmer checkpoints with images and videos.

config.json holds the decoder's entries in `text_config` and the vision tower's in `vision_config`. Only the entry
`tie_word_embeddings` of the top level counts, as in transformers.
"""

from ligerzoo.convert.architecture import SILU, Architecture
from ligerzoo.convert.fields import refuse
from ligerzoo.convert.layout import Layout, ModuleRules, Rename
from ligerzoo.convert.qwen2_vl import refuse_other_tower_rotation
from ligerzoo.entries import Entries, flag_entry, object_entry
from ligerzoo.models.muse_glimmer import MuseGlimmerConfig
from ligerzoo.models.muse_glimmer_vision import MuseGlimmerVisionConfig

_TOP_LEVEL = ("image_token_id", "video_token_id", "out_hidden_size", "projector_hidden_size")
_VISION = {
    "depth": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "temporal_patch_size": "patch_temporal",
    "spatial_merge_size": "merge_size",
    "position_side": "pos_emb_height",
}
"""Our fields of the vision tower, and their names in config.json."""


def _read_entries(raw: Entries) -> dict[str, object]:
    """Returns the entries of all levels of config.json under the names of our fields."""
    text, vision = object_entry(raw, "text_config"), object_entry(raw, "vision_config")
    refuse(text, "model_type", unless=(None, "muse_glimmer_text"))
    refuse(vision, "model_type", unless=(None, "muse_glimmer_vision"))
    refuse(vision, "hidden_act", unless=(None, "gelu"))
    refuse(raw, "projector_hidden_act", unless=(None, "gelu"))
    refuse_other_tower_rotation(vision)
    side = vision.get("pos_emb_height", MuseGlimmerVisionConfig.position_side)
    refuse({"pos_emb_width": MuseGlimmerVisionConfig.position_side, **vision}, "pos_emb_width", unless=(side,))
    given = {name: vision[other] for name, other in _VISION.items() if vision.get(other) is not None}
    top = {name: raw[name] for name in _TOP_LEVEL if raw.get(name) is not None}
    tie = {"tie_word_embeddings": flag_entry(raw, "tie_word_embeddings")}
    return {**text, **top, **tie, "vision_config": {**vision, "in_channels": 3, **given}}


def _write_entries(config: MuseGlimmerConfig, entries: dict[str, object]) -> dict[str, object]:
    own, side = object_entry(entries, "vision_config"), config.vision_config.position_side
    written = {_VISION.get(name, name): value for name, value in own.items() if name != "in_channels"}
    top = {name: entries[name] for name in (*_TOP_LEVEL, "tie_word_embeddings")}
    text = {name: value for name, value in entries.items() if name not in (*top, "vision_config")}
    return {
        **top,
        "projector_hidden_act": "gelu",
        "text_config": {"model_type": "muse_glimmer_text", **text},
        "vision_config": {
            "model_type": "muse_glimmer_vision",
            "hidden_act": "gelu",
            **written,
            "pos_emb_width": side,
        },
    }


_TOWER = ModuleRules(
    "vision_tower.",
    (
        Rename("patch_embedder", "patch_embed"),
        Rename("layers", "blocks"),
        Rename("norm1", "input_layernorm"),
        Rename("attn.proj", "self_attn.o_proj"),
        Rename("attn", "self_attn"),
        Rename("norm2", "post_attention_layernorm"),
    ),
)
_PARTS = ("vision_tower.", "vision_adapter.", "vision_projection.")
_PREFIXES = (("model.", "model.language_model."), *((part, f"model.{part}") for part in _PARTS))

ARCHITECTURE = Architecture(
    "muse_glimmer",
    "MuseGlimmerForConditionalGeneration",
    accepted={"hidden_activation": SILU, "partial_rotary_factor": (1.0,)},
    read_entries=_read_entries,
    write_entries=_write_entries,
    layouts=lambda config: (Layout((_TOWER,), _PREFIXES),),
)
