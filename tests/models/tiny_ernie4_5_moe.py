"""Tiny ERNIE 4.5 MoE checkpoints."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.models.tiny import HEAD, Tensors, Tiny
from tests.models.variants import on_the_hub, variant, with_steady_mixtures

ERNIE4_5_MOE: dict[str, Any] = {
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 56,
    "max_position_embeddings": 128,
    "model_type": "ernie4_5_moe",
    "moe_gate": "topk",
    "moe_intermediate_size": 24,
    "moe_k": 3,
    "moe_layer_end_index": 1,
    "moe_layer_interval": 1,
    "moe_layer_start_index": 1,
    "moe_norm_min": 1e-12,
    "moe_num_experts": 8,
    "moe_num_shared_experts": 2,
    "moe_use_aux_free": True,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "router_aux_loss_coef": 0.1,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_bias": False,
    "use_cache": False,
    "vocab_size": 101,
}
ON_THE_HUB = on_the_hub("mlp", "gate_proj", "up_proj", "down_proj")


def hub(tensors: Tensors) -> Tensors:
    split = ON_THE_HUB(tensors)
    names = {name: name.replace(".gate.moe_statics.", ".moe_statics.") for name in split if name != HEAD}
    return {new: split[name] for name, new in names.items()}


def with_mtp(tensors: Tensors) -> Tensors:
    return {**hub(tensors), "model.mtp_linear_proj.0.weight": torch.randn(32, 64).bfloat16()}


def ernie4_5_moes() -> Iterator[Tiny]:
    ernie = partial(variant, ERNIE4_5_MOE, tensors=hub)
    stacked = {"moe_layer_start_index": 0, "tie_word_embeddings": False, "torch_dtype": "float32"}
    yield variant(ERNIE4_5_MOE, "stacked experts", stacked, tensors=with_steady_mixtures)
    yield ernie("as on the hub", stored_dtype=torch.bfloat16, tensors=with_mtp)
    yield ernie(
        "minimal config",
        {"num_attention_heads": 8, "moe_num_experts": 12},
        absent=(
            "hidden_act", "max_position_embeddings", "moe_gate", "moe_k", "moe_layer_end_index", "moe_layer_interval",
            "moe_layer_start_index", "moe_norm_min", "moe_num_shared_experts", "moe_use_aux_free",
            "num_key_value_heads", "rms_norm_eps", "rope_scaling", "rope_theta", "router_aux_loss_coef",
            "tie_word_embeddings", "torch_dtype", "use_bias",
        ),
    )  # fmt: skip
    yield ernie(
        "no shared experts, aux loss",
        {
            "moe_num_shared_experts": 0, "moe_layer_interval": 2, "moe_layer_start_index": 0, "moe_layer_end_index": -1,
            "num_hidden_layers": 3, "output_router_logits": True, "torch_dtype": "float32",
        },
    )  # fmt: skip
    yield variant(
        ERNIE4_5_MOE,
        "untied, saved by transformers",
        {"tie_word_embeddings": False},
        by_transformers=True,
        stored_dtype=torch.bfloat16,
    )
    yield ernie("biases", {"use_bias": True, "torch_dtype": "float32"})
    yield ernie("biases, untied", {"use_bias": True, "tie_word_embeddings": False}, by_transformers=True)


CHECKPOINTS = list(ernie4_5_moes())
