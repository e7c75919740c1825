"""Decay and writing strength of the gated delta rule, from two small projections.

g = -exp(A_log) * softplus(a + dt_bias)  in fp32;   beta = sigmoid(b)
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ligerzoo.kernels.checks import check_floats
from ligerzoo.kernels.dispatch import Backend, accumulation_dtype, check_backend
from ligerzoo.kernels.tiling import check_columns


def reference(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """`delta_gates` in plain torch: the specification, the CPU path and the test oracle."""
    dtype = accumulation_dtype(a.dtype)
    return -a_log.to(dtype).exp() * F.softplus(a.to(dtype) + dt_bias.to(dtype)), b.sigmoid()


def delta_gates(
    a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, *, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """The decay `g` and the writing strength `beta` of `gated_delta_rule`.

    Args:
        a: (..., V), any strides.
        b: (..., V), any strides.
        a_log: (V,), `A_log` of the models.
        dt_bias: (V,).
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Returns:
        `g`, (..., V) in fp32 (fp64 for fp64 inputs), and `beta`, (..., V) in the dtype of `b`.

    Raises:
        ValueError: the shapes do not match, or `backend` does not support the tensors.
    """
    check_floats("delta_gates", a=a, b=b, a_log=a_log, dt_bias=dt_bias)
    check_columns("delta_gates", a, a_log=a_log, dt_bias=dt_bias)
    if b.shape != a.shape:
        raise ValueError(f"delta_gates: b has shape {tuple(b.shape)}; expected {tuple(a.shape)}")
    check_backend(backend)
    return reference(a, b, a_log, dt_bias)
