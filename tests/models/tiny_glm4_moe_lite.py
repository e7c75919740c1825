"""Tiny GLM-4.7-Flash checkpoints."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.models.tiny import Tiny
from tests.models.tiny_deepseek_v3 import DEEPSEEK_V3, ON_THE_HUB, with_mtp_on_the_hub
from tests.models.variants import variant

GLM4_MOE_LITE: dict[str, Any] = {
    **{name: value for name, value in DEEPSEEK_V3.items() if name not in ("rope_scaling", "scoring_func", "seq_aux")},
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "n_group": 1,
    "partial_rotary_factor": 1.0,
    "qk_nope_head_dim": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.8,
    "topk_group": 1,
}


def glms() -> Iterator[Tiny]:
    glm = partial(variant, GLM4_MOE_LITE, tensors=ON_THE_HUB)
    yield glm("plain")
    types = {"mlp_layer_types": ["sparse", "dense", "sparse"], "num_hidden_layers": 3, "n_group": 2}
    types |= {"attention_bias": True}
    yield glm(
        "MLP layer types, groups, MTP layer", types, absent=("first_k_dense_replace",), tensors=with_mtp_on_the_hub
    )
    yield glm(
        "minimal config",
        {"q_lora_rank": None},
        absent=(
            "attention_bias", "attention_dropout", "first_k_dense_replace", "hidden_act", "initializer_range",
            "max_position_embeddings", "moe_layer_freq", "n_group", "n_shared_experts", "norm_topk_prob",
            "num_experts_per_tok", "partial_rotary_factor", "rms_norm_eps", "rope_theta", "routed_scaling_factor",
            "topk_group", "topk_method",
        ),
        stored_dtype=torch.bfloat16,
    )  # fmt: skip
    halves = {"rope_interleave": False, "norm_topk_prob": False, "n_routed_experts": 3}
    yield variant(GLM4_MOE_LITE, "saved by transformers", halves, by_transformers=True, shards=2)


CHECKPOINTS = list(glms())
