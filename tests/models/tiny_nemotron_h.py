"""Tiny Nemotron-H checkpoints."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.models.tiny import Tensors, Tiny
from tests.models.variants import variant, with_steady_mixtures

NEMOTRON: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "chunk_size": 8,
    "conv_kernel": 4,
    "eos_token_id": 2,
    "expand": 2,
    "head_dim": 8,
    "hidden_size": 32,
    "hybrid_override_pattern": "ME*ME-",
    "initializer_range": 0.02,
    "intermediate_size": 40,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 12,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 4,
    "mamba_proj_bias": False,
    "max_position_embeddings": 128,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h",
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 20,
    "n_group": 1,
    "n_groups": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "residual_in_fp32": False,
    "routed_scaling_factor": 2.5,
    "ssm_state_size": 16,
    "tie_word_embeddings": False,
    "time_step_limit": [0.0, math.inf],
    "time_step_min": 0.001,
    "topk_group": 1,
    "torch_dtype": "float32",
    "use_bias": False,
    "use_conv_bias": True,
    "vocab_size": 101,
}


def in_files(tensors: Tensors) -> Tensors:
    """The tensors as on the hub: experts one by one, another prefix, and a layer for multi-token prediction."""
    dtype = next(iter(tensors.values())).dtype
    split: Tensors = {"mtp.layers.0.mixer.experts.1.up_proj.weight": torch.rand(4, 8, dtype=dtype)}
    for name, tensor in with_steady_mixtures(tensors).items():
        layer, stacked, projection = name.replace("model.", "backbone.", 1).partition(".experts.")
        if not stacked or layer.endswith("shared_experts"):
            split[layer + stacked + projection] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            split[f"{layer}.experts.{expert}.{projection}.weight"] = matrix.clone()
    return split


def with_fp32_states(tensors: Tensors) -> Tensors:
    """Stores in fp32 what decides the states."""
    wide = (".A_log", ".D", ".dt_bias")
    return {name: tensor.float() if name.endswith(wide) else tensor for name, tensor in in_files(tensors).items()}


def nemotrons() -> Iterator[Tiny]:
    nemotron = partial(variant, NEMOTRON, tensors=in_files)
    yield nemotron("as on the hub")
    yield nemotron("in bf16", {"torch_dtype": "bfloat16"}, tensors=with_fp32_states, stored_dtype=torch.bfloat16)
    yield nemotron(
        "minimal config",
        {"num_attention_heads": 8},
        absent=(
            "attention_bias", "conv_kernel", "hybrid_override_pattern", "layer_norm_epsilon", "mamba_hidden_act",
            "max_position_embeddings", "mlp_bias", "mlp_hidden_act", "n_group", "n_shared_experts", "norm_topk_prob",
            "num_experts_per_tok", "num_hidden_layers", "residual_in_fp32", "routed_scaling_factor",
            "tie_word_embeddings", "time_step_limit", "time_step_min", "topk_group", "use_bias", "use_conv_bias",
        ),
    )  # fmt: skip
    kinds = ["moe", "linear_attention", "full_attention", "mlp"]
    latent = {"moe_latent_size": 16, "mlp_bias": True, "use_bias": True, "use_conv_bias": False, "head_dim": 12}
    name = "latent experts, biases, in-memory layout"
    yield variant(NEMOTRON, name, {**latent, "layers_block_type": kinds}, tensors=with_steady_mixtures)
    groups = {"n_group": 2, "n_routed_experts": 8, "norm_topk_prob": False, "conv_kernel": 3, "n_groups": 4}
    yield nemotron("groups of experts, saved by transformers", groups, by_transformers=True, shards=2)
    numbers = {"layer_norm_epsilon": 0.01, "time_step_min": 0.3, "num_key_value_heads": 1, "mamba_num_heads": 6}
    dense = {"hybrid_override_pattern": "M-*M", "num_hidden_layers": 4, "mamba_n_groups": 3}
    yield nemotron("without experts, larger steps", {**numbers, **dense}, absent=("n_groups",))


CHECKPOINTS = list(nemotrons())
