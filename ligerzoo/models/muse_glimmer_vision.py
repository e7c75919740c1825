"""The vision tower of Muse Glimmer: a vision transformer with windows, and learned positions resampled to any size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ligerzoo.checks import is_list
from ligerzoo.layers import (
    MLP,
    LayerNorm,
    Linear,
    PositionedPatchEmbedding,
    RasterVisionTower,
    ResampledPositionEmbedding,
)
from ligerzoo.models.config import refuse_unless
from ligerzoo.models.vision_lm import VisionTowerConfig, tower_blocks

_FULL = "full_attention"


@dataclass(frozen=True, kw_only=True)
class MuseGlimmerVisionConfig(VisionTowerConfig):
    """Configuration of the vision tower. Defaults: Muse Glimmer 30B.

    Attributes:
        hidden_size: features of a patch.
        intermediate_size: intermediate features of an MLP.
        position_side: side of the square of learned positions, and of an attention window, in patches.
        layer_norm_eps: eps of the norms before and after the blocks; that of the others is 1e-5.
        layer_types: "window_attention" or "full_attention" for each block; None: every fourth block and the last one
            use full attention.
    """

    depth: int = 50
    hidden_size: int = 1536
    intermediate_size: int = 8960
    position_side: int = 32
    layer_norm_eps: float = 1e-5
    layer_types: Sequence[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        kinds, types = ("window_attention", _FULL), self.layer_types
        is_valid = types is None or (is_list(types) and len(types) == self.depth and all(t in kinds for t in types))
        expected = f"a list of {self.depth} entries, each {' or '.join(kinds)}"
        refuse_unless(is_valid, "vision_config, layer_types", types, expected, "invalid layer types")

    @property
    def patch_features(self) -> int:
        return self.hidden_size

    @property
    def full_blocks(self) -> list[int]:
        """Indices of the blocks in which a patch attends to its whole frame."""
        default = [_FULL if i % 4 == 3 or i == self.depth - 1 else "" for i in range(self.depth)]
        return [i for i, kind in enumerate(self.layer_types or default) if kind == _FULL]


def glimmer_tower(config: MuseGlimmerVisionConfig) -> RasterVisionTower:
    """Builds the vision tower."""
    c = config

    def norm(eps: float = 1e-5) -> LayerNorm:
        return LayerNorm(c.hidden_size, eps)

    patch = Linear(c.temporal_patch_size * c.in_channels * c.patch_size**2, c.hidden_size, bias=False)
    table = ResampledPositionEmbedding(c.position_side, c.hidden_size, align_corners=False)
    embedding = PositionedPatchEmbedding(patch, table)
    blocks = tower_blocks(c, norm, lambda: MLP(c.hidden_size, c.intermediate_size))
    parts = embedding, norm(c.layer_norm_eps), blocks, norm(c.layer_norm_eps)
    return RasterVisionTower(*parts, merge_size=c.spatial_merge_size, window=c.position_side, full_blocks=c.full_blocks)
