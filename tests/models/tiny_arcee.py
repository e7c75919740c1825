"""Tiny Arcee checkpoints."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.models.tiny import HEAD, Tiny, without
from tests.models.variants import variant

ARCEE: dict[str, Any] = {
    "architectures": ["ArceeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 12,
    "hidden_act": "relu2",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 56,
    "max_position_embeddings": 128,
    "mlp_bias": False,
    "model_type": "arcee",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 20.0, "mscale": 1.0, "original_max_position_embeddings": 32,
        "rope_type": "yarn",
    },
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 101,
}  # fmt: skip


arcee = partial(variant, ARCEE)


def arcees() -> Iterator[Tiny]:
    yield arcee("as on the hub", stored_dtype=torch.bfloat16)
    yield arcee(
        "minimal config",
        absent=(
            "attention_bias", "attention_dropout", "head_dim", "hidden_act", "max_position_embeddings", "mlp_bias",
            "num_key_value_heads", "rms_norm_eps", "rope_scaling", "rope_theta", "tie_word_embeddings", "torch_dtype",
        ),
    )  # fmt: skip
    yield arcee(
        "biases, tied, saved by transformers",
        {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1, "tie_word_embeddings": True},
        by_transformers=True,
    )
    yield arcee(
        "tied, no rope scaling",
        {"mlp_bias": True, "rope_scaling": None, "tie_word_embeddings": True, "torch_dtype": "float32"},
        tensors=without(HEAD),
    )


CHECKPOINTS = list(arcees())
