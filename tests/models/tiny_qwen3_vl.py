"""Tiny Qwen3-VL checkpoints."""

from typing import Any

import torch

from tests.models.prompts import IMAGE, VIDEO
from tests.models.tiny import HEAD, without
from tests.models.variants import variant

TEXT: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 12,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 56,
    "max_position_embeddings": 128,
    "model_type": "qwen3_vl_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [2, 2, 2], "rope_type": "default"},
    "rope_theta": 10000.0,
    "use_cache": True,
    "vocab_size": 101,
}
VISION: dict[str, Any] = {
    "deepstack_visual_indexes": [0, 2],
    "depth": 3,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 16,
    "in_channels": 3,
    "initializer_range": 0.02,
    "intermediate_size": 20,
    "model_type": "qwen3_vl",
    "num_heads": 2,
    "num_position_embeddings": 25,
    "out_hidden_size": 32,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
TOP: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "image_token_id": IMAGE,
    "model_type": "qwen3_vl",
    "text_config": TEXT,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "video_token_id": VIDEO,
    "vision_config": VISION,
    "vision_end_token_id": 93,
    "vision_start_token_id": 92,
}
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "mrope_section": [4, 1, 1],
    "mrope_interleaved": True,
}  # fmt: skip
MINIMAL = {
    "head_dim": 128, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 101,
}  # fmt: skip
ANOTHER_TOWER = {
    "deepstack_visual_indexes": [1, 0, 9], "depth": 2, "hidden_size": 12, "in_channels": 1, "intermediate_size": 20,
    "num_heads": 3, "num_position_embeddings": 4, "out_hidden_size": 24, "patch_size": 4, "spatial_merge_size": 3,
    "temporal_patch_size": 1,
}  # fmt: skip

CHECKPOINTS = [
    variant(TOP, "as on the hub", {"torch_dtype": "bfloat16"}, stored_dtype=torch.bfloat16, shards=3),
    variant(
        TOP,
        "tied",
        {"tie_word_embeddings": True, "text_config": {**TEXT, "tie_word_embeddings": True, "rope_theta": 300}},
        tensors=without(HEAD),
    ),
    variant(TOP, "saved by transformers", {"text_config": {**TEXT, "head_dim": 8, "num_key_value_heads": 4,
        "rope_scaling": {"mrope_section": [2, 1, 1]}}}, by_transformers=True, shards=2),
    variant(
        TOP,
        "yarn, biases, without DeepStack",
        {
            "text_config": {**TEXT, "attention_bias": True, "rope_scaling": YARN, "tie_word_embeddings": True},
            "vision_config": {**VISION, "deepstack_visual_indexes": []},
        },
    ),
    variant(TOP, "minimal config, other vision tower", {"text_config": MINIMAL, "vision_config": ANOTHER_TOWER}),
]  # fmt: skip
