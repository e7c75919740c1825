"""Llama 3.2 Vision's checkpoints.

config.json has the entries of the two parts in `text_config` and `vision_config`. The names of tensors begin as those
of transformers 4, in files from the hub and in those that transformers 5 writes, or as those of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import first_told, object_entry, refuse, rope_fields, shared_fields, written_fields
from ligerzoo.convert.weights import Layout
from ligerzoo.models.mllama import Mllama, MllamaConfig, MllamaVisionConfig


def config_from_hf(raw: Mapping[str, Any]) -> MllamaConfig:
    """config.json -> MllamaConfig; an absent entry means what it means in transformers' configs of the two parts. The
    head is not tied, whatever an entry says of it, and `image_token_id` goes before `image_token_index`, as in
    transformers; likewise `num_attention_heads` of the tower before `attention_heads`."""
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
    """MllamaConfig -> the entries of config.json, spelled so that transformers 4 and 5 and vLLM read them."""
    text = {
        name: value for name, value in written_fields(config).items() if name != "bos_token_id" or value is not None
    }
    vision, image = text.pop("vision_config"), text.pop("image_token_index")
    return {
        "image_token_index": image,
        "text_config": {"model_type": "mllama_text_model", "hidden_act": "silu", **text},
        "vision_config": {"model_type": "mllama_vision_model", "hidden_act": "gelu", **vision},
    }


ARCHITECTURE = Architecture(
    model_type="mllama",
    hf_class="MllamaForConditionalGeneration",
    model_class=Mllama,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    layouts=(
        Layout(prefixes=(("model.", "language_model.model."), ("lm_head.", "language_model.lm_head."))),
        Layout(
            prefixes=(
                ("model.", "model.language_model."),
                ("vision_model.", "model.vision_model."),
                ("multi_modal_projector.", "model.multi_modal_projector."),
            )
        ),
    ),
    prefixes={},
)
