"""DeepStack (Meng et al. 2024), and the vision tower of Qwen3-VL (Bai et al. 2025, section 2).

The outputs of some tower blocks become further features. The decoder adds them to the hidden states of image and
video tokens: the first features to the output of its first block, and so on.

Shapes: N patches of all images, n images, m x m patches per token, E features of the tower, H features of the decoder;
L sets of DeepStack features, M image and video tokens; B batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from ligerzoo.layers.context import Context
from ligerzoo.layers.decoder import run_blocks
from ligerzoo.layers.embedding import Embedding
from ligerzoo.layers.mlp import MLP
from ligerzoo.layers.row_parts import RowParts
from ligerzoo.layers.vision import PatchSegments, VisionTower, image_sizes


class DeepStack(NamedTuple):
    """Features to add to hidden states between the blocks of a decoder.

    Attributes:
        tokens: (M,) int64, indices of the tokens in the flattened batch, without repetitions.
        features: (M, H) for each of the first L blocks.
    """

    tokens: Tensor
    features: Sequence[Tensor]

    def add(self, x: Tensor, block: int) -> Tensor:
        """Returns the output of the block with this index plus its features; x: (B, T, H) -> (B, T, H)."""
        if block >= len(self.features):
            return x
        return x.flatten(0, 1).index_add(0, self.tokens, self.features[block].to(x.dtype)).view_as(x)

    def own(self, parts: RowParts, rows: int, tokens: int) -> Self:
        """Returns the features of the tokens of this process; those of others are 0, without a host sync."""
        index = self.tokens.new_full((rows * tokens + 1,), -1)  # of each token among those of this process, or -1
        own = parts.own(torch.arange(rows * tokens, device=index.device).view(rows, tokens), fill=rows * tokens)
        index[own.flatten()] = torch.arange(own.numel(), device=index.device)
        chosen = index[self.tokens]
        features = [parts.share(one).where((chosen >= 0)[:, None], 0.0) for one in self.features]
        return type(self)(chosen.clamp(min=0), features)


class ResampledPositionEmbedding(Embedding):
    """Learned embedding of positions on a square grid, resampled bilinearly to the grid of each image.

    Args:
        side: positions per side of the learned grid.
        embed_dim: E.
        align_corners: the centers of the corners of both grids coincide, as in `torch.nn.functional.interpolate`;
            otherwise their edges do, and what is beyond the centers of the learned grid's corners blends with 0, as in
            `torch.nn.functional.grid_sample`.
    """

    def __init__(
        self,
        side: int,
        embed_dim: int,
        *,
        align_corners: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(side**2, embed_dim, device=device, dtype=dtype)
        self.side, self.align_corners = side, align_corners

    def forward(self, positions: Tensor, sizes: Tensor) -> Tensor:  # type: ignore[override]
        """Interpolates in fp32. Returns (N, E) fp32.

        Args:
            positions: (2, N) int64, row and column of each patch.
            sizes: (2, N) int64, rows and columns of the patch's image.
        """
        taps = self.taps(positions, sizes)
        result: Tensor | None = None
        for (row, _), (row_weight, _) in taps:
            for (_, column), (_, column_weight) in taps:
                index = (row * self.side + column).to(self.weight.device)
                weight = (row_weight * column_weight).to(self.weight.device)
                term = super().forward(index).float() * weight[:, None]
                result = term if result is None else result + term
        assert result is not None
        return result

    def taps(self, positions: Tensor, sizes: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Returns the rows and columns of the learned grid that a patch reads, and their weights, each (2, N).

        The arguments are those of `forward`.
        """
        if self.align_corners:
            source = positions.float() * (self.side - 1) / (sizes - 1).clamp(min=1)
        else:
            source = (positions.float() + 0.5) * self.side / sizes - 0.5
        low = source.floor()
        weights = 1 - (source - low), source - low
        taps = low.long(), low.long() + 1
        if not self.align_corners:
            inside = [(tap >= 0) & (tap < self.side) for tap in taps]
            weights = weights[0] * inside[0], weights[1] * inside[1]
        return [(taps[0].clamp(min=0), weights[0]), (taps[1].clamp(max=self.side - 1), weights[1])]

    def extra_repr(self) -> str:
        return f"{self.side}, {self.embedding_dim}"


class MergerMLP(MLP):
    """Merges blocks of patches into one embedding each: `PatchMerger` as an MLP with a norm.

    Args:
        norm: norm of E features; or, for DeepStack features, of the m^2 * E features of a block.
        embed_dim: E.
        output_size: H.
        merged: m^2, patches per block.
        norm_merged: apply the norm after the concatenation.
    """

    def __init__(
        self,
        norm: nn.Module,
        embed_dim: int,
        output_size: int,
        *,
        merged: int,
        norm_merged: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(merged * embed_dim, merged * embed_dim, output_size, device=device, dtype=dtype)
        self.norm, self.norm_merged = norm, norm_merged

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """x: (..., E), N patches in all, ordered by block -> (N / m^2, H)."""
        if not self.norm_merged:
            return super().forward(self.norm(x).reshape(-1, self.hidden_size))
        return super().forward(self.norm(x.reshape(-1, self.hidden_size)))


class DeepStackVisionTower(VisionTower):
    """Vision tower with learned positions and with DeepStack features from some of its blocks.

    Args:
        patch_embed: patches to features.
        pos_embed: position embedding, added to them.
        blocks: blocks, called as `PreNormBlock`.
        merger: see `VisionTower`.
        merge_size: m.
        deepstack_blocks: indices of the blocks whose outputs become DeepStack features.
        deepstack_mergers: a merger for each of them.
    """

    def __init__(
        self,
        patch_embed: nn.Module,
        pos_embed: ResampledPositionEmbedding,
        blocks: Iterable[nn.Module],
        merger: nn.Module,
        *,
        merge_size: int,
        deepstack_blocks: Sequence[int] = (),
        deepstack_mergers: Iterable[nn.Module] = (),
    ) -> None:
        super().__init__(patch_embed, blocks, merger, merge_size=merge_size)
        self.pos_embed = pos_embed
        self.deepstack_blocks = tuple(deepstack_blocks)
        self.deepstack_merger_list = nn.ModuleList(deepstack_mergers)

    def forward(self, patches: Tensor, grid_thw: Tensor) -> Tensor:
        """Returns (1 + L, N / m^2, H): the embeddings, and the features in the order of the blocks.

        The arguments are those of `VisionTower.forward`.
        """
        patches, is_first, positions = self.checked(patches, grid_thw, self.merge_size)
        frames = PatchSegments(is_first, positions, patches.device)
        x = self.patch_embed(patches)
        x = frames.batch(x + self.pos_embed(positions, image_sizes(grid_thw, positions)).to(x.dtype))
        features = []
        for index, block in enumerate(self.blocks):
            x = run_blocks([block], x, frames.context, checkpoints=self.gradient_checkpointing)
            if index in self.deepstack_blocks:
                features.append(self.deepstack_merger_list[self.deepstack_blocks.index(index)](x))
        return torch.stack([self.merger(x), *features])
