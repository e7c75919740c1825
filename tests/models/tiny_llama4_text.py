"""Tiny checkpoints of Llama 4's text model."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.models.tiny import HEAD, Tensors, Tiny, without
from tests.models.variants import variant

CHUNKED, FULL = "chunked_attention", "full_attention"
LLAMA4: dict[str, Any] = {
    "architectures": ["Llama4ForCausalLM"],
    "attention_bias": False,
    "attention_chunk_size": 7,
    "attention_dropout": 0.0,
    "attn_scale": 0.1,
    "attn_temperature_tuning": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "floor_scale": 8,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "interleave_moe_layer_step": 1,
    "intermediate_size": 24,
    "intermediate_size_mlp": 56,
    "max_position_embeddings": 128,
    "model_type": "llama4_text",
    "no_rope_layers": [1, 0],
    "num_attention_heads": 4,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "pad_token_id": None,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
    "use_qk_norm": True,
    "vocab_size": 101,
}


def with_small_experts(tensors: Tensors) -> Tensors:
    """Scales the experts' outputs down, so that rounding changes little where it changes the choice of experts."""
    for name, tensor in tensors.items():
        if name.endswith(".experts.down_proj"):
            tensor *= 0.25
    return tensors


def llamas() -> Iterator[Tiny]:
    llama = partial(variant, LLAMA4)
    llama3 = {
        "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 32,
        "rope_type": "llama3",
    }  # fmt: skip
    yield llama("like Scout", {"rope_parameters": {**llama3, "rope_theta": 500000.0}}, absent=("rope_theta",))
    yield llama(
        "minimal config",
        {"num_hidden_layers": 4},
        absent=(
            "attention_bias", "attention_dropout", "attention_chunk_size", "attn_scale", "attn_temperature_tuning",
            "floor_scale", "hidden_act", "initializer_range", "interleave_moe_layer_step", "max_position_embeddings",
            "no_rope_layers", "num_experts_per_tok", "rms_norm_eps", "rope_theta", "torch_dtype", "use_qk_norm",
        ),
        tensors=with_small_experts,
        stored_dtype=torch.bfloat16,
    )  # fmt: skip
    maverick = {"interleave_moe_layer_step": 2, "use_qk_norm": False, "attn_temperature_tuning": False}
    yield llama(
        "like Maverick, saved by transformers",
        {**maverick, "no_rope_layers": [], "no_rope_layer_interval": 2},
        by_transformers=True,
        shards=2,
    )
    # Without rotary positions, a key bias changes all scores of a query equally: its gradient is only noise.
    yield llama(
        "several experts, biases, tied",
        {
            "num_experts_per_tok": 3, "no_rope_layers": [1, 1], "attention_bias": True, "tie_word_embeddings": True,
            "num_key_value_heads": 1, "rope_theta": 300.0, "rms_norm_eps": 0.01,
        },
        tensors=without(HEAD),
    )  # fmt: skip
    types = {"layer_types": [FULL, CHUNKED, CHUNKED], "moe_layers": [1], "no_rope_layers": [1, 0, 1]}
    types |= {"attn_scale": 0.7, "floor_scale": 5}
    yield llama("layer types, full attention with positions", {**types, "num_hidden_layers": 3})


CHECKPOINTS = list(llamas())
