"""Low-rank updates of weights (LoRA, Hu et al. 2021), as the kernels take them: scale * B @ A."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.kernels.dispatch import accumulation_dtype, as_rows


class LowRank(NamedTuple):
    """A low-rank update of a weight, scale * b @ a.

    Attributes:
        a: (r, H), of stacked weights (E, r, H).
        b: (O, r), of stacked weights (E, O, r).
        scale: factor of the product.
    """

    a: Tensor
    b: Tensor
    scale: float

    def to(self, dtype: torch.dtype) -> LowRank:
        """Returns the update with matrices of this dtype."""
        return LowRank(self.a.to(dtype), self.b.to(dtype), self.scale)


class LowRankTerms(NamedTuple):
    """What is added to gate and up: `gate_scale * h_g @ gate_b.T` and `up_scale * h_u @ up_b.T`.

    Attributes:
        h: (..., r_g + r_u), h_g and h_u, in the dtype of gate and up.
        gate_b: (I, r_g), of any dtype: rounded to that of h.
        up_b: (I, r_u), likewise.
        gate_scale: factor.
        up_scale: factor.
    """

    h: Tensor
    gate_b: Tensor
    up_b: Tensor
    gate_scale: float
    up_scale: float

    @property
    def ranks(self) -> tuple[int, int]:
        """r_g and r_u."""
        return self.gate_b.shape[1], self.up_b.shape[1]

    def contiguous(self) -> LowRankTerms:
        """Returns the terms as kernels read them: rows of h, contiguous gate_b and up_b."""
        h, gate_b, up_b, *scales = self
        return LowRankTerms(as_rows(h), gate_b.contiguous(), up_b.contiguous(), *scales)

    def add(self, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the sums in plain torch."""
        gate_h, up_h = self.h.split(self.ranks, -1)
        gate = gate + self.gate_scale * (gate_h @ self.gate_b.to(gate_h.dtype).T)
        return gate, up + self.up_scale * (up_h @ self.up_b.to(up_h.dtype).T)


def low_rank_product(x: Tensor, update: LowRank) -> Tensor:
    """Computes scale * x @ a.T @ b.T in the dtype of x, (..., H) -> (..., O)."""
    a, b, scale = update.to(x.dtype)
    return scale * F.linear(F.linear(x, a), b)


def row_norms(weight: Tensor, update: LowRank) -> Tensor:
    """Returns the norms of the rows of W + s B A, (O,) in fp32 or fp64, without this matrix. Not differentiable.

    ||w + s b A||^2 = ||w||^2 + 2 s (w A^T) b^T + s^2 (b A A^T) b^T for each row w of W and b of B.
    """
    with torch.no_grad():
        dtype = accumulation_dtype(weight.dtype)
        a, b, _ = update.to(dtype)
        squares = torch.linalg.vector_norm(weight, dim=1, dtype=dtype).square()
        cross = F.linear(weight, update.a.to(weight.dtype)).to(dtype)
        inner = 2 * update.scale * cross + update.scale**2 * (b @ (a @ a.T))
        return (squares + (inner * b).sum(1)).clamp(min=0).sqrt()
