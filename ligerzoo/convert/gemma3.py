"""Converter for Gemma 3 checkpoints with images.

config.json holds the decoder's entries in `text_config`, most of which hub checkpoints omit, and the vision tower's in
`vision_config`. The prefixes of tensor names differ between versions of transformers. Files may contain the tower's
classification head (`vision_use_head`), which no forward uses; it is kept when saving.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import first_told, object_entry, refuse, shared_fields, written_fields
from ligerzoo.convert.gemma3_text import two_ropes_fields
from ligerzoo.convert.weights import Layout, Rename, Under
from ligerzoo.models.gemma3 import Gemma3, Gemma3Config, Gemma3VisionConfig

_OF_THE_WHOLE = {
    "mm_tokens_per_image": "mm_tokens_per_image",
    "image_token_id": "image_token_index",
    "boi_token_id": "boi_token_index",
    "eoi_token_id": "eoi_token_index",
    "initializer_range": "initializer_range",
    "tie_word_embeddings": "tie_word_embeddings",
}
"""Our fields that config.json has at its top level, and their names there."""

_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_GELU = "gelu_pytorch_tanh"
_HEAD = re.compile(r"(model\.)?vision_tower\.(vision_model\.)?head\..+")


def config_from_hf(raw: Mapping[str, Any]) -> Gemma3Config:
    """Builds the config from config.json. Missing entries take the defaults of transformers' text and vision configs.

    `final_logit_softcapping` is ignored. `tie_word_embeddings` is read from the top level only. Token ids at the top
    level take precedence over those in `text_config`, and `image_token_id` over `image_token_index`.
    """
    text, vision = object_entry(raw, "text_config"), object_entry(raw, "vision_config")
    refuse(text, "model_type", unless=(None, "gemma3_text"))
    refuse(text, "hidden_activation", unless=(None, _GELU))
    refuse(text, "use_bidirectional_attention", unless=(None, False))
    refuse(vision, "model_type", unless=(None, "siglip_vision_model"))
    refuse(vision, "hidden_act", unless=(None, _GELU))
    of_the_whole = {
        ours: value for ours, theirs in _OF_THE_WHOLE.items() if (value := first_told(raw, ours, theirs)) is not None
    }
    tokens = {name: raw[name] for name in _TOKENS if raw.get(name) is not None}
    without_tie = {name: value for name, value in text.items() if name != "tie_word_embeddings"}
    return Gemma3Config(
        **{
            **shared_fields({**without_tie, **tokens, **of_the_whole}, Gemma3Config),
            **two_ropes_fields(text),
            "vision_config": Gemma3VisionConfig(**shared_fields(vision, Gemma3VisionConfig)),
        }
    )


def config_to_hf(config: Gemma3Config) -> dict[str, Any]:
    """Returns the entries of config.json, in a spelling that transformers 4 and 5 and vLLM read."""
    entries = written_fields(config)
    vision = {
        "model_type": "siglip_vision_model", "hidden_act": _GELU, "vision_use_head": False,
        **entries.pop("vision_config"),
    }  # fmt: skip
    whole = {theirs: entries[ours] for ours, theirs in _OF_THE_WHOLE.items()}
    text = {name: value for name, value in entries.items() if not name.endswith("_token_id") or name in _TOKENS}
    text = {"model_type": "gemma3_text", "hidden_activation": _GELU, **text}
    return {**whole, "text_config": text, "vision_config": vision}


ARCHITECTURE = Architecture(
    model_type="gemma3",
    hf_class="Gemma3ForConditionalGeneration",
    model_class=Gemma3,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    layouts=(
        Layout(
            (
                Under(
                    "vision_tower.",
                    (
                        Rename("layer_norm1", "input_layernorm"),
                        Rename("self_attn.out_proj", "self_attn.o_proj"),
                        Rename("layer_norm2", "post_attention_layernorm"),
                    ),
                ),
                Under(
                    "multi_modal_projector.",
                    (Rename("mm_soft_emb_norm", "norm"), Rename("mm_input_projection_weight", "projection")),
                ),
            )
        ),
    ),
    prefixes={
        "model.": ("language_model.model.", "model.language_model.", "language_model."),
        "lm_head.": ("language_model.lm_head.", "lm_head."),
        "vision_tower.": (
            "vision_tower.vision_model.", "vision_tower.", "model.vision_tower.", "model.vision_tower.vision_model.",
        ),
        "multi_modal_projector.": ("multi_modal_projector.", "model.multi_modal_projector."),
    },
    is_extra_tensor=lambda name: _HEAD.fullmatch(name) is not None,
)  # fmt: skip
