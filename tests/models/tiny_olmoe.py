"""Tiny OLMoE checkpoints."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.models.tiny import Tiny
from tests.models.variants import on_the_hub, variant, with_steady_mixtures

OLMOE: dict[str, Any] = {
    "architectures": ["OlmoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "clip_qkv": None,
    "eos_token_id": 50,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 24,
    "max_position_embeddings": 128,
    "model_type": "olmoe",
    "norm_topk_prob": False,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 1,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "pad_token_id": None,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "router_aux_loss_coef": 0.01,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
    "vocab_size": 101,
}
ON_THE_HUB = on_the_hub("mlp", "gate_proj", "up_proj", "down_proj")


def olmoes() -> Iterator[Tiny]:
    olmoe = partial(variant, OLMOE, tensors=ON_THE_HUB)
    yield olmoe("as on the hub", {"num_hidden_layers": 2}, stored_dtype=torch.bfloat16)
    yield olmoe(
        "minimal config",
        {"num_experts": 64, "pad_token_id": None},
        absent=(
            "attention_bias", "attention_dropout", "clip_qkv", "hidden_act", "initializer_range",
            "max_position_embeddings", "norm_topk_prob", "num_experts", "num_experts_per_tok", "num_key_value_heads",
            "output_router_logits", "rms_norm_eps", "rope_scaling", "rope_theta", "router_aux_loss_coef",
            "tie_word_embeddings", "torch_dtype",
        ),
    )  # fmt: skip
    yield olmoe("biases, grouped queries, renormalized", {
        "attention_bias": True, "num_key_value_heads": 2, "norm_topk_prob": True, "sliding_window": 5,
    })  # fmt: skip
    yield variant(OLMOE, "saved by transformers", {"num_experts": 3, "tie_word_embeddings": True}, by_transformers=True)
    stacked = {"num_local_experts": 5, "num_experts": 4}
    yield variant(OLMOE, "stacked experts", stacked, tensors=with_steady_mixtures)
    balanced = {"output_router_logits": True, "router_aux_loss_coef": 3.0, "num_experts_per_tok": 2}
    yield olmoe("load-balancing loss", {**balanced, "num_hidden_layers": 2})


CHECKPOINTS = list(olmoes())
