"""Tiny Granite checkpoints."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.models.tiny import HEAD, Tiny, without
from tests.models.variants import variant

GRANITE: dict[str, Any] = {
    "architectures": ["GraniteForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.1,
    "attention_multiplier": 0.17,
    "bos_token_id": 0,
    "embedding_multiplier": 12,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 56,
    "logits_scaling": 10,
    "max_position_embeddings": 128,
    "mlp_bias": False,
    "model_type": "granite",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "use_cache": True,
    "vocab_size": 101,
}


granite = partial(variant, GRANITE, tensors=without(HEAD))


def granites() -> Iterator[Tiny]:
    yield granite("as on the hub", {"torch_dtype": "bfloat16"}, stored_dtype=torch.bfloat16)
    yield granite(
        "minimal config",
        absent=(
            "attention_bias", "attention_multiplier", "embedding_multiplier", "hidden_act", "logits_scaling",
            "max_position_embeddings", "mlp_bias", "num_key_value_heads", "residual_multiplier", "rms_norm_eps",
            "rope_scaling", "rope_theta", "tie_word_embeddings", "torch_dtype",
        ),
        tensors=dict,
    )  # fmt: skip
    yield granite("saved by transformers", {"num_key_value_heads": 1}, shards=2, by_transformers=True)
    yield granite(
        "biases, untied, rope scaling",
        {
            "attention_bias": True,
            "head_dim": 12,
            "mlp_bias": True,
            "rope_scaling": {"type": "dynamic", "factor": 2.0},
            "max_position_embeddings": 32,
            "tie_word_embeddings": False,
        },
        tensors=dict,
    )


CHECKPOINTS = list(granites())
