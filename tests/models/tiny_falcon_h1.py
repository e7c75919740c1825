"""Tiny Falcon-H1 checkpoints."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.models.tiny import HEAD, Tiny, without
from tests.models.tiny_bamba import MAMBA
from tests.models.variants import variant

FALCON: dict[str, Any] = {
    **MAMBA,
    "architectures": ["FalconH1ForCausalLM"],
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.9,
    "embedding_multiplier": 1.7,
    "key_multiplier": 0.4,
    "lm_head_multiplier": 0.6,
    "mamba_d_head": 12,
    "mamba_d_ssm": 48,
    "mamba_norm_before_gate": False,
    "mamba_rms_norm": False,
    "mlp_bias": False,
    "mlp_multipliers": [0.9, 0.7],
    "model_type": "falcon_h1",
    "num_hidden_layers": 2,
    "projectors_bias": False,
    "ssm_in_multiplier": 1.3,
    "ssm_multipliers": [0.7, 0.8, 0.5, 0.9, 1.1],
    "ssm_out_multiplier": 0.8,
}
MULTIPLIERS = tuple(name for name in FALCON if "multiplier" in name)


def falcons() -> Iterator[Tiny]:
    falcon = partial(variant, FALCON)
    yield falcon("as on the hub")
    normalized = {"mamba_rms_norm": True, "torch_dtype": "bfloat16"}
    yield falcon("norm of Mamba-2, in bf16", normalized, stored_dtype=torch.bfloat16)
    yield falcon(
        "minimal config, norm before the gate",
        {"num_attention_heads": 8, "mamba_rms_norm": True, "mamba_n_heads": 4},
        absent=(
            "attention_bias", "hidden_act", "mamba_conv_bias", "mamba_d_conv", "mamba_d_head", "mamba_expand",
            "mamba_norm_before_gate", "mamba_n_groups", "mamba_proj_bias", "max_position_embeddings", "mlp_bias",
            "num_key_value_heads", "projectors_bias", "rms_norm_eps", "rope_theta", "tie_word_embeddings",
            "time_step_limit", *MULTIPLIERS,
        ),
    )  # fmt: skip
    biases = {"attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True, "mamba_conv_bias": False}
    yield falcon(
        "biases", {**biases, "projectors_bias": True, "mamba_d_conv": 3, "mamba_d_ssm": None, "mamba_d_head": 16}
    )
    yield falcon("saved by transformers", {"rms_norm_eps": 0.01, "rope_theta": 300.0}, by_transformers=True, shards=2)
    tied = {"tie_word_embeddings": True, "projectors_bias": True, "mamba_n_groups": 1, "mamba_d_head": "auto"}
    yield falcon("tied, bias of one projection", tied, tensors=without(HEAD))


CHECKPOINTS = list(falcons())
