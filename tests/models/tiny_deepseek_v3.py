"""Tiny DeepSeek-V3 checkpoints."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.models.tiny import Tensors, Tiny, with_an_mtp_layer
from tests.models.variants import on_the_hub, variant, with_steady_mixtures

DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.0001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 56,
    "kv_lora_rank": 20,
    "max_position_embeddings": 128,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 24,
    "moe_layer_freq": 1,
    "n_group": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
    "pretraining_tp": 1,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 4, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 32, "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "torch_dtype": "float32",
    "use_cache": True,
    "v_head_dim": 16,
    "vocab_size": 101,
}  # fmt: skip
ON_THE_HUB = on_the_hub("mlp", "gate_proj", "up_proj", "down_proj")


def with_mtp_on_the_hub(tensors: Tensors) -> Tensors:
    return with_an_mtp_layer(ON_THE_HUB(tensors))


def deepseeks() -> Iterator[Tiny]:
    deepseek = partial(variant, DEEPSEEK_V3, tensors=ON_THE_HUB)
    yield deepseek("plain", {"rope_scaling": None})
    yield deepseek("YaRN, MTP layer", tensors=with_mtp_on_the_hub)
    moonlight = {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_scaling": None, "n_shared_experts": 2}
    yield deepseek("like Moonlight", {**moonlight, "rms_norm_eps": 1e-05}, stored_dtype=torch.bfloat16)
    # Biases only where a key bias changes more than all scores of a query equally: its gradient is else only noise.
    odd = {"attention_bias": True, "rope_interleave": False, "norm_topk_prob": False, "v_head_dim": 24}
    yield deepseek("biases, halves rotated, wide values", {**odd, "topk_group": 1, "num_experts_per_tok": 2})
    yield deepseek(
        "minimal config",
        {"first_k_dense_replace": 3, "num_hidden_layers": 4, "n_routed_experts": 16, "moe_intermediate_size": 8},
        absent=(
            "attention_bias", "attention_dropout", "aux_loss_alpha", "bos_token_id", "eos_token_id", "ep_size",
            "hidden_act", "initializer_range", "max_position_embeddings", "moe_layer_freq", "n_group",
            "n_shared_experts", "norm_topk_prob", "num_experts_per_tok", "num_nextn_predict_layers", "pretraining_tp",
            "rms_norm_eps", "rope_scaling", "rope_theta", "routed_scaling_factor", "scoring_func", "seq_aux",
            "topk_group", "topk_method", "use_cache",
        ),
    )  # fmt: skip
    uneven = {**DEEPSEEK_V3["rope_scaling"], "mscale": 0.7}
    yield variant(
        DEEPSEEK_V3, "saved by transformers",
        {"rope_scaling": uneven, "first_k_dense_replace": 0, "n_group": 2, "n_routed_experts": 4,
         "num_experts_per_tok": 4},
        by_transformers=True, shards=2,
    )  # fmt: skip
    stacked = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1}
    yield variant(DEEPSEEK_V3, "stacked experts", stacked, tensors=with_steady_mixtures)


CHECKPOINTS = list(deepseeks())
