"""Converter for Qwen3-VL checkpoints, and the parts that Qwen3-VL-MoE and Qwen3.5 share.

config.json holds the decoder's entries in `text_config` and the vision tower's in `vision_config`. Only the entry
`tie_word_embeddings` of the top level counts, as in transformers. Checkpoints use other names for the vision tower's
tensors, and store its query, key and value projections as one tensor.
"""

from functools import partial

from ligerzoo.convert.architecture import GELU_TANH, Architecture
from ligerzoo.convert.fields import first_given, refuse, rope_entry
from ligerzoo.convert.layout import Layout, ModuleRules, Rename
from ligerzoo.convert.qwen2_vl import (
    MODULES,
    TOWER_RULES,
    VISION_TOKENS,
    read_sectioned_rope,
    refuse_other_tower_rotation,
)
from ligerzoo.entries import Entries, flag_entry, object_entry
from ligerzoo.models.qwen3_vision import Qwen3VisionLMConfig

LAYOUT = Layout(
    (ModuleRules("visual.", (*TOWER_RULES, Rename("linear_fc1", "fc1"), Rename("linear_fc2", "fc2"))),), MODULES
)


def _read_entries(raw: Entries, *, model_type: str) -> dict[str, object]:
    """Returns the entries of all levels of config.json under the names of our fields."""
    text, vision = object_entry(raw, "text_config"), object_entry(raw, "vision_config")
    refuse(text, "model_type", unless=(None, f"{model_type}_text"))
    refuse(text, "use_sliding_window", unless=(None, False))
    refuse(vision, "model_type", unless=(None, model_type, f"{model_type}_vision"))
    refuse(vision, "hidden_act", unless=(None, GELU_TANH))
    refuse_other_tower_rotation(vision)
    tokens = {name: raw[name] for name in VISION_TOKENS if raw.get(name) is not None}
    tie = {"tie_word_embeddings": flag_entry(raw, "tie_word_embeddings")}
    experts = {"num_experts": first_given(text, "num_local_experts", "num_experts")}  # of MoE models
    return {**text, **experts, "sliding_window": None, **tokens, **tie, "vision_config": vision}


def read_interleaved_rope(raw: Entries, default_theta: float) -> Entries:
    """Reads `rope_theta`, `rope_scaling` and `mrope_section`. The axes are always interleaved."""
    entry = dict(rope_entry(raw))
    refuse(entry, "mrope_interleaved", unless=(None, True))
    entry.pop("mrope_interleaved", None)
    return read_sectioned_rope({**raw, "rope_scaling": entry, "rope_parameters": None}, default_theta)


def _write_entries(config: Qwen3VisionLMConfig, entries: dict[str, object], *, model_type: str) -> dict[str, object]:
    vision = {"model_type": model_type, "hidden_act": GELU_TANH, **object_entry(entries, "vision_config")}
    top = {name: entries[name] for name in (*VISION_TOKENS, "tie_word_embeddings")}
    text = {name: value for name, value in entries.items() if name not in (*top, "vision_config", "mrope_section")}
    sections = {"mrope_section": list(config.mrope_section), "mrope_interleaved": True}
    scaling = {**(config.rope_scaling or {"rope_type": "default"}), **sections}
    text = {"model_type": f"{model_type}_text", **text, "rope_scaling": scaling}
    return {**top, "text_config": text, "vision_config": vision}


def qwen3_vision(model_type: str, hf_class: str, *others: Layout) -> Architecture:
    """Returns an architecture whose checkpoints have this format.

    Args:
        model_type: `model_type` in config.json.
        hf_class: class in transformers.
        others: further layouts of checkpoints. New ones, and transformers' modules, have `LAYOUT`.
    """
    return Architecture(
        model_type,
        hf_class,
        read_entries=partial(_read_entries, model_type=model_type),
        read_rope=read_interleaved_rope,
        write_entries=partial(_write_entries, model_type=model_type),
        layouts=lambda config: (LAYOUT, *others, LAYOUT) if others else (LAYOUT,),
    )


ARCHITECTURE = qwen3_vision("qwen3_vl", "Qwen3VLForConditionalGeneration")
