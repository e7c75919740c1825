"""Tiny random models of transformers, of every family that liger-kernel 0.8.5 patches."""

from __future__ import annotations

import inspect
from collections.abc import Container
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

VOCABULARY = 101

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": 16,
    # mixtures
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # latent attention
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    # linear attention and state spaces
    "linear_conv_kernel_dim": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mamba_d_ssm": 32,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    # vision
    "depth": 2,
    "embed_dim": 32,
    "num_heads": 4,
    "image_size": 28,
    "patch_size": 14,
    "out_hidden_size": 32,
    "spatial_merge_size": 2,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
    "mm_tokens_per_image": 1,
    "pixel_shuffle_ratio": 0.5,
    "image_token_id": 90,
    "image_token_index": 90,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
    "image_start_token_id": 92,
    "image_end_token_id": 93,
    "video_start_token_id": 94,
    "video_end_token_id": 95,
    "boi_token_index": 92,
    "eoi_token_index": 93,
    "boi_token_id": 92,
    "eoi_token_id": 93,
    "audio_token_id": 94,
}
"""Sizes of all models, where their configs have the fields."""

M_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}

OVERRIDES: dict[str, dict[str, Any]] = {
    "qwen2_vl_text": {"rope_parameters": M_ROPE},
    "qwen2_5_vl_text": {"rope_parameters": M_ROPE},
    "glm4v_text": {"rope_parameters": M_ROPE},
    "glm4v_moe_text": {"rope_parameters": {**M_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}},
    "deepseek_v2": {"num_key_value_heads": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {"num_key_value_heads": 4},
    "muse_glimmer": {"out_hidden_size": 128, "projector_hidden_size": 32},
    "mllama_text_model": {"cross_attention_layers": [1]},
    "mllama_vision_model": {"num_global_layers": 1, "intermediate_layers_indices": [0], "vision_output_dim": 64},
    "paligemma": {"projection_dim": 32},
    "siglip_vision_model": {"projection_dim": 32},
    "llama4_vision_model": {
        "intermediate_size": 128,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
        "vision_output_dim": 32,
    },
    "gemma4_text": {
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
        "global_head_dim": 16,
        "head_dim": 8,
        "num_key_value_heads": 2,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    },
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "index_head_dim": 8,
        "index_n_heads": 2,
        "o_groups": 2,
        "o_lora_rank": 8,
        "head_dim": 16,
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
        "mlp_layer_types": ["hash_moe", "moe"],
        "partial_rotary_factor": 0.5,
    },
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_moe_text": {"layer_types": ["linear_attention", "full_attention"]},
    "llama4_text": {"intermediate_size_mlp": 56},
    **{
        family: {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        for family in ("bert", "roberta", "xlm-roberta")
    },
    "nemotron_h": {
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 8,
        "moe_shared_expert_intermediate_size": 24,
    },
}
"""Other sizes, by model type of the config."""

FAMILIES = (
    "deepseek_v2", "deepseek_v3", "deepseek_v4", "exaone4", "falcon_h1", "gemma", "gemma2", "gemma3",
    "gemma3_text", "gemma4", "gemma4_text", "glm4", "glm4v", "glm4v_moe", "gpt_oss", "granite",
    "hunyuan_v1_dense", "hunyuan_v1_moe", "internvl", "llama", "llama4", "llama4_text", "llava", "ministral",
    "mistral", "mistral3", "mixtral", "mllama", "muse_glimmer", "nemotron", "nemotron_h", "olmo2", "olmo3",
    "paligemma", "phi3", "pixtral", "qwen2", "qwen2_5_vl", "qwen2_vl", "qwen3", "qwen3_5", "qwen3_5_text",
    "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe", "smollm3", "smolvlm",
)  # fmt: skip

ENCODERS = ("bert", "modernbert", "roberta", "xlm-roberta")
"""Families with a head for masked tokens."""

BROKEN = {"5.24.0": ("llama4",)}
"""Families whose forward fails in a version of transformers, without our kernels."""


EAGER = ("deepseek_v4", "gemma2", "gpt_oss")
"""Families that do not support torch's scaled dot-product attention."""


def shrink(config: PreTrainedConfig) -> dict[str, Any]:
    """Returns the entries of a config, and of the configs within it, that make the model tiny."""
    found: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):  # of the text model or a tower
            found[name] = {"model_type": value.model_type, **shrink(value)}
        elif name in SIZES and (value is not None or name in ("head_dim", "num_key_value_heads")):
            found[name] = SIZES[name]
    return {**found, **OVERRIDES.get(config.model_type, {})}


def tiny(family: str) -> PreTrainedModel:
    """Returns a model with random weights, none of which are 0 or 1, in fp32."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **shrink(AutoConfig.for_model(family)))
    config._attn_implementation = "eager" if family in EAGER else "sdpa"
    if family in ENCODERS:
        model = AutoModelForMaskedLM.from_config(config)
    elif family in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        model = AutoModelForImageTextToText.from_config(config)
    elif family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        model = AutoModelForCausalLM.from_config(config)
    else:
        model = AutoModel.from_config(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            noise = torch.randn_like(parameter)
            # Fast decays of linear attention amplify rounding: their gradients nearly cancel.
            slow = -1.2 + 0.5 * noise if name.endswith("A_log") else -0.3 + 0.4 * noise
            parameter.data = slow if name.endswith(("A_log", "dt_bias")) else parameter.data + 0.1 * noise
    return model


def inputs(model: PreTrainedModel, batch: int = 2, tokens: int = 24) -> dict[str, Tensor]:
    """Returns tokens, and an image where the model takes images and can count its features."""
    torch.manual_seed(1)
    parameters = inspect.signature(model.forward).parameters
    if "input_ids" not in parameters:
        return {"pixel_values": torch.randn(1, 3, 28, 28)}
    ids = torch.randint(3, 90, (batch, tokens))  # larger ones are special
    image = _image(model, parameters)
    if not image:
        return {"input_ids": ids}
    if model.config.model_type == "mllama":
        return {"input_ids": ids[:1], **image, "cross_attention_mask": torch.ones(1, tokens, 1, 4, dtype=torch.long)}
    options = inspect.signature(model.get_image_features).parameters
    strategy = {"vision_feature_select_strategy": "default"} if "vision_feature_select_strategy" in options else {}
    found = model.get_image_features(**image, **strategy)
    features = found.last_hidden_state if found.pooler_output is None else found.pooler_output
    number = sum(feature.numel() // feature.shape[-1] for feature in features)
    placeholder = getattr(model.config, "image_token_id", None) or model.config.image_token_index
    ids = ids[:1]
    ids[0, 3 : 3 + number] = placeholder
    types = {"mm_token_type_ids", "token_type_ids"} & set(parameters)
    return {"input_ids": ids, **image, **{name: (ids == placeholder).long() for name in types}}


def _image(model: PreTrainedModel, parameters: Container[str]) -> dict[str, Tensor]:
    vision = getattr(model.config, "vision_config", None)
    if vision is None:
        return {}
    if "image_grid_thw" in parameters:
        patch = 3 * 2 * vision.patch_size**2
        return {"pixel_values": torch.randn(16, patch), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    pixels = torch.randn(1, 3, 28, 28)
    if model.config.model_type == "smolvlm":
        return {"pixel_values": pixels[None]}
    if model.config.model_type == "mllama":
        return {
            "pixel_values": pixels.expand(1, 1, 4, 3, 28, 28),
            "aspect_ratio_ids": torch.tensor([[1]]),
            "aspect_ratio_mask": torch.tensor([[[1, 0, 0, 0]]]),
        }
    if model.config.model_type == "mistral3":  # which fails for images of one token in all
        return {"pixel_values": torch.randn(1, 3, 28, 56), "image_sizes": torch.tensor([[28, 56]])}
    return {"pixel_values": pixels}
