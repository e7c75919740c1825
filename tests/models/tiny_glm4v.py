"""Tiny checkpoints of GLM-4.1V."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.models.glm4v import modeling_glm4v
from transformers.models.glm4v_moe import modeling_glm4v_moe

from tests.models.prompts import IMAGE, VIDEO, VIDEO_END, VIDEO_START
from tests.models.tiny import HEAD, Tiny, without
from tests.models.variants import variant


def placeholder_masks(
    self: Any, input_ids: Tensor, inputs_embeds: Tensor, image_features: Any = None, video_features: Any = None
) -> tuple[Tensor, Tensor]:
    c = self.config
    in_video = (input_ids == c.video_start_token_id).cumsum(1) > (input_ids == c.video_end_token_id).cumsum(1)
    is_image = input_ids == c.image_token_id
    return (is_image & ~in_video)[..., None], (is_image & in_video)[..., None]


# transformers takes all image tokens of a batch for those of its images, or of its videos: it refuses both together.
modeling_glm4v.Glm4vModel.get_placeholder_mask = placeholder_masks
modeling_glm4v_moe.Glm4vMoeModel.get_placeholder_mask = placeholder_masks

TEXT: dict[str, Any] = {
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": [2, 3],
    "hidden_act": "silu",
    "hidden_size": 48,
    "initializer_range": 0.02,
    "intermediate_size": 56,
    "max_position_embeddings": 128,
    "model_type": "glm4v_text",
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "pad_token_id": None,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"mrope_section": [1, 2, 1], "rope_type": "default", "type": "default"},
    "rope_theta": 10000.0,
    "use_cache": True,
    "vocab_size": 101,
}
VISION: dict[str, Any] = {
    "attention_bias": False,
    "depth": 2,
    "hidden_act": "silu",
    "hidden_size": 32,
    "image_size": 22,
    "in_channels": 3,
    "initializer_range": 0.02,
    "intermediate_size": 40,
    "model_type": "glm4v",
    "num_heads": 2,
    "out_hidden_size": 48,
    "patch_size": 4,
    "rms_norm_eps": 1e-05,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
TOP: dict[str, Any] = {
    "architectures": ["Glm4vForConditionalGeneration"],
    "image_end_token_id": 95,
    "image_start_token_id": 94,
    "image_token_id": IMAGE,
    "model_type": "glm4v",
    "text_config": TEXT,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "video_end_token_id": VIDEO_END,
    "video_start_token_id": VIDEO_START,
    "video_token_id": VIDEO,
    "vision_config": VISION,
}
ANOTHER_TOWER = {
    **VISION, "attention_bias": True, "depth": 1, "image_size": 13, "in_channels": 1, "num_heads": 4,
    "rms_norm_eps": 0.01, "spatial_merge_size": 3, "temporal_patch_size": 1,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "mrope_section": [2, 1, 1]}


def glms() -> Iterator[Tiny]:
    glm = partial(variant, TOP)
    yield glm("as on the hub", {"torch_dtype": "bfloat16"}, stored_dtype=torch.bfloat16, shards=3)
    yield glm(
        "tied in text_config, other vision tower",
        {"text_config": {**TEXT, "tie_word_embeddings": True, "rope_theta": 300}, "vision_config": ANOTHER_TOWER},
        tensors=without(HEAD),
    )
    sections = {"rope_scaling": {"type": "default", "mrope_section": [2, 3, 3]}, "partial_rotary_factor": 1.0}
    yield glm(
        "saved by transformers",
        {"text_config": {**TEXT, **sections, "num_key_value_heads": 3}},
        by_transformers=True,
        shards=2,
    )
    yield glm("yarn", {"text_config": {**TEXT, "rope_scaling": YARN, "rms_norm_eps": 0.01, "head_dim": 16}})
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 700.0, "mrope_section": [4, 0, 4]}}
    small = {"depth": 1} | {
        name: VISION[name] for name in ("hidden_size", "num_heads", "patch_size", "out_hidden_size")
    }
    yield glm(
        "minimal config",
        {
            "text_config": {name: TEXT[name] for name in sizes} | rope | {"num_key_value_heads": 3},
            "vision_config": {**small, "image_size": 20},
            "tie_word_embeddings": True,
        },
        absent=("torch_dtype", "image_start_token_id", "image_end_token_id"),
        tensors=without(HEAD),
    )


CHECKPOINTS = list(glms())
