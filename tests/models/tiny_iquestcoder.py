"""Tiny IQuest-Coder checkpoints."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.models.tiny import HEAD, Tiny, without
from tests.models.variants import variant

IQUEST: dict[str, Any] = {
    "architectures": ["IQuestCoderForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "clip_qkv": None,
    "eos_token_id": 2,
    "head_dim": 12,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 56,
    "max_position_embeddings": 128,
    "mlp_bias": False,
    "model_type": "iquestcoder",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 101,
}


def iquestcoders() -> Iterator[Tiny]:
    iquest = partial(variant, IQUEST)
    yield iquest("as on the hub", stored_dtype=torch.bfloat16)
    yield iquest(
        "minimal config",
        {"num_attention_heads": 8},
        absent=(
            "attention_bias", "attention_dropout", "clip_qkv", "head_dim", "hidden_act", "initializer_range",
            "max_position_embeddings", "mlp_bias", "num_key_value_heads", "rms_norm_eps", "rope_theta",
            "tie_word_embeddings", "torch_dtype", "use_sliding_window",
        ),
    )  # fmt: skip
    yield iquest(
        "biases, tied",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "torch_dtype": "float32"},
        tensors=without(HEAD),
    )
    yield iquest("saved by transformers", {"num_key_value_heads": 1}, by_transformers=True)


CHECKPOINTS = list(iquestcoders())
