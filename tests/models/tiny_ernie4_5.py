"""Tiny dense ERNIE 4.5 checkpoints."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.models.tiny import HEAD, Tiny, without
from tests.models.variants import variant

ERNIE4_5: dict[str, Any] = {
    "architectures": ["Ernie4_5ForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 12,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 56,
    "max_position_embeddings": 128,
    "model_type": "ernie4_5",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_bias": False,
    "use_cache": False,
    "vocab_size": 101,
}


ernie4_5 = partial(variant, ERNIE4_5)


def ernie4_5s() -> Iterator[Tiny]:
    yield ernie4_5("as on the hub", stored_dtype=torch.bfloat16, tensors=without(HEAD))
    yield ernie4_5(
        "minimal config",
        absent=(
            "head_dim", "hidden_act", "max_position_embeddings", "num_key_value_heads", "rms_norm_eps", "rope_scaling",
            "rope_theta", "tie_word_embeddings", "torch_dtype", "use_bias",
        ),
        tensors=without(HEAD),
    )  # fmt: skip
    yield ernie4_5(
        "biases, untied, saved by transformers",
        {"num_key_value_heads": 1, "tie_word_embeddings": False, "use_bias": True},
        by_transformers=True,
    )
    yield ernie4_5(
        "rope scaling, no head_dim",
        {
            "head_dim": None, "rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 300.0,
            "torch_dtype": "float32", "use_bias": True,
        },
        tensors=without(HEAD),
    )  # fmt: skip


CHECKPOINTS = list(ernie4_5s())
