"""Tiny MiniMax-M2 checkpoints."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from tests.models.tiny import Tensors, Tiny
from tests.models.variants import on_the_hub, variant, with_steady_mixtures

MINIMAX_M2: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "attention_dropout": 0.0,
    "attn_type_list": [1],
    "bos_token_id": None,
    "eos_token_id": None,
    "head_dim": 12,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 24,
    "max_position_embeddings": 128,
    "model_type": "minimax_m2",
    "num_attention_heads": 4,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "output_router_logits": False,
    "partial_rotary_factor": 0.5,  # transformers 5.17 ignores rotary_dim
    "qk_norm_type": "per_layer",
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 6,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 101,
}
_MOVED = on_the_hub("block_sparse_moe", "w1", "w3", "w2")


def on_hub(move: Callable[[Tensors], Tensors], mixture: str) -> Callable[[Tensors], Tensors]:
    """Returns a function that moves the routers' biases too, and rounds them, since transformers loads them in bf16."""

    def moved(tensors: Tensors) -> Tensors:
        return {
            name.replace(".mlp.e_score", f".{mixture}.e_score").replace(".mlp.experts.", f".{mixture}.experts."):
                tensor.bfloat16().float() if name.endswith("e_score_correction_bias") else tensor
            for name, tensor in move(tensors).items()
        }  # fmt: skip

    return moved


ON_THE_HUB = on_hub(_MOVED, "block_sparse_moe")


def minimaxes() -> Iterator[Tiny]:
    minimax = partial(variant, MINIMAX_M2, tensors=ON_THE_HUB)
    yield minimax("plain")
    yield minimax(
        "minimal config",
        {"head_dim": 128, "num_hidden_layers": 2, "attn_type_list": [1, 1]},
        absent=(
            "attention_dropout", "head_dim", "hidden_act", "initializer_range", "max_position_embeddings",
            "output_router_logits", "partial_rotary_factor", "qk_norm_type",
            "rms_norm_eps", "rope_theta", "rotary_dim", "router_aux_loss_coef",
            "router_jitter_noise", "scoring_func", "shared_intermediate_size", "use_qk_norm",
            "use_routing_bias",
        ),
        stored_dtype=torch.bfloat16,
    )  # fmt: skip
    saved = {"num_local_experts": 3, "num_attention_heads": 8}
    yield variant(MINIMAX_M2, "saved by transformers", saved, by_transformers=True, shards=2)
    stacked = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
    yield variant(
        MINIMAX_M2, "stacked experts", stacked, absent=("partial_rotary_factor", "rope_theta", "rotary_dim"),
        tensors=on_hub(with_steady_mixtures, "mlp"),
    )  # fmt: skip
    yield minimax("load-balancing loss", {"output_router_logits": True, "router_aux_loss_coef": 3.0})


CHECKPOINTS = list(minimaxes())
