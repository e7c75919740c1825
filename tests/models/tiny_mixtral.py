"""Tiny Mixtral checkpoints."""

from collections.abc import Iterator
from functools import partial

import torch

from tests.models.tiny import Tiny
from tests.models.tiny_mistral import MISTRAL
from tests.models.variants import on_the_hub, variant, with_steady_mixtures

MIXTRAL = {
    **MISTRAL,
    "architectures": ["MixtralForCausalLM"],
    "head_dim": 8,
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_hidden_layers": 1,
    "num_local_experts": 4,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.02,
}
ON_THE_HUB = on_the_hub("block_sparse_moe", "w1", "w3", "w2")


def mixtrals() -> Iterator[Tiny]:
    mixtral = partial(variant, MIXTRAL, tensors=ON_THE_HUB)
    yield mixtral("plain")
    yield mixtral(
        "8x7B, minimal config",
        {"num_attention_heads": 8},
        absent=(
            "head_dim", "hidden_act", "initializer_range", "max_position_embeddings", "num_experts_per_tok",
            "num_key_value_heads", "num_local_experts", "output_router_logits", "rms_norm_eps", "rope_theta",
            "router_aux_loss_coef", "sliding_window", "tie_word_embeddings", "torch_dtype",
        ),
        stored_dtype=torch.bfloat16,
    )  # fmt: skip
    yield mixtral(
        "three experts per token, sliding window",
        {"num_experts_per_tok": 3, "sliding_window": 7, "num_key_value_heads": 1},
    )
    yield variant(MIXTRAL, "saved by transformers", {"num_experts_per_tok": 4}, by_transformers=True)
    stacked = {"num_local_experts": 5, "num_experts": 4, "router_jitter_noise": 0.3}
    yield variant(MIXTRAL, "stacked experts", stacked, tensors=with_steady_mixtures)
    balanced = {"output_router_logits": True, "router_aux_loss_coef": 3.0}
    yield mixtral("load-balancing loss", {**balanced, "num_hidden_layers": 2, "num_local_experts": 6, "head_dim": 16})


CHECKPOINTS = list(mixtrals())
