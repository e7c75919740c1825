"""Tiny LFM2 checkpoints with MoE."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.models.tiny import HEAD, Tensors, Tiny, without
from tests.models.variants import on_the_hub, variant

CONV, FULL = "conv", "full_attention"
LFM2_MOE: dict[str, Any] = {
    "architectures": ["Lfm2MoeForCausalLM"],
    "bos_token_id": 1,
    "conv_L_cache": 3,
    "conv_bias": False,
    "eos_token_id": 7,
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 40,
    "layer_types": [CONV, FULL, CONV],
    "max_position_embeddings": 128,
    "model_type": "lfm2_moe",
    "moe_intermediate_size": 24,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_dense_layers": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "rope_theta": 1000000.0,
    "routed_scaling_factor": 1.0,
    "torch_dtype": "float32",
    "use_cache": True,
    "use_expert_bias": True,
    "vocab_size": 101,
}


def in_files(tensors: Tensors) -> Tensors:
    """Splits the experts as files do, without the head."""
    named = {name.replace(".feed_forward.", ".mlp."): tensor for name, tensor in tensors.items()}
    split = on_the_hub("feed_forward", "w1", "w3", "w2")(named)
    return without(HEAD)({name.replace(".mlp.", ".feed_forward."): tensor for name, tensor in split.items()})


def lfms() -> Iterator[Tiny]:
    lfm = partial(variant, LFM2_MOE, tensors=in_files)
    yield lfm("as on the hub", {"torch_dtype": "bfloat16"}, stored_dtype=torch.bfloat16)
    yield lfm(
        "minimal config",
        {"num_hidden_layers": 4, "num_experts": 8, "num_attention_heads": 8, "layer_types": [CONV, CONV, FULL, CONV]},
        absent=(
            "conv_L_cache", "conv_bias", "max_position_embeddings", "norm_eps", "norm_topk_prob", "num_dense_layers",
            "num_experts_per_tok", "num_key_value_heads", "rope_theta", "routed_scaling_factor", "torch_dtype",
            "use_expert_bias",
        ),
    )  # fmt: skip
    yield lfm("saved by transformers", {"num_key_value_heads": 1}, shards=2, by_transformers=True)
    others = {"norm_topk_prob": False, "routed_scaling_factor": 2.5, "use_expert_bias": False, "rope_theta": 300.0}
    yield lfm("no bias, no normalization, only experts", {**others, "num_dense_layers": 0, "norm_eps": 0.01})
    modules = {"conv_bias": True, "conv_L_cache": 4, "tie_embedding": False, "layer_types": [FULL, CONV, CONV]}
    yield variant(LFM2_MOE, "biases, untied, in-memory layout", modules)


CHECKPOINTS = list(lfms())
