"""Tiny checkpoints of dense Granite Swash."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.models.tiny import HEAD, Tiny, without
from tests.models.tiny_granite import GRANITE
from tests.models.variants import variant

FULL, SLIDING = "full_attention", "sliding_attention"
GRANITE_SWA: dict[str, Any] = {
    **GRANITE,
    "architectures": ["GraniteSWAForCausalLM"],
    "layer_rope_theta": [0, 10000.0],
    "layer_types": [FULL, SLIDING],
    "model_type": "granite_swa",
    "sliding_window": 5,
}


def granites() -> Iterator[Tiny]:
    granite = partial(variant, GRANITE_SWA, tensors=without(HEAD))
    yield granite("as on the hub", {"torch_dtype": "bfloat16"}, stored_dtype=torch.bfloat16)
    yield granite(
        "minimal config",
        {"num_attention_heads": 8},
        absent=(
            "attention_bias", "attention_multiplier", "embedding_multiplier", "hidden_act", "layer_rope_theta",
            "layer_types", "logits_scaling", "max_position_embeddings", "mlp_bias", "num_key_value_heads",
            "residual_multiplier", "rms_norm_eps", "rope_scaling", "rope_theta", "sliding_window",
            "tie_word_embeddings", "torch_dtype",
        ),
    )  # fmt: skip
    yield granite("saved by transformers", {"num_key_value_heads": 1, "head_dim": 12}, shards=2, by_transformers=True)
    other = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False, "layer_rope_theta": None}
    yield variant(GRANITE_SWA, "biases, untied, one theta", {**other, "layer_types": [SLIDING, FULL]})
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    yield granite("two thetas, YaRN", {"rope_scaling": yarn, "layer_rope_theta": [300.0, 70]})


CHECKPOINTS = list(granites())
