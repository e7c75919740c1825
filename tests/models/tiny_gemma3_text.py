"""Tiny text-only Gemma 3 checkpoints."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.models.tiny import HEAD, Tiny, of_the_base_model, without
from tests.models.variants import variant

GEMMA3_TEXT: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 90],
    "final_logit_softcapping": None,
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 56,
    "max_position_embeddings": 128,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "pad_token_id": None,  # transformers gives the embedding of the padding token no gradient
    "query_pre_attn_scalar": 22,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 7,
    "sliding_window_pattern": 3,
    "torch_dtype": "float32",
    "use_cache": True,
    "vocab_size": 101,
}

LINEAR = {"factor": 8.0, "rope_type": "linear"}


gemma3 = partial(variant, GEMMA3_TEXT, tensors=without(HEAD))


def gemma3s() -> Iterator[Tiny]:
    yield gemma3("as on the hub", {"torch_dtype": "bfloat16"}, stored_dtype=torch.bfloat16)
    yield gemma3(
        "minimal config",
        {"num_hidden_layers": 7},  # one of them uses full attention by default
        absent=(
            "attention_bias", "attn_logit_softcapping", "final_logit_softcapping", "head_dim", "hidden_activation",
            "max_position_embeddings", "num_key_value_heads", "query_pre_attn_scalar", "rms_norm_eps",
            "rope_local_base_freq", "rope_theta", "sliding_window_pattern", "torch_dtype",
        ),
    )  # fmt: skip
    yield gemma3(
        "rope scaling",
        {"rope_scaling": LINEAR, "rope_theta": 300.0, "rope_local_base_freq": 70.0, "num_key_value_heads": 2},
    )
    yield gemma3(
        "rope scaling, transformers 5 spelling",
        {
            "_sliding_window_pattern": 6,
            "dtype": "float32",
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {**LINEAR, "rope_theta": 300.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
            },
        },
        absent=("rope_scaling", "rope_theta", "rope_local_base_freq", "sliding_window_pattern", "torch_dtype"),
    )
    yield gemma3("saved by transformers", {"rope_scaling": LINEAR}, shards=2, by_transformers=True)
    yield gemma3(
        "soft cap, biases, untied",
        {
            "attention_bias": True,
            "attn_logit_softcapping": 0.5,  # ignored
            "final_logit_softcapping": 7.0,
            "tie_word_embeddings": False,
        },
        tensors=dict,
    )
    embedding = {"architectures": ["Gemma3TextModel"], "use_bidirectional_attention": True, "sliding_window": 8}
    yield gemma3("EmbeddingGemma", embedding, tensors=of_the_base_model)
    yield gemma3("EmbeddingGemma, saved by transformers", {**embedding, "sliding_window": 9}, by_transformers=True)


CHECKPOINTS = list(gemma3s())
