"""Tiny Qwen3-VL-MoE checkpoints."""

from typing import Any

import torch

from tests.models.tiny import Tensors
from tests.models.tiny_qwen3_vl import TEXT as DENSE
from tests.models.tiny_qwen3_vl import TOP as QWEN3_VL
from tests.models.tiny_qwen3_vl import VISION
from tests.models.variants import variant, with_steady_mixtures

TEXT: dict[str, Any] = {
    **DENSE,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "model_type": "qwen3_vl_moe_text",
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 2,
}
TOP: dict[str, Any] = {
    **QWEN3_VL,
    "architectures": ["Qwen3VLMoeForConditionalGeneration"],
    "model_type": "qwen3_vl_moe",
    "text_config": TEXT,
    "vision_config": {**VISION, "model_type": "qwen3_vl_moe"},
}


def on_the_hub(tensors: Tensors) -> Tensors:
    """Transposes the matrices of the experts."""
    return {
        name: tensor.mT.contiguous() if ".mlp.experts." in name else tensor
        for name, tensor in with_steady_mixtures(tensors).items()
    }


MINIMAL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "moe_intermediate_size": 8, "num_experts": 5, "vocab_size": 101, "rope_scaling": {"mrope_section": [3, 3, 2]},
}  # fmt: skip

CHECKPOINTS = [
    variant(
        TOP, "as on the hub", {"torch_dtype": "bfloat16"}, stored_dtype=torch.bfloat16, shards=2, tensors=on_the_hub,
    ),
    variant(TOP, "saved by transformers", {"text_config": {**TEXT, "num_experts": 3}}, by_transformers=True),
    variant(
        TOP,
        "load-balancing loss, MoE in some layers",
        {"text_config": {**TEXT, "mlp_only_layers": [0], "output_router_logits": True, "router_aux_loss_coef": 3.0}},
        tensors=with_steady_mixtures,
    ),
    variant(TOP, "minimal config", {"text_config": MINIMAL}, tensors=on_the_hub),
]  # fmt: skip
