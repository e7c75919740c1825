"""Tiny nanochat checkpoints."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.models.tiny import HEAD, Tiny, without
from tests.models.variants import variant

NANOCHAT: dict[str, Any] = {
    "architectures": ["NanoChatForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "dtype": "bfloat16",
    "eos_token_id": 1,
    "final_logit_softcapping": 3.0,
    "hidden_act": "relu2",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 56,
    "max_position_embeddings": 128,
    "model_type": "nanochat",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "pad_token_id": None,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 101,
}


nanochat = partial(variant, NANOCHAT)


def nanochats() -> Iterator[Tiny]:
    yield nanochat("as on the hub", stored_dtype=torch.bfloat16)
    yield nanochat(
        "minimal config",
        absent=(
            "attention_bias", "attention_dropout", "dtype", "final_logit_softcapping", "hidden_act",
            "max_position_embeddings", "num_key_value_heads", "rms_norm_eps", "rope_parameters", "tie_word_embeddings",
        ),
    )  # fmt: skip
    yield nanochat(
        "biases, tied, saved by transformers",
        {"attention_bias": True, "num_key_value_heads": 1, "tie_word_embeddings": True},
        by_transformers=True,
    )
    yield nanochat(
        "no soft cap, tied, rope scaling",
        {
            "final_logit_softcapping": None, "head_dim": 12, "num_key_value_heads": 2, "tie_word_embeddings": True,
            "rope_parameters": {"factor": 4.0, "rope_theta": 300.0, "rope_type": "linear"},
        },
        tensors=without(HEAD),
    )  # fmt: skip


CHECKPOINTS = list(nanochats())
