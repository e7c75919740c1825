"""Newton-Schulz orthogonalization of matrices, the core of Muon."""

from __future__ import annotations

import torch
from torch import Tensor

from ligerzoo.kernels.dispatch import accumulation_dtype

COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""a, b and c of Jordan et al. 2024: the largest slope at 0 for which the iteration stays near 1."""

STEPS = 5
_EPS = 1e-7


def orthogonalize(matrices: Tensor) -> Tensor:
    """Replaces the singular values of matrices by numbers near 1: U S V^T becomes about U V^T (Jordan et al. 2024).

    Scales each matrix X to Frobenius norm 1 and iterates five times in bf16

        A = X X^T,   X <- a X + (b A + c A^2) X,

    which maps each singular value s to a s + b s^3 + c s^5. Values from 0.01 to 1 end between 0.65 and 1.25; the
    smallest remain small. Matrices with more rows than columns are transposed, so that A is small.

    Args:
        matrices: (..., m, n), any floating-point dtype.

    Returns:
        (..., m, n) bf16. Zero matrices stay zero.
    """
    a, b, c = COEFFICIENTS
    x = matrices.reshape(-1, *matrices.shape[-2:])
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=accumulation_dtype(x.dtype))
    x = (x / norm.clamp_min(_EPS)).bfloat16()
    for _ in range(STEPS):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return (x.mT if is_tall else x).reshape(matrices.shape)
