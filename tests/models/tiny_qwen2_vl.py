"""Tiny Qwen2-VL checkpoints."""

from typing import Any

from tests.models.vision_lms import top, vision_lms

VISION: dict[str, Any] = {
    "depth": 2,
    "embed_dim": 32,
    "hidden_act": "quick_gelu",
    "hidden_size": 64,
    "in_channels": 3,
    "in_chans": 3,
    "mlp_ratio": 2,
    "model_type": "qwen2_vl",
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "spatial_patch_size": 4,
    "temporal_patch_size": 2,
}
ANOTHER = {"spatial_merge_size": 3, "in_channels": 1, "temporal_patch_size": 1, "mlp_ratio": 3, "embed_dim": 24}

CHECKPOINTS = list(
    vision_lms(top("qwen2_vl", "Qwen2VLForConditionalGeneration", VISION), {**VISION, **ANOTHER, "hidden_size": 128})
)
