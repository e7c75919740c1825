"""A linear layer whose product is computed in fp32 for inputs in half precision, such as the logits of a router.

Forward:   y = x W^T, in fp32.
Backward:  dx = dy W,   dW = dy^T x, each computed in fp32 and rounded to the dtype of its input.

Saved: x and W in their dtypes, not their fp32 copies.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ligerzoo.kernels.autograd import FusedContext, FusedFunction, once_differentiable
from ligerzoo.kernels.dispatch import accumulation_dtype, as_rows
from ligerzoo.tensor_checks import check_floats, shape_error


def reference(x: Tensor, weight: Tensor) -> Tensor:
    """`linear_fp32` in plain torch, whose backward keeps the fp32 copies of both inputs."""
    dtype = accumulation_dtype(x.dtype)
    with _without_autocast(x):
        return x.to(dtype) @ weight.to(dtype).T


def _without_autocast(x: Tensor) -> AbstractContextManager[None]:
    device = x.device.type
    is_enabled = device != "meta" and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if is_enabled else nullcontext()


class _Linear(FusedFunction):
    @staticmethod
    def forward(ctx: FusedContext, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return reference(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: FusedContext, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        with _without_autocast(x):
            dx = (dy @ weight.to(dy.dtype)).to(x.dtype) if needs_x else None
            dweight = (as_rows(dy).T @ as_rows(x).to(dy.dtype)).to(weight.dtype) if needs_weight else None
        return dx, dweight


def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """Computes `x @ weight.T` in fp32, under autocast too.

    Args:
        x: (..., H), any strides.
        weight: (O, H).

    Returns:
        (..., O) in fp32; fp64 for x in fp64.

    Raises:
        ValueError: the shapes do not match.
    """
    check_floats("linear_fp32", x=x, weight=weight)
    if weight.ndim != 2 or weight.shape[1:] != x.shape[-1:]:
        raise shape_error("linear_fp32", "(..., H) and (O, H)", x=x, weight=weight)
    if x.dtype == weight.dtype == accumulation_dtype(x.dtype) or not torch.is_grad_enabled():
        return reference(x, weight)
    result: Tensor = _Linear.apply(x, weight)
    return result
