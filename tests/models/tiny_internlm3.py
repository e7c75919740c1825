"""Tiny InternLM3 checkpoints."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.models.tiny import Tiny
from tests.models.variants import variant

INTERNLM3: dict[str, Any] = {
    "architectures": ["InternLM3ForCausalLM"],
    "attention_dropout": 0.0,
    "bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 12,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 56,
    "max_position_embeddings": 128,
    "model_type": "internlm3",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "qkv_bias": False,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 6.0, "rope_type": "dynamic"},
    "rope_theta": 50000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 101,
}


def internlms() -> Iterator[Tiny]:
    internlm = partial(variant, INTERNLM3)
    yield internlm("as on the hub", stored_dtype=torch.bfloat16)
    yield internlm(
        "minimal config",
        {"num_attention_heads": 8},
        absent=(
            "attention_dropout", "bias", "head_dim", "hidden_act", "initializer_range", "max_position_embeddings",
            "num_key_value_heads", "qkv_bias", "rms_norm_eps", "rope_scaling", "rope_theta", "tie_word_embeddings",
            "torch_dtype",
        ),
    )  # fmt: skip
    yield internlm("biases, no head size", {"bias": True, "qkv_bias": True, "head_dim": None, "torch_dtype": "float32"})
    yield internlm("saved by transformers", {"num_key_value_heads": 1}, by_transformers=True)


CHECKPOINTS = list(internlms())
