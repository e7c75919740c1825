"""Tiny Bamba checkpoints."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import transformers
from packaging.version import Version

from tests.models.tiny import HEAD, Tiny, without
from tests.models.variants import variant

NORMS_GROUPS = Version(transformers.__version__) >= Version("5.23")
"""Whether transformers normalizes each group of heads; earlier versions of it, all heads of Bamba and Granite."""

MAMBA: dict[str, Any] = {
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 40,
    "mamba_chunk_size": 8,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 12,
    "mamba_expand": 2,
    "mamba_n_groups": 2 if NORMS_GROUPS else 1,
    "mamba_n_heads": 4,
    "mamba_proj_bias": False,
    "max_position_embeddings": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "time_step_limit": [0.0, math.inf],
    "torch_dtype": "float32",
    "vocab_size": 101,
}
"""Entries of hybrids with Mamba-2."""

BAMBA: dict[str, Any] = {
    **MAMBA,
    "architectures": ["BambaForCausalLM"],
    "attn_layer_indices": [1],
    "attn_rotary_emb": 4,
    "mlp_bias": False,
    "model_type": "bamba",
    "z_loss_coefficient": 0.0,
}


def bambas() -> Iterator[Tiny]:
    bamba = partial(variant, BAMBA)
    yield bamba("as on the hub")
    yield bamba("in bf16", {"torch_dtype": "bfloat16", "mamba_d_head": "auto"}, stored_dtype=torch.bfloat16)
    yield bamba(
        "minimal config",
        {"num_attention_heads": 8, "mamba_n_heads": 8},
        absent=(
            "attention_bias", "hidden_act", "mamba_conv_bias", "mamba_d_conv", "mamba_d_head", "mamba_expand",
            "mamba_n_groups", "mamba_proj_bias", "max_position_embeddings", "mlp_bias", "num_key_value_heads",
            "rms_norm_eps", "rope_theta", "tie_word_embeddings", "time_step_limit", "z_loss_coefficient",
        ),
    )  # fmt: skip
    biases = {"attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True, "mamba_conv_bias": False}
    yield bamba("biases", {**biases, "mamba_d_conv": 3, "attn_layer_indices": [0, 2], "rope_theta": 300.0})
    yield bamba("saved by transformers", {"mamba_n_groups": 1, "rms_norm_eps": 0.01}, by_transformers=True, shards=2)
    tied = {"tie_word_embeddings": True, "num_hidden_layers": 2, "mamba_expand": 1, "mamba_d_head": 8}
    yield bamba("tied, smaller heads", tied, tensors=without(HEAD))


CHECKPOINTS = list(bambas())
