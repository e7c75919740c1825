"""Tiny EXAONE 3 checkpoints."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.models.tiny import EMBEDDING, HEAD, Tensors, Tiny, without
from tests.models.variants import variant

EXAONE: dict[str, Any] = {
    "activation_function": "silu",
    "architectures": ["ExaoneForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "embed_dropout": 0.0,
    "eos_token_id": 2,
    "head_dim": 8,
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 56,
    "layer_norm_epsilon": 1e-05,
    "max_position_embeddings": 128,
    "model_type": "exaone",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_layers": 2,
    "pad_token_id": 0,
    "rope_scaling": {
        "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 32,
        "rope_type": "llama3",
    },
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
    "vocab_size": 101,
}  # fmt: skip
NAMES = {
    EMBEDDING: "transformer.wte.weight",
    "model.layers.": "transformer.h.",
    "model.norm.": "transformer.ln_f.",
    ".self_attn.o_proj.": ".attn.attention.out_proj.",
    ".self_attn.": ".attn.attention.",
    ".input_layernorm.": ".ln_1.",
    ".post_attention_layernorm.": ".ln_2.",
    ".mlp.gate_proj.": ".mlp.c_fc_0.",
    ".mlp.up_proj.": ".mlp.c_fc_1.",
    ".mlp.down_proj.": ".mlp.c_proj.",
}


def as_stored(tensors: Tensors) -> Tensors:
    """The names in files."""
    for ours, stored in NAMES.items():
        tensors = {name.replace(ours, stored): tensor for name, tensor in tensors.items()}
    return tensors


def exaones() -> Iterator[Tiny]:
    exaone = partial(variant, EXAONE, tensors=as_stored)
    yield exaone("as on the hub", {"torch_dtype": "bfloat16"}, stored_dtype=torch.bfloat16)
    yield exaone(
        "minimal config",
        {"num_attention_heads": 8, "num_layers": 1},
        absent=(
            "activation_function", "attention_dropout", "embed_dropout", "head_dim", "initializer_range",
            "layer_norm_epsilon", "max_position_embeddings", "num_key_value_heads", "rope_scaling", "rope_theta",
            "tie_word_embeddings", "torch_dtype",
        ),
    )  # fmt: skip
    tied = {"tie_word_embeddings": True, "layer_norm_epsilon": 1e-3, "num_hidden_layers": 3}
    yield exaone("tied, the layers under two names", tied, tensors=lambda t: as_stored(without(HEAD)(t)))
    biases = {"attention_bias": True, "mlp_bias": True, "num_hidden_layers": 2, "rms_norm_eps": 1e-4}
    other_names = "activation_function", "layer_norm_epsilon", "num_layers"
    yield variant(EXAONE, "names of Llama, biases", {**biases, "head_dim": 12, "hidden_act": "silu"}, other_names)
    yield variant(EXAONE, "saved by transformers", by_transformers=True, shards=2)


CHECKPOINTS = list(exaones())
