"""Images of one size to features of their patches, as a vision transformer has them (Dosovitskiy et al. 2021; SigLIP,
Zhai et al. 2023), and from those to embeddings for a decoder.

Shapes: n images, C channels, S pixels a side, P pixels a side of a patch, L = (S / P)^2 patches of an image, E features
of a patch, H the decoder's.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligerzoo.layers.context import Context
from ligerzoo.layers.decoder import BlockStack
from ligerzoo.layers.embedding import Embedding
from ligerzoo.layers.linear import INIT_STD
from ligerzoo.layers.vision import PatchEmbedding


class ImageEmbedding(nn.Module):
    """Square images to features of their patches, row by row, with a learned vector for each place.

    Args:
        image_size: S.
        patch_size: P. What is left of S beyond a multiple of it is not looked at.
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
        places = (image_size // patch_size) ** 2
        self.position_embedding = Embedding(places, embed_dim, device=device, dtype=dtype)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """pixel_values: (n, C, S, S), of any floating dtype -> (n, L, E).

        Raises:
            ValueError: the images have another shape.
        """
        if pixel_values.shape[1:] != self.image_shape:
            expected = ", ".join(map(str, self.image_shape))
            raise ValueError(f"pixel_values {tuple(pixel_values.shape)}; expected (images, {expected})")
        patches = F.unfold(pixel_values, self.patch_size, stride=self.patch_size).transpose(1, 2)
        # Contiguous, or torch would round the product before it adds the bias.
        return self.patch_embedding(patches.contiguous()) + self.position_embedding.weight  # type: ignore[no-any-return]


class ImageTower(nn.Module):
    """Images to features of their patches: every patch sees those of its own image.

    Args:
        embeddings: images to features.
        encoder: the blocks.
        post_layernorm: applied to the last block's output.
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
    """The mean of each square of neighbouring patches, normalized, to an embedding (Gemma 3).

    Args:
        mm_soft_emb_norm: the norm, of E features.
        embed_dim: E.
        hidden_size: H.
        pool_size: k, the side of such a square in patches, a divisor of the image's side in patches.
    """

    def __init__(
        self,
        mm_soft_emb_norm: nn.Module,
        embed_dim: int,
        hidden_size: int,
        *,
        pool_size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.pool_size = pool_size
        self.mm_soft_emb_norm = mm_soft_emb_norm
        self.mm_input_projection_weight = nn.Parameter(torch.empty(embed_dim, hidden_size, device=device, dtype=dtype))
        self.init_weights()

    def init_weights(self, std: float = INIT_STD) -> None:
        """Samples the projection from N(0, std^2)."""
        nn.init.normal_(self.mm_input_projection_weight, std=std)

    def forward(self, x: Tensor) -> Tensor:
        """x: (n, L, E), a square of patches row by row -> (n, L / k^2, H)."""
        k, side = self.pool_size, math.isqrt(x.shape[1]) // self.pool_size
        pooled = x.view(len(x), side, k, side, k, x.shape[-1]).mean((2, 4)).flatten(1, 2)
        return self.mm_soft_emb_norm(pooled) @ self.mm_input_projection_weight  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        embed_dim, hidden_size = self.mm_input_projection_weight.shape
        return f"{embed_dim}, {hidden_size}, pool_size={self.pool_size}"
