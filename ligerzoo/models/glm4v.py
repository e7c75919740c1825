"""GLM-4.1V-Thinking, 9B, and GLM-4.6V-Flash (GLM-V Team 2025, "GLM-4.5V and GLM-4.1V-Thinking").

    pixels -> patches -> norm, + positions -> L' x [ x += attention(norm(x));  x += mlp(norm(x)) ] -> norm
           -> convolution 2 x 2 -> norm -> MLP -> vision embeddings
    tokens -> embedding, vision embeddings at image tokens -> GLM-4-0414

Distinctive: GLM-4-0414 with images and videos, M-RoPE, and a tower that merges patches by a convolution.

The tower adds a learned position embedding, resampled bicubically to the grid of each image, to the rotary positions by
row and column. Text with a timestamp follows each frame of a video, which has the tokens and positions of an image.
"""

from __future__ import annotations

from dataclasses import dataclass

from ligerzoo.layers import Attention, SectionedRotaryEmbedding
from ligerzoo.models.config import heads, refuse_unless, rotary_arguments
from ligerzoo.models.glm4 import glm4_decoder
from ligerzoo.models.glm4v_vision import Glm4VisionLM, Glm4VisionLMConfig, glm4v_tower


@dataclass(frozen=True, kw_only=True)
class Glm4vConfig(Glm4VisionLMConfig):
    """Configuration of GLM-4.1V. Defaults: those of transformers' Glm4vTextConfig.

    Attributes:
        head_dim: must be None or `hidden_size // num_attention_heads`.
    """

    vocab_size: int = 151552
    intermediate_size: int = 13696
    num_key_value_heads: int | None = 2
    max_position_embeddings: int = 32768

    def validate(self) -> None:
        super().validate()
        size = self.hidden_size // self.num_attention_heads
        is_valid = self.hidden_size % self.num_attention_heads == 0 and self.head_size == size
        refuse_unless(is_valid, "head_dim", self.head_dim, "hidden_size / num_attention_heads, a whole number")


class Glm4v(Glm4VisionLM):
    """GLM-4.1V with a language-model head. Queries, keys and values always have biases."""

    config: Glm4vConfig

    def __init__(self, config: Glm4vConfig) -> None:
        c, frequencies = config, rotary_arguments(config)
        rotary = SectionedRotaryEmbedding(c.mrope_section, *frequencies, interleaved=True)

        def attention(layer: int) -> Attention:
            return Attention(*heads(c), rotary, qkv_bias=True)

        super().__init__(c, glm4_decoder(c, attention), glm4v_tower(c.vision_config))
