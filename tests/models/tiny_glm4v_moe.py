"""Tiny checkpoints of GLM-4.5V."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.models.tiny import HEAD, Tiny, without
from tests.models.tiny_glm4_moe import GLM4_MOE, ON_THE_HUB
from tests.models.tiny_glm4v import TOP as GLM4V
from tests.models.tiny_glm4v import VISION, YARN
from tests.models.variants import variant, with_steady_mixtures

ELSEWHERE = ("architectures", "num_nextn_predict_layers", "rope_scaling", "tie_word_embeddings", "torch_dtype")
TEXT: dict[str, Any] = {
    **{name: value for name, value in GLM4_MOE.items() if name not in ELSEWHERE},
    "model_type": "glm4v_moe_text",
    "rope_parameters": {"mrope_section": [1, 1, 1], "rope_theta": 10000.0, "rope_type": "default"},
    "use_qk_norm": False,
}
TOP: dict[str, Any] = {
    **GLM4V,
    "architectures": ["Glm4vMoeForConditionalGeneration"],
    "model_type": "glm4v_moe",
    "text_config": TEXT,
    "vision_config": {**VISION, "model_type": "glm4v_moe", "depth": 1, "out_hidden_size": 32},
}
SIZES = ("hidden_size", "intermediate_size", "moe_intermediate_size", "num_attention_heads", "num_hidden_layers")


def glms() -> Iterator[Tiny]:
    glm = partial(variant, TOP, tensors=ON_THE_HUB)
    yield glm("as on the hub", {"torch_dtype": "bfloat16"}, stored_dtype=torch.bfloat16, shards=2)
    changes = {"n_routed_experts": 3, "attention_bias": False, "num_key_value_heads": 4}
    yield variant(TOP, "saved by transformers", {"text_config": {**TEXT, **changes}}, by_transformers=True)
    groups = {
        "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": False,
        "first_k_dense_replace": 0, "output_router_logits": True, "router_aux_loss_coef": 3.0,
    }  # fmt: skip
    yield glm("groups, scaling, load-balancing loss", {"text_config": {**TEXT, **groups}})
    other = {name: value for name, value in TEXT.items() if name != "rope_parameters"}
    rope = {"rope_scaling": {**YARN, "mrope_section": [2, 0, 4]}, "rope_theta": 500, "partial_rotary_factor": 1.0}
    yield variant(
        TOP,
        "stacked experts, yarn, tied",
        {"text_config": other | rope, "tie_word_embeddings": True},
        tensors=lambda tensors: without(HEAD)(with_steady_mixtures(tensors)),
    )
    small = {**{name: TEXT[name] for name in SIZES}, "head_dim": 128, "num_key_value_heads": 2, "vocab_size": 101}
    yield glm("minimal config", {"text_config": {**small, "n_routed_experts": 9}}, absent=("tie_word_embeddings",))


CHECKPOINTS = list(glms())
