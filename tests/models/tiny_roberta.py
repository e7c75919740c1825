"""Tiny RoBERTa checkpoints."""

from functools import partial
from typing import Any

import torch

from tests.models.tiny import Tensors, without
from tests.models.tiny_bert import BERT
from tests.models.variants import variant

ROBERTA: dict[str, Any] = BERT | {
    "architectures": ["RobertaForMaskedLM"],
    "bos_token_id": 0,
    "eos_token_id": 2,
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 66,
    "model_type": "roberta",
    "pad_token_id": 1,
    "type_vocab_size": 1,
}

_DECODER = "lm_head.decoder.weight", "lm_head.decoder.bias"


def with_a_pooler(tensors: Tensors) -> Tensors:
    pooler = {"roberta.pooler.dense.weight": torch.rand(32, 32), "roberta.pooler.dense.bias": torch.rand(32)}
    return without(*_DECODER)(tensors) | pooler


roberta = partial(variant, ROBERTA, tensors=without(*_DECODER))

CHECKPOINTS = [
    roberta("as on the hub", tensors=with_a_pooler),
    roberta("saved by transformers", shards=2, by_transformers=True),
    roberta("minimal config", absent=("bos_token_id", "eos_token_id", "hidden_act", "layer_norm_eps", "pad_token_id")),
    roberta(
        "untied, other numbers",
        {"layer_norm_eps": 0.01, "max_position_embeddings": 50, "pad_token_id": 5, "tie_word_embeddings": False},
        tensors=without("lm_head.bias"),
    ),
    roberta("two token types, bf16", {"dtype": "bfloat16", "type_vocab_size": 2}, stored_dtype=torch.bfloat16),
]
