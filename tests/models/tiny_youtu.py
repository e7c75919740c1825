"""Tiny Youtu checkpoints."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.models.tiny import HEAD, Tiny, without
from tests.models.variants import variant

YOUTU: dict[str, Any] = {
    "architectures": ["YoutuForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "embedding_initializer_range": None,
    "eos_token_id": 1,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": None,
    "intermediate_size": 56,
    "kv_lora_rank": 20,
    "max_position_embeddings": 128,
    "mlp_bias": False,
    "model_type": "youtu",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "rms_norm_eps": 1e-06,
    "rope_interleave": True,
    "rope_theta": 1600000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 16,
    "vocab_size": 101,
}


def youtus() -> Iterator[Tiny]:
    youtu = partial(variant, YOUTU, tensors=without(HEAD))
    yield youtu("as on the hub", stored_dtype=torch.bfloat16)
    yield youtu(
        "minimal config",
        {"num_hidden_layers": 1},
        absent=(
            "attention_bias", "attention_dropout", "embedding_initializer_range", "hidden_act", "initializer_range",
            "max_position_embeddings", "mlp_bias", "rms_norm_eps", "rope_interleave", "rope_theta",
            "tie_word_embeddings", "torch_dtype",
        ),
    )  # fmt: skip
    yarn = {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 32}  # fmt: skip
    odd = {"attention_bias": True, "q_lora_rank": None, "rope_interleave": False, "rope_scaling": yarn}
    yield variant(YOUTU, "biases, one projection to queries, YaRN, untied", {
        **odd, "tie_word_embeddings": False, "torch_dtype": "float32", "initializer_range": 0.05,
    })  # fmt: skip
    yield variant(YOUTU, "saved by transformers", by_transformers=True)


CHECKPOINTS = list(youtus())
