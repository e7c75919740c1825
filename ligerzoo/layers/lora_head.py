"""The language-model head with a low-rank update."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.layers.head import LMHead
from ligerzoo.layers.lora import LoRAMatrixLayer, add_update_product
from ligerzoo.layers.projection import linear

_HEAD_MULTIPLE = 64
"""The kernels of the loss head are fastest for a multiple of this number of features."""


class LoRAHead(LoRAMatrixLayer, LMHead):
    """`LMHead` with a low-rank update.

    The loss computes logits as [h, s h A^T] [W, B]^T: as exact as the logits without update, and without the matrix
    W + s B A, whose rounding to bf16 would lose small updates. [W, B] is a copy of the weight that exists during the
    loss, and so does its gradient, of which only the columns of B are kept.
    """

    plain_class = LMHead

    def product(self, hidden: Tensor) -> Tensor:
        """(..., H) -> (..., V)."""
        y = add_update_product(linear(hidden, self.weight), hidden, self)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def loss_inputs(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Returns hidden states and a weight whose product, plus the bias, are the logits."""
        hidden, weight = super().loss_inputs(hidden)
        update, factors = self.update, self.row_factors()
        if update is None:
            return hidden, weight
        a, b, scale = update.to(weight.dtype)
        dropped, padding = self.dropped(hidden), -len(a) % _HEAD_MULTIPLE
        inner = scale * F.linear(hidden if dropped is None else dropped, a)
        weight = torch.cat([weight, F.pad(b, (0, padding))], 1)
        weight = weight if factors is None else (weight * factors[:, None]).to(weight.dtype)
        return torch.cat([hidden, F.pad(inner, (0, padding)).to(hidden.dtype)], -1), weight
