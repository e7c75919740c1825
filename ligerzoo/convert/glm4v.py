"""Converter for GLM-4.1V checkpoints, and the parts that GLM-4.5V shares.

config.json holds the decoder's entries in `text_config` or, in older files, at the top level. transformers 5.17 reads
both, 5.23 the latter as a model of the default sizes. The head is tied if either level sets `tie_word_embeddings`.
Checkpoints use other names for the vision tower's tensors, and store its query, key and value projections as one.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from ligerzoo.convert.architecture import SILU, Architecture
from ligerzoo.convert.families import FAMILIES, GATE_UP
from ligerzoo.convert.fields import refuse
from ligerzoo.convert.layout import Layout, ModuleRules, Rule
from ligerzoo.convert.qwen2_vl import MODULES, TOWER_RULES, read_sectioned_rope, refuse_other_tower_rotation
from ligerzoo.entries import Entries, flag_entry, object_entry
from ligerzoo.models.glm4v_vision import Glm4VisionLMConfig

_TOKENS = (
    "image_token_id",
    "video_token_id",
    *(f"{kind}_{mark}_token_id" for kind in ("image", "video") for mark in ("start", "end")),
)
_TOWER = ModuleRules("visual.", TOWER_RULES)


def _read_entries(raw: Entries, *, model_type: str, decoder: Architecture) -> dict[str, object]:
    """Returns the entries of all levels of config.json under the names of our fields."""
    text = raw if raw.get("text_config") is None else object_entry(raw, "text_config")
    vision = object_entry(raw, "vision_config")
    refuse(text, "model_type", unless=(None, model_type, f"{model_type}_text"))
    refuse(vision, "model_type", unless=(None, model_type, f"{model_type}_vision"))
    refuse(vision, "hidden_act", unless=(None, *SILU))
    refuse_other_tower_rotation(vision)
    tokens = {name: raw[name] for name in _TOKENS if raw.get(name) is not None}
    ties = [flag_entry(level, "tie_word_embeddings") for level in (raw, text)]
    return {**decoder.read_entries(text), **tokens, "vision_config": vision, "tie_word_embeddings": any(ties)}


def _write_entries(
    config: Glm4VisionLMConfig, entries: dict[str, object], *, model_type: str, decoder: Architecture
) -> dict[str, object]:
    vision = {"model_type": f"{model_type}_vision", "hidden_act": SILU[0], **object_entry(entries, "vision_config")}
    top = {name: entries[name] for name in (*_TOKENS, "tie_word_embeddings")}
    text = {name: value for name, value in entries.items() if name not in (*top, "vision_config", "mrope_section")}
    scaling = {**(config.rope_scaling or {"rope_type": "default"}), "mrope_section": list(config.mrope_section)}
    text = decoder.write_entries(config, {"model_type": f"{model_type}_text", **text, "rope_scaling": scaling})
    return {**top, "text_config": text, "vision_config": vision}


def glm4_vision(
    model_type: str,
    hf_class: str,
    decoder: Architecture,
    accepted: Mapping[str, tuple[object, ...]],
    *rules: tuple[Rule, ...],
) -> Architecture:
    """Returns an architecture whose checkpoints have this format.

    Args:
        model_type: `model_type` in config.json.
        hf_class: class in transformers.
        decoder: models without the tower.
        accepted: further entries of the decoder that have no field, with their accepted values.
        rules: rules for the decoder's tensors, for each possible layout.
    """
    layouts = tuple(Layout((_TOWER, *each), MODULES) for each in rules)
    return replace(
        decoder,
        model_type=model_type,
        class_name=hf_class,
        accepted={**decoder.accepted, **accepted},
        read_entries=partial(_read_entries, model_type=model_type, decoder=decoder),
        read_rope=read_sectioned_rope,
        write_entries=partial(_write_entries, model_type=model_type, decoder=decoder),
        layouts=lambda config: layouts,
    )


_GLM4 = replace(FAMILIES["glm4"], read_entries=lambda raw: {"partial_rotary_factor": 1.0, **raw})

ARCHITECTURE = glm4_vision(
    "glm4v",
    "Glm4vForConditionalGeneration",
    _GLM4,
    {"attention_bias": (True,)},
    (ModuleRules("model.", (GATE_UP,)),),
)
