"""Vision tower with learned positions resampled bicubically, and a convolution that merges patches (GLM-4.1V).

Shapes: N patches of all images, P numbers of a patch, m x m patches per token, E features of the tower, H features of
the decoder.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligerzoo.layers.context import Context
from ligerzoo.layers.decoder import run_blocks
from ligerzoo.layers.deepstack import ResampledPositionEmbedding
from ligerzoo.layers.linear import Linear
from ligerzoo.layers.mlp import GatedMLP
from ligerzoo.layers.norm import LayerNorm
from ligerzoo.layers.vision import PatchEmbedding, PatchSegments, VisionTower, image_sizes

_CUBIC = -0.75  # slope of the kernel, as in `torch.nn.functional.grid_sample`


class BicubicPositionEmbedding(ResampledPositionEmbedding):
    """Learned embedding of positions on a square grid, resampled bicubically to the grid of each image.

    The edges of both grids coincide, and the learned grid continues with its border, as in
    `torch.nn.functional.grid_sample`. The arguments are `side` and `embed_dim` of `ResampledPositionEmbedding`.
    """

    def taps(self, positions: Tensor, sizes: Tensor) -> list[tuple[Tensor, Tensor]]:
        """See `ResampledPositionEmbedding.taps`."""
        source = (positions.float() + 0.5) * self.side / sizes - 0.5
        low = source.floor()
        distances = [(source - low - offset).abs() for offset in range(-1, 3)]
        near = [((_CUBIC + 2) * x - (_CUBIC + 3)) * x**2 + 1 for x in distances[1:3]]
        far = [((x - 5) * x + 8) * x * _CUBIC - 4 * _CUBIC for x in (distances[0], distances[3])]
        indices = [(low.long() + offset).clamp(0, self.side - 1) for offset in range(-1, 3)]
        return list(zip(indices, (far[0], *near, far[1]), strict=True))


class ProjectedGatedMLP(GatedMLP):
    """Gated MLP of `gelu(norm(projection(x)))`, the last layers of GLM-4.1V's vision tower.

    Args:
        hidden_size: H.
        intermediate_size: intermediate features of the gated MLP.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, intermediate_size, device=device, dtype=dtype)
        self.proj = Linear(hidden_size, hidden_size, bias=False, device=device, dtype=dtype)
        self.post_projection_norm = LayerNorm(hidden_size, 1e-5, device=device, dtype=dtype)

    def forward(self, x: Tensor, _: Context | None = None) -> Tensor:
        """x: (..., H) -> (..., H)."""
        return super().forward(F.gelu(self.post_projection_norm(self.proj(x))))


class DownsamplingVisionTower(VisionTower):
    """Vision tower with learned positions after a norm, and a convolution that merges m x m patches (GLM-4.1V).

    Args:
        pos_embed: position embedding, added to the normalized patches.
        patch_embed: patches to features.
        blocks: blocks, called as `PreNormBlock`.
        merger: merged patches to embeddings, such as `ProjectedGatedMLP`.
        post_conv_layernorm: norm before the position embedding.
        downsample: convolution of m x m patches; its features are ordered by feature, then by patch.
        post_layernorm: norm after the blocks.
        merge_size: m.
    """

    def __init__(
        self,
        pos_embed: ResampledPositionEmbedding,
        patch_embed: nn.Module,
        blocks: Iterable[nn.Module],
        merger: nn.Module,
        *,
        post_conv_layernorm: nn.Module,
        downsample: PatchEmbedding,
        post_layernorm: nn.Module,
        merge_size: int,
    ) -> None:
        super().__init__(patch_embed, blocks, merger, merge_size=merge_size)
        self.embeddings = nn.ModuleDict({"position_embedding": pos_embed})  # its name in checkpoints
        self.post_conv_layernorm, self.downsample, self.post_layernorm = post_conv_layernorm, downsample, post_layernorm

    def forward(self, patches: Tensor, grid_thw: Tensor) -> Tensor:
        """patches: (N, P) -> (N / m^2, H); see `VisionTower.forward`."""
        patches, is_first, positions = self.checked(patches, grid_thw, self.merge_size)
        frames = PatchSegments(is_first, positions, patches.device)
        x = self.post_conv_layernorm(self.patch_embed(patches))
        learned = self.embeddings["position_embedding"](positions, image_sizes(grid_thw, positions))
        x = frames.batch(x + learned.to(x.dtype))
        x = run_blocks(self.blocks, x, frames.context, checkpoints=self.gradient_checkpointing)
        blocks = self.post_layernorm(x).reshape(-1, self.merge_size**2, x.shape[-1])
        return self.merger(self.downsample(blocks.transpose(1, 2).flatten(1)))  # type: ignore[no-any-return]
