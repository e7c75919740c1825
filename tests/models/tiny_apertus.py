"""Tiny Apertus checkpoints."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.models.tiny import HEAD, Tiny, without
from tests.models.variants import variant

APERTUS: dict[str, Any] = {
    "architectures": ["ApertusForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 68,
    "hidden_act": "xielu",
    "hidden_dropout": 0.0,
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 56,
    "max_position_embeddings": 128,
    "mlp_bias": False,
    "model_type": "apertus",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "post_norm": False,
    "qk_norm": True,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 64,
        "rope_type": "llama3",
    },
    "rope_theta": 12000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 101,
}  # fmt: skip


apertus = partial(variant, APERTUS)


def apertuses() -> Iterator[Tiny]:
    yield apertus("as on the hub", stored_dtype=torch.bfloat16)
    yield apertus(
        "minimal config",
        absent=(
            "attention_bias", "attention_dropout", "hidden_act", "hidden_dropout", "max_position_embeddings",
            "mlp_bias", "num_key_value_heads", "post_norm", "qk_norm", "rms_norm_eps", "rope_scaling", "rope_theta",
            "tie_word_embeddings", "torch_dtype",
        ),
    )  # fmt: skip
    yield apertus(
        "biases, tied, saved by transformers",
        {"attention_bias": True, "num_key_value_heads": 1, "tie_word_embeddings": True},
        by_transformers=True,
    )
    yield apertus(
        "tied, no rope scaling",
        {
            "rope_scaling": {"rope_type": "default"}, "rope_theta": 500000.0, "tie_word_embeddings": True,
            "torch_dtype": "float32",
        },
        tensors=without(HEAD),
    )  # fmt: skip


CHECKPOINTS = list(apertuses())
