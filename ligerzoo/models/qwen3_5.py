"""Qwen3.5, Qwen3.6 and Qwen3.8, dense models (Qwen Team 2026).

    pixels -> patches + positions -> L' x [ x += attention(norm(x));  x += mlp(norm(x)) ] -> merge 2 x 2 -> embeddings
    tokens -> embedding, vision embeddings at image and video tokens -> Qwen3.5

Distinctive: the vision tower of Qwen3-VL without DeepStack, and a decoder with linear attention.

Only full attention, in every fourth layer, sees positions: those in time, height and width rotate a quarter of the
features (interleaved M-RoPE). Linear attention reads the tokens of images in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ligerzoo.models.hybrid import GatedDeltaConfig
from ligerzoo.models.qwen3_5_text import Qwen3_5TextConfig, qwen3_5_decoder
from ligerzoo.models.qwen3_vision import (
    Qwen3VisionConfig,
    Qwen3VisionLM,
    Qwen3VisionLMConfig,
    interleaved_rotary,
    qwen3_tower,
)


@dataclass(frozen=True, kw_only=True)
class Qwen3_5VisionLMConfig(GatedDeltaConfig, Qwen3VisionLMConfig):
    """Configuration of Qwen3.5 with a vision tower, dense or MoE."""

    rope_theta: float = 10000.0
    mrope_section: Sequence[int] = field(default_factory=lambda: [11, 11, 10])
    image_token_id: int = 248056
    video_token_id: int = 248057
    vision_start_token_id: int = 248053
    vision_end_token_id: int = 248054


@dataclass(frozen=True, kw_only=True)
class Qwen3_5Config(Qwen3_5TextConfig, Qwen3_5VisionLMConfig):
    """Configuration of Qwen3.5. Defaults: those of transformers' Qwen3_5Config."""

    vision_config: Qwen3VisionConfig = field(default_factory=lambda: Qwen3VisionConfig(out_hidden_size=4096))


class Qwen3_5(Qwen3VisionLM):
    """Qwen3.5 with a language-model head."""

    config: Qwen3_5Config

    def __init__(self, config: Qwen3_5Config) -> None:
        decoder = qwen3_5_decoder(config, interleaved_rotary(config))
        super().__init__(config, decoder, qwen3_tower(config.vision_config))
