"""Tiny Kolibri 1 checkpoints."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.models.tiny import Tensors, Tiny
from tests.models.tiny_flint import FULL, SLIDING
from tests.models.tiny_qwen3_moe import ON_THE_HUB, QWEN3_MOE
from tests.models.variants import variant, with_steady_mixtures

_DENSE = "attention_bias", "decoder_sparse_step", "intermediate_size", "mlp_only_layers", "router_aux_loss_coef"
KOLIBRI: dict[str, Any] = {
    **{name: value for name, value in QWEN3_MOE.items() if name not in (*_DENSE, "max_window_layers")},
    "architectures": ["Kolibri1ForCausalLM"],
    "layer_types": [SLIDING, FULL],
    "model_type": "kolibri1",
    "norm_topk_prob": False,
    "num_hidden_layers": 2,
    "shared_expert_intermediate_size": 40,
    "use_sliding_window": True,
}
NAMES = {
    ".mlp.gate.e_score_correction_bias": ".moe.router.expert_bias",
    ".post_self_attn_layernorm.": ".post_attn_norm.",
    ".post_mlp_layernorm.": ".post_ffn_norm.",
}


def as_stored(tensors: Tensors) -> Tensors:
    """The names in files."""
    tensors = ON_THE_HUB(tensors)
    for ours, stored in NAMES.items():
        tensors = {name.replace(ours, stored): tensor for name, tensor in tensors.items()}
    return tensors


def kolibris() -> Iterator[Tiny]:
    kolibri = partial(variant, KOLIBRI, tensors=as_stored)
    yield kolibri("as on the hub", {"torch_dtype": "bfloat16"}, stored_dtype=torch.bfloat16)
    yield kolibri(
        "minimal config",
        {"num_attention_heads": 8, "num_hidden_layers": 1},
        absent=(
            "attention_dropout", "head_dim", "hidden_act", "initializer_range", "layer_types",
            "max_position_embeddings", "norm_topk_prob", "num_experts_per_tok", "num_key_value_heads",
            "output_router_logits", "rms_norm_eps", "rope_scaling", "rope_theta", "shared_expert_intermediate_size",
            "sliding_window", "tie_word_embeddings", "torch_dtype", "use_sliding_window",
        ),
    )  # fmt: skip
    yield kolibri("renormalized, full attention", {"norm_topk_prob": True, "layer_types": [FULL] * 2})
    yield variant(KOLIBRI, "saved by transformers", {"num_local_experts": 3}, by_transformers=True, shards=2)
    yield variant(KOLIBRI, "stacked experts", {"layer_types": [FULL, SLIDING]}, tensors=with_steady_mixtures)


CHECKPOINTS = list(kolibris())
