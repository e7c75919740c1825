"""Tiny Llama checkpoints."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.models.tiny import (
    EMBEDDING,
    HEAD,
    Tiny,
    of_the_base_model,
    with_an_equal_head,
    with_another_head,
    with_another_layer,
    with_rotary_buffers,
    without,
)
from tests.models.variants import variant

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 56,
    "max_position_embeddings": 128,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
    "vocab_size": 101,
}

LLAMA3_SCALING = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 32,
    "rope_type": "llama3",
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 100.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.2, 1.5, 2.0],
    "long_factor": [1.5, 3.0, 8.0, 20.0],
    "original_max_position_embeddings": 44,
}


llama = partial(variant, LLAMA)


def llamas() -> Iterator[Tiny]:
    yield llama("plain")
    yield llama(
        "2, minimal config",
        absent=(
            "attention_bias", "hidden_act", "initializer_range", "max_position_embeddings", "mlp_bias",
            "num_key_value_heads", "rms_norm_eps", "rope_scaling", "rope_theta", "tie_word_embeddings", "torch_dtype",
            "use_cache",
        ),
    )  # fmt: skip

    # Rotary embedding, and the two spellings of config.json
    tied_llama3 = {"rope_scaling": LLAMA3_SCALING, "rope_theta": 500000.0, "tie_word_embeddings": True}
    yield llama("3, tied, transformers 4 spelling", tied_llama3, tensors=without(HEAD))
    yield llama(
        "3, tied, transformers 5 spelling",
        {
            "rope_parameters": {**LLAMA3_SCALING, "rope_theta": 500000.0},
            "tie_word_embeddings": True,
            "dtype": "float32",
            "head_dim": 8,
        },
        absent=("rope_theta", "rope_scaling", "torch_dtype"),
        tensors=without(HEAD),
    )
    yield llama("3, tied, saved by transformers", tied_llama3, by_transformers=True)
    yield llama("linear", {"rope_scaling": {"type": "linear", "factor": 3.0}})
    yield llama("dynamic, within the context", {"rope_scaling": {"type": "dynamic", "factor": 2.0}})
    dynamic = {"rope_type": "dynamic", "factor": 2.0}
    yield llama("dynamic, beyond the context", {"rope_scaling": dynamic, "max_position_embeddings": 32})
    yield llama("yarn", {"rope_scaling": YARN, "head_dim": 24})
    yield llama("yarn, rope type under type", {"rope_scaling": {"type": "yarn", "factor": 2}, "head_dim": 24})
    yield llama("yarn, attention factor", {"rope_scaling": {**YARN, "attention_factor": 0.7}, "head_dim": 24})
    yield llama("yarn, mscale", {"rope_scaling": {**YARN, "mscale": 1.3, "mscale_all_dim": 0.4}, "head_dim": 24})
    yield llama("yarn, betas", {"rope_scaling": {**YARN, "beta_fast": 8, "beta_slow": 0.5}, "head_dim": 24})
    yield llama("yarn, not truncated", {"rope_scaling": {**YARN, "truncate": False}, "head_dim": 24})
    yield llama("longrope, original context length", {"rope_scaling": LONGROPE}, tokens=44)
    yield llama("longrope, one token longer", {"rope_scaling": LONGROPE}, tokens=45)
    yield llama("longrope, attention factor", {"rope_scaling": {**LONGROPE, "attention_factor": 1.4, "factor": 16.0}})
    yield llama(
        "longrope, top-level original context",
        {"rope_scaling": {**LONGROPE, "original_max_position_embeddings": 500}, "original_max_position_embeddings": 32},
    )
    yield llama("integer theta", {"rope_theta": 1000042})
    yield llama(
        "two thetas", {"rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 300.0}, "rope_theta": 7e5}
    )
    yield llama(
        "two rope scalings", {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": LLAMA3_SCALING}
    )

    # Shapes
    yield llama("attention bias", {"attention_bias": True})
    yield llama("mlp bias", {"mlp_bias": True})
    yield llama("both biases", {"attention_bias": True, "mlp_bias": True})
    for size in (6, 10, 24, 80):
        yield llama(f"head size {size}", {"head_dim": size})
    yield llama("head size 6, derived", {"hidden_size": 18, "num_attention_heads": 3, "num_key_value_heads": 3})
    yield llama("one key-value head", {"num_key_value_heads": 1})
    yield llama("one key-value head per query head", {"num_key_value_heads": 4, "head_dim": 12})
    yield llama(
        "smallest sizes",
        {
            "hidden_size": 2,
            "intermediate_size": 1,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "vocab_size": 65,
        },
    )
    yield llama("eight layers", {"num_hidden_layers": 8})

    # The head
    tied = {"tie_word_embeddings": True}
    yield llama("tied, only the embedding stored", tied, tensors=without(HEAD))
    yield llama("tied, only the head stored", tied, tensors=without(EMBEDDING))
    yield llama("tied, both stored", tied, tensors=with_an_equal_head)
    untied = {"tie_word_embeddings": False}
    yield llama("tied, both stored, different values", tied, tensors=with_another_head, corrected=untied)
    yield llama("untied, equal values", tensors=with_an_equal_head)
    yield llama("base model", {**tied, "architectures": ["LlamaModel"]}, tensors=of_the_base_model)

    # Files
    half = torch.float16
    yield llama("fp16, no dtype entry", absent=("torch_dtype",), stored_dtype=half)
    yield llama(
        "fp16, no dtype entry, fp32 buffers", absent=("torch_dtype",), stored_dtype=half, tensors=with_rotary_buffers
    )
    yield llama("bf16", {"torch_dtype": "bfloat16"}, stored_dtype=torch.bfloat16)
    yield llama("two dtype entries", {"torch_dtype": "float32", "dtype": "bfloat16"}, stored_dtype=torch.bfloat16)
    yield llama("fp32 stored, fp16 in config.json", {"torch_dtype": "float16"})
    yield llama("3 shards", shards=3)
    yield llama("3 shards, saved by transformers", shards=3, by_transformers=True)
    yield llama("stray file", stray="consolidated.safetensors")
    yield llama("stray shard", stray="model-00001-of-00001.safetensors")
    yield llama("rotary buffers", tensors=with_rotary_buffers)
    yield llama("an extra layer", tensors=with_another_layer)

    # Entries of config.json
    yield llama(
        "null entries", dict.fromkeys(("head_dim", "num_key_value_heads", "pad_token_id", "quantization_config"))
    )
    yield llama(
        "unknown entries",
        {
            "_name_or_path": "é/模",
            "auto_map": {"AutoModel": "evil.Model"},
            "cache_implementation": "hybrid",
            "pretraining_tp": 4,
            "partial_rotary_factor": 0.5,
            "transformers_version": "4.40.0",
            "sliding_window": 3,
        },
    )
    yield llama("several eos tokens", {"eos_token_id": [2, 5, 7], "pad_token_id": 0})


CHECKPOINTS = list(llamas())
