"""Converter for Gemma 3 checkpoints with images.

config.json holds the decoder's entries in `text_config`, most of which hub checkpoints omit, and the vision tower's in
`vision_config`. The prefixes of tensor names differ between versions of transformers. Files may contain the tower's
classification head (`vision_use_head`), which no forward uses; it is kept when saving.
"""

from ligerzoo.convert.architecture import GELU_TANH, Architecture
from ligerzoo.convert.fields import first_given, refuse
from ligerzoo.convert.gemma3_text import ARCHITECTURE as TEXT
from ligerzoo.convert.layout import Layout, ModuleRules, Rename
from ligerzoo.entries import Entries, object_entry
from ligerzoo.models.gemma3 import Gemma3Config

_TOP_LEVEL = {
    "mm_tokens_per_image": "mm_tokens_per_image",
    "image_token_id": "image_token_index",
    "boi_token_id": "boi_token_index",
    "eoi_token_id": "eoi_token_index",
    "initializer_range": "initializer_range",
    "tie_word_embeddings": "tie_word_embeddings",
}
"""Our fields that config.json holds at its top level, and their names there."""

_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def _read_entries(raw: Entries) -> dict[str, object]:
    """Returns the entries of all levels of config.json under the names of our fields.

    `final_logit_softcapping` is ignored. `tie_word_embeddings` is read from the top level only. Token ids at the top
    level take precedence over those in `text_config`, and `image_token_id` over `image_token_index`.
    """
    text, vision = object_entry(raw, "text_config"), object_entry(raw, "vision_config")
    refuse(text, "model_type", unless=(None, "gemma3_text"))
    refuse(vision, "model_type", unless=(None, "siglip_vision_model"))
    refuse(vision, "hidden_act", unless=(None, GELU_TANH))
    top_level = {name: first_given(raw, name, other) for name, other in _TOP_LEVEL.items()}
    top_level |= {name: raw.get(name) for name in _TOKENS}
    given = {name: value for name, value in top_level.items() if value is not None}
    return {**text, "tie_word_embeddings": None, **given, "vision_config": vision}


def _write_entries(config: Gemma3Config, entries: dict[str, object]) -> dict[str, object]:
    vision = {"model_type": "siglip_vision_model", "hidden_act": GELU_TANH, "vision_use_head": False}
    vision |= object_entry(entries, "vision_config")
    top_level = {other: entries[name] for name, other in _TOP_LEVEL.items()}
    others = {"vision_config", *(name for name in _TOP_LEVEL if name.endswith("_token_id"))}
    text = {name: value for name, value in entries.items() if name not in others}
    return {**top_level, "text_config": {"model_type": "gemma3_text", **text}, "vision_config": vision}


RULES = (
    ModuleRules(
        "vision_tower.",
        (
            Rename("layer_norm1", "input_layernorm"),
            Rename("self_attn.out_proj", "self_attn.o_proj"),
            Rename("layer_norm2", "post_attention_layernorm"),
        ),
    ),
    ModuleRules(
        "multi_modal_projector.",
        (Rename("mm_soft_emb_norm", "norm"), Rename("mm_input_projection_weight", "projection")),
    ),
)
_TOWER = ("vision_tower.vision_model.", "vision_tower.")
FILES = (
    ("model.", "language_model.model.", "model.language_model.", "language_model."),
    ("lm_head.", "language_model.lm_head.", "lm_head."),
    ("vision_tower.", *(before + name for before in ("", "model.") for name in _TOWER)),
    ("multi_modal_projector.", "multi_modal_projector.", "model.multi_modal_projector."),
)
MODULES = (
    ("model.", "model.language_model."),
    ("vision_tower.", "model.vision_tower."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
)

ARCHITECTURE = Architecture(
    "gemma3",
    "Gemma3ForConditionalGeneration",
    accepted={"hidden_activation": (GELU_TANH,), "use_bidirectional_attention": (False,)},
    read_entries=_read_entries,
    read_rope=TEXT.read_rope,
    write_entries=_write_entries,
    layouts=lambda config: (Layout(RULES, FILES), Layout(RULES, MODULES)),
    extra_tensors=r"(model\.)?vision_tower\.(vision_model\.)?head\..+",
)
