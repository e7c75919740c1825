"""Elementwise functions in plain torch whose result for an element does not depend on its position.

`torch.sigmoid`, `F.silu` and `F.softplus` on a CPU compute the last elements of a tensor, after those that fill vector
registers, with other code, which differs in the last bit. So a token would have another result in another row. `exp`,
`log1p` and division do not differ.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LARGE = 80.0
"""exp(80) is finite in fp32. sigmoid(-80) = 2e-35."""


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x), in the dtype of `x`."""
    return 1.0 / _one_plus_exp(-x)


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), in the dtype of `x`."""
    return x / _one_plus_exp(-x)


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), in the dtype of `x`."""
    linear = 40.0  # from here on, log(1 + e^x) - x is below the rounding error of fp64
    return torch.where(x >= linear, x, x.clamp(max=linear).exp().log1p())  # clamp's slope at 40 depends on torch


def _one_plus_exp(x: Tensor) -> Tensor:
    """1 + e^x; clamped, because an infinity would give NaN gradients."""
    return 1.0 + x.clamp(max=_LARGE).exp()
