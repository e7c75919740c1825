"""Tiny Ministral checkpoints."""

from collections.abc import Iterator
from functools import partial

import torch

from tests.models.tiny import Tiny
from tests.models.tiny_mistral import MISTRAL
from tests.models.variants import variant

MINISTRAL = {
    **MISTRAL,
    "architectures": ["MinistralForCausalLM"],
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "model_type": "ministral",
    "num_hidden_layers": 4,
    "sliding_window": 6,
}


def ministrals() -> Iterator[Tiny]:
    ministral = partial(variant, MINISTRAL)
    yield ministral("plain")
    yield ministral("saved by transformers", {"num_key_value_heads": 1}, by_transformers=True, shards=3)
    yield ministral(
        "sliding window in all layers", {"num_hidden_layers": 2}, absent=("layer_types",), stored_dtype=torch.bfloat16
    )


CHECKPOINTS = list(ministrals())
