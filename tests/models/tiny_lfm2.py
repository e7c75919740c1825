"""Tiny dense LFM2 checkpoints."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.models.tiny import HEAD, Tiny, without
from tests.models.variants import variant

CONV, FULL = "conv", "full_attention"
LFM2: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_ff_dim": 70,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 8,
    "bos_token_id": 1,
    "conv_L_cache": 3,
    "conv_bias": False,
    "eos_token_id": 7,
    "full_attn_idxs": [1],
    "hidden_size": 32,
    "initializer_range": 0.02,
    "max_position_embeddings": 128,
    "model_type": "lfm2",
    "norm_eps": 1e-05,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "rope_theta": 1000000.0,
    "torch_dtype": "float32",
    "use_cache": True,
    "use_pos_enc": True,
    "vocab_size": 101,
}


def lfms() -> Iterator[Tiny]:
    lfm = partial(variant, LFM2, tensors=without(HEAD))
    yield lfm("as on the hub", {"torch_dtype": "bfloat16"}, stored_dtype=torch.bfloat16)
    yield lfm(
        "minimal config",
        {"num_attention_heads": 8, "layer_types": [CONV, FULL, FULL]},
        absent=(
            "block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of", "conv_L_cache", "conv_bias",
            "full_attn_idxs", "max_position_embeddings", "norm_eps", "num_key_value_heads", "rope_theta",
            "torch_dtype", "use_pos_enc",
        ),
    )  # fmt: skip
    yield lfm("saved by transformers", {"num_key_value_heads": 1, "rope_theta": 300.0}, shards=2, by_transformers=True)
    others = {"block_ffn_dim_multiplier": 1.3, "block_multiple_of": 5, "conv_L_cache": 4, "norm_eps": 0.01}
    yield variant(LFM2, "biases, untied, other numbers", {**others, "conv_bias": True, "tie_embedding": False})
    v5 = {"intermediate_size": 40, "block_auto_adjust_ff_dim": False, "tie_word_embeddings": True, "dtype": "float32"}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 700.0}
    yield lfm(
        "transformers 5 spelling, YaRN",
        {**v5, "layer_types": [FULL, CONV, CONV], "rope_parameters": yarn},
        absent=("block_ff_dim", "rope_theta", "torch_dtype", "full_attn_idxs"),
    )


CHECKPOINTS = list(lfms())
