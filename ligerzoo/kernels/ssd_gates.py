"""Step sizes and decays of Mamba-2, from a small projection.

Forward:   dt = min(max(softplus(x + dt_bias), lowest), highest),   g = -exp(A_log) * dt   in fp32
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ligerzoo.kernels.dispatch import Backend, accumulation_dtype
from ligerzoo.kernels.tiling import check_columns
from ligerzoo.kernels.torch_math import softplus
from ligerzoo.tensor_checks import check_floats


def reference(
    x: Tensor, a_log: Tensor, dt_bias: Tensor, lowest: float = 0.0, highest: float = math.inf
) -> tuple[Tensor, Tensor]:
    """`ssd_gates` in plain torch: the specification, the CPU path and the test oracle."""
    dtype = accumulation_dtype(x.dtype)
    dt = softplus(x.to(dtype) + dt_bias.to(dtype))
    dt = torch.where(dt < lowest, lowest, torch.where(dt > highest, highest, dt))  # slope 1 at the limits
    return -a_log.to(dtype).exp() * dt, dt


def ssd_gates(
    x: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    lowest: float = 0.0,
    highest: float = math.inf,
    *,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """The decay `g` and the step size `dt` of `ssd`.

    Args:
        x: (..., N) step sizes before softplus, any strides.
        a_log: (N,), `A_log` of the models.
        dt_bias: (N,).
        lowest: lower limit of the step size.
        highest: upper limit of the step size.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Returns:
        `g` and `dt`, (..., N) in fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: the shapes do not match, or `backend` does not support the tensors.
    """
    check_floats("ssd_gates", x=x, a_log=a_log, dt_bias=dt_bias)
    check_columns("ssd_gates", x, a_log=a_log, dt_bias=dt_bias)
    return reference(x, a_log, dt_bias, lowest, highest)
