"""Tiny Seed-OSS checkpoints."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.models.tiny import HEAD, Tiny, without
from tests.models.variants import variant

SEED_OSS: dict[str, Any] = {
    "architectures": ["SeedOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.1,
    "attention_out_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "head_dim": 12,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 56,
    "max_position_embeddings": 128,
    "mlp_bias": False,
    "model_type": "seed_oss",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "pretraining_tp": 1,
    "residual_dropout": 0.1,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"rope_type": "default"},
    "rope_theta": 10000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 101,
}


seed_oss = partial(variant, SEED_OSS)


def seed_osses() -> Iterator[Tiny]:
    yield seed_oss("as on the hub", stored_dtype=torch.bfloat16)
    yield seed_oss(
        "minimal config",
        {"num_attention_heads": 8, "pad_token_id": None},
        absent=(
            "attention_bias", "attention_dropout", "attention_out_bias", "head_dim", "hidden_act",
            "max_position_embeddings", "mlp_bias", "num_key_value_heads", "pretraining_tp", "residual_dropout",
            "rms_norm_eps", "rope_scaling", "rope_theta", "tie_word_embeddings", "torch_dtype",
        ),
    )  # fmt: skip
    yield seed_oss("biases in all layers", {"attention_out_bias": True, "mlp_bias": True, "torch_dtype": "float32"})
    yield seed_oss(
        "no biases, tied, saved by transformers",
        {
            "attention_bias": False, "head_dim": None, "num_key_value_heads": 1, "tie_word_embeddings": True,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        },
        by_transformers=True,
    )  # fmt: skip
    yield seed_oss(
        "output bias only, tied",
        {"attention_bias": False, "attention_out_bias": True, "tie_word_embeddings": True, "torch_dtype": "float32"},
        tensors=without(HEAD),
    )


CHECKPOINTS = list(seed_osses())
