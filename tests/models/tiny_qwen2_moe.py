"""Tiny Qwen2-MoE checkpoints."""

from collections.abc import Iterator
from functools import partial

import torch

from tests.models.tiny import Tiny
from tests.models.tiny_qwen3_moe import ON_THE_HUB, QWEN3_MOE
from tests.models.variants import variant, with_steady_mixtures

QWEN2_MOE = {
    **{key: value for key, value in QWEN3_MOE.items() if key not in ("attention_bias", "head_dim")},
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "norm_topk_prob": False,
    "shared_expert_intermediate_size": 40,
}


def qwens() -> Iterator[Tiny]:
    qwen = partial(variant, QWEN2_MOE, tensors=ON_THE_HUB)
    yield qwen("plain")
    yield qwen(
        "minimal config",
        {"num_attention_heads": 16},
        absent=(
            "decoder_sparse_step", "hidden_act", "initializer_range", "max_position_embeddings", "mlp_only_layers",
            "norm_topk_prob", "num_experts_per_tok", "num_key_value_heads", "rms_norm_eps", "rope_theta",
            "sliding_window", "use_sliding_window",
        ),
        stored_dtype=torch.bfloat16,
    )  # fmt: skip
    some_layers = {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1], "max_window_layers": 2}
    yield qwen("sliding window, MoE in some layers", {**some_layers, "use_sliding_window": True, "qkv_bias": False})
    types = {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True}
    yield qwen("layer types", {**types, "num_hidden_layers": 2, "mlp_only_layers": [0]})
    yield variant(QWEN2_MOE, "saved by transformers", {"num_experts": 3}, by_transformers=True, shards=2)
    yield variant(QWEN2_MOE, "stacked experts", {"num_local_experts": 5, "head_dim": 12}, tensors=with_steady_mixtures)
    balanced = {"output_router_logits": True, "router_aux_loss_coef": 3.0, "norm_topk_prob": True}
    yield qwen(
        "load-balancing loss", {**balanced, "num_hidden_layers": 3, "mlp_only_layers": [0], "num_experts_per_tok": 2}
    )


CHECKPOINTS = list(qwens())
