"""Tiny checkpoints of Qwen3.5 with MoE and images."""

from typing import Any

import torch

from tests.models.tiny import Tensors
from tests.models.tiny_qwen3_5 import TEXT as DENSE
from tests.models.tiny_qwen3_5 import TOP as QWEN3_5
from tests.models.tiny_qwen3_5 import VISION, with_prediction_head
from tests.models.tiny_qwen3_5_moe_text import PER_EXPERT, QWEN3_5_MOE
from tests.models.variants import variant, with_steady_mixtures

MIXTURE = ("moe_intermediate_size", "num_experts", "num_experts_per_tok", "shared_expert_intermediate_size")
TEXT: dict[str, Any] = {
    **{name: value for name, value in DENSE.items() if name != "intermediate_size"},
    **{name: QWEN3_5_MOE[name] for name in MIXTURE},
    "model_type": "qwen3_5_moe_text",
}
TOP: dict[str, Any] = {
    **QWEN3_5,
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "text_config": TEXT,
    "vision_config": {**VISION, "model_type": "qwen3_5_moe"},
}


def on_the_hub(tensors: Tensors) -> Tensors:
    return with_prediction_head(with_steady_mixtures(tensors))


CHECKPOINTS = [
    variant(TOP, "as on the hub", {"torch_dtype": "bfloat16"}, stored_dtype=torch.bfloat16, shards=2,
        tensors=on_the_hub),
    variant(TOP, "saved by transformers", {"text_config": {**TEXT, "num_experts": 3}}, by_transformers=True),
    variant(
        TOP,
        "load-balancing loss, one tensor per expert",
        {"text_config": {**TEXT, "output_router_logits": True, "router_aux_loss_coef": 3.0, "num_experts_per_tok": 2}},
        tensors=PER_EXPERT,
    ),
]  # fmt: skip
