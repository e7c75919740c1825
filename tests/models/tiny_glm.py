"""Tiny GLM-4 checkpoints."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.models.tiny import HEAD, Tiny, without
from tests.models.variants import variant

GLM: dict[str, Any] = {
    "architectures": ["GlmForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": [2, 5, 7],
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 56,
    "max_position_embeddings": 128,
    "model_type": "glm",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1.5625e-07,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
    "vocab_size": 101,
}
FEW_KEYS = (
    "attention_bias", "attention_dropout", "head_dim", "hidden_act", "initializer_range", "max_position_embeddings",
    "num_key_value_heads", "partial_rotary_factor", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "torch_dtype",
    "use_cache",
)  # fmt: skip


glm = partial(variant, GLM)


def glms() -> Iterator[Tiny]:
    yield glm("plain")
    yield glm("minimal config", {"hidden_size": 16}, absent=FEW_KEYS)
    yield glm(
        "no biases, a quarter of each head rotated, tied, bf16",
        {
            "attention_bias": False,
            "num_key_value_heads": 1,
            "partial_rotary_factor": 0.25,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
        },
        tensors=without(HEAD),
        stored_dtype=torch.bfloat16,
    )
    linear = {"rope_scaling": {"type": "linear", "factor": 3.0}, "rope_theta": 500000.0}
    yield glm("linear, saved by transformers", linear, shards=2, by_transformers=True)


CHECKPOINTS = list(glms())
