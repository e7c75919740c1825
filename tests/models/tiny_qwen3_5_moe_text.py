"""Tiny checkpoints of Qwen3.5 with MoE, text only."""

from collections.abc import Iterator
from functools import partial

import torch

from tests.models.tiny import Tiny
from tests.models.tiny_qwen3_5_text import QWEN3_5, of_a_vision_language_model, with_fp32_decay
from tests.models.variants import on_the_hub, variant, with_steady_mixtures

QWEN3_5_MOE = {
    **{name: value for name, value in QWEN3_5.items() if name != "intermediate_size"},
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 28,
}
PER_EXPERT = on_the_hub("mlp", "gate_proj", "up_proj", "down_proj")

qwen = partial(variant, QWEN3_5_MOE)


def qwens() -> Iterator[Tiny]:
    yield qwen("plain", tensors=PER_EXPERT)
    yield qwen(
        "fused experts, of a vision-language model",
        tensors=lambda tensors: of_a_vision_language_model(with_steady_mixtures(tensors)),
    )
    yield qwen(
        "minimal config",
        {"num_hidden_layers": 4},
        absent=(
            "attention_bias", "attn_output_gate", "full_attention_interval", "hidden_act", "layer_types",
            "linear_conv_kernel_dim", "mamba_ssm_dtype", "max_position_embeddings", "rms_norm_eps", "rope_parameters",
            "router_aux_loss_coef",
        ),
        tensors=lambda tensors: with_fp32_decay(PER_EXPERT(tensors)),
        stored_dtype=torch.bfloat16,
    )  # fmt: skip
    yield qwen("saved by transformers", {"num_experts": 3, "attention_bias": True}, by_transformers=True)
    yield qwen(
        "load-balancing loss",
        {"output_router_logits": True, "router_aux_loss_coef": 3.0, "num_experts_per_tok": 2},
        tensors=PER_EXPERT,
    )


CHECKPOINTS = list(qwens())
