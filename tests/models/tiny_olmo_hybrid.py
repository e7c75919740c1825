"""Tiny OLMo Hybrid checkpoints."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from tests.models.tiny import HEAD, Tensors, Tiny, without
from tests.models.variants import variant

LINEAR, FULL = "linear_attention", "full_attention"
OLMO: dict[str, Any] = {
    "architectures": ["OlmoHybridForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 56,
    "layer_types": [LINEAR, FULL],
    "linear_allow_neg_eigval": True,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 12,
    "max_position_embeddings": 128,
    "model_type": "olmo_hybrid",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": None, "rope_type": "default"},
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
    "vocab_size": 101,
}

ROPE = {"rope_type": "default", "rope_theta": 500.0}

olmo = partial(variant, OLMO)


def on_the_hub(*rows: int) -> Callable[[Tensors], Tensors]:
    """Cuts convolutions in parts of these numbers of rows, renames the norms of linear layers, and keeps decay rates
    in fp32."""
    norms = {"input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"}

    def renamed(tensors: Tensors) -> Tensors:
        found: Tensors = {}
        for name, tensor in tensors.items():
            layer, _, own = name.rpartition(".linear_attn.")
            if own == "conv1d.weight":
                for part, weight in zip("qkv", tensor.split(rows), strict=True):
                    found[f"{layer}.linear_attn.{part}_conv1d.weight"] = weight.clone()
            elif own in ("A_log", "dt_bias", "o_norm.weight"):
                found[name] = tensor.float()
            else:
                *path, module, _ = name.split(".")
                is_linear = ".".join([*path, "linear_attn.A_log"]) in tensors
                found[name.replace(module, norms.get(module, module)) if is_linear else name] = tensor
        return found

    return renamed


def olmos() -> Iterator[Tiny]:
    yield olmo("as on the hub", tensors=on_the_hub(16, 16, 48))
    yield olmo(
        "minimal config",
        {"num_hidden_layers": 3},
        absent=(
            "attention_bias", "hidden_act", "layer_types", "linear_allow_neg_eigval", "linear_conv_kernel_dim",
            "linear_key_head_dim", "linear_num_key_heads", "linear_num_value_heads", "linear_value_head_dim",
            "max_position_embeddings", "num_key_value_heads", "rms_norm_eps", "rope_parameters", "torch_dtype",
        ),
        tensors=on_the_hub(24, 24, 48),
        stored_dtype=torch.bfloat16,
    )  # fmt: skip
    yield olmo(
        "saved by transformers",
        {"linear_num_value_heads": 2, "linear_allow_neg_eigval": False, "rope_parameters": ROPE},
        by_transformers=True,
        shards=2,
    )
    yield olmo(
        "biases, tied, one head, other numbers",
        {
            "layer_types": [FULL, LINEAR, LINEAR], "num_hidden_layers": 3, "attention_bias": True,
            "tie_word_embeddings": True, "linear_conv_kernel_dim": 2, "linear_num_key_heads": 1, "rms_norm_eps": 0.01,
            "num_key_value_heads": 1, "rope_theta": 300.0,
        },
        absent=("rope_parameters",),
        tensors=lambda tensors: on_the_hub(8, 8, 48)(without(HEAD)(tensors)),
    )  # fmt: skip
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 700.0}
    yield olmo("transformers' modules, YaRN", {"rope_parameters": yarn})


CHECKPOINTS = list(olmos())
