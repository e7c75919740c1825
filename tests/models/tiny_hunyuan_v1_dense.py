"""Tiny Hunyuan checkpoints."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.models.tiny import HEAD, Tiny, without
from tests.models.variants import variant

HUNYUAN: dict[str, Any] = {
    "architectures": ["HunYuanDenseV1ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_head_dim": 12,
    "bos_token_id": 1,
    "cla_share_factor": 2,
    "eod_token_id": 3,
    "eos_token_id": 2,
    "head_dim": 12,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 56,
    "max_position_embeddings": 128,
    "mlp_bias": False,
    "model_type": "hunyuan_v1_dense",
    "norm_type": "rms",
    "num_attention_heads": 4,
    "num_experts": 1,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "type": "dynamic",
    },
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_cla": False,
    "use_qk_norm": True,
    "use_rotary_pos_emb": True,
    "vocab_size": 101,
}  # fmt: skip


hunyuan = partial(variant, HUNYUAN)


def hunyuans() -> Iterator[Tiny]:
    yield hunyuan("as on the hub", stored_dtype=torch.bfloat16, tensors=without(HEAD))
    yield hunyuan(
        "minimal config",
        {"head_dim": 8},  # transformers 5.17 needs it
        absent=(
            "attention_bias", "attention_dropout", "attention_head_dim", "cla_share_factor", "eod_token_id",
            "hidden_act", "max_position_embeddings", "mlp_bias", "norm_type", "num_experts", "num_key_value_heads",
            "rms_norm_eps", "rope_scaling", "rope_theta", "tie_word_embeddings", "torch_dtype", "use_cla",
            "use_qk_norm", "use_rotary_pos_emb",
        ),
    )  # fmt: skip
    yield hunyuan(
        "biases, untied, saved by transformers",
        {"attention_bias": True, "num_key_value_heads": 1, "tie_word_embeddings": False},
        by_transformers=True,
    )
    yield hunyuan(
        "rope scaling, transformers 5 spelling",
        {"rope_parameters": {"factor": 4.0, "rope_theta": 300.0, "rope_type": "linear"}, "torch_dtype": "float32"},
        absent=("rope_scaling", "rope_theta"),
        tensors=without(HEAD),
    )


CHECKPOINTS = list(hunyuans())
