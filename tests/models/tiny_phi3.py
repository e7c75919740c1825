"""Tiny Phi-3 checkpoints."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.models.tiny import HEAD, Tiny, without
from tests.models.variants import variant

PHI3: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
    "bos_token_id": 1,
    "embd_pdrop": 0.0,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 56,
    "max_position_embeddings": 128,
    "model_type": "phi3",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "original_max_position_embeddings": 128,
    "pad_token_id": None,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 7,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
    "vocab_size": 101,
}
FACTORS = {"short_factor": [1.0, 1.2, 1.5, 2.0], "long_factor": [1.5, 3.0, 8.0, 20.0]}
LONGROPE = {"rope_scaling": {"type": "longrope", **FACTORS}, "original_max_position_embeddings": 44}
PARTIAL = {  # as in Phi-4-mini
    "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.2, 1.5], "long_factor": [1.5, 3.0, 8.0]},
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 32,
    "num_key_value_heads": 2,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
}


phi3 = partial(variant, PHI3)


def phi3s() -> Iterator[Tiny]:
    yield phi3("sliding window")
    yield phi3(
        "minimal config, longrope",
        {"rope_scaling": {"rope_type": "longrope", **FACTORS}, "max_position_embeddings": 8192},
        absent=(
            "attention_bias", "attention_dropout", "auto_map", "bos_token_id", "embd_pdrop", "eos_token_id",
            "hidden_act", "initializer_range", "num_key_value_heads", "original_max_position_embeddings", "resid_pdrop",
            "rms_norm_eps", "rope_theta", "sliding_window", "tie_word_embeddings", "torch_dtype", "use_cache",
        ),
    )  # fmt: skip
    yield phi3("longrope, original context length", {**LONGROPE, "sliding_window": None}, tokens=44)
    su = {"type": "su", **FACTORS, "original_max_position_embeddings": 44}
    yield phi3("longrope called su, one token longer", {**LONGROPE, "rope_scaling": su}, tokens=45)
    yield phi3("three quarters rotated, longrope, tied", PARTIAL, tensors=without(HEAD))
    yield phi3(
        "three quarters rotated, saved by transformers, bf16",
        PARTIAL,
        stored_dtype=torch.bfloat16,
        by_transformers=True,
    )
    yield phi3("one key-value head, 3 shards", {"num_key_value_heads": 1, "sliding_window": None}, shards=3)


CHECKPOINTS = list(phi3s())
