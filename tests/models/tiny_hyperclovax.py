"""Tiny HyperCLOVA X checkpoints."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.models.tiny import HEAD, Tiny, without
from tests.models.tiny_granite import GRANITE
from tests.models.variants import variant

HYPERCLOVAX: dict[str, Any] = {
    **GRANITE,
    "architectures": ["HyperCLOVAXForCausalLM"],
    "head_dim": 12,
    "logits_scaling": 0.125,
    "model_type": "hyperclovax",
    "pad_token_id": None,
    "tie_word_embeddings": False,
    "use_post_norm": True,
}


def hyperclovas() -> Iterator[Tiny]:
    hyperclova = partial(variant, HYPERCLOVAX)
    yield hyperclova("as on the hub", {"torch_dtype": "bfloat16"}, stored_dtype=torch.bfloat16)
    yield hyperclova(
        "minimal config",
        absent=(
            "attention_bias", "attention_multiplier", "embedding_multiplier", "head_dim", "hidden_act",
            "logits_scaling", "max_position_embeddings", "mlp_bias", "num_key_value_heads", "residual_multiplier",
            "rms_norm_eps", "rope_scaling", "rope_theta", "tie_word_embeddings", "torch_dtype", "use_post_norm",
        ),
    )  # fmt: skip
    yield hyperclova(
        "no norms after branches, biases, tied",
        {"use_post_norm": False, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        tensors=without(HEAD),
    )
    yield hyperclova("saved by transformers", {"attention_multiplier": None}, by_transformers=True)


CHECKPOINTS = list(hyperclovas())
