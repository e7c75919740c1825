"""Tiny Granite 4 checkpoints."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.models.tiny import HEAD, Tensors, Tiny, without
from tests.models.tiny_bamba import MAMBA, NORMS_GROUPS
from tests.models.tiny_granitemoe_swa import steady
from tests.models.variants import variant

GRANITE: dict[str, Any] = {
    **MAMBA,
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "attention_multiplier": 0.3,
    "embedding_multiplier": 1.5,
    "intermediate_size": 24,
    "layer_types": ["mamba", "attention", "mamba"],
    "logits_scaling": 2.0,
    "model_type": "granitemoehybrid",
    "num_experts_per_tok": 3,
    "num_local_experts": 8,
    "output_router_logits": False,
    "position_embedding_type": "nope",
    "residual_multiplier": 0.6,
    "router_aux_loss_coef": 0.001,
    "shared_intermediate_size": 40,
    "tie_word_embeddings": True,
}
FILES = {
    "experts.gate_up_proj": "input_linear.weight",
    "experts.down_proj": "output_linear.weight",
    "router.weight": "router.layer.weight",
}


def in_files(tensors: Tensors) -> Tensors:
    """The names on the hub."""
    named = {}
    for name, tensor in steady(tensors).items():
        layer, moe, own = name.partition(".block_sparse_moe.")
        named[layer + moe + FILES.get(own, own)] = tensor
    return named


def granites() -> Iterator[Tiny]:
    granite = partial(variant, GRANITE, tensors=in_files)
    yield granite("as on the hub")
    yield granite("in bf16", {"torch_dtype": "bfloat16"}, stored_dtype=torch.bfloat16)
    yield granite(
        "minimal config, untied",
        {"num_attention_heads": 8, "mamba_n_heads": 8, "tie_word_embeddings": False},
        absent=(
            "attention_bias", "attention_multiplier", "embedding_multiplier", "hidden_act", "logits_scaling",
            "mamba_conv_bias", "mamba_d_conv", "mamba_d_head", "mamba_expand", "mamba_n_groups",
            "mamba_proj_bias", "max_position_embeddings", "num_experts_per_tok", "num_key_value_heads",
            "num_local_experts", "output_router_logits", "position_embedding_type", "residual_multiplier",
            "rms_norm_eps", "rope_theta", "router_aux_loss_coef", "time_step_limit",
        ),
        tensors=dict,
    )  # fmt: skip
    rotary = {"position_embedding_type": "rope", "rope_theta": 300.0, "attention_bias": True, "mamba_proj_bias": True}
    kinds = {"layer_types": ["full_attention", "linear_attention", "full_attention"]}
    yield granite("rotary, biases, in-memory layout", {**rotary, **kinds}, tensors=steady)
    yield granite("saved by transformers", {"mamba_n_groups": 1, "mamba_d_conv": 3}, by_transformers=True, shards=2)
    dense = {"num_local_experts": 0, "num_experts_per_tok": 0, "rms_norm_eps": 0.01}
    yield granite("without experts", dense, tensors=without(HEAD))
    if not NORMS_GROUPS:
        return  # it fails to compute the load-balancing loss
    balanced = {"output_router_logits": True, "router_aux_loss_coef": 3.0, "num_experts_per_tok": 2}
    yield granite("load-balancing loss", balanced)


CHECKPOINTS = list(granites())
