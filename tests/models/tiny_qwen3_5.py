"""Tiny checkpoints of dense Qwen3.5 with images."""

from typing import Any

import torch

from tests.models.tiny import HEAD, Tensors, without
from tests.models.tiny_qwen3_5_text import QWEN3_5, with_fp32_decay
from tests.models.tiny_qwen3_vl import TOP as QWEN3_VL
from tests.models.tiny_qwen3_vl import VISION as QWEN3_VL_VISION
from tests.models.variants import variant

ROPE: dict[str, Any] = {
    "mrope_interleaved": True, "mrope_section": [2, 2, 2], "partial_rotary_factor": 0.5, "rope_theta": 1000,
    "rope_type": "default",
}  # fmt: skip
TEXT: dict[str, Any] = {
    **{name: value for name, value in QWEN3_5.items() if name not in ("architectures", "torch_dtype")},
    "head_dim": 24,
    "linear_key_head_dim": 16,
    "output_gate_type": "swish",
    "partial_rotary_factor": 0.5,
    "rope_parameters": ROPE,
}
VISION: dict[str, Any] = {**QWEN3_VL_VISION, "deepstack_visual_indexes": [], "depth": 2, "model_type": "qwen3_5"}
TOP: dict[str, Any] = {
    **QWEN3_VL,
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": TEXT,
    "vision_config": VISION,
}
OPTIONAL = (
    "attention_bias", "attn_output_gate", "head_dim", "hidden_act", "initializer_range", "layer_types",
    "linear_conv_kernel_dim", "mamba_ssm_dtype", "max_position_embeddings", "partial_rotary_factor", "rms_norm_eps",
    "rope_parameters",
)  # fmt: skip
"""Entries of `text_config` that a checkpoint may omit."""

WITHOUT_ROPE = {name: value for name, value in TEXT.items() if name != "rope_parameters"}
LAYERS = {"layer_types": ["full_attention", "linear_attention"], "attention_bias": True, "linear_conv_kernel_dim": 2}
YARN = {**ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "mrope_section": [1, 1, 1],
        "partial_rotary_factor": 0.25}  # fmt: skip
ANOTHER_TOWER = {
    "depth": 1, "hidden_size": 12, "in_channels": 1, "intermediate_size": 20, "num_heads": 3,
    "num_position_embeddings": 4, "out_hidden_size": 32, "patch_size": 4, "spatial_merge_size": 3,
    "temporal_patch_size": 1,
}  # fmt: skip


def with_prediction_head(tensors: Tensors) -> Tensors:
    """Adds tensors of the head for multi-token prediction."""
    return {**tensors, "mtp.fc.weight": torch.rand(4, 8), "mtp.layers.0.mlp.experts.0.up_proj.weight": torch.rand(2, 3)}


CHECKPOINTS = [
    variant(TOP, "as on the hub", {"dtype": "bfloat16"}, ("torch_dtype",), stored_dtype=torch.bfloat16, shards=3,
        tensors=with_prediction_head),
    variant(
        TOP,
        "tied, one key head, rope in the spelling of transformers 4",
        {
            "tie_word_embeddings": True,
            "text_config": {**WITHOUT_ROPE, "rope_scaling": {"mrope_section": [2, 2, 2]}, "rope_theta": 300.0,
                "linear_num_key_heads": 1, "num_key_value_heads": 1},
        },
        tensors=without(HEAD),
    ),
    variant(TOP, "linear attention last, biases, saved by transformers", {"text_config": {**TEXT, **LAYERS}},
        by_transformers=True, shards=2),
    variant(TOP, "yarn, decay rates in fp32",
        {"torch_dtype": "bfloat16", "text_config": {**TEXT, "rope_parameters": YARN, "partial_rotary_factor": 0.25,
            "tie_word_embeddings": True}},
        stored_dtype=torch.bfloat16, tensors=with_fp32_decay),
    variant(
        TOP,
        "minimal config, other vision tower",
        {
            "text_config": {name: value for name, value in TEXT.items() if name not in OPTIONAL},
            "vision_config": ANOTHER_TOWER,
        },
    ),
]  # fmt: skip
