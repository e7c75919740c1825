"""Converter for Llama 3.2 Vision checkpoints.

config.json holds the entries of the two parts in `text_config` and `vision_config`. Tensor names have the prefixes of
transformers 4 (hub checkpoints, and files written by transformers 5) or those of transformers 5's in-memory layout.
"""

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import first_given, refuse
from ligerzoo.convert.layout import Layout, ModuleRules, Rename
from ligerzoo.entries import Entries, object_entry
from ligerzoo.models.mllama import MllamaConfig


def _read_entries(raw: Entries) -> dict[str, object]:
    """Returns the entries of all levels of config.json under the names of our fields.

    `tie_word_embeddings` is ignored: the head is never tied. As in transformers, `image_token_id` takes precedence over
    `image_token_index`, and the vision tower's `num_attention_heads` over `attention_heads`.
    """
    text, vision = object_entry(raw, "text_config"), object_entry(raw, "vision_config")
    refuse(vision, "hidden_act", unless=(None, "gelu"))
    return {
        **text,
        "image_token_index": first_given(raw, "image_token_id", "image_token_index"),
        "tie_word_embeddings": False,
        "vision_config": {**vision, "attention_heads": first_given(vision, "num_attention_heads", "attention_heads")},
    }


def _write_entries(config: MllamaConfig, entries: dict[str, object]) -> dict[str, object]:
    text = {name: value for name, value in entries.items() if name != "bos_token_id" or value is not None}
    vision, image = object_entry(entries, "vision_config"), text.pop("image_token_index")
    del text["vision_config"]
    return {
        "image_token_index": image,
        "text_config": {"model_type": "mllama_text_model", **text},
        "vision_config": {"model_type": "mllama_vision_model", "hidden_act": "gelu", **vision},
    }


_RULES = (
    ModuleRules("model.", (Rename("cross_attn_attn_gate", "attn_gate"), Rename("cross_attn_mlp_gate", "mlp_gate"))),
    ModuleRules("vision_model.", (Rename("gate_attn", "attn_gate"), Rename("gate_ffn", "mlp_gate"))),
)

_FILES = (("model.", "language_model.model."), ("lm_head.", "language_model.lm_head."))
_MODULES = (
    ("model.", "model.language_model."),
    ("vision_model.", "model.vision_model."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
)

ARCHITECTURE = Architecture(
    "mllama",
    "MllamaForConditionalGeneration",
    read_entries=_read_entries,
    write_entries=_write_entries,
    layouts=lambda config: (Layout(_RULES, _FILES), Layout(_RULES, _MODULES)),
)
