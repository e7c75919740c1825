"""Tiny DeepSeek-V2 checkpoints."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.models.tiny import Tiny
from tests.models.tiny_deepseek_v3 import DEEPSEEK_V3, ON_THE_HUB
from tests.models.variants import variant, with_steady_mixtures

DEEPSEEK_V2: dict[str, Any] = {
    **{name: value for name, value in DEEPSEEK_V3.items() if name != "num_nextn_predict_layers"},
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "rope_scaling": {**DEEPSEEK_V3["rope_scaling"], "mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 16.0,
    "scoring_func": "softmax",
    "topk_method": "group_limited_greedy",
}
LITE = {"n_group": 1, "q_lora_rank": None, "routed_scaling_factor": 1.0, "topk_group": 1, "topk_method": "greedy"}


def deepseeks() -> Iterator[Tiny]:
    deepseek = partial(variant, DEEPSEEK_V2, tensors=ON_THE_HUB)
    yield deepseek("as on the hub", {"routed_scaling_factor": 4.0})
    yield deepseek("like V2-Lite", {**LITE, "torch_dtype": "bfloat16"}, stored_dtype=torch.bfloat16)
    odd = {"attention_bias": True, "v_head_dim": 24, "rope_scaling": None, "topk_group": 1, "num_experts_per_tok": 2}
    yield deepseek("biases, wide values, one group", {**odd, "routed_scaling_factor": 1.0})
    yield deepseek(
        "minimal config",
        {"num_hidden_layers": 1, "n_routed_experts": 16, "moe_intermediate_size": 8},
        absent=(
            "attention_bias", "attention_dropout", "aux_loss_alpha", "bos_token_id", "eos_token_id", "ep_size",
            "first_k_dense_replace", "hidden_act", "initializer_range", "max_position_embeddings", "moe_layer_freq",
            "n_group", "n_shared_experts", "norm_topk_prob", "num_key_value_heads", "pretraining_tp", "rms_norm_eps",
            "rope_scaling", "rope_theta", "routed_scaling_factor", "scoring_func", "seq_aux", "tie_word_embeddings",
            "topk_group", "topk_method", "torch_dtype", "use_cache",
        ),
    )  # fmt: skip
    few = {"n_group": 2, "n_routed_experts": 4, "num_experts_per_tok": 4, "routed_scaling_factor": 2.0}
    yield variant(DEEPSEEK_V2, "saved by transformers", few, by_transformers=True, shards=2)
    stacked = {**LITE, "num_hidden_layers": 1, "first_k_dense_replace": 0}
    yield variant(DEEPSEEK_V2, "stacked experts", stacked, tensors=with_steady_mixtures)


CHECKPOINTS = list(deepseeks())
