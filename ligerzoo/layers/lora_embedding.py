"""Embeddings with a low-rank update."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligerzoo.layers.embedding import Embedding, ScaledEmbedding
from ligerzoo.layers.lora import LoRAMatrixLayer


class LoRAEmbedding(LoRAMatrixLayer, Embedding):
    """`Embedding` with a low-rank update of the transposed weight, (H, V), as in PEFT."""

    plain_class: ClassVar[type[nn.Module]] = Embedding
    a_name = "lora_embedding_A"
    b_name = "lora_embedding_B"

    @property
    def matrix(self) -> Tensor:
        """The transposed weight, (H, V)."""
        transposed: Tensor = self.weight.T
        return transposed

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """(H, V)."""
        rows, columns = self.weight.shape
        return columns, rows

    def init_update(self, parameter: str) -> None:
        nn.init.zeros_(getattr(self, self.a_name))
        nn.init.normal_(getattr(self, self.b_name))
        self._init_magnitude()

    def forward(self, input: Tensor) -> Tensor:
        """input: token ids, (...) -> (..., H)."""
        embeddings, update, factors = super().forward(input), self.update, self.row_factors()
        if update is None:
            return embeddings
        delta = update.scale * (F.embedding(input, update.a.T, self.padding_idx) @ update.b.T)
        embeddings = embeddings + delta.to(embeddings.dtype)
        return embeddings if factors is None else (embeddings * factors).to(embeddings.dtype)

    def merged_weight(self, parameter: str) -> Tensor:
        with torch.no_grad():
            return self._merged_matrix().T.to(self.weight.dtype, memory_format=torch.contiguous_format)


class LoRAScaledEmbedding(ScaledEmbedding, LoRAEmbedding):
    """`ScaledEmbedding` with a low-rank update, which is scaled too."""

    plain_class: ClassVar[type[nn.Module]] = ScaledEmbedding
