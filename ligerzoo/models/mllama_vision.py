"""The vision tower of Llama 3.2 Vision.

tiles -> patches -> L' x block -> norm -> L'' x gated block -> features, and those of intermediate blocks
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from ligerzoo.checks import is_list
from ligerzoo.layers import (
    MLP,
    Attention,
    BlockStack,
    GatedPreNormBlock,
    LayerNorm,
    PatchEmbedding,
    PreNormBlock,
    TiledVisionTower,
    TileEmbedding,
    TilePositionEmbedding,
)
from ligerzoo.models.config import are_indices, check_fields, refuse_unless


@dataclass(frozen=True, kw_only=True)
class MllamaVisionConfig:
    """Configuration of the vision tower. Defaults: those of transformers' MllamaVisionConfig.

    Attributes:
        num_global_layers: number of gated blocks, which follow the `num_hidden_layers` blocks.
        vision_output_dim: output features of a patch: `hidden_size` times the last block and all
            `intermediate_layers_indices`.
        image_size: side of a tile, in pixels.
        patch_size: side of a patch, in pixels.
        intermediate_layers_indices: indices of the blocks, counted from 0, whose outputs are features too.
        supported_aspect_ratios: tile arrangements, as (rows, columns), which `aspect_ratio_ids` number from 1.
    """

    hidden_size: int = 1280
    num_hidden_layers: int = 32
    num_global_layers: int = 8
    attention_heads: int = 16
    num_channels: int = 3
    intermediate_size: int = 5120
    vision_output_dim: int = 7680
    image_size: int = 448
    patch_size: int = 14
    norm_eps: float = 1e-5
    max_num_tiles: int = 4
    intermediate_layers_indices: Sequence[int] = field(default_factory=lambda: [3, 7, 15, 23, 30])
    supported_aspect_ratios: Sequence[Sequence[int]] = field(
        default_factory=lambda: [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]]
    )

    def __post_init__(self) -> None:
        check_fields(self)
        c, kept, ratios, where = self, self.intermediate_layers_indices, self.supported_aspect_ratios, "vision_config, "
        are_kept = are_indices(kept) and all(i < c.num_hidden_layers for i in kept)
        expected = f"a list of integers from 0 to {c.num_hidden_layers - 1}"
        refuse_unless(are_kept, where + "intermediate_layers_indices", kept, expected)
        are_arrangements = is_list(ratios) and all(map(c._is_arrangement, ratios))
        expected = f"a list of [rows, columns], at most {c.max_num_tiles} tiles"
        refuse_unless(are_arrangements, where + "supported_aspect_ratios", ratios, expected)
        outputs, features = c.vision_output_dim, c.hidden_size * (1 + len(kept))
        expected = f"{features}, hidden_size * (1 + number of intermediate layers)"
        refuse_unless(outputs == features, where + "vision_output_dim", outputs, expected)
        elements = c.max_num_tiles * c.tile_length * c.hidden_size  # in one row of an embedding
        expected = "fewer than 2^63 elements in the states of an image"
        refuse_unless(elements < 2**63, where + "image_size", c.image_size, expected)
        for name, divisor in (("hidden_size", "attention_heads"), ("image_size", "patch_size")):
            size, parts = getattr(c, name), getattr(c, divisor)
            refuse_unless(size % parts == 0, where + name, size, f"a multiple of {divisor}, {parts}")

    def _is_arrangement(self, ratio: object) -> bool:
        return are_indices(ratio) and len(ratio) == 2 and 0 < ratio[0] * ratio[1] <= self.max_num_tiles

    @property
    def tile_length(self) -> int:
        """States per tile: its patches and the class embedding."""
        return (self.image_size // self.patch_size) ** 2 + 1


def tiled_tower(config: MllamaVisionConfig) -> TiledVisionTower:
    """Builds the vision tower, from tiles to the input features of the projector."""
    c, arrangements = config, len(config.supported_aspect_ratios)

    def norm(eps: float = c.norm_eps) -> LayerNorm:
        return LayerNorm(c.hidden_size, eps)

    def parts() -> tuple[nn.Module, ...]:
        attention = Attention(c.hidden_size, c.attention_heads, is_causal=False)
        return norm(), attention, norm(), MLP(c.hidden_size, c.intermediate_size)

    return TiledVisionTower(
        PatchEmbedding((c.num_channels, c.patch_size, c.patch_size), c.hidden_size),
        TileEmbedding(arrangements, c.max_num_tiles, c.hidden_size),
        TilePositionEmbedding(arrangements, c.max_num_tiles, c.tile_length, c.hidden_size),
        norm(1e-5),
        BlockStack(PreNormBlock(*parts()) for _ in range(c.num_hidden_layers)),
        norm(1e-5),
        TileEmbedding(arrangements, c.max_num_tiles, c.hidden_size),
        BlockStack(GatedPreNormBlock(*parts()) for _ in range(c.num_global_layers)),
        intermediate_layers=c.intermediate_layers_indices,
    )
