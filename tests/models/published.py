"""Sizes of published models of every architecture, with few layers: every kind of layer occurs."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ligerzoo.convert import architecture_of
from ligerzoo.models import (
    Gemma3VisionConfig,
    Gemma4UnifiedVisionConfig,
    Gemma4VisionConfig,
    Glm4vVisionConfig,
    Mistral3VisionConfig,
    MuseGlimmerVisionConfig,
    Qwen2_5VLVisionConfig,
    Qwen2VLVisionConfig,
    Qwen3VisionConfig,
    Qwen3VLVisionConfig,
)

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


def sized(*values: int, **others: Any) -> dict[str, Any]:
    """Returns fields of a config: `SIZES` in their order, and others."""
    return {**dict(zip(SIZES, values, strict=False)), **others}


SIGLIP = Gemma3VisionConfig(
    hidden_size=1152, intermediate_size=4304, num_attention_heads=16, num_hidden_layers=2, image_size=896, patch_size=14
)


def gemma4_tower(hidden_size: int, inner: int, heads: int, head_dim: int) -> Gemma4VisionConfig:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": head_dim}
    return Gemma4VisionConfig(hidden_size=hidden_size, intermediate_size=inner, num_hidden_layers=2, **sizes)


def qwen2_vision(hidden_size: int) -> Qwen2VLVisionConfig:
    return Qwen2VLVisionConfig(depth=2, hidden_size=hidden_size)


def qwen2_5_vision(hidden_size: int, inner: int) -> Qwen2_5VLVisionConfig:
    return Qwen2_5VLVisionConfig(
        depth=2, hidden_size=1280, intermediate_size=inner, out_hidden_size=hidden_size, fullatt_block_indexes=[1]
    )


def qwen3_vision(out_hidden_size: int, **others: int) -> Qwen3VLVisionConfig:
    return Qwen3VLVisionConfig(depth=2, out_hidden_size=out_hidden_size, deepstack_visual_indexes=[0], **others)


MISTRAL = 32768
LLAMA_3 = 128256
GEMMA = 256000
GEMMA_3 = 262144
QWEN = 151936
QWEN_LARGE = 152064
QWEN3_5 = 248320
GLM = 151552

GEMMA_4 = {"layer_types": ["sliding_attention", "full_attention"] * 2}
GEMMA_4_MIXTURE = {
    "enable_moe_block": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 704,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 2,
}

PUBLISHED: dict[str, list[dict[str, Any]]] = {
    **{name: [{}] for name in ("bamba", "falcon_h1", "granitemoehybrid", "nemotron_h")},
    "apertus": [sized(131072, 4096, 21504, 32, 8), sized(131072, 8192, 43008, 64, 8)],
    "granite_swa": [{}],
    "granitemoe_swa": [sized(100352, 1536, 512, 16, 4, num_experts=64, num_experts_per_tok=8)],
    "hyperclovax": [sized(110592, 6144, 14336, 48, 8, head_dim=128)],
    "internlm3": [{}],
    "iquestcoder": [{}],
    "flint": [{}],
    "kolibri1": [{}],
    "mellum": [{}],
    "kimi_linear": [{}],
    "llama4_text": [{}, {"interleave_moe_layer_step": 2, "num_experts": 128}],
    "olmo_hybrid": [{}],
    "olmoe": [{}],
    "sarvam_mla": [{}],
    "sarvam_moe": [{}],
    "youtu": [{}],
    "arcee": [sized(128003, 2560, 18432, 20, 4, head_dim=128)],
    "deepseek_v2": [
        sized(
            102400, 5120, 12288, 128, num_experts=160, n_group=8, topk_group=3, moe_intermediate_size=1536,
            first_k_dense_replace=1,
        ),
        sized(102400, 2048, 10944, 16, q_lora_rank=None, moe_intermediate_size=1408, first_k_dense_replace=1),
    ],
    "deepseek_v3": [
        {},
        sized(163840, 7168, 18432, 64, num_experts=384, n_group=1, topk_group=1, first_k_dense_replace=1),
        sized(
            163840, 2048, 11264, 16, num_experts=64, num_experts_per_tok=6, n_group=1, topk_group=1, q_lora_rank=None,
            moe_intermediate_size=1408, n_shared_experts=2, first_k_dense_replace=1,
        ),
    ],
    "ernie4_5": [{}],
    "ernie4_5_moe": [{}, sized(103424, 8192, 28672, 64, 8, moe_intermediate_size=3584, tie_word_embeddings=False)],
    "exaone": [{}, sized(102400, 2560, 7168, 32, 8), sized(102400, 5120, 27392, 40, 8)],
    "exaone4": [sized(102400, 2048, 4096, 32, 8), sized(102400, 5120, 27392, 40, 8)],
    "gemma": [{}, sized(GEMMA, 2048, 16384, 8, 1)],
    "gemma2": [{}, sized(GEMMA, 3584, 14336, 16, 8), sized(GEMMA, 4608, 36864, 32, 16, head_dim=128)],
    "gemma3": [
        sized(GEMMA_3 + 64, 2560, 10240, 8, 4, vision_config=SIGLIP),
        sized(GEMMA_3 + 64, 3840, 15360, 16, 8, vision_config=SIGLIP),
        sized(GEMMA_3 + 64, 5376, 21504, 32, 16, head_dim=128, vision_config=SIGLIP),
    ],
    "gemma3_text": [sized(GEMMA_3, 640, 2048, 4, 1), sized(GEMMA_3, 1152, 6912, 4, 1)],
    "gemma4": [
        sized(
            GEMMA_3, 1536, 6144, 8, 1, num_kv_shared_layers=2, **GEMMA_4,
            vision_config=gemma4_tower(768, 3072, 12, 64),
        ),
        sized(
            GEMMA_3, 5376, 21504, 32, 16, hidden_size_per_layer_input=0, attention_k_eq_v=True,
            num_global_key_value_heads=4, **GEMMA_4, vision_config=gemma4_tower(1152, 4304, 16, 72),
        ),
    ],
    "gemma4_unified": [
        sized(GEMMA_3, 3840, 15360, 16, 8, attention_k_eq_v=True, num_global_key_value_heads=1, **GEMMA_4,
              vision_config=Gemma4UnifiedVisionConfig()),
    ],
    "gemma4_text": [
        sized(GEMMA_3, 2560, 10240, 8, 2, num_kv_shared_layers=2, **GEMMA_4),
        sized(GEMMA_3, 2816, 2112, 16, 8, hidden_size_per_layer_input=0, **GEMMA_4, **GEMMA_4_MIXTURE),
    ],
    "glm": [{}],
    "glm4": [{}, sized(GLM, 6144, 23040, 48, 2)],
    "glm4_moe": [
        sized(GLM, 4096, 10944, 96, 8, head_dim=128),
        sized(
            GLM, 5120, 12288, 96, 8, head_dim=128, num_experts=160, moe_intermediate_size=1536, use_qk_norm=True,
            first_k_dense_replace=3,
        ),
    ],
    "glm4_moe_lite": [{}],
    "glm4v": [{"vision_config": Glm4vVisionConfig(depth=2)}],
    "glm4v_moe": [{"head_dim": 128, "vision_config": Glm4vVisionConfig(depth=2)}],
    "gpt_oss": [{"num_experts": 32}, {}],
    "granite": [sized(49155, 2048, 8192, 32, 8), sized(49155, 4096, 12800, 32, 8)],
    "hunyuan_v1_dense": [
        sized(128167, 4096, 14336, 32, 8, head_dim=128), sized(120818, 2048, 6144, 16, 4, head_dim=128),
    ],
    "lfm2": [{}],
    "lfm2_moe": [{}],
    "lfm3": [{}],
    "llama": [
        sized(32000, 4096, 11008, 32), sized(32000, 5120, 13824, 40), sized(32000, 8192, 28672, 64, 8),
        sized(LLAMA_3, 2048, 8192, 32, 8), sized(LLAMA_3, 3072, 8192, 24, 8), sized(LLAMA_3, 4096, 14336, 32, 8),
        sized(LLAMA_3, 8192, 28672, 64, 8), sized(LLAMA_3, 16384, 53248, 128, 8), sized(49152, 576, 1536, 9, 3),
        sized(49152, 2048, 8192, 32, 32),
    ],
    "minimax_m2": [{"partial_rotary_factor": 0.5}],
    "ministral": [sized(131072, 4096, 12288, 32, 8)],
    "ministral3": [sized(131072, 3072, 9216, 32, 8), {}, sized(131072, 5120, 16384, 32, 8)],
    "mistral": [
        {}, sized(131072, 5120, 14336, 32, 8, head_dim=128), sized(131072, 5120, 32768, 32, 8, head_dim=128),
        sized(MISTRAL, 12288, 28672, 96, 8),
    ],
    "mistral3": [
        {"vision_config": Mistral3VisionConfig(num_hidden_layers=2, patch_size=14)},
        sized(131072, 3072, 9216, 32, 8, vision_config=Mistral3VisionConfig(num_hidden_layers=2, patch_size=14)),
    ],
    "mixtral": [{}, sized(MISTRAL, 6144, 16384, 48, 8)],
    "mllama": [{}, sized(LLAMA_3, 8192, 28672, 64, 8)],
    "muse_glimmer": [{"vision_config": MuseGlimmerVisionConfig(depth=2)}],
    "muse_glimmer_text": [{}],
    "nanochat": [sized(65536, 1280, 5120, 10, 10), sized(65536, 2048, 8192, 16, 16)],
    "olmo2": [
        sized(100352, 2048, 8192, 16), sized(100352, 4096, 11008, 32), sized(100352, 5120, 13824, 40),
        sized(100352, 5120, 27648, 40, 8),
    ],
    "olmo3": [sized(100278, 4096, 11008, 32), sized(100278, 5120, 27648, 40, 8)],
    "phi3": [
        {}, sized(32064, 5120, 17920, 40, 10), sized(100352, 5120, 17920, 40, 10),
        sized(200064, 3072, 8192, 24, 8, partial_rotary_factor=0.75),
    ],
    "qwen2": [
        sized(QWEN, 896, 4864, 14, 2), sized(QWEN, 1536, 8960, 12, 2), sized(QWEN, 2048, 11008, 16, 2),
        sized(QWEN_LARGE, 3584, 18944, 28, 4), sized(QWEN_LARGE, 5120, 13824, 40, 8),
        sized(QWEN_LARGE, 5120, 27648, 40, 8), sized(QWEN_LARGE, 8192, 29568, 64, 8),
    ],
    "qwen2_5_vl": [
        sized(QWEN, 2048, 11008, 16, 2, vision_config=qwen2_5_vision(2048, 3420)),
        sized(QWEN_LARGE, 3584, 18944, 28, 4, vision_config=qwen2_5_vision(3584, 3420)),
        sized(QWEN_LARGE, 5120, 27648, 40, 8, vision_config=qwen2_5_vision(5120, 3456)),
        sized(QWEN_LARGE, 8192, 29568, 64, 8, vision_config=qwen2_5_vision(8192, 3456)),
    ],
    "qwen2_moe": [
        {},
        sized(
            QWEN, 3584, 18944, 28, 4, num_experts=64, num_experts_per_tok=8, moe_intermediate_size=2560,
            shared_expert_intermediate_size=20480,
        ),
    ],
    "qwen2_vl": [
        sized(QWEN, 1536, 8960, 12, 2, vision_config=qwen2_vision(1536)),
        sized(QWEN_LARGE, 3584, 18944, 28, 4, vision_config=qwen2_vision(3584)),
        sized(QWEN_LARGE, 8192, 29568, 64, 8, vision_config=qwen2_vision(8192)),
    ],
    "qwen3": [
        sized(QWEN, 1024, 3072, 16, 8), sized(QWEN, 2048, 6144, 16, 8), sized(QWEN, 2560, 9728, 32, 8),
        sized(QWEN, 4096, 12288, 32, 8), sized(QWEN, 5120, 17408, 40, 8), sized(QWEN, 5120, 25600, 64, 8),
    ],
    "qwen3_5": [
        {},
        sized(
            QWEN3_5, 5120, 17408, 24, 4, linear_num_value_heads=48,
            vision_config=Qwen3VisionConfig(depth=2, out_hidden_size=5120),
        ),
    ],
    "qwen3_5_moe": [{}],
    "qwen3_5_moe_text": [
        sized(
            QWEN3_5, hidden, 11008, 32, 2, num_experts=experts, moe_intermediate_size=1024,
            shared_expert_intermediate_size=1024, linear_num_value_heads=64,
        )
        for hidden, experts in ((3072, 256), (4096, 512))
    ],
    "qwen3_5_text": [sized(QWEN3_5, 2560, 9216, 16, 4)],
    "qwen3_moe": [
        sized(QWEN, 2048, 6144, 32, 4, head_dim=128),
        sized(QWEN, 4096, 12288, 64, 4, head_dim=128, moe_intermediate_size=1536),
        sized(QWEN, 6144, 8192, 96, 8, head_dim=128, moe_intermediate_size=2560, num_experts=160),
    ],
    "qwen3_next": [{}],
    "qwen3_vl": [
        sized(
            QWEN, 2048, 6144, 16, 8,
            vision_config=qwen3_vision(2048, hidden_size=1024, intermediate_size=4096),
        ),
        sized(QWEN, 4096, 12288, 32, 8, vision_config=qwen3_vision(4096)),
        sized(QWEN, 5120, 25600, 64, 8, vision_config=qwen3_vision(5120)),
    ],
    "qwen3_vl_moe": [
        sized(
            QWEN, 2048, 6144, 32, 4, head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
            vision_config=qwen3_vision(2048),
        ),
    ],
    "seed_oss": [sized(155136, 5120, 27648, 80, 8)],
    "smollm3": [{}],
}  # fmt: skip
"""Fields of configs by `model_type`, where they differ from those of its config class."""

LAYERS = 4
"""Number of blocks: of each kind of every architecture at least one, such as dense MLPs before experts."""


def projections(model_type: str, fields: dict[str, Any]) -> Iterator[tuple[int, int, bool]]:
    """Yields outputs, inputs and whether there is a bias of every linear layer, head and router of a model."""
    architecture = architecture_of(model_type)
    with torch.device("meta"):
        model = architecture.model_class(architecture.config_class(**{"num_hidden_layers": LAYERS, **fields}))
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None and weight.ndim == 2 and not isinstance(module, nn.Embedding):
            yield *weight.shape, module._parameters.get("bias") is not None
