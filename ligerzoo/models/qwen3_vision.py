"""Shared by Qwen3-VL and Qwen3.5, dense and MoE: the vision tower, with DeepStack or not, and interleaved M-RoPE."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ligerzoo.layers import (
    MLP,
    DeepStackVisionTower,
    InterleavedSectionedRotaryEmbedding,
    LayerNorm,
    MergerMLP,
    ResampledPositionEmbedding,
)
from ligerzoo.layers.rotary import are_interleaved_sections
from ligerzoo.models.config import are_indices, refuse_unless, rotary_arguments
from ligerzoo.models.vision_lm import QwenVisionLMConfig, SectionedVisionLM, VisionTowerConfig, tower_parts


@dataclass(frozen=True, kw_only=True)
class Qwen3VisionConfig(VisionTowerConfig):
    """Configuration of the vision tower. Defaults: those of transformers' Qwen3_5VisionConfig.

    Attributes:
        hidden_size: features of a patch.
        intermediate_size: intermediate features of an MLP.
        out_hidden_size: features of an output token; equals the decoder's `hidden_size`.
        num_position_embeddings: learned positions; a square number.
    """

    depth: int = 27
    hidden_size: int = 1152
    intermediate_size: int = 4304
    patch_size: int = 16
    out_hidden_size: int = 3584
    num_position_embeddings: int = 2304

    def __post_init__(self) -> None:
        super().__post_init__()
        positions, where = self.num_position_embeddings, "vision_config, num_position_embeddings"
        refuse_unless(math.isqrt(positions) ** 2 == positions, where, positions, "a square number")

    @property
    def patch_features(self) -> int:
        return self.hidden_size

    @property
    def token_features(self) -> int:
        return self.out_hidden_size


@dataclass(frozen=True, kw_only=True)
class Qwen3VLVisionConfig(Qwen3VisionConfig):
    """Configuration of a vision tower with DeepStack. Defaults: those of transformers' Qwen3VLVisionConfig.

    Attributes:
        deepstack_visual_indexes: indices of the blocks with DeepStack features, counted from 0. The i-th features that
            the tower computes are added to the output of decoder block i; without such a block they have no effect.
    """

    deepstack_visual_indexes: Sequence[int] = field(default_factory=lambda: [8, 16, 24])

    def __post_init__(self) -> None:
        super().__post_init__()
        blocks, where = self.deepstack_visual_indexes, "vision_config, deepstack_visual_indexes"
        are_different = are_indices(blocks) and len(set(blocks)) == len(blocks)
        expected, what = "a list of different integers, 0 or more", "invalid block indices"
        refuse_unless(are_different, where, blocks, expected, what)


@dataclass(frozen=True, kw_only=True)
class Qwen3VisionLMConfig(QwenVisionLMConfig):
    """Configuration of Qwen3 or Qwen3.5 with a vision tower.

    Attributes:
        attention_bias: add biases to the query, key, value and output projections.
    """

    vision_config: Qwen3VisionConfig
    vocab_size: int = 151936
    max_position_embeddings: int = 128000
    rope_theta: float = 5e5
    attention_bias: bool = False
    mrope_section: Sequence[int] = field(default_factory=lambda: [24, 20, 20])

    def validate(self) -> None:
        super().validate()
        sections, pairs = self.mrope_section, self.rotary_size // 2
        expected = f"a second and third number of at most a third of {pairs}, the number of feature pairs"
        is_valid = are_interleaved_sections(sections, pairs)
        refuse_unless(is_valid, "mrope_section", sections, expected, "invalid sections")


class Qwen3VisionLM(SectionedVisionLM):
    """Qwen3 or Qwen3.5 with a vision tower; the arguments are those of `VisionLM`.

    Text separates the frames of a video.
    """

    separates_frames = True


def interleaved_rotary(config: Qwen3VisionLMConfig) -> InterleavedSectionedRotaryEmbedding:
    """Builds the rotary embedding of the decoder."""
    c = config
    frequencies = rotary_arguments(c)
    return InterleavedSectionedRotaryEmbedding(c.mrope_section, *frequencies)


def qwen3_tower(config: Qwen3VisionConfig, deepstack_blocks: Sequence[int] = ()) -> DeepStackVisionTower:
    """Builds the vision tower, from patches to embeddings and DeepStack features of `out_hidden_size` features.

    Args:
        config: config of the tower.
        deepstack_blocks: indices of the blocks with DeepStack features.
    """
    c = config

    def norm(size: int = c.hidden_size) -> LayerNorm:
        return LayerNorm(size, 1e-6)

    def mlp() -> MLP:
        return MLP(c.hidden_size, c.intermediate_size, activation="gelu_tanh")

    def merger(*, norm_merged: bool = False) -> MergerMLP:
        merged = c.spatial_merge_size**2
        merger_norm = norm(merged * c.hidden_size if norm_merged else c.hidden_size)
        return MergerMLP(merger_norm, c.hidden_size, c.out_hidden_size, merged=merged, norm_merged=norm_merged)

    patch_embed, blocks = tower_parts(c, norm, mlp, patch_bias=True)
    pos_embed = ResampledPositionEmbedding(math.isqrt(c.num_position_embeddings), c.hidden_size)
    parts = patch_embed, pos_embed, blocks, merger()
    mergers = [merger(norm_merged=True) for _ in deepstack_blocks]
    return DeepStackVisionTower(
        *parts, merge_size=c.spatial_merge_size, deepstack_blocks=deepstack_blocks, deepstack_mergers=mergers
    )
