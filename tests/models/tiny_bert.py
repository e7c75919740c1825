"""Tiny BERT checkpoints."""

from functools import partial
from typing import Any

import torch

from tests.models.tiny import Tensors, without
from tests.models.variants import variant

BERT: dict[str, Any] = {
    "architectures": ["BertForMaskedLM"],
    "attention_probs_dropout_prob": 0.1,
    "gradient_checkpointing": False,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 56,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 64,
    "model_type": "bert",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "transformers_version": "4.6.0.dev0",
    "type_vocab_size": 2,
    "use_cache": True,
    "vocab_size": 101,
}


def of_tensorflow(tensors: Tensors) -> Tensors:
    """Names the tensors as in the first files of BERT, which have heads of two tasks."""
    names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    renamed = {}
    for name, tensor in tensors.items():
        for new, old in names.items():
            name = name.removesuffix(new) + old if name.endswith(new) else name
        renamed[name] = tensor
    others = {"bert.pooler.dense.weight": (32, 32), "bert.pooler.dense.bias": (32,)}
    others |= {"cls.seq_relationship.weight": (2, 32), "cls.seq_relationship.bias": (2,)}
    return renamed | {name: torch.rand(shape) for name, shape in others.items()}


_DECODER = "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"


def of_pretraining(tensors: Tensors) -> Tensors:
    return of_tensorflow(without(*_DECODER)(tensors))


def with_position_ids(tensors: Tensors) -> Tensors:
    """Adds a buffer that transformers saved until version 4.30."""
    return without(*_DECODER)(tensors) | {"bert.embeddings.position_ids": torch.arange(64)[None]}


bert = partial(variant, BERT, tensors=without(*_DECODER))

CHECKPOINTS = [
    bert("as on the hub", {"architectures": ["BertForPreTraining"]}, tensors=of_pretraining),
    bert("saved by transformers", shards=2, by_transformers=True),
    bert(
        "minimal config",
        absent=("hidden_act", "layer_norm_eps", "pad_token_id", "position_embedding_type", "type_vocab_size"),
    ),
    bert(
        "untied, other numbers",
        {
            "dtype": "float32",
            "is_decoder": False,
            "layer_norm_eps": 0.01,
            "max_position_embeddings": 41,
            "num_attention_heads": 2,
            "tie_word_embeddings": False,
            "type_vocab_size": 3,
        },
        tensors=without("cls.predictions.bias"),  # it counts for tied heads only
    ),
    bert("one token type, buffer of positions", {"type_vocab_size": 1}, tensors=with_position_ids),
    bert("bf16", {"torch_dtype": "bfloat16"}, stored_dtype=torch.bfloat16),
]
