"""Token embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ligerzoo.layers.linear import INIT_STD
from ligerzoo.layers.tensor_plan import TensorPlan


class Embedding(nn.Embedding):
    """`torch.nn.Embedding` whose weight is initialized with a smaller standard deviation, 0.02 instead of 1."""

    def init_weights(self, std: float = INIT_STD) -> None:
        """Samples the weight from N(0, std^2), and sets the row of `padding_idx`, if any, to 0."""
        nn.init.normal_(self.weight, std=std)
        self._fill_padding_idx_with_zero()

    def tensor_plan(self) -> TensorPlan:
        """Divides the vocabulary over the processes of tensor parallelism."""
        obstacle = None if self.padding_idx is None else "has a padding_idx"
        return TensorPlan({}, kind="embedding", obstacle=obstacle)

    def reset_parameters(self) -> None:
        """Calls `init_weights`; the constructor of `torch.nn.Embedding` calls this method."""
        self.init_weights()


class ScaledEmbedding(Embedding):
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


class NormalizedEmbedding(Embedding):
    """Embedding whose rows are normalized after the lookup (Muse Glimmer).

    Args:
        num_embeddings: V.
        embedding_dim: H.
        norm: norm of H features, such as `RMSNorm`.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        norm: nn.Module,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, device=device, dtype=dtype)
        self.norm = norm

    def forward(self, input: Tensor) -> Tensor:
        """input: token ids, (...) -> (..., H)."""
        return self.norm(super().forward(input))  # type: ignore[no-any-return]
