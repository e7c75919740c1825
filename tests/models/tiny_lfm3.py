"""Tiny LFM3 checkpoints."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.models.tiny import HEAD, Tensors, Tiny, without
from tests.models.variants import variant

CONV, FULL, SLIDING = "conv", "full_attention", "sliding_attention"
LFM3: dict[str, Any] = {
    "architectures": ["Lfm3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "conv_L_cache": 7,
    "conv_bias": False,
    "eos_token_id": 7,
    "head_dim": 16,
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "layer_types": [CONV, FULL, SLIDING],
    "max_position_embeddings": 128,
    "model_type": "lfm3",
    "norm_eps": 1e-05,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "rope_parameters": {
        FULL: {"partial_rotary_factor": 0.5, "rope_theta": 1000000.0, "rope_type": "proportional"},
        SLIDING: {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 5,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "use_attention_gate": True,
    "use_cache": True,
    "use_sandwich_norm": True,
    "vocab_size": 101,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 700.0}


def with_names_of_files(tensors: Tensors) -> Tensors:
    """Weights without a head, and with the gates' names in files."""
    named = {name.replace(".g_proj.", ".gate_proj."): tensor for name, tensor in tensors.items()}
    return without(HEAD)(named)


def lfms() -> Iterator[Tiny]:
    lfm = partial(variant, LFM3, tensors=with_names_of_files)
    yield lfm("as on the hub", {"torch_dtype": "bfloat16"}, stored_dtype=torch.bfloat16)
    yield variant(
        LFM3,
        "minimal config, names of modules",
        {"num_hidden_layers": 5},
        absent=(
            "attention_bias", "conv_L_cache", "conv_bias", "layer_types", "max_position_embeddings", "norm_eps",
            "rope_parameters", "sliding_window", "tie_word_embeddings", "torch_dtype", "use_attention_gate",
            "use_sandwich_norm",
        ),
        tensors=without(HEAD),
    )  # fmt: skip
    yield lfm("saved by transformers", {"num_key_value_heads": 1}, shards=2, by_transformers=True)
    other_rope = {"rope_parameters": {FULL: YARN, SLIDING: {"rope_theta": 70.0, "rope_type": "default"}}}
    yield lfm("pre-norm, no gate, YARN", {"use_sandwich_norm": False, "use_attention_gate": False, **other_rope})
    biases = {"attention_bias": True, "conv_bias": True, "norm_eps": 0.01, "conv_L_cache": 2}
    yield variant(LFM3, "biases, untied, other numbers", {**biases, "tie_word_embeddings": False})


CHECKPOINTS = list(lfms())
