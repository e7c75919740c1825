"""Tiny Qwen3 checkpoints."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.models.tiny import HEAD, Tiny, without
from tests.models.variants import variant

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 12,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 56,
    "max_position_embeddings": 128,
    "max_window_layers": 1,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 101,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


qwen3 = partial(variant, QWEN3)


def qwen3s() -> Iterator[Tiny]:
    yield qwen3("plain")
    yield qwen3(
        "minimal config",
        {"hidden_size": 16, "num_attention_heads": 32},
        absent=(
            "attention_bias", "attention_dropout", "head_dim", "hidden_act", "initializer_range",
            "max_position_embeddings", "max_window_layers", "num_key_value_heads", "rms_norm_eps", "rope_scaling",
            "rope_theta", "sliding_window", "tie_word_embeddings", "torch_dtype", "use_cache", "use_sliding_window",
        ),
    )  # fmt: skip
    yield qwen3("tied, bf16, one key-value head", {
        "num_key_value_heads": 1, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    }, tensors=without(HEAD), stored_dtype=torch.bfloat16)  # fmt: skip
    windowed = {"use_sliding_window": True, "sliding_window": 7, "attention_bias": True}
    yield qwen3("biases, sliding window", windowed)
    yield qwen3("biases, sliding window, saved by transformers", windowed, shards=2, by_transformers=True)
    yield qwen3("yarn", {"rope_scaling": YARN})


CHECKPOINTS = list(qwen3s())
