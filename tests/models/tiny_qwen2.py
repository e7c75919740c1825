"""Tiny Qwen2 checkpoints."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.models.tiny import HEAD, Tiny, without
from tests.models.variants import variant

QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 56,
    "max_position_embeddings": 128,
    "max_window_layers": 1,
    "model_type": "qwen2",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 7,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 101,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


qwen2 = partial(variant, QWEN2)


def qwen2s() -> Iterator[Tiny]:
    yield qwen2("sliding window disabled")
    yield qwen2(
        "minimal config",
        {"hidden_size": 64, "num_attention_heads": 32},
        absent=(
            "attention_dropout", "bos_token_id", "eos_token_id", "hidden_act", "initializer_range",
            "max_position_embeddings", "max_window_layers", "num_key_value_heads", "rms_norm_eps", "rope_theta",
            "sliding_window", "tie_word_embeddings", "torch_dtype", "use_cache", "use_sliding_window",
        ),
    )  # fmt: skip
    yield qwen2("sliding window from the second layer", {"use_sliding_window": True, "num_key_value_heads": None})
    yield qwen2(
        "sliding window in all layers", {"use_sliding_window": True, "max_window_layers": 0, "num_key_value_heads": 1}
    )
    yield qwen2("sliding window, saved by transformers", {"use_sliding_window": True}, shards=3, by_transformers=True)
    yield qwen2(
        "layer types, transformers 5 spelling",
        {
            "use_sliding_window": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
            "dtype": "float32",
        },
        absent=("rope_theta", "torch_dtype"),
    )
    tied = {"rope_scaling": YARN, "tie_word_embeddings": True, "torch_dtype": "bfloat16"}
    yield qwen2("yarn, tied, bf16", tied, tensors=without(HEAD), stored_dtype=torch.bfloat16)


CHECKPOINTS = list(qwen2s())
