"""Tiny Gemma checkpoints."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig

from tests.models.tiny import HEAD, Tiny, without
from tests.models.variants import variant

# Gemma's files say "gelu" but mean the tanh approximation; some versions of transformers apply the exact GELU.
MEANS_TANH = AutoConfig.for_model("gemma", hidden_act="gelu").hidden_act == "gelu_pytorch_tanh"

GEMMA: dict[str, Any] = {
    "architectures": ["GemmaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "head_dim": 16,
    "hidden_act": "gelu" if MEANS_TANH else "gelu_pytorch_tanh",
    "hidden_activation": None,
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 56,
    "max_position_embeddings": 128,
    "model_type": "gemma",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "pad_token_id": None,  # transformers gives the embedding of the padding token no gradient
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 101,
}


gemma = partial(variant, GEMMA, stored_dtype=torch.bfloat16, tensors=without(HEAD))


def gemmas() -> Iterator[Tiny]:
    yield gemma("as on the hub")
    yield gemma(
        "minimal config",
        {"num_attention_heads": 16},  # the default number of key-value heads
        absent=(
            "attention_bias", "head_dim", "hidden_act", "hidden_activation", "max_position_embeddings",
            "num_key_value_heads", "rms_norm_eps", "rope_scaling", "rope_theta", "torch_dtype",
        ),
        stored_dtype=torch.float32,
    )  # fmt: skip
    # All heads together are wider than hidden_size; head_dim is not hidden_size / num_attention_heads.
    yield gemma("saved by transformers", {"num_key_value_heads": 2}, shards=2, by_transformers=True)
    yield gemma(
        "biases, untied, rope scaling",
        {
            "attention_bias": True,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "rope_scaling": {"type": "linear", "factor": 3.0},
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
        },
        stored_dtype=torch.float32,
        tensors=dict,
        shards=3,
    )


CHECKPOINTS = list(gemmas())
