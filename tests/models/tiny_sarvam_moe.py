"""Tiny checkpoints of Sarvam's MoE."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.models.tiny import EMBEDDING, Tensors, Tiny
from tests.models.tiny_glm4_moe import GLM4_MOE, ON_THE_HUB
from tests.models.variants import variant, with_steady_mixtures

_OTHERS = "attention_bias", "n_routed_experts", "n_shared_experts", "num_nextn_predict_layers", "partial_rotary_factor"
SARVAM_MOE: dict[str, Any] = {
    **{name: value for name, value in GLM4_MOE.items() if name not in _OTHERS},
    "architectures": ["SarvamMoEForCausalLM"],
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 24,
    "model_type": "sarvam_moe",
    "num_experts": 8,
    "num_shared_experts": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_theta": 8000000.0,
    "routed_scaling_factor": 2.5,
    "score_function": "sigmoid",
    "use_bias": False,
    "use_qkv_bias": False,
}
NAMES = {
    EMBEDDING: "model.word_embeddings.weight",
    ".self_attn.q_norm.": ".attention.query_layernorm.",
    ".self_attn.k_norm.": ".attention.key_layernorm.",
    ".self_attn.o_proj.": ".attention.dense.",
    ".mlp.gate.e_score_correction_bias": ".mlp.gate.expert_bias",
}


def as_stored(tensors: Tensors) -> Tensors:
    """The names in files, with queries, keys and values in one tensor."""
    tensors = ON_THE_HUB(tensors)
    for name in [name for name in tensors if ".q_proj." in name]:
        parts = [tensors.pop(name.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
        tensors[name.replace("self_attn.q_proj", "attention.query_key_value")] = torch.cat(parts)
    for ours, stored in NAMES.items():
        tensors = {name.replace(ours, stored): tensor for name, tensor in tensors.items()}
    return tensors


def sarvams() -> Iterator[Tiny]:
    sarvam = partial(variant, SARVAM_MOE, tensors=as_stored)
    yield sarvam("as on the hub", {"torch_dtype": "bfloat16"}, stored_dtype=torch.bfloat16)
    yield sarvam(
        "minimal config",
        {"num_attention_heads": 8, "moe_intermediate_size": 8},
        absent=(
            "attention_dropout", "first_k_dense_replace", "head_dim", "hidden_act", "initializer_range",
            "max_position_embeddings", "moe_router_enable_expert_bias", "moe_shared_expert_intermediate_size",
            "n_group", "norm_topk_prob", "num_experts", "num_experts_per_tok", "num_key_value_heads",
            "num_shared_experts", "rms_norm_eps", "rope_scaling", "rope_theta", "routed_scaling_factor",
            "score_function", "topk_group", "torch_dtype", "use_bias", "use_qk_norm", "use_qkv_bias",
        ),
    )  # fmt: skip
    odd = {"use_qkv_bias": True, "num_shared_experts": 2, "n_routed_experts": 4, "first_k_dense_replace": 0}
    groups = {"n_group": 4, "topk_group": 2, "partial_rotary_factor": 0.5, "norm_topk_prob": False}
    yield sarvam("biases, groups, half of each head rotated", {**odd, **groups, "use_qk_norm": False})
    yield variant(SARVAM_MOE, "saved by transformers", {"num_experts": 3}, by_transformers=True, shards=2)
    stacked = {"attention_bias": True, "n_routed_experts": 5, "rope_theta": 70.0}
    yield variant(
        SARVAM_MOE, "names of GLM, stacked experts", stacked, ("num_experts", "use_qkv_bias"),
        tensors=with_steady_mixtures,
    )  # fmt: skip


CHECKPOINTS = list(sarvams())
