"""Tiny Mistral checkpoints."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.models.tiny import HEAD, Tiny, without
from tests.models.variants import variant

MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 12,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 56,
    "max_position_embeddings": 128,
    "model_type": "mistral",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
    "vocab_size": 101,
}
YARN = {"rope_type": "yarn", "rope_theta": 300.0, "factor": 4.0, "original_max_position_embeddings": 32}


def mistrals() -> Iterator[Tiny]:
    mistral = partial(variant, MISTRAL)
    yield mistral("plain")
    yield mistral(
        "7B, minimal config",
        {"num_attention_heads": 16, "head_dim": 4},
        absent=(
            "attention_dropout", "hidden_act", "initializer_range", "max_position_embeddings", "num_key_value_heads",
            "rms_norm_eps", "rope_theta", "sliding_window", "tie_word_embeddings", "torch_dtype", "use_cache",
        ),
        stored_dtype=torch.bfloat16,
    )  # fmt: skip
    yield mistral("sliding window", {"sliding_window": 7, "num_key_value_heads": 1}, absent=("head_dim",))
    yield mistral(
        "sliding window, tied, transformers 5 spelling",
        {"rope_parameters": YARN, "dtype": "float32", "sliding_window": 16, "tie_word_embeddings": True},
        absent=("rope_theta", "torch_dtype"),
        tensors=without(HEAD),
    )
    yield mistral("sliding window, saved by transformers", {"sliding_window": 2}, by_transformers=True, shards=2)
    layer_types = ["full_attention", "sliding_attention"]
    yield mistral("layer types", {"sliding_window": 7, "layer_types": layer_types})


CHECKPOINTS = list(mistrals())
