"""Tiny GLM-4.5 checkpoints."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.models.tiny import Tensors, Tiny, with_an_mtp_layer
from tests.models.variants import on_the_hub, variant, with_steady_mixtures

GLM4_MOE: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": [2, 3],
    "first_k_dense_replace": 1,
    "head_dim": 12,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 56,
    "max_position_embeddings": 128,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 24,
    "n_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_nextn_predict_layers": 1,
    "pad_token_id": None,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "torch_dtype": "float32",
    "use_cache": True,
    "use_qk_norm": True,
    "vocab_size": 101,
}
ON_THE_HUB = on_the_hub("mlp", "gate_proj", "up_proj", "down_proj")


def with_mtp_on_the_hub(tensors: Tensors) -> Tensors:
    return with_an_mtp_layer(ON_THE_HUB(tensors))


def glm4_moes() -> Iterator[Tiny]:
    glm = partial(variant, GLM4_MOE, tensors=ON_THE_HUB)
    yield glm("plain")
    yield glm(
        "minimal config",
        {"num_attention_heads": 8, "num_key_value_heads": 8, "n_routed_experts": 128, "first_k_dense_replace": 1},
        absent=(
            "attention_bias", "attention_dropout", "head_dim", "hidden_act", "initializer_range",
            "first_k_dense_replace", "max_position_embeddings", "n_group", "n_routed_experts", "n_shared_experts",
            "norm_topk_prob",
            "num_experts_per_tok", "num_key_value_heads", "num_nextn_predict_layers", "partial_rotary_factor",
            "rms_norm_eps", "rope_scaling", "rope_theta", "routed_scaling_factor", "topk_group", "use_qk_norm",
        ),
    )  # fmt: skip
    yield glm(
        "groups, scaling, two shared experts, no QK norm",
        {
            "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "routed_scaling_factor": 2.5, "use_qk_norm": False,
            "norm_topk_prob": False, "first_k_dense_replace": 0, "num_key_value_heads": 4,
        },
        stored_dtype=torch.bfloat16,
    )  # fmt: skip
    yield variant(GLM4_MOE, "saved by transformers", {"n_routed_experts": 3}, by_transformers=True, shards=2)
    stacked = {"num_experts_per_tok": 8, "attention_bias": False}
    yield variant(GLM4_MOE, "stacked experts", stacked, tensors=with_steady_mixtures)
    yield glm("dense layers only, MTP layer", {"first_k_dense_replace": 2}, tensors=with_mtp_on_the_hub)


CHECKPOINTS = list(glm4_moes())
