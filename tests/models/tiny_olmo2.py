"""Tiny OLMo 2 checkpoints."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.models.tiny import HEAD, Tiny, without
from tests.models.variants import variant

OLMO2: dict[str, Any] = {
    "architectures": ["Olmo2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": 100,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 56,
    "max_position_embeddings": 128,
    "model_type": "olmo2",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pad_token_id": None,  # transformers gives the embedding of the padding token no gradient
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
    "vocab_size": 101,
}


olmo2 = partial(variant, OLMO2)


def olmo2s() -> Iterator[Tiny]:
    yield olmo2("as on the hub", {"torch_dtype": "bfloat16"}, stored_dtype=torch.bfloat16)
    yield olmo2(
        "minimal config",
        absent=(
            "attention_bias", "hidden_act", "max_position_embeddings", "num_key_value_heads", "rms_norm_eps",
            "rope_scaling", "rope_theta", "tie_word_embeddings", "torch_dtype",
        ),
    )  # fmt: skip
    yield olmo2("saved by transformers", shards=2, by_transformers=True)
    yield olmo2(
        "biases, tied, one key-value head, rope scaling",
        {
            "attention_bias": True,
            "head_dim": 12,
            "num_key_value_heads": 1,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
            "tie_word_embeddings": True,
        },
        tensors=without(HEAD),
    )


CHECKPOINTS = list(olmo2s())
