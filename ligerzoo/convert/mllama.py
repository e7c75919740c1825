"""Converter for Llama 3.2 Vision checkpoints.

config.json holds the entries of the two parts in `text_config` and `vision_config`. Tensor names have the prefixes of
transformers 4 (hub checkpoints, and files written by transformers 5) or those of transformers 5's in-memory layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import first_told, object_entry, refuse, rope_fields, shared_fields, written_fields
from ligerzoo.convert.weights import Layout, Rename, Under
from ligerzoo.models.mllama import Mllama, MllamaConfig, MllamaVisionConfig


def config_from_hf(raw: Mapping[str, Any]) -> MllamaConfig:
    """Builds the config from config.json. Missing entries take the defaults of transformers' text and vision configs.

    `tie_word_embeddings` is ignored: the head is never tied. As in transformers, `image_token_id` takes precedence over
    `image_token_index`, and the vision tower's `num_attention_heads` over `attention_heads`.
    """
    text, vision = object_entry(raw, "text_config"), object_entry(raw, "vision_config")
    refuse(text, "hidden_act", unless=(None, "silu", "swish"))
    refuse(vision, "hidden_act", unless=(None, "gelu"))
    image = first_told(raw, "image_token_id", "image_token_index")
    heads = first_told(vision, "num_attention_heads", "attention_heads")
    return MllamaConfig(
        **{
            **shared_fields({**text, "image_token_index": image}, MllamaConfig),
            **rope_fields(text, MllamaConfig.rope_theta),
            "vision_config": MllamaVisionConfig(
                **shared_fields({**vision, "attention_heads": heads}, MllamaVisionConfig)
            ),
            "tie_word_embeddings": False,
        }
    )


def config_to_hf(config: MllamaConfig) -> dict[str, Any]:
    """Returns the entries of config.json, in a spelling that transformers 4 and 5 and vLLM read."""
    text = {
        name: value for name, value in written_fields(config).items() if name != "bos_token_id" or value is not None
    }
    vision, image = text.pop("vision_config"), text.pop("image_token_index")
    return {
        "image_token_index": image,
        "text_config": {"model_type": "mllama_text_model", "hidden_act": "silu", **text},
        "vision_config": {"model_type": "mllama_vision_model", "hidden_act": "gelu", **vision},
    }


_RULES = (
    Under("model.", (Rename("cross_attn_attn_gate", "attn_gate"), Rename("cross_attn_mlp_gate", "mlp_gate"))),
    Under("vision_model.", (Rename("gate_attn", "attn_gate"), Rename("gate_ffn", "mlp_gate"))),
)

ARCHITECTURE = Architecture(
    model_type="mllama",
    hf_class="MllamaForConditionalGeneration",
    model_class=Mllama,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    layouts=(
        Layout(_RULES, prefixes=(("model.", "language_model.model."), ("lm_head.", "language_model.lm_head."))),
        Layout(
            _RULES,
            prefixes=(
                ("model.", "model.language_model."),
                ("vision_model.", "model.vision_model."),
                ("multi_modal_projector.", "model.multi_modal_projector."),
            ),
        ),
    ),
    prefixes={},
)
