"""Tiny Mellum checkpoints."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.models.tiny import HEAD, Tiny, without
from tests.models.variants import on_the_hub, variant, with_steady_mixtures

FULL, SLIDING = "full_attention", "sliding_attention"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0}
MELLUM: dict[str, Any] = {
    "architectures": ["MellumForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "head_dim": 12,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 56,
    "layer_types": [SLIDING, FULL],
    "max_position_embeddings": 128,
    "mlp_layer_types": ["sparse", "sparse"],
    "model_type": "mellum",
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "pad_token_id": None,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        FULL: {**YARN, "rope_theta": 500000.0},
        SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    },
    "router_aux_loss_coef": 0.001,
    "sliding_window": 5,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
    "vocab_size": 101,
}
ON_THE_HUB = on_the_hub("mlp", "gate_proj", "up_proj", "down_proj")


def mellums() -> Iterator[Tiny]:
    mellum = partial(variant, MELLUM, tensors=ON_THE_HUB)
    yield mellum("as on the hub", {"torch_dtype": "bfloat16"}, stored_dtype=torch.bfloat16)
    yield mellum(
        "minimal config",
        {"num_attention_heads": 8, "num_hidden_layers": 1},
        absent=(
            "attention_bias", "attention_dropout", "head_dim", "hidden_act", "initializer_range", "layer_types",
            "max_position_embeddings", "mlp_layer_types", "norm_topk_prob", "num_experts_per_tok",
            "num_key_value_heads", "output_router_logits", "rms_norm_eps", "rope_parameters", "router_aux_loss_coef",
            "sliding_window", "tie_word_embeddings", "torch_dtype",
        ),
    )  # fmt: skip
    dense = {"mlp_layer_types": ["dense", "sparse"], "attention_bias": True, "norm_topk_prob": False}
    thetas = {FULL: {"rope_type": "default", "rope_theta": 300.0}, SLIDING: {"rope_theta": 70.0}}
    yield mellum("biases, a dense layer, two thetas", {**dense, "rope_parameters": thetas})
    yield variant(MELLUM, "saved by transformers", {"num_experts": 3}, by_transformers=True)
    stacked = {"num_local_experts": 5, "tie_word_embeddings": True}
    yield variant(
        MELLUM,
        "stacked experts, tied",
        stacked,
        ("num_experts",),
        tensors=lambda t: without(HEAD)(with_steady_mixtures(t)),
    )
    balanced = {"output_router_logits": True, "router_aux_loss_coef": 3.0, "num_experts_per_tok": 2}
    yield mellum("load-balancing loss", {**balanced, "layer_types": [FULL, FULL]})


CHECKPOINTS = list(mellums())
