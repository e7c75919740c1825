"""Tiny Kimi Linear checkpoints."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.models.tiny import Tensors, Tiny
from tests.models.variants import on_the_hub, variant, with_steady_mixtures

LINEAR, FULL = "linear_attention", "full_attention"
KIMI: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "first_k_dense_replace": 1,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 56,
    "kv_lora_rank": 20,
    "linear_attn_config": {
        "full_attn_layers": [2], "head_dim": 10, "kda_layers": [1, 3], "num_heads": 4, "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 128,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 24,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 4,
    "num_expert_group": 1,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "pad_token_id": None,
    "q_lora_rank": None,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "torch_dtype": "float32",
    "use_cache": True,
    "use_grouped_topk": True,
    "v_head_dim": 16,
    "vocab_size": 101,
}  # fmt: skip

kimi = partial(variant, KIMI)
_EXPERTS = on_the_hub("block_sparse_moe", "w1", "w3", "w2")


def kimi_on_the_hub(tensors: Tensors) -> Tensors:
    """Splits experts and convolutions, names MoE layers and decays as on the hub, and keeps decay rates in fp32."""
    found: Tensors = {}
    for name, tensor in _EXPERTS(tensors).items():
        layer, _, own = name.rpartition(".self_attn.")
        if own == "conv1d.weight":
            for part, weight in zip("qkv", tensor.chunk(3), strict=True):
                found[f"{layer}.self_attn.{part}_conv1d.weight"] = weight.clone()
        else:
            new = name.replace(".forget_gate.", ".").replace("mlp.shared_experts", "block_sparse_moe.shared_experts")
            new = new.replace("mlp.gate.e_score", "block_sparse_moe.gate.e_score")
            is_wide = name.endswith(("A_log", "dt_bias", "self_attn.o_norm.weight"))
            found[new] = tensor.float() if is_wide else tensor
    return found


def kimis() -> Iterator[Tiny]:
    yield kimi("as on the hub", tensors=kimi_on_the_hub)
    yield kimi(
        "minimal config",
        {"linear_head_dim": 10, "linear_num_heads": 3, "num_hidden_layers": 5, "num_experts": 9},
        absent=(
            "first_k_dense_replace", "head_dim", "hidden_act", "initializer_range", "linear_attn_config",
            "mla_use_nope", "model_max_length", "moe_layer_freq", "moe_renormalize", "moe_router_activation_func",
            "num_expert_group", "num_experts_per_token", "num_nextn_predict_layers",
            "num_shared_experts", "q_lora_rank", "rms_norm_eps", "rope_theta",
            "routed_scaling_factor", "topk_group", "torch_dtype", "use_grouped_topk",
        ),
        tensors=kimi_on_the_hub,
        stored_dtype=torch.bfloat16,
    )  # fmt: skip
    groups = {"num_expert_group": 4, "topk_group": 2, "num_experts_per_token": 2, "routed_scaling_factor": 1.5}
    yield kimi("saved by transformers", {**groups, "rms_norm_eps": 0.01}, by_transformers=True, shards=2)
    yield kimi(
        "transformers' spelling and modules, q rank, biases",
        {
            "layer_types": [FULL, LINEAR], "mlp_layer_types": ["sparse", "dense"], "num_hidden_layers": 2,
            "linear_attn_config": {"short_conv_kernel_size": 2}, "linear_head_dim": 8, "linear_num_heads": 1,
            "q_lora_rank": 24, "attention_bias": True, "moe_renormalize": False, "num_shared_experts": 2,
        },
        tensors=with_steady_mixtures,
    )  # fmt: skip
    linear = {"full_attn_layers": [1], "head_dim": 16, "kda_layers": [2], "num_heads": 2, "short_conv_kernel_size": 3}
    dense = {"first_k_dense_replace": 2, "num_hidden_layers": 2, "v_head_dim": 20, "linear_attn_config": linear}
    yield kimi("dense, other sizes", {**dense, "tie_word_embeddings": False}, tensors=kimi_on_the_hub)


CHECKPOINTS = list(kimis())
