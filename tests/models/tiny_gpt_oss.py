"""Tiny gpt-oss checkpoints."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from transformers import GptOssConfig

from tests.models.tiny import EMBEDDING, Tensors, Tiny
from tests.models.variants import variant

GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 2,
    "experts_per_token": 2,
    "head_dim": 12,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initial_context_length": 32,
    "initializer_range": 0.02,
    "intermediate_size": 24,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 128,
    "model_type": "gpt_oss",
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "output_router_logits": False,
    "pad_token_id": None,  # transformers gives the embedding of the padding token no gradient
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 4.0, "original_max_position_embeddings": 32,
        "rope_type": "yarn", "truncate": False,
    },
    "rope_theta": 150000.0,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 5,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
    "vocab_size": 101,
}  # fmt: skip


SWIGLU: dict[str, Any] = {"swiglu_alpha": 1.1, "swiglu_limit": 0.7} if hasattr(GptOssConfig(), "swiglu_limit") else {}
"""Options that transformers 5.17 ignores."""


def steady(tensors: Tensors) -> Tensors:
    """Changes weights so that routing is stable under bf16 rounding, as `variants.with_steady_mixtures` does.

    Biases of gates and up projections are so large that the limits of both are often reached.
    """
    experts = next((len(t) for name, t in tensors.items() if name.endswith(".router.weight")), 1)
    bits = (experts - 1).bit_length()

    def signs(numbers: int) -> torch.Tensor:
        return 2.0 * (torch.arange(numbers)[:, None] >> torch.arange(bits) & 1) - 1

    for name, tensor in tensors.items():
        if name == EMBEDDING:
            tensor[:, :bits] = 2 * signs(len(tensor))
        elif name.endswith("layernorm.weight"):
            tensor[:bits] = 1
        elif name.endswith(("o_proj.weight", "o_proj.bias")):
            tensor[:bits] = 0
        elif name.endswith((".experts.down_proj", ".experts.down_proj_bias")):
            tensor[..., :bits] = 0
            tensor *= 0.05
        elif name.endswith(".experts.gate_up_proj_bias"):
            tensor *= 25
        elif name.endswith(".router.weight"):
            tensor[:, bits:] *= 0.05
            tensor[:, :bits] = 0.4 * 2.0 ** torch.arange(bits) * signs(len(tensor))
        elif name.endswith(".router.bias"):
            tensor *= 0.05
    return tensors


def gpt_osses() -> Iterator[Tiny]:
    gpt_oss = partial(variant, GPT_OSS, tensors=steady)
    # Without YaRN: transformers' Trainer cannot read the config.json of such a checkpoint again.
    unscaled = {"rope_scaling": {"rope_type": "default"}}
    yield gpt_oss("plain, no context extension", unscaled, absent=("initial_context_length",))
    yield gpt_oss(
        "minimal config",
        absent=(
            "attention_bias", "attention_dropout", "experts_per_token", "hidden_act", "initial_context_length",
            "initializer_range", "layer_types", "max_position_embeddings", "pad_token_id", "rms_norm_eps",
            "rope_scaling", "rope_theta", "router_aux_loss_coef", "tie_word_embeddings", "torch_dtype",
        ),
        stored_dtype=torch.bfloat16,
    )  # fmt: skip
    v5 = {"rope_parameters": {**GPT_OSS["rope_scaling"], "rope_theta": 5000.0, "truncate": True}}
    yield variant(
        GPT_OSS,
        "saved by transformers, tied, no attention biases",
        {
            **v5,
            **SWIGLU,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "num_local_experts": 2,
            "intermediate_size": 8,
        },
        absent=("rope_scaling", "rope_theta"),
        by_transformers=True,
        shards=2,
    )
    swapped = {
        "layer_types": ["full_attention", "sliding_attention"],
        "num_key_value_heads": 1,
        "num_attention_heads": 3,
    }
    yield gpt_oss("load-balancing loss, window in the second layer", {**swapped, "output_router_logits": True})
    yield gpt_oss("one layer with full attention", {"layer_types": ["full_attention"], "num_hidden_layers": 1})


CHECKPOINTS = list(gpt_osses())
