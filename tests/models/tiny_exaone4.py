"""Tiny EXAONE 4 checkpoints."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.models.tiny import HEAD, Tiny, without
from tests.models.variants import variant

EXAONE4: dict[str, Any] = {
    "architectures": ["Exaone4ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 61,
    "head_dim": 12,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 56,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "max_position_embeddings": 128,
    "model_type": "exaone4",
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 64,
        "rope_type": "llama3",
    },
    "rope_theta": 1000000,
    "sliding_window": 7,
    "sliding_window_pattern": "LLLG",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 101,
}  # fmt: skip


exaone4 = partial(variant, EXAONE4)


def exaone4s() -> Iterator[Tiny]:
    yield exaone4("as on the hub, 32B", stored_dtype=torch.bfloat16)
    yield exaone4(
        "as on the hub, 1.2B",
        {
            "layer_types": ["full_attention"] * 2, "num_hidden_layers": 2, "sliding_window": None,
            "sliding_window_pattern": None, "tie_word_embeddings": True,
        },
        stored_dtype=torch.bfloat16,
        tensors=without(HEAD),
    )  # fmt: skip
    yield exaone4(
        "minimal config",
        {"num_key_value_heads": 4},
        absent=(
            "attention_dropout", "head_dim", "hidden_act", "layer_types", "max_position_embeddings", "rms_norm_eps",
            "rope_scaling", "rope_theta", "sliding_window", "sliding_window_pattern", "tie_word_embeddings",
            "torch_dtype",
        ),
    )  # fmt: skip
    yield exaone4(
        "every second layer, saved by transformers",
        {"num_key_value_heads": 1, "sliding_window_pattern": 2, "num_hidden_layers": 2, "rope_scaling": None},
        absent=("layer_types",),
        by_transformers=True,
    )


CHECKPOINTS = list(exaone4s())
