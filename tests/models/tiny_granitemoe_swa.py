"""Tiny checkpoints of Granite Swash with MoE."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import transformers
from packaging.version import Version

from tests.models.tiny import HEAD, Tensors, Tiny, without
from tests.models.tiny_granite_swa import GRANITE_SWA
from tests.models.variants import variant, with_steady_mixtures

GRANITE_MOE: dict[str, Any] = {
    **{name: value for name, value in GRANITE_SWA.items() if name != "mlp_bias"},
    "architectures": ["GraniteMoeSWAForCausalLM"],
    "intermediate_size": 24,
    "model_type": "granitemoe_swa",
    "num_experts_per_tok": 3,
    "num_local_experts": 8,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "shared_intermediate_size": 0,
    "tie_word_embeddings": True,
}
MODULES = (".mlp.gate.", ".block_sparse_moe.router."), (".mlp.experts.", ".block_sparse_moe.experts.")


def steady(tensors: Tensors) -> Tensors:
    """See `with_steady_mixtures`; without a head."""
    for ours, theirs in MODULES:
        tensors = {name.replace(theirs, ours): tensor for name, tensor in tensors.items()}
    tensors = with_steady_mixtures(without(HEAD)(tensors))
    for ours, theirs in MODULES:
        tensors = {name.replace(ours, theirs): tensor for name, tensor in tensors.items()}
    return tensors


def granites() -> Iterator[Tiny]:
    granite = partial(variant, GRANITE_MOE, tensors=steady)
    yield granite("as on the hub", {"torch_dtype": "bfloat16"}, stored_dtype=torch.bfloat16)
    yield granite(
        "minimal config",
        {"num_attention_heads": 8},
        absent=(
            "attention_bias", "attention_multiplier", "embedding_multiplier", "hidden_act", "layer_rope_theta",
            "layer_types", "logits_scaling", "max_position_embeddings", "num_experts_per_tok", "num_key_value_heads",
            "num_local_experts", "output_router_logits", "residual_multiplier", "rms_norm_eps", "rope_scaling",
            "rope_theta", "router_aux_loss_coef", "shared_intermediate_size", "sliding_window", "tie_word_embeddings",
            "torch_dtype",
        ),
        tensors=dict,
    )  # fmt: skip
    shared = {"shared_intermediate_size": 40, "attention_bias": True, "tie_word_embeddings": False}
    yield variant(GRANITE_MOE, "biases, shared expert, untied", shared)
    yield variant(GRANITE_MOE, "saved by transformers", {"shared_intermediate_size": 40}, by_transformers=True)
    if Version(transformers.__version__) < Version("5.23"):
        return  # it fails to compute the load-balancing loss
    balanced = {"output_router_logits": True, "router_aux_loss_coef": 3.0, "num_experts_per_tok": 2}
    yield granite("load-balancing loss", balanced, tensors=without(HEAD))


CHECKPOINTS = list(granites())
