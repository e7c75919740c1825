"""Qwen3-VL, MoE models, such as Qwen3-VL-30B-A3B and Qwen3-VL-235B-A22B (Bai et al. 2025).

    pixels -> patches + positions -> L' x [ x += attention(norm(x));  x += mlp(norm(x)) ] -> merge 2 x 2 -> embeddings
    tokens -> embedding, vision embeddings at image and video tokens -> Qwen3-MoE

Distinctive: Qwen3-VL with the decoder of Qwen3-MoE, whose expert weights add up to one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from ligerzoo.models.config import refuse_unless
from ligerzoo.models.moe import MoECausalLM, SparseStepMoEConfig
from ligerzoo.models.qwen3 import qwen3_decoder
from ligerzoo.models.qwen3_moe import qwen3_moe_mlp
from ligerzoo.models.qwen3_vision import (
    Qwen3VisionLM,
    Qwen3VisionLMConfig,
    Qwen3VLVisionConfig,
    interleaved_rotary,
    qwen3_tower,
)


@dataclass(frozen=True, kw_only=True)
class Qwen3VLMoeConfig(SparseStepMoEConfig, Qwen3VisionLMConfig):
    """Configuration of Qwen3-VL-MoE. Defaults: those of transformers' Qwen3VLMoeTextConfig.

    `norm_topk_prob` must be true.
    """

    intermediate_size: int = 5632
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 16
    max_position_embeddings: int = 128000
    rope_theta: float = 5e5
    moe_intermediate_size: int = 1408
    num_experts: int = 60
    num_experts_per_tok: int = 4
    norm_topk_prob: bool = True
    vision_config: Qwen3VLVisionConfig = field(default_factory=lambda: Qwen3VLVisionConfig(out_hidden_size=2048))

    def validate(self) -> None:
        super().validate()
        value = self.norm_topk_prob
        refuse_unless(value is True, "norm_topk_prob", value, "True", "not supported by Qwen3-VL-MoE")


class Qwen3VLMoe(Qwen3VisionLM, MoECausalLM):
    """Qwen3-VL-MoE with a language-model head."""

    config: Qwen3VLMoeConfig

    def __init__(self, config: Qwen3VLMoeConfig) -> None:
        c = config
        rotary = interleaved_rotary(c)
        decoder = qwen3_decoder(c, lambda layer: rotary, partial(qwen3_moe_mlp, c), bias=c.attention_bias)
        v = c.vision_config
        super().__init__(c, decoder, qwen3_tower(v, v.deepstack_visual_indexes))
