"""Tiny Gemma 2 checkpoints."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.models.tiny import HEAD, Tiny, without
from tests.models.variants import variant

GEMMA2: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": 2.0,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": 1,
    "final_logit_softcapping": 7.0,
    "head_dim": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 56,
    "max_position_embeddings": 128,
    "model_type": "gemma2",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "pad_token_id": None,  # transformers gives the embedding of the padding token no gradient
    "query_pre_attn_scalar": 22,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 7,
    "torch_dtype": "float32",
    "use_cache": True,
    "vocab_size": 101,
}


gemma2 = partial(variant, GEMMA2, tensors=without(HEAD))


def gemma2s() -> Iterator[Tiny]:
    yield gemma2("as on the hub", {"torch_dtype": "bfloat16"}, stored_dtype=torch.bfloat16)
    yield gemma2(
        "minimal config",
        absent=(
            "attention_bias", "attn_logit_softcapping", "final_logit_softcapping", "head_dim", "hidden_act",
            "hidden_activation", "max_position_embeddings", "num_key_value_heads", "query_pre_attn_scalar",
            "rms_norm_eps", "rope_theta", "sliding_window", "torch_dtype",
        ),
    )  # fmt: skip
    unbounded = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    yield gemma2("no soft caps, one key-value head", {**unbounded, "num_key_value_heads": 1})
    yield gemma2("saved by transformers", shards=2, by_transformers=True)
    yield gemma2(
        "layer types, biases, untied",
        {
            "attention_bias": True,
            "hidden_act": "relu",  # ignored
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            "sliding_window": 2,
            "tie_word_embeddings": False,
        },
        tensors=dict,
    )


CHECKPOINTS = list(gemma2s())
