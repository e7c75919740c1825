"""Token embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ScaledEmbedding(nn.Embedding):
    """An embedding whose vectors are multiplied by a number (Gemma: by the square root of their size).

    Args:
        num_embeddings: V.
        embedding_dim: H.
        scale: the number, which is rounded to the weight's dtype first.
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
        """(...) token ids -> (..., H)."""
        return super().forward(input) * torch.tensor(self.scale, dtype=self.weight.dtype, device="cpu")

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scale={self.scale}"
