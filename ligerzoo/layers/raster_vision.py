"""Vision tower whose patches are ordered row by row, with windows, learned positions and pixel shuffle (Muse Glimmer).

Shapes: N patches of all images, n images, P numbers of a patch, m x m patches per token, E features of the tower.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ligerzoo.layers.decoder import run_blocks
from ligerzoo.layers.deepstack import ResampledPositionEmbedding
from ligerzoo.layers.vision import PatchSegments, VisionTower, image_sizes, window_order


class PositionedPatchEmbedding(nn.Module):
    """Linear map of patches plus a learned, resampled position embedding.

    Args:
        patch_embedding: linear layer from P numbers to E features.
        position_embedding_table: the position embedding.
    """

    def __init__(self, patch_embedding: nn.Linear, position_embedding_table: ResampledPositionEmbedding) -> None:
        super().__init__()
        self.patch_embedding, self.position_embedding_table = patch_embedding, position_embedding_table

    def forward(self, patches: Tensor, positions: Tensor, sizes: Tensor) -> Tensor:
        """patches: (N, P), any floating dtype -> (N, E); `positions` and `sizes` as in `ResampledPositionEmbedding`."""
        x = self.patch_embedding(patches.to(self.position_embedding_table.weight.dtype))
        return x + self.position_embedding_table(positions, sizes).to(x.dtype)  # type: ignore[no-any-return]


class RasterVisionTower(VisionTower):
    """Vision tower of patches that are ordered row by row, instead of by block of m x m patches (Muse Glimmer).

    As in `WindowedVisionTower`, a patch attends within a window of its frame in most blocks; windows may cut through
    tokens. Rotary positions are column and row, counted from 1. A pixel shuffle merges the patches of a token: its
    features are ordered by feature, then by patch.

    Args:
        patch_embed: patches to features. The i-th patch of a frame of h x w patches has the i-th position of a grid of
            w x h, row by row.
        ln_pre: norm before the blocks.
        blocks: blocks, called as `PreNormBlock`.
        ln_post: norm after the blocks.
        merge_size: m.
        window: side of a window, in patches.
        full_blocks: indices of the blocks in which a patch attends to its whole frame.
    """

    def __init__(
        self,
        patch_embed: PositionedPatchEmbedding,
        ln_pre: nn.Module,
        blocks: Iterable[nn.Module],
        ln_post: nn.Module,
        *,
        merge_size: int,
        window: int,
        full_blocks: Iterable[int],
    ) -> None:
        nn.Module.__init__(self)
        self.patch_embed, self.ln_pre = patch_embed, ln_pre
        self.blocks, self.ln_post = nn.ModuleList(blocks), ln_post
        self.merge_size, self.window, self.full_blocks = merge_size, window, frozenset(full_blocks)
        self.gradient_checkpointing = False

    def forward(self, patches: Tensor, grid_thw: Tensor) -> Tensor:
        """patches: (N, P) -> (N / m^2, m^2 * E); see `VisionTower.forward`."""
        patches, is_first, positions = self.checked(patches, grid_thw, 1)
        order, is_first_in_window = window_order(is_first, positions, self.window)
        by_token, _ = window_order(is_first, positions, self.merge_size)
        rotary_positions = (positions.flip(0) + 1)[:, order]
        frames, windows = (PatchSegments(x, rotary_positions, patches.device) for x in (is_first, is_first_in_window))

        height, width = image_sizes(grid_thw, positions)
        index = positions[0] * width + positions[1]
        learned = torch.stack([index // height, index % height]), torch.stack([width, height])
        x = self.ln_pre(self.patch_embed(patches, *learned))[order.to(patches.device)]
        for number, block in enumerate(self.blocks):
            segments = frames if number in self.full_blocks else windows
            x = run_blocks([block], segments.batch(x), segments.context, checkpoints=self.gradient_checkpointing)
        x = self.ln_post(x.flatten(0, 1))[order.argsort()[by_token].to(x.device)]
        return x.unflatten(0, (-1, self.merge_size**2)).transpose(1, 2).flatten(1)  # type: ignore[no-any-return]
