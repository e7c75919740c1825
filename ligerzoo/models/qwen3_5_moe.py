"""Qwen3.5 and Qwen3.6, MoE models, such as Qwen3.6-35B-A3B (Qwen Team 2026).

    pixels -> patches + positions -> L' x [ x += attention(norm(x));  x += mlp(norm(x)) ] -> merge 2 x 2 -> embeddings
    tokens -> embedding, vision embeddings at image and video tokens -> Qwen3.5 with MoE

Distinctive: Qwen3.5 with images and videos, and MoE with a gated shared expert in every layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ligerzoo.models.moe import MoECausalLM
from ligerzoo.models.qwen3_5 import Qwen3_5VisionLMConfig
from ligerzoo.models.qwen3_5_moe_text import Qwen3_5MoeTextConfig, qwen3_5_moe_decoder
from ligerzoo.models.qwen3_vision import Qwen3VisionConfig, Qwen3VisionLM, interleaved_rotary, qwen3_tower


@dataclass(frozen=True, kw_only=True)
class Qwen3_5MoeConfig(Qwen3_5MoeTextConfig, Qwen3_5VisionLMConfig):
    """Configuration of Qwen3.5 with MoE. Defaults: those of transformers' Qwen3_5MoeConfig."""

    vision_config: Qwen3VisionConfig = field(default_factory=lambda: Qwen3VisionConfig(out_hidden_size=2048))


class Qwen3_5Moe(Qwen3VisionLM, MoECausalLM):
    """Qwen3.5 with MoE and a language-model head."""

    config: Qwen3_5MoeConfig

    def __init__(self, config: Qwen3_5MoeConfig) -> None:
        decoder = qwen3_5_moe_decoder(config, interleaved_rotary(config))
        super().__init__(config, decoder, qwen3_tower(config.vision_config))
