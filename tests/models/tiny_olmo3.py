"""Tiny OLMo 3 checkpoints."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.models.tiny import HEAD, Tiny, without
from tests.models.tiny_olmo2 import OLMO2
from tests.models.variants import variant

OLMO3: dict[str, Any] = {
    **OLMO2,
    "architectures": ["Olmo3ForCausalLM"],
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "model_type": "olmo3",
    "num_hidden_layers": 4,
    "sliding_window": 7,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0}


olmo3 = partial(variant, OLMO3)


def olmo3s() -> Iterator[Tiny]:
    yield olmo3(
        "as on the hub",
        {"rope_scaling": {**YARN, "attention_factor": 1.2079441541679836}, "torch_dtype": "bfloat16"},
        stored_dtype=torch.bfloat16,
    )
    yield olmo3(
        "minimal config",
        absent=(
            "attention_bias", "hidden_act", "layer_types", "max_position_embeddings", "num_key_value_heads",
            "rms_norm_eps", "rope_scaling", "rope_theta", "sliding_window", "tie_word_embeddings", "torch_dtype",
        ),
    )  # fmt: skip
    yield olmo3(
        "biases, tied, saved by transformers",
        {"attention_bias": True, "rope_scaling": YARN, "num_key_value_heads": 1, "tie_word_embeddings": True},
        by_transformers=True,
    )
    yield olmo3(
        "a theta per layer type, transformers 5 spelling",
        {
            "layer_types": ["full_attention", "sliding_attention"],
            "num_hidden_layers": 2,
            "rope_parameters": {
                "full_attention": {**YARN, "rope_theta": 300.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
            },
            "tie_word_embeddings": True,
        },
        absent=("rope_scaling", "rope_theta"),
        tensors=without(HEAD),
    )


CHECKPOINTS = list(olmo3s())
