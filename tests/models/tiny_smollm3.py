"""Tiny SmolLM3 checkpoints."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.models.tiny import HEAD, Tiny, without
from tests.models.variants import variant

SMOLLM3: dict[str, Any] = {
    "architectures": ["SmolLM3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 56,
    "layer_types": ["full_attention"] * 4,
    "max_position_embeddings": 128,
    "max_window_layers": 28,
    "mlp_bias": False,
    "model_type": "smollm3",
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0],
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "pretraining_tp": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "torch_dtype": "float32",
    "use_cache": False,
    "use_sliding_window": False,
    "vocab_size": 101,
}


smollm3 = partial(variant, SMOLLM3)


def smollm3s() -> Iterator[Tiny]:
    yield smollm3("plain, tied", tensors=without(HEAD))
    yield smollm3(
        "minimal config",
        {"num_attention_heads": 8},
        absent=(
            "attention_bias", "attention_dropout", "hidden_act", "initializer_range", "layer_types",
            "max_position_embeddings", "max_window_layers", "mlp_bias", "no_rope_layer_interval", "no_rope_layers",
            "num_key_value_heads", "pretraining_tp", "rms_norm_eps", "rope_scaling", "rope_theta", "sliding_window",
            "torch_dtype", "use_cache", "use_sliding_window",
        ),
        tensors=without(HEAD),
    )  # fmt: skip
    windowed = {"use_sliding_window": True, "sliding_window": 7, "tie_word_embeddings": False}
    yield smollm3(
        "sliding window in NoPE layers", {**windowed, "no_rope_layers": [0, 1, 1, 0]}, absent=("layer_types",)
    )
    yield smollm3(
        "NoPE in every second layer, sliding window, saved by transformers",
        {**windowed, "no_rope_layer_interval": 2, "mlp_bias": True},
        absent=("no_rope_layers", "layer_types"),
        stored_dtype=torch.bfloat16,
        by_transformers=True,
    )
    yield smollm3(
        "sliding window in a RoPE layer, extra flags",
        {
            **windowed,
            "layer_types": ["sliding_attention", "full_attention"],
            "no_rope_layers": [1, 0, 1, 1],
            "num_hidden_layers": 2,
            "num_key_value_heads": 1,
        },
    )
    # RoPE in all layers: without it a key bias shifts all scores of a query equally, and its gradient is only noise.
    yield smollm3("biases", {"attention_bias": True, "mlp_bias": True, "no_rope_layers": [1] * 4})


CHECKPOINTS = list(smollm3s())
