"""Qwen2-VL and QVQ (Wang et al. 2024, "Qwen2-VL").

    pixels -> patches -> L' x [ x += attention(norm(x));  x += mlp(norm(x)) ] -> 2 x 2 merged into one -> embeddings
    tokens, and these in the places of images and videos -> Qwen2

Distinctive: Qwen2, with images of any size and videos among its tokens. A vision transformer turns them into
embeddings, patches having rotary positions of rows and columns and seeing their own frame alone; and the decoder's
rotary positions are those in time, height and width, each of which turns some of the features (M-RoPE).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Unpack

from ligerzoo.layers import MLP, LayerNorm, VisionTower
from ligerzoo.models.causal_lm import Make
from ligerzoo.models.vision_lm import VisionLM, VisionLMConfig, VisionTowerConfig, tower_parts


@dataclass(frozen=True, kw_only=True)
class Qwen2VLVisionConfig(VisionTowerConfig):
    """The numbers of the vision tower; defaults are those of transformers' Qwen2VLVisionConfig.

    Attributes:
        embed_dim: the features of a patch.
        hidden_size: the features of a token, which are the decoder's.
        mlp_ratio: the width of the feed-forwards, in `embed_dim`s.
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
class Qwen2VLConfig(VisionLMConfig):
    """The numbers of a Qwen2-VL."""

    vision_config: Qwen2VLVisionConfig = field(default_factory=lambda: Qwen2VLVisionConfig(hidden_size=8192))


class Qwen2VL(VisionLM):
    """Qwen2-VL with a language-model head."""

    config: Qwen2VLConfig

    def __init__(self, config: Qwen2VLConfig, **make: Unpack[Make]) -> None:
        super().__init__(config, vision_tower(config.vision_config, **make), **make)


def vision_tower(config: Qwen2VLVisionConfig, **make: Unpack[Make]) -> VisionTower:
    """The tower, from patches to embeddings of the decoder's size."""
    c = config

    def norm() -> LayerNorm:
        return LayerNorm(c.embed_dim, 1e-6, **make)

    def mlp() -> MLP:
        return MLP(c.embed_dim, c.mlp_ratio * c.embed_dim, activation="quick_gelu", **make)

    return VisionTower(*tower_parts(c, norm, mlp, **make), merge_size=c.spatial_merge_size)
