"""Qwen3-VL, dense models (Bai et al. 2025, "Qwen3-VL Technical Report").

    pixels -> patches + positions -> L' x [ x += attention(norm(x));  x += mlp(norm(x)) ] -> merge 2 x 2 -> embeddings
    tokens -> embedding, vision embeddings at image and video tokens -> Qwen3

Distinctive: Qwen3 with images and videos, interleaved M-RoPE, and features of inner tower blocks (DeepStack).

The tower adds a learned position embedding, resampled to the grid of each image, to the rotary positions by row and
column. The outputs of a few of its blocks are merged, too, and added to the outputs of the decoder's first blocks at
image and video tokens. Text with a timestamp precedes each frame of a video, which has the positions of an image.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ligerzoo.layers import GatedMLP
from ligerzoo.models.qwen3 import qwen3_decoder
from ligerzoo.models.qwen3_vision import (
    Qwen3VisionLM,
    Qwen3VisionLMConfig,
    Qwen3VLVisionConfig,
    interleaved_rotary,
    qwen3_tower,
)


@dataclass(frozen=True, kw_only=True)
class Qwen3VLConfig(Qwen3VisionLMConfig):
    """Configuration of Qwen3-VL. Defaults: those of transformers' Qwen3VLTextConfig."""

    intermediate_size: int = 22016
    num_key_value_heads: int | None = 32
    head_dim: int | None = 128
    vision_config: Qwen3VLVisionConfig = field(default_factory=lambda: Qwen3VLVisionConfig(out_hidden_size=4096))


class Qwen3VL(Qwen3VisionLM):
    """Qwen3-VL with a language-model head."""

    config: Qwen3VLConfig

    def __init__(self, config: Qwen3VLConfig) -> None:
        c = config

        def mlp(layer: int) -> GatedMLP:
            return GatedMLP(c.hidden_size, c.intermediate_size)

        rotary = interleaved_rotary(c)
        decoder = qwen3_decoder(c, lambda layer: rotary, mlp, bias=c.attention_bias)
        v = c.vision_config
        super().__init__(c, decoder, qwen3_tower(v, v.deepstack_visual_indexes))
