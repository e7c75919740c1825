"""Tiny checkpoints of Gemma 4 12B, which has no vision tower."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from tests.models.tiny import Tensors, Tiny
from tests.models.tiny_gemma4 import GEMMA4, TEXT, TIED
from tests.models.tiny_gemma4_text import FULL, SLIDING, without_head
from tests.models.variants import variant

PER_LAYER = ("hidden_size_per_layer_input", "vocab_size_per_layer_input", "enable_moe_block")
UNIFIED_TEXT: dict[str, Any] = {
    **TEXT,
    **TIED,
    "enable_moe_block": False,
    "hidden_size_per_layer_input": 0,
    "model_type": "gemma4_unified_text",
    "num_kv_shared_layers": 0,
    "use_bidirectional_attention": "vision",
    "use_double_wide_mlp": False,
}
PROJECTOR: dict[str, Any] = {
    "mm_embed_dim": 28,
    "mm_posemb_size": 9,
    "model_patch_size": 6,
    "model_type": "gemma4_unified_vision",
    "num_soft_tokens": 6,
    "output_proj_dims": 28,
    "patch_size": 3,
    "pooling_kernel_size": 2,
    "rms_norm_eps": 1e-06,
}
UNIFIED: dict[str, Any] = {
    **GEMMA4,
    "architectures": ["Gemma4UnifiedForConditionalGeneration"],
    "audio_config": {"audio_embed_dim": 12, "model_type": "gemma4_unified_audio", "rms_norm_eps": 1e-06},
    "model_type": "gemma4_unified",
    "text_config": UNIFIED_TEXT,
    "vision_config": PROJECTOR,
}


def on_the_hub(then: Callable[[Tensors], Tensors] = without_head) -> Callable[[Tensors], Tensors]:
    def rename(name: str) -> str:
        name = name.replace("embed_vision.multimodal_embedder.", "embed_vision.")
        is_projection = "embedding_projection" in name
        return name if is_projection else name.replace("model.embed_vision.", "model.vision_embedder.")

    return lambda tensors: then({rename(name): tensor for name, tensor in tensors.items()})


def unifieds() -> Iterator[Tiny]:
    def unified(
        name: str, text: Mapping[str, Any] | None = None, vision: Mapping[str, Any] | None = None, **options: Any
    ) -> Tiny:
        top, absent = options.pop("top", {}), options.pop("absent", ())
        parts = {"text_config": (UNIFIED_TEXT, text), "vision_config": (PROJECTOR, vision)}
        changed = {
            part: {key: value for key, value in {**base, **(changes or {})}.items() if key not in absent}
            for part, (base, changes) in parts.items()
        }
        return variant(UNIFIED, name, {**changed, **top}, absent, **{"tensors": on_the_hub(), **options})

    bf16 = {"torch_dtype": "bfloat16"}
    one_direction = {"use_bidirectional_attention": None}
    yield unified(
        "one direction, without audio", one_direction, top={**bf16, "audio_config": None}, stored_dtype=torch.bfloat16
    )
    yield unified("as on the hub", top=bf16, stored_dtype=torch.bfloat16, shards=3)
    yield unified("saved by transformers", {"sliding_window": 5}, by_transformers=True, shards=2)
    shared = {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}
    yield unified("shared keys", shared, {"rms_norm_eps": 0.1})
    untied = {"attention_bias": True, "attention_k_eq_v": False, "num_global_key_value_heads": None}
    yield unified("in-memory layout, untied, biases", untied, top={"tie_word_embeddings": False}, tensors=dict)
    yield unified(
        "minimal config",
        {"num_hidden_layers": 3, "layer_types": [FULL, SLIDING, SLIDING]},
        {"patch_size": 2, "pooling_kernel_size": 3},
        absent=(
            *PER_LAYER, "attention_bias", "attention_dropout", "attention_k_eq_v", "audio_config", "audio_token_id",
            "final_logit_softcapping", "hidden_activation", "initializer_range", "max_position_embeddings",
            "model_patch_size", "moe_intermediate_size", "num_experts", "num_global_key_value_heads",
            "num_kv_shared_layers", "pad_token_id", "rope_parameters", "sliding_window", "top_k_experts",
            "torch_dtype", "use_bidirectional_attention", "use_double_wide_mlp",
        ),
    )  # fmt: skip


CHECKPOINTS = list(unifieds())
