"""Tiny Qwen3-Next checkpoints."""

from collections.abc import Iterator
from functools import partial

import torch

from tests.models.tiny import Tensors, Tiny
from tests.models.tiny_qwen3_5_moe_text import PER_EXPERT, QWEN3_5_MOE
from tests.models.tiny_qwen3_5_text import with_fp32_decay
from tests.models.variants import variant, with_steady_mixtures

QWEN3_NEXT = {
    **{
        name: value
        for name, value in QWEN3_5_MOE.items()
        if name not in ("attn_output_gate", "layer_types", "mamba_ssm_dtype", "rope_parameters")
    },
    "architectures": ["Qwen3NextForCausalLM"],
    "decoder_sparse_step": 1,
    "intermediate_size": 40,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "norm_topk_prob": True,
    "partial_rotary_factor": 0.25,
    "rope_scaling": None,
    "rope_theta": 10000000.0,
    "use_sliding_window": False,
}

qwen = partial(variant, QWEN3_NEXT)


def with_mtp(tensors: Tensors) -> Tensors:
    return {**PER_EXPERT(tensors), "mtp.layers.0.mlp.experts.1.up_proj.weight": torch.rand(4, 8)}


def qwens() -> Iterator[Tiny]:
    yield qwen("plain", tensors=with_mtp)
    yield qwen(
        "minimal config",
        {"num_hidden_layers": 4, "linear_num_key_heads": 4},
        absent=(
            "attention_bias", "decoder_sparse_step", "full_attention_interval", "hidden_act", "linear_conv_kernel_dim",
            "max_position_embeddings", "mlp_only_layers", "norm_topk_prob", "partial_rotary_factor", "rms_norm_eps",
            "rope_scaling", "rope_theta", "router_aux_loss_coef", "use_sliding_window",
        ),
        tensors=lambda tensors: with_fp32_decay(PER_EXPERT(tensors)),
        stored_dtype=torch.bfloat16,
    )  # fmt: skip
    some_layers = {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1], "norm_topk_prob": False}
    yield qwen("MoE in some layers, one key head", {**some_layers, "linear_num_key_heads": 1}, tensors=PER_EXPERT)
    yield qwen("stacked experts", {"attention_bias": True}, tensors=with_steady_mixtures)
    yield qwen("saved by transformers", {"num_experts": 3, "mlp_only_layers": [0]}, by_transformers=True, shards=2)
    yield qwen(
        "load-balancing loss",
        {"output_router_logits": True, "router_aux_loss_coef": 3.0, "num_experts_per_tok": 2},
        tensors=PER_EXPERT,
    )


CHECKPOINTS = list(qwens())
