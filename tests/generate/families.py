"""Tiny models of several architectures, with transformers' model of the same weights."""

from functools import cache
from typing import Any

import torch
import transformers

import ligerzoo
from tests.generate.models import HYBRID, VOCAB

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,  # with tied ones, random Gemma 2 models repeat one token
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 7},
    "mixtral": {"num_local_experts": 4},
    "gemma2": {"sliding_window": 7, "query_pre_attn_scalar": 16},
    "qwen3_5_text": {name: value for name, value in HYBRID.items() if name.startswith(("layer", "linear"))},
}


@cache
def pair(family: str) -> tuple[Any, Any]:
    """Returns our model and transformers', with shared weights in fp32."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family]})
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    return ligerzoo.from_transformers(theirs), theirs
