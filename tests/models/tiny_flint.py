"""Tiny Flint checkpoints."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.models.tiny import Tensors, Tiny
from tests.models.tiny_qwen3_moe import ON_THE_HUB, QWEN3_MOE
from tests.models.variants import variant, with_steady_mixtures

FULL, SLIDING = "full_attention", "sliding_attention"
FLINT: dict[str, Any] = {
    **{name: value for name, value in QWEN3_MOE.items() if name not in ("max_window_layers", "use_sliding_window")},
    "architectures": ["FlintForCausalLM"],
    "layer_types": [FULL, SLIDING],
    "mlp_only_layers": [0],
    "model_type": "flint",
    "num_hidden_layers": 2,
    "shared_expert_intermediate_size": 40,
}


def with_offsets(tensors: Tensors) -> Tensors:
    """The names in files."""
    return {name.replace(".sinks", ".softmax_offset"): tensor for name, tensor in ON_THE_HUB(tensors).items()}


def flints() -> Iterator[Tiny]:
    flint = partial(variant, FLINT, tensors=with_offsets)
    odd = {"attention_bias": True, "norm_topk_prob": False, "mlp_only_layers": [], "decoder_sparse_step": 2}
    yield flint("biases, MoE in every second layer", odd)
    yield flint("as on the hub", {"torch_dtype": "bfloat16"}, stored_dtype=torch.bfloat16)
    yield flint(
        "minimal config",
        {"num_attention_heads": 8, "num_hidden_layers": 3},
        absent=(
            "attention_bias", "attention_dropout", "decoder_sparse_step", "head_dim", "hidden_act",
            "initializer_range", "layer_types", "max_position_embeddings", "mlp_only_layers", "norm_topk_prob",
            "num_experts_per_tok", "num_key_value_heads", "output_router_logits", "rms_norm_eps", "rope_scaling",
            "rope_theta", "router_aux_loss_coef", "shared_expert_intermediate_size", "sliding_window",
            "tie_word_embeddings", "torch_dtype",
        ),
    )  # fmt: skip
    yield variant(FLINT, "saved by transformers", {"num_experts": 3}, by_transformers=True)
    yield variant(FLINT, "stacked experts", {"layer_types": [SLIDING, FULL]}, tensors=with_steady_mixtures)
    balanced = {"output_router_logits": True, "router_aux_loss_coef": 3.0, "num_experts_per_tok": 2}
    yield flint("load-balancing loss", {**balanced, "mlp_only_layers": []})


CHECKPOINTS = list(flints())
