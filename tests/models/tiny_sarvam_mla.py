"""Tiny checkpoints of Sarvam's latent attention."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.models.tiny import Tiny
from tests.models.tiny_deepseek_v3 import DEEPSEEK_V3, ON_THE_HUB
from tests.models.variants import variant, with_steady_mixtures

_OTHERS = "n_group", "n_routed_experts", "n_shared_experts", "num_nextn_predict_layers", "topk_group"
SARVAM_MLA: dict[str, Any] = {
    **{name: value for name, value in DEEPSEEK_V3.items() if name not in _OTHERS},
    "architectures": ["SarvamMLAForCausalLM"],
    "head_dim": 28,
    "model_type": "sarvam_mla",
    "num_experts": 8,
    "num_shared_experts": 1,
    "q_head_dim": 20,
    "q_lora_rank": None,
    "rope_scaling": {**DEEPSEEK_V3["rope_scaling"], "type": "deepseek_yarn"},
}


def sarvams() -> Iterator[Tiny]:
    sarvam = partial(variant, SARVAM_MLA, tensors=ON_THE_HUB)
    yield sarvam("as on the hub", {"torch_dtype": "bfloat16"}, stored_dtype=torch.bfloat16)
    yield sarvam(
        "minimal config",
        {"num_attention_heads": 8, "num_hidden_layers": 2, "moe_intermediate_size": 8},
        absent=(
            "attention_bias", "attention_dropout", "first_k_dense_replace", "head_dim", "hidden_act",
            "initializer_range", "max_position_embeddings", "moe_layer_freq", "norm_topk_prob", "num_experts",
            "num_experts_per_tok", "num_key_value_heads", "num_shared_experts", "q_head_dim", "q_lora_rank",
            "rms_norm_eps", "rope_scaling", "rope_theta", "routed_scaling_factor", "scoring_func", "topk_method",
            "torch_dtype",
        ),
    )  # fmt: skip
    odd = {"q_lora_rank": 24, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 0, "num_shared_experts": 2}
    yield sarvam("groups, two projections to queries", {**odd, "rms_norm_eps": 1e-4, "rope_scaling": None})
    yield variant(SARVAM_MLA, "saved by transformers", {"num_experts": 3}, by_transformers=True, shards=2)
    stacked = {"n_routed_experts": 5, "n_shared_experts": 1, "rope_interleave": False, "norm_topk_prob": False}
    yield variant(
        SARVAM_MLA, "names of DeepSeek, stacked experts", stacked, ("num_experts", "num_shared_experts"),
        tensors=with_steady_mixtures,
    )  # fmt: skip


CHECKPOINTS = list(sarvams())
