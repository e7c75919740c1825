"""Tiny checkpoints of Gemma 4 with images and videos."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from tests.models.prompts import IMAGE, VIDEO
from tests.models.tiny import Tensors, Tiny
from tests.models.tiny_gemma4_text import (
    FULL,
    GEMMA4_TEXT,
    MIXTURE,
    SLIDING,
    TIED,
    with_unused_projections,
    without_head,
)
from tests.models.variants import variant, with_steady_mixtures

AUDIO = 92
TOP = ("architectures", "eos_token_id", "torch_dtype", "tie_word_embeddings")
TEXT = {**{name: value for name, value in GEMMA4_TEXT.items() if name not in TOP}, "pad_token_id": 0}
VISION: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "default_output_length": 6,
    "head_dim": 8,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 24,
    "intermediate_size": 40,
    "model_type": "gemma4_vision",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 30,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
    "standardize": False,
    "use_clipped_linears": True,
}
AUDIO_TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "model_type": "gemma4_audio",
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "output_proj_dims": 12,
    "subsampling_conv_channels": [4, 2],
}
GEMMA4: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "audio_config": AUDIO_TOWER,
    "audio_token_id": AUDIO,
    "boa_token_id": 95,
    "boi_token_id": 93,
    "eoa_token_index": 96,
    "eoi_token_id": 94,
    "eos_token_id": [1, 97],
    "image_token_id": IMAGE,
    "initializer_range": 0.02,
    "model_type": "gemma4",
    "text_config": TEXT,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "video_token_id": VIDEO,
    "vision_config": VISION,
    "vision_soft_tokens_per_image": 6,
}
DENSE = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "use_double_wide_mlp": False}
BIDIRECTIONAL = {"use_bidirectional_attention": "vision"}


def on_the_hub(then: Callable[[Tensors], Tensors] = without_head) -> Callable[[Tensors], Tensors]:
    """Gives the tower ranges that clip some values, and statistics of features."""

    def change(tensors: Tensors) -> Tensors:
        generator = torch.Generator().manual_seed(1)
        for name, tensor in tensors.items():
            if name.startswith("model.vision_tower"):
                value = 1.5 + torch.rand(tensor.shape, generator=generator)
                if name.endswith(("_min", "_max", "std_bias")):
                    tensor.copy_(-value if name.endswith("_min") else value)
                elif name.endswith("std_scale"):
                    tensor.copy_(value / 2)
        return then(tensors)

    return change


def gemma4(
    name: str,
    text: Mapping[str, Any] | None = None,
    vision: Mapping[str, Any] | None = None,
    top: Mapping[str, Any] | None = None,
    absent: tuple[str, ...] = (),
    **options: Any,
) -> Tiny:
    """A checkpoint whose config.json is `GEMMA4` with the given changes."""

    def changed(base: Mapping[str, Any], changes: Mapping[str, Any] | None) -> dict[str, Any]:
        return {key: value for key, value in {**base, **(changes or {})}.items() if key not in absent}

    parts = {"text_config": changed(TEXT, text), "vision_config": changed(VISION, vision)}
    return variant(GEMMA4, name, {**parts, **(top or {})}, absent, **{"tensors": on_the_hub(), **options})


def gemma4s() -> Iterator[Tiny]:
    bf16 = {"torch_dtype": "bfloat16", "audio_config": None}
    yield gemma4("as on the hub, small", top=bf16, stored_dtype=torch.bfloat16, shards=3)
    large = {**TIED, **DENSE, **BIDIRECTIONAL, "sliding_window": 9}
    tower = {"standardize": True, "use_clipped_linears": False, "head_dim": 12, "num_key_value_heads": 4}
    yield gemma4("as on the hub, large", large, tower, {"audio_config": None})
    yield gemma4("with audio")
    mixture = {**MIXTURE, **TIED, **BIDIRECTIONAL, "use_double_wide_mlp": False}
    steady = on_the_hub(lambda tensors: with_steady_mixtures(without_head(tensors)))
    yield gemma4("mixture", mixture, {**tower, "pooling_kernel_size": 3, "patch_size": 2}, tensors=steady)
    yield gemma4("saved by transformers", {**TIED, "rms_norm_eps": 1e-3}, by_transformers=True, shards=2)
    yield gemma4("saved by transformers, mixture", mixture, {"standardize": True}, by_transformers=True)
    yield gemma4(
        "minimal config, untied",
        {"num_hidden_layers": 7},
        {"num_hidden_layers": 3, "rms_norm_eps": 0.01},
        {"tie_word_embeddings": False, "audio_config": None},
        absent=(
            "attention_bias", "attention_dropout", "attention_k_eq_v", "audio_token_id", "default_output_length",
            "enable_moe_block", "final_logit_softcapping", "hidden_activation", "initializer_range", "layer_types",
            "max_position_embeddings", "moe_intermediate_size", "num_experts", "num_global_key_value_heads",
            "num_kv_shared_layers", "pad_token_id", "pooling_kernel_size", "rope_parameters", "standardize",
            "top_k_experts", "torch_dtype", "use_bidirectional_attention", "use_clipped_linears",
            "use_double_wide_mlp", "vision_soft_tokens_per_image",
        ),
        tensors=on_the_hub(dict),
    )  # fmt: skip

    def with_unused(tensors: Tensors) -> Tensors:
        decoder = {name: tensor for name, tensor in tensors.items() if "language_model" in name}
        return {**tensors, **with_unused_projections(decoder)}

    unused = on_the_hub(lambda tensors: with_unused(without_head(tensors)))
    types = [FULL, SLIDING, SLIDING, FULL]
    yield gemma4(
        "unused projections", {**BIDIRECTIONAL, "layer_types": types, "num_kv_shared_layers": 1}, tensors=unused
    )


CHECKPOINTS = list(gemma4s())
