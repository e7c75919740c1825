"""Tiny Qwen2.5-VL checkpoints."""

from typing import Any

from tests.models.vision_lms import top, vision_lms

VISION: dict[str, Any] = {
    "depth": 2,
    "fullatt_block_indexes": [1],
    "hidden_act": "silu",
    "hidden_size": 32,
    "in_channels": 3,
    "in_chans": 3,
    "intermediate_size": 44,
    "model_type": "qwen2_5_vl",
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "spatial_patch_size": 4,
    "temporal_patch_size": 2,
    "tokens_per_second": 3,
    "window_size": 20,
}
ANOTHER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 24,
    "in_channels": 1,
    "intermediate_size": 36,
    "num_heads": 2,
    "out_hidden_size": 128,
    "patch_size": 4,
    "spatial_merge_size": 3,
    "temporal_patch_size": 1,
    "window_size": 13,
}

CHECKPOINTS = list(vision_lms(top("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", VISION), ANOTHER))
