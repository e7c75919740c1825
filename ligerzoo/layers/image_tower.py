"""Vision transformer for images of one size (Dosovitskiy et al. 2021; SigLIP, Zhai et al. 2023), and its projector.

Shapes: n images, C channels, S side of an image in pixels, P side of a patch in pixels, L = (S / P)^2 patches per
image, E features of a patch, H features of the decoder.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligerzoo.layers.context import Context
from ligerzoo.layers.decoder import BlockStack
from ligerzoo.layers.embedding import Embedding
from ligerzoo.layers.linear import INIT_STD, initialize
from ligerzoo.layers.vision import PatchEmbedding


class ImageEmbedding(nn.Module):
    """Patch embedding of square images, row by row, plus a learned position embedding.

    Args:
        image_size: S.
        patch_size: P. Pixels beyond the largest multiple of P are ignored.
        embed_dim: E.
        channels: C.
    """

    def __init__(
        self,
        image_size: int,
        patch_size: int,
        embed_dim: int,
        *,
        channels: int = 3,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.image_shape = channels, image_size, image_size
        self.patch_size = patch_size
        patch = channels, patch_size, patch_size
        self.patch_embedding = PatchEmbedding(patch, embed_dim, bias=True, device=device, dtype=dtype)
        patches = (image_size // patch_size) ** 2
        self.position_embedding = Embedding(patches, embed_dim, device=device, dtype=dtype)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """pixel_values: (n, C, S, S), any floating dtype -> (n, L, E).

        Raises:
            ValueError: `pixel_values` has another shape.
        """
        if pixel_values.shape[1:] != self.image_shape:
            expected = ", ".join(map(str, self.image_shape))
            raise ValueError(f"pixel_values has shape {tuple(pixel_values.shape)}; expected (images, {expected})")
        patches = F.unfold(pixel_values, self.patch_size, stride=self.patch_size).transpose(1, 2)
        # Contiguous: otherwise torch rounds the product before adding the bias.
        return self.patch_embedding(patches.contiguous()) + self.position_embedding.weight  # type: ignore[no-any-return]


class ImageTower(nn.Module):
    """Images to patch features; patches attend to all patches of their image.

    Args:
        embeddings: images to patch features.
        encoder: the blocks.
        post_layernorm: applied to the output of the last block.
    """

    def __init__(self, embeddings: ImageEmbedding, encoder: BlockStack, post_layernorm: nn.Module) -> None:
        super().__init__()
        self.embeddings, self.encoder, self.post_layernorm = embeddings, encoder, post_layernorm

    def forward(self, pixel_values: Tensor) -> Tensor:
        """pixel_values: (n, C, S, S) -> (n, L, E)."""
        patches = self.embeddings(pixel_values)
        features, _ = self.encoder(patches, Context(patches))
        return self.post_layernorm(features)  # type: ignore[no-any-return]


class PoolingProjector(nn.Module):
    """Patch features to embeddings: mean over squares of patches, norm and projection (Gemma 3).

    Args:
        norm: norm of E features.
        embed_dim: E.
        hidden_size: H.
        pool_size: k, side of a square in patches; divides the side of an image in patches.
    """

    def __init__(
        self,
        norm: nn.Module,
        embed_dim: int,
        hidden_size: int,
        *,
        pool_size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.pool_size = pool_size
        self.norm = norm
        self.projection = nn.Parameter(torch.empty(embed_dim, hidden_size, device=device, dtype=dtype))
        initialize(self, PoolingProjector)

    def init_weights(self, std: float = INIT_STD) -> None:
        """Samples the projection from N(0, std^2)."""
        nn.init.normal_(self.projection, std=std)

    def forward(self, x: Tensor) -> Tensor:
        """x: (n, L, E), patches row by row -> (n, L / k^2, H)."""
        k, side = self.pool_size, math.isqrt(x.shape[1]) // self.pool_size
        pooled = x.view(len(x), side, k, side, k, x.shape[-1]).mean((2, 4)).flatten(1, 2)
        return self.norm(pooled) @ self.projection  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        embed_dim, hidden_size = self.projection.shape
        return f"{embed_dim}, {hidden_size}, pool_size={self.pool_size}"
