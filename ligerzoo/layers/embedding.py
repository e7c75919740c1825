"""Token embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ScaledEmbedding(nn.Embedding):
    """Embedding multiplied by a constant (Gemma: the square root of the hidden size).

    Args:
        num_embeddings: V.
        embedding_dim: H.
        scale: the constant; rounded to the weight's dtype before the multiplication.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        scale: float,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, device=device, dtype=dtype)
        self.scale = scale

    def forward(self, input: Tensor) -> Tensor:
        """input: token ids, (...) -> (..., H)."""
        return super().forward(input) * torch.tensor(self.scale, dtype=self.weight.dtype, device="cpu")

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scale={self.scale}"
