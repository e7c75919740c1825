"""Tiny checkpoints of dense Qwen3.5, text only."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.models.tiny import HEAD, Tensors, Tiny, without
from tests.models.variants import variant

QWEN3_5: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "full_attention_interval": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 56,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 12,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 128,
    "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25, "rope_theta": 10000000,
        "rope_type": "default",
    },
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
    "vocab_size": 101,
}  # fmt: skip

qwen = partial(variant, QWEN3_5)


def of_a_vision_language_model(tensors: Tensors) -> Tensors:
    """Text weights as repositories of vision-language models name them, with the parts that the text model lacks."""
    renamed = {name.replace("model.", "model.language_model."): tensor for name, tensor in tensors.items()}
    extra = {"mtp.fc.weight": torch.rand(4, 8), "model.visual.patch_embed.proj.bias": torch.rand(3)}
    return {**renamed, **extra}


def with_fp32_decay(tensors: Tensors) -> Tensors:
    """Stores in fp32 what the hub's bf16 files store in fp32."""
    wide = ("linear_attn.A_log", "linear_attn.dt_bias", "linear_attn.norm.weight")
    return {name: tensor.float() if name.endswith(wide) else tensor for name, tensor in tensors.items()}


def qwens() -> Iterator[Tiny]:
    yield qwen("plain, of a vision-language model", tensors=of_a_vision_language_model)
    yield qwen(
        "minimal config, tied",
        {"num_hidden_layers": 4, "tie_word_embeddings": True, "linear_num_value_heads": 2},
        absent=(
            "attention_bias", "attn_output_gate", "full_attention_interval", "hidden_act", "initializer_range",
            "layer_types", "linear_conv_kernel_dim", "mamba_ssm_dtype", "max_position_embeddings", "rms_norm_eps",
            "rope_parameters",
        ),
        tensors=without(HEAD),
    )  # fmt: skip
    yield qwen("decay rates in fp32", {"torch_dtype": "bfloat16"}, tensors=with_fp32_decay, stored_dtype=torch.bfloat16)
    yield qwen(
        "linear attention last, biases, saved by transformers",
        {"layer_types": ["full_attention", "linear_attention"], "attention_bias": True, "linear_conv_kernel_dim": 2},
        by_transformers=True,
        shards=2,
    )
    yield qwen(
        "hub-v4 rope, one key head",
        {"rope_theta": 10000.0, "partial_rotary_factor": 0.5, "linear_num_key_heads": 1, "num_key_value_heads": 1},
        absent=("rope_parameters", "layer_types"),
    )


CHECKPOINTS = list(qwens())
