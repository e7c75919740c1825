"""Tiny ModernBERT checkpoints."""

from functools import partial
from typing import Any

import torch

from tests.models.tiny import without
from tests.models.variants import variant

MODERNBERT: dict[str, Any] = {
    "architectures": ["ModernBertForMaskedLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "classifier_activation": "gelu",
    "classifier_bias": False,
    "classifier_pooling": "mean",
    "cls_token_id": 2,
    "decoder_bias": True,
    "deterministic_flash_attn": False,
    "eos_token_id": 3,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "gradient_checkpointing": False,
    "hidden_activation": "gelu",
    "hidden_size": 32,
    "initializer_cutoff_factor": 2.0,
    "initializer_range": 0.02,
    "intermediate_size": 56,
    "layer_norm_eps": 1e-05,
    "local_attention": 8,
    "local_rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "mlp_bias": False,
    "model_type": "modernbert",
    "norm_bias": False,
    "norm_eps": 1e-05,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "pad_token_id": None,  # transformers gives the embedding of the padding token no gradient
    "position_embedding_type": "absolute",
    "sep_token_id": 3,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "vocab_size": 101,
}

BIASES = dict.fromkeys(("attention_bias", "classifier_bias", "mlp_bias", "norm_bias"), True)

modernbert = partial(variant, MODERNBERT, tensors=without("decoder.weight"))

CHECKPOINTS = [
    modernbert("as on the hub"),
    modernbert("saved by transformers", shards=2, by_transformers=True),
    modernbert(
        "minimal config",
        {"num_hidden_layers": 3},
        absent=(
            "attention_bias",
            "classifier_activation",
            "classifier_bias",
            "decoder_bias",
            "global_attn_every_n_layers",
            "global_rope_theta",
            "hidden_activation",
            "local_rope_theta",
            "max_position_embeddings",
            "mlp_bias",
            "norm_bias",
            "norm_eps",
            "tie_word_embeddings",
            "torch_dtype",
        ),
    ),
    modernbert(
        "biases, untied, other numbers",
        {
            **BIASES,
            "global_attn_every_n_layers": 2,
            "global_rope_theta": 300.0,
            "local_attention": 5,
            "local_rope_theta": 70.0,
            "norm_eps": 0.01,
            "tie_word_embeddings": False,
        },
        tensors=dict,
    ),
    modernbert(
        "transformers 5 spelling, rope scaling",
        {
            "decoder_bias": False,
            "dtype": "float32",
            "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"factor": 8.0, "rope_theta": 300.0, "rope_type": "linear"},
                "sliding_attention": {"rope_theta": 70.0, "rope_type": "default"},
            },
            "sparse_prediction": True,
        },
        absent=("global_attn_every_n_layers", "global_rope_theta", "local_rope_theta", "torch_dtype"),
    ),
    modernbert("biases, bf16", {**BIASES, "torch_dtype": "bfloat16"}, stored_dtype=torch.bfloat16),
]
