"""Qwen2-VL and QVQ (Wang et al. 2024, "Qwen2-VL").

    pixels -> patches -> L' x [ x += attention(norm(x));  x += mlp(norm(x)) ] -> merge 2 x 2 -> vision embeddings
    tokens -> embedding, vision embeddings at image and video tokens -> Qwen2

Distinctive: Qwen2 with images and videos of any size, a vision transformer, and M-RoPE.

The vision transformer turns images and videos into embeddings. Its patches have rotary positions by row and column, and
attend only within their own frame. The decoder's rotary positions have three axes, time, height and width; each axis
rotates some of the features (M-RoPE).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ligerzoo.layers import MLP, LayerNorm, SectionedRotaryEmbedding, VisionTower
from ligerzoo.models.config import rotary_arguments
from ligerzoo.models.qwen2 import Qwen2Config, qwen2_decoder
from ligerzoo.models.vision_lm import (
    QwenVisionLMConfig,
    SectionedVisionLM,
    VisionTowerConfig,
    patch_merger,
    tower_parts,
)


@dataclass(frozen=True, kw_only=True)
class Qwen2VLVisionConfig(VisionTowerConfig):
    """Configuration of the vision tower. Defaults: those of transformers' Qwen2VLVisionConfig.

    Attributes:
        embed_dim: features of a patch.
        hidden_size: features of an output token; equals the decoder's `hidden_size`.
        mlp_ratio: intermediate features of an MLP, as a multiple of `embed_dim`.
    """

    embed_dim: int = 1280
    hidden_size: int = 3584
    mlp_ratio: int = 4

    @property
    def patch_features(self) -> int:
        return self.embed_dim

    @property
    def token_features(self) -> int:
        return self.hidden_size


@dataclass(frozen=True, kw_only=True)
class Qwen2VisionLMConfig(Qwen2Config, QwenVisionLMConfig):
    """Configuration of Qwen2 with a vision tower.

    Defaults: those of transformers' Qwen2VLTextConfig and Qwen2_5_VLTextConfig, close to the 72B models.
    """

    vocab_size: int = 152064
    hidden_size: int = 8192
    intermediate_size: int = 29568
    num_hidden_layers: int = 80
    num_attention_heads: int = 64
    num_key_value_heads: int | None = 8
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1e6
    max_window_layers: int = field(default=80, metadata={"least": 0})


class Qwen2VisionLM(SectionedVisionLM):
    """Qwen2 with a language-model head and a vision tower; the arguments are those of `VisionLM`."""

    def __init__(self, config: Qwen2VisionLMConfig, visual: VisionTower) -> None:
        c = config
        frequencies = rotary_arguments(c)
        decoder = qwen2_decoder(c, SectionedRotaryEmbedding(c.mrope_section, *frequencies))
        super().__init__(c, decoder, visual)


@dataclass(frozen=True, kw_only=True)
class Qwen2VLConfig(Qwen2VisionLMConfig):
    """Configuration of Qwen2-VL."""

    vision_config: Qwen2VLVisionConfig = field(default_factory=lambda: Qwen2VLVisionConfig(hidden_size=8192))


class Qwen2VL(Qwen2VisionLM):
    """Qwen2-VL with a language-model head."""

    config: Qwen2VLConfig

    def __init__(self, config: Qwen2VLConfig) -> None:
        super().__init__(config, qwen2_tower(config.vision_config))


def qwen2_tower(config: Qwen2VLVisionConfig) -> VisionTower:
    """Builds the vision tower, from patches to embeddings of `hidden_size` features."""
    c = config

    def norm() -> LayerNorm:
        return LayerNorm(c.embed_dim, 1e-6)

    def mlp() -> MLP:
        return MLP(c.embed_dim, c.mlp_ratio * c.embed_dim, activation="quick_gelu")

    return VisionTower(*tower_parts(c, norm, mlp), patch_merger(c, norm()), merge_size=c.spatial_merge_size)
