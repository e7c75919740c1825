"""Tiny text-only Gemma 4 checkpoints."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.models.tiny import HEAD, Tensors, Tiny, without
from tests.models.variants import variant, with_steady_mixtures

FULL, SLIDING = "full_attention", "sliding_attention"
GEMMA4_TEXT: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_k_eq_v": False,
    "bos_token_id": 2,
    "enable_moe_block": False,
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 32,
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 32,
    "hidden_size_per_layer_input": 8,
    "initializer_range": 0.02,
    "intermediate_size": 56,
    "layer_types": [SLIDING, FULL, SLIDING, FULL],
    "max_position_embeddings": 128,
    "model_type": "gemma4_text",
    "moe_intermediate_size": None,
    "num_attention_heads": 4,
    "num_experts": None,
    "num_global_key_value_heads": None,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 2,
    "pad_token_id": None,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        FULL: {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        SLIDING: {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 7,
    "tie_word_embeddings": True,
    "top_k_experts": None,
    "torch_dtype": "float32",
    "use_bidirectional_attention": None,
    "use_cache": True,
    "use_double_wide_mlp": True,
    "vocab_size": 101,
    "vocab_size_per_layer_input": 101,
}
MIXTURE = {
    "enable_moe_block": True,
    "hidden_size_per_layer_input": 0,
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_kv_shared_layers": 0,
    "top_k_experts": 3,
}
TIED = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}


def with_unused_projections(tensors: Tensors) -> Tensors:
    """Adds the projections to keys and values that older files have in the layers that share them."""
    shared = {
        name: t for name, t in tensors.items() if "layers.1.self_attn.k_" in name or "layers.1.self_attn.v_" in name
    }
    return {**tensors, **{name.replace("layers.1.", "layers.3."): t.clone() for name, t in shared.items()}}


def without_head(tensors: Tensors) -> Tensors:
    return without(HEAD)(tensors)


def gemma4s() -> Iterator[Tiny]:
    gemma4 = partial(variant, GEMMA4_TEXT, tensors=without_head)
    yield gemma4("as on the hub", {"torch_dtype": "bfloat16"}, stored_dtype=torch.bfloat16)
    yield gemma4(
        "without per-layer embeddings and sharing", {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
    )
    yield gemma4("keys as values", {**TIED, "use_double_wide_mlp": False})
    steady = {"tensors": lambda tensors: with_steady_mixtures(without_head(tensors))}
    yield gemma4("mixture", {**MIXTURE, **TIED}, **steady)
    yield gemma4(
        "mixture, per-layer embeddings", {**MIXTURE, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2}
    )
    rope = {
        FULL: {"factor": 2.0, "partial_rotary_factor": 0.5, "rope_theta": 300.0, "rope_type": "proportional"},
        SLIDING: {"rope_theta": 70.0, "rope_type": "default"},
    }
    yield gemma4(
        "biases, untied, other rotations",
        {
            "attention_bias": True,
            "num_key_value_heads": 1,
            "rms_norm_eps": 1e-3,
            "rope_parameters": rope,
            "tie_word_embeddings": False,
        },
        tensors=dict,
    )
    yield gemma4(
        "linear scaling",
        {"rope_parameters": {**rope, FULL: {"factor": 8.0, "rope_theta": 50.0, "rope_type": "linear"}}},
    )
    yield gemma4(
        "minimal config",
        {"num_hidden_layers": 7},
        absent=(
            "attention_bias", "attention_dropout", "attention_k_eq_v", "enable_moe_block", "final_logit_softcapping",
            "hidden_activation", "initializer_range", "layer_types", "max_position_embeddings",
            "moe_intermediate_size", "num_experts", "num_global_key_value_heads", "num_key_value_heads",
            "num_kv_shared_layers", "rms_norm_eps", "rope_parameters", "top_k_experts", "torch_dtype",
            "use_bidirectional_attention", "use_double_wide_mlp",
        ),
    )  # fmt: skip
    yield gemma4("saved by transformers", TIED, shards=2, by_transformers=True)
    yield gemma4("mixture, saved by transformers", {**MIXTURE, "global_head_dim": 16}, by_transformers=True)
    both = {"use_bidirectional_attention": "all", "sliding_window": 8}
    yield gemma4("both directions", both)
    yield gemma4("both directions, saved by transformers", both, by_transformers=True)
    yield gemma4(
        "unused projections, images in both directions",
        {"use_bidirectional_attention": "vision", "final_logit_softcapping": None},
        tensors=lambda tensors: with_unused_projections(without_head(tensors)),
    )


CHECKPOINTS = list(gemma4s())
