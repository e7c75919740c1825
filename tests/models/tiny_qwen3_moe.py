"""Tiny Qwen3-MoE checkpoints."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.models.tiny import Tiny
from tests.models.variants import on_the_hub, variant, with_steady_mixtures

QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "decoder_sparse_step": 1,
    "eos_token_id": 2,
    "head_dim": 12,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 56,
    "max_position_embeddings": 128,
    "max_window_layers": 2,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": 5,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 101,
}
ON_THE_HUB = on_the_hub("mlp", "gate_proj", "up_proj", "down_proj")


def qwens() -> Iterator[Tiny]:
    qwen = partial(variant, QWEN3_MOE, tensors=ON_THE_HUB)
    yield qwen("plain")
    yield qwen(
        "minimal config",
        {"num_attention_heads": 8},
        absent=(
            "attention_bias", "decoder_sparse_step", "head_dim", "hidden_act", "initializer_range",
            "max_position_embeddings", "mlp_only_layers", "norm_topk_prob", "num_key_value_heads", "rms_norm_eps",
            "rope_theta", "sliding_window", "use_sliding_window",
        ),
        stored_dtype=torch.bfloat16,
    )  # fmt: skip
    some_layers = {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1]}
    yield qwen("sliding window, MoE in some layers", {**some_layers, "use_sliding_window": True})
    yield qwen("no MoE layer", {"mlp_only_layers": [0], "attention_bias": True, "num_experts_per_tok": 8})
    yield variant(QWEN3_MOE, "saved by transformers", {"num_experts": 3}, by_transformers=True, shards=2)
    stacked = {"num_local_experts": 8, "num_experts": 5, "mlp_only_layers": None}
    yield variant(QWEN3_MOE, "stacked experts", stacked, tensors=with_steady_mixtures)
    balanced = {"output_router_logits": True, "router_aux_loss_coef": 3.0}
    yield qwen(
        "load-balancing loss", {**balanced, "num_hidden_layers": 3, "mlp_only_layers": [0], "num_experts_per_tok": 2}
    )


CHECKPOINTS = list(qwens())
